"""Build the kernels of a problem into code objects that a launcher which knows nothing of this package can run.

>>> built = build(problem, "gfx950")              # doctest: +SKIP
>>> built.name, built.grid, built.block           # doctest: +SKIP
('mla_decode_bf16_h16_r16_block_table64_balanced', (512, 1, 1), (256, 1, 1))
>>> write_manifest([built], "out")                # doctest: +SKIP
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import BackendUnavailable, InvalidArgument
from ...problem import DecodeProblem
from .spec import (
    COMBINE_ARGS,
    COMBINE_THREADS,
    DECODE_ARGS,
    LDS_LIMIT,
    NUM_THREADS,
    PLAN_ARGS,
    PRECISIONS,
    CombineSpec,
    DecodeSpec,
    PlanSpec,
)  # fmt: skip
from .splits import work_shape
from .toolchain import compile_launcher, flydsl_missing, flydsl_version, resources

__all__ = ["TARGETS", "Argument", "BuiltKernel", "build", "write_manifest"]

TARGETS = ("gfx950",)
_CODES = {"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One kernel argument: ``kind`` is "i64", "i32", "f32" or "ptr" (an 8-byte address), ``offset`` its place in the kernarg segment."""

    name: str
    kind: str
    offset: int
    meaning: str


@dataclass(frozen=True)
class BuiltKernel:
    """A compiled kernel and everything needed to launch it."""

    name: str  #: symbol in the code object
    language: str  #: "flydsl" | "triton"
    target: str
    grid: tuple[int, int, int]  #: blocks
    block: tuple[int, int, int]  #: threads
    lds_bytes: int  #: LDS a block takes in all
    dynamic_lds_bytes: int  #: of these, what the launch has to ask for
    arguments: tuple[Argument, ...]
    kernarg_bytes: int
    problem: str
    constants: dict[str, int | float]  #: argument values that follow from the problem alone
    resources: dict[str, int]
    hsaco: bytes = field(repr=False)
    isa: str = field(repr=False)
    compiler: str = ""
    plan: BuiltKernel | None = None  #: to be launched before this one, on the same stream
    combine: BuiltKernel | None = None  #: to be launched after this one, on the same stream

    @property
    def launches(self) -> tuple[BuiltKernel, ...]:
        """The kernels of a decode step, in order."""
        return tuple(k for k in (self.plan, self, self.combine) if k is not None)

    @property
    def file(self) -> str:
        """A file name for the code object, the same for the same code."""
        return f"{self.language}_{self.name}_{hashlib.sha256(self.hsaco).hexdigest()[:12]}.hsaco"

    def pack(self, values: dict[str, int | float]) -> bytes:
        """The kernarg segment for argument ``values`` (addresses as ints); ``constants`` need not be repeated."""
        values = self.constants | values
        segment = bytearray(self.kernarg_bytes)
        for a in self.arguments:
            if a.name not in values:
                raise InvalidArgument(f"values: kernel {self.name} needs '{a.name}' ({a.meaning}).")
            struct.pack_into("<" + _CODES[a.kind], segment, a.offset, values[a.name])
        return bytes(segment)

    def describe(self) -> dict:
        """This launch as a manifest entry: everything but the code."""
        return {
            "file": self.file,
            "name": self.name,
            "language": self.language,
            "compiler": self.compiler,
            "target": self.target,
            "grid": list(self.grid),
            "block": list(self.block),
            "lds_bytes": self.lds_bytes,
            "dynamic_lds_bytes": self.dynamic_lds_bytes,
            "wavefront_size": 64,
            "kernarg_bytes": self.kernarg_bytes,
            "arguments": [{"name": a.name, "kind": a.kind, "offset": a.offset, "meaning": a.meaning} for a in self.arguments],
            "constants": self.constants,
            "resources": self.resources,
        }


def lay_out(table: tuple[tuple[str, str, str], ...]) -> tuple[tuple[Argument, ...], int]:
    """Arguments with their offsets (natural alignment), and the size of the segment."""
    arguments, at = [], 0
    for name, kind, meaning in table:
        size = struct.calcsize("<" + _CODES[kind])
        at = -(-at // size) * size
        arguments.append(Argument(name, kind, at, meaning))
        at += size
    return tuple(arguments), -(-at // 8) * 8


def _placeholders(table) -> list:
    import flydsl.expr as fx

    kinds = {"i64": fx.Int64, "i32": fx.Int32, "f32": fx.Float32}
    return [kinds[kind](0) for _, kind, _ in table] + [fx.Int32(1)]  # the launcher's last argument is the grid


@functools.lru_cache(maxsize=256)
def _compile(spec: DecodeSpec | CombineSpec | PlanSpec, target: str) -> tuple[bytes, str]:
    if isinstance(spec, DecodeSpec):
        from .decode import make_decode

        # A block has one wave for each of a compute unit's four SIMDs.
        launcher, table, hints = make_decode(spec), DECODE_ARGS, {"waves_per_eu": spec.blocks_per_cu}
    elif isinstance(spec, CombineSpec):
        from .combine import make_combine

        launcher, table, hints = make_combine(spec), COMBINE_ARGS, {}
    else:
        from .plan import make_plan

        launcher, table, hints = make_plan(spec), PLAN_ARGS, {}
    return compile_launcher(launcher, spec.name, _placeholders(table), target=target, hints=hints)


def build(problem: DecodeProblem, target: str = "gfx950", *, precision: str = "16bit") -> BuiltKernel:
    """Compile the FlyDSL kernels that run ``problem``, on any machine with flydsl installed: no GPU, no ROCm.

    Args:
        problem: shapes and options; the grid covers them as a capacity.
        target: "gfx950".
        precision: "16bit", or "a8" (fp8 caches): queries rounded to e4m3, errors of 2.5e-2 instead of 2e-3.

    Returns:
        The decode kernel; ``launches`` lists it with what has to run before and after it (plan, combine).

    Raises:
        InvalidArgument: another target or precision. BackendUnavailable: flydsl is missing, or the kernels do not cover the problem.
    """
    from .backend import unsupported

    if target not in TARGETS:
        raise InvalidArgument(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
    if precision not in PRECISIONS:
        raise InvalidArgument(f"precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}.")
    if precision == "a8" and problem.format != "fp8":
        raise InvalidArgument(f"precision: 'a8' multiplies fp8 caches, this one is {problem.format}. Use '16bit'.")
    reason = flydsl_missing() or unsupported(problem)
    if reason:
        raise BackendUnavailable(f"cannot build FlyDSL kernels for {problem}: {reason}.")
    shape = work_shape(problem, precision=precision)
    spec = DecodeSpec.for_problem(problem, shape.split_mode, precision)
    batch = problem.batch
    q_len = 0 if problem.ragged_q or not batch else problem.total_q // batch
    plan = combine = None
    if spec.planned:
        plan_spec = PlanSpec(problem.table_kind, problem.page_size, shape.split_mode)
        plan_constants = {
            "batch": batch,
            "num_workers": shape.num_workers,
            "split_size": shape.split_size,
            "fan_log2": 8 - max(0, min(batch, NUM_THREADS) - 1).bit_length(),
        }
        plan = _built(plan_spec, PLAN_ARGS, target, NUM_THREADS, 1, problem, plan_constants)
    if shape.split_mode != "one":
        combine_spec = CombineSpec(problem.num_heads, problem.ragged_q, spec.planned)
        max_rows = problem.num_heads * problem.max_q_len
        merge_constants = {"max_rows": max_rows, "row_capacity": shape.row_capacity, "q_len": q_len, "num_splits": shape.num_splits}
        combine = _built(combine_spec, COMBINE_ARGS, target, COMBINE_THREADS, batch * max_rows, problem, merge_constants)
    constants: dict[str, int | float] = {
        "max_items": shape.max_items,
        "row_capacity": shape.row_capacity,
        "total_q": problem.total_q,
        "q_len": q_len,
        "num_splits": shape.num_splits,
        "split_size": shape.split_size,
        "logit_cap": problem.logit_cap,
        "reserved": 0,
    }
    return _built(spec, DECODE_ARGS, target, NUM_THREADS, shape.grid, problem, constants, plan, combine)


def _built(spec, table, target, threads, grid, problem, constants, plan=None, combine=None) -> BuiltKernel:
    hsaco, isa = _compile(spec, target)
    arguments, size = lay_out(table)
    used = resources(isa)
    assert used["kernarg_bytes"] == size, (spec.name, used["kernarg_bytes"], size)
    if used["lds_bytes"] > LDS_LIMIT:
        raise BackendUnavailable(f"kernel {spec.name} needs {used['lds_bytes']} bytes of LDS, {target} has {LDS_LIMIT}.")
    return BuiltKernel(
        name=spec.name, language="flydsl", target=target, grid=(grid, 1, 1), block=(threads, 1, 1), lds_bytes=used["lds_bytes"],
        dynamic_lds_bytes=0, arguments=arguments, kernarg_bytes=size, problem=str(problem), constants=constants,
        resources=used, hsaco=hsaco, isa=isa, compiler=f"flydsl {flydsl_version()}", plan=plan,
        combine=combine,
    )  # fmt: skip


PACKING = "little-endian; each argument at its offset in a kernarg segment of kernarg_bytes; i64 and ptr 8 bytes, i32 and f32 4"


def write_manifest(kernels: list[BuiltKernel], folder: str | Path) -> Path:
    """Write the code objects of some problems and ``manifest.json`` into ``folder``.

    The manifest lists, for each problem, its launches in order with grid, block, LDS and every argument: ``constants`` holds
    the values that follow from the problem, the rest is the caller's (addresses, strides, sm_scale).

    Args:
        kernels: what :func:`build` (or ``build_triton``) returned, one a problem.

    Returns:
        The path of the manifest.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for kernel in kernels:
        for launch in kernel.launches:
            (folder / launch.file).write_bytes(launch.hsaco)
    manifest = {
        "format": 1,
        "packing": PACKING,
        "problems": [{"problem": k.problem, "launches": [launch.describe() for launch in k.launches]} for k in kernels],
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    return path

"""Build the kernels of a problem into code objects that a launcher which knows nothing of this package can run.

>>> built = build(problem, "gfx950")              # doctest: +SKIP
>>> built.name, built.grid, built.block           # doctest: +SKIP
('mla_decode_bf16_h16_r16_block_table64_chunk', (512, 1, 1), (256, 1, 1))
>>> write_manifest([built], "out")                # doctest: +SKIP
"""

from __future__ import annotations

import functools
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

from ...errors import BackendUnavailable, InvalidArgument
from ...problem import DecodeProblem
from .plan import choose_splits
from .spec import COMBINE_ARGS, COMBINE_THREADS, DECODE_ARGS, LDS_LIMIT, NUM_THREADS, CombineSpec, DecodeSpec
from .toolchain import FLYDSL_VERSION, compile_launcher, flydsl_missing, resources

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
    combine: BuiltKernel | None = None  #: launched after this one, on the same stream

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
        """The manifest entry: everything but the code."""
        return {
            "name": self.name,
            "language": self.language,
            "target": self.target,
            "file": f"{self.name}.hsaco",
            "grid": list(self.grid),
            "block": list(self.block),
            "lds_bytes": self.lds_bytes,
            "dynamic_lds_bytes": self.dynamic_lds_bytes,
            "wavefront_size": 64,
            "kernarg_bytes": self.kernarg_bytes,
            "packing": "little-endian, each argument at its offset, the rest zero",
            "arguments": [{"name": a.name, "kind": a.kind, "offset": a.offset, "meaning": a.meaning} for a in self.arguments],
            "constants": self.constants,
            "resources": self.resources,
            "problem": self.problem,
            "then": None if self.combine is None else self.combine.name,
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


@functools.lru_cache(maxsize=64)
def _compile_decode(spec: DecodeSpec, target: str) -> tuple[bytes, str]:
    from .decode import make_decode

    # 16 and 32 rows leave room for two blocks a compute unit (LDS), so registers are held to half.
    hints = {"waves_per_eu": 1 if spec.row_tiles == 4 else 2}
    return compile_launcher(make_decode(spec), spec.name, _placeholders(DECODE_ARGS), target=target, hints=hints)


@functools.lru_cache(maxsize=64)
def _compile_combine(spec: CombineSpec, target: str) -> tuple[bytes, str]:
    from .combine import make_combine

    return compile_launcher(make_combine(spec), spec.name, _placeholders(COMBINE_ARGS), target=target, hints={})


def build(problem: DecodeProblem, target: str = "gfx950") -> BuiltKernel:
    """Compile the FlyDSL kernels that run ``problem``, on any machine with flydsl installed: no GPU, no ROCm.

    Args:
        problem: shapes and options; the grid covers them as a capacity.
        target: "gfx950".

    Returns:
        The decode kernel. If the problem is split, its ``combine`` is to be launched after it.

    Raises:
        InvalidArgument: another target. BackendUnavailable: flydsl is missing, or the kernels do not cover the problem.
    """
    from .backend import unsupported

    if target not in TARGETS:
        raise InvalidArgument(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
    reason = flydsl_missing() or unsupported(problem)
    if reason:
        raise BackendUnavailable(f"cannot build FlyDSL kernels for {problem}: {reason}.")
    choice = choose_splits(problem)
    spec = DecodeSpec.for_problem(problem, choice.mode)
    combine = None
    if choice.mode != "one":
        combine_spec = CombineSpec(problem.num_heads)
        rows = problem.total_q * problem.num_heads
        combine = _built(
            combine_spec.name, COMBINE_ARGS, _compile_combine(combine_spec, target), target, COMBINE_THREADS, rows, problem,
            {"num_rows": rows, "num_splits": choice.num_splits},
        )  # fmt: skip
    constants = {
        "batch": problem.batch,
        "total_q": problem.total_q,
        "q_len": 0 if problem.ragged_q or not problem.batch else problem.total_q // problem.batch,
        "num_splits": choice.num_splits,
        "split_keys": choice.split_keys,
        "logit_cap": problem.logit_cap,
    }
    grid = problem.batch * choice.row_blocks * choice.num_splits
    return _built(
        spec.name, DECODE_ARGS, _compile_decode(spec, target), target, NUM_THREADS, grid, problem, constants, combine
    )


def _built(name, table, compiled, target, threads, grid, problem, constants, combine=None) -> BuiltKernel:
    hsaco, isa = compiled
    arguments, size = lay_out(table)
    used = resources(isa)
    assert used["kernarg_bytes"] == size, (used["kernarg_bytes"], size)
    if used["lds_bytes"] > LDS_LIMIT:
        raise BackendUnavailable(f"kernel {name} needs {used['lds_bytes']} bytes of LDS, {target} has {LDS_LIMIT}.")
    return BuiltKernel(
        name=name, language="flydsl", target=target, grid=(grid, 1, 1), block=(threads, 1, 1), lds_bytes=used["lds_bytes"],
        dynamic_lds_bytes=0, arguments=arguments, kernarg_bytes=size, problem=str(problem), constants=constants,
        resources=used, hsaco=hsaco, isa=isa, combine=combine,
    )  # fmt: skip


def write_manifest(kernels: list[BuiltKernel], folder: str | Path) -> Path:
    """Write each kernel's code object and ``manifest.json`` into ``folder``; combine kernels come along.

    Returns:
        The path of the manifest.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    by_name: dict[str, BuiltKernel] = {}
    for kernel in kernels:
        for k in (kernel, kernel.combine):
            if k is not None:
                by_name[k.name] = k
    for kernel in by_name.values():
        (folder / f"{kernel.name}.hsaco").write_bytes(kernel.hsaco)
    manifest = {
        "format": 1,
        "compiler": f"flydsl {FLYDSL_VERSION}",
        "kernels": [k.describe() for k in by_name.values()],
    }
    path = folder / "manifest.json"
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    return path

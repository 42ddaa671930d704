"""Build the kernels of a problem into code objects that a launcher which knows nothing of this package can run (manifest.py).

>>> built = build(problem, "gfx950")              # doctest: +SKIP
>>> built.name, built.grid, built.block           # doctest: +SKIP
('mla_decode_bf16_h16_r16_block_table64_balanced', (512, 1, 1), (256, 1, 1))
"""

from __future__ import annotations

import functools
import hashlib
import struct
from dataclasses import dataclass, field

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

__all__ = ["ARGUMENT_BYTES", "TARGETS", "Argument", "BuiltKernel", "build", "lay_out"]

TARGETS = ("gfx950",)
_CODES = {"ptr": "Q", "i64": "q", "i32": "i", "f32": "f"}
#: Bytes of each kind of argument.
ARGUMENT_BYTES = {kind: struct.calcsize("<" + code) for kind, code in _CODES.items()}


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
    problem: DecodeProblem  #: what it was built for; the grid covers it as a capacity
    constants: dict[str, int | float]  #: argument values that follow from the problem alone
    resources: dict[str, int]
    hsaco: bytes = field(repr=False)
    isa: str = field(repr=False)
    compiler: str = ""
    precision: str = "16bit"
    num_items: int = 0  #: work items that the grid has room for
    small_cache: bool = False  #: cache tensors have to be below 2 GiB
    partial_rows: int = 0  #: rows that partial results need room for
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

    @property
    def occupancy(self) -> dict[str, int]:
        """Waves that fit a SIMD by registers (512 a lane, at most 8 waves), and blocks that fit a compute unit."""
        vgprs = -(-max(1, self.resources["vgprs"]) // 8) * 8
        waves = min(8, 512 // vgprs)
        waves_a_block = -(-self.block[0] // 64)
        by_lds = LDS_LIMIT // self.lds_bytes if self.lds_bytes else 32
        return {"waves_per_simd": waves, "blocks_per_cu": min(4 * waves // waves_a_block, by_lds)}


def lay_out(table: tuple[tuple[str, str, str], ...]) -> tuple[tuple[Argument, ...], int]:
    """Arguments with their offsets (natural alignment), and the size of the segment."""
    arguments, at = [], 0
    for name, kind, meaning in table:
        size = ARGUMENT_BYTES[kind]
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
    return _built(
        spec, DECODE_ARGS, target, NUM_THREADS, shape.grid, problem, constants, plan=plan, combine=combine, precision=precision,
        num_items=shape.max_items, partial_rows=shape.partial_rows,
    )  # fmt: skip


def _built(spec, table, target, threads, grid, problem, constants, **others) -> BuiltKernel:
    hsaco, isa = _compile(spec, target)
    arguments, size = lay_out(table)
    used = resources(isa)
    assert used["kernarg_bytes"] == size, (spec.name, used["kernarg_bytes"], size)
    if used["lds_bytes"] > LDS_LIMIT:
        raise BackendUnavailable(f"kernel {spec.name} needs {used['lds_bytes']} bytes of LDS, {target} has {LDS_LIMIT}.")
    return BuiltKernel(
        name=spec.name, language="flydsl", target=target, grid=(grid, 1, 1), block=(threads, 1, 1), lds_bytes=used["lds_bytes"],
        dynamic_lds_bytes=0, arguments=arguments, kernarg_bytes=size, problem=problem, constants=constants,
        resources=used, hsaco=hsaco, isa=isa, compiler=f"flydsl {flydsl_version()}", **others,
    )  # fmt: skip

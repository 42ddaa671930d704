"""Built kernels without code, for tests that need no compiler: the launches, arguments and constants of a problem."""

from __future__ import annotations

from leanmla.kernels.flydsl.build import BuiltKernel, lay_out
from leanmla.kernels.flydsl.spec import COMBINE_ARGS, DECODE_ARGS, PLAN_ARGS
from leanmla.kernels.flydsl.splits import work_shape

RESOURCES = {"vgprs": 200, "agprs": 0, "sgprs": 60, "vgpr_spills": 0, "sgpr_spills": 0, "scratch_bytes": 0}


def pretend(name: str, table, grid: int, problem, constants: dict, **others) -> BuiltKernel:
    """A kernel as build() returns it, without code."""
    arguments, size = lay_out(table)
    return BuiltKernel(
        name=name, language="flydsl", target="gfx950", grid=(grid, 1, 1), block=(256, 1, 1), lds_bytes=0, dynamic_lds_bytes=0,
        arguments=arguments, kernarg_bytes=size, problem=problem, constants=constants, resources=RESOURCES, hsaco=name.encode(), isa="",
        **others,
    )  # fmt: skip


def pretend_build(problem, target="gfx950", precision="16bit") -> BuiltKernel:
    """What build() returns for ``problem``, planned whatever the problem."""
    shape = work_shape(problem)
    q_len = problem.total_q // problem.batch
    plan_constants = {"batch": problem.batch, "num_workers": 9, "split_size": 0, "fan_log2": 6}
    plan = pretend("plan", PLAN_ARGS, 1, problem, plan_constants)
    merge_constants = {"max_rows": 16, "row_capacity": 16, "q_len": q_len, "num_splits": 1}
    combine = pretend("combine", COMBINE_ARGS, 3, problem, merge_constants)
    constants = {
        "max_items": shape.max_items, "row_capacity": shape.row_capacity, "total_q": problem.total_q, "q_len": q_len,
        "num_splits": 1, "split_size": 0, "logit_cap": 0.0, "reserved": 0,
    }  # fmt: skip
    return pretend(
        "decode", DECODE_ARGS, shape.grid, problem, constants, plan=plan, combine=combine, precision=precision,
        num_items=shape.max_items, partial_rows=shape.partial_rows,
    )  # fmt: skip

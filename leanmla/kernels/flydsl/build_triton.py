"""Build the portable Triton kernels for gfx950 into the same printable values as the FlyDSL ones: no GPU, no ROCm.

Triton compiles per combination of compile-time arguments; those come from the backend itself (``decode_constants``), so what is built
here is what the backend would run on that device.
"""

from __future__ import annotations

import re

from ...device import DeviceInfo, triton_missing
from ...errors import BackendUnavailable, InvalidArgument
from ...problem import DIMS, DecodeProblem
from ...split_plan import CHUNK_CANDIDATES
from .build import TARGETS, BuiltKernel, lay_out
from .spec import LDS_LIMIT
from .splits import MI355X_COMPUTE_UNITS
from .toolchain import resources

__all__ = ["build_triton"]

#: The card a build is for.
MI355X = DeviceInfo("hip", "AMD Instinct MI355X", "gfx950", MI355X_COMPUTE_UNITS, LDS_LIMIT, 288 << 30)

_INT32_POINTERS = (
    "splits_ptr", "first_ptr", "items_ptr", "num_items_ptr", "factors_ptr", "page_ids_ptr", "kv_indptr_ptr", "kv_last_ptr",
    "seqlens_ptr", "qo_indptr_ptr",
)  # fmt: skip
#: Strides that pass 2**31 in large caches.
_LONG = ("stride_page", "stride_scale_page")
#: Addresses, and strides in elements, that are multiples of 16. Rows are then read and written 16 bytes at a time; without the
#: strides among them q would be read with 36 two-byte loads. Triton's own launcher finds the same from the values.
_ALIGNED = (
    "out_ptr", "partial_out_ptr", "q_ptr", "data_ptr", "stride_q_token", "stride_q_head", "stride_out_token", "stride_out_head",
)  # fmt: skip
#: Offsets from such a pointer fit 32 bits: buffer instructions, and with a bf16 cache 276 instead of 392 registers.
_LIMIT_32 = 1 << 31


def _argument_type(name: str, problem: DecodeProblem) -> str:
    if name in _INT32_POINTERS:
        return "*i32"
    if name.endswith("_ptr"):
        return {
            "q_ptr": f"*{problem.q_dtype}", "out_ptr": f"*{problem.q_dtype}",
            "data_ptr": "*bf16" if problem.format == "bf16" else "*u8",
            "scale_ptr": "*u8" if problem.format == "mxfp4" else "*fp32",
        }.get(name, "*fp32")  # fmt: skip
    if name in ("sm_scale", "logit_cap"):
        return "fp32"
    return "i64" if name in _LONG else "i32"


#: What each argument is; the shapes of scratch follow from ``constants`` and the grid.
_MEANINGS = {
    "out_ptr": "address of out [total_q, num_heads, 512] in q's dtype, multiple of 16",
    "lse_ptr": "address of lse fp32 [total_q, num_heads], natural log; unused unless the problem returns it",
    "partial_out_ptr": "address of fp32 [grid blocks, rows a block, 512], multiple of 16",
    "partial_lse_ptr": "address of fp32 [grid blocks, rows a block], base 2",
    "splits_ptr": "address of int32 [batch], scratch: splits of each sequence",
    "first_ptr": "address of int32 [batch], scratch: first item of each sequence",
    "items_ptr": "address of int32 [grid blocks, 2], scratch: what each item covers",
    "num_items_ptr": "address of int32 [1], scratch: items in all",
    "factors_ptr": "address of int32 [32]: the planner's chunk candidates in sixteenths (split_plan.CHUNK_CANDIDATES), then 0",
    "q_ptr": "address of q [total_q, num_heads, 576], multiple of 16",
    "data_ptr": "address of the cache data [pages, page_size, bytes of a token], multiple of 16",
    "scale_ptr": "address of: fp8 fp32 [1]; mxfp4 E8M0 bytes [pages, page_size, 18]; otherwise any",
    "page_ids_ptr": "address of int32 page ids: csr [n], block_table [batch, width]",
    "kv_indptr_ptr": "address of int32 [batch+1]: csr pages, contiguous tokens",
    "kv_last_ptr": "address of int32 [batch]: csr, keys in each sequence's last page",
    "seqlens_ptr": "address of int32 [batch]: block_table, keys of each sequence",
    "qo_indptr_ptr": "address of int32 [batch+1] query row offsets; unused if uniform",
    "batch": "sequences",
    "num_workers": "items that run at the same time",
    "num_splits": "splits of every sequence, if fixed",
    "split_size": "keys of a split, if fixed",
    "q_len": "query rows a sequence if uniform",
    "sm_scale": "factor on the logits",
    "logit_cap": "cap on the logits; read only by kernels built with one",
    "stride_q_token": "elements between query rows, multiple of 16",
    "stride_q_head": "elements between heads of q, multiple of 16",
    "stride_out_token": "elements between rows of out, multiple of 16",
    "stride_out_head": "elements between heads of out, multiple of 16",
    "stride_lse_token": "elements between rows of lse",
    "stride_page": "units of 16 bytes between pages of the cache (between tokens if contiguous)",
    "stride_scale_page": "mxfp4: bytes between pages of the scales",
    "stride_table": "block_table: page ids between rows of the table",
    "row_groups": "blocks for the rows of a sequence: num_heads * most query rows, by the rows a block merges",
}

_KINDS = {"fp32": "f32", "i32": "i32", "i64": "i64"}


def _sizes(problem: DecodeProblem, partial_rows: int, small_cache: bool) -> dict[str, int]:
    """Bytes that each pointer's tensor spans at most; what is not listed may be of any size."""
    rows = problem.total_q * problem.num_heads
    sizes = {
        "q_ptr": 2 * DIMS.qk_head_dim * rows, "out_ptr": 2 * DIMS.v_head_dim * rows, "lse_ptr": 4 * rows,
        "partial_out_ptr": 4 * DIMS.v_head_dim * partial_rows, "partial_lse_ptr": 4 * partial_rows,
    }  # fmt: skip
    sizes |= dict.fromkeys(_INT32_POINTERS, 4 * (problem.batch + 1 + problem.total_kv // problem.page_size))
    return sizes | (dict.fromkeys(("data_ptr", "scale_ptr"), _LIMIT_32 - 1) if small_cache else {})


def _compile(kernel, constants: dict, problem: DecodeProblem, target: str, num_warps: int, sizes: dict[str, int]):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {n: "constexpr" if n in constants else _argument_type(n, problem) for n in kernel.arg_names}
    hints: dict[tuple[int, ...], list] = {}
    for i, name in enumerate(kernel.arg_names):
        if name in _ALIGNED:
            hints.setdefault((i,), []).append(["tt.divisibility", 16])
        if sizes.get(name, _LIMIT_32) < _LIMIT_32:
            hints.setdefault((i,), []).append(["tt.pointer_range", 32])
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=hints)
    compiled = triton.compile(source, target=GPUTarget("hip", target, 64), options={"num_warps": num_warps, "num_stages": 1})
    return compiled, [(n, t) for n, t in signature.items() if t != "constexpr"]


def _built(kernel, name, constants, problem, target, num_warps, sizes, grid, values, **others) -> BuiltKernel:
    import triton

    compiled, runtime = _compile(kernel, constants, problem, target, num_warps, sizes)
    table = [(n, "ptr" if t.startswith("*") else _KINDS[t], _MEANINGS[n]) for n, t in runtime]
    # Two pointers of Triton's own follow; kernels without scratch do not read them.
    table += [("global_scratch", "ptr", "0"), ("profile_scratch", "ptr", "0")]
    arguments, size = lay_out(tuple(table))
    isa = compiled.asm["amdgcn"]
    used = resources(isa)
    size = max(size, used["kernarg_bytes"])
    shared = compiled.metadata.shared
    if shared > LDS_LIMIT:
        raise BackendUnavailable(f"Triton kernel {name} needs {shared} bytes of LDS for {problem}, {target} has {LDS_LIMIT}.")
    symbol = re.search(r"\.amdhsa_kernel\s+(\S+)", isa)
    assert symbol is not None
    return BuiltKernel(
        name=symbol[1], language="triton", target=target, grid=(grid, 1, 1), block=(64 * num_warps, 1, 1), lds_bytes=shared,
        dynamic_lds_bytes=shared, arguments=arguments, kernarg_bytes=size, problem=problem,
        constants=values | {"global_scratch": 0, "profile_scratch": 0}, resources=used | {"lds_bytes": shared},
        hsaco=compiled.asm["hsaco"], isa=isa, compiler=f"triton {triton.__version__}", **others,
    )  # fmt: skip


def build_triton(problem: DecodeProblem, target: str = "gfx950", *, small_cache: bool = False) -> BuiltKernel:
    """Compile the Triton kernels that run ``problem`` on ``target``, on any machine with triton installed.

    Addresses of q, out, the cache and the partial results, and strides of q and out, have to be multiples of 16. The scratch arguments are those of
    ``leanmla.kernels.triton.backend.Workspace``; ``factors_ptr`` points to split_plan.CHUNK_CANDIDATES and a 0, int32 [32].

    Args:
        small_cache: the tensors of the cache are below 2 GiB.

    Raises:
        InvalidArgument: another target. BackendUnavailable: triton is missing, or a kernel does not fit the target.
    """
    if target not in TARGETS:
        raise InvalidArgument(f"target: expected one of {', '.join(TARGETS)}, got {target!r}.")
    if triton_missing():
        raise BackendUnavailable(f"cannot build Triton kernels for {problem}: {triton_missing()}.")
    from ..launch_configs import combine_config, decode_config
    from ..triton.backend import combine_constants, decode_constants, max_items, plan_constants
    from ..triton.combine import combine_kernel
    from ..triton.decode import decode_kernel
    from ..triton.plan import plan_kernel

    assert len(CHUNK_CANDIDATES) == 31
    config = decode_config(problem, MI355X)
    constants = decode_constants(problem, config, MI355X)
    workers = config.num_workers(MI355X)
    items = max_items(problem, config.block_kv, workers)
    q_len = problem.total_q // max(1, problem.batch)
    partial_rows = items * config.row_tiles * config.rows if problem.num_kv_splits != 1 else 0
    sizes = _sizes(problem, partial_rows, small_cache)
    shared_values = {
        "batch": problem.batch, "num_workers": workers, "num_splits": problem.num_kv_splits or 1,
        "split_size": problem.split_size or 1, "q_len": q_len, "logit_cap": problem.logit_cap,
    }  # fmt: skip

    def values_of(kernel, names: dict) -> dict:
        return {n: v for n, v in names.items() if n in kernel.arg_names}

    plan = combine = None
    if constants["PLAN"] == "table":
        values = values_of(plan_kernel, shared_values)
        plan = _built(plan_kernel, "plan_kernel", plan_constants(problem, config, MI355X), problem, target, 8, sizes, 1, values)
    if problem.num_kv_splits != 1:
        merge = combine_config(problem, MI355X)
        groups = -(-problem.num_heads * problem.max_q_len // merge.rows)
        merge_constants = combine_constants(problem, config, MI355X)
        grid = problem.batch * groups * (512 // merge.cols)
        values = values_of(combine_kernel, shared_values | {"row_groups": groups})
        combine = _built(combine_kernel, "combine_kernel", merge_constants, problem, target, merge.num_warps, sizes, grid, values)
    return _built(
        decode_kernel, "decode_kernel", constants, problem, target, config.num_warps, sizes, items * config.row_tiles,
        values_of(decode_kernel, shared_values), plan=plan, combine=combine, num_items=items,
        partial_rows=partial_rows, small_cache=small_cache,
    )  # fmt: skip

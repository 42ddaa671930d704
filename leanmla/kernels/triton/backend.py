"""The Triton backend: chooses block sizes, owns scratch, launches plan, decode and combine.

Importing this module imports no Triton; the kernels are imported at the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...device import DeviceInfo, describe, triton_missing
from ...errors import CapacityExceeded, InvalidArgument
from ...formats import no_kernel
from ...problem import DIMS, DecodeArgs, DecodeProblem, LaunchConfig
from ...split_plan import CHUNK_CANDIDATES, SplitPlan, plan_splits
from ..launch_configs import TritonConfig, combine_config, decode_config
from .relaunch import Relaunch

__all__ = [
    "BACKEND",
    "INLINE_BATCH",
    "Launches",
    "TritonBackend",
    "Workspace",
    "combine_constants",
    "compile_options",
    "decode_constants",
    "even_splits",
    "max_items",
    "with_splits",
]

#: Cache formats that the decode kernel reads. The append kernel writes all formats.
FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")

#: Longest item, in keys, that any lengths may lead to where the host gives every sequence the same number of splits.
EVEN_KEYS = 1024

#: Keys a multiprocessor below which one resident block does better than several, which would mean more and smaller items.
#: H200, 16 heads: 4 x 8192 with 32 splits a sequence instead of 64 takes 18.3 instead of 23 us (fp8), 32 x 1024 with 4 instead of
#: 8 17.8 instead of 19.7.
LIGHT_KEYS = 512

_FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")

#: Larger batches are not planned inside the decode kernel.
INLINE_BATCH = 32

#: For ptxas: how hard to keep register use down. At its default of 5 it hoists every matrix descriptor of the loop and
#: spills them, 700 bytes a thread in some kernels; at 0 it recomputes them in uniform registers, where the tile compiler did not
#: hoist them already (see ``TritonConfig.hoist``).
_PTXAS = "-regUsageLevel=0"

#: Launch the combine kernel while the decode kernel drains (sm_90): saves about 1 us of launch latency.
_OVERLAP_COMBINE = True

#: Most sequences that the plan kernel looks at in one step.
_PLAN_CHUNK = 1024

#: Tensors of the kernels in the order in which :class:`Launches` passes them.
_PLAN_TENSORS = (
    "splits_ptr", "first_ptr", "items_ptr", "num_items_ptr", "kv_indptr_ptr", "kv_last_ptr", "seqlens_ptr", "factors_ptr",
)  # fmt: skip
_DECODE_TENSORS = (
    "out_ptr", "lse_ptr", "partial_out_ptr", "partial_lse_ptr", "splits_ptr", "first_ptr", "items_ptr", "num_items_ptr",
    "factors_ptr", "q_ptr", "data_ptr", "scale_ptr", "page_ids_ptr", "kv_indptr_ptr", "kv_last_ptr", "seqlens_ptr", "qo_indptr_ptr",
)  # fmt: skip
_COMBINE_TENSORS = (
    "out_ptr", "lse_ptr", "partial_out_ptr", "partial_lse_ptr", "splits_ptr", "first_ptr", "qo_indptr_ptr",
)  # fmt: skip


@dataclass
class Workspace:
    """All scratch of a problem and of every smaller one. Nothing in it needs initial values, except ``factors``."""

    capacity: DecodeProblem
    partial_out: torch.Tensor  #: fp32, flat: [items, row_tiles, rows, 512]
    partial_lse: torch.Tensor  #: fp32, flat: [items, row_tiles, rows]
    splits: torch.Tensor  #: int32 [batch]
    first: torch.Tensor  #: int32 [batch]
    items: torch.Tensor  #: int32 [items, 2], flat
    num_items: torch.Tensor  #: int32 [1]
    factors: torch.Tensor  #: int32 [32]


def max_items(problem: DecodeProblem, block_kv: int, num_workers: int) -> int:
    """Bound on the work items of a problem, from shapes alone.

    Balanced: the smallest candidate chunk is a quarter of the ideal share, so items <= 4 * num_workers + batch, and no
    item but a sequence's only one is empty.
    """
    if problem.num_kv_splits is not None:
        return problem.batch * problem.num_kv_splits
    if problem.split_size is not None:
        return problem.batch + problem.total_kv // problem.split_size
    if problem.batch == 0:
        return 0
    finest = min(CHUNK_CANDIDATES)
    return problem.batch + min(-(-16 * num_workers // finest), problem.total_kv // block_kv)


def even_splits(problem: DecodeProblem, config: TritonConfig, device: DeviceInfo) -> int | None:
    """Splits of every sequence if shapes alone may choose them; None if lengths have to be balanced.

    The same number for all needs no planner and no program too many, but how long items get is then up to the lengths. So only
    where the longest sequence that the tables allow makes items of at most :data:`EVEN_KEYS` keys.
    """
    batch, size = problem.batch, config.block_kv
    if config.plan != "auto" or batch == 0 or problem.num_kv_splits is not None or problem.split_size is not None:
        return None
    keys = min(problem.total_kv, batch * problem.max_kv_len)
    workers = config.num_workers(device)
    singly = max(1, workers // config.blocks_per_sm)
    splits = singly // batch
    # One block a multiprocessor, unless that would leave more than a quarter of them idle.
    if keys >= singly * LIGHT_KEYS or 4 * splits * batch < 3 * singly:
        splits = workers // batch
    blocks = max(1, -(-keys // (batch * size)))
    splits = min(max(1, splits), blocks)
    splits = -(-blocks // -(-blocks // splits))
    longest = -(-problem.max_kv_len // (size * splits)) * size
    return splits if longest <= EVEN_KEYS else None


def with_splits(problem: DecodeProblem, config: TritonConfig, device: DeviceInfo) -> DecodeProblem:
    """The problem that is launched: with a number of splits where :func:`even_splits` has one."""
    splits = even_splits(problem, config, device)
    return problem if splits is None else problem.replace(num_kv_splits=splits)


def _plan_kind(problem: DecodeProblem, config: TritonConfig, device: DeviceInfo) -> str:
    if problem.num_kv_splits is not None:
        return "fixed"
    if config.plan != "auto":
        return config.plan
    workers = config.num_workers(device)
    at_once = max_items(problem, config.block_kv, workers) <= workers
    return "inline" if at_once and problem.batch <= INLINE_BATCH else "table"


def decode_constants(
    problem: DecodeProblem, config: TritonConfig, device: DeviceInfo, *, aligned: bool = True, stride_token: int | None = None,
    stride_scale: int = 18,
) -> dict:  # fmt: skip
    """The decode kernel's compile-time arguments for a problem.

    Args:
        aligned: rows of the cache begin at multiples of 16 bytes.
        stride_token: bf16 elements or 32-bit words from a token to the next in its page; None: tokens lie close.
        stride_scale: bytes from a token's scales to the next's (mxfp4).
    """
    page, plan = problem.page_size, _plan_kind(problem, config, device)
    if stride_token is None:
        stride_token = {"bf16": 576, "fp8": 144, "mxfp4": 72, "fp8_tile128": 164}[problem.format]
    # Without page ids to load first, the pipeliner would hold twice as many tiles.
    stages = config.num_stages
    if problem.table_kind == "contiguous" and stages > 1:
        stages = max(2, (stages + 1) // 2)
    # One page id serves a tile if tiles start at multiples of block_kv and pages hold whole tiles.
    starts_aligned = problem.split_size is None or problem.split_size % config.block_kv == 0
    one_page = problem.table_kind != "contiguous" and page % config.block_kv == 0 and starts_aligned
    return {
        "H": problem.num_heads,
        "R": config.rows,
        "ROW_TILES": config.row_tiles,
        "BN": config.block_kv,
        "FORMAT": problem.format,
        "STRIDE_TOKEN": stride_token,
        "STRIDE_SCALE": stride_scale if problem.format == "mxfp4" else 0,
        "UNIT": (8 if problem.format == "bf16" else 4) if aligned else 1,
        "TABLE": problem.table_kind,
        "PAGE_SIZE": page,
        "TILE_IN_PAGE": one_page,
        "RAGGED_Q": problem.ragged_q,
        "CAUSAL": problem.causal,
        "MANY_Q": problem.max_q_len > 1,
        "CAPPED": problem.logit_cap > 0,
        "WRITE_LSE": problem.return_lse,
        "SPLIT_Q": problem.q_dtype == "fp16" and problem.format != "fp8",
        "PLAN": plan,
        "FIXED_SIZE": problem.split_size is not None,
        "BATCH_POW2": max(16, 1 << max(0, problem.batch - 1).bit_length()) if plan == "inline" else 16,
        "GRANULARITY": config.block_kv,
        "SWAPPED": config.swapped,
        "HOIST": config.hoist or not config.swapped,
        "RAW_TILES": config.raw_tiles or problem.format == "bf16",
        "ISA": 0 if device.kind != "cuda" else (89 if device.sm >= 89 else 80),
        "PDL": plan == "table" and _overlaps(device),
        "NUM_WARPS": config.num_warps,
        "NUM_STAGES": stages,
    }


def plan_constants(problem: DecodeProblem, config: TritonConfig, device: DeviceInfo) -> dict:
    """The plan kernel's compile-time arguments for a problem."""
    chunk = min(_PLAN_CHUNK, max(16, 1 << (problem.batch - 1).bit_length()))
    return {
        "TABLE": problem.table_kind,
        "PAGE_SIZE": problem.page_size,
        "GRANULARITY": config.block_kv,
        "FIXED_SIZE": problem.split_size is not None,
        "CHUNK": chunk,
        "ONE_STEP": problem.batch <= chunk,
        "PDL": _overlaps(device),
    }


def combine_constants(problem: DecodeProblem, config: TritonConfig, device: DeviceInfo) -> dict:
    """The combine kernel's compile-time arguments for a problem."""
    merge = combine_config(problem, device)
    return {
        "H": problem.num_heads,
        "R": config.rows,
        "ROW_TILES": config.row_tiles,
        "RAGGED_Q": problem.ragged_q,
        "WRITE_LSE": problem.return_lse,
        "PLAN": _plan_kind(problem, config, device),
        "PARTS": merge.parts,
        "COLS": merge.cols,
        "ROWS": merge.rows,
        "PDL": _overlaps(device),
    }


def compile_options(device: DeviceInfo) -> dict:
    """Options for the device's assembler."""
    return {"ptx_options": _PTXAS} if device.kind == "cuda" else {}


def _overlaps(device: DeviceInfo) -> bool:
    return _OVERLAP_COMBINE and device.sm >= 90


def _strides(name: str, tensor: torch.Tensor, unit_bytes: int) -> tuple[int, int, bool]:
    """(page stride, token stride, aligned) of a cache tensor, in 16-byte units if possible, else in units of ``unit_bytes``."""
    page, token = tensor.stride(0) * tensor.element_size(), tensor.stride(1) * tensor.element_size()
    for unit in (16, unit_bytes):
        if page % unit == 0 and token % unit == 0 and tensor.data_ptr() % unit == 0:
            return page // unit, token // unit, unit == 16
    raise InvalidArgument(
        f"{name}: the Triton backend reads rows as {unit_bytes}-byte words, got page stride {page}, token stride {token} bytes and an "
        f"address that is {tensor.data_ptr() % unit_bytes} mod {unit_bytes}. Use multiples of {unit_bytes}, best of 16."
    )


class TritonBackend:
    """See :class:`leanmla.backends.Backend`."""

    name = "triton"

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        """None if it can run ``problem``, otherwise why not."""
        missing = triton_missing()
        if missing is not None:
            return missing
        if problem.format not in _FORMATS:
            return no_kernel(problem.format, tuple(_FORMATS))
        if device.kind == "cuda":
            if device.sm < 80:
                return f"needs sm_80 or newer, this GPU is {device.arch}"
        elif device.kind == "hip":
            if not device.arch.startswith(("gfx942", "gfx950")):
                return f"needs gfx942 or gfx950, this GPU is {device.arch}"
        else:
            return "needs a GPU"
        if problem.format not in FORMATS:
            return no_kernel(problem.format, FORMATS)
        # The device planner counts in 32 bits; see plan.py. A block has at least 32 keys.
        if problem.max_kv_len >= 1 << 27:
            return f"plans sequences below {1 << 27} keys, the tables allow {problem.max_kv_len}"
        if problem.total_kv >= 1 << 35:
            return f"plans batches below {1 << 35} keys, the tables allow {problem.total_kv}"
        if (problem.num_kv_splits or 1) >= 1 << 15:
            return f"plans fewer than {1 << 15} splits a sequence, asked for {problem.num_kv_splits}"
        return None

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        """How it would run ``problem``."""
        config = decode_config(problem, device)
        splits = even_splits(problem, config, device)
        plan = _plan_kind(problem, config, device) if splits is None else f"none, {splits} splits of every sequence"
        return LaunchConfig(
            backend=self.name,
            kernel="leanmla/kernels/triton/decode.py",
            block_rows=config.rows,
            block_kv=config.block_kv,
            num_workers=config.num_workers(device),
            reason=config.reason,
            extra=(
                ("num_warps", str(config.num_warps)),
                ("num_stages", str(config.num_stages)),
                ("row_tiles", str(config.row_tiles)),
                ("planning", plan),
            ),
        )

    def host_plan(self, problem: DecodeProblem, device: DeviceInfo, kv_lens: Sequence[int]) -> SplitPlan:
        """The items that given lengths lead to."""
        config = decode_config(problem, device)
        problem = with_splits(problem, config, device)
        return plan_splits(kv_lens, num_workers=config.num_workers(device), granularity=config.block_kv,
                           num_kv_splits=problem.num_kv_splits, split_size=problem.split_size)  # fmt: skip

    def make_workspace(self, problem: DecodeProblem, device: torch.device, config: TritonConfig | None = None) -> Workspace:
        """Scratch for problems up to ``problem``; ``config`` if other block sizes than the default are to run."""
        info = describe(device)
        config = config or decode_config(problem, info)
        # Calls with fewer query rows have fewer row tiles and so more workers: room for the most that any of them needs,
        # 4 * workers * row_tiles <= 4 * max(blocks, row_tiles).
        blocks = max(info.num_sms * config.blocks_per_sm, config.row_tiles)
        most = max_items(problem, config.block_kv, -(-blocks // config.row_tiles))
        tiles = most * config.row_tiles * config.rows if problem.num_kv_splits != 1 else 0

        def empty(n: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(max(n, 1), dtype=dtype, device=device)

        return Workspace(
            capacity=problem,
            partial_out=empty(tiles * DIMS.v_head_dim, torch.float32),
            partial_lse=empty(tiles, torch.float32),
            splits=empty(problem.batch, torch.int32),
            first=empty(problem.batch, torch.int32),
            items=empty(2 * max_items(problem, 32, 4 * max(info.num_sms, config.row_tiles)), torch.int32),
            num_items=empty(1, torch.int32),
            factors=_factors(device),
        )

    def run(self, args: DecodeArgs, workspace: object) -> None:
        """Launch plan (large batches), decode and, unless there is one split, combine."""
        assert isinstance(workspace, Workspace)
        if args.problem.batch and args.problem.total_q:
            self.prepare(args, workspace)(args, workspace)

    def prepare(self, args: DecodeArgs, workspace: object) -> Launches:
        """See :meth:`leanmla.backends.Backend.prepare`."""
        assert isinstance(workspace, Workspace)
        info = describe(args.q.device)
        return Launches(args, workspace, decode_config(args.problem, info), info)


class Launches:
    """The kernels of a checked call with given block sizes; calling it runs a call like it.

    Splits are those of :func:`with_splits`.

    Calls are alike if their problems are equal and their tensors agree in shape, strides, dtype, device and address modulo 16.
    Workspaces may differ if they were made for one problem.

    Raises:
        InvalidArgument: rows of the cache are not aligned. CapacityExceeded: the workspace is too small.
    """

    def __init__(self, args: DecodeArgs, ws: Workspace, config: TritonConfig, device: DeviceInfo) -> None:
        from .combine import combine_kernel
        from .decode import decode_kernel
        from .plan import plan_kernel

        problem, table, cache = with_splits(args.problem, config, device), args.table, args.cache
        num_workers = config.num_workers(device)
        items = max_items(problem, config.block_kv, num_workers)
        tiles = items * config.row_tiles * config.rows
        if problem.num_kv_splits != 1 and (tiles > ws.partial_lse.numel() or problem.batch > ws.splits.numel()):
            raise CapacityExceeded(
                f"workspace: made for {ws.capacity}, this call ({problem}) needs room for {tiles} partial rows, it has "
                f"{ws.partial_lse.numel()}. Make a plan with a larger capacity."
            )
        stride_page, stride_token, aligned = _strides("cache", cache.data, 2 if problem.format == "bf16" else 4)
        scale = cache.scale
        scale_page, scale_token = (scale.stride(0), scale.stride(1)) if scale is not None and scale.ndim == 3 else (0, 0)
        elements = (8 if problem.format == "bf16" else 4) if aligned else 1
        constants = decode_constants(
            problem, config, device, aligned=aligned, stride_token=stride_token * elements, stride_scale=scale_token
        )
        split_size, num_splits = problem.split_size or 1, problem.num_kv_splits or 1
        q_len = problem.total_q // problem.batch
        stride_lse = args.lse.stride(0) if args.lse is not None else 0
        self._plan = self._combine = None
        if constants["PLAN"] == "table":
            self._plan = Relaunch(
                plan_kernel, (1,), _PLAN_TENSORS,
                batch=problem.batch, num_workers=num_workers, split_size=split_size,
                **plan_constants(problem, config, device), num_warps=8,
            )  # fmt: skip
        self._decode = Relaunch(
            decode_kernel, (items * config.row_tiles,), _DECODE_TENSORS,
            batch=problem.batch, num_workers=num_workers, num_splits=num_splits, split_size=split_size, q_len=q_len,
            sm_scale=args.sm_scale, logit_cap=problem.logit_cap, stride_q_token=args.q.stride(0), stride_q_head=args.q.stride(1),
            stride_out_token=args.out.stride(0), stride_out_head=args.out.stride(1), stride_lse_token=stride_lse,
            stride_page=stride_page, stride_scale_page=scale_page,
            stride_table=table.page_ids.stride(0) if table.kind == "block_table" and table.page_ids is not None else 0,
            **constants, num_warps=config.num_warps, num_stages=1, **compile_options(device),
            **({"launch_pdl": True} if constants["PDL"] else {}),
        )  # fmt: skip
        if problem.num_kv_splits != 1:
            merge = combine_config(problem, device)
            row_groups = -(-problem.num_heads * problem.max_q_len // merge.rows)
            self._combine = Relaunch(
                combine_kernel, (problem.batch * row_groups * (DIMS.v_head_dim // merge.cols),), _COMBINE_TENSORS,
                batch=problem.batch, num_splits=num_splits, q_len=q_len, stride_out_token=args.out.stride(0),
                stride_out_head=args.out.stride(1), stride_lse_token=stride_lse, row_groups=row_groups,
                **combine_constants(problem, config, device), num_warps=merge.num_warps,
                **({"launch_pdl": True} if _overlaps(device) else {}),
            )  # fmt: skip

    def __call__(self, args: DecodeArgs, workspace: object) -> None:
        """Launch plan (large batches), decode and, unless there is one split, combine."""
        ws: Workspace = workspace  # type: ignore[assignment]
        table, cache = args.table, args.cache
        tensors = (
            args.out, args.lse, ws.partial_out, ws.partial_lse, ws.splits, ws.first, ws.items, ws.num_items, ws.factors,
            args.q, cache.data, cache.scale, table.page_ids, table.kv_indptr, table.kv_last_page_len, table.cache_seqlens, args.qo_indptr,
        )  # fmt: skip
        nothing = ws.num_items  # stands where a call has no such tensor
        launches = (self._plan, self._decode, self._combine)
        values: list = [nothing if t is None else t for t in tensors]
        if all(launch is None or launch.takes_addresses for launch in launches):
            values = [t.data_ptr() for t in values]
        out, lse, part_out, part_lse, splits, first, items, num_items, factors, *_, indptr, last, lens, qo = values
        if self._plan is not None:
            self._plan(splits, first, items, num_items, indptr, last, lens, factors)
        self._decode(*values)
        if self._combine is not None:
            self._combine(out, lse, part_out, part_lse, splits, first, qo)


_FACTORS: dict[torch.device, torch.Tensor] = {}


def _factors(device: torch.device) -> torch.Tensor:
    """The planner's candidates on a device; made once, outside any graph capture since plans are made outside."""
    if device not in _FACTORS:
        _FACTORS[device] = torch.tensor([*CHUNK_CANDIDATES, 0], dtype=torch.int32, device=device)
    return _FACTORS[device]


BACKEND = TritonBackend()

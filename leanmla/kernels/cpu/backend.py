"""The CPU backend: cuts a call into work items, hands them to threads, merges what was split."""

from __future__ import annotations

import functools
import importlib.util
import platform

import numpy as np
import torch

from ... import settings
from ...device import DeviceInfo
from ...problem import DIMS, DecodeArgs, DecodeProblem, LaunchConfig
from .calls import CALL, ITEM, MERGE
from .workers import Scratch, run_on_workers

__all__ = ["BACKEND", "CpuBackend"]

#: Keys a tile and query rows an item; decode.py is written for them (a test compares).
TILE = 64
MAX_ROWS = 128

#: Items a thread, where each can have at least MIN_ITEM_TILES tiles of keys. Threads take items as they become free, so
#: one that shares its core with something else does not hold up the rest.
ITEMS_PER_THREAD = 4
MIN_ITEM_TILES = 8

#: Row-key pairs that each thread of a call must have, 0.1 ms. Forking costs microseconds on an idle machine, but on a busy
#: one the wait for a thread that the system has not scheduled costs milliseconds.
MIN_WORK_PER_WORKER = 8192


class Workspace:
    """Partial results of split sequences. Grows to the largest call seen and is kept."""

    def __init__(self) -> None:
        self._out = np.empty((0, DIMS.v_head_dim), dtype=np.float32)
        self._lse = np.empty(0, dtype=np.float32)

    def partials(self, slots: int) -> tuple[np.ndarray, np.ndarray]:
        """fp32 [>= slots, 512] and [>= slots]."""
        if self._lse.size < slots:
            self._out = np.empty((slots, DIMS.v_head_dim), dtype=np.float32)
            self._lse = np.empty(slots, dtype=np.float32)
        return self._out, self._lse


class CpuBackend:
    """Fused decode on a CPU, compiled by numba.

    Args:
        bf16_dot: use bf16 products where a call allows it. None: if this machine has an instruction for them.
    """

    name = "cpu"

    def __init__(self, bf16_dot: bool | None = None) -> None:
        self._bf16_dot = bf16_dot

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        if device.kind != "cpu":
            return f"runs on a CPU, this device is {device.name}"
        return _cannot_compile()

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> Workspace:
        return Workspace()

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        as_bf16 = self._uses_bf16(problem)
        rows = problem.max_q_len * problem.num_heads
        return LaunchConfig(
            backend=self.name,
            kernel="kernels/cpu/decode.py",
            block_rows=min(-(-rows // 16) * 16, MAX_ROWS),
            block_kv=TILE,
            num_workers=_num_threads(),
            reason=(
                "bf16 products with fp32 sums (AVX512_BF16)"
                if as_bf16
                else "fp32 products: " + self._why_fp32(problem)
            ),
            extra=(("products", "bf16" if as_bf16 else "fp32"),),
        )

    def _why_fp32(self, problem: DecodeProblem) -> str:
        if problem.q_dtype != "bf16":
            return "fp16 queries do not fit bf16"
        if problem.format == "fp8_tile128":
            return "values times a tile scale do not fit bf16"
        return "this machine has no AVX512_BF16"

    def _uses_bf16(self, problem: DecodeProblem) -> bool:
        if problem.q_dtype != "bf16" or problem.format == "fp8_tile128":
            return False
        if self._bf16_dot is not None:
            return self._bf16_dot
        from .simd import HAS_BF16_DOT

        return HAS_BF16_DOT

    def run(self, args: DecodeArgs, workspace: Workspace) -> None:
        from .kernels import decode
        from .tiles import FORMAT_CODES

        problem, q, cache, out = args.problem, args.q, args.cache, args.out
        items, merges, slots, work = _work_items(args)
        if not items.size:
            return
        num_workers = max(1, min(_num_threads(), len(items), work // MIN_WORK_PER_WORKER))
        partial_out, partial_lse = workspace.partials(slots)
        call = np.zeros(1, dtype=CALL)
        c = call[0]
        c["items"], c["num_items"], c["merges"] = items.ctypes.data, len(items), merges.ctypes.data
        c["as_bf16"], c["format"] = self._uses_bf16(problem), FORMAT_CODES[problem.format]
        c["causal"], c["num_heads"], c["page_size"] = problem.causal, problem.num_heads, problem.page_size
        c["q"], c["q_stride"], c["q_head_stride"], c["q_is_fp16"] = *_address(q), problem.q_dtype == "fp16"
        c["out"], c["out_stride"], c["out_head_stride"] = _address(out)
        c["lse"] = 0 if args.lse is None else args.lse.data_ptr()
        c["partial_out"], c["partial_lse"] = partial_out.ctypes.data, partial_lse.ctypes.data
        c["data"], c["page_stride"], c["token_stride"] = _address(cache.data)
        c["token_bytes"] = cache.data.shape[2] * cache.data.element_size()
        if problem.format == "mxfp4":
            assert cache.scale is not None
            c["scales"], c["scale_page_stride"], c["scale_token_stride"] = _address(cache.scale)
        if problem.table_kind == "contiguous":  # pages of one token
            c["token_stride"], c["scale_token_stride"] = c["page_stride"], c["scale_page_stride"]
        c["sm_scale"], c["logit_cap"] = args.sm_scale, problem.logit_cap
        c["tensor_scale"] = 1.0
        if problem.format == "fp8":
            assert cache.scale is not None
            c["tensor_scale"] = float(cache.scale)
        buffers = _scratch().take(num_workers)
        addresses = np.array([b.ctypes.data for b in buffers], dtype=np.int64)
        c["scratch"] = addresses.ctypes.data
        run_on_workers(decode, call.ctypes.data, num_workers)
        _scratch().give_back(buffers)


def _address(t: torch.Tensor) -> tuple[int, int, int]:
    """Address and byte strides of the first two dims."""
    width = t.element_size()
    return t.data_ptr(), t.stride(0) * width, t.stride(1) * width


def _work_items(args: DecodeArgs) -> tuple[np.ndarray, np.ndarray, int, int]:
    """(ITEM records, longest first; MERGE records; partial slots; row-key pairs)."""
    problem, table = args.problem, args.table
    kv_lens = table.kv_lens().numpy()
    if args.qo_indptr is None:
        q_lens = np.full(problem.batch, problem.total_q // max(problem.batch, 1), dtype=np.int64)
    else:
        q_lens = np.diff(args.qo_indptr.numpy()).astype(np.int64)
    rows = q_lens * problem.num_heads
    chunks = -(-rows // MAX_ROWS)
    splits, split_size = _choose_splits(problem, kv_lens, chunks)

    # One entry an item: sequence, split, chunk of rows.
    per_seq = splits * chunks
    seq = np.repeat(np.arange(problem.batch), per_seq)
    nth = np.arange(len(seq)) - np.repeat(_before(per_seq), per_seq)
    split, chunk = nth % splits[seq], nth // splits[seq]
    items = np.zeros(len(seq), dtype=ITEM)
    items["first_query"], items["q_len"], items["kv_len"] = _before(q_lens)[seq], q_lens[seq], kv_lens[seq]
    items["kv_start"], items["kv_end"] = split_range(kv_lens[seq], splits[seq], split, split_size)
    items["row_start"] = chunk * MAX_ROWS
    items["row_end"] = np.minimum(items["row_start"] + MAX_ROWS, rows[seq])
    if table.kind == "block_table":
        assert table.page_ids is not None
        items["page_ids"] = table.page_ids.data_ptr() + 4 * table.page_ids.stride(0) * seq
    elif table.kind == "csr":
        assert table.page_ids is not None and table.kv_indptr is not None
        items["page_ids"] = table.page_ids.data_ptr() + 4 * table.kv_indptr.numpy().astype(np.int64)[seq]
    else:
        assert table.kv_indptr is not None
        items["first_slot"] = table.kv_indptr.numpy()[seq]

    # Where keys were split, every chunk of rows has a merge, and every split of it a range of partial slots.
    is_split = splits > 1
    slots = np.where(is_split, splits * rows, 0)
    items["partial"] = _before(slots)[seq] + split * rows[seq] + items["row_start"]
    items["merge"] = np.where(is_split[seq], _before(np.where(is_split, chunks, 0))[seq] + chunk, -1)
    first = items[is_split[seq] & (split == 0)]
    first_seq = seq[is_split[seq] & (split == 0)]
    merges = np.zeros(len(first), dtype=MERGE)
    for name in ("first_query", "row_start", "row_end", "partial"):
        merges[name] = first[name]
    merges["num_splits"] = merges["pending"] = splits[first_seq]
    merges["split_stride"] = rows[first_seq]

    work = (items["kv_end"] - items["kv_start"]) * (items["row_end"] - items["row_start"])
    return items[np.argsort(-work, kind="stable")], merges, int(slots.sum()), int(work.sum())


def _before(counts: np.ndarray) -> np.ndarray:
    """Sum of the entries before each."""
    return np.cumsum(counts) - counts


def _choose_splits(problem: DecodeProblem, kv_lens: np.ndarray, chunks: np.ndarray) -> tuple[np.ndarray, int | None]:
    """(splits of each sequence, keys a split; None: a count was asked for).

    Left free, splits have one size for all sequences: threads take items as they become free, so items need not be
    equal, only small enough. 512 tiles on two threads: 8 items of 64 tiles.
    """
    if problem.num_kv_splits is not None:
        return np.full(len(kv_lens), problem.num_kv_splits, dtype=np.int64), None
    split_size = problem.split_size
    if split_size is None:
        tiles = int((-(-kv_lens // TILE) * chunks).sum())
        split_size = TILE * max(MIN_ITEM_TILES, -(-tiles // (_num_threads() * ITEMS_PER_THREAD)))
    return np.maximum(-(-kv_lens // split_size), 1), split_size


def split_range(kv_lens, splits, split, split_size: int | None):
    """Keys [start, end) of each split, as :mod:`leanmla.split_plan` defines them, for whole arrays."""
    if split_size is not None:
        return split * split_size, np.minimum((split + 1) * split_size, kv_lens)
    tiles = -(-kv_lens // TILE)
    start, end = (np.minimum(tiles * s // splits * TILE, kv_lens) for s in (split, split + 1))
    return start, end


def _num_threads() -> int:
    return settings.cpu_threads() or torch.get_num_threads()


@functools.cache
def _scratch() -> Scratch:
    from .decode import SCRATCH_BYTES

    return Scratch(SCRATCH_BYTES)


@functools.cache
def _cannot_compile() -> str | None:
    """Why the kernels cannot be compiled here, or None. Does not import numba."""
    if importlib.util.find_spec("numba") is None:
        return "needs numba, which is not installed (pip install numba)"
    if platform.machine().lower() in ("x86_64", "amd64") and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        return "needs a processor with AVX2"
    return None


BACKEND = CpuBackend()

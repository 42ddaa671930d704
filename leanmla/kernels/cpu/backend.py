"""The CPU backend: cuts a call into work items, hands them to threads, merges what was split."""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence

import numpy as np
import torch

from ... import device as devices
from ... import settings
from ...device import DeviceInfo
from ...problem import DIMS, DecodeArgs, DecodeProblem, LaunchConfig
from ...split_plan import SplitPlan
from . import cuts
from .calls import CALL, CALL_FIELDS, CALL_FORMAT, ITEM, MAX_ROWS, MERGE, PLAN, TILE, WORK
from .workers import Scratch, run_on_workers

__all__ = ["BACKEND", "CpuBackend"]

#: Row-key pairs that each thread of a call must have, 0.1 ms. Forking costs microseconds on an idle machine, but on a busy
#: one the wait for a thread that the system has not scheduled costs milliseconds.
MIN_WORK_PER_WORKER = 8192

#: Most bytes of partial results that a workspace holds before a call needs them. A capacity for long sequences in short
#: splits asks for more than any call may ever use; beyond this they are allocated by the first call that does.
MAX_RESERVED_BYTES = 1 << 30


class Workspace:
    """The records of a call and the partial results of split sequences. Grows where a call needs more, and keeps it."""

    def __init__(self, num_items: int = 64, num_merges: int = 16, num_slots: int = 0) -> None:
        self.call = np.zeros(1, dtype=CALL)
        self.items = np.empty(num_items, dtype=ITEM)
        self.merges = np.empty(num_merges, dtype=MERGE)
        self.partial_out = np.empty((num_slots, DIMS.v_head_dim), dtype=np.float32)
        self.partial_lse = np.empty(num_slots, dtype=np.float32)

    def make_room(self, num_items: int, num_merges: int) -> None:
        if len(self.items) < num_items:
            self.items = np.empty(num_items, dtype=ITEM)
        if len(self.merges) < num_merges:
            self.merges = np.empty(num_merges, dtype=MERGE)

    def make_slots(self, num_slots: int) -> None:
        if len(self.partial_lse) < num_slots:
            self.partial_out = np.empty((num_slots, DIMS.v_head_dim), dtype=np.float32)
            self.partial_lse = np.empty(num_slots, dtype=np.float32)


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
        return devices.missing("numba") or (None if devices.assumed("numba") else _cannot_compile())

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> Workspace:
        """Room for every call within ``problem`` on as many threads as there are now."""
        num_items, num_merges, num_slots = cuts.most(problem, _num_threads())
        item_bytes, slot_bytes = ITEM.itemsize, 4 * (DIMS.v_head_dim + 1)
        return Workspace(
            min(num_items, MAX_RESERVED_BYTES // 8 // item_bytes),
            min(num_merges, MAX_RESERVED_BYTES // 8 // item_bytes),
            min(num_slots, MAX_RESERVED_BYTES // slot_bytes),
        )

    def host_plan(
        self, problem: DecodeProblem, device: DeviceInfo, kv_lens: Sequence[int], q_lens: Sequence[int] | None = None
    ) -> SplitPlan:
        """The ranges of keys that :meth:`run` makes for sequences of these lengths.

        Args:
            q_lens: query rows of each sequence; None: equal, or the bound on them where the problem is ragged.
        """
        if q_lens is None:
            each = problem.max_q_len if problem.ragged_q else problem.total_q // max(problem.batch, 1)
            q_lens = [each] * len(kv_lens)
        return cuts.host_plan(
            kv_lens, [n * problem.num_heads for n in q_lens], num_threads=settings.cpu_threads() or max(1, device.num_sms),
            num_kv_splits=problem.num_kv_splits, split_size=problem.split_size,
        )  # fmt: skip

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        as_bf16 = self._uses_bf16(problem)
        rows = problem.max_q_len * problem.num_heads
        return LaunchConfig(
            backend=self.name,
            kernel="leanmla/kernels/cpu/decode.py",
            block_rows=min(-(-rows // 16) * 16, MAX_ROWS),
            block_kv=TILE,
            num_workers=settings.cpu_threads() or max(1, device.num_sms),
            reason=("bf16 products with fp32 sums (AVX512_BF16)" if as_bf16 else "fp32 products: " + self._why_fp32(problem)),
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
        if devices.missing("numba") or _cannot_compile():  # only explained, for another machine
            return False
        from .simd import HAS_BF16_DOT

        return HAS_BF16_DOT

    def run(self, args: DecodeArgs, workspace: Workspace) -> None:
        from . import kernels

        call = self.plan(args, workspace)
        if call["num_items"] == 0:
            return
        workspace.make_slots(int(call["num_slots"]))
        call["partial_out"], call["partial_lse"] = workspace.partial_out.ctypes.data, workspace.partial_lse.ctypes.data
        num_workers = int(min(call["num_threads"], call["num_items"], max(1, call["num_pairs"] // MIN_WORK_PER_WORKER)))
        buffers = _scratch().take(num_workers)
        addresses = np.array([b.ctypes.data for b in buffers], dtype=np.int64)
        call["scratch"] = addresses.ctypes.data
        call["stage"] = WORK
        run_on_workers(kernels.run, workspace.call.ctypes.data, num_workers)
        _scratch().give_back(buffers)

    def plan(self, args: DecodeArgs, workspace: Workspace) -> np.void:
        """Fill in the workspace's CALL, ITEM and MERGE records for a call; returns the CALL."""
        from . import kernels

        values = self._values(args)
        call = workspace.call[0]
        while True:
            values["items"], values["item_capacity"] = workspace.items.ctypes.data, len(workspace.items)
            values["merges"], values["merge_capacity"] = workspace.merges.ctypes.data, len(workspace.merges)
            struct.pack_into(CALL_FORMAT, workspace.call.data, 0, *[values.get(name, 0) for name in CALL_FIELDS])
            kernels.run(workspace.call.ctypes.data)
            num_items, num_merges = int(call["num_items"]), int(call["num_merges"])
            if num_items <= len(workspace.items) and num_merges <= len(workspace.merges):
                return call
            workspace.make_room(num_items, num_merges)

    def _values(self, args: DecodeArgs) -> dict[str, int | float]:
        """Fields of CALL that a call fixes; those left out are 0."""
        from .tiles import FORMAT_CODES

        problem, q, out, cache, table = args.problem, args.q, args.out, args.cache, args.table
        data, scale = cache.data, cache.scale
        values: dict[str, int | float] = {
            "stage": PLAN,
            "batch": problem.batch,
            "total_q": problem.total_q,
            "num_heads": problem.num_heads,
            "causal": problem.causal,
            "num_threads": _num_threads(),
            "num_kv_splits": problem.num_kv_splits or 0,
            "split_size": problem.split_size or 0,
            "qo_indptr": _address(args.qo_indptr),
            "page_size": table.page_size,
            "page_ids": _address(table.page_ids),
            "page_ids_stride": _strides(table.page_ids)[0] if table.kind == "block_table" else 0,
            "kv_indptr": _address(table.kv_indptr),
            "kv_last_page_len": _address(table.kv_last_page_len),
            "cache_seqlens": _address(table.cache_seqlens),
            "as_bf16": self._uses_bf16(problem),
            "format": FORMAT_CODES[problem.format],
            "q": _address(q),
            "q_is_fp16": problem.q_dtype == "fp16",
            "out": _address(out),
            "lse": _address(args.lse),
            "data": _address(data),
            "token_bytes": data.shape[2] * data.element_size(),
            "sm_scale": args.sm_scale,
            "logit_cap": problem.logit_cap,
            "tensor_scale": 1.0,
        }
        values["q_stride"], values["q_head_stride"], _ = _strides(q)
        values["out_stride"], values["out_head_stride"], _ = _strides(out)
        values["page_stride"], values["token_stride"], _ = _strides(data)
        if problem.format == "mxfp4":
            values["scales"] = _address(scale)
            values["scale_page_stride"], values["scale_token_stride"], _ = _strides(scale)
        elif problem.format == "fp8":
            assert scale is not None
            values["tensor_scale"] = scale.item()
        if table.kind == "contiguous":  # pages of one token
            values["token_stride"] = values["page_stride"]
            values["scale_token_stride"] = values.get("scale_page_stride", 0)
        return values


def _address(t: torch.Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _strides(t: torch.Tensor | None) -> tuple[int, ...]:
    """In bytes."""
    assert t is not None
    width = t.element_size()
    return tuple(n * width for n in t.stride())


def _num_threads() -> int:
    return settings.cpu_threads() or torch.get_num_threads()


@functools.cache
def _scratch() -> Scratch:
    from .decode import SCRATCH_BYTES

    return Scratch(SCRATCH_BYTES)


@functools.cache
def _cannot_compile() -> str | None:
    """Why the kernels cannot be compiled here though numba is installed, or None. Imports numba: only that tells."""
    try:
        from .simd import why_not
    except Exception as error:  # an ImportError if numba does not go with this numpy, but it may be anything
        first_line = (str(error).splitlines() or [""])[0]
        return f"needs numba, which is installed but cannot be imported ({type(error).__name__}: {first_line.rstrip('.')})"
    return why_not()


BACKEND = CpuBackend()

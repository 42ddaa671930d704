"""The ``hopper`` backend: Gluon kernels for sm_90."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...device import DeviceInfo, describe, missing, triton_missing
from ...errors import CapacityExceeded, InvalidArgument
from ...formats import no_kernel
from ...problem import DecodeArgs, DecodeProblem, LaunchConfig
from .host_plan import HopperPlan, host_plan
from .launch import BLOCK_KEYS, HopperLaunch, choose_launch

__all__ = ["BACKEND", "HopperBackend", "Workspace"]

_KERNELS = {
    "bf16": "leanmla/kernels/hopper/decode_bf16_sm90.py",
    "fp8": "leanmla/kernels/hopper/decode_fp8_sm90.py",
    "mxfp4": "leanmla/kernels/hopper/decode_mxfp4_sm90.py",
    "fp8_tile128": "leanmla/kernels/hopper/decode_fp8_tile128_sm90.py",
}
#: Most splits of one sequence: arrivals are counted in 15 bits (``reduction``).
_MAX_SPLITS = 32767
#: Shared memory of the largest variant.
_SHARED_MEMORY = 227 * 1024


@dataclass
class Workspace:
    """Scratch of one plan. ``counters`` start as zeros; every launch leaves the set that the next one uses as zeros."""

    part_out: torch.Tensor  #: fp32 [slots * rows, 512]
    part_lse: torch.Tensor  #: fp32 [slots * rows]
    counters: torch.Tensor  #: int32 [4 + 2 * batch * tiles], see ``reduction``


class HopperBackend:
    """See ``leanmla.backends.Backend``."""

    name = "hopper"

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        if device.kind != "cuda" or device.arch != "sm_90":
            return f"needs an NVIDIA Hopper GPU (sm_90), this device is {device.arch}"
        no_triton = triton_missing()
        if no_triton is not None:
            return no_triton
        if missing("triton.experimental.gluon.nvidia.hopper") is not None:
            return "needs Gluon, which ships inside Triton 3.6.0 and later; update triton"
        if device.shared_memory and device.shared_memory < _SHARED_MEMORY:
            return f"needs {_SHARED_MEMORY} bytes of shared memory a block, this device has {device.shared_memory}"
        if problem.format not in _KERNELS:
            return no_kernel(problem.format, tuple(_KERNELS))
        if not 1 <= problem.num_heads <= 128:
            return f"takes 1 to 128 heads, got {problem.num_heads}"
        if problem.num_kv_splits is not None and problem.num_kv_splits > _MAX_SPLITS:
            return f"takes at most {_MAX_SPLITS} splits, got num_kv_splits={problem.num_kv_splits}"
        if problem.split_size is not None:
            if problem.split_size % BLOCK_KEYS:
                return f"takes a split_size that is a multiple of {BLOCK_KEYS}, got {problem.split_size}"
            if problem.max_kv_len > _MAX_SPLITS * problem.split_size:
                return f"takes at most {_MAX_SPLITS} splits, which split_size={problem.split_size} may exceed"
        return None

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        launch = choose_launch(problem, device)
        load = "rows gathered by cp.async" if launch.gather else f"tensor maps of {launch.box} keys"
        how = (
            f"{launch.workers} workers take equal pieces of the batch, planned on the device"
            if launch.mode == 0
            else f"{launch.workers} splits of every sequence, as asked"
        )
        return LaunchConfig(
            backend=self.name,
            kernel=_KERNELS[problem.format],
            block_rows=launch.rows,
            block_kv=BLOCK_KEYS,
            num_workers=launch.grid,
            reason=f"{launch.tiles} row tile(s) of {launch.rows}, {launch.blocks_per_sm} block(s) an SM; {how}; {load}",
            extra=(
                ("stages", str(launch.stages)),
                ("warps", _warps(launch)),
            ),
        )

    def host_plan(self, problem: DecodeProblem, device: DeviceInfo, kv_lens: Sequence[int]) -> HopperPlan:
        """The schedule that the blocks of :meth:`run` work out for sequences of these lengths."""
        return host_plan(kv_lens, choose_launch(problem, device))

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> Workspace:
        launch = choose_launch(problem, describe(device))
        # A later call may be smaller, and use more workers on smaller tiles.
        rows = max(launch.partial_rows, 2 * (2 * describe(device).num_sms + 1) * 16 if launch.mode == 0 else 0)
        return Workspace(
            part_out=torch.empty(rows, 512, dtype=torch.float32, device=device),
            part_lse=torch.empty(rows, dtype=torch.float32, device=device),
            counters=torch.zeros(4 + 2 * max(problem.batch, 1) * launch.tiles, dtype=torch.int32, device=device),
        )

    def run(self, args: DecodeArgs, workspace: Workspace) -> None:
        if args.problem.batch and args.problem.total_q:
            self.prepare(args, workspace)(args, workspace)

    def prepare(self, args: DecodeArgs, workspace: Workspace) -> Callable[[DecodeArgs, Workspace], None]:
        """See :func:`leanmla.backends.prepare`."""
        problem = args.problem
        if args.cache.data.numel() == 0:
            return _without_keys
        launch = choose_launch(problem, describe(args.q.device))
        counters = (workspace.counters.numel() - 4) // 2
        if launch.partial_rows > workspace.part_lse.numel() or problem.batch * launch.tiles > counters:
            raise CapacityExceeded(
                f"workspace: it holds {workspace.part_lse.numel()} partial rows and {counters} counters, {problem} "
                f"needs {launch.partial_rows} and {problem.batch * launch.tiles}. Make the plan for a larger problem."
            )
        _check_cache(args)
        from .repeat import Repeat

        return Repeat(importlib.import_module(_KERNELS[problem.format].removesuffix(".py").replace("/", ".")), launch)


def _warps(launch: HopperLaunch) -> str:
    """Warps of a block, role by role."""
    scorer = "4 + " if launch.format in ("bf16", "fp8") and launch.rows == 64 else ""
    return f"{launch.num_warps} + {scorer}{4 if launch.gather or launch.format == 'mxfp4' else 1}"


def _without_keys(args: DecodeArgs, workspace: Workspace) -> None:
    """A pool without pages: nobody has a key, and there is nothing that a tensor map could describe."""
    args.out.zero_()
    if args.lse is not None:
        args.lse.fill_(-torch.inf)


def _check_cache(args: DecodeArgs) -> None:
    data = args.cache.data
    item = data.element_size()
    if data.data_ptr() % 16 or any(s * item % 16 for s in data.stride()[:2]):
        raise InvalidArgument(
            f"cache: backend 'hopper' reads 16 bytes at a time, so rows must start at multiples of 16 bytes; got address "
            f"{data.data_ptr():#x} and strides of {[s * item for s in data.stride()[:2]]} bytes. Align the buffer, or use backend='triton'."
        )


BACKEND = HopperBackend()

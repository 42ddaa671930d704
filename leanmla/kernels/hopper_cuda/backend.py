"""The ``hopper_cuda`` backend: CUDA C++ for sm_90, for the cache formats mxfp4_row320 and mxfp4."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch

from ... import settings
from ...device import DeviceInfo, describe
from ...errors import CapacityExceeded, InvalidArgument
from ...problem import DecodeArgs, DecodeProblem, LaunchConfig
from . import compiler
from .arguments import HEADER, fill, refill
from .launch import KEYS, MODES, ROWS, arrangement_for, choose_launch
from .launch_configs import Arrangement

__all__ = ["BACKEND", "HopperCudaBackend", "Workspace"]

#: Most splits of one sequence: arrivals are counted in 15 bits (reduction.cuh).
_MAX_SPLITS = 32767


@dataclass
class Workspace:
    """Scratch of one plan. ``counters`` start as zeros; every launch leaves the set that the next one uses as zeros."""

    part_out: torch.Tensor  #: fp32 [slots, 16 * 512]
    part_lse: torch.Tensor  #: fp32 [slots, 16]
    counters: torch.Tensor  #: int32 [4 + 2 * batch * row tiles], see reduction.cuh
    arrangement: Arrangement  #: that it was made for, with which calls run


class HopperCudaBackend:
    """See ``leanmla.backends.Backend``."""

    name = "hopper_cuda"

    def why_not(self, problem: DecodeProblem, device: DeviceInfo) -> str | None:
        if device.kind != "cuda" or device.arch != "sm_90":
            return f"needs an NVIDIA Hopper GPU (sm_90), this device is {device.arch}"
        if problem.format not in compiler.FORMATS:
            return f"has a kernel for cache formats {' and '.join(compiler.FORMATS)} only, this is '{problem.format}'"
        needed = arrangement_for(problem, device).shared_bytes
        if device.shared_memory and device.shared_memory < needed:
            return f"needs {needed} bytes of shared memory a block, this device has {device.shared_memory}"
        if not 1 <= problem.num_heads <= 128:
            return f"takes 1 to 128 heads, got {problem.num_heads}"
        if problem.num_kv_splits is not None and problem.num_kv_splits > _MAX_SPLITS:
            return f"takes at most {_MAX_SPLITS} splits, got num_kv_splits={problem.num_kv_splits}"
        if problem.split_size is not None:
            if problem.split_size % KEYS:
                return f"takes a split_size that is a multiple of {KEYS}, got {problem.split_size}"
            if problem.max_kv_len > _MAX_SPLITS * problem.split_size:
                return f"takes at most {_MAX_SPLITS} splits, which split_size={problem.split_size} may exceed"
        return compiler.unavailable()

    def launch_config(self, problem: DecodeProblem, device: DeviceInfo) -> LaunchConfig:
        launch, arrangement = choose_launch(problem, device), arrangement_for(problem, device)
        whole = problem.table_kind == "contiguous" or problem.page_size % ROWS == 0
        how = (
            f"{launch.workers} workers take equal pieces of the batch, planned on the device"
            if launch.mode == MODES["balanced"]
            else f"{launch.workers} splits of every sequence, as asked"
        )
        return LaunchConfig(
            backend=self.name,
            kernel=f"leanmla/kernels/hopper_cuda/{compiler.SOURCE}",
            block_rows=ROWS,
            block_kv=KEYS,
            num_workers=launch.grid,
            reason=f"{launch.tiles} row tile(s) of {ROWS}, {arrangement.blocks_per_sm} block(s) an SM; {how}; rows copied {ROWS if whole else 1} at a time",
            extra=(
                ("arrangement", arrangement.name),
                ("stages", str(arrangement.stages)),
                ("warps", f"{4 * arrangement.groups} scoring + 4 summing"),
            ),
        )

    def make_workspace(self, problem: DecodeProblem, device: torch.device) -> Workspace:
        info = describe(device)
        arrangement = arrangement_for(problem, info)
        launch = choose_launch(problem, info, arrangement)
        # A later call may be smaller, and use more workers on fewer row tiles.
        slots = max(launch.slots, 2 * (info.num_sms * arrangement.blocks_per_sm + 1) if launch.mode == MODES["balanced"] else 0)
        return Workspace(
            part_out=torch.empty(slots, ROWS * 512, dtype=torch.float32, device=device),
            part_lse=torch.empty(slots, ROWS, dtype=torch.float32, device=device),
            counters=torch.zeros(HEADER + 2 * max(problem.batch, 1) * launch.tiles, dtype=torch.int32, device=device),
            arrangement=arrangement,
        )

    def run(self, args: DecodeArgs, workspace: Workspace) -> None:
        if args.problem.batch and args.problem.total_q:
            self.prepare(args, workspace)(args, workspace)

    def prepare(self, args: DecodeArgs, workspace: Workspace) -> Repeat:
        """See :func:`leanmla.backends.prepare`."""
        return Repeat(args, workspace)


class Repeat:
    """The launch of a checked call; calling it runs a call like it, see :func:`leanmla.backends.prepare`. Keeps no tensor.

    Raises:
        InvalidArgument: rows of the cache are not aligned. CapacityExceeded: the workspace is too small.
    """

    def __init__(self, args: DecodeArgs, workspace: Workspace) -> None:
        problem, arrangement = args.problem, workspace.arrangement
        launch = choose_launch(problem, describe(args.q.device), arrangement)
        counters = (workspace.counters.numel() - HEADER) // 2
        if launch.slots > workspace.part_lse.shape[0] or problem.batch * launch.tiles > counters:
            raise CapacityExceeded(
                f"workspace: it holds {workspace.part_lse.shape[0]} partial results and {counters} counters, {problem} "
                f"needs {launch.slots} and {problem.batch * launch.tiles}. Make the plan for a larger problem."
            )
        _check_cache(args)
        self._variant = compiler.Variant(problem.format, problem.q_dtype == "fp16", problem.logit_cap > 0, arrangement)
        self._grid = launch.grid
        self._filled = fill(args, launch, workspace)

    def __call__(self, args: DecodeArgs, workspace: Workspace) -> None:
        """Launch on torch's current stream; a capture records it."""
        if workspace.arrangement is not self._variant.arrangement:  # see launch_configs.using
            BACKEND.run(args, workspace)
        else:
            _launch(args.q.device, self._variant, self._grid, refill(self._filled, args, workspace))


def _launch(device: torch.device, variant: compiler.Variant, grid: int, arguments: ctypes.Structure) -> None:
    """On torch's current stream; a capture records it."""
    index = torch.cuda.current_device()
    if device.index is None or device.index == index:
        _enqueue(index, variant, grid, arguments)
    else:
        with torch.cuda.device(device):
            _enqueue(device.index, variant, grid, arguments)


def _enqueue(index: int, variant: compiler.Variant, grid: int, arguments: ctypes.Structure) -> None:
    """On the current stream of the current device, ``index``."""
    from cuda.bindings import driver

    shape, kernel = variant.arrangement, compiler.kernel(variant, index)
    stream = driver.CUstream(torch.cuda.current_stream(index).cuda_stream)
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))  # copied by the launch

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes, config.hStream = shape.shared_bytes, stream
    if settings.programmatic_launch():
        config.attrs, config.numAttrs = [_overlap()], 1

    def attempt() -> tuple:
        return driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(parameters), 0)

    answer = attempt()
    if answer[0] == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        # A thread in which nothing has used the GPU yet; torch's context is the device's primary one.
        from cuda.core import Device

        Device(index).set_current()
        answer = attempt()
    compiler.check(answer, "cuLaunchKernelEx")


@functools.cache
def _overlap():
    """The launch attribute that lets a kernel begin before the kernel before it has ended; see wait_for_kernel_before in ptx.cuh."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


def _check_cache(args: DecodeArgs) -> None:
    data = args.cache.data
    if data.data_ptr() % 16 or any(s % 16 for s in data.stride()[:2]):
        raise InvalidArgument(
            f"cache: backend 'hopper_cuda' copies rows in units of 16 bytes, so they must start at multiples of 16 bytes; got address "
            f"{data.data_ptr():#x} and strides of {list(data.stride()[:2])} bytes. Align the buffer, or use backend='triton'."
        )
    for name, tensor in (("cache", data), ("scale", args.cache.scale)):
        if tensor is not None and max(tensor.stride()[:2]) >= 1 << 31:
            raise InvalidArgument(
                f"{name}: backend 'hopper_cuda' takes strides below 2^31 bytes, got {list(tensor.stride()[:2])}. Use backend='triton'."
            )


BACKEND = HopperCudaBackend()

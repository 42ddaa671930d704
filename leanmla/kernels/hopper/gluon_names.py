"""The one place that knows where Gluon keeps its names.

Written against Triton 3.6.0. Later versions move some of them; kernels import from here and never from Gluon itself.
"""

from __future__ import annotations

from types import ModuleType

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._layouts import (
    BlockedLayout,
    DistributedLinearLayout,
    DotOperandLayout,
    NVMMADistributedLayout,
    NVMMASharedLayout,
    SliceLayout,
    SwizzledSharedLayout,
)
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

try:  # public in later versions
    from triton.language.core import aggregate  # type: ignore[attr-defined]
except ImportError:
    from triton.language.core import _aggregate as aggregate

#: Barrier over the threads of the running partition ("barrier" in later versions).
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

constexpr_function = gluon.constexpr_function

# Later versions call the copies async_load.
if hasattr(async_copy, "async_load"):
    from triton.experimental.gluon.language._core import builtin

    _async_load = async_copy.async_load

    @builtin
    def _load_rows(smem, pointer, mask=None, _semantic=None):
        """Copies of 16 bytes at multiples of 16 (``backend._check_cache``), which 3.9 does not find out in a warp-specialised partition."""
        vec = 128 // pointer.dtype.element_ty.primitive_bitwidth
        pointer = _semantic.max_contiguous(_semantic.multiple_of(pointer, [1, 16]), [1, vec])
        return _async_load(smem, pointer, mask=mask, _semantic=_semantic)

    def _renamed(module: ModuleType, copy) -> ModuleType:
        made = ModuleType(module.__name__)
        vars(made).update(vars(module), async_copy_global_to_shared=copy)
        return made

    async_copy, tma = _renamed(async_copy, _load_rows), _renamed(tma, tma.async_load)

# A method that lost its underscore in later versions.
if not hasattr(gl.shared_memory_descriptor, "_reinterpret"):
    gl.shared_memory_descriptor._reinterpret = gl.shared_memory_descriptor.reinterpret  # type: ignore[attr-defined]


__all__ = [
    "BlockedLayout",
    "DistributedLinearLayout",
    "DotOperandLayout",
    "NVMMADistributedLayout",
    "NVMMASharedLayout",
    "SliceLayout",
    "SwizzledSharedLayout",
    "TensorDescriptor",
    "aggregate",
    "async_copy",
    "constexpr_function",
    "fence_async_shared",
    "gl",
    "gluon",
    "mbarrier",
    "thread_barrier",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

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


def _with_old_name(module: ModuleType) -> ModuleType:
    """Later versions call the copies ``async_load``."""
    if not hasattr(module, "async_load"):
        return module
    renamed = ModuleType(module.__name__)
    vars(renamed).update(vars(module), async_copy_global_to_shared=module.async_load)
    return renamed


async_copy, tma = _with_old_name(async_copy), _with_old_name(tma)

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

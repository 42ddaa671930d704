"""Load code objects and launch kernels through the HIP runtime that torch already uses. Written for ROCm; not yet run on one.

Only four functions of the HIP module API are needed, so they are called through ctypes: the bytes that were built (and
emulated) are the bytes that run, with the same packed arguments, whatever compiler they came from.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import torch

from ...errors import BackendUnavailable

__all__ = ["launch", "load"]

_BUFFER_POINTER, _BUFFER_SIZE, _END = 1, 2, 3  # HIP_LAUNCH_PARAM_*


def _library_path() -> str:
    """The libamdhip64 that this process has loaded: a second copy would not share torch's context."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        maps = ""
    loaded = re.search(r"(/\S*libamdhip64\.so\S*)", maps)
    if loaded:
        return loaded[1]
    bundled = Path(torch.__file__).parent / "lib" / "libamdhip64.so"
    return str(bundled) if bundled.exists() else "libamdhip64.so"


@functools.cache
def _hip() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_library_path())
    except OSError as error:
        raise BackendUnavailable(f"backend='flydsl' cannot run: needs the HIP runtime of a ROCm build of torch ({error}).") from None
    library.hipGetErrorString.restype = ctypes.c_char_p
    return library


def _check(status: int, what: str) -> None:
    if status:
        text = _hip().hipGetErrorString(status).decode()
        raise RuntimeError(f"{what} failed: {text} (HIP error {status})")


@functools.cache
def load(hsaco: bytes, name: str, device: int) -> ctypes.c_void_p:
    """The function ``name`` of a code object, loaded on HIP device ``device``. Kept for the life of the process."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes sure that the device has a context
        _check(_hip().hipModuleLoadData(ctypes.byref(module), hsaco), f"hipModuleLoadData of {name}")
        _check(_hip().hipModuleGetFunction(ctypes.byref(function), module, name.encode()), f"hipModuleGetFunction of {name}")
    return function


def launch(
    function: ctypes.c_void_p, grid: tuple[int, int, int], block: tuple[int, int, int], dynamic_lds: int, stream: int, segment: bytes
) -> None:
    """Launch on ``stream`` (``torch.cuda.current_stream().cuda_stream``) with a packed kernarg segment."""
    buffer = ctypes.create_string_buffer(segment, len(segment))
    size = ctypes.c_size_t(len(segment))
    extra = (ctypes.c_void_p * 5)(
        _BUFFER_POINTER, ctypes.cast(buffer, ctypes.c_void_p), _BUFFER_SIZE, ctypes.cast(ctypes.byref(size), ctypes.c_void_p), _END
    )
    unsigned = [ctypes.c_uint(n) for n in (*grid, *block, dynamic_lds)]
    status = _hip().hipModuleLaunchKernel(function, *unsigned, ctypes.c_void_p(stream), None, extra)
    _check(status, "hipModuleLaunchKernel")

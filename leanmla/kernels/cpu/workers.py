"""Runs a C function on several threads at once.

torch's own OpenMP threads are used where they can be reached. They spin for some milliseconds after every torch
operation, and a second set of threads would share the cores with them: right after a torch operation, batch 4,
kv 8192, 16 heads in bf16 takes 3.8 ms on two cores this way and 6.0 ms on Python threads (4.4 ms when torch is idle).
Where they cannot be reached Python threads do it; a C function called through ctypes runs without the GIL.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

__all__ = ["Scratch", "run_on_workers"]


def run_on_workers(function, argument: int, num_workers: int) -> None:
    """Call the C function ``void function(int64)`` on up to ``num_workers`` threads, this one among them, and wait."""
    if num_workers == 1:
        function(argument)
        return
    parallel = None if _forked else _openmp_parallel()
    if parallel is not None:
        parallel(ctypes.cast(function, ctypes.c_void_p), argument, num_workers, 0)
        return
    pool = _get_pool(num_workers - 1)
    others = [pool.submit(function, argument) for _ in range(1, num_workers)]
    function(argument)
    for other in others:
        other.result()


@functools.cache
def _openmp_parallel():
    """``GOMP_parallel`` of the OpenMP library that torch runs on, or None.

    libgomp exports it, and so do the LLVM and Intel libraries for programs that gcc compiled. Looked up through
    torch's own library, so that it is the same copy.
    """
    if not torch.backends.openmp.is_available() or not hasattr(os, "RTLD_NOLOAD"):
        return None
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        try:
            library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            parallel = library.GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_pool_size = 0
_forked = False


def _get_pool(size: int) -> ThreadPoolExecutor:
    global _pool, _pool_size
    with _lock:
        if _pool is None or _pool_size < size:
            if _pool is not None:
                _pool.shutdown(wait=False)  # finishes what it was given
            _pool, _pool_size = ThreadPoolExecutor(size, thread_name_prefix="leanmla-cpu"), size
        return _pool


def _after_fork() -> None:
    """Threads do not survive a fork, and an OpenMP library that had some waits for them for ever."""
    global _lock, _pool, _pool_size, _forked
    _lock, _pool, _pool_size, _forked = threading.Lock(), None, 0, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Scratch:
    """Buffers of one size, lent to workers and kept for the next call. Safe to use from several threads."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._free: list[np.ndarray] = []

    def take(self, count: int) -> list[np.ndarray]:
        """``count`` buffers that start on a cache line."""
        taken = []
        for _ in range(count):
            try:
                taken.append(self._free.pop())
            except IndexError:
                raw = np.empty(self._num_bytes + 64, dtype=np.uint8)
                skip = -raw.ctypes.data % 64
                taken.append(raw[skip : skip + self._num_bytes])
        return taken

    def give_back(self, buffers: list[np.ndarray]) -> None:
        self._free.extend(buffers)

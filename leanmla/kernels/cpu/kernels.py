"""The compiled entry point. Importing this module compiles it, or loads it from numba's file cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

from numba import cfunc, types

from ...errors import BackendUnavailable
from .decode import entry
from .simd import why_not

__all__ = ["run"]


def _fingerprint() -> str:
    """A digest of the kernel sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _compile():
    reason = why_not()
    if reason is not None:
        raise BackendUnavailable(f"backend='cpu' cannot run: {reason}.")
    # numba keys its file cache by what a function closes over, and is blind to changes in the modules it calls.
    fingerprint = _fingerprint()

    def run(address):
        fingerprint  # noqa: B018
        entry(address)

    try:
        return cfunc(types.void(types.int64), nopython=True, cache=True)(run)
    except RuntimeError:  # numba found no folder it may write to
        return cfunc(types.void(types.int64), nopython=True)(run)


_compiled = _compile()

#: void run(CALL *), a C function: plans a call, or is what each worker runs.
run = _compiled.ctypes

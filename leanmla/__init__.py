"""LeanMLA: MLA decode attention with latent KV caches in bf16, fp8 and MXFP4.

Importing this package touches no GPU and needs no Triton.
"""

from __future__ import annotations

import os as _os
import sys as _sys

try:
    from .cache import LatentCache
    from .decode import CapturedDecode, DecodePlan, merge_states, mla_decode
    from .errors import (
        BackendUnavailable,
        CapacityExceeded,
        InvalidArgument,
        InvalidDtype,
        InvalidTable,
        LeanMLAError,
        MissingScale,
        PlanMismatch,
    )
    from .page_table import PageTable
    from .problem import DIMS, DecodeProblem, MLADims
except KeyboardInterrupt:
    # The leanmla command imports this, and so torch, before any line of its own can run: there Ctrl-C is no error.
    if _os.path.basename(_sys.argv[0]) == "leanmla" or _sys.orig_argv[1:3] == ["-m", "leanmla"]:
        raise SystemExit(130) from None
    raise

__version__ = "0.1.0"

__all__ = [
    "DIMS",
    "BackendUnavailable",
    "CapacityExceeded",
    "CapturedDecode",
    "DecodePlan",
    "DecodeProblem",
    "InvalidArgument",
    "InvalidDtype",
    "InvalidTable",
    "LatentCache",
    "LeanMLAError",
    "MLADims",
    "MissingScale",
    "PageTable",
    "PlanMismatch",
    "merge_states",
    "mla_decode",
]

"""``aiter.utility``: only the MXFP4 helpers."""

from __future__ import annotations

from .. import dtypes
from . import fp4_utils

__all__ = ["dtypes", "fp4_utils"]

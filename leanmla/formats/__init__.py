"""Cache formats: one file each. ``get(name)`` hands them out, ``FORMATS`` lists them."""

from __future__ import annotations

from ..errors import InvalidArgument
from .base import CacheFormat, Quantized
from .bf16 import BF16
from .fp8 import FP8
from .fp8_tile128 import FP8Tile128
from .mxfp4 import MXFP4

__all__ = ["FORMATS", "CacheFormat", "Quantized", "get"]

FORMATS: dict[str, CacheFormat] = {f.name: f for f in (BF16(), FP8(), MXFP4(), FP8Tile128())}


def get(name: str | CacheFormat) -> CacheFormat:
    """The format called ``name`` (a format object is returned as it is).

    Raises:
        InvalidArgument: there is no such format.
    """
    if isinstance(name, CacheFormat):
        return name
    if not isinstance(name, str) or name not in FORMATS:
        raise InvalidArgument(f"format: expected one of {', '.join(FORMATS)}, got {name!r}.")
    return FORMATS[name]

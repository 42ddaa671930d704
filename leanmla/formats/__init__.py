"""Cache formats: one file each. ``get(name)`` hands them out, ``FORMATS`` lists them."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InvalidArgument
from .base import CacheFormat, Quantized
from .bf16 import BF16
from .fp8 import FP8
from .fp8_tile128 import FP8Tile128
from .mxfp4 import MXFP4
from .mxfp4_row320 import MXFP4Row320

__all__ = ["CONVERTIBLE", "FORMATS", "CacheFormat", "Quantized", "get", "no_kernel"]

FORMATS: dict[str, CacheFormat] = {f.name: f for f in (BF16(), FP8(), MXFP4(), FP8Tile128(), MXFP4Row320())}

#: Pairs of formats that hold the same values in two layouts, see :meth:`leanmla.LatentCache.convert`.
CONVERTIBLE: tuple[tuple[str, str], ...] = (("mxfp4", "mxfp4_row320"),)


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


def no_kernel(name: str, known: Sequence[str]) -> str:
    """The sentence of a backend that has kernels for the formats ``known``, but not for ``name``."""
    twin = next((a if b == name else b for a, b in CONVERTIBLE if name in (a, b)), None)
    hint = f"; LatentCache.convert('{twin}') makes a cache of the same values that it reads" if twin in known else ""
    return f"has no kernel for cache format '{name}' (it has {', '.join(known)}){hint}"

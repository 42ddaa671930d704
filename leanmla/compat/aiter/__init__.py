"""``aiter``: MLA decode, its persistent metadata and its reduction, with our kernels behind them.

Only this part of aiter is offered; anything else is an ImportError or AttributeError as for a module that lacks it.
"""

from __future__ import annotations

from . import dtypes, mla, utility
from .metadata import decode_update_mla_metadata_v1, get_mla_metadata_info_v1, get_mla_metadata_v1
from .reduce import mla_reduce_v1

__all__ = [
    "decode_update_mla_metadata_v1",
    "dtypes",
    "get_mla_metadata_info_v1",
    "get_mla_metadata_v1",
    "mla",
    "mla_reduce_v1",
    "utility",
]

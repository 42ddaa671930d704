"""``flashinfer``: only its MLA decode wrapper."""

from __future__ import annotations

from . import mla
from .mla import BatchMLAPagedAttentionWrapper

__all__ = ["BatchMLAPagedAttentionWrapper", "mla"]

"""From a key of a sequence to its address: the one place that knows page tables.

A page id is read a tile before the key it leads to, so the two memory latencies do not add up. Ids are only read for keys
of the sequence (a key past the end repeats the last one), and a key past the end is given the address of a row of zeros:
unused table entries are never read as ids, unused storage never as keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flydsl.expr as fx

from . import ops
from .spec import DecodeSpec, PlanSpec

__all__ = ["KeyRows", "data_address", "kv_length", "page_of", "scale_address"]


@dataclass
class KeyRows:
    """What is needed to find a key of the block's sequence; traced values but for ``spec``."""

    spec: DecodeSpec
    thread: Any
    kv: Any
    kv_scale: Any
    zeros: Any
    page_ids: Any
    first_page: Any  #: int64, where the sequence begins: index into page_ids, or first slot if contiguous
    kv_page_stride: Any
    kv_token_stride: Any
    scale_page_stride: Any
    scale_token_stride: Any
    end: Any  #: one past the last key this block reads


def kv_length(spec: DecodeSpec | PlanSpec, kv_indptr, kv_lens, table_stride, sequence):
    """(keys of the sequence, int64 index where its pages begin)."""
    at = ops.widen(sequence) * 4
    if spec.table_kind == "block_table":
        keys = ops.global_load(kv_lens + at, fx.Int32, constant=True)
        return keys, ops.widen(sequence) * ops.widen(table_stride)
    first = ops.global_load(kv_indptr + at, fx.Int32, constant=True)
    pages = ops.global_load(kv_indptr + at, fx.Int32, offset=4, constant=True) - first
    if spec.table_kind == "contiguous" or spec.page_size == 1:
        return pages, ops.widen(first)
    last = ops.global_load(kv_lens + at, fx.Int32, constant=True)
    return ops.select(pages > 0, (pages - 1) * spec.page_size + last, fx.Int32(0)), ops.widen(first)


def _own(rows: KeyRows, key):
    """``key``, or the last key of the range if it lies past the end."""
    return ops.minimum(key, rows.end - 1)


def page_of(rows: KeyRows, key):
    """int32 page id of a key (its slot if contiguous). Call only where the block has keys."""
    key = _own(rows, key)
    if rows.spec.table_kind == "contiguous":
        return fx.Int32(rows.first_page) + key
    index = rows.first_page + ops.widen(ops.udiv(key, rows.spec.page_size))
    return ops.global_load(rows.page_ids + index * 4, fx.Int32, constant=True)


def _address(rows: KeyRows, base, page_stride, token_stride, page, key):
    address = base + ops.widen(page) * page_stride
    if rows.spec.page_size > 1:
        address = address + ops.widen(ops.umod(_own(rows, key), rows.spec.page_size)) * token_stride
    return ops.select(key < rows.end, address, rows.zeros)


def data_address(rows: KeyRows, page, key):
    """Address of a key's data, or of zeros past the end."""
    return _address(rows, rows.kv, rows.kv_page_stride, rows.kv_token_stride, page, key)


def scale_address(rows: KeyRows, page, key):
    """Address of a key's block scales (mxfp4), or of zeros past the end."""
    return _address(rows, rows.kv_scale, rows.scale_page_stride, rows.scale_token_stride, page, key)

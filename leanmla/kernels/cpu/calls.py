"""The records that carry a call from Python to the compiled kernels: plain numpy structures, addresses as int64."""

from __future__ import annotations

import numpy as np

__all__ = ["CALL", "CALL_FIELDS", "CALL_FORMAT", "ITEM", "MAX_ROWS", "MERGE", "PLAN", "TILE", "WORK"]

TILE = 64  #: keys a tile
MAX_ROWS = 128  #: query rows an item


def _record(ints: str, floats: str = "") -> np.dtype:
    return np.dtype([(name, "i8") for name in ints.split()] + [(name, "f8") for name in floats.split()])


#: What the entry point is to do with a call: cut it into items, or work on them.
PLAN, WORK = 0, 1

#: One call. All strides are in bytes.
#: next_worker, next_item: counters that all workers share, 0 at the start.
#: stage: PLAN or WORK.
#: items, item_capacity, num_items: address of ITEM records, room for them, how many there are. The same for MERGE records.
#: num_slots: partial slots; num_pairs: row-key pairs. Both, and the numbers of records, are found by planning.
#: scratch: address of an int64 address for each worker, SCRATCH_BYTES behind each.
#: as_bf16: form of the tiles. format: a code of tiles.py. q_is_fp16: q and out are fp16, otherwise bf16.
#: qo_indptr, page_ids, kv_indptr, kv_last_page_len, cache_seqlens: int32; 0 where the kind of table has none.
#: scales: of an mxfp4 cache, otherwise 0. tensor_scale: of an fp8 cache, otherwise 1. lse: 0 where not wanted.
#: partial_out fp32 [slots, 512] in tile order, partial_lse fp32 [slots].
CALL = _record(
    "next_worker next_item stage items item_capacity num_items merges merge_capacity num_merges num_slots num_pairs scratch "
    "batch total_q num_heads causal num_threads num_kv_splits split_size "
    "qo_indptr page_size page_ids page_ids_stride kv_indptr kv_last_page_len cache_seqlens "
    "as_bf16 format q q_stride q_head_stride q_is_fp16 out out_stride out_head_stride lse partial_out partial_lse "
    "data page_stride token_stride token_bytes scales scale_page_stride scale_token_stride",
    "sm_scale logit_cap tensor_scale",
)

#: CALL for the struct module: its fields in order, and their types.
CALL_FIELDS: tuple[str, ...] = CALL.names or ()
CALL_FORMAT = "".join("q" if CALL[name] == np.int64 else "d" for name in CALL_FIELDS)

#: Work: keys kv_start:kv_end for rows row_start:row_end of one sequence (row = query token * num_heads + head).
#: first_query: row of q and out of the sequence's first query token.
#: page_ids: address of the sequence's int32 page ids; 0: key t is cache slot first_slot + t.
#: merge: index of the MERGE that this item's partial result, from slot ``partial`` on, belongs to; -1: it is the whole.
ITEM = _record("first_query q_len kv_len kv_start kv_end row_start row_end page_ids first_slot partial merge")

#: Rows whose keys were split. Split s of row row_start + r lies in slot ``partial + s * split_stride + r``.
#: pending: splits that are not done; whoever does the last one merges.
MERGE = _record("first_query row_start row_end num_splits partial split_stride pending")

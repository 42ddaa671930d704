"""aiter's persistent metadata: walk the work list and prove that it covers every key of every sequence once."""

import random

import pytest
import torch

from leanmla.compat import aiter
from leanmla.errors import CapacityExceeded, InvalidArgument

NAMES = ("work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
MODES = ("fast", "default", "intra")


def offsets(lens):
    return torch.tensor([0, *lens]).cumsum(0).to(torch.int32)


def make(kv_lens, q_lens, *, mode, page=1, granularity=16, limit=-1, units=13, device="cpu", **options):
    """Metadata in buffers full of garbage, for a device with ``units`` compute units."""
    batch = len(kv_lens)
    pages = [-(-n // page) for n in kv_lens]
    last = torch.tensor([n - (p - 1) * page if n else 0 for n, p in zip(kv_lens, pages)], dtype=torch.int32)
    splits = limit if limit > 0 else 5
    if mode == "intra":
        work = partials = batch * splits
    else:
        work, partials = batch + units - 1, max(1, min(batch + units - 1, 2 * (units - 1)))
    shapes = ((2,), (units + 1,), (work, 8), (batch + 1,), (batch, 2), (partials,))
    meta = {
        n: torch.full(s, 12345, dtype=torch.int32, device=device) if n != "work_metadata_ptrs" else
        torch.zeros(s, dtype=torch.uint64, device=device) for n, s in zip(NAMES, shapes)
    }  # fmt: skip
    tables = [t.to(device) for t in (offsets(q_lens), offsets(pages), last)]
    aiter.get_mla_metadata_v1(
        *tables, 16, 1, True, meta["work_metadata_ptrs"], meta["work_info_set"], meta["work_indptr"],
        meta["reduce_indptr"], meta["reduce_final_map"], meta["reduce_partial_map"], page_size=page,
        kv_granularity=granularity, fast_mode=mode == "fast", intra_batch_mode=mode == "intra", max_split_per_batch=limit, **options,
    )  # fmt: skip
    return meta


def walk(meta, kv_lens, q_lens, *, page, granularity=None, limit=None):
    """Check everything that the tensors promise. Returns the items of each sequence as (kv_start, kv_end) pages."""
    meta = {n: t.cpu() for n, t in meta.items()}
    batch = len(kv_lens)
    kv = offsets([-(-n // page) for n in kv_lens]).tolist()
    qo = offsets(q_lens).tolist()
    work = meta["work_indptr"].tolist()
    assert work[0] == 0 and work == sorted(work) and work[-1] <= meta["work_info_set"].shape[0]
    rows = meta["work_info_set"].tolist()
    assert all(r == [0] * 8 for r in rows[work[-1] :]), "unused rows must be zeros"
    # Every item belongs to one unit: the ranges of work_indptr follow each other by construction, so walking units walks items.
    items = [[] for _ in range(batch)]
    for unit in range(len(work) - 1):
        for b, partial, q_start, q_end, kv_start, kv_end, left, pad in rows[work[unit] : work[unit + 1]]:
            assert 0 <= b < batch and pad == 0
            assert (q_start, q_end) == (qo[b], qo[b + 1])
            assert kv[b] <= kv_start <= kv_end <= kv[b + 1]
            first, end = (kv_start - kv[b]) * page, min((kv_end - kv[b]) * page, kv_lens[b])
            assert left == kv_lens[b] - end, "tokens left to the sequence's end"
            if granularity:
                assert first % (-(-granularity // page) * page) == 0, "items begin at multiples of the granularity"
            items[b].append((kv_start, kv_end, partial))
    reduce_indptr = meta["reduce_indptr"].tolist()
    assert reduce_indptr[0] == 0
    used_rows = []
    for b in range(batch):
        assert items[b], f"sequence {b} has no item, so no one would write its output"
        covered = [k for start, end, _ in items[b] for k in range(start, end)]
        assert covered == list(range(kv[b], kv[b + 1])), f"sequence {b}: every page once, in order"
        assert limit is None or len(items[b]) <= limit
        group = meta["reduce_partial_map"][reduce_indptr[b] : reduce_indptr[b + 1]].tolist()
        assert meta["reduce_final_map"][b].tolist() == [qo[b], qo[b + 1]]
        if len(items[b]) == 1:
            assert items[b][0][2] == -1 and group == []
        else:
            assert group == [p for _, _, p in items[b]], "the group merges exactly the sequence's partial results"
            assert min(group) >= 0
            for p in group:
                used_rows += range(p, p + q_lens[b])
    assert len(used_rows) == len(set(used_rows)), "partial results overlap"
    room = meta["reduce_partial_map"].numel() * max(q_lens, default=0)
    assert max(used_rows, default=-1) < room, "the partial buffer that callers allocate is too small"
    assert all(i == reduce_indptr[batch] for i in reduce_indptr[batch:])
    return [[(s, e) for s, e, _ in seq] for seq in items]


def cases(count):
    rng = random.Random(7)
    for _ in range(count):
        batch = rng.choice([1, 2, 5, 17])
        lens = [rng.choice([0, 1, 15, 16, 17, rng.randrange(3000), rng.randrange(200)]) for _ in range(batch)]
        uniform = rng.random() < 0.5
        q = [rng.choice([1, 2, 4])] * batch if uniform else [rng.randrange(0, 5) for _ in range(batch)]
        yield (
            lens,
            q,
            uniform,
            rng.choice([1, 16, 64]),
            rng.choice([16, 64, 128]),
            rng.choice([-1, 1, 2, 3, 8]),
            rng.choice([1, 2, 13, 304]),
        )


@pytest.mark.parametrize("mode", MODES)
def test_every_key_is_covered_once(mode):
    for lens, q, uniform, page, granularity, limit, units in cases(60):
        meta = make(
            lens, q, mode=mode, page=page, granularity=granularity, limit=limit, units=units,
            uni_seqlen_qo=q[0] if uniform else -1, max_seqlen_qo=max(q),
        )  # fmt: skip
        bound = limit if limit > 0 else (5 if mode == "intra" else None)
        walk(meta, lens, q, page=page, granularity=granularity, limit=bound)


def test_intra_batch_gives_every_sequence_the_same_number_of_items():
    lens = [1000, 400, 16 * 8, 17, 1]
    items = walk(make(lens, [1] * 5, mode="intra", limit=8), lens, [1] * 5, page=1)
    assert [len(i) for i in items] == [8, 8, 8, 2, 1]


def test_fast_mode_gives_every_unit_the_same_number_of_blocks():
    lens, units = [4096, 64, 1024], 10
    meta = make(lens, [1] * 3, mode="fast", units=units)
    walk(meta, lens, [1] * 3, page=1)
    work, rows = meta["work_indptr"].tolist(), meta["work_info_set"].tolist()
    loads = [sum(-(-(r[5] - r[4]) // 16) for r in rows[work[u] : work[u + 1]]) for u in range(units)]
    assert max(loads) == -(-sum(n // 16 for n in lens) // units)


def test_default_mode_cuts_evenly_within_a_sequence():
    lens = [4096, 500, 0, 16]
    items = walk(make(lens, [2] * 4, mode="default", units=8), lens, [2] * 4, page=1)
    # 256 + 32 + 1 + 1 blocks on 8 units are at most 37 an item: 7 items of 36 or 37 blocks.
    assert [len(i) for i in items] == [7, 1, 1, 1]
    assert {e - s for s, e in items[0]} == {36 * 16, 37 * 16}


def test_pointers_are_those_of_the_tensors():
    meta = make([100], [1], mode="fast")
    assert meta["work_metadata_ptrs"].view(torch.int64).tolist() == [
        meta["work_indptr"].data_ptr(),
        meta["work_info_set"].data_ptr(),
    ]


@pytest.mark.parametrize("mode", MODES)
def test_info_allocates_enough(mode):
    info = aiter.get_mla_metadata_info_v1(
        3, 2, 16, torch.bfloat16, torch.bfloat16, is_sparse=False, fast_mode=mode == "fast", num_kv_splits=4,
        intra_batch_mode=mode == "intra",
    )  # fmt: skip
    assert len(info) == 6 and info[0] == ((2,), torch.uint64)
    wm, wi, wis, ri, rfm, rpm = (torch.empty(s, dtype=t) for s, t in info)
    lens, q = [2000, 3, 700], [2, 1, 2]
    aiter.get_mla_metadata_v1(
        offsets(q), offsets(lens), torch.ones(3, dtype=torch.int32), 16, 1, True, wm, wis, wi, ri, rfm, rpm,
        fast_mode=mode == "fast", intra_batch_mode=mode == "intra",
    )  # fmt: skip
    walk(dict(zip(NAMES, (wm, wi, wis, ri, rfm, rpm))), lens, q, page=1, granularity=16)


@pytest.mark.parametrize("mode", MODES)
def test_update_follows_growth_and_rejection(mode):
    lens, q = [130, 0, 800, 17], [3, 3, 3, 3]
    meta = make(lens, q, mode=mode)
    for lens, q in (([131, 1, 801, 18], [1] * 4), ([120, 0, 5, 17], [1] * 4), ([5000, 40, 6, 1], [2] * 4)):
        aiter.decode_update_mla_metadata_v1(
            offsets(q), offsets(lens), torch.ones(4, dtype=torch.int32), 16, 1, True, meta["work_metadata_ptrs"],
            meta["work_info_set"], meta["work_indptr"], meta["reduce_indptr"], meta["reduce_final_map"],
            meta["reduce_partial_map"], num_reject_tokens=torch.zeros(4, dtype=torch.int32),
        )  # fmt: skip
        walk(meta, lens, q, page=1)


def test_refusals_name_the_argument():
    meta = make([100, 100], [1, 1], mode="fast")
    qo, kv, last = offsets([1, 1]), offsets([100, 100]), torch.ones(2, dtype=torch.int32)

    def call(exception, text, *, head=(16, 1, True), **changes):
        tensors = [
            meta[n]
            for n in (
                "work_metadata_ptrs",
                "work_info_set",
                "work_indptr",
                "reduce_indptr",
                "reduce_final_map",
                "reduce_partial_map",
            )
        ]
        tensors = [changes.pop(n, t) for n, t in zip(("a", "info", "b", "c", "d", "e"), tensors)]
        with pytest.raises(exception, match=text):
            aiter.get_mla_metadata_v1(
                changes.pop("qo", qo), changes.pop("kv", kv), changes.pop("last", last), *head, *tensors, **changes
            )

    call(CapacityExceeded, "work_info_set: this batch needs 14 entries, got 3", info=torch.empty(3, 8, dtype=torch.int32))
    call(InvalidArgument, r"^work_info_set: expected int32 \[n, 8\], got float32", info=torch.empty(20, 8))
    call(InvalidArgument, "^work_info_set: expected a tensor", info=None)
    call(InvalidArgument, "^max_split_per_batch: expected an integer", max_split_per_batch=None)
    call(InvalidArgument, "^seqlens_qo_indptr: expected offsets rising from 0", qo=torch.tensor([0, 2, 1], dtype=torch.int32))
    call(
        InvalidArgument,
        r"^kv_last_page_lens\[0\]: expected at most",
        last=torch.tensor([17, 1], dtype=torch.int32),
        page_size=16,
    )
    call(InvalidArgument, "^seqlens_kv_indptr: expected a tensor", kv=None)
    call(InvalidArgument, "num_heads_k", head=(16, 2, True))
    call(InvalidArgument, "topk", topk=64)
    call(InvalidArgument, "is_cp_round_robin", is_cp_round_robin=True)
    call(InvalidArgument, "uni_seqlen_qo: sequence 0 has 1", uni_seqlen_qo=2)
    call(InvalidArgument, r"max_seqlen_qo: a sequence has 3", qo=offsets([3, 1]), max_seqlen_qo=2)
    call(InvalidArgument, "seqlens_qo_indptr", qo=offsets([1]))
    with pytest.raises(InvalidArgument, match="is_sparse"):
        aiter.get_mla_metadata_info_v1(1, 1, 16, torch.bfloat16, torch.bfloat16, is_sparse=True)

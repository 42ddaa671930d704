"""Device functions of the Hopper kernels run on the host: who reads what, merging, logit caps, and what the NaN filter keeps."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from plain_gluon import Pointer, on_host, value

from leanmla.device import DeviceInfo
from leanmla.kernels.hopper.backend import BACKEND
from leanmla.kernels.hopper.launch import choose_launch
from leanmla.problem import DecodeProblem

H200 = DeviceInfo("cuda", "H200", "sm_90", 132, 227 * 1024, 140 * 2**30)


def problem(kv_lens, **changes):
    longest = max(max(kv_lens), 1)
    base = DecodeProblem(
        format="bf16", num_heads=16, batch=len(kv_lens), total_q=len(kv_lens), max_q_len=1, ragged_q=False, page_size=64,
        table_kind="block_table", max_kv_len=longest, total_kv=longest * len(kv_lens), q_dtype="bf16", causal=True, logit_cap=0.0,
        return_lse=True, num_kv_splits=None, split_size=None,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)


def walk(kv_lens, launch, lens_at_a_time=None):
    """Every (sequence, worker, first block, end block, splits, rank, stay, waits, slot) that the workers of a launch run."""
    schedule, pages = on_host("schedule"), on_host("pages")
    batch = len(kv_lens)
    table = pages.Pages(
        Pointer(np.array(kv_lens)), Pointer(np.zeros(1)), Pointer(np.zeros(1)), value(1), Pointer(np.zeros(1)), value(1), value(batch),
        pages.BLOCK_TABLE, 64, False,
    )  # fmt: skip
    width = lens_at_a_time or schedule.lens_width(batch)
    found = []
    for worker in range(launch.grid // launch.tiles):
        piece = schedule.plan_piece(
            table, value(worker), value(launch.workers), value(launch.splits), launch.mode, width, batch <= width
        )
        b, at, base, more = piece.b, piece.start, piece.base, schedule.has_work(piece, launch.mode)
        while more:
            kv_len, _, lo, hi, follow = schedule.segment(table, piece, b, at, base, launch.mode)
            splits, rank, stay, first, following, step = schedule.split_slots(
                piece, b, base, kv_len, value(launch.workers), 0, launch.tiles, launch.mode
            )
            slot = first if rank == 0 else following + (rank - 1) * step
            found.append([int(x) for x in (b, worker, lo, hi, splits, rank, stay, follow >= piece.end, slot)])
            base = at = follow
            b = b + 1
            more = launch.mode == 0 and follow < piece.end
    return found


def check_walk(kv_lens, launch, found):
    blocks = [-(-n // 64) for n in kv_lens]
    slots = set()
    for b, count in enumerate(blocks):
        mine = sorted((f for f in found if f[0] == b), key=lambda f: f[5])
        splits = mine[0][4]
        assert [f[5] for f in mine] == list(range(splits)), (b, mine)
        assert len({f[6] for f in mine}) == 1
        covered = [i for f in mine for i in range(f[2], f[3])]
        assert covered == list(range(count)), (b, mine)
        if launch.mode == 0:
            assert mine[0][6] == sum(f[7] for f in mine), "who may wait at the end of a sequence"
        if splits > 1:
            for f in mine:
                assert 0 <= f[8] < launch.slots // launch.tiles * launch.tiles and f[8] not in slots
                slots.add(f[8])
    assert len({f[0] for f in found}) == len(blocks)


def lengths(rng):
    kind = rng.randrange(4)
    batch = rng.choice((1, 2, 3, 7, 33, 70))
    if kind == 0:
        return [rng.choice((0, 1, 64, 65, 1000, 8192))] * batch
    if kind == 1:
        return [rng.randrange(0, 300) for _ in range(batch)]
    if kind == 2:
        return [rng.choice((131072, 1, 0, 64, 4097)) for _ in range(batch)]
    return [rng.randrange(1, 4097) for _ in range(batch)]


@pytest.mark.parametrize("seed", range(12))
def test_every_block_is_read_once_and_the_host_agrees(seed):
    rng = random.Random(seed)
    for fmt in ("bf16", "fp8"):
        kv_lens = lengths(rng)
        changes = rng.choice(({}, {}, {}, {"num_kv_splits": rng.choice((1, 2, 8))}, {"split_size": rng.choice((64, 1024))}))
        case = problem(kv_lens, format=fmt, **changes)
        launch = choose_launch(case, H200)
        if launch.grid > 600:
            continue
        found = walk(kv_lens, launch)
        check_walk(kv_lens, launch, [f for f in found if f[5] < f[4]])
        plan = BACKEND.host_plan(case, H200, kv_lens)
        shown = sorted((i.seq, i.split, i.kv_start, i.kv_end) for i in plan.items)
        ran = sorted((f[0], f[5], min(f[2] * 64, kv_lens[f[0]]), min(f[3] * 64, kv_lens[f[0]])) for f in found)
        assert shown == ran
        if launch.mode == 0:
            queues = [[f[0] for f in found if f[1] == w] for w in range(launch.workers)]
            assert [[i.seq for i in queue] for queue in plan.workers()] == queues


def test_lengths_added_up_in_several_passes():
    kv_lens = [random.Random(1).randrange(0, 2000) for _ in range(70)]
    launch = choose_launch(problem(kv_lens), H200)
    assert walk(kv_lens, launch, lens_at_a_time=32) == walk(kv_lens, launch)
    equal = [4096] * 70
    assert walk(equal, launch, lens_at_a_time=32) == walk(equal, launch)


@pytest.mark.parametrize("kv_lens, splits", [([8192] * 256, 1), ([8192] * 64, 2), ([2048] * 256, 1)])
def test_equal_lengths_are_cut_at_equal_places(kv_lens, splits):
    plan = BACKEND.host_plan(problem(kv_lens), H200, kv_lens)
    assert set(plan.splits_per_seq) == {splits}
    assert len({i.num_keys for i in plan.items}) == 1


def test_uneven_lengths_count_their_beginnings():
    kv_lens = [1 + 4096 * random.Random(0).randrange(1000) // 1000 for _ in range(8)] + [64] * 200
    plan = BACKEND.host_plan(problem(kv_lens, format="fp8"), H200, kv_lens)
    assert max(len(queue) for queue in plan.workers()) <= 2 + plan.chunk_blocks // 3


@pytest.mark.parametrize("splits, rows", [(2, 16), (4, 16), (5, 32), (16, 16), (37, 64)])
def test_merge(splits, rows, monkeypatch):
    reduction = on_host("reduction")
    monkeypatch.setattr(reduction, "reciprocal", lambda x: value(1 / x))
    monkeypatch.setattr(reduction, "log2", lambda x: value(np.log2(x)))
    rng = np.random.default_rng(splits)
    lse = rng.normal(0, 30, (splits, rows)).astype(np.float32)
    lse[0, :3], lse[-1, 3] = -np.inf, -np.inf
    lse[:, 5] = -np.inf
    out = rng.normal(size=(splits, 512, rows)).astype(np.float32)
    out[np.isinf(lse)[:, None, :].repeat(512, 1)] = 0
    column = np.asarray(reduction.column_of(value(np.arange(rows))))
    assert sorted(column) == list(range(rows))
    assert list(reduction._row_of(value(column))) == list(range(rows))
    slots = splits + 3
    part_out, part_lse = np.full(slots * 512 * rows, np.nan, np.float32), np.full(slots * rows, np.nan, np.float32)
    place = [1, *range(3, 3 + splits - 1)]
    for s in range(splits):
        tile = np.empty((512, rows), np.float32)
        tile[:, column] = out[s]
        part_out[place[s] * 512 * rows : (place[s] + 1) * 512 * rows] = tile.ravel()
        part_lse[place[s] * rows + column] = lse[s]
    got, got_lse = np.full((rows, 512), np.nan, np.float32), np.full(rows, np.nan, np.float32)
    real = rows - 3
    with np.errstate(all="ignore"):
        for d0 in range(0, 512, 64):
            reduction._merge(
                Pointer(part_out), Pointer(part_lse), Pointer(got.reshape(-1)), 512 * rows, 512, Pointer(got_lse), rows, value(1), value(3),
                value(1), splits, value(d0), real, value(0), value(0), rows, rows, True, 64, 4 if splits <= 4 else 16,
            )  # fmt: skip
        weight = np.exp2(lse.astype(np.float64) - np.where(np.isinf(lse.max(0)), 0, lse.max(0)))
        want = np.nan_to_num((weight[:, None] * out).sum(0) / weight.sum(0)).T
        want_lse = (np.where(np.isinf(lse.max(0)), 0, lse.max(0)) + np.log2(weight.sum(0))) * np.log(2)
    np.testing.assert_allclose(got[:real], want[:real], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got_lse[:real], want_lse[:real], rtol=1e-6, atol=1e-6)
    assert np.isnan(got[real:]).all() and np.isnan(got_lse[real:]).all()


@pytest.mark.parametrize("cap", [1e-35, 0.5, 30.0, 1e5, 1e8, 1e30])
def test_logit_cap(cap):
    softmax = on_host("softmax")
    log2e = 1.4426950408889634
    logits = np.concatenate([np.linspace(-200, 200, 2001), [0.0, 1e-6, -3e4, 3e4]]) * 1.0
    with np.errstate(all="ignore"):
        got = np.asarray(softmax._cap_logits(value(logits * log2e), np.float32(cap))) / log2e
    want = cap * np.tanh(logits / cap)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=max(1e-6 * min(cap, 1), 2e-30))
    assert np.isnan(softmax._cap_logits(value([np.nan]), np.float32(cap))).all()


def test_special_values_are_found_in_words():
    import torch

    halves = np.arange(65536, dtype=np.uint32)
    words = (halves | (halves[::-1] << 16)).astype(np.int64)
    special = ((((words & 0x7F807F80) + 0x00800080) >> 15) & 0x00010001) * 0xFFFF
    kept = (words & ~special).astype(np.uint32)
    for shift, half in ((0, halves), (16, halves[::-1])):
        finite = torch.tensor(half.astype(np.int32)).to(torch.int16).view(torch.bfloat16).isfinite().numpy()
        assert ((kept >> shift & 0xFFFF) == np.where(finite, half, 0)).all()
    codes = np.arange(256, dtype=np.int64)
    words = codes | (codes[::-1] << 8) | (codes << 16) | (codes[::-1] << 24)
    special = ((((words & 0x7F7F7F7F) + 0x01010101) >> 7) & 0x01010101) * 0xFF
    kept = words & ~special
    for shift, code in ((0, codes), (8, codes[::-1]), (16, codes), (24, codes[::-1])):
        assert ((kept >> shift & 0xFF) == np.where(code & 0x7F == 0x7F, 0, code)).all()

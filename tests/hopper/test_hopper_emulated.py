"""The Gluon kernels run whole on a CPU (``emulated_gluon``), against the definition and under opposite orders of everything."""

from __future__ import annotations

import types

import pytest
import torch
from emulated_gluon import EmulationError, Policy, emulated, emulating, running

pytest.importorskip("triton")

import leanmla
from leanmla import backends
from leanmla import device as devices
from leanmla.device import DeviceInfo
from leanmla.reference import mla_decode_reference
from leanmla.testing.cases import DecodeCase
from leanmla.testing.compare import compare
from leanmla.testing.inputs import make_inputs

#: Few multiprocessors, so that small cases are cut into pieces of several sequences and sequences into several pieces.
SMALL = DeviceInfo("cuda", "a small Hopper GPU", "sm_90", 3, 232448, 8 << 30)
FORMATS = ("bf16", "fp8", "fp8_tile128", "mxfp4")
#: Of log-sum-exp; what 8-bit products of the GPU lose is not emulated.
LSE = {"bf16": 2e-4, "fp8": 3e-4, "fp8_tile128": 3e-4, "mxfp4": 3e-4}


@pytest.fixture(autouse=True)
def emulator(monkeypatch):
    """Partial results are NaN until they are written."""
    backend = backends.get("hopper")
    make = backend.make_workspace

    def poisoned(problem, device):
        workspace = make(problem, device)
        workspace.part_out.fill_(torch.nan)
        workspace.part_lse.fill_(torch.nan)
        return workspace

    monkeypatch.setattr(backend, "make_workspace", poisoned, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny products
    with devices.override(SMALL), emulating():
        yield
    torch.set_num_threads(threads)


def run(inputs, policy=None, **changes):
    options = {**inputs.options, **inputs.splits, **changes}
    with running(policy or Policy()):
        return leanmla.mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="hopper", **options)


def check(case: DecodeCase, policy=None):
    inputs = make_inputs(case)
    out, lse = run(inputs, policy)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    report = compare(inputs, out, reference=(want, want_lse))
    assert report, report.message
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    seen = want_lse.isfinite()
    assert bool(((lse.double() - want_lse)[seen].abs() <= LSE[case.format] + 2e-4 * want_lse[seen].abs()).all())
    return out, lse


#: Between them: row tiles of 16, 32 and 64 and several of them, all ways to load, all tables, schedules and ends of a sequence.
CASES = [
    DecodeCase((200, 77)),
    DecodeCase((0, 1, 63, 65, 64), num_heads=1, table="csr"),
    DecodeCase((130, 0, 70), num_heads=40, page_size=16),
    DecodeCase((70, 200), num_heads=16, q_lens=2, page_size=5, table="csr"),
    DecodeCase((150, 9, 64, 31), q_lens=(3, 0, 1, 7), num_heads=5, table="csr", page_size=16),
    DecodeCase((131, 3), q_lens=5, num_heads=16, page_size=1),
    DecodeCase((300, 77), table="contiguous", page_size=32, logit_cap=30.0),
    DecodeCase((200, 50), logit_shift=1000.0, num_kv_splits=6),
    DecodeCase((262, 3), q_lens=4, num_heads=6, split_size=128, page_size=32),
    DecodeCase((40, 33), q_lens=(4, 2), num_heads=4, causal=False, q_dtype="fp16", strided=True),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_cases(case, fmt):
    check(case.replace(format=fmt))


#: Tiles of 64 rows.
WIDE = [
    DecodeCase((200, 0, 77, 1), num_heads=64),
    DecodeCase((130, 300), num_heads=128, page_size=1),
    DecodeCase((300, 66, 3), q_lens=4, num_heads=16, logit_cap=30.0, page_size=32),
    DecodeCase((70, 250, 9), q_lens=(6, 0, 3), num_heads=16, table="csr", page_size=7),
    DecodeCase((260, 130), q_lens=4, num_heads=16, num_kv_splits=5),
    DecodeCase((262, 3), num_heads=64, split_size=128, strided=True),
    DecodeCase((150, 90), q_lens=(5, 4), num_heads=16, causal=False, table="contiguous", logit_shift=1000.0),
]


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("case", WIDE, ids=lambda c: c.id)
def test_64_rows(case, fmt):
    check(case.replace(format=fmt))


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("factor", [4, 30])
def test_references_that_follow_late_and_often(factor, fmt):
    """The scores' spread decides how many tiles have one far above what was seen before."""
    inputs = make_inputs(DecodeCase((520, 380), num_heads=64, format=fmt))
    inputs.q.mul_(factor)
    out, lse = run(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    report = compare(inputs, out, reference=(want, want_lse))
    assert report, report.message
    assert bool(((lse.double() - want_lse).abs() <= 4e-4 * want_lse.abs()).all())


#: Opposite orders of partitions, blocks, copies and products. "first" lets a block that waits for its partners run out of patience.
POLICIES = [
    Policy("first", late=True, resident=6), Policy("last", late=False, resident=6), Policy("last", late=True, resident=2),
    Policy("turns", late=False, resident=3), Policy(1, late=True, resident=4),
]  # fmt: skip
MIXED = [
    DecodeCase((300, 70, 1, 0), q_lens=2, num_heads=6),
    DecodeCase((260, 70), num_heads=16, page_size=1, num_kv_splits=5),
    DecodeCase((260, 70, 0), q_lens=(4, 3, 1), num_heads=16, table="csr"),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("case", MIXED, ids=lambda c: c.id)
def test_neither_order_nor_unread_storage_changes_a_bit(case, fmt):
    case = case.replace(format=fmt)
    out, lse = check(case)
    for policy, poison in zip(POLICIES, (True, False, True, True, False)):
        again, lse_again = run(make_inputs(case, poison=poison), policy)
        assert torch.equal(out, again) and torch.equal(lse, lse_again), policy


def test_a_sequence_is_merged_together_or_by_the_last_to_arrive(monkeypatch):
    reduction = emulated("reduction")
    arrive, roles = reduction._arrive, []

    def seen(*args):
        roles.append(int(arrive(*args)))
        return roles[-1]

    monkeypatch.setattr(reduction, "_arrive", seen)
    case = DecodeCase((190,))
    out, _ = check(case)
    assert sorted(roles) == [1, 1, 1]
    for order in ("first", "last"):  # whoever comes first spins until it gives up
        roles.clear()
        assert torch.equal(run(make_inputs(case), Policy(order))[0], out)
        assert sorted(roles) == [0, 0, 2]
    roles.clear()
    assert torch.equal(run(make_inputs(case), Policy(resident=1))[0], out)
    assert sorted(roles) == [0, 0, 2]


def test_very_many_splits_are_merged_by_streams(monkeypatch):
    reduction = emulated("reduction")
    monkeypatch.setattr(reduction, "FAR", 3)
    monkeypatch.setattr("leanmla.kernels.hopper.launch.FAR_SPLITS", 3)
    merge, merged = reduction._merge_many, []

    def seen(*args):
        merged.append(args)
        return merge(*args)

    monkeypatch.setattr(reduction, "_merge_many", seen)
    check(DecodeCase((700, 5), format="fp8", num_kv_splits=11))
    check(DecodeCase((500, 0), format="bf16", num_heads=5, num_kv_splits=7))
    check(DecodeCase((700, 5), format="bf16", num_heads=7, num_kv_splits=200, q_std=4.0))  # more than one round
    assert merged


@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_a_rows_bits_do_not_depend_on_other_rows(fmt, heads):
    """Above all not where large scores raise the reference of one row of a tile."""
    inputs = make_inputs(DecodeCase((330, 66), num_heads=heads, format=fmt))
    before, lse_before = run(inputs)
    inputs.q[0, 5] *= 300
    inputs.q[1, 2, 17] = torch.inf if fmt == "bf16" else 0
    out, lse = run(inputs)
    same = torch.ones(out.shape[:2], dtype=torch.bool)
    same[0, 5] = same[1, 2] = False
    assert torch.equal(out[same], before[same]) and torch.equal(lse[same], lse_before[same])
    assert not torch.equal(out[0, 5], before[0, 5])


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_in_a_hidden_key_stays_there(fmt, heads):
    inputs = make_inputs(DecodeCase((131, 66), q_lens=4, num_heads=heads, format=fmt))
    before, clean = run(inputs)
    slot = int(inputs.table.slots(0)[129])  # rows 2 and 3 of the first sequence see it
    page, offset = slot // inputs.cache.page_size, slot % inputs.cache.page_size
    if fmt == "mxfp4":
        inputs.cache.scale[page, offset, 3] = 255
    else:
        data = inputs.cache.data if fmt == "bf16" else inputs.cache.data.view(torch.float8_e4m3fn)
        data[page, offset, 100] = torch.nan
    out, lse = run(inputs)
    hidden = [i for i in range(out.shape[0]) if i not in (2, 3)]
    assert torch.equal(out[hidden], before[hidden]) and torch.equal(lse[hidden], clean[hidden])
    assert bool(out[2:4].isnan().all()) and bool(lse[2:4].isnan().all())


@pytest.mark.parametrize("fmt", FORMATS)
def test_counters_serve_one_call_after_the_other(fmt):
    plan = leanmla.DecodePlan(
        num_heads=16, format=fmt, page_size=64, max_batch=4, max_kv_len=320, device="cpu", backend="hopper"
    )
    for lens in ((300, 5), (64,), (0, 0, 0), (200, 70, 0, 64)):
        inputs = make_inputs(DecodeCase(lens, format=fmt))
        out, lse = plan.run(inputs.q, inputs.cache, inputs.table, return_lse=True, **inputs.options)
        want, _ = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
        assert compare(inputs, out, reference=(want, lse.double()))


# ---- what the emulator must notice


def broken(monkeypatch, module, **changes):
    for name, change in changes.items():
        monkeypatch.setattr(emulated(module), name, change)
    return make_inputs(DecodeCase((200,), num_kv_splits=1))


def test_a_missing_fence_is_noticed(monkeypatch):
    inputs = broken(monkeypatch, "decode_bf16_sm90", fence_async_shared=lambda: None)
    with pytest.raises(EmulationError, match="without fence_async_shared"):
        run(inputs)


def test_a_result_taken_before_its_wait_is_noticed(monkeypatch):
    inputs = broken(monkeypatch, "decode_bf16_sm90", warpgroup_mma_wait=lambda pending, deps: deps[0])
    with pytest.raises(EmulationError, match="no value yet"):
        run(inputs)


def test_a_tile_used_before_it_is_full_is_noticed(monkeypatch):
    mbarrier = emulated("decode_bf16_sm90").mbarrier
    hasty = types.SimpleNamespace(**{**vars(mbarrier), "wait": lambda view, parity: None})
    inputs = broken(monkeypatch, "decode_bf16_sm90", mbarrier=hasty)
    with pytest.raises(EmulationError, match="a copy is still writing"):
        run(inputs, Policy("first"))


def test_a_stage_that_is_never_freed_is_a_deadlock(monkeypatch):
    mbarrier = emulated("decode_bf16_sm90").mbarrier
    silent = types.SimpleNamespace(**{**vars(mbarrier), "arrive": lambda view, count: None})
    inputs = broken(monkeypatch, "decode_bf16_sm90", mbarrier=silent)
    with pytest.raises(EmulationError, match=r"deadlock(.|\n)*block 0 loader: barrier at byte \d+: phase 0, 1 of 1 arrivals"):
        run(inputs)


def test_rows_past_the_end_that_are_not_cleared_show(monkeypatch):
    inputs = broken(monkeypatch, "decode_bf16_sm90", clear_rows=lambda *_: None)
    assert run(inputs)[0].isnan().any()


def test_a_page_id_past_the_end_is_noticed(monkeypatch):
    broken(monkeypatch, "loader", _place=lambda pages, first_id, token, kv_len, box: pages.place(first_id, token))
    inputs = make_inputs(DecodeCase((65,), page_size=16, num_kv_splits=1))
    with pytest.raises(EmulationError, match=r"tensor map: page|global memory"):
        run(inputs)

"""aiter's decode call, reduction and MXFP4 helpers against the definition."""

import math

import pytest
import torch
from test_compat_aiter_metadata import MODES, make, offsets

from leanmla import LatentCache, PageTable
from leanmla.compat import aiter
from leanmla.compat.aiter.mla import mla_decode_fwd
from leanmla.compat.aiter.utility import fp4_utils
from leanmla.errors import CapacityExceeded, InvalidArgument, InvalidDtype, MissingScale
from leanmla.formats import MXFP4
from leanmla.reference import mla_decode_reference

SM = 576**-0.5


class Batch:
    """A paged batch in aiter's terms, with the definition's answer."""

    def __init__(self, kv_lens, q_lens, *, heads=16, page=1, fp8=False, fp8_q=False, causal=True, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.kv_lens, self.q_lens, self.page, self.causal = kv_lens, q_lens, page, causal
        pages = [-(-n // page) for n in kv_lens]
        self.qo, self.kv = offsets(q_lens), offsets(pages)
        self.last = torch.tensor([n - (p - 1) * page if n else 0 for n, p in zip(kv_lens, pages)], dtype=torch.int32)
        total = sum(pages)
        self.ids = torch.randperm(total + 3, generator=g)[:total].int()
        latent = torch.randn(total + 3, page, 1, 576, generator=g)
        self.kv_scale = self.q_scale = None
        if fp8:
            self.kv_scale = torch.tensor([0.011])
            self.buffer = (latent / self.kv_scale).to(torch.float8_e4m3fn)
        else:
            self.buffer = latent.bfloat16()
        q = torch.randn(sum(q_lens), heads, 576, generator=g)
        if fp8_q:
            self.q_scale = torch.tensor([0.013])
            self.q = (q / self.q_scale).to(torch.float8_e4m3fn)
        else:
            self.q = q.bfloat16()
        self.o = torch.full((sum(q_lens), heads, 512), torch.nan, dtype=torch.bfloat16)

    def call(self, **options):
        return mla_decode_fwd(
            self.q, self.buffer, self.o, self.qo, self.kv, self.ids, self.last, max(self.q_lens, default=0), page_size=self.page,
            sm_scale=options.pop("sm_scale", SM), q_scale=self.q_scale, kv_scale=self.kv_scale, causal=self.causal, **options,
        )  # fmt: skip

    def metadata(self, mode, **options):
        meta = make(self.kv_lens, self.q_lens, mode=mode, page=self.page, **options)
        meta["work_meta_data"] = meta.pop("work_metadata_ptrs")
        return {**meta, "intra_batch_mode": mode == "intra"}

    def want(self, logit_cap=0.0):
        q = self.q.double() * (1.0 if self.q_scale is None else self.q_scale.double())
        if self.kv_scale is None:
            cache = LatentCache.from_tensors(self.buffer, format="bf16", page_size=self.page)
        else:
            cache = LatentCache.from_tensors(self.buffer, self.kv_scale, format="fp8", page_size=self.page)
        table = PageTable.from_csr(self.kv, self.ids, self.last, page_size=self.page)
        return mla_decode_reference(q, cache, table, sm_scale=SM, qo_indptr=self.qo, causal=self.causal, logit_cap=logit_cap)

    def check(self, lse=None, logit_cap=0.0):
        want, want_lse = self.want(logit_cap)
        error = (self.o.double() - want).abs()
        # Twice a bf16 rounding of the row's largest value: one for partial results, one for the merged one.
        bound = 2 * 2.0**-8 * want.abs().amax(-1, keepdim=True) + 1e-6
        assert bool((error <= bound).all()), f"worst {float((error / bound).max()):.2f} times the bound"
        if lse is not None:
            empty = want_lse == -torch.inf
            assert torch.equal(lse == -torch.inf, empty)
            assert bool(((lse.double() - want_lse).abs()[~empty] < 1e-4).all())


LENS = [0, 1, 130, 257]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("fp8, fp8_q", [(False, False), (True, False), (True, True)])
def test_without_metadata(page, fp8, fp8_q):
    for q_lens in ([1] * 4, [2, 0, 4, 1]):
        batch = Batch(LENS, q_lens, page=page, fp8=fp8, fp8_q=fp8_q)
        logits, lse = batch.call(return_lse=True, num_kv_splits=3)
        assert logits is None
        batch.check(lse)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("q_lens", [[1] * 4, [4] * 4, [2, 0, 4, 1]], ids=["q1", "q4", "ragged"])
def test_with_metadata(mode, q_lens):
    for page, causal in ((1, True), (16, True), (16, False)):
        batch = Batch(LENS, q_lens, page=page, causal=causal)
        batch.check(batch.call(**batch.metadata(mode), return_lse=True)[1])
    batch = Batch(LENS, q_lens, heads=20, fp8=True, fp8_q=True)
    batch.check(batch.call(**batch.metadata(mode), return_lse=True)[1])


def test_metadata_drive_the_split():
    """Shortening an item's range in the work list takes its keys out of the result."""
    batch = Batch([64, 40], [1, 1])
    meta = batch.metadata("fast", units=1)
    batch.call(**meta)
    batch.check()
    assert meta["work_info_set"][1, 4:6].tolist() == [64, 104]
    meta["work_info_set"][1, 5] = 64 + 10
    before = batch.o.clone()
    batch.call(**meta)
    assert torch.equal(batch.o[0], before[0])
    shorter = Batch([64, 40], [1, 1])
    shorter.kv_lens = [64, 10]
    shorter.kv = torch.tensor([0, 64, 74], dtype=torch.int32)
    shorter.o = batch.o
    shorter.check()


def test_o_is_written_in_place_also_when_it_is_a_view():
    batch = Batch([33, 65], [2, 1])
    wide = torch.full((3, 18, 520), 7.0, dtype=torch.bfloat16)
    batch.o = wide[:, 1:-1, :512]
    for options in ({}, batch.metadata("default")):
        batch.o.fill_(torch.nan)
        assert batch.call(**options) == (None, None)
        batch.check()
        assert bool((wide[:, 0] == 7).all()) and bool((wide[..., 512:] == 7).all())


def test_returned_logits_merge_to_o():
    batch = Batch([300, 5], [2, 2])
    logits, lse = batch.call(return_logits=True, return_lse=True, num_kv_splits=3)
    assert logits.shape == (4, 3, 16, 512) and logits.dtype == torch.float32
    batch.check(lse)
    meta = batch.metadata("intra", limit=3)
    logits, lse = batch.call(**meta, return_logits=True, return_lse=True)
    assert logits.shape == (meta["reduce_partial_map"].numel() * 2, 1, 16, 512)
    batch.check(lse)
    split = meta["reduce_indptr"].tolist()
    assert split == [0, 3, 3]
    rows = meta["reduce_partial_map"][:3].tolist()
    first = torch.stack([logits[r, 0] for r in rows])
    assert not torch.allclose(first[0], first[1]), "each split has its own keys"


def test_last_page_len_may_be_the_whole_length_for_page_1():
    batch = Batch([7, 100], [1, 1])
    batch.last = torch.tensor([7, 100], dtype=torch.int32)
    batch.call()
    batch.check()
    batch.call(**batch.metadata("intra"))
    batch.check()


def test_logit_cap_and_default_scale():
    batch = Batch([90], [1])
    batch.call(logit_cap=1.5, sm_scale=None)
    batch.check(logit_cap=1.5)


def test_scales_apply_once():
    """Doubling a scale and halving what it multiplies changes nothing; forgetting it would."""
    batch = Batch([50], [1], fp8=True, fp8_q=True)
    batch.call()
    one = batch.o.clone()
    batch.q_scale = float(batch.q_scale)
    batch.call()
    assert torch.equal(one, batch.o)


def test_refusals_name_the_argument():
    def refused(exception, text, batch=None, **options):
        with pytest.raises(exception, match=text):
            (batch or Batch([20], [1])).call(**options)

    refused(InvalidArgument, "^cp_world_size: got 2", cp_world_size=2)
    refused(InvalidArgument, "^cp_rank: got 1", cp_rank=1)
    refused(InvalidArgument, "^g_kv_indptr: got a tensor", g_kv_indptr=torch.zeros(2))
    refused(InvalidArgument, "^nhead_kv: got 2", nhead_kv=2)
    batch = Batch([20], [1], fp8=True)
    batch.kv_scale = None
    refused(MissingScale, "^kv_scale", batch)
    batch = Batch([20], [1], fp8_q=True)
    batch.q_scale = None
    refused(MissingScale, "^q_scale", batch)
    batch = Batch([20], [1])
    batch.buffer = batch.buffer.to(torch.float8_e4m3fnuz)
    batch.kv_scale = torch.ones(1)
    refused(InvalidDtype, "^kv_buffer: .*fnuz", batch)
    batch = Batch([20], [1])
    batch.buffer = batch.buffer[..., :512]
    refused(InvalidArgument, "^kv_buffer: last dim", batch)
    batch = Batch([20], [1])
    batch.o = batch.o.float()
    refused(InvalidDtype, "^o: expected q's dtype", batch)
    refused(InvalidDtype, "^o: expected q's dtype", batch, **Batch([20], [1]).metadata("fast"))
    batch = Batch([20], [3])
    batch.q_lens = [2]
    refused(CapacityExceeded, "^max_seqlen_q: sequence 0 has 3", batch)
    batch = Batch([20], [1])
    meta = batch.metadata("fast")
    refused(InvalidArgument, "^work_indptr: expected a tensor", batch, **{**meta, "work_indptr": None})
    longer = Batch([40], [1]).metadata("fast")
    refused(InvalidArgument, r"^work_info_set\[1\]: .* does not fit", batch, **longer)
    batch = Batch([20], [1])
    batch.o = None
    refused(InvalidArgument, "^o: expected a tensor", batch)
    batch = Batch([20], [1], fp8_q=True)
    batch.q_scale = "1"
    refused(InvalidArgument, "^q_scale: expected float32", batch)


def test_a_call_seen_before_is_wrapped_without_checks_and_others_are_not(monkeypatch):
    from leanmla.compat import _arguments

    built = []
    for cls, name in ((PageTable, "from_csr"), (LatentCache, "from_tensors")):
        original = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *a, original=original, name=name, **k: built.append(name) or original(*a, **k))
    monkeypatch.setattr(_arguments, "_passed", set())
    batch = Batch([20, 40], [1, 2], page=16)
    batch.call()
    first = batch.o.clone()
    batch.call()
    assert sorted(built) == ["from_csr", "from_tensors"], "the second call is like the first"
    assert torch.equal(batch.o, first)
    batch.check()
    scaled = Batch([20, 40], [1, 2], page=16, fp8=True)
    scaled.call()
    scaled.kv_scale.fill_(-1.0)
    with pytest.raises(InvalidArgument, match="^kv_scale: expected a positive"):
        scaled.call()
    for name, bad in (("ids", "long"), ("kv", "float"), ("last", "long")):
        other = Batch([20, 40], [1, 2], page=16)
        setattr(other, name, getattr(getattr(other, name), bad)())
        with pytest.raises(InvalidDtype):
            other.call()
    batch.page = True
    with pytest.raises(InvalidArgument, match="^page_size"):
        batch.call()


def test_metadata_that_would_leave_rows_unwritten_are_refused():
    batch = Batch([300, 20], [2, 1])
    meta = batch.metadata("intra")
    batch.call(**meta)
    batch.check()
    items = int(meta["work_indptr"][-1])
    assert int(meta["reduce_indptr"][1]) > 1, "the first sequence is split"

    def refused(text, **changes):
        with pytest.raises(InvalidArgument, match=text):
            batch.call(**{**meta, **changes})

    refused("^reduce_partial_map: nothing merges", reduce_indptr=torch.zeros_like(meta["reduce_indptr"]))
    refused("^reduce_partial_map: no item", reduce_final_map=meta["reduce_final_map"].flip(0).contiguous())
    refused("^reduce_partial_map: no", reduce_partial_map=meta["reduce_partial_map"].roll(1))
    refused(r"^reduce_final_map: expected int32 \[n, 2\]", reduce_final_map=meta["reduce_final_map"].flatten())
    refused("^work_info_set: covers 0 of sequence 1's 1 query rows", work_indptr=meta["work_indptr"].clamp(max=items - 2))


# -- reduction ---------------------------------------------------------------------------------------------------------


def test_reduce_closed_forms():
    """Z = 2 and 8 with outputs 0 and 1 give 0.8; an empty partial weighs nothing even if it holds NaN; all empty give 0, -inf."""
    out = torch.zeros(6, 1, 2, 4)
    out[1], out[2], out[3:] = 1.0, torch.nan, torch.nan
    lse = torch.full((6, 1, 2, 1), -torch.inf)
    lse[0], lse[1] = math.log(2), math.log(8)
    indptr = torch.tensor([0, 3, 3, 5], dtype=torch.int32)
    final = torch.tensor([[0, 1], [1, 2], [2, 3]], dtype=torch.int32)
    partial = torch.tensor([0, 1, 2, 4, 5], dtype=torch.int32)
    o, total = torch.full((3, 2, 4), 7.0), torch.full((3, 2), 7.0)
    aiter.mla_reduce_v1(out, lse, indptr, final, partial, 1, 0, o, total)
    assert torch.allclose(o[0], torch.tensor(0.8)) and torch.allclose(total[0], torch.tensor(10.0).log())
    assert bool((o[1] == 7).all()) and bool((total[1] == 7).all()), "a group without partials is left alone"
    assert bool((o[2] == 0).all()) and bool((total[2] == -torch.inf).all())


def test_reduce_without_final_map_and_several_rows():
    out = torch.arange(8.0).view(8, 1, 1).expand(8, 1, 3).clone()
    lse = torch.zeros(8, 1)
    o = torch.full((4, 1, 3), -1.0)
    indptr, partial = torch.tensor([0, 2, 4], dtype=torch.int32), torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    aiter.mla_reduce_v1(out, lse, indptr, None, partial, 2, 0, o)
    assert o[:, 0, 0].tolist() == [1.0, 2.0, 5.0, 6.0]


def test_reduce_keeps_nan_and_refuses_bad_shapes():
    out, lse = torch.ones(2, 1, 1, 4), torch.zeros(2, 1, 1, 1)
    out[1] = torch.nan
    indptr, partial = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    o = torch.zeros(1, 1, 4)
    aiter.mla_reduce_v1(out, lse, indptr, None, partial, 1, 0, o)
    assert bool(o.isnan().all())
    with pytest.raises(InvalidArgument, match="^partial_lse"):
        aiter.mla_reduce_v1(out, lse[:1], indptr, None, partial, 1, 0, o)
    with pytest.raises(InvalidArgument, match="^final_output"):
        aiter.mla_reduce_v1(out, lse, indptr, None, partial, 1, 0, o[..., :2])
    with pytest.raises(InvalidArgument, match="^reduce_indptr: expected offsets"):
        aiter.mla_reduce_v1(out, lse, indptr + 1, None, partial, 1, 0, o)
    with pytest.raises(InvalidArgument, match=r"^reduce_partial_map\[1\]: expected rows within"):
        aiter.mla_reduce_v1(out, lse, indptr, None, partial * 2, 1, 0, o)
    with pytest.raises(InvalidArgument, match=r"^reduce_final_map\[0\]: expected at most max_seqlen_q = 1"):
        aiter.mla_reduce_v1(out, lse, indptr, torch.tensor([[0, 2]], dtype=torch.int32), partial, 1, 0, o.repeat(2, 1, 1))


# -- MXFP4 -------------------------------------------------------------------------------------------------------------


def test_quantiser_agrees_with_the_cache_format_bit_for_bit():
    x = torch.randn(50, 576, generator=torch.Generator().manual_seed(0))
    x[3, 32:64] = 0
    x[4, 70] = torch.nan
    data, scale = fp4_utils.dynamic_mxfp4_quant(x)
    want = MXFP4().quantize(x)
    assert data.dtype == aiter.dtypes.fp4x2 and scale.dtype == aiter.dtypes.fp8_e8m0
    assert torch.equal(data.view(torch.uint8), want.data) and torch.equal(scale.view(torch.uint8), want.scale)
    values = fp4_utils.mxfp4_to_f32(data).view(50, 18, 32) * fp4_utils.e8m0_to_f32(scale)[..., None]
    assert torch.equal(values[3, 1], torch.zeros(32)) and bool(values[4, 2].isnan().all())
    good = values.nan_to_num().abs().amax() > 0
    assert good and torch.allclose(values[0].flatten(), x[0], atol=0.6, rtol=0.25)


def test_ties_tables_and_refusals():
    ties = torch.zeros(1, 32)
    ties[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0])
    data, scale = fp4_utils.dynamic_mxfp4_quant(ties.bfloat16())
    assert scale.view(torch.uint8).item() == 127
    assert fp4_utils.mxfp4_to_f32(data)[0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -4]
    codes = torch.arange(16, dtype=torch.uint8)
    assert fp4_utils.mxfp4_to_f32(codes)[::2].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    e8m0 = fp4_utils.e8m0_to_f32(torch.tensor([0, 127, 254, 255], dtype=torch.uint8))
    assert e8m0[:3].tolist() == [2.0**-127, 1.0, 2.0**127] and math.isnan(e8m0[3])
    with pytest.raises(InvalidArgument, match="^x: "):
        fp4_utils.dynamic_mxfp4_quant(torch.zeros(2, 33))
    with pytest.raises(InvalidArgument, match="^shuffle"):
        fp4_utils.dynamic_mxfp4_quant(torch.zeros(2, 32), shuffle=True)


def test_intra_batch_metadata_on_a_gpu_ask_for_no_more_items_than_fill_it(monkeypatch):
    """What a GPU would be asked for, told from the shapes alone: 132 multiprocessors, twice."""
    from types import SimpleNamespace

    from leanmla.compat.aiter import mla

    monkeypatch.setattr(mla.device, "describe", lambda _: SimpleNamespace(num_sms=132))

    def useful(heads, batch, q_len):
        return mla._useful_splits(torch.empty(batch * q_len, heads, 576, device="meta"), batch, q_len)

    assert [useful(16, b, 1) for b in (1, 4, 64, 256, 1000)] == [264, 66, 4, 1, 0]
    assert useful(128, 64, 2) == 1 and useful(64, 4, 1) == 66 and useful(16, 0, 1) == 264

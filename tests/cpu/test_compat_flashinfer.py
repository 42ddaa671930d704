"""FlashInfer's wrapper: views, lse bases, surplus pages, ragged rows, graph buffers, refusals. The grid is in test_compat_grids.py."""

import math

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from leanmla import LatentCache, PageTable
from leanmla.compat._arguments import joined_view
from leanmla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from leanmla.errors import CapacityExceeded, InvalidArgument, InvalidDtype, PlanMismatch
from leanmla.reference import mla_decode_reference

BF16 = torch.bfloat16


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Two sequences of 20 and 0..16 keys in pages of 8, with 1 and 3 query rows."""

    def __init__(self, dtype=BF16):
        g = torch.Generator().manual_seed(0)
        self.cache = torch.randn(8, 8, 576, generator=g).bfloat16().to(dtype)  # exact in bf16 too, for the definition
        self.q = torch.randn(4, 5, 576, generator=g).to(dtype if dtype != torch.float8_e4m3fn else BF16)
        self.plan = {
            "qo_indptr": ints(0, 1, 4), "kv_indptr": ints(0, 3, 5), "kv_indices": ints(6, 1, 4, 0, 3), "kv_len_arr": ints(20, 9),
            "num_heads": 5, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 8, "causal": True, "sm_scale": 192**-0.5,
            "q_data_type": self.q.dtype, "kv_data_type": dtype,
        }  # fmt: skip

    def run(self, wrapper, split=False, **options):
        ckv, kpe = self.cache[..., :512], self.cache[..., 512:]
        nope, pe = self.q[..., :512], self.q[..., 512:]
        if split:
            ckv, kpe, nope, pe = (t.contiguous() for t in (ckv, kpe, nope, pe))
        return wrapper.run(nope, pe, ckv, kpe, **options)

    def want(self):
        p = self.plan
        used = -(-p["kv_len_arr"] // p["page_size"])
        ids = torch.cat([p["kv_indices"][s : s + n] for s, n in zip(p["kv_indptr"].tolist(), used.tolist())])
        cache = LatentCache.from_tensors(self.cache.bfloat16(), format="bf16", page_size=p["page_size"])
        table = PageTable.from_csr(
            torch.nn.functional.pad(used.cumsum(0), (1, 0)).int(), ids, (p["kv_len_arr"] - (used - 1) * p["page_size"]).int(),
            page_size=p["page_size"],
        )  # fmt: skip
        return mla_decode_reference(self.q, cache, table, sm_scale=p["sm_scale"], qo_indptr=p["qo_indptr"], causal=p["causal"])


def wrapper(**options):
    return BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.int8), **options)


@pytest.mark.parametrize("split", [False, True], ids=["slices", "separate"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_against_the_definition(dtype, split):
    batch, w = Batch(dtype), wrapper()
    w.plan(**batch.plan)
    out, lse = batch.run(w, split, return_lse=True)
    want, want_lse = batch.want()
    torch.testing.assert_close(out.double(), want, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), want_lse / math.log(2), atol=2e-3, rtol=1e-4)
    natural = batch.run(w, split, return_lse=True, return_lse_base_on_e=True)[1]
    torch.testing.assert_close(natural.double(), want_lse, atol=1e-3, rtol=1e-4)
    assert torch.equal(batch.run(w, split), out)


def test_slices_are_read_in_place_and_separate_buffers_are_not_mistaken_for_slices():
    cache = torch.zeros(3, 4, 576)
    view = joined_view(cache[..., :512], cache[..., 512:])
    assert view.data_ptr() == cache.data_ptr() and view.shape == cache.shape and view.stride() == cache.stride()
    layers = torch.zeros(3, 2, 4, 576)[:, 1]
    assert joined_view(layers[..., :512], layers[..., 512:]).stride() == layers.stride()
    assert joined_view(cache[..., :512].clone(), cache[..., 512:]) is None
    assert joined_view(cache[..., :512], cache[..., 500:564]) is None
    assert joined_view(cache[:2, ..., :512], cache[1:, ..., 512:]) is None
    flat = torch.zeros(2 * 512 + 2 * 64)
    assert joined_view(flat[:512].view(1, 512).expand(2, 512), flat[512:576].view(1, 64).expand(2, 64)) is None


def test_pages_beyond_kv_len_are_not_read():
    batch, w = Batch(), wrapper()
    batch.plan["kv_len_arr"] = ints(9, 0)
    batch.cache[4] = torch.nan
    batch.cache[1, 1:] = torch.nan
    batch.cache[0] = batch.cache[3] = torch.nan
    w.plan(**batch.plan)
    for split in (False, True):
        out, lse = batch.run(w, split, return_lse=True)
        want, _ = batch.want()
        torch.testing.assert_close(out[:1].double(), want[:1], atol=1e-2, rtol=1e-2)
        assert bool((out[1:] == 0).all()) and bool((lse[1:] == -torch.inf).all())


def test_out_and_lse_are_written_in_place():
    for dtype in (BF16, torch.float16):
        batch, w = Batch(dtype), wrapper()
        w.plan(**batch.plan)
        out, lse = torch.full((4, 5, 512), torch.nan, dtype=batch.q.dtype), torch.full((4, 5), torch.nan)
        got = batch.run(w, out=out, lse=lse, return_lse=True)
        assert got[0] is out and got[1] is lse
        assert torch.equal(out, batch.run(w)) and bool(lse.isfinite().all())


def test_scratch_is_kept_from_run_to_run_and_grows():
    batch, w = Batch(), wrapper()
    w.plan(**batch.plan)
    first, lse = batch.run(w, return_lse=True, return_lse_base_on_e=True)
    ((scratch,),) = w._kept.values()
    before, lse_before = first.clone(), lse.clone()
    batch.q = -batch.q
    second, _ = batch.run(w, return_lse=True, return_lse_base_on_e=True)
    assert list(w._kept.values()) == [[scratch]], "the second layer of a step allocates no scratch"
    assert torch.equal(first, before) and torch.equal(lse, lse_before), "results of a run outlive the next"
    assert not torch.equal(first, second)
    batch.plan.update(kv_len_arr=ints(24, 33), kv_indptr=ints(0, 3, 8), kv_indices=torch.randperm(8).int())
    w.plan(**batch.plan)
    torch.testing.assert_close(batch.run(w).double(), batch.want()[0], atol=1e-2, rtol=1e-2)
    ((larger,),) = w._kept.values()
    assert larger is not scratch and larger.capacity.total_kv == 64
    batch.plan.update(kv_len_arr=ints(0, 0), kv_indptr=ints(0, 0, 0), kv_indices=ints())
    w.plan(**batch.plan)
    out, lse = batch.run(w, return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -torch.inf).all())


def test_scratch_of_graphs_is_made_once():
    batch = Batch()
    buffers = dict(
        zip(("qo_indptr", "kv_indptr", "kv_indices", "kv_len_arr"), (ints(0, 0, 0), ints(0, 0, 0), ints(*[0] * 9), ints(0, 0)))
    )
    w = wrapper(use_cuda_graph=True, **buffers)
    for lens, pages in ((ints(1, 0), ints(0, 1, 1)), (ints(24, 33), ints(0, 3, 8))):
        batch.plan.update(kv_len_arr=lens, kv_indptr=pages, kv_indices=torch.randperm(8).int())
        w.plan(**batch.plan)
        torch.testing.assert_close(batch.run(w).double(), batch.want()[0], atol=1e-2, rtol=1e-2)
    ((scratch,),) = w._kept.values()
    assert scratch.capacity.total_kv == 72, "sized by the buffers, not by the first plan"


def test_graph_buffers_keep_their_addresses_and_follow_plans():
    batch = Batch()
    buffers = [
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(9, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
    ]
    w = wrapper(use_cuda_graph=True, qo_indptr=buffers[0], kv_indptr=buffers[1], kv_indices=buffers[2], kv_len_arr=buffers[3])
    w.plan(**batch.plan)
    addresses = [t.data_ptr() for t in (w._qo, w._indptr, w._indices, w._last)]
    assert buffers[0].tolist() == [0, 1, 4] and buffers[2].tolist()[:5] == [6, 1, 4, 0, 3] and buffers[3].tolist() == [20, 9]
    for lens, pages in ((ints(20, 9), ints(0, 3, 5)), (ints(24, 33), ints(0, 3, 8)), (ints(0, 8), ints(0, 3, 4))):
        batch.plan.update(
            kv_len_arr=lens, kv_indptr=pages, kv_indices=torch.randperm(8, generator=torch.Generator().manual_seed(3)).int()
        )
        w.plan(**batch.plan)
        assert [t.data_ptr() for t in (w._qo, w._indptr, w._indices, w._last)] == addresses
        out = batch.run(w)
        torch.testing.assert_close(out.double(), batch.want()[0], atol=1e-2, rtol=1e-2)
    batch.plan["kv_indices"] = torch.zeros(10, dtype=torch.int32)
    with pytest.raises(CapacityExceeded, match="^kv_indices"):
        w.plan(**batch.plan)
    batch.plan.update(kv_indices=torch.zeros(9, dtype=torch.int32), qo_indptr=ints(0, 0, 4))
    with pytest.raises(CapacityExceeded, match="^qo_indptr"):
        w.plan(**batch.plan)
    assert torch.equal(out, batch.run(w)), "a refused plan leaves no trace"


def test_a_compiled_caller_gets_the_same():
    """``run`` looks at addresses, so it is left out of the traced graph instead of being traced piece by piece."""
    batch, w = Batch(), wrapper()
    w.plan(**batch.plan)
    want = batch.run(w)
    torch._dynamo.reset()
    graphs = CompileCounter()
    assert torch.equal(torch.compile(lambda: batch.run(w) * 1, backend=graphs)(), want)
    assert graphs.frame_count <= 3


def test_refusals_name_the_argument():
    batch = Batch()

    def refused(exception, text, **changes):
        with pytest.raises(exception, match=text):
            wrapper().plan(**{**batch.plan, **changes})

    refused(InvalidArgument, "^head_dim_ckv", head_dim_ckv=256)
    refused(InvalidArgument, "^head_dim_kpe", head_dim_kpe=32)
    refused(InvalidDtype, "^q_data_type", q_data_type=torch.float8_e4m3fn)
    refused(InvalidDtype, "^kv_data_type", kv_data_type=torch.float32)
    refused(InvalidArgument, r"^kv_len_arr\[0\]: expected 0..24", kv_len_arr=ints(25, 9))
    refused(InvalidArgument, "^kv_indices: expected at least", kv_indices=ints(1, 2))
    refused(InvalidDtype, "^kv_indptr", kv_indptr=torch.tensor([0, 3, 5]))
    refused(InvalidArgument, "^qo_indptr", qo_indptr=ints(0, 1))
    refused(InvalidArgument, "^use_profiler", use_profiler=True)
    refused(InvalidArgument, "^sm_scale: expected a finite number", sm_scale=None)
    refused(InvalidArgument, "^num_heads: expected a positive integer", num_heads=True)
    with pytest.raises(InvalidArgument, match="^backend"):
        wrapper(backend="cutlass")
    with pytest.raises(InvalidDtype, match="^qo_indptr"):
        wrapper(use_cuda_graph=True)
    w = wrapper()
    with pytest.raises(PlanMismatch, match="Call plan"):
        batch.run(w)
    w.plan(**batch.plan)
    with pytest.raises(InvalidArgument, match="^page_table"):
        batch.run(w, page_table=torch.zeros(1))
    for lse in (torch.zeros(3), torch.empty(*batch.q.shape[:2], device="meta")):
        with pytest.raises(InvalidArgument, match="^lse"):
            batch.run(w, lse=lse, return_lse=True)
    with pytest.raises(InvalidArgument, match="^out"):
        batch.run(w, out=torch.zeros(3, dtype=BF16))
    batch.q = batch.q.half()
    with pytest.raises(PlanMismatch, match="^q_nope: planned for"):
        batch.run(w)
    batch.q = batch.q[:3].bfloat16()
    with pytest.raises(PlanMismatch, match="^q_nope: expected"):
        batch.run(w)

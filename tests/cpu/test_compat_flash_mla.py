"""FlashMLA's call: both metadata forms, sparse indices, the sink, refusals. The dense grid is in test_compat_grids.py."""

import pytest
import torch

from leanmla import merge_states
from leanmla.compat import flash_mla
from leanmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from leanmla.errors import InvalidArgument, InvalidDtype
from leanmla.formats import FP8Tile128


def dense(**changes):
    g = torch.Generator().manual_seed(0)
    a = {
        "q": torch.randn(2, 2, 4, 576, generator=g).bfloat16(),
        "k_cache": torch.randn(6, 16, 1, 576, generator=g).bfloat16(),
        "block_table": torch.tensor([[4, 0, 3], [2, 5, 1]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([37, 20], dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
    }
    a.update(changes)
    return a


def test_metadata_forms():
    lens = torch.tensor([3, 4, 5], dtype=torch.int32)
    tiles, splits = get_mla_metadata(lens, 16, 1)
    assert tiles.dtype == splits.dtype == torch.int32 and tiles.shape[1] == 8 and splits.shape == (4,)
    assert [t.shape for t in get_mla_metadata(lens, 16, 1, 128, True, 64)] == [tiles.shape, splits.shape]
    new, none = get_mla_metadata()
    assert isinstance(new, flash_mla.FlashMLASchedMeta) and none is None
    results = [
        flash_mla_with_kvcache(**dense(tile_scheduler_metadata=t, num_splits=s)) for t, s in ((tiles, splits), (new, None))
    ]
    assert torch.equal(results[0][0], results[1][0])


def rows_for(indices, page):
    """Keys of one query row, by the definition of indices."""
    return [i for i in indices.tolist() if i >= 0]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8", "gaps"])
def test_sparse(kind):
    """Each query row has its own list with holes anywhere; an all-hole row is empty."""
    g = torch.Generator().manual_seed(1)
    batch, s_q, heads, page, blocks, topk = 2, 2, 3, 16, 5, 12
    latent = torch.randn(blocks * page, 576, generator=g)
    q = torch.randn(batch, s_q, heads, 576, generator=g).to(torch.float16 if kind == "fp16" else torch.bfloat16)
    indices = torch.stack([torch.randperm(blocks * page, generator=g)[:topk] for _ in range(4)]).view(batch, s_q, topk).int()
    indices[0, 0, [0, 5, 11]] = -1
    indices[0, 1, :] = -1
    indices[1, 0, 3:] = -1
    if kind == "fp8":
        cache = FP8Tile128().quantize(latent).data
        values = FP8Tile128().dequantize(cache, None, torch.float64)
        cache = cache.view(blocks, page, 1, 656).view(torch.int8)
    else:
        cache = latent.to(torch.float16 if kind == "fp16" else torch.bfloat16)
        values = cache.double()
        cache = cache.view(blocks, page, 1, 576)
        if kind == "gaps":  # every other plane of a buffer with two layers
            both = torch.full((blocks, 2, page, 1, 576), torch.nan, dtype=cache.dtype)
            both[:, 1] = cache
            cache = both[:, 1]
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, 512, get_mla_metadata()[0], is_fp8_kvcache=kind == "fp8", indices=indices
    )
    for b in range(batch):
        for i in range(s_q):
            keys = values[rows_for(indices[b, i], page)]
            if not len(keys):
                assert bool((out[b, i] == 0).all()) and bool((lse[b, :, i] == torch.inf).all())
                continue
            logits = 576**-0.5 * (q[b, i].double() @ keys.T)
            assert torch.allclose(lse[b, :, i].double(), torch.logsumexp(logits, -1), atol=1e-3)
            torch.testing.assert_close(out[b, i].double(), torch.softmax(logits, -1) @ keys[:, :512], atol=1e-2, rtol=1e-2)


def test_sparse_over_all_keys_equals_dense():
    a = dense(causal=False)
    slots = torch.tensor([[4 * 16 + t % 16 if t < 16 else t % 16 if t < 32 else 3 * 16 + t % 16 for t in range(37)]])
    sparse = flash_mla_with_kvcache(
        a["q"][:1], a["k_cache"], None, None, 512, None, indices=slots.expand(1, 2, 37).contiguous().int()
    )  # fmt: skip
    full = flash_mla_with_kvcache(**a)
    torch.testing.assert_close(sparse[0][0], full[0][0], atol=5e-3, rtol=1e-2)
    torch.testing.assert_close(sparse[1][0], full[1][0])


def test_topk_length():
    a = dense()
    indices = (
        torch.randperm(96, generator=torch.Generator().manual_seed(2))[:40].view(1, 1, 40).expand(2, 2, 40).int().contiguous()
    )
    short = flash_mla_with_kvcache(
        a["q"], a["k_cache"], None, None, 512, None, indices=indices, topk_length=torch.tensor([7, 0], dtype=torch.int32)
    )
    want = flash_mla_with_kvcache(a["q"], a["k_cache"], None, None, 512, None, indices=indices[..., :7].contiguous())
    assert torch.equal(short[0][0], want[0][0])
    assert bool((short[0][1] == 0).all()) and bool((short[1][1] == torch.inf).all())


def test_sink_is_one_more_logit_without_a_value():
    a = dense(attn_sink=torch.tensor([-torch.inf, 0.0, 3.0, torch.inf]), cache_seqlens=torch.tensor([37, 0], dtype=torch.int32))
    out, lse = flash_mla_with_kvcache(**a)
    plain, plain_lse = flash_mla_with_kvcache(**dense(cache_seqlens=a["cache_seqlens"]))
    assert torch.equal(lse, plain_lse)
    sink = a["attn_sink"][1:3].view(1, 2).expand(2, 2)
    rows = lse[0].T[:, 1:3]
    want, _ = merge_states([plain[0][:, 1:3].float(), torch.zeros(2, 2, 512)], [rows, sink])
    torch.testing.assert_close(out[0][:, 1:3].float(), want, atol=1e-2, rtol=1e-2)
    assert torch.equal(out[0][:, 0], plain[0][:, 0]) and bool((out[0][:, 3] == 0).all())
    assert bool((out[1] == 0).all()) and bool((lse[1] == torch.inf).all())


def test_more_rows_than_keys():
    out, lse = flash_mla_with_kvcache(**dense(cache_seqlens=torch.tensor([1, 2], dtype=torch.int32), causal=True))
    assert bool((out[0, 0] == 0).all()) and bool((lse[0, :, 0] == torch.inf).all())
    assert bool(lse[0, :, 1].isfinite().all()) and bool(lse[1].isfinite().all())


def test_nan_that_is_read_stays_in_lse():
    arguments = dense(causal=False)
    slot = arguments["block_table"][0, 0]
    arguments["k_cache"] = arguments["k_cache"].clone()
    arguments["k_cache"][slot, 0] = torch.nan
    _, lse = flash_mla_with_kvcache(**arguments)
    assert bool(lse[0].isnan().all()) and bool(lse[1].isfinite().all())


def test_refusals_name_the_argument():
    def refused(exception, text, **changes):
        with pytest.raises(exception, match=text):
            flash_mla_with_kvcache(**dense(**changes))

    refused(InvalidArgument, "^q: expected", q=torch.zeros(2, 4, 576))
    refused(InvalidArgument, "^head_dim_v", head_dim_v=256)
    refused(InvalidArgument, "^k_cache: expected", k_cache=torch.zeros(6, 16, 2, 576))
    refused(InvalidDtype, "^k_cache: expected bfloat16", k_cache=torch.zeros(6, 16, 1, 576))
    refused(InvalidDtype, "^is_fp8_kvcache", k_cache=torch.zeros(6, 16, 1, 656, dtype=torch.uint8))
    refused(InvalidArgument, "^k_cache: with is_fp8_kvcache", is_fp8_kvcache=True)
    refused(InvalidArgument, "^block_table: expected an int32 tensor, got None", block_table=None)
    refused(InvalidDtype, "^block_table: expected int32", block_table=torch.zeros(2, 3, dtype=torch.int64))
    refused(InvalidArgument, r"^cache_seqlens\[0\]: expected 0..48", cache_seqlens=torch.tensor([49, 1], dtype=torch.int32))
    refused(InvalidArgument, "^causal", causal=True, indices=torch.zeros(2, 2, 4, dtype=torch.int32))
    refused(InvalidArgument, "^indices: expected int32", indices=torch.zeros(2, 2, 4))
    refused(InvalidArgument, "^topk_length", topk_length=torch.zeros(2, dtype=torch.int32))
    sparse = {"indices": torch.zeros(2, 2, 4, dtype=torch.int32)}
    refused(InvalidArgument, "^topk_length: expected a tensor", topk_length=4, **sparse)
    refused(InvalidArgument, "^attn_sink: expected a tensor", attn_sink=[0.0])
    refused(InvalidArgument, "^block_table: expected an int32 tensor", block_table=[[0, 1]])
    refused(InvalidArgument, "^extra_k_cache", extra_k_cache=torch.zeros(1))
    refused(InvalidArgument, "^softmax_scale: expected a finite number", softmax_scale=float("nan"))
    bad = torch.tensor([[4, 9, 3], [2, 5, 1]], dtype=torch.int32)
    refused(InvalidArgument, "block_table ids: expected 0..5", block_table=bad)
    refused(
        InvalidArgument,
        "block_table ids: expected 0..5",
        block_table=bad,
        k_cache=torch.zeros(6, 16, 1, 576, dtype=torch.float16),
    )

"""The definition itself, against closed forms and an independent brute force."""

import math

import pytest
import torch

from leanmla import LatentCache, PageTable
from leanmla.reference import mla_decode_reference


def setup(kv_len, rows=1, heads=2, seed=0):
    gen = torch.Generator().manual_seed(seed)
    keys = torch.randn(kv_len, 576, generator=gen).to(torch.bfloat16)
    cache = LatentCache.from_tensors(keys, format="bf16", page_size=1)
    table = PageTable.contiguous(torch.tensor([0, kv_len], dtype=torch.int32))
    q = torch.randn(rows, heads, 576, generator=gen)
    return q, keys.double(), cache, table


def test_zero_query_gives_the_mean_and_ln_of_the_length():
    q, keys, cache, table = setup(100)
    out, lse = mla_decode_reference(q * 0, cache, table, sm_scale=1.0)
    assert lse[0, 0].item() == pytest.approx(4.605170, abs=1e-6)
    assert torch.allclose(out[0, 0], keys[:, :512].mean(0))


def test_equal_hugely_negative_logits_still_give_the_mean():
    q, keys, cache, table = setup(64)
    keys[:, 512:] = 0
    keys[:, 575] = 1.0
    cache.data.copy_(keys[:, None].to(torch.bfloat16))
    q = torch.zeros(1, 2, 576)
    q[..., 575] = -3e4
    out, lse = mla_decode_reference(q, cache, table, sm_scale=1.0)
    assert torch.allclose(out[0, 0], keys[:, :512].to(torch.bfloat16).double().mean(0))
    assert lse[0, 0].item() == pytest.approx(-3e4 + math.log(64))


@pytest.mark.parametrize(("rows", "kv_len", "causal", "cap"), [(4, 3, True, 0.0), (3, 50, True, 5.0), (2, 9, False, 0.0)])
def test_against_loops(rows, kv_len, causal, cap):
    q, keys, cache, table = setup(kv_len, rows)
    out, lse = mla_decode_reference(q, cache, table, sm_scale=0.3, causal=causal, logit_cap=cap)
    for i in range(rows):
        for h in range(2):
            logits = []
            for j in range(kv_len):
                if causal and j > kv_len - rows + i:
                    break
                x = 0.3 * sum(float(a) * float(b) for a, b in zip(q[i, h].double(), keys[j], strict=True))
                logits.append(cap * math.tanh(x / cap) if cap else x)
            if not logits:
                assert lse[i, h] == -math.inf and not out[i, h].any()
                continue
            top = max(logits)
            z = sum(math.exp(x - top) for x in logits)
            assert lse[i, h].item() == pytest.approx(top + math.log(z), rel=1e-9)
            want = sum(math.exp(x - top) / z * keys[j, :512] for j, x in enumerate(logits))
            assert torch.allclose(out[i, h], want)


def test_ragged_rows_and_empty_sequences():
    q, _, cache, _ = setup(30, rows=5)
    table = PageTable.contiguous(torch.tensor([0, 10, 10, 30], dtype=torch.int32))
    qo = torch.tensor([0, 2, 3, 5], dtype=torch.int32)
    out, lse = mla_decode_reference(q, cache, table, sm_scale=0.1, qo_indptr=qo)
    assert not out[2].any() and (lse[2] == -math.inf).all()
    alone = PageTable.contiguous(torch.tensor([0, 10], dtype=torch.int32))
    first, first_lse = mla_decode_reference(q[:2], cache, alone, sm_scale=0.1)
    assert torch.equal(out[:2], first) and torch.equal(lse[:2], first_lse)


def test_nan_that_is_read_stays_nan_and_only_for_rows_that_see_it():
    q, _, cache, table = setup(10, rows=2)
    cache.data[9, 0, 3] = math.nan
    out, lse = mla_decode_reference(q, cache, table, sm_scale=0.1)
    assert torch.isfinite(out[0]).all() and torch.isnan(out[1]).all() and torch.isnan(lse[1]).all()

"""The public test grids of FlashMLA, FlashInfer and aiter, written anew, against our stand-ins.

Here a subset that a CPU gets through; tests/gpu/test_compat_grids_gpu.py runs all of it. Each ``check_*`` function is one cell
of a grid on one device, with that project's tolerance.
"""

import itertools

import pytest
import torch

from leanmla import LatentCache, PageTable
from leanmla.compat import aiter
from leanmla.compat.aiter.mla import mla_decode_fwd
from leanmla.compat.flash_mla import flash_mla_with_kvcache, get_mla_metadata
from leanmla.compat.flashinfer import BatchMLAPagedAttentionWrapper
from leanmla.formats import FP8Tile128
from leanmla.reference import mla_decode_reference

UNUSED = 2147480000
SM = 576**-0.5

FLASH_MLA_GRID = list(itertools.product((1, 2, 6, 64), (1, 2, 4), (20, 140, 4096), (1, 3, 9, 63, 64, 126, 128)))
FLASHINFER_GRID = list(
    itertools.product((1, 3, 5, 7, 157), (0, 17, 33, 96, 97, 114, 514, 1024), range(1, 18, 2), (1, 16), (False, True))
)
AITER_GRID = list(
    itertools.product(
        (21, 64, 256, 512, 1200, 3200, 5200, 8192),
        (1, 3, 5, 16, 32, 64, 128, 256),
        ((16, 1), (16, 2), (16, 4), (128, 1), (128, 2)),
    )
)


def cosine_difference(x, y):
    x, y = x.double(), y.double()
    size = float((x * x + y * y).sum())
    return 1 - 2 * float((x * y).sum()) / size if size else 0.0


def close(got, want, absolute, relative):
    """FlashMLA's rule: each element within the absolute or the relative bound; special values must be the same."""
    assert got.shape == want.shape
    got, want = got.double(), want.double()
    special = ~want.isfinite()
    same = (got == want) | (got.isnan() & want.isnan())
    error = (got - want).abs()
    fine = (error < absolute) | (error < relative * want.abs())
    return bool(torch.where(special, same, fine).all())


def check_flash_mla(batch, s_q, kv_len, heads, *, device="cpu", varlen=True, zero=True, causal=True, page=64, fp8=False, dtype=torch.bfloat16,
                    old_metadata=True, seed=0):  # fmt: skip
    g = torch.Generator().manual_seed(seed)
    lens = torch.full((batch,), kv_len)
    if varlen:
        lens = torch.normal(float(kv_len), kv_len / 2, (batch,), generator=g).clamp(max=2 * kv_len).long().clamp(min=s_q)
    if zero and batch > 1:
        lens[torch.randperm(batch, generator=g)[: max(1, batch // 4)]] = 0
    width = -(-int(lens.max()) // page) + 2
    blocks = batch * width
    order = torch.randperm(blocks, generator=g).view(batch, width).int()
    on = torch.Generator(device=device).manual_seed(seed)
    latent = (torch.randn(blocks, page, 576, generator=on, device=device) / 10).clamp(-1, 1)
    q = (torch.randn(batch, s_q, heads, 576, generator=on, device=device) / 10).clamp(-1, 1).to(dtype)
    # NaN wherever no key is, absurd ids wherever no block is.
    unused = torch.ones(blocks, page, dtype=torch.bool)
    table = torch.full((batch, width), UNUSED, dtype=torch.int32)
    for b in range(batch):
        n = -(-int(lens[b]) // page)
        table[b, :n] = order[b, :n]
        for k in range(n):
            unused[order[b, k], : min(page, int(lens[b]) - k * page)] = False
    unused = unused.to(device)
    if fp8:
        cache = FP8Tile128().quantize(latent.flatten(0, 1)).data.view(blocks, page, 656)
        cache[unused] = 0x7F
    else:
        cache = latent.to(dtype)
        cache[unused] = torch.nan
    table, seqlens = table.to(device), lens.int().to(device)
    metadata = get_mla_metadata(seqlens, s_q * heads, 1) if old_metadata else get_mla_metadata()
    out, lse = flash_mla_with_kvcache(
        q, cache.unsqueeze(2), table, seqlens, 512, *metadata, causal=causal, is_fp8_kvcache=fp8,
    )  # fmt: skip
    assert out.shape == (batch, s_q, heads, 512) and out.dtype == dtype
    assert lse.shape == (batch, heads, s_q) and lse.dtype == torch.float32
    if dtype == torch.float16:
        want, want_lse = _fp16_reference(q, cache, table, seqlens, causal)
    else:
        reference = LatentCache.from_tensors(cache, format="fp8_tile128" if fp8 else "bf16", page_size=page)
        want, want_lse = mla_decode_reference(
            q.flatten(0, 1), reference, PageTable.from_block_table(table, seqlens, page_size=page), sm_scale=SM, causal=causal
        )
        want = want.view(batch, s_q, heads, 512)
        want_lse = want_lse.view(batch, s_q, heads).transpose(1, 2)
    want_lse = torch.where(want_lse == -torch.inf, torch.inf, want_lse)
    assert close(out, want, 8e-4, 2.01 / 128), f"worst error {float((out.double() - want).abs().max()):.2e}"
    assert cosine_difference(out, want) < 5e-6
    # FlashMLA's bounds, but for 1e-6: a log-sum-exp near 0 is the difference of two numbers of the size of the logits, each rounded to fp32,
    # or for an fp8 cache summed by fp8 tensor cores, which keep 14 bits.
    assert close(lse, want_lse, 5e-5 if fp8 else 4e-6, 8.01 / 65536)


def _fp16_reference(q, cache, table, seqlens, causal):
    batch, s_q, heads = q.shape[:3]
    out = torch.zeros(batch, s_q, heads, 512, dtype=torch.float64, device=q.device)
    lse = torch.full((batch, heads, s_q), -torch.inf, dtype=torch.float64, device=q.device)
    for b in range(batch):
        n = int(seqlens[b])
        keys = cache[table[b, : -(-n // cache.shape[1])].long()].flatten(0, 1)[:n].double()
        for i in range(s_q):
            k = keys[: max(0, n - s_q + i + 1)] if causal else keys
            if len(k):
                logits = SM * (q[b, i].double() @ k.T)
                lse[b, :, i] = torch.logsumexp(logits, -1)
                out[b, i] = torch.softmax(logits, -1) @ k[:, :512]
    return out, lse


def check_flashinfer(batch, kv_len, q_len, page, causal, *, device="cpu", split_buffers=True, dtype=torch.float16, seed=0):
    """Uniform lengths, fp16, tolerance 1e-3 relative and absolute, lse too."""
    g = torch.Generator().manual_seed(seed)
    heads, pages = 16, -(-kv_len // page)
    on = torch.Generator(device=device).manual_seed(seed)
    q_nope = torch.randn(batch * q_len, heads, 512, generator=on, device=device).to(dtype)
    q_pe = torch.randn(batch * q_len, heads, 64, generator=on, device=device).to(dtype)
    latent = torch.randn(max(batch * pages, 1), page, 576, generator=on, device=device).to(dtype)
    ckv, kpe = latent[..., :512], latent[..., 512:]
    if split_buffers:
        ckv, kpe = ckv.contiguous(), kpe.contiguous()
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1024, dtype=torch.int8, device=device))
    steps = torch.arange(batch + 1, dtype=torch.int32, device=device)
    ids = torch.randperm(batch * pages, generator=g).int().to(device)
    wrapper.plan(
        steps * q_len, steps * pages, ids, torch.full((batch,), kv_len, dtype=torch.int32, device=device), heads, 512, 64, page,
        causal, 192**-0.5, dtype, dtype,
    )  # fmt: skip
    out, lse = wrapper.run(q_nope, q_pe, ckv, kpe, return_lse=True)
    q = torch.cat((q_nope, q_pe), -1).view(batch, q_len * heads, 576).double()
    keys = latent[ids.long()].view(batch, pages * page, 576)[:, :kv_len].double()
    logits = 192**-0.5 * (q @ keys.transpose(1, 2))
    if causal:
        hidden = torch.ones(q_len, kv_len, dtype=torch.bool, device=device).triu(kv_len - q_len + 1)
        logits = logits.view(batch, q_len, heads, kv_len).masked_fill(hidden[:, None], -torch.inf).flatten(1, 2)
    want_lse = torch.logsumexp(logits, -1).view(-1, heads) / torch.log(torch.tensor(2.0, dtype=torch.float64))
    want = (torch.softmax(logits, -1).nan_to_num() @ keys[..., :512]).view(-1, heads, 512)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out.double(), want, **tolerance)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


def check_aiter(ctx, batch, heads, q_len, fp8, *, mode=None, splits=None, device="cpu", page=1, varlen=False, seed=0):
    """Cosine difference below 1e-5 with bf16 and below 3e-2 with fp8 query and cache, against the unquantised values."""
    g = torch.Generator().manual_seed(seed)
    lens = [ctx] * batch
    if varlen:
        lens = torch.randint(1, ctx + 1, (batch,), generator=g).tolist()
    pages = [-(-n // page) for n in lens]
    total = sum(pages)
    on = torch.Generator(device=device).manual_seed(seed)
    latent = torch.randn(total, page, 1, 576, generator=on, device=device, dtype=torch.bfloat16)
    q = torch.randn(batch * q_len, heads, 576, generator=on, device=device, dtype=torch.bfloat16)
    kv = torch.tensor([0, *pages]).cumsum(0).int().to(device)
    qo = (torch.arange(batch + 1) * q_len).int().to(device)
    last = torch.tensor([n - (p - 1) * page for n, p in zip(lens, pages)], dtype=torch.int32, device=device)
    ids = torch.randperm(total, generator=g).int().to(device)
    query, buffer, scales = q, latent, {}
    if fp8:
        scales = {
            "q_scale": (q.abs().amax().float() / 448).reshape(1),
            "kv_scale": (latent.abs().amax().float() / 448).reshape(1),
        }
        query = (q.float() / scales["q_scale"]).to(torch.float8_e4m3fn)
        buffer = (latent.float() / scales["kv_scale"]).to(torch.float8_e4m3fn)
    metadata = {}
    if mode is not None:
        info = aiter.get_mla_metadata_info_v1(
            batch, q_len, heads, query.dtype, buffer.dtype, is_sparse=False, fast_mode=mode == "fast", num_kv_splits=8,
            intra_batch_mode=mode == "intra",
        )  # fmt: skip
        wm, wi, wis, ri, rfm, rpm = (torch.empty(s, dtype=t, device=device) for s, t in info)
        aiter.get_mla_metadata_v1(
            qo, kv, last, heads, 1, True, wm, wis, wi, ri, rfm, rpm, page_size=page, kv_granularity=max(page, 16),
            fast_mode=mode == "fast", intra_batch_mode=mode == "intra", max_split_per_batch=8 if mode == "intra" else -1,
        )  # fmt: skip
        metadata = {
            "work_meta_data": wm, "work_indptr": wi, "work_info_set": wis, "reduce_indptr": ri, "reduce_final_map": rfm,
            "reduce_partial_map": rpm, "intra_batch_mode": mode == "intra",
        }  # fmt: skip
    o = torch.full((batch * q_len, heads, 512), torch.nan, dtype=torch.bfloat16, device=device)
    _, lse = mla_decode_fwd(
        query, buffer, o, qo, kv, ids, last, q_len, page_size=page, sm_scale=SM, return_lse=True, num_kv_splits=splits, **scales,
        **metadata,
    )  # fmt: skip

    def definition(q, latent, sm_scale=SM):
        cache = LatentCache.from_tensors(latent, format="bf16", page_size=page)
        return mla_decode_reference(
            q, cache, PageTable.from_csr(kv, ids, last, page_size=page), sm_scale=sm_scale, qo_indptr=qo
        )

    want, want_lse = definition(q, latent)
    assert cosine_difference(o, want) < (3e-2 if fp8 else 1e-5)
    if fp8:  # what rounding to fp8 makes of a log-sum-exp depends on the data, so it is held to the rounded numbers
        _, want_lse = definition(query.float(), buffer.bfloat16(), SM * float(scales["q_scale"] * scales["kv_scale"]))
    # (an fp8 query times its scale is rounded to bf16)
    assert close(lse, want_lse, 2e-2 if fp8 else 1e-3, 0.0)  # rows before the first key have -inf, which must be the same


# -- the subset for a CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 3, 64])
@pytest.mark.parametrize("batch, s_q, kv_len", [(1, 1, 20), (2, 4, 20), (6, 2, 140), (2, 1, 600)])
def test_flash_mla_grid(batch, s_q, kv_len, heads):
    check_flash_mla(batch, s_q, kv_len, heads, old_metadata=heads != 3, causal=heads != 64)


@pytest.mark.parametrize(
    "options", [{"fp8": True}, {"dtype": torch.float16}, {"page": 16}, {"varlen": False, "zero": False}], ids=str
)
def test_flash_mla_grid_options(options):
    check_flash_mla(3, 2, 140, 9, **options)


@pytest.mark.parametrize("kv_len, q_len", [(0, 1), (17, 1), (33, 3), (97, 17), (114, 1)])
@pytest.mark.parametrize("page", [1, 16])
def test_flashinfer_grid(kv_len, q_len, page):
    for causal in (False, True):
        check_flashinfer(3, kv_len, q_len, page, causal, split_buffers=page == 1)
        check_flashinfer(3, kv_len, q_len, page, causal, split_buffers=page == 16, dtype=torch.bfloat16)


def test_close_compares_infinities_and_nan_by_equality():
    inf, nan = torch.inf, torch.nan
    same = torch.tensor([1.0, -inf, inf, nan])
    assert close(same, same, 1e-3, 0.0) and close(same + 5e-4, same, 1e-3, 0.0)
    for i, other in ((0, 1.1), (0, nan), (0, inf), (1, inf), (1, 0.0), (1, nan), (2, 3e38), (3, 0.0)):
        wrong = same.clone()
        wrong[i] = other
        assert not close(wrong, same, 1e-3, 0.0), (i, other)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "ctx, batch, heads, q_len, mode",
    [
        (3, 5, 16, 4, "intra"),
        (21, 3, 16, 4, None),
        (64, 5, 16, 1, "fast"),
        (256, 3, 16, 2, "intra"),
        (512, 1, 128, 1, "default"),
    ],
)
def test_aiter_grid(ctx, batch, heads, q_len, mode, fp8):
    if mode is None:
        check_aiter(ctx, batch, heads, q_len, fp8, splits=8)
    check_aiter(ctx, batch, heads, q_len, fp8, mode=mode, varlen=heads == 16, page=16 if heads == 128 else 1)

"""The public test grids of FlashMLA, FlashInfer and aiter in full, and what only a GPU can show: no waiting, and capture."""

import itertools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "cpu"))

import test_compat_grids as grids

from leanmla.compat import aiter
from leanmla.compat.aiter.mla import mla_decode_fwd
from leanmla.compat.flash_mla import flash_mla_with_kvcache
from leanmla.compat.flashinfer import BatchMLAPagedAttentionWrapper

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
SM = 576**-0.5


@pytest.mark.parametrize("batch, s_q", list(itertools.product((1, 2, 6, 64), (1, 2, 4))))
def test_flash_mla_grid(batch, s_q):
    for b, q, kv_len, heads in grids.FLASH_MLA_GRID:
        if (b, q) == (batch, s_q):
            for causal, varlen in ((True, True), (False, False)):
                grids.check_flash_mla(b, q, kv_len, heads, device="cuda", causal=causal, varlen=varlen)


@pytest.mark.parametrize("options", [{"fp8": True}, {"dtype": torch.float16}, {"page": 16}, {"page": 1}], ids=str)
def test_flash_mla_grid_options(options):
    for heads, kv_len in itertools.product((1, 64, 126), (20, 1000)):
        grids.check_flash_mla(6, 2, kv_len, heads, device="cuda", **options)


@pytest.mark.parametrize("batch, kv_len", list(itertools.product((1, 3, 5, 7, 157), (0, 17, 33, 96, 97, 114, 514, 1024))))
def test_flashinfer_grid(batch, kv_len):
    for b, kv, q_len, page, causal in grids.FLASHINFER_GRID:
        if (b, kv) == (batch, kv_len):
            for dtype in (torch.float16, torch.bfloat16):
                grids.check_flashinfer(b, kv, q_len, page, causal, device="cuda", split_buffers=q_len == 1, dtype=dtype)


@pytest.mark.parametrize(
    "ctx, batch", list(itertools.product((21, 64, 256, 512, 1200, 3200, 5200, 8192), (1, 3, 5, 16, 32, 64, 128, 256)))
)
def test_aiter_grid(ctx, batch):
    for i, (c, b, (heads, q_len)) in enumerate(grids.AITER_GRID):
        if (c, b) == (ctx, batch):
            for fp8 in (False, True):
                grids.check_aiter(
                    c, b, heads, q_len, fp8, device="cuda", mode=(None, "fast", "default", "intra")[i % 4], varlen=i % 2 == 1
                )


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("heads, q_len", [(16, 1), (16, 2)])
@pytest.mark.parametrize("ctx, splits", [(21, 8), (1024, 32)])
def test_aiter_explicit_splits_of_a_large_batch(ctx, splits, heads, q_len, fp8):
    """Far more items than fit on the device at once, many of them without keys."""
    grids.check_aiter(ctx, 256, heads, q_len, fp8, device="cuda", splits=splits)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


class NoWaiting:
    """Any synchronisation is an error inside."""

    def __enter__(self):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")

    def __exit__(self, *exc):
        torch.cuda.set_sync_debug_mode("default")


def _aiter_step(lens, mode="fast"):
    g = torch.Generator(device="cuda").manual_seed(0)
    batch, capacity = len(lens), 4096
    step = {
        "q": torch.randn(batch, 16, 576, device="cuda", generator=g).bfloat16(),
        "kv_buffer": torch.randn(capacity, 1, 1, 576, device="cuda", generator=g).bfloat16(),
        "o": torch.empty(batch, 16, 512, dtype=torch.bfloat16, device="cuda"),
        "qo_indptr": ints(*range(batch + 1)),
        "kv_indptr": torch.tensor([0, *lens]).cumsum(0).int().cuda(),
        "kv_indices": torch.randperm(capacity, device="cuda", generator=g).int(),
        "kv_last_page_lens": ints(*[1] * batch),
    }
    info = aiter.get_mla_metadata_info_v1(batch, 1, 16, torch.bfloat16, torch.bfloat16, is_sparse=False, fast_mode=mode == "fast",
                                          num_kv_splits=4, intra_batch_mode=mode == "intra")  # fmt: skip
    names = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    return step, {n: torch.empty(s, dtype=t, device="cuda") for n, (s, t) in zip(names, info)}


def _fill(step, meta, mode):
    aiter.get_mla_metadata_v1(
        step["qo_indptr"], step["kv_indptr"], step["kv_last_page_lens"], 16, 1, True, meta["work_meta_data"], meta["work_info_set"],
        meta["work_indptr"], meta["reduce_indptr"], meta["reduce_final_map"], meta["reduce_partial_map"], fast_mode=mode == "fast",
        intra_batch_mode=mode == "intra",
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fast", "default", "intra"])
def test_aiter_neither_waits_nor_minds_capture(mode):
    from test_compat_aiter_metadata import walk

    lens = [700, 0, 31, 1500]
    step, meta = _aiter_step(lens, mode)
    options = {"max_seqlen_q": 1, "sm_scale": SM, "return_lse": True, "intra_batch_mode": mode == "intra", **meta}

    def run():
        _fill(step, meta, mode)
        return mla_decode_fwd(**step, **options)

    run()
    with NoWaiting():
        run()
    eager = step["o"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    names = ("work_metadata_ptrs", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
    for new in (lens, [5, 64, 2000, 0]):
        step["kv_indptr"].copy_(torch.tensor([0, *new]).cumsum(0).int())
        step["o"].fill_(torch.nan)
        graph.replay()
        walk(dict(zip(names, meta.values())), new, [1] * 4, page=1, granularity=16)
        replayed = step["o"].clone()
        run()
        assert torch.equal(replayed, step["o"])
        if new == lens:
            assert torch.equal(replayed, eager)
    logits, _ = mla_decode_fwd(**step, **options, return_logits=True)  # the work list as it is written, on the device
    assert logits is not None
    torch.testing.assert_close(step["o"], replayed, atol=1e-2, rtol=1e-2)


def test_reduce_on_the_device_equals_the_cpu():
    g = torch.Generator().manual_seed(0)
    out, lse = torch.randn(40, 1, 16, 512, generator=g), torch.randn(40, 1, 16, 1, generator=g)
    lse[3] = -torch.inf
    indptr = torch.tensor([0, 5, 5, 20], dtype=torch.int32)
    final = torch.tensor([[0, 2], [2, 4], [4, 6]], dtype=torch.int32)
    partial = torch.arange(0, 40, 2, dtype=torch.int32)
    results = []
    for dev in ("cpu", "cuda"):
        o, total = torch.full((6, 16, 512), 7.0, device=dev), torch.full((6, 16), 7.0, device=dev)
        arguments = [t.to(dev) for t in (out, lse, indptr, final, partial)]
        if dev == "cuda":
            aiter.mla_reduce_v1(*arguments, 2, 0, o.clone(), total.clone())
            with NoWaiting():
                aiter.mla_reduce_v1(*arguments, 2, 0, o, total)
        else:
            aiter.mla_reduce_v1(*arguments, 2, 0, o, total)
        results.append((o.cpu(), total.cpu()))
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "sparse", "fp16"])
def test_flash_mla_neither_waits_nor_minds_capture(kind):
    g = torch.Generator(device="cuda").manual_seed(0)
    dtype = torch.float16 if kind == "fp16" else torch.bfloat16
    q = torch.randn(3, 2, 16, 576, device="cuda", generator=g).to(dtype)
    cache = torch.randn(40, 64, 1, 576, device="cuda", generator=g).to(dtype)
    table = torch.randperm(40, device="cuda", generator=g)[:36].view(3, 12).int()
    seqlens = ints(700, 64, 0)
    indices = torch.randint(-20, 40 * 64, (3, 2, 100), device="cuda", generator=g).int()

    def run():
        if kind == "sparse":
            return flash_mla_with_kvcache(q, cache, None, None, 512, indices=indices)
        return flash_mla_with_kvcache(q, cache, table, seqlens, 512, causal=True)

    run()
    with NoWaiting():
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for lens in ((700, 64, 0), (12, 0, 768)):
        seqlens.copy_(ints(*lens))
        indices.copy_(indices.roll(1, 0))
        graph.replay()
        for got, want in zip(captured, run()):
            assert torch.equal(got, want)


def test_flashinfer_graph_follows_plans():
    g = torch.Generator(device="cuda").manual_seed(0)
    batch, pages = 4, 64
    cache = torch.randn(pages, 16, 576, device="cuda", generator=g).bfloat16()
    q = torch.randn(batch, 16, 576, device="cuda", generator=g).bfloat16()
    out = torch.empty(batch, 16, 512, dtype=torch.bfloat16, device="cuda")
    options = {"use_cuda_graph": True, "qo_indptr": ints(*[0] * 5), "kv_indptr": ints(*[0] * 5), "kv_indices": ints(*[0] * pages),
               "kv_len_arr": ints(*[0] * 4)}  # fmt: skip
    captured = BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.int8, device="cuda"), **options)
    plain = BatchMLAPagedAttentionWrapper(torch.empty(8, dtype=torch.int8, device="cuda"))

    order = torch.randperm(pages, device="cuda", generator=g).int()

    def plan(wrapper, lens):
        used = [-(-n // 16) for n in lens]
        wrapper.plan(
            ints(0, 1, 2, 3, 4), torch.tensor([0, *used]).cumsum(0).int().cuda(), order, ints(*lens), 16, 512, 64, 16, False, SM,
            torch.bfloat16, torch.bfloat16,
        )  # fmt: skip

    def run(wrapper, **kwargs):
        return wrapper.run(q[..., :512], q[..., 512:], cache[..., :512], cache[..., 512:], **kwargs)

    plan(captured, [100, 16, 1, 200])
    run(captured, out=out)
    with NoWaiting():
        run(captured, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(captured, out=out)
    for lens in ([100, 16, 1, 200], [5, 0, 300, 17], [256, 256, 256, 256]):
        plan(captured, lens)
        out.fill_(torch.nan)
        graph.replay()
        plan(plain, lens)
        torch.testing.assert_close(out, run(plain), atol=5e-3, rtol=1e-2)


def test_aiter_query_rows_past_the_last_offset_are_left_alone():
    """A padded query whose row count happens to be batch * max_seqlen_q: lengths 1, 2, 1 in six rows."""
    g = torch.Generator().manual_seed(5)
    q = torch.randn(6, 16, 576, generator=g).bfloat16()
    kv = torch.randn(40, 1, 1, 576, generator=g).bfloat16()
    qo, pages = torch.tensor([0, 1, 3, 4], dtype=torch.int32), torch.tensor([0, 10, 25, 40], dtype=torch.int32)
    ids, last = torch.randperm(40, generator=g).int(), torch.ones(3, dtype=torch.int32)
    want = torch.empty(4, 16, 512, dtype=torch.bfloat16)
    mla_decode_fwd(q[:4], kv, want, qo, pages, ids, last, 2, sm_scale=SM)
    out = torch.full((6, 16, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    mla_decode_fwd(q.cuda(), kv.cuda(), out, qo.cuda(), pages.cuda(), ids.cuda(), last.cuda(), 2, sm_scale=SM)
    assert (out[4:] == 7).all()
    torch.testing.assert_close(out[:4].cpu(), want, rtol=2e-2, atol=1e-3)

"""The Triton backend on a GPU: the grid of cases, splits, repeats, CUDA graphs, torch.compile."""

import dataclasses

import pytest
import torch

from leanmla import DecodePlan, LatentCache, PageTable, device, mla_decode
from leanmla.reference import mla_decode_reference
from leanmla.testing import DecodeCase, case_grid, compare, make_inputs
from leanmla.testing.inputs import poison_storage

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
if device.triton_missing():
    pytest.skip(device.triton_missing(), allow_module_level=True)

FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")
SCALE = 576**-0.5


def decode(inputs, **options):
    """(out, lse) of the Triton backend, written into the inputs' NaN-filled out."""
    return mla_decode(
        inputs.q, inputs.cache, inputs.table, out=inputs.out, return_lse=True, backend="triton",
        max_q_len=max(inputs.case.rows, default=1) or 1, **{**inputs.options, **inputs.splits, **options},
    )  # fmt: skip


@pytest.mark.parametrize("case", case_grid(FORMATS), ids=lambda c: c.id)
def test_grid(case):
    """Every kind of case, with NaN and absurd page ids wherever nothing may be read."""
    inputs = make_inputs(case, device="cuda")
    result = compare(inputs, *decode(inputs))
    assert result, result.message


@pytest.mark.parametrize("fmt", FORMATS)
def test_unread_storage_changes_no_bit(fmt):
    case = DecodeCase((200, 77, 0, 64), q_lens=2, format=fmt)
    poisoned, clean = make_inputs(case, device="cuda"), make_inputs(case, device="cuda", poison=False)
    for a, b in zip(decode(poisoned), decode(clean)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("splits", (None, 1, 2, 32))
def test_repeats_are_bitwise_equal(fmt, splits):
    inputs = make_inputs(DecodeCase((3000, 64, 1, 511), format=fmt, num_kv_splits=splits), device="cuda")
    first = [t.clone() for t in decode(inputs)]
    for _ in range(20):
        inputs.out.fill_(torch.nan)
        for a, b in zip(decode(inputs), first):
            assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", FORMATS)
def test_full_occupancy_repeats(fmt):
    """512 sequences: several waves of blocks, no order may matter."""
    inputs = make_inputs(DecodeCase((1024,) * 512, format=fmt), device="cuda", poison=False)
    first = [t.clone() for t in decode(inputs)]
    for _ in range(5):
        for a, b in zip(decode(inputs), first):
            assert torch.equal(a, b)


@pytest.mark.parametrize("fmt", FORMATS)
def test_fixed_size_splits_do_not_depend_on_the_batch(fmt):
    """Reproducible mode: a row alone equals the same row in a batch of 64."""
    gen = torch.Generator().manual_seed(3)
    lens = torch.randint(1, 1500, (64,), generator=gen).tolist()
    inputs = make_inputs(DecodeCase(tuple(lens), format=fmt, split_size=256), device="cuda")
    out, _ = decode(inputs)
    for b in (0, 17, 63):
        table = PageTable.from_block_table(
            inputs.table.page_ids[b : b + 1], inputs.table.cache_seqlens[b : b + 1], page_size=64
        )
        alone = mla_decode(inputs.q[b : b + 1], inputs.cache, table, sm_scale=SCALE, split_size=256, backend="triton")
        assert torch.equal(alone, out[b : b + 1])


@pytest.mark.parametrize("fmt", FORMATS)
def test_split_counts_agree(fmt):
    """lse from one split and from 32 differ by rounding only, also with large logits."""
    case = DecodeCase((900, 300), format=fmt, logit_shift=1000.0)
    inputs = make_inputs(case, device="cuda")
    lse = [decode(inputs, num_kv_splits=n)[1].clone() for n in (1, 32)]
    assert (lse[0] - lse[1]).abs().max() < 1e-3


@pytest.mark.parametrize("fmt", FORMATS)
def test_page_sizes_agree_and_scattered_pages_equal_contiguous_ones(fmt):
    latent = torch.randn(300, 576, device="cuda").bfloat16()
    q = torch.randn(1, 16, 576, device="cuda").bfloat16()
    results = {}
    for page in (1, 16, 32, 64, 128):
        pages = -(-300 // page)
        order = torch.randperm(pages, device="cuda")
        slots = (order[:, None] * page + torch.arange(page, device="cuda")).flatten()[:300]
        cache = LatentCache.allocate(pages, page, format=fmt, device="cuda", **({"scale": 0.02} if fmt == "fp8" else {}))
        cache.append(latent, slots)
        table = PageTable.from_block_table(
            order[None].to(torch.int32), torch.tensor([300], dtype=torch.int32, device="cuda"), page_size=page
        )
        results[page] = mla_decode(q, cache, table, sm_scale=SCALE, num_kv_splits=2, backend="triton")
    for page, out in results.items():
        assert torch.equal(out, results[64]), page


@pytest.mark.parametrize("cap", (1e5, 1e7))
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_large_cap_changes_nothing(fmt, cap):
    case = DecodeCase((300, 77), q_lens=2, format=fmt, q_std=8.0)
    (out, lse), (capped, capped_lse) = (
        [t.clone() for t in decode(make_inputs(c, device="cuda"))] for c in (case, case.replace(logit_cap=cap))
    )
    assert (capped.double() - out.double()).norm() <= 1e-3 * out.double().norm()
    assert torch.allclose(capped_lse, lse, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("fmt", FORMATS)
def test_nan_reaches_the_rows_that_see_it_and_no_others(fmt):
    inputs = make_inputs(DecodeCase((70, 40), q_lens=4, num_heads=16, format=fmt), device="cuda")
    slot = inputs.table.slots(0)[68:69]  # rows 2 and 3 of sequence 0 see key 68
    page, offset = slot // 64, slot % 64
    if fmt == "bf16":
        inputs.cache.data[page, offset, 7] = torch.nan
    elif fmt == "mxfp4":
        inputs.cache.scale[page, offset, 0] = 255
    else:
        inputs.cache.data[page, offset, 7] = 0xFF
    out, lse = decode(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    seen = torch.isnan(want_lse)
    assert seen[2:4].all() and not seen[:2].any() and not seen[4:].any()
    assert torch.isnan(out[seen]).all() and torch.isnan(lse[seen]).all()
    assert (out.double() - want)[~seen].norm() / want[~seen].norm() < 3e-3


def test_all_fp8_codes():
    """All 256 bytes as values: key j holds byte j in value dimension 0; q is zero, so out is the mean of the finite ones."""
    cache = LatentCache.allocate(4, 64, format="fp8", device="cuda", scale=1.0)
    codes = torch.arange(256, dtype=torch.uint8)
    finite = (codes & 0x7F) != 0x7F
    keep = codes[finite]
    cache.data.view(256, 576)[: len(keep), 0] = keep.cuda()
    table = PageTable.from_block_table(
        torch.arange(4, dtype=torch.int32, device="cuda")[None],
        torch.tensor([len(keep)], dtype=torch.int32, device="cuda"), page_size=64,
    )  # fmt: skip
    for j in range(len(keep)):
        # One key at a time dominates: its rope part and q's say so, by exact powers of two.
        cache.data.view(256, 576)[:, 575] = 0
        cache.data.view(256, 576)[j, 575] = 0x78  # 256
        q = torch.zeros(1, 1, 576, dtype=torch.bfloat16, device="cuda")
        q[..., 575] = 1.0
        out = mla_decode(q, cache, table, sm_scale=1.0, backend="triton")
        assert float(out[0, 0, 0]) == float(keep[j].view(torch.float8_e4m3fn).bfloat16())


def test_offsets_beyond_32_bits():
    """A cache plane whose page stride is that of many layers: byte and element offsets pass 2**32."""
    pages, stride = 12, 1 << 29  # elements; 6 GB x 2 bytes in all
    buffer = torch.empty(pages * stride, dtype=torch.bfloat16, device="cuda")
    data = buffer.as_strided((pages, 64, 576), (stride, 576, 1))
    cache = LatentCache.from_tensors(data, format="bf16", page_size=64)
    latent = torch.randn(pages * 64, 576, device="cuda").bfloat16()
    cache.append(latent, torch.arange(pages * 64, device="cuda"))
    ids = torch.randperm(pages).to(torch.int32).cuda()[None]
    table = PageTable.from_block_table(ids, torch.tensor([pages * 64 - 5], dtype=torch.int32, device="cuda"), page_size=64)
    q = torch.randn(1, 16, 576, device="cuda").bfloat16()
    out = mla_decode(q, cache, table, sm_scale=SCALE, backend="triton")
    want, _ = mla_decode_reference(q, cache, table, sm_scale=SCALE)
    assert (out.double() - want).norm() / want.norm() < 3e-3


def test_more_than_65535_sequences():
    batch = 70000
    cache = LatentCache.allocate(64, 16, format="mxfp4", device="cuda")
    cache.append(torch.randn(1024, 576, device="cuda").bfloat16(), torch.arange(1024, device="cuda"))
    lens = torch.randint(0, 17, (batch,), device="cuda", dtype=torch.int32)
    table = PageTable.from_block_table(torch.randint(0, 64, (batch, 1), device="cuda", dtype=torch.int32), lens, page_size=16)
    q = torch.randn(batch, 1, 576, device="cuda").bfloat16()
    out = mla_decode(q, cache, table, sm_scale=SCALE, backend="triton")
    pick = torch.tensor([0, 1, 65535, 65536, 69999], device="cuda")
    few = PageTable.from_block_table(table.page_ids[pick].contiguous(), lens[pick].contiguous(), page_size=16)
    want, _ = mla_decode_reference(q[pick], cache, few, sm_scale=SCALE)
    assert torch.allclose(out[pick].double(), want, atol=2e-2, rtol=2e-2)
    assert (out[lens == 0] == 0).all()


def test_skewed_lengths_are_cut_finely():
    inputs = make_inputs(DecodeCase((131072, *(1,) * 127), format="fp8", cache_scale=0.02), device="cuda", poison=False)
    out, _ = decode(inputs)
    pick = DecodeCase((131072,), format="fp8")
    table = PageTable.from_block_table(inputs.table.page_ids[:1], inputs.table.cache_seqlens[:1], page_size=64)
    want, _ = mla_decode_reference(inputs.q[:1], inputs.cache, table, sm_scale=pick.sm_scale)
    assert (out[:1].double() - want).norm() / want.norm() < 3e-3


# -- plans and graphs ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """Buffers that a captured step reads; ``set`` changes lengths and pages in place."""

    fmt: str
    batch: int = 6
    heads: int = 16
    q_len: int = 1
    width: int = 40  # pages a sequence

    def __post_init__(self) -> None:
        pages = self.batch * self.width + 2
        self.cache = LatentCache.allocate(
            pages, 64, format=self.fmt, device="cuda", **({"scale": 0.02} if self.fmt == "fp8" else {})
        )
        slots = torch.arange(pages * 64, device="cuda")
        self.cache.append(torch.randn(pages * 64, 576, device="cuda").bfloat16(), slots)
        self.ids = torch.randperm(pages)[: self.batch * self.width].view(self.batch, self.width).to(torch.int32).cuda()
        self.block_table = self.ids.clone()
        self.lens = torch.ones(self.batch, dtype=torch.int32, device="cuda")
        self.table = PageTable.from_block_table(self.block_table, self.lens, page_size=64)
        self.q = torch.randn(self.batch * self.q_len, self.heads, 576, device="cuda").bfloat16()
        self.plan = DecodePlan(
            num_heads=self.heads, format=self.fmt, page_size=64, max_batch=self.batch, max_kv_len=self.width * 64,
            max_q_len=self.q_len, device="cuda", backend="triton",
        )  # fmt: skip

    def set(self, lens: list[int]) -> None:
        """Lengths in place; sequences of length 0 become padded rows with page ids -1."""
        self.lens.copy_(torch.tensor(lens, dtype=torch.int32))
        self.block_table.copy_(torch.where((self.lens > 0)[:, None], self.ids, -1))

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Against the definition on what the tables hold now."""
        want, want_lse = mla_decode_reference(self.q, self.cache, self.table, sm_scale=SCALE)
        assert (out.double() - want).norm() <= 3e-3 * want.norm()
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        live = want_lse != -torch.inf
        # All lengths may be 0: then no row is live, and the line above has compared every lse.
        assert torch.allclose(lse.double()[live], want_lse.double()[live], rtol=0, atol=1e-3)


LENGTHS = ([1, 2, 3, 4, 5, 6], [64, 65, 63, 128, 1, 700], [2560] * 6, [2560, 1, 1, 1, 1, 1], [100, 0, 7, 0, 0, 0], [0] * 6)


@pytest.mark.parametrize("q_len", (1, 3))
@pytest.mark.parametrize("fmt", FORMATS)
def test_one_graph_serves_growing_shrinking_and_padded_batches(fmt, q_len):
    step = Step(fmt, q_len=q_len)
    step.set(LENGTHS[0])
    captured = step.plan.capture(step.q, step.cache, step.table, sm_scale=SCALE, return_lse=True)
    for lens in (*LENGTHS, *reversed(LENGTHS)):
        if max(lens) == 0 and q_len > 1:
            continue
        step.set(lens)
        step.q.normal_()
        captured.out.fill_(torch.nan)
        out, lse = captured()
        torch.cuda.synchronize()
        step.check(out, lse)


def test_two_graphs_share_a_pool():
    steps = [Step("fp8"), Step("mxfp4", batch=3, heads=20)]
    graphs, pool = [], torch.cuda.graph_pool_handle()
    for step in steps:
        step.set([700] * step.batch)
        out = torch.empty(step.batch, step.heads, 512, dtype=torch.bfloat16, device="cuda")
        run = lambda s=step, o=out: s.plan.run(s.q, s.cache, s.table, sm_scale=SCALE, out=o, return_lse=True)  # noqa: E731
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            result = run()
        graphs.append((graph, result))
    for lens in ((5, 900, 64), (2000, 1, 0)):
        for step, (graph, result) in zip(steps, graphs):
            step.set([lens[i % 3] for i in range(step.batch)])
            graph.replay()
            torch.cuda.synchronize()
            step.check(*result)


@pytest.mark.parametrize("fmt", FORMATS)
def test_run_allocates_nothing_and_does_not_wait(fmt):
    step = Step(fmt)
    step.set([300, 5, 2000, 64, 1, 0])
    call = lambda: step.plan.run(step.q, step.cache, step.table, sm_scale=SCALE)  # noqa: E731
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_torch_compile():
    inputs = make_inputs(DecodeCase((300, 77), format="mxfp4"), device="cuda")
    expected, _ = decode(inputs)

    @torch.compile(fullgraph=True)
    def layer(q):
        return mla_decode(q * 1, inputs.cache, inputs.table, sm_scale=SCALE, backend="triton") + 0

    assert torch.equal(layer(inputs.q), expected)


def test_poison_is_poison():
    """The other tests lean on this: what poison_storage writes does become NaN when it is read."""
    for fmt in FORMATS:
        inputs = make_inputs(DecodeCase((64,), format=fmt), device="cuda")
        poison_storage(inputs.cache, inputs.key_slots[:1])
        out, _ = decode(inputs)
        assert not torch.isfinite(out).all(), fmt

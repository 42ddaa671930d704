"""The hopper_cuda backend on a Hopper GPU: the whole case grid, repeats, poison, graphs, uneven batches, NaN keys, every arrangement."""

from __future__ import annotations

import pytest
import torch

import leanmla
from leanmla import LatentCache, PageTable
from leanmla.device import describe
from leanmla.kernels.hopper_cuda import compiler, launch_configs
from leanmla.kernels.hopper_cuda.compiler import FORMATS
from leanmla.kernels.hopper_cuda.launch_configs import ARRANGEMENTS
from leanmla.reference import mla_decode_reference
from leanmla.testing.cases import DecodeCase, case_grid
from leanmla.testing.compare import compare
from leanmla.testing.inputs import make_inputs

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available() or describe("cuda").arch != "sm_90",
        reason="needs a Hopper GPU (sm_90) that torch can use",
    ),
    pytest.mark.skipif(compiler.unavailable() is not None, reason=f"{compiler.unavailable()}"),
]
#: fp8 wgmma keeps about 14 bits of a running sum, so logits are exact to about 2^-13 of the largest partial sum.
FP8_LSE = 2e-3
MORE = (
    DecodeCase((8192, 8192, 8192, 77), table="csr", page_size=128),
    DecodeCase((131072, *(1,) * 31), table="csr"),
    DecodeCase(tuple(1 + 37 * i for i in range(300)), table="csr"),
    DecodeCase(tuple(3 + i * i % 90 for i in range(1200))),
    DecodeCase((300,) * 200, num_heads=128, page_size=32),
    DecodeCase((500, 33, 0, 3000), page_size=48),
    DecodeCase((17, 64, 900), num_heads=96, page_size=1, table="csr"),
    DecodeCase((1500, 64, 900, 0), split_size=256, table="csr"),
    DecodeCase((5000, 1, 0, 700), q_lens=(2, 0, 1, 5), num_heads=5, page_size=7, table="csr", q_dtype="fp16", logit_cap=20.0),
)
#: Page 1 in random order, ragged and skewed lengths, q_len 4, 64 and 128 heads, more splits: what no run on a card has held so far.
SHAPES = (
    DecodeCase((8192,) * 8, page_size=1, table="csr"),
    DecodeCase(tuple(1 + 257 * i % 2047 for i in range(64)), page_size=1, table="csr"),
    DecodeCase((65536, *(1024,) * 31), table="csr"),
    DecodeCase((1024,) * 32, q_lens=4),
    DecodeCase((8192, 5, 3000), q_lens=4),
    DecodeCase((2048,) * 16, num_heads=64),
    DecodeCase((2048, 1, 700) * 3, num_heads=128, q_lens=2),
    DecodeCase((8192, 100), num_kv_splits=64),
    DecodeCase((700, 8192), num_kv_splits=200, page_size=16),
    DecodeCase((20000, 64), split_size=64),
)
CASES = case_grid(FORMATS) + [case.replace(format=fmt) for fmt in FORMATS for case in MORE + SHAPES]


def run(inputs, **changes):
    options = {**inputs.options, **inputs.splits, **changes}
    return leanmla.mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="hopper_cuda", **options)


@pytest.fixture(params=ARRANGEMENTS)
def arrangement(request):
    """Every arrangement of the kernel in turn."""
    with launch_configs.using(request.param) as chosen:
        yield chosen


@pytest.fixture(params=FORMATS)
def fmt(request):
    return request.param


def same_bits(a, b) -> bool:
    return torch.equal(a[0].view(torch.int16), b[0].view(torch.int16)) and torch.equal(
        a[1].view(torch.int32), b[1].view(torch.int32)
    )


def check(case: DecodeCase) -> None:
    """The definition's result, the same bits again, and whatever unread storage holds."""
    inputs = make_inputs(case, device="cuda")
    out, lse = run(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    report = compare(inputs, out, None, reference=(want, want_lse))
    assert report, report.message
    assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
    finite = want_lse.isfinite()
    error = (lse.double() - want_lse)[finite].abs()
    assert bool((error <= FP8_LSE + 2e-4 * want_lse[finite].abs()).all()), float(error.max())
    for _ in range(4):
        assert same_bits((out, lse), run(inputs))
    assert same_bits((out, lse), run(make_inputs(case, device="cuda", poison=False)))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_grid(case):
    if (case.split_size or 64) % 64:
        pytest.skip("split sizes are multiples of 64 here")
    check(case)


@pytest.mark.parametrize("case", [case.replace(format=fmt) for fmt in FORMATS for case in MORE + SHAPES], ids=lambda c: c.id)
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangements(name, case):
    """Whatever the size."""
    with launch_configs.using(name):
        check(case)


@pytest.mark.parametrize("q_std, shift", [(100.0, 0.0), (8.0, 300.0), (30.0, 0.0), (4.0, 0.0)])
@pytest.mark.parametrize("seed", range(4))
def test_large_logits(q_std, shift, seed, fmt):
    """Beyond what 14 bits of a sum hold, where they are taken again in f16 products."""
    case = DecodeCase((2000, 300, 64), q_std=q_std, logit_shift=shift, format=fmt)
    inputs = make_inputs(case, device="cuda", seed=seed)
    out, lse = run(inputs)
    want = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    report = compare(inputs, out, reference=want)
    assert report, report.message
    assert float((lse.double() - want[1]).abs().max()) < 5e-3
    assert same_bits((out, lse), run(inputs))


@pytest.mark.parametrize("case", [c for c in CASES if c.strided], ids=lambda c: c.id)
def test_given_out(case):
    inputs = make_inputs(case, device="cuda")
    out, _ = run(inputs, out=inputs.out)
    assert out is inputs.out
    assert compare(inputs, out)
    want, _ = run(inputs)
    assert torch.equal(out, want)


def test_odd_strides_of_q_and_out(arrangement, fmt):
    inputs = make_inputs(DecodeCase((200, 77), q_lens=2, format=fmt), device="cuda")
    want, _ = run(inputs)
    rows, heads = inputs.q.shape[:2]
    wide = torch.full((rows, heads, 579), torch.nan, dtype=inputs.q.dtype, device="cuda")
    wide[..., 1:577] = inputs.q
    inputs.q = wide[..., 1:577]
    out = torch.full((rows, heads, 515), torch.nan, dtype=inputs.q.dtype, device="cuda")[..., 1:513]
    got, _ = run(inputs, out=out)
    assert torch.equal(got, want)


def test_a_row_alone_equals_the_row_in_a_batch(arrangement, fmt):
    case = DecodeCase((1000, 700, 3, 1500), split_size=256, format=fmt)
    inputs = make_inputs(case, device="cuda")
    whole = run(inputs)
    for b, n in enumerate(case.kv_lens):
        table = PageTable.from_block_table(
            inputs.table.page_ids[b : b + 1], torch.tensor([n], dtype=torch.int32, device="cuda"), page_size=case.page_size
        )
        alone = leanmla.mla_decode(
            inputs.q[b : b + 1],
            inputs.cache,
            table,
            sm_scale=case.sm_scale,
            return_lse=True,
            split_size=256,
            backend="hopper_cuda",
        )
        assert same_bits(alone, (whole[0][b : b + 1], whole[1][b : b + 1]))


def test_nan_that_is_read_stays_nan(arrangement, fmt):
    inputs = make_inputs(DecodeCase((300, 200, 90), q_lens=3, format=fmt), device="cuda")
    clean = run(inputs)
    # A NaN block in the last key of sequence 0 is seen by its last row alone, one in the middle of sequence 1 by all three.
    latent = torch.randn(2, 576, device="cuda", dtype=torch.bfloat16)
    latent[:, 40] = torch.nan
    slots = torch.stack([inputs.table.slots(0)[299], inputs.table.slots(1)[100]])
    inputs.cache.append(latent, slots)
    out, lse = run(inputs)
    expected = torch.zeros(9, dtype=torch.bool, device="cuda")
    expected[[2, 3, 4, 5]] = True
    assert torch.equal(out.isnan().flatten(1).all(1), expected) and torch.equal(out.isnan().flatten(1).any(1), expected)
    assert torch.equal(lse.isnan().any(1), expected)
    assert torch.equal(out[~expected], clean[0][~expected])


def test_rows_of_very_different_exponents(arrangement, fmt):
    # Zeros, tiny and huge tokens in one sequence: the weight of a token of zeros must not drown in the others' exponents.
    cache = LatentCache.allocate(4, 64, format=fmt, device="cuda")
    latent = torch.randn(256, 576, device="cuda", generator=torch.Generator("cuda").manual_seed(3))
    latent *= torch.exp2(torch.arange(256, device="cuda") % 8 * -3.0)[:, None]
    latent[::5] = 0.0
    latent[7] *= 2.0**60
    latent[7, 512:] = 0.0
    cache.append(latent.to(torch.bfloat16), torch.arange(256, device="cuda"))
    table = PageTable.contiguous(torch.tensor([0, 256], dtype=torch.int32, device="cuda"))
    q = torch.randn(1, 16, 576, device="cuda", generator=torch.Generator("cuda").manual_seed(4)).to(torch.bfloat16)
    q[..., :512] *= 2.0**-60
    out, lse = leanmla.mla_decode(q, cache, table, sm_scale=0.04, return_lse=True, backend="hopper_cuda")
    want, want_lse = mla_decode_reference(q, cache, table, sm_scale=0.04)
    assert (out.double() - want).norm() <= 3e-3 * want.norm()
    assert (lse.double() - want_lse).abs().max() <= FP8_LSE


def test_one_graph_serves_changing_lengths(arrangement, fmt):
    capacity, batch, heads = 2048, 6, 16
    generator = torch.Generator("cuda").manual_seed(7)
    pages = capacity // 64 * batch
    cache = LatentCache.allocate(pages, 64, format=fmt, device="cuda")
    latent = torch.randn(pages * 64, 576, device="cuda", dtype=torch.bfloat16, generator=generator)
    cache.append(latent, torch.arange(pages * 64, device="cuda"))
    ids = torch.randperm(pages, device="cuda", generator=generator).to(torch.int32).view(batch, -1)
    lens = torch.full((batch,), 70, dtype=torch.int32, device="cuda")
    table = PageTable.from_block_table(ids, lens, page_size=64)
    q = torch.randn(batch, heads, 576, device="cuda", dtype=torch.bfloat16, generator=generator)
    plan = leanmla.DecodePlan(
        num_heads=heads, format=fmt, page_size=64, max_batch=batch, max_kv_len=capacity, device="cuda", backend="hopper_cuda"
    )
    step = plan.capture(q, cache, table, sm_scale=0.04)
    for now in ([70] * 6, [2048, 1, 0, 64, 65, 777], [0] * 6, [1, 2, 3, 4, 5, 6], [2048] * 6, [2000, 0, 0, 0, 0, 0]):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        step.out.fill_(torch.nan)
        out = step()
        torch.cuda.synchronize()
        want, _ = mla_decode_reference(q, cache, table, sm_scale=0.04)
        assert (out.double() - want).norm() <= 3e-3 * want.norm(), now
        eager = leanmla.mla_decode(q, cache, table, sm_scale=0.04, backend="hopper_cuda")
        assert torch.equal(out, eager), now


def test_repeats_at_full_occupancy(arrangement, fmt):
    inputs = make_inputs(DecodeCase((4096,) * 64, format=fmt, table="csr"), device="cuda")
    first = run(inputs)
    for _ in range(20):
        assert same_bits(first, run(inputs))

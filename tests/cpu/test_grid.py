"""The grid of kinds for every CPU backend and format, against the fp64 definition, with poison everywhere."""

import pytest
import torch

from leanmla import DecodePlan, formats, mla_decode
from leanmla.testing import DecodeCase, case_grid, compare, make_inputs

BACKENDS = ("reference", "cpu")


def decode(inputs, backend, **options):
    return mla_decode(
        inputs.q, inputs.cache, inputs.table, out=inputs.out, return_lse=True, backend=backend,
        **inputs.options, **inputs.splits, **options,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", case_grid(), ids=lambda c: f"{c.kind}-{c.id}")
def test_matches_the_definition(case, backend):
    inputs = make_inputs(case, seed=1)
    out, lse = decode(inputs, backend)
    assert out is inputs.out
    report = compare(inputs, out, lse)
    assert report.ok, report.message


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", list(formats.FORMATS))
@pytest.mark.parametrize("kind", ["empty and tiny", "splits", "rows", "pages", "skewed"])
def test_unused_storage_never_matters(kind, fmt, backend):
    if (backend, fmt) == ("reference", "mxfp4_row320"):
        pytest.skip("slow, and the same kernel-free path as for the other formats")
    for case in case_grid((fmt,), (kind,)):
        poisoned, clean = make_inputs(case), make_inputs(case, poison=False)
        a, b = decode(poisoned, backend), decode(clean, backend)
        assert torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]), case.id


@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_repeats_are_bitwise_equal(fmt):
    for splits in (None, 1, 2, 7, 32):
        inputs = make_inputs(DecodeCase((700, 33, 0, 1500), num_heads=20, format=fmt, num_kv_splits=splits))
        first = [t.clone() for t in decode(inputs, "cpu")]
        for _ in range(8):
            inputs.out.fill_(torch.nan)
            again = decode(inputs, "cpu")
            assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])


@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_fixed_split_size_makes_a_row_independent_of_its_batch(fmt):
    lens = tuple(1 + 37 * b % 900 for b in range(64))
    batch = make_inputs(DecodeCase(lens, format=fmt, split_size=128, table="csr"))
    out, lse = decode(batch, "cpu")
    for b in (0, 5, 63):
        start = int(batch.table.kv_indptr[b])
        pages = int(batch.table.kv_indptr[b + 1]) - start
        table = type(batch.table).from_csr(
            torch.tensor([0, pages], dtype=torch.int32), batch.table.page_ids[start : start + pages].clone(),
            batch.table.kv_last_page_len[b : b + 1].clone(), page_size=64,
        )  # fmt: skip
        alone, alone_lse = mla_decode(
            batch.q[b : b + 1], batch.cache, table, sm_scale=batch.case.sm_scale, split_size=128, return_lse=True, backend="cpu"
        )
        assert torch.equal(alone[0], out[b]) and torch.equal(alone_lse[0], lse[b])


@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_scattered_pages_equal_contiguous_ones_bitwise(fmt):
    import leanmla

    x = torch.randn(300, 576, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    q = torch.randn(2, 16, 576, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    results = []
    for page in (1, 16, 32, 64, 128, 300):
        for scattered in (False, True):
            num = -(-300 // page)
            cache = leanmla.LatentCache.allocate(num + 4, page, format=fmt)
            ids = torch.randperm(num + 4)[:num] if scattered else torch.arange(num)
            slots = (ids[:, None] * page + torch.arange(page)).flatten()[:300]
            cache.append(x, slots)
            table = leanmla.PageTable.from_block_table(
                ids.to(torch.int32)[None].contiguous(), torch.tensor([300], dtype=torch.int32), page_size=page
            )
            results.append(mla_decode(q, cache, table, sm_scale=0.05, backend="cpu", return_lse=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fmt", list(formats.FORMATS))
def test_small_weights_survive(fmt, backend):
    """One logit 0 and 2047 at -7, V all ones: the result is 1. Probabilities rounded to e4m3 would give 0.349."""
    import leanmla

    x = torch.zeros(2048, 576)
    x[:, :512] = 1.0
    x[1:, 575] = -7.0
    x[:, 574] = 7.0  # the same amax in every rope block, so that every format holds these values well
    cache = leanmla.LatentCache.allocate(2048, 1, format=fmt)
    cache.append(x, torch.arange(2048))
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    q[..., 575] = 1.0
    table = leanmla.PageTable.contiguous(torch.tensor([0, 2048], dtype=torch.int32))
    out = mla_decode(q, cache, table, sm_scale=1.0, backend=backend)
    assert torch.allclose(out.float(), torch.ones(()), atol=0.01)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_that_is_read_stays_nan(backend):
    for fmt in formats.FORMATS:
        inputs = make_inputs(DecodeCase((70, 40), q_lens=2, format=fmt), seed=3)
        slot = inputs.table.slots(0)[-1:]  # the last key: only the last row of sequence 0 sees it
        inputs.cache.append(torch.full((1, 576), torch.nan), slot)
        out, lse = decode(inputs, backend)
        assert torch.isnan(out[1]).any(-1).all() and torch.isnan(lse[1]).all()
        assert torch.isfinite(out[[0, 2, 3]]).all() and torch.isfinite(lse[[0, 2, 3]]).all(), fmt


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_to_do(backend):
    for lens, q_lens in [((), 1), ((5, 6), 0), ((), ())]:
        inputs = make_inputs(DecodeCase(lens, q_lens=q_lens))
        out, lse = decode(inputs, backend)
        assert out.shape == (0, 16, 512) and lse.shape == (0, 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_guards_around_out_stay_untouched(backend):
    for heads in (1, 6, 12, 20, 48):
        inputs = make_inputs(DecodeCase((65, 3), num_heads=heads))
        guard = torch.full((4, heads + 4, 520), 7.0, dtype=torch.bfloat16)
        out = guard[1:3, 2:-2, :512]
        mla_decode(inputs.q, inputs.cache, inputs.table, out=out, backend=backend, **inputs.options)
        assert torch.isfinite(out).all()
        out.fill_(7.0)
        assert (guard == 7.0).all()


def test_full_occupancy_is_repeatable():
    inputs = make_inputs(DecodeCase((400,) * 128, format="fp8", page_size=16))
    first, _ = decode(inputs, "cpu")
    first = first.clone()
    assert torch.equal(first, decode(inputs, "cpu")[0])


def test_many_sequences():
    inputs = make_inputs(DecodeCase((1,) * 70000, num_heads=1, page_size=1, table="csr"))
    out, _lse = decode(inputs, "cpu")
    keys = inputs.cache.gather(inputs.key_slots)
    assert torch.equal(out[:, 0], keys[:, :512].to(torch.bfloat16))


def test_offsets_past_two_to_the_31(monkeypatch):
    """A page stride as in one allocation for 61 layers: the last page lies past 2**32 bytes, touched sparsely."""
    import leanmla

    try:
        big = torch.empty(61 * 64 * 576 * 1000, dtype=torch.bfloat16)  # 4.5 GB of address space, hardly any of it touched
    except RuntimeError as error:
        pytest.skip(f"no address space for it: {error}")
    data = big.view(1000, 61, 64, 576)[:, 60]
    cache = leanmla.LatentCache.from_tensors(data, format="bf16", page_size=64)
    assert 999 * data.stride(0) > 2**31
    x = torch.randn(64, 576).to(torch.bfloat16)
    cache.append(x, torch.arange(999 * 64, 1000 * 64))
    table = leanmla.PageTable.from_block_table(
        torch.tensor([[999]], dtype=torch.int32), torch.tensor([64], dtype=torch.int32), page_size=64
    )
    q = torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    for backend in BACKENDS:
        out = mla_decode(q, cache, table, sm_scale=1.0, backend=backend)
        assert torch.allclose(out[0, 0].float(), x[:, :512].float().mean(0), atol=5e-3)


def test_plan_serves_the_grid():
    plans = {}
    for case in case_grid(("fp8", "mxfp4"), ("plain", "empty and tiny", "rows", "skewed")):
        key = (case.format, case.num_heads, case.page_size)
        if key not in plans:
            plans[key] = DecodePlan(
                num_heads=case.num_heads, format=case.format, page_size=case.page_size, max_batch=32, max_kv_len=4096,
                max_q_len=16, device="cpu",
            )  # fmt: skip
        inputs = make_inputs(case, seed=2)
        out, lse = plans[key].run(inputs.q, inputs.cache, inputs.table, out=inputs.out, return_lse=True, **inputs.options)
        report = compare(inputs, out, lse)
        assert report.ok, f"{case.id}: {report.message}"

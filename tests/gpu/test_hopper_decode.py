"""The hopper backend on a Hopper GPU: the whole case grid, repeats, poison, graphs, uneven batches."""

from __future__ import annotations

import pytest
import torch

import leanmla
from leanmla import LatentCache, PageTable
from leanmla.device import describe
from leanmla.reference import mla_decode_reference
from leanmla.testing.cases import DecodeCase, case_grid
from leanmla.testing.compare import compare
from leanmla.testing.inputs import make_inputs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or describe("cuda").arch != "sm_90", reason="needs a Hopper GPU (sm_90) that torch can use"
)
FORMATS = ("bf16", "fp8", "mxfp4", "fp8_tile128")
#: fp8 wgmma keeps about 14 bits of a running sum, so logits are exact to about 2^-13 of the largest partial sum.
FP8_LSE = 2e-3
#: 64-row tiles of long, uneven, split batches on top of the shared grid.
MORE = (
    DecodeCase((8192, 8192, 8192, 77), table="csr", page_size=128),
    DecodeCase((131072, *(1,) * 31), table="csr"),
    DecodeCase(tuple(1 + 37 * i for i in range(300)), table="csr"),
    DecodeCase(tuple(3 + i * i % 90 for i in range(1200))),
    DecodeCase((300,) * 200, num_heads=128, page_size=32),
    DecodeCase((500, 33, 0, 3000), page_size=48),
    DecodeCase((17, 64, 900), num_heads=96, page_size=1, table="csr"),
    DecodeCase((1500, 64, 900, 0), split_size=256, table="csr"),
)
CASES = case_grid(FORMATS) + [case.replace(format=f) for f in FORMATS for case in MORE]


def run(inputs, **changes):
    options = {**inputs.options, **inputs.splits, **changes}
    return leanmla.mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="hopper", **options)


def supported(case: DecodeCase) -> bool:
    return not (case.split_size or 64) % 64


def check(case: DecodeCase) -> None:
    inputs = make_inputs(case, device="cuda")
    out, lse = run(inputs)
    if case.format != "bf16":
        want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
        report = compare(inputs, out, None, reference=(want, want_lse))
        assert torch.equal(lse == -torch.inf, want_lse == -torch.inf)
        finite = want_lse.isfinite()
        error = (lse.double() - want_lse)[finite].abs()
        assert bool((error <= FP8_LSE + 2e-4 * want_lse[finite].abs()).all()), float(error.max())
    else:
        report = compare(inputs, out, lse)
    assert report, report.message
    for _ in range(4):
        again, lse_again = run(inputs)
        assert torch.equal(out.view(torch.int16), again.view(torch.int16))
        assert torch.equal(lse.view(torch.int32), lse_again.view(torch.int32))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_grid(case):
    if not supported(case):
        pytest.skip("split sizes are multiples of 64 here")
    check(case)


@pytest.mark.parametrize("fmt", FORMATS)
def test_one_graph_serves_changing_lengths(fmt):
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
    out = torch.empty(batch, heads, 512, device="cuda", dtype=torch.bfloat16)
    leanmla.mla_decode(q, cache, table, sm_scale=0.04, out=out, backend="hopper")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        leanmla.mla_decode(q, cache, table, sm_scale=0.04, out=out, backend="hopper")
    for now in ([70] * 6, [2048, 1, 0, 64, 65, 777], [0] * 6, [1, 2, 3, 4, 5, 6], [2048] * 6, [2000, 0, 0, 0, 0, 0]):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        want, _ = mla_decode_reference(q, cache, table, sm_scale=0.04)
        assert (out.double() - want).norm() <= 3e-3 * want.norm(), now

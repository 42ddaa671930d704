"""The Hopper backends on an MXFP4 cache: scale bytes that are far apart, extreme or NaN, and laid out oddly. The case grids are in
test_hopper_decode and test_hopper_cuda_decode."""

from __future__ import annotations

import pytest
import torch

import leanmla
from leanmla.device import describe
from leanmla.kernels.hopper_cuda import compiler
from leanmla.testing import mx_scales
from leanmla.testing.cases import DecodeCase
from leanmla.testing.inputs import DecodeInputs, make_inputs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or describe("cuda").arch != "sm_90", reason="needs a Hopper GPU (sm_90) that torch can use"
)
CASE = DecodeCase((200, 77, 64), format="mxfp4")


@pytest.fixture(params=["hopper", "hopper_cuda"])
def run(request):
    if request.param == "hopper_cuda" and compiler.unavailable() is not None:
        pytest.skip(str(compiler.unavailable()))

    def call(inputs: DecodeInputs):
        return leanmla.mla_decode(
            inputs.q, inputs.cache, inputs.table, return_lse=True, backend=request.param, **inputs.options
        )

    return call


@pytest.mark.parametrize("spread", [3, 15, 40])
def test_exponents_of_tokens_far_apart(run, spread):
    mx_scales.check(mx_scales.exponents_far_apart(CASE, spread, "cuda"), run)


@pytest.mark.parametrize("shift", [-90, -30, 30, 90])
def test_latent_and_rope_far_apart(run, shift):
    mx_scales.check(mx_scales.latent_and_rope_far_apart(CASE, shift, "cuda"), run)


def test_every_scale_byte(run):
    mx_scales.check_every_byte(run, "cuda")


@pytest.mark.parametrize("block", [0, 7, 15, 16, 17])
@pytest.mark.parametrize("key", [3, 68, 69])
def test_nan_scale_reaches_the_rows_that_see_it_and_no_other(run, key, block):
    inputs, sees = mx_scales.nan_scale(key, block, "cuda")
    out, lse = run(inputs)
    assert torch.equal(lse.isnan(), sees[:, None].expand_as(lse))
    assert torch.equal(out.isnan(), sees[:, None, None].expand_as(out))
    mx_scales.check(inputs, run)


def test_zero_blocks_are_exact_zeros(run):
    inputs = mx_scales.zero_blocks(CASE, "cuda")
    out, _ = run(inputs)
    assert float(out[..., 32:96].abs().max()) == 0.0
    mx_scales.check(inputs, run)


@pytest.mark.parametrize(
    "table, page_size", [("csr", 1), ("block_table", 16), ("csr", 48), ("block_table", 64), ("contiguous", 64)]
)
@pytest.mark.parametrize(
    "stride, start, between", [(18, 0, 0), (18, 2, 0), (19, 1, 0), (24, 0, 0), (33, 15, 7), (48, 16, 16), (49, 0, 0)]
)
def test_scales_anywhere(run, table, page_size, stride, start, between):
    case = CASE.replace(table=table, page_size=page_size)
    want = run(make_inputs(case, device="cuda"))
    got = run(
        mx_scales.with_scale_layout(make_inputs(case, device="cuda"), stride, start, 0 if table == "contiguous" else between)
    )
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))

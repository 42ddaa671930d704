"""The hopper backend on an MXFP4 cache: scale bytes that are far apart, extreme or NaN. The case grid is in test_hopper_decode."""

from __future__ import annotations

import pytest
import torch

import leanmla
from leanmla.device import describe
from leanmla.reference import mla_decode_reference
from leanmla.testing.cases import DecodeCase
from leanmla.testing.inputs import DecodeInputs, make_inputs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or describe("cuda").arch != "sm_90", reason="needs a Hopper GPU (sm_90) that torch can use"
)
CASE = DecodeCase((200, 77, 64), format="mxfp4")


def run(inputs: DecodeInputs):
    return leanmla.mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="hopper", **inputs.options)


def scales_of(inputs: DecodeInputs, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, row) of the keys of sequence ``b``."""
    slots = inputs.table.slots(b)
    return slots // inputs.cache.page_size, slots % inputs.cache.page_size


def check(inputs: DecodeInputs, lse_error: float = 2e-3) -> None:
    out, lse = run(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    assert torch.equal(lse.isnan(), want_lse.isnan()) and torch.equal(out.isnan(), want.isnan())
    ok = ~want_lse.isnan()
    assert bool(((lse - want_lse)[ok].abs() <= lse_error + 2e-4 * want_lse[ok].abs()).all()), float(
        (lse - want_lse)[ok].abs().max()
    )
    error = (out.double() - want)[ok].norm(dim=-1) / want[ok].norm(dim=-1)
    assert float(error.max()) <= 3e-3, float(error.max())


def logits_from_rope(inputs: DecodeInputs) -> None:
    """Takes the latent part out of the logits and gives all rope blocks the scale 1."""
    inputs.q[..., :512] = 0
    inputs.cache.scale[..., 16:18] = 127


@pytest.mark.parametrize("spread", [3, 15, 40])
def test_exponents_of_tokens_far_apart(spread):
    inputs = make_inputs(CASE, device="cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    logits_from_rope(inputs)
    for b in range(3):
        page, row = scales_of(inputs, b)
        byte = torch.randint(127 - spread, 128 + spread, (len(page), 1), device="cuda", generator=generator)
        inputs.cache.scale[page, row, :16] = (
            byte - torch.randint(0, 3, (len(page), 16), device="cuda", generator=generator)
        ).to(torch.uint8)
    check(inputs)


@pytest.mark.parametrize("shift", [-90, -30, 30, 90])
def test_latent_and_rope_far_apart(shift):
    inputs = make_inputs(CASE, device="cuda")
    logits_from_rope(inputs)
    for b in range(3):
        page, row = scales_of(inputs, b)
        inputs.cache.scale[page, row, :16] = 127 + shift
    check(inputs)


def test_every_scale_byte():
    """One key a sequence, logits 0: the output is the value. Eighteen consecutive bytes a token."""
    inputs = make_inputs(DecodeCase((1,) * 240, format="mxfp4", page_size=16), device="cuda")
    inputs.q.zero_()
    for b in range(240):
        page, row = scales_of(inputs, b)
        inputs.cache.scale[page, row] = torch.arange(b, b + 18, device="cuda").clamp(max=254).to(torch.uint8)
    out, lse = run(inputs)
    want, _ = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    fits = want.abs() < 3e38
    error = (out.double() - want).abs()[fits]
    assert bool((error <= 2.0**-8 * want.abs()[fits] + 1e-38).all()), float((error / want.abs()[fits].clamp(min=1e-38)).max())
    assert float(lse.abs().max()) <= 1e-6


@pytest.mark.parametrize("block", [0, 7, 15, 16, 17])
@pytest.mark.parametrize("key", [3, 68, 69])
def test_nan_scale_reaches_the_rows_that_see_it_and_no_other(key, block):
    inputs = make_inputs(DecodeCase((70, 40), q_lens=4, format="mxfp4"), device="cuda")
    page, row = scales_of(inputs, 0)
    inputs.cache.scale[page[key], row[key], block] = 255
    out, lse = run(inputs)
    sees = torch.tensor([key <= 70 - 4 + i for i in range(4)] + [False] * 4, device="cuda")
    assert torch.equal(lse.isnan(), sees[:, None].expand_as(lse))
    assert torch.equal(out.isnan(), sees[:, None, None].expand_as(out))
    check(inputs)


def test_zero_blocks_are_exact_zeros():
    inputs = make_inputs(CASE, device="cuda")
    inputs.cache.data[..., 16:48] = 0
    inputs.cache.scale[..., 1:3] = 0
    out, _ = run(inputs)
    assert float(out[..., 32:96].abs().max()) == 0.0
    check(inputs)

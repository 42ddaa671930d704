"""The hopper backend on an fp8_tile128 cache: scales far apart or NaN, NaN values in hidden keys. The case grid is in test_hopper_decode."""

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
CASE = DecodeCase((200, 77, 64), format="fp8_tile128")


def run(inputs: DecodeInputs):
    return leanmla.mla_decode(inputs.q, inputs.cache, inputs.table, return_lse=True, backend="hopper", **inputs.options)


def rows_of(inputs: DecodeInputs, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, row) of the keys of sequence ``b``."""
    slots = inputs.table.slots(b)
    return slots // inputs.cache.page_size, slots % inputs.cache.page_size


def multiply_scales(inputs: DecodeInputs, b: int, factor: torch.Tensor) -> None:
    """Scales of the keys of sequence ``b`` times ``factor`` [keys, 4]."""
    page, row = rows_of(inputs, b)
    data = inputs.cache.data[page, row]
    scales = data[:, 512:528].contiguous().view(torch.float32) * factor
    data[:, 512:528] = scales.view(torch.uint8)
    inputs.cache.data[page, row] = data


def check(inputs: DecodeInputs) -> None:
    out, lse = run(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    assert torch.equal(lse.isnan(), want_lse.isnan()) and torch.equal(out.isnan(), want.isnan())
    ok = ~want_lse.isnan()
    assert bool(((lse - want_lse)[ok].abs() <= 2e-3 + 2e-4 * want_lse[ok].abs()).all()), float((lse - want_lse)[ok].abs().max())
    error = (out.double() - want)[ok].norm(dim=-1) / want[ok].norm(dim=-1)
    assert float(error.max()) <= 3e-3, float(error.max())


@pytest.mark.parametrize("spread", [2, 10, 30])
def test_scales_of_tokens_and_tiles_far_apart(spread):
    inputs = make_inputs(CASE, device="cuda")
    inputs.q[..., :512] = 0  # logits from the rope part alone
    generator = torch.Generator("cuda").manual_seed(1)
    for b in range(3):
        keys = inputs.case.kv_lens[b]
        exponent = torch.randint(-spread, spread, (keys, 1), device="cuda", generator=generator) + torch.rand(
            keys, 4, device="cuda", generator=generator
        )
        multiply_scales(inputs, b, torch.exp2(exponent))
    check(inputs)


@pytest.mark.parametrize("shift", [-100, -30, 30, 90])
def test_latent_and_rope_far_apart(shift):
    inputs = make_inputs(CASE, device="cuda")
    inputs.q[..., :512] = 0
    for b in range(3):
        multiply_scales(inputs, b, torch.full((inputs.case.kv_lens[b], 4), 2.0**shift, device="cuda"))
    check(inputs)


@pytest.mark.parametrize("what", ["scale", "value", "rope"])
@pytest.mark.parametrize("key", [3, 68, 69])
def test_nan_reaches_the_rows_that_see_it_and_no_other(key, what):
    inputs = make_inputs(DecodeCase((70, 40), q_lens=4, format="fp8_tile128"), device="cuda")
    page, row = rows_of(inputs, 0)
    where = {"scale": slice(516, 520), "value": slice(77, 78), "rope": slice(530, 532)}[what]
    inputs.cache.data[page[key], row[key], where] = 0xFF
    out, lse = run(inputs)
    sees = torch.tensor([key <= 70 - 4 + i for i in range(4)] + [False] * 4, device="cuda")
    assert torch.equal(lse.isnan(), sees[:, None].expand_as(lse))
    assert torch.equal(out.isnan(), sees[:, None, None].expand_as(out))
    check(inputs)

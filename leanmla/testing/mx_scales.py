"""``mxfp4`` caches whose E8M0 scales are far apart, extreme, NaN or laid out oddly, for whoever tests a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..cache import LatentCache
from ..formats.mxfp4 import NUM_BLOCKS
from ..reference import mla_decode_reference
from .cases import DecodeCase
from .inputs import DecodeInputs, make_inputs

__all__ = [
    "check",
    "check_every_byte",
    "exponents_far_apart",
    "latent_and_rope_far_apart",
    "nan_scale",
    "with_scale_layout",
    "zero_blocks",
]

#: Of a decode call's inputs: (out, lse).
Run = Callable[[DecodeInputs], tuple[torch.Tensor, torch.Tensor]]


def _keys(inputs: DecodeInputs, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page, row) of the keys of sequence ``b``."""
    slots = inputs.table.slots(b)
    return slots // inputs.cache.page_size, slots % inputs.cache.page_size


def _scale(inputs: DecodeInputs) -> torch.Tensor:
    assert inputs.cache.scale is not None
    return inputs.cache.scale


def check(inputs: DecodeInputs, run: Run, lse_error: float = 2e-3) -> None:
    """Compare with the definition row by row: a key's exponent may move a row's output by many octaves."""
    out, lse = run(inputs)
    want, want_lse = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    assert torch.equal(lse.isnan(), want_lse.isnan()) and torch.equal(out.isnan(), want.isnan())
    ok = ~want_lse.isnan()
    off = (lse.double() - want_lse)[ok].abs()
    assert bool((off <= lse_error + 2e-4 * want_lse[ok].abs()).all()), f"lse off by {float(off.max())}"
    error = (out.double() - want)[ok].norm(dim=-1) / want[ok].norm(dim=-1)
    assert float(error.max()) <= 3e-3, f"relative error {float(error.max())}"


def _logits_from_rope(inputs: DecodeInputs) -> None:
    """Takes the latent part out of the logits and gives all rope blocks the scale 1."""
    inputs.q[..., :512] = 0
    _scale(inputs)[..., 16:18] = 127


def exponents_far_apart(case: DecodeCase, spread: int, device: str) -> DecodeInputs:
    """Tokens' latent scales up to 2**(2 * spread) apart, those of a token's blocks up to 4."""
    inputs = make_inputs(case, device=device)
    generator = torch.Generator(device).manual_seed(1)
    _logits_from_rope(inputs)
    for b in range(len(case.kv_lens)):
        page, row = _keys(inputs, b)
        byte = torch.randint(127 - spread, 128 + spread, (len(page), 1), device=device, generator=generator)
        less = torch.randint(0, 3, (len(page), 16), device=device, generator=generator)
        _scale(inputs)[page, row, :16] = (byte - less).to(torch.uint8)
    return inputs


def latent_and_rope_far_apart(case: DecodeCase, shift: int, device: str) -> DecodeInputs:
    """All latent scales 2**shift, all rope scales 1."""
    inputs = make_inputs(case, device=device)
    _logits_from_rope(inputs)
    for b in range(len(case.kv_lens)):
        page, row = _keys(inputs, b)
        _scale(inputs)[page, row, :16] = 127 + shift
    return inputs


def check_every_byte(run: Run, device: str, first: range = range(240)) -> None:
    """One key a sequence, logits 0: the output is the value. Eighteen consecutive bytes a token."""
    inputs = make_inputs(DecodeCase((1,) * len(first), format="mxfp4", page_size=16), device=device)
    inputs.q.zero_()
    for b, byte in enumerate(first):
        page, row = _keys(inputs, b)
        _scale(inputs)[page, row] = torch.arange(byte, byte + NUM_BLOCKS, device=device).clamp(max=254).to(torch.uint8)
    out, lse = run(inputs)
    want, _ = mla_decode_reference(inputs.q, inputs.cache, inputs.table, **inputs.options)
    fits = want.abs() < 3e38
    error = (out.double() - want).abs()[fits]
    relative = float((error / want.abs()[fits].clamp(min=1e-38)).max())
    assert bool((error <= 2.0**-8 * want.abs()[fits] + 1e-38).all()), f"relative error {relative}"
    assert float(lse.abs().max()) <= 5e-5  # exponents of up to 127 may go through the logarithm and out again


def nan_scale(key: int, block: int, device: str) -> tuple[DecodeInputs, torch.Tensor]:
    """A NaN in one block of key ``key`` of 70, and which of the rows [8] see it."""
    inputs = make_inputs(DecodeCase((70, 40), q_lens=4, format="mxfp4"), device=device)
    page, row = _keys(inputs, 0)
    _scale(inputs)[page[key], row[key], block] = 255
    return inputs, torch.tensor([key <= 70 - 4 + i for i in range(4)] + [False] * 4, device=device)


def zero_blocks(case: DecodeCase, device: str) -> DecodeInputs:
    """Values 32..95 of every token are zeros with scale byte 0."""
    inputs = make_inputs(case, device=device)
    inputs.cache.data[..., 16:48] = 0
    _scale(inputs)[..., 1:3] = 0
    return inputs


def with_scale_layout(inputs: DecodeInputs, token_stride: int, start: int = 0, between_pages: int = 0) -> DecodeInputs:
    """The same call over a cache whose scales lie ``token_stride`` bytes apart, ``start`` bytes into memory full of NaN scales."""
    scale = _scale(inputs)
    pages, page_size = scale.shape[:2]
    page_stride = page_size * token_stride + between_pages
    memory = torch.full((start + pages * page_stride + NUM_BLOCKS,), 255, dtype=torch.uint8, device=scale.device)
    moved = memory.as_strided((pages, page_size, NUM_BLOCKS), (page_stride, token_stride, 1), start)
    moved.copy_(scale)
    inputs.cache = LatentCache.from_tensors(inputs.cache.data, moved, format="mxfp4", page_size=page_size)
    return inputs

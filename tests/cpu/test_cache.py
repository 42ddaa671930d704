"""LatentCache: allocate, wrap without a copy, append, dequantise."""

import math

import pytest
import torch

from leanmla import InvalidArgument, InvalidDtype, LatentCache, MissingScale, formats

ALL = tuple(formats.FORMATS)


def latent(n, seed=0, dtype=torch.bfloat16):
    return torch.randn(n, 576, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("fmt", ALL)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_append_scatters_what_the_codec_makes(fmt, page_size):
    cache = LatentCache.allocate(160 // page_size + 1, page_size, format=fmt)
    x, slots = latent(100), torch.randperm(cache.num_tokens)[:100]
    cache.append(x, slots)
    rows = formats.get(fmt).quantize(x, scale=cache.scale if fmt == "fp8" else None)
    assert torch.equal(cache.data.flatten(0, 1)[slots], rows.data)
    if fmt == "mxfp4":
        assert torch.equal(cache.scale.flatten(0, 1)[slots], rows.scale)
    untouched = torch.ones(cache.num_tokens, dtype=torch.bool)
    untouched[slots] = False
    assert not cache.data.flatten(0, 1)[untouched].any()
    assert torch.equal(cache.gather(slots), cache.format.dequantize(rows.data, rows.scale))
    assert torch.equal(cache.dequantize().flatten(0, 1)[slots], cache.gather(slots))


@pytest.mark.parametrize("fmt", ALL)
def test_slot_minus_one_is_skipped(fmt):
    cache = LatentCache.allocate(2, 4, format=fmt, scale=0.01 if fmt == "fp8" else None)
    x = latent(3)
    x[1] = math.nan  # a padded row holds anything
    cache.append(x, torch.tensor([5, -1, 0], dtype=torch.int32))
    written = cache.data.flatten(0, 1).view(torch.uint8).any(-1).nonzero().flatten().tolist()
    assert written == [0, 5] and cache.saturation_count == 0


def test_fp8_scale_comes_from_the_first_append_and_stays():
    cache = LatentCache.allocate(4, 4, format="fp8")
    with pytest.raises(MissingScale, match="no scale yet"):
        cache.dequantize()
    x = latent(4)
    x[3] = 1e6  # skipped, so it must not set the scale
    cache.append(x, torch.tensor([0, 1, 2, -1]))
    scale = cache.scale.clone()
    assert float(scale) == pytest.approx(float(x[:3].float().abs().max()) / 448)
    assert cache.saturation_count == 0
    cache.append(10 * latent(4, seed=1), torch.arange(4, 8))
    assert torch.equal(cache.scale, scale)
    assert cache.saturation_count > 0
    assert float(cache.dequantize().abs().max()) == pytest.approx(448 * float(scale))


def test_append_split_equals_append():
    for fmt in ALL:
        whole = LatentCache.allocate(3, 16, format=fmt)
        apart = LatentCache.allocate(3, 16, format=fmt)
        x, slots = latent(30), torch.randperm(48)[:30]
        whole.append(x, slots)
        apart.append_split(x[:, :512], x[:, None, 512:], slots)
        assert torch.equal(whole.data, apart.data)


def test_wraps_the_contest_tensors_without_a_copy():
    x = latent(20)
    fp8, mx = formats.get("fp8").quantize(x), formats.get("mxfp4").quantize(x)
    padded = torch.full((32, 24), 255, dtype=torch.uint8)
    padded[:20, :18] = mx.scale
    for data, scale, fmt in [
        (x[:, None], None, "bf16"),
        (fp8.data[:, None].view(torch.float8_e4m3fn), fp8.scale, "fp8"),
        (mx.data[:, None].view(torch.float4_e2m1fn_x2), padded.view(torch.float8_e8m0fnu), "mxfp4"),
    ]:
        cache = LatentCache.from_tensors(data, scale, format=fmt, page_size=1)
        assert cache.data.data_ptr() == data.data_ptr() and cache.num_tokens == 20
        rows = formats.get(fmt).quantize(x)
        assert torch.equal(cache.gather(torch.arange(20)), formats.get(fmt).dequantize(rows.data, rows.scale))
        if fmt == "mxfp4":
            assert cache.scale.data_ptr() == padded.data_ptr()


@pytest.mark.parametrize("fmt", ALL)
def test_every_shape_means_the_same(fmt):
    rows = formats.get(fmt).quantize(latent(12))
    scale = rows.scale
    values = formats.get(fmt).dequantize(rows.data, rows.scale)
    width = rows.data.shape[1]
    shapes = [(3, 4, width), (3, 4, 1, width), (12, 1, width), (12, width)]
    for shape in shapes:
        cache = LatentCache.from_tensors(rows.data.view(shape), scale, format=fmt, page_size=4)
        assert (cache.num_pages, cache.page_size) == (3, 4)
        assert torch.equal(cache.dequantize().flatten(0, 1), values)


@pytest.mark.parametrize("fmt", ALL)
def test_strided_views_are_honoured(fmt):
    """One layer's plane of a buffer for all layers, and rows with a gap."""
    f = formats.get(fmt)
    rows = f.quantize(latent(12))
    big = torch.zeros(3, 5, 4, f.data_width + 8, dtype=f.storage_dtype)
    plane = big[:, 2, :, : f.data_width]
    plane.copy_(rows.data.view(3, 4, -1))
    cache = LatentCache.from_tensors(plane, rows.scale, format=fmt, page_size=4)
    assert torch.equal(cache.dequantize().flatten(0, 1), f.dequantize(rows.data, rows.scale))
    before = big.clone()
    cache.append(latent(1, seed=9), torch.tensor([5]))
    changed = (big != before).any(-1).nonzero().tolist()
    assert changed == [[1, 2, 1]]


def test_tokens_view_of_pages():
    cache = LatentCache.allocate(3, 4, format="mxfp4")
    cache.append(latent(12), torch.arange(12))
    tokens = cache.as_tokens()
    assert tokens.page_size == 1 and tokens.num_pages == 12
    assert torch.equal(tokens.dequantize().squeeze(1), cache.dequantize().flatten(0, 1))
    gaps = LatentCache.from_tensors(torch.zeros(3, 6, 576, dtype=torch.bfloat16)[:, :4], format="bf16", page_size=4)
    with pytest.raises(InvalidArgument, match="pages that follow each other"):
        gaps.as_tokens()


def test_large_appends_are_cut_into_chunks(monkeypatch):
    monkeypatch.setattr("leanmla.cache._QUANTIZE_ROWS", 7)
    small, whole = LatentCache.allocate(5, 8, format="fp8"), LatentCache.allocate(5, 8, format="fp8")
    x, slots = latent(40), torch.randperm(40)
    small.append(x, slots)
    monkeypatch.undo()
    whole.append(x, slots)
    assert torch.equal(small.data, whole.data) and torch.equal(small.scale, whole.scale)


def test_refusals_leave_nothing_half_written():
    cache = LatentCache.allocate(2, 4, format="bf16")
    for slots, text in [
        (torch.tensor([0, 8]), r"slots: expected -1 \(skip\) or 0..7, got 8"),
        (torch.tensor([0, -2]), r"slots: expected -1 \(skip\) or 0..7, got -2"),
        (torch.tensor([0]), r"slots: expected \[2\]"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            cache.append(latent(2), slots)
    with pytest.raises(InvalidDtype, match="slots: expected int32 or int64"):
        cache.append(latent(2), torch.tensor([0.0, 1.0]))
    assert not cache.data.any()
    fp8 = LatentCache.allocate(2, 4, format="fp8")
    with pytest.raises(InvalidArgument):
        fp8.append(latent(1), torch.tensor([99]))
    assert not fp8.scale_is_set


def test_wrapping_refusals():
    bf16 = torch.zeros(8, 576, dtype=torch.bfloat16)
    u8 = torch.zeros(8, 576, dtype=torch.uint8)
    mx = torch.zeros(8, 288, dtype=torch.uint8)

    def wrap(*args, page_size=4, **kw):
        return LatentCache.from_tensors(*args, page_size=page_size, **kw)

    with pytest.raises(InvalidArgument, match="must be 576, got 512. If rope is stored apart, join the two first"):
        wrap(bf16[:, :512], format="bf16")
    with pytest.raises(InvalidDtype, match="data: dtype for format 'bf16' must be bfloat16, got float16"):
        wrap(bf16.half(), format="bf16")
    with pytest.raises(MissingScale, match="scale: format 'fp8' needs"):
        wrap(u8, format="fp8")
    with pytest.raises(MissingScale, match="scale: format 'mxfp4' needs"):
        wrap(mx, format="mxfp4")
    with pytest.raises(InvalidArgument, match="scale: format 'bf16' has no scale"):
        wrap(bf16, torch.ones(1), format="bf16")
    with pytest.raises(InvalidArgument, match=r"expected \[1\], got \[8\]"):
        wrap(u8, torch.ones(8), format="fp8")
    with pytest.raises(InvalidDtype, match="scale: expected float32"):
        wrap(u8, torch.ones(1, dtype=torch.float64), format="fp8")
    with pytest.raises(InvalidArgument, match=r"scale: expected \[>= 8, >= 18\].*got \[8, 17\]"):
        wrap(mx, torch.zeros(8, 17, dtype=torch.uint8), format="mxfp4")
    with pytest.raises(InvalidDtype, match="E8M0|e8m0"):
        wrap(mx, torch.zeros(8, 18), format="mxfp4")
    with pytest.raises(InvalidArgument, match="scale: expected on the cache's device cpu, got meta"):
        wrap(u8, torch.ones(1, device="meta"), format="fp8")
    with pytest.raises(InvalidArgument, match="8 tokens do not fill pages of 3"):
        wrap(bf16, format="bf16", page_size=3)
    with pytest.raises(InvalidArgument, match="the last dim must be contiguous"):
        wrap(torch.zeros(8, 1152, dtype=torch.bfloat16)[:, ::2], format="bf16")
    with pytest.raises(InvalidArgument, match="page_size: expected a positive integer"):
        wrap(bf16, format="bf16", page_size=0)
    with pytest.raises(InvalidArgument, match="num_pages: expected a positive integer, got 0"):
        LatentCache.allocate(0, 4, format="bf16")
    with pytest.raises(InvalidArgument, match="scale: expected a positive finite number, got -1"):
        LatentCache.allocate(1, 4, format="fp8", scale=-1.0)

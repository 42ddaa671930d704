"""The cache formats: layouts byte by byte, round trips, edge values."""

import math

import pytest
import torch

from leanmla import InvalidArgument, InvalidDtype, MissingScale, formats
from leanmla.formats.elements import E2M1_VALUES, E4M3_VALUES

RULES = ("even", "floor")


def latent(n=64, seed=0, scale=1.0, dtype=torch.bfloat16):
    return (torch.randn(n, 576, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize(
    ("name", "size"), [("bf16", 1152), ("fp8", 576), ("mxfp4", 306), ("fp8_tile128", 656), ("mxfp4_row320", 320)]
)
def test_bytes_per_token(name, size):
    fmt = formats.get(name)
    rows = fmt.quantize(latent(3))
    stored = rows.data.numel() * rows.data.element_size()
    if fmt.scale_kind == "block":
        stored += rows.scale.numel()
    assert fmt.bytes_per_token == size and stored == 3 * size


def test_bf16_is_exact():
    x = latent()
    assert torch.equal(formats.get("bf16").dequantize(formats.get("bf16").quantize(x).data, None), x.float())


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_relative_error_of_quantisation(name):
    bound = {"bf16": 1e-9, "fp8": 0.03, "mxfp4": 0.14, "fp8_tile128": 0.03, "mxfp4_row320": 0.14}[name]
    x = latent(256)
    fmt = formats.get(name)
    rows = fmt.quantize(x)
    error = (fmt.dequantize(rows.data, rows.scale) - x.float()).norm() / x.float().norm()
    assert error < bound


@pytest.mark.parametrize("name", list(formats.FORMATS))
def test_fp32_dequantisation_is_at_most_one_rounding_from_fp64(name):
    fmt = formats.get(name)
    rows = fmt.quantize(latent(64, scale=3.0))
    exact = fmt.dequantize(rows.data, rows.scale, torch.float64)
    single = fmt.dequantize(rows.data, rows.scale, torch.float32)
    assert torch.equal(single, exact.float())


# -- fp8 ----------------------------------------------------------------------------------------------------------------


def test_fp8_scale_is_amax_over_448():
    x = torch.zeros(2, 576)
    x[1, 7] = -3.0
    x[0, 0] = 1.5
    rows = formats.get("fp8").quantize(x)
    assert rows.scale.shape == (1,) and float(rows.scale) == pytest.approx(3.0 / 448, rel=1e-7)
    values = formats.get("fp8").dequantize(rows.data, rows.scale)
    assert float(values[1, 7]) == pytest.approx(-3.0) and float(values[0, 0]) == pytest.approx(1.5)


def test_fp8_zero_tensor_has_a_scale():
    rows = formats.get("fp8").quantize(torch.zeros(2, 576))
    assert float(rows.scale) > 0 and not rows.data.any()


def test_fp8_every_byte_decodes_as_the_table():
    every = torch.arange(256, dtype=torch.uint8).repeat(9)[: 4 * 576].view(4, 576)
    values = formats.get("fp8").dequantize(every, torch.tensor([0.5]), torch.float64)
    want = torch.tensor(E4M3_VALUES, dtype=torch.float64)[every.int()] * 0.5
    assert torch.equal(values.nan_to_num(nan=-1.0), want.nan_to_num(nan=-1.0))
    assert torch.isnan(values).sum() == ((every & 0x7F) == 0x7F).sum() > 0


def test_fp8_keeps_nan_and_counts_saturation():
    x = torch.zeros(1, 576)
    x[0, 0], x[0, 1], x[0, 2], x[0, 3] = math.nan, 1000.0, -math.inf, 460.0
    rows = formats.get("fp8").quantize(x, scale=torch.tensor([1.0]))
    values = formats.get("fp8").dequantize(rows.data, rows.scale)[0]
    assert math.isnan(values[0]) and values[1] == 448 and values[2] == -448 and values[3] == 448
    assert int(rows.saturated) == 2  # 460 rounds to 448, it is not clipped


def test_fp8_scale_ignores_infinities_and_nan():
    x = latent(4)
    clean = formats.get("fp8").scale_of(x)
    x[0, 0], x[0, 1] = math.nan, math.inf
    assert torch.equal(formats.get("fp8").scale_of(x), clean)


# -- mxfp4 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_row_by_hand(rule):
    x = torch.zeros(1, 576)
    x[0, :4] = torch.tensor([6.0, -0.5, 1.0, 3.0])  # block 0: scale 1
    x[0, 32:34] = torch.tensor([-12.0, 2.0])  # block 1: scale 2
    rows = formats.get("mxfp4").quantize(x, mx_scale_rule=rule)
    assert rows.data.shape == (1, 288) and rows.scale.shape == (1, 18)
    assert rows.data[0, :2].tolist() == [0x97, 0x52] and rows.data[0, 16].item() == 0x2F
    assert rows.scale[0, :3].tolist() == [127, 128, 0]


@pytest.mark.parametrize("rule", RULES)
def test_mxfp4_representable_blocks_are_exact(rule):
    gen = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (200, 18, 32), generator=gen)
    codes[..., 0] = 7  # a 6 in each block fixes the scale
    exponents = torch.randint(-120, 120, (200, 18, 1), generator=gen)
    x = (torch.tensor(E2M1_VALUES)[codes] * torch.exp2(exponents.float())).flatten(1)
    rows = formats.get("mxfp4").quantize(x, mx_scale_rule=rule)
    assert torch.equal(formats.get("mxfp4").dequantize(rows.data, rows.scale), x)
    assert int(rows.saturated) == 0


def test_mxfp4_rules_differ_where_they_should():
    x = torch.zeros(1, 576)
    x[0, 0] = 7.0
    floor = formats.get("mxfp4").quantize(x, mx_scale_rule="floor")
    even = formats.get("mxfp4").quantize(x, mx_scale_rule="even")
    assert float(formats.get("mxfp4").dequantize(floor.data, floor.scale)[0, 0]) == 6.0
    assert float(formats.get("mxfp4").dequantize(even.data, even.scale)[0, 0]) == 8.0
    assert int(floor.saturated) == 1 and int(even.saturated) == 0


def test_mxfp4_error_is_half_a_step_at_most():
    x = latent(512, seed=5, dtype=torch.float32)
    rows = formats.get("mxfp4").quantize(x)
    scale = torch.exp2(rows.scale.float() - 127).repeat_interleave(32, 1)
    error = (formats.get("mxfp4").dequantize(rows.data, rows.scale) - x).abs() / scale
    assert float(error.max()) <= 1.0  # the widest gap between codes is 2 (4 to 6)


def test_mxfp4_zero_and_nan_blocks():
    x = latent(2, dtype=torch.float32)
    x[0, 64:96] = 0.0
    x[1, 100] = math.nan
    rows = formats.get("mxfp4").quantize(x)
    values = formats.get("mxfp4").dequantize(rows.data, rows.scale)
    assert (values[0, 64:96] == 0).all()
    assert rows.scale[1, 3] == 255 and torch.isnan(values[1, 96:128]).all()
    assert torch.isfinite(values[1, :96]).all() and torch.isfinite(values[1, 128:]).all()


def test_mxfp4_padding_of_the_scales_is_never_read():
    rows = formats.get("mxfp4").quantize(latent(4))
    padded = torch.full((4, 24), 255, dtype=torch.uint8)
    padded[:, :18] = rows.scale
    fmt = formats.get("mxfp4")
    assert torch.equal(fmt.dequantize(rows.data, padded), fmt.dequantize(rows.data, rows.scale))


def test_mxfp4_subnormals_and_extremes():
    x = torch.zeros(3, 576)
    x[0, 0] = 2.0**-127  # the smallest scale
    x[1, 0] = torch.finfo(torch.float32).max
    x[2, 0] = math.inf
    rows = formats.get("mxfp4").quantize(x)
    values = formats.get("mxfp4").dequantize(rows.data, rows.scale, torch.float64)
    assert float(values[0, 0]) == 2.0**-127
    assert float(values[1, 0]) == 4 * 2.0**126
    assert rows.scale[2, 0] == 253 and int(rows.saturated) == 1


# -- fp8_tile128 --------------------------------------------------------------------------------------------------------


def test_tile128_layout():
    x = torch.zeros(1, 576)
    x[0, 0], x[0, 128], x[0, 384] = 448.0, -2.0, 1.0
    x[0, 512], x[0, 575] = 3.140625, -1.5
    row = formats.get("fp8_tile128").quantize(x).data
    assert row.shape == (1, 656) and row.dtype == torch.uint8
    scales = row[0, 512:528].contiguous().view(torch.float32)
    assert scales.tolist() == pytest.approx([1.0, 2 / 448, 1e-12 / 448, 1 / 448])
    rope = row[0, 528:].contiguous().view(torch.bfloat16)
    assert rope.shape == (64,) and float(rope[0]) == 3.140625 and float(rope[63]) == -1.5
    assert row[0, 0] == 0x7E and row[0, 128] == 0xFE
    values = formats.get("fp8_tile128").dequantize(row, None)
    assert values[0, 0] == 448 and float(values[0, 128]) == pytest.approx(-2.0) and values[0, 512] == 3.140625


# -- refusals -----------------------------------------------------------------------------------------------------------


def test_refusals():
    with pytest.raises(
        InvalidArgument, match="format: expected one of bf16, fp8, mxfp4, fp8_tile128, mxfp4_row320, got 'int4'"
    ):
        formats.get("int4")
    with pytest.raises(InvalidArgument, match=r"latent: expected \[n, 576\], got \[2, 512\]"):
        formats.get("fp8").quantize(torch.zeros(2, 512))
    with pytest.raises(InvalidDtype, match="latent: expected bfloat16"):
        formats.get("fp8").quantize(torch.zeros(2, 576, dtype=torch.float64))
    with pytest.raises(InvalidArgument, match="mx_scale_rule"):
        formats.get("mxfp4").quantize(latent(1), mx_scale_rule="ceil")
    with pytest.raises(MissingScale):
        formats.get("fp8").dequantize(torch.zeros(1, 576, dtype=torch.uint8), None)
    with pytest.raises(MissingScale):
        formats.get("mxfp4").dequantize(torch.zeros(1, 288, dtype=torch.uint8), None)
    fnuz = torch.zeros(1, 576, dtype=torch.uint8).view(torch.float8_e4m3fnuz)
    with pytest.raises(InvalidDtype, match="float8_e4m3fnuz.*another number format"):
        formats.get("fp8").as_storage(fnuz)

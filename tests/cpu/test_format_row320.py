"""``mxfp4_row320``: the layout byte by byte, conversion from and to ``mxfp4``, the limits of its range."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leanmla import InvalidArgument, InvalidDtype, LatentCache, formats
from leanmla.formats.elements import E2M1_VALUES
from leanmla.formats.mxfp4_row320 import (
    DEFICIT_AT,
    DEFICIT_UNIT,
    EXPONENT_AT,
    FINITE_EXPONENT_AT,
    MAX_DEFICIT,
    NAN_DEFICIT,
    ROW_BYTES,
    from_ocp,
    to_ocp,
)
from leanmla.testing.inputs import hard_rows, uneven_rows

OCP, ROW = formats.get("mxfp4"), formats.get("mxfp4_row320")


def random_codes(n, seed=0):
    """uint8 [n, 576], a nonzero value in every block."""
    codes = torch.randint(0, 16, (n, 18, 32), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    codes[..., 3] |= 1
    return codes.flatten(1)


def packed(codes):
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def read(row: list[int], d: int) -> float:
    """Value d of a row, from the description of the layout alone."""
    word, i = d // 8, d % 8
    bits = int.from_bytes(bytes(row[4 * word : 4 * word + 4]), "little")
    magnitude = bits >> (4 * i) & 7
    sign = bits >> (7, 15, 23, 31, 3, 11, 19, 27)[i] & 1
    b = d // 32
    deficit = row[288 + 4 * (b % 4) + b // 4 if b < 16 else 304 + b - 16]
    exponent = row[307] if row[306] == 255 else row[306]
    if row[306] == 255 and deficit == 27 * 4:
        return math.nan
    return math.copysign(E2M1_VALUES[magnitude] * 2.0 ** (exponent - deficit // 4 - 127), -1.0 if sign else 1.0)


def same(a, b):
    """Equal values, signs of zeros and places of NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        torch.where(a.isnan(), 0.0, a).view(torch.int64), torch.where(b.isnan(), 0.0, b).view(torch.int64)
    )


# -- the layout ---------------------------------------------------------------------------------------------------------


def test_layout_constants():
    assert (ROW_BYTES, EXPONENT_AT, FINITE_EXPONENT_AT, MAX_DEFICIT, NAN_DEFICIT, DEFICIT_UNIT) == (320, 306, 307, 26, 27, 4)
    assert sorted(DEFICIT_AT) == list(range(288, 306)) and DEFICIT_AT[:6] == (288, 292, 296, 300, 289, 293)
    assert ROW.bytes_per_token == 320 and ROW.scale_kind == "none"


def test_a_row_by_hand():
    x = torch.zeros(1, 576)
    x[0, :8] = torch.tensor([6.0, -0.5, 1.0, 3.0, -4.0, 0.0, -1.5, 2.0])
    x[0, 33] = -0.25 * 6
    x[0, 575] = 24.0
    row = ROW.quantize(x).data
    assert row.shape == (1, 320) and row.dtype == torch.uint8
    # magnitudes 7 1 2 5 6 0 3 4; signs of values 1, 4 and 6 in bits 15, 3 and 19
    assert row[0, :4].tolist() == [0x17 | 0x08, 0x52 | 0x80, 0x06 | 0x08, 0x43]
    assert row[0, 16:20].tolist() == [0x70, 0x80, 0, 0]  # value 33 is value 1 of its word
    assert row[0, 287] == 0x70
    assert row[0, 288:306].tolist() == [2 * 4, 0, 0, 0, 4 * 4] + [0] * 12 + [0]
    assert row[0, 306:].tolist() == [129] + [0] * 13
    # A zero block has no exponent and counts nowhere.
    assert ROW.quantize(torch.zeros(1, 576)).data[0, 306] == 127


@pytest.mark.parametrize("deficit", range(31))
def test_every_code_in_every_place_under_every_deficit(deficit):
    """16 rows hold all codes in all places; block b has the deficit under test, another one the reference exponent."""
    codes = ((torch.arange(576) + torch.arange(16)[:, None]) % 16).to(torch.uint8)
    for reference_block in (0, 5, 17):
        for reference in (31, 127, 254):
            scale = torch.full((16, 18), reference - deficit, dtype=torch.uint8)
            scale[:, reference_block] = reference
            if deficit > MAX_DEFICIT:
                first = 1 if reference_block == 0 else 0
                with pytest.raises(
                    InvalidArgument, match=rf"block {first} of token 0 has scale byte {reference - deficit}, {deficit} "
                ):
                    from_ocp(packed(codes), scale)
                continue
            rows = from_ocp(packed(codes), scale)
            data, back = to_ocp(rows)
            assert torch.equal(data, packed(codes)) and torch.equal(back, scale)
            values = ROW.dequantize(rows, None, torch.float64)
            assert same(values, OCP.dequantize(packed(codes), scale, torch.float64))
            want = torch.tensor([read(row, d) for row in rows.tolist() for d in range(576)], dtype=torch.float64)
            assert same(values.flatten(), want)


def test_decoding_is_exact_in_fp32_and_bf16():
    codes, gen = random_codes(64), torch.Generator().manual_seed(1)
    scale = torch.randint(100, 127, (64, 18), generator=gen, dtype=torch.uint8)
    rows = from_ocp(packed(codes), scale)
    exact = ROW.dequantize(rows, None, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(ROW.dequantize(rows, None, dtype).double(), exact)


# -- conversion ---------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_round_trip_of_codes_and_scales(data):
    """Any codes, any scales within 26 of the largest, NaN blocks and blocks of zeros: bytes come back, but for the scales of
    blocks of zeros, and values always."""
    top = data.draw(st.integers(0, 254))
    scale = torch.tensor(
        [[data.draw(st.integers(max(0, top - 26), top)) for _ in range(18)] for _ in range(3)], dtype=torch.uint8
    )
    codes = random_codes(3, seed=data.draw(st.integers(0, 9999))).unflatten(1, (18, 32))
    for token in range(3):
        for block in range(18):
            kind = data.draw(st.sampled_from("vvvvzn"))
            if kind == "z":
                codes[token, block] &= 8
                scale[token, block] = data.draw(st.integers(0, 254))  # counts nowhere, however large
            elif kind == "n":
                scale[token, block] = 255
    packed_codes = packed(codes.flatten(1))
    rows = from_ocp(packed_codes, scale)
    back, back_scale = to_ocp(rows)
    zeros = ((codes & 7) == 0).all(-1) & (scale != 255)
    assert torch.equal(back, packed_codes)
    assert torch.equal(back_scale, torch.where(zeros, 0, scale))
    assert same(ROW.dequantize(rows, None, torch.float64), OCP.dequantize(packed_codes, scale, torch.float64))
    assert torch.equal(from_ocp(back, back_scale), rows)  # one row for one token


def test_all_scales_from_0_to_255():
    for byte in range(256):
        scale = torch.full((1, 18), byte, dtype=torch.uint8)
        rows = from_ocp(packed(random_codes(1, byte)), scale)
        assert torch.equal(to_ocp(rows)[1], scale) and torch.equal(to_ocp(rows)[0], packed(random_codes(1, byte)))
        # Below 14 the reference exponent stays there and the deficits make up for it.
        assert rows[0, EXPONENT_AT] == max(byte, 14)
        assert rows[0, FINITE_EXPONENT_AT] == (127 if byte == 255 else 0)


@pytest.mark.parametrize("rule", ["even", "floor"])
def test_quantising_equals_mxfp4_in_range(rule):
    for x in (torch.randn(64, 576, generator=torch.Generator().manual_seed(2)), hard_rows(40), uneven_rows()[0::6]):
        ocp, row = OCP.quantize(x, mx_scale_rule=rule), ROW.quantize(x, mx_scale_rule=rule)
        assert torch.equal(row.data, from_ocp(ocp.data, ocp.scale)) and row.scale is None
        assert [torch.equal(a, b) for a, b in zip(to_ocp(row.data), ocp[:2], strict=True)] == [True, True]
        assert int(row.saturated) == int(ocp.saturated)


def test_beyond_the_range_blocks_round_to_a_scale_within_it():
    """A block 2**30 below the largest: its values are multiples of half of 2**-26 of the largest scale, the nearest ones."""
    codes = random_codes(1)
    scale = torch.full((1, 18), 97, dtype=torch.uint8)
    scale[0, 0] = 127
    x = OCP.dequantize(packed(codes), scale)
    step = 0.5 * 2.0**-26
    want = torch.cat((x[:, :32], torch.round(x[:, 32:] / step) * step), 1)
    for rows in (from_ocp(packed(codes), scale, beyond="round"), ROW.quantize(x).data):
        assert torch.equal(ROW.dequantize(rows, None).abs(), want.abs())
        assert (ROW.dequantize(rows, None) - x).abs().max() <= 2.0**-28
        to_ocp(rows)
    uneven = OCP.quantize(uneven_rows())
    assert to_ocp(from_ocp(uneven.data, uneven.scale, beyond="round"))[0].shape == (48, 288)
    with pytest.raises(
        InvalidArgument, match=r"scale: block 1 of token 0 has scale byte 97, 30 below the token's largest, 127"
    ):
        from_ocp(packed(codes), scale)


def test_a_nan_block_does_not_touch_the_others():
    x = torch.randn(2, 576, generator=torch.Generator().manual_seed(3))
    clean = ROW.dequantize(ROW.quantize(x).data, None)
    x[1, 100] = math.nan
    row = ROW.quantize(x).data
    values = ROW.dequantize(row, None)
    assert values[1, 96:128].isnan().all() and values.isnan().sum() == 32
    keep = ~values.isnan()
    assert torch.equal(values[keep], clean[keep])
    assert row[1, EXPONENT_AT] == 255 and row[1, DEFICIT_AT[3]] == NAN_DEFICIT * DEFICIT_UNIT and row[0, EXPONENT_AT] < 255
    assert to_ocp(row)[1][1, 3] == 255


def test_leading_dims_padding_and_dtypes():
    ocp = OCP.quantize(torch.randn(12, 576))
    padded = torch.full((12, 24), 255, dtype=torch.uint8)
    padded[:, :18] = ocp.scale
    want = from_ocp(ocp.data, ocp.scale)
    assert torch.equal(from_ocp(ocp.data, padded), want)
    shaped = from_ocp(ocp.data.view(3, 4, 288).view(torch.float4_e2m1fn_x2), padded.view(3, 4, 24).view(torch.float8_e8m0fnu))
    assert shaped.shape == (3, 4, 320) and torch.equal(shaped.flatten(0, 1), want)
    assert torch.equal(from_ocp(ocp.data[0], ocp.scale[0]), want[0])
    assert from_ocp(ocp.data[:0], ocp.scale[:0]).shape == (0, 320) and to_ocp(want[:0])[1].shape == (0, 18)


def test_unused_bytes_are_never_read():
    """The end of a row, and byte 307 where no block is NaN; the slots of a cache that were never written are rows of zeros."""
    x = torch.randn(6, 576, generator=torch.Generator().manual_seed(5))
    x[2, 70] = math.nan
    rows = ROW.quantize(x).data
    poisoned = rows.clone()
    poisoned[:, 308:] = torch.randint(1, 256, (6, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(6))
    poisoned[[0, 1, 3, 4, 5], FINITE_EXPONENT_AT] = 255
    assert [torch.equal(a, b) for a, b in zip(to_ocp(poisoned), to_ocp(rows), strict=True)] == [True, True]
    assert same(ROW.dequantize(poisoned, None, torch.float64), ROW.dequantize(rows, None, torch.float64))
    assert [bool(t.any()) for t in to_ocp(torch.zeros(2, 320, dtype=torch.uint8))] == [False, False]


def test_largest_and_smallest_scales():
    """6 * 2**127 is beyond fp32, as in mxfp4; 0.5 * 2**-127 is a subnormal of it."""
    codes = torch.full((1, 576), 7, dtype=torch.uint8)
    for byte in (0, 1, 13, 14, 253, 254):
        rows = from_ocp(packed(codes), torch.full((1, 18), byte, dtype=torch.uint8))
        values = ROW.dequantize(rows, None, torch.float64)
        assert bool((values == 6.0 * 2.0 ** (byte - 127)).all())
        assert torch.equal(ROW.dequantize(rows, None), values.float())
    x = torch.zeros(3, 576)
    x[0, 0], x[1, 5], x[2] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny, 2.0**-140
    rows, ocp = ROW.quantize(x), OCP.quantize(x)
    assert torch.equal(ROW.dequantize(rows.data, None), OCP.dequantize(ocp.data, ocp.scale))
    assert [torch.equal(a, b) for a, b in zip(to_ocp(rows.data), ocp[:2], strict=True)] == [True, True]


def test_refusals():
    ocp = OCP.quantize(torch.randn(4, 576))
    rows = from_ocp(ocp.data, ocp.scale)
    for call, text in [
        (lambda: from_ocp(ocp.data[:, :256], ocp.scale), r"data: expected \[..., 288\], got \[4, 256\]"),
        (lambda: from_ocp(ocp.data, ocp.scale[:, :17]), r"scale: expected \[..., >= 18\], got \[4, 17\]"),
        (lambda: from_ocp(ocp.data, ocp.scale[:3]), r"scale: expected leading dims \[4\] on cpu like data, got \[3\]"),
        (lambda: from_ocp(ocp.data, None), "scale: expected a tensor, got NoneType"),
        (lambda: from_ocp(ocp.data, ocp.scale, beyond="clip"), "beyond: expected 'refuse' or 'round', got 'clip'"),
        (lambda: to_ocp(rows[:, :306]), r"rows: expected \[..., 320\], got \[4, 306\]"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            call()
    with pytest.raises(InvalidDtype, match="data: expected bytes"):
        from_ocp(ocp.data.float(), ocp.scale)
    # One byte each, but values.
    with pytest.raises(InvalidDtype, match=r"data: expected bytes \(uint8 or float4_e2m1fn_x2\), got torch.float8_e4m3fn"):
        from_ocp(ocp.data.view(torch.float8_e4m3fn), ocp.scale)
    with pytest.raises(InvalidDtype, match=r"scale: expected bytes \(uint8 or float8_e8m0fnu\), got torch.int8"):
        from_ocp(ocp.data, ocp.scale.view(torch.int8))
    with pytest.raises(InvalidDtype, match=r"rows: expected bytes \(uint8\), got torch.float8_e8m0fnu"):
        to_ocp(rows.view(torch.float8_e8m0fnu))
    # Bytes that no row has: deficits past 26 or between steps, a NaN mark on one side only, an exponent below a deficit.
    for changes in (
        {289: 105},
        {289: 3},
        {289: 112},
        {289: 108},
        {306: 255},
        {306: 10, 292: 4 * 11},
        {306: 13},
        {306: 255, 307: 255, 288: 108},
    ):
        broken = rows.clone()
        for at, value in changes.items():
            broken[2, at] = value
        with pytest.raises(InvalidArgument, match=r"rows: token 2 is no row of format 'mxfp4_row320'"):
            to_ocp(broken)
    with pytest.raises(InvalidArgument, match=re.escape("rows: token (0, 1) is no row")):
        to_ocp(broken.view(2, 2, 320).flip(0)[:, [1, 0]])


# -- in a cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_caches_convert_both_ways(page_size):
    cache = LatentCache.allocate(130 // page_size + 2, page_size, format="mxfp4", mx_scale_rule="floor")
    cache.append(torch.randn(100, 576), torch.randperm(cache.num_tokens)[:100])
    rows = cache.convert("mxfp4_row320")
    assert rows.data.shape == (cache.num_pages, page_size, 320) and rows.scale is None and rows.mx_scale_rule == "floor"
    assert rows.bytes_per_token == 320 and torch.equal(rows.dequantize(), cache.dequantize())
    back = rows.convert("mxfp4")
    assert torch.equal(back.data, cache.data) and torch.equal(back.scale, cache.scale)
    empty = LatentCache.allocate(2, page_size, format="mxfp4_row320").convert("mxfp4")
    assert not empty.data.any() and not empty.scale.any()
    same_format = rows.convert("mxfp4_row320")
    assert torch.equal(same_format.data, rows.data) and same_format.data.data_ptr() != rows.data.data_ptr()
    wrapped = LatentCache.from_tensors(rows.data.flatten(0, 1)[:, None], format="mxfp4_row320", page_size=page_size)
    assert torch.equal(wrapped.dequantize(), rows.dequantize()) and wrapped.data.data_ptr() == rows.data.data_ptr()


def test_conversion_refusals():
    cache = LatentCache.allocate(2, 4, format="mxfp4")
    cache.append(uneven_rows()[:8], torch.arange(8))
    with pytest.raises(InvalidArgument, match=r"scale: block \d+ of token \(0, 2\) has scale byte"):
        cache.convert("mxfp4_row320")
    rows = cache.convert("mxfp4_row320", beyond="round")
    appended = LatentCache.allocate(2, 4, format="mxfp4_row320")
    appended.append(uneven_rows()[:8], torch.arange(8))
    assert (rows.dequantize() - appended.dequantize()).abs().max() <= 2.0**-26
    with pytest.raises(InvalidArgument, match="format: 'mxfp4' cannot become 'fp8' without rounding"):
        cache.convert("fp8")
    with pytest.raises(InvalidArgument, match="scale: format 'mxfp4_row320' has no scale tensor"):
        LatentCache.from_tensors(rows.data, torch.zeros(8, 18), format="mxfp4_row320", page_size=4)
    with pytest.raises(InvalidArgument, match="last dim of format 'mxfp4_row320' must be 320, got 306"):
        LatentCache.from_tensors(rows.data[..., :306], format="mxfp4_row320", page_size=4)


def test_backends_without_a_kernel_say_what_to_do():
    from leanmla import backends
    from leanmla.cli.known_devices import KNOWN
    from leanmla.cli.support import _TYPICAL
    from leanmla.device import override

    problem = _TYPICAL.replace(format="mxfp4_row320")
    for key, name in (("a100", "triton"), ("mi355x", "triton"), ("mi355x", "flydsl")):
        known = KNOWN[key]
        with override(known.info, assume_installed=known.packages):
            reason = backends.why_not(name, problem, known.info)
        assert reason is not None and reason.startswith(
            "has no kernel for cache format 'mxfp4_row320' (it has bf16, fp8, mxfp4"
        )
        assert reason.endswith("LatentCache.convert('mxfp4') makes a cache of the same values that it reads")

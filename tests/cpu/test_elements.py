"""The small number formats against exhaustive tables, ties and closed forms."""

import math

import pytest
import torch

from leanmla.formats.elements import (
    E2M1_VALUES,
    E4M3_VALUES,
    E8M0_VALUES,
    e2m1_decode,
    e2m1_encode,
    e8m0_decode,
    mx_scale_byte,
)


def test_e2m1_table_is_the_specs():
    assert E2M1_VALUES == (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
    assert math.copysign(1, E2M1_VALUES[8]) == -1


def test_e4m3_table_matches_torch_byte_for_byte():
    torch_values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    ours = torch.tensor(E4M3_VALUES, dtype=torch.float64)
    assert [b for b in range(256) if math.isnan(E4M3_VALUES[b])] == [0x7F, 0xFF]
    assert torch.equal(ours.nan_to_num(nan=9999.0), torch_values.nan_to_num(nan=9999.0))
    assert max(v for v in E4M3_VALUES if not math.isnan(v)) == 448.0
    assert E4M3_VALUES[0x01] == 2.0**-9


def test_e8m0_table():
    assert E8M0_VALUES[0] == 2.0**-127 and E8M0_VALUES[127] == 1.0 and E8M0_VALUES[254] == 2.0**127
    assert math.isnan(E8M0_VALUES[255]) and sum(map(math.isnan, E8M0_VALUES)) == 1
    every = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.float64):
        decoded = e8m0_decode(every, dtype).double()
        assert torch.equal(decoded[:255], torch.tensor(E8M0_VALUES[:255], dtype=torch.float64))
        assert math.isnan(decoded[255])


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.25, 0), (0.26, 0.5), (0.75, 1), (0.74, 0.5), (1.25, 1), (1.26, 1.5), (1.75, 2), (1.74, 1.5), (2.5, 2), (2.51, 3),
     (3.5, 4), (3.49, 3), (5, 4), (5.01, 6), (6, 6), (7, 6), (1e30, 6), (math.inf, 6)],
)  # fmt: skip
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_e2m1_rounds_to_nearest_ties_to_even_and_saturates(value, rounded, sign):
    code = e2m1_encode(torch.tensor([sign * value], dtype=torch.float32))
    assert E2M1_VALUES[int(code)] == sign * rounded


def test_e2m1_every_code_round_trips():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1_encode(torch.tensor(E2M1_VALUES)), codes)


def test_low_nibble_is_the_even_index():
    packed = torch.tensor([[0x12, 0xF7]], dtype=torch.uint8)
    assert e2m1_decode(packed).tolist() == [[1.0, 0.5, 6.0, -6.0]]


def test_e2m1_is_the_nearest_code_by_brute_force():
    x = torch.linspace(-8, 8, 40001)
    values = torch.tensor(E2M1_VALUES)
    ours = values[e2m1_encode(x).int()]
    nearest = (x[:, None] - values).abs().amin(-1)
    assert torch.equal((x - ours).abs(), nearest)


@pytest.mark.parametrize(
    ("amax", "floor", "even"),
    [
        (6.0, 0, 0),
        (7.0, 0, 1),  # floor clips 7 to 6; even makes room for 8
        (6.999999, 0, 0),  # mantissa just under 1.75
        (8.0 - 2.0**-21, 0, 1),
        (8.0, 1, 1),
        (4.0, 0, 0),
        (3.5, -1, 0),
        (1.0, -2, -2),
        (448.0, 6, 7),
    ],
)
def test_scale_rules(amax, floor, even):
    exact = torch.tensor([amax], dtype=torch.float32)
    assert int(mx_scale_byte(exact, "floor")) - 127 == floor
    assert int(mx_scale_byte(exact, "even")) - 127 == even


def test_scale_uses_the_fp32_amax_not_a_rounded_one():
    # 6.99 is below 7 in fp32 (even: exponent 0) but bf16 would round it to 7 (exponent 1).
    amax = torch.tensor([6.99], dtype=torch.float32)
    assert float(amax.to(torch.bfloat16)) == 7.0
    assert int(mx_scale_byte(amax, "even")) == 127


def test_scale_edges():
    for rule in ("even", "floor"):
        edges = torch.tensor([0.0, 2.0**-149, 2.0**-126, math.inf, math.nan, torch.finfo(torch.float32).max])
        assert mx_scale_byte(edges, rule).tolist() == [0, 0, 0, 253, 255, 253 if rule == "even" else 252]

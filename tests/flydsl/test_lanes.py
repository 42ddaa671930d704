"""Golden checks of the lane layouts: each register layout is spelled out here and a whole product is done with it by hand.

No FlyDSL, no GPU: matrices are spread over 64 lanes exactly as the kernels' index arithmetic spreads them, the instruction is
carried out as its definition says, and the result is gathered again. A wrong permutation gives a wrong product.
"""

from __future__ import annotations

import numpy as np
import pytest

from leanmla.kernels.flydsl import lanes
from leanmla.kernels.flydsl.spec import DecodeSpec

LANES = range(64)


def mfma_16x16x32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """v_mfma_f32_16x16x32_bf16 on registers: a, b [64, 8], c and result [64, 4].

    From the ISA's table: lane l holds row l % 16 of A and column l % 16 of B, contraction indices 8 (l / 16) .. + 7; of the result
    it holds column l % 16, rows 4 (l / 16) .. + 3.
    """
    left, right = np.zeros((16, 32)), np.zeros((32, 16))
    for lane in LANES:
        for i in range(8):
            left[lane % 16, 8 * (lane // 16) + i] = a[lane, i]
            right[8 * (lane // 16) + i, lane % 16] = b[lane, i]
    product = left @ right
    return np.array([[c[lane, i] + product[4 * (lane // 16) + i, lane % 16] for i in range(4)] for lane in LANES])


def transposed_read(memory: np.ndarray, addresses: list[tuple[int, int]]) -> np.ndarray:
    """ds_read_b64_tr_b16: lane l supplies (row, column) of 4 elements; within 16 lanes, lane i gets element i % 4 of lanes i // 4 + 4 j."""
    got = np.zeros((64, 4))
    for lane in LANES:
        base, i = lane - lane % 16, lane % 16
        for j in range(4):
            row, column = addresses[base + 4 * j + i // 4]
            got[lane, j] = memory[row, column + i % 4]
    return got


def test_golden_corners():
    assert [lanes.mfma_row(l) for l in (0, 15, 16, 63)] == [0, 15, 0, 15]
    assert [lanes.mfma_group(l) for l in (0, 15, 16, 63)] == [0, 0, 1, 3]
    assert [lanes.operand_k(l, e) for l, e in ((0, 0), (0, 7), (16, 0), (63, 7))] == [0, 7, 8, 31]
    assert [lanes.result_row(l, e) for l, e in ((0, 0), (15, 3), (16, 0), (63, 3))] == [0, 3, 4, 15]
    assert [lanes.probability_slot_key(0, e) for e in range(8)] == [0, 1, 2, 3, 16, 17, 18, 19]
    assert [lanes.probability_slot_key(48, e) for e in range(8)] == [12, 13, 14, 15, 28, 29, 30, 31]
    assert [lanes.transposed_read_source(l) for l in (0, 1, 4, 15, 16)] == [(0, 0), (0, 4), (1, 0), (3, 12), (0, 0)]


def test_every_element_has_one_place():
    assert {(lanes.mfma_row(l), lanes.operand_k(l, e)) for l in LANES for e in range(8)} == {(r, k) for r in range(16) for k in range(32)}
    assert {(lanes.mfma_row(l), lanes.result_row(l, e)) for l in LANES for e in range(4)} == {(c, r) for c in range(16) for r in range(16)}
    for row in range(16):
        keys = [lanes.probability_slot_key(l, e) for l in LANES if lanes.mfma_row(l) == row for e in range(8)]
        assert sorted(keys) == list(range(32))


def test_scores_come_out_transposed():
    """Keys as operand A, queries as operand B: a lane gets 4 keys of one query row."""
    rng = np.random.default_rng(0)
    keys, query = rng.normal(size=(16, 32)), rng.normal(size=(16, 32))
    a = np.array([[keys[lanes.mfma_row(l), lanes.operand_k(l, e)] for e in range(8)] for l in LANES])
    b = np.array([[query[lanes.mfma_row(l), lanes.operand_k(l, e)] for e in range(8)] for l in LANES])
    got = mfma_16x16x32(a, b, np.zeros((64, 4)))
    want = query @ keys.T
    for l in LANES:
        for e in range(4):
            assert got[l, e] == pytest.approx(want[lanes.mfma_row(l), lanes.result_row(l, e)])


def test_probabilities_and_transposed_values():
    """A chunk of 32 keys: probabilities as two score MFMAs leave them, values read down columns in the same key order."""
    rng = np.random.default_rng(1)
    probabilities, values = rng.normal(size=(16, 32)), rng.normal(size=(32, 16))
    p = np.array([[probabilities[lanes.mfma_row(l), lanes.probability_slot_key(l, e)] for e in range(8)] for l in LANES])
    # A slot's first four come from the score tile of keys 0..15, the others from that of keys 16..31.
    for l in LANES:
        for e in range(8):
            assert lanes.probability_slot_key(l, e) == lanes.result_row(l, e % 4) + 16 * (e // 4)
    source = [lanes.transposed_read_source(l) for l in LANES]
    low = transposed_read(values, [(4 * lanes.mfma_group(l) + row, column) for l, (row, column) in zip(LANES, source)])
    high = transposed_read(values, [(16 + 4 * lanes.mfma_group(l) + row, column) for l, (row, column) in zip(LANES, source)])
    got = mfma_16x16x32(np.concatenate([low, high], 1), p, np.zeros((64, 4)))
    want = (probabilities @ values).T  # [dim, row]
    for l in LANES:
        for e in range(4):
            assert got[l, e] == pytest.approx(want[lanes.result_row(l, e), lanes.mfma_row(l)])


def test_scaled_scores_of_a_key():
    """E2M1 keys times e4m3 queries as scaled.py lays them out: 5 steps of 128, the last half empty, scales per 32 key values.

    The instruction: A 4-bit, lane l holds row l % 16, indices 32 (l / 16) .. + 31; B 8-bit, lane l holds column l % 16, indices
    16 (l / 16) .. + 15 and 64 more; lane group g supplies the scale of indices 32 g .. + 31 of its row.
    """
    rng = np.random.default_rng(2)
    keys, query = rng.integers(-6, 7, (16, 576)), rng.integers(-8, 9, (16, 576))
    exponents = rng.integers(-3, 4, (16, 18))
    want = query @ (keys * np.repeat(2.0**exponents, 32, axis=1)).T
    got = np.zeros((16, 16))
    for step in range(5):
        a, b, scale = np.zeros((16, 128)), np.zeros((16, 128)), np.ones((16, 4))
        for l in LANES:
            row, group = lanes.mfma_row(l), lanes.mfma_group(l)
            used = step < 4 or group < 2
            for e in range(32):
                # What the kernel loads: key bytes 64 step + 16 group .. + 15, two values a byte; query values by two runs.
                a[row, 32 * (l // 16) + e] = keys[row, 2 * (64 * step + 16 * group) + e] if used else 0
                assert lanes.scaled_key_k(l, e) == 32 * (l // 16) + e
                k = 128 * step + 16 * group + e % 16 + 64 * (e // 16)
                b[row, 16 * (l // 16) + e % 16 + 64 * (e // 16)] = query[row, k] if k < 576 else 0
                assert lanes.scaled_query_k(l, e) == k - 128 * step
            scale[row, l // 16] = 2.0 ** exponents[row, 4 * step + group] if used else 1
        got += b @ (a * np.repeat(scale, 32, axis=1)).T
    np.testing.assert_array_equal(got, want)


def test_scores_of_fp8_keys():
    """scaled.py with e4m3 keys: both operands by runs of 16, half of the contraction apart; the fifth step's second runs are zeros."""
    rng = np.random.default_rng(3)
    keys, query = rng.integers(-6, 7, (16, 576)), rng.integers(-8, 9, (16, 576))
    exponents = rng.integers(-3, 4, (16, 18))
    want = (query * np.repeat(2.0**exponents, 32, axis=1)) @ keys.T
    got = np.zeros((16, 16))
    for step in range(5):
        a, b, scale = np.zeros((16, 128)), np.zeros((16, 128)), np.ones((16, 4))
        for l in LANES:
            row, group = lanes.mfma_row(l), lanes.mfma_group(l)
            for e in range(32):
                # What the kernel loads: run 2 step + e / 16 of a key, 64 bytes from run to run, 16 bytes a lane group.
                k = 64 * (2 * step + e // 16) + 16 * group + e % 16
                at = 16 * (l // 16) + e % 16 + 64 * (e // 16)
                assert lanes.scaled_query_k(l, e) == at == k - 128 * step
                a[row, at] = keys[row, k] if k < 576 else 0
                b[row, at] = query[row, k] if k < 576 else 0
            scale[row, group] = 2.0 ** exponents[row, 4 * step + group] if 4 * step + group < 18 else 1
        got += (b * np.repeat(scale, 32, axis=1)) @ a.T
    np.testing.assert_array_equal(got, want)


def test_fp8_keys_reach_lds_as_values():
    """scaled.py, ``write``: a lane's four pieces of 8 values a step land where the value product reads them."""
    for wave in range(4):
        for l in LANES:
            row = (wave * 16 + lanes.mfma_row(l)) * 1168 + lanes.mfma_group(l) * 32
            for step in range(4):
                for quarter in range(4):
                    first = 128 * step + lanes.scaled_query_k(l, 8 * quarter)
                    assert row + 256 * step + 128 * (quarter // 2) + 16 * (quarter % 2) == (wave * 16 + lanes.mfma_row(l)) * 1168 + 2 * first


def test_scale_of_a_query_block_comes_from_lanes_that_hold_it():
    """scaled.py, ``_block_scale``: lane group g asks group 2 (g & 1), whose run g / 2 lies in block g."""
    for lane in LANES:
        group = lanes.mfma_group(lane)
        source = lanes.mfma_row(lane) + ((group & 1) << 5)
        assert lanes.mfma_row(source) == lanes.mfma_row(lane)
        run = 0 if group < 2 else 1
        held = {lanes.scaled_query_k(source, 16 * run + e) // 32 for e in range(16)}
        assert held == {group}
        # The other half of the block is in the neighbouring group (xor 16), so both know the block's largest value.
        assert {lanes.scaled_query_k(source ^ 16, 16 * run + e) // 32 for e in range(16)} == {group}


def test_two_e4m3_hold_a_bf16_query():
    """Nearest e4m3, then 32 times what is left as e4m3: exact for every bf16 down to 2^-13 of the row's largest."""
    import torch

    bits = torch.arange(0x4300 - (14 << 7), 0x4380, dtype=torch.int32)  # magnitudes 2^-7 .. 256
    x = (bits << 16).view(torch.float32)
    x = torch.cat([x, -x])
    high = x.to(torch.float8_e4m3fn).float()
    low = ((x - high) * 32).to(torch.float8_e4m3fn).float() / 32
    assert ((x - high).abs() * 32 <= 448).all()
    exact = (high + low) == x
    assert exact[x.abs() >= 2.0**-6].all()
    assert ((high + low - x).abs() <= 2.0**-15).all()


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("row_tiles", [1, 2, 4])
def test_probability_exchange(row_tiles, width):
    """Where the score waves store and where the value waves load: every (row, key) of a tile arrives at its slot.

    The store offsets repeat the kernel's; see decode.py, ``probability_slot`` and ``place``. Bytes: 2 of bf16, 4 of fp32 (fp8_tile128).
    """
    spec = DecodeSpec("bf16" if width == 2 else "fp8_tile128", 16, row_tiles, "block_table", 64, False, False, False, "one")
    assert spec.probability_bytes == width
    memory: dict[int, tuple[int, int]] = {}
    for wave in range(4):
        row_tile, key_group = wave % row_tiles, wave // row_tiles
        assert row_tile == wave & (spec.row_tiles - 1)
        first_subtile = key_group * row_tiles
        for l in LANES:
            row16, group = lanes.mfma_row(l), lanes.mfma_group(l)
            slot = (row_tile * 1024 + (first_subtile >> 1) * 512 + (first_subtile & 1) * 4 + row16 * 32 + group * 8) * width
            for subtile in range(row_tiles):
                place = slot + ((subtile >> 1) * 512 + (subtile & 1) * 4) * width
                for e in range(4):
                    held = (16 * row_tile + row16, 16 * (first_subtile + subtile) + lanes.result_row(l, e))
                    assert memory.setdefault(place + width * e, held) == held
    assert len(memory) == 16 * row_tiles * 64
    assert max(memory) < spec.lds.maxima - spec.lds.probabilities
    for row_tile in range(row_tiles):
        for chunk in range(2):
            for l in LANES:
                for e in range(8):
                    at = (lanes.mfma_row(l) * 32 + lanes.mfma_group(l) * 8 + (2 * row_tile + chunk) * 512 + e) * width
                    assert memory[at] == (16 * row_tile + lanes.mfma_row(l), 32 * chunk + lanes.probability_slot_key(l, e))


def test_tile_scales_reach_their_keys():
    """fp8_tile128 scales in LDS, [4 tiles][64 keys]: threads store their key's, score and value waves load 4 keys at a time."""
    memory = {(t & 3) * 256 + (t >> 2) * 4: (t & 3, t >> 2) for t in range(256)}  # staging.py: thread -> (tile, key)
    assert len(memory) == 256
    for l in LANES:
        for row_tiles in (1, 2, 4):
            for key_group in range(4 // row_tiles):
                for subtile in range(row_tiles):
                    for tile in range(4):
                        for e in range(4):
                            at = (key_group * row_tiles * 16 + lanes.mfma_group(l) * 4) * 4 + tile * 256 + 16 * subtile * 4 + 4 * e
                            assert memory[at] == (tile, 16 * (key_group * row_tiles + subtile) + lanes.result_row(l, e))
        for wave in range(4):  # dims 128 wave .. + 127
            for chunk in range(2):
                for e in range(8):
                    at = (wave * 64 + lanes.mfma_group(l) * 4) * 4 + (32 * chunk + 16 * (e // 4)) * 4 + 4 * (e % 4)
                    assert memory[at] == (wave, 32 * chunk + lanes.probability_slot_key(l, e))


def test_lds_rows_hit_different_banks():
    """The 16 rows of a ds_read_b128 start in 16 different groups of 4 banks, the 4 rows of a transposed read in 4 disjoint groups of 8."""
    from leanmla.kernels.flydsl.spec import ROW_BYTES

    words = ROW_BYTES // 4
    assert sorted(row * words % 64 // 4 for row in range(16)) == list(range(16))
    banks = {(row * words + word) % 64 for row in range(4) for word in range(8)}
    assert len(banks) == 32

"""Keys as they are: scores by ``v_mfma_scale_f32_16x16x128_f8f6f4``, E2M1 keys with E8M0 scales, or e4m3 keys, times e4m3 queries.

For blocks of 16 rows: mxfp4, and fp8 with precision "a8". A wave scores 16 keys of a tile; their bytes come from memory in the order of operand A and never pass
through LDS, which then holds only values. That saves the 74 KB that a tile's scores would read from LDS, of 213 KB.

A bf16 query value is the sum of two e4m3 numbers: the nearest (4 significant bits), and what is left, a multiple of the value's
last bit below half the first one's: 4 more bits, so nothing is lost. Each block of 32 query values is first brought to a largest
magnitude of 128..256 by a power of two, its scale; values 2^-14 below the block's largest begin to lose bits, at 2^-20 of the largest.
Two MFMAs a step, the second with 2^-5 of the scale; "a8" leaves the second term out. One power of two a row would not do: a query with one large rope value and small
latent ones, as offsets of all logits make it, would lose the latent part.

================  ====================================================================================================
register          lane (row = lane & 15, group = lane >> 4)
================  ====================================================================================================
key operand       mxfp4: values 128 step + 32 group .. + 31 of key ``row``: 16 bytes
                  fp8: values 128 step + 16 group .. + 15, then the same 64 further, of key ``row``: 32 bytes
key scale         mxfp4: block 4 step + group of key ``row``: byte 0 of a register; fp8: 1
query operand     values 128 step + 16 group .. + 15, then the same 64 further, of query row ``row``: 32 bytes
query scale       block 4 step + group of query row ``row``, whose values other lanes hold: bytes 0 and 1 for the two terms
================  ====================================================================================================

The fifth step has 64 values: with mxfp4 groups 2 and 3 multiply zeros, with scale 1; with fp8 every group's second run is zeros.
"""

from __future__ import annotations

import flydsl.expr as fx

from . import lanes, ops
from .pages import KeyRows, data_address, page_of, scale_address
from .spec import ROW_BYTES, DecodeSpec

__all__ = ["find_pages", "load", "load_query", "no_pages", "nothing_held", "operands", "scores", "write"]

V = fx.Vector
STEPS = 5
SCALE_ONE = 127
#: The second query term is multiplied by 2^5: half a unit of the first's last place, at most 8, becomes at most 256.
LOW_SHIFT = 5
#: Biased exponent that a block's largest query value is brought to: 128..256.
QUERY_EXPONENT = 134
#: Blocks below 2^-111 count as that large, so that both scales are bytes.
LEAST_EXPONENT = 16


# -- keys ---------------------------------------------------------------------------------------------------------------


def _own_key(thread, first_key):
    """The key this lane loads: 16 a wave."""
    return first_key + (thread >> 6) * 16 + lanes.mfma_row(thread & 63)


def no_pages():
    """What find_pages returns, before there is anything to find."""
    return [fx.Int32(0)]


def find_pages(rows: KeyRows, first_key):
    """Page id of this lane's key."""
    return [page_of(rows, first_key if rows.spec.tile_in_page else _own_key(rows.thread, first_key))]


def nothing_held(spec: DecodeSpec):
    """What load returns, before there is anything to load."""
    if spec.format == "fp8":
        return {"data": [V.filled(4, 0, fx.Int32) for _ in range(2 * STEPS - 1)]}
    words = [V.filled(4, 0, fx.Int32) for _ in range(STEPS)]
    return {"data": words, "scales": [fx.Int32(0) for _ in range(STEPS)], "shift": fx.Int32(0)}


def load(rows: KeyRows, pages, first_key):
    """Start the loads of this lane's key: its 16 or 32 bytes of each step and its scales."""
    key = _own_key(rows.thread, first_key)
    group = lanes.mfma_group(rows.thread & 63)
    if rows.spec.format == "fp8":
        address = data_address(rows, pages[0], key) + ops.widen(group * 16)
        return {"data": [ops.global_load(address, fx.Int32, 4, offset=64 * run) for run in range(2 * STEPS - 1)]}
    in_last_step = group < 2
    address = data_address(rows, pages[0], key) + ops.widen(group * 16)
    data = [ops.global_load(address, fx.Int32, 4, offset=64 * step) for step in range(STEPS - 1)]
    data.append(ops.global_load(ops.select(in_last_step, address + 256, rows.zeros), fx.Int32, 4))
    # Blocks 4 step + group are 4 bytes apart from byte ``group`` on: aligned words, shifted. Scale rows begin at even addresses,
    # so the words are inside the row; the fifth is not for groups 2 and 3, which read the first again.
    address = scale_address(rows, pages[0], key) + ops.widen(group)
    aligned = address & fx.Int64(-4)
    first = ops.global_load(aligned, fx.Int32, 4)
    last = ops.global_load(ops.select(in_last_step, aligned + 16, aligned), fx.Int32)
    return {"data": data, "scales": [*(first[i] for i in range(4)), last], "shift": fx.Int32(address) & 3}


def operands(spec: DecodeSpec, thread, held):
    """What :func:`load` brought as MFMA operands: ([5] words of keys, [5] scale bytes). They outlive the next tile's loads."""
    if spec.format == "fp8":
        runs = [*(ops.own_copy(words) for words in held["data"]), V.filled(4, 0, fx.Int32)]
        words = [runs[2 * step].shuffle(runs[2 * step + 1], list(range(8))) for step in range(STEPS)]
        return words, [fx.Int32(SCALE_ONE) for _ in range(STEPS)]
    words, shift = held["scales"], held["shift"]
    shifted = [ops.align_bytes(words[i + 1] if i + 1 < STEPS else fx.Int32(0), words[i], shift) & 255 for i in range(STEPS)]
    in_last_step = lanes.mfma_group(thread & 63) < 2
    shifted[-1] = ops.select(in_last_step, shifted[-1], fx.Int32(SCALE_ONE))
    scales = ops.own_copy(V.from_elements(shifted, fx.Int32))
    return [ops.own_copy(words) for words in held["data"]], [scales[step] for step in range(STEPS)]


def write(spec: DecodeSpec, lds, thread, data, scales) -> None:
    """Values to LDS: the first four steps of this lane's key as bf16, 32 values a step."""
    lane = thread & 63
    if spec.format == "fp8":
        row = ((thread >> 6) * 16 + lanes.mfma_row(lane)) * ROW_BYTES + lanes.mfma_group(lane) * 32
        one = fx.Float32(1.0)
        for step in range(STEPS - 1):
            for quarter in range(4):  # 8 of the lane's 32 values, 16 bytes of bf16
                words = [data[step][2 * quarter + i] for i in range(2)]
                pairs = [ops.bf16_from_fp8(word, one, half).bitcast(fx.Int32)[0] for word in words for half in range(2)]
                offset = 256 * step + 128 * (quarter // 2) + 16 * (quarter % 2)
                lds.store(row, V.from_elements(pairs, fx.Int32), offset=offset)
        return
    row = ((thread >> 6) * 16 + lanes.mfma_row(lane)) * ROW_BYTES + lanes.mfma_group(lane) * 64
    for step in range(STEPS - 1):
        scale = (scales[step] << 23).bitcast(fx.Float32)
        # One NaN in a block of scale 255 is enough: the key's score is NaN too, and with it the row's output.
        nan = ops.select(scales[step] == 255, fx.Int32(0x7FFF7FFF), fx.Int32(0))
        for quarter in range(4):
            pairs = [ops.bf16_from_fp4(data[step][quarter], scale, byte).bitcast(fx.Int32)[0] for byte in range(4)]
            if quarter == 0:
                pairs[0] = pairs[0] | nan
            lds.store(row, V.from_elements(pairs, fx.Int32), offset=256 * step + 16 * quarter)


# -- queries ------------------------------------------------------------------------------------------------------------


def load_query(address, lane, terms: int):
    """(for each of ``terms`` 1 or 2: [5] steps, [5] scales): operand B of a query row.

    ``address`` is the row's, plus 32 bytes a lane group. A scale register holds the first term's byte, then the second's.
    """
    chunks = []  # 16 values each, in the order of the operand
    for step in range(STEPS):
        for half in range(2):
            if step == STEPS - 1 and half == 1:
                break
            offset = 256 * step + 128 * half
            pair = [ops.global_load(address, fx.BFloat16, 8, offset=offset + 16 * i).to(fx.Float32) for i in range(2)]
            chunks.append([pair[i // 8][i % 8] for i in range(16)])
    high, low, exponents = [], [], []
    for chunk in chunks:
        largest = fx.Int32(0)  # magnitudes in order, as integers; a NaN counts as the largest
        for value in chunk:
            largest = ops.maximum_int(largest, value.bitcast(fx.Int32) & 0x7FFFFFFF)
        largest = ops.maximum_int(largest, ops.xor_lanes(largest, 16))  # a block of 32 lies in two lane groups
        exponent = ops.minimum(ops.maximum_int(largest >> 23, LEAST_EXPONENT), 254)
        exponents.append(exponent)
        up = ((127 + QUERY_EXPONENT - exponent) << 23).bitcast(fx.Float32)
        for quad in range(4):
            values = [chunk[4 * quad + i] * up for i in range(4)]
            first = ops.pack_fp8(values)
            kept = ops.unpack_fp8(first)
            high.append(first)
            if terms == 2:
                low.append(ops.pack_fp8([(values[i] - kept[i]) * float(1 << LOW_SHIFT) for i in range(4)]))
    zeros = [fx.Int32(0)] * 4
    exponents.append(fx.Int32(LEAST_EXPONENT))  # of the half of the last step that is zeros
    split = lambda words: [V.from_elements((words + zeros)[8 * step : 8 * step + 8], fx.Int32) for step in range(STEPS)]  # noqa: E731
    scales = [_block_scale(exponents[2 * step], exponents[2 * step + 1], lane) for step in range(STEPS)]
    return [split(words) for words in ([high, low] if terms == 2 else [high])], scales


def _block_scale(low_half, high_half, lane):
    """The scale register of one step from the exponents of a lane's two runs of 16.

    Lane group g holds values of blocks g / 2 and 2 + g / 2, and has to supply the scale of block g: that of the first run in groups
    0 and 2 for g = 0 and 1, of the second run there for g = 2 and 3.
    """
    group = lanes.mfma_group(lane)
    source = lanes.mfma_row(lane) + ((group & 1) << 5)
    pair = ops.shuffle_from(low_half | (high_half << 8), source)
    byte = (ops.select(group < 2, pair, pair >> 8) & 255) - (QUERY_EXPONENT - 127)
    return byte | ((byte - LOW_SHIFT) << 8)


# -- scores -------------------------------------------------------------------------------------------------------------


def scores(query, data, scales):
    """Scores of the wave's 16 keys: 4 keys a lane."""
    terms, query_scales = query
    # Two accumulators halve the chain of dependent MFMAs: one a term, or with one term the even and the odd steps.
    sums = [V.filled(4, 0.0, fx.Float32) for _ in range(2)]
    for step in range(STEPS):
        for term, words in enumerate(terms):
            place = term if len(terms) == 2 else step & 1
            sums[place] = ops.mfma_scaled(data[step], scales[step], words[step], query_scales[step], sums[place], b_byte=term)
    return sums[0] + sums[1]

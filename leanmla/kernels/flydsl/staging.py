"""A tile of keys from the cache to LDS: loads into registers, conversion to bf16, stores. One section a cache format.

Whatever the format, LDS holds 64 rows of 576 bf16 (rows ROW_BYTES apart). Every conversion here is exact: e4m3 and E2M1
times a power of two are bf16 numbers (E8M0 scales that leave bf16's range become infinity or subnormal, as they do in fp32).
The four fp32 scales of an fp8_tile128 key are any numbers, so they are not multiplied in here: they lie in LDS beside the rows, as
[4 tiles][64 keys], and scale partial sums of the scores and the probabilities (decode.py).

===========  =======================  ===========================  ========================================
format       keys a thread            pieces of a key              registers held between load and store
===========  =======================  ===========================  ========================================
bf16         2: t / 8 and 32 + t / 8  9 x 16 bytes, 128 apart      72
fp8          1: t / 4                 9 x 16 bytes, 64 apart       36
mxfp4        1: t / 4                 9 x 8 bytes, 32 apart        18, and 5 of scales (16 rows: scaled.py)
fp8_tile128  1: t / 4                 8 x 16 bytes, 64 apart; of   40, and 1 of scales
                                      rope 2 x 16, 64 apart
===========  =======================  ===========================  ========================================

Neighbouring threads read neighbouring pieces, so a wave's load instruction touches whole 128-, 64- or 32-byte segments.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import flydsl.expr as fx

from ...formats.fp8_tile128 import ROPE_OFFSET, SCALE_OFFSET
from ...problem import DIMS
from . import ops, scaled
from .pages import KeyRows, data_address, page_of, scale_address
from .spec import ROW_BYTES, TILE, DecodeSpec

__all__ = ["drop_non_finite", "find_pages", "key_scale", "load", "no_pages", "nothing_held", "write"]

V = fx.Vector
PIECES = 9  #: of a key a thread, as they lie in LDS
LATENT_PIECES = 8  #: of these, the ones that are e4m3 in fp8_tile128
ROPE_PIECES = 2  #: of the bf16 rope part, in fp8_tile128
ROPE_IN_LDS = 2 * DIMS.kv_lora_rank

#: keys a thread, threads a key, bytes of a piece in the cache, bytes of a piece in LDS
_SHAPES = {
    "bf16": SimpleNamespace(keys=2, threads=8, piece=16, piece_lds=16),
    "fp8": SimpleNamespace(keys=1, threads=4, piece=16, piece_lds=32),
    "mxfp4": SimpleNamespace(keys=1, threads=4, piece=8, piece_lds=32),
    "fp8_tile128": SimpleNamespace(keys=1, threads=4, piece=16, piece_lds=32),
}
SCALE_WORDS = 5  # 18 scale bytes from an even address lie within 5 aligned words


def _own_keys(format: str, thread, first_key):
    """The keys (of the sequence) that a thread loads in the tile that begins at ``first_key``."""
    shape = _SHAPES[format]
    keys_a_pass = 256 // shape.threads
    return [first_key + (thread >> (shape.threads.bit_length() - 1)) + keys_a_pass * i for i in range(shape.keys)]


def no_pages(spec: DecodeSpec):
    """What find_pages returns, before there is anything to find."""
    if spec.scaled_scores:
        return scaled.no_pages()
    return [fx.Int32(0) for _ in range(1 if spec.tile_in_page else _SHAPES[spec.format].keys)]


def find_pages(rows: KeyRows, first_key):
    """Page ids of this thread's keys in a tile; one id, the same for the whole block, where a tile never leaves a page."""
    if rows.spec.scaled_scores:
        return scaled.find_pages(rows, first_key)
    if rows.spec.tile_in_page:
        return [page_of(rows, first_key)]
    return [page_of(rows, key) for key in _own_keys(rows.spec.format, rows.thread, first_key)]


def nothing_held(spec: DecodeSpec):
    """What load returns, before there is anything to load."""
    if spec.scaled_scores:
        return scaled.nothing_held(spec)
    format = spec.format
    shape = _SHAPES[format]
    words = shape.piece // 4
    pieces = LATENT_PIECES if format == "fp8_tile128" else PIECES * shape.keys
    held = {"data": [V.filled(words, 0, fx.Int32) for _ in range(pieces)]}
    if format == "fp8_tile128":
        held["rope"] = [V.filled(4, 0, fx.Int32) for _ in range(ROPE_PIECES)]
        held["scale"] = fx.Float32(0.0)
    if format == "mxfp4":
        held["scales"] = [fx.Int32(0) for _ in range(SCALE_WORDS)]
        held["shift"] = fx.Int32(0)
    return held


def load(rows: KeyRows, pages, first_key):
    """Start the loads of this thread's share of a tile; the values are waited for where :func:`write` uses them."""
    if rows.spec.scaled_scores:
        return scaled.load(rows, pages, first_key)
    format, thread = rows.spec.format, rows.thread
    shape = _SHAPES[format]
    piece = (thread & (shape.threads - 1)) * shape.piece
    held: dict[str, Any] = {"data": []}
    for i, key in enumerate(_own_keys(format, thread, first_key)):
        page = pages[0 if rows.spec.tile_in_page else i]
        address = data_address(rows, page, key) + ops.widen(piece)
        for j in range(LATENT_PIECES if format == "fp8_tile128" else PIECES):
            offset = j * shape.threads * shape.piece
            held["data"].append(ops.global_load(address, fx.Int32, shape.piece // 4, offset=offset))
        if format == "fp8_tile128":
            held["rope"] = [ops.global_load(address, fx.Int32, 4, offset=ROPE_OFFSET + 64 * j) for j in range(ROPE_PIECES)]
            own_scale = data_address(rows, page, key) + ops.widen((thread & 3) * 4)
            held["scale"] = ops.global_load(own_scale, fx.Float32, offset=SCALE_OFFSET)
        if format == "mxfp4":
            # Scale rows begin at any even address: read the aligned words around the 18 bytes. The shift brings the
            # first scale this thread needs (block 0, or 1 for the upper two of the four threads) to byte 0.
            address = scale_address(rows, page, key)
            aligned = address & fx.Int64(-4)
            first = ops.global_load(aligned, fx.Int32, 4)
            held["scales"] = [first[i] for i in range(4)] + [ops.global_load(aligned, fx.Int32, offset=16)]
            held["shift"] = (fx.Int32(address) & 3) + ((thread & 3) >> 1)
    return held


def write(spec: DecodeSpec, lds, thread, held):
    """Convert what :func:`load` brought and store it to LDS. Returns the key operands if scores do not come from LDS, else None."""
    if spec.scaled_scores:
        data, scales = scaled.operands(spec, thread, held)
        scaled.write(spec, lds, thread, data, scales)
        return data, scales
    format = spec.format
    shape = _SHAPES[format]
    threads_log2 = shape.threads.bit_length() - 1
    row = (thread >> threads_log2) * ROW_BYTES + (thread & (shape.threads - 1)) * shape.piece_lds
    keys_a_pass = 256 // shape.threads
    scales = _block_scales(held) if format == "mxfp4" else []
    for key in range(shape.keys):
        for j in range(LATENT_PIECES if format == "fp8_tile128" else PIECES):
            words = held["data"][key * PIECES + j]
            offset = key * keys_a_pass * ROW_BYTES + j * shape.threads * shape.piece_lds
            if format == "bf16":
                lds.store(row, words, offset=offset)
                continue
            pairs = _fp4_pairs(words, scales[j]) if format == "mxfp4" else _fp8_pairs(words)
            for half in range(2):
                lds.store(row, _join(pairs[4 * half : 4 * half + 4]), offset=offset + 16 * half)
    if format == "fp8_tile128":
        rope = (thread >> 2) * ROW_BYTES + (thread & 3) * 16
        for j in range(ROPE_PIECES):
            lds.store(rope, held["rope"][j], offset=ROPE_IN_LDS + 64 * j)
        lds.store((thread & 3) * (4 * TILE) + (thread >> 2) * 4, held["scale"], offset=spec.lds.scales, align=4)
    return None


def drop_non_finite(spec: DecodeSpec, lds, thread) -> None:
    """Replace NaN and infinities in this thread's share of the tile in LDS by 0.

    For tiles where one row of a block may see a key and another may not: the other's probability is 0, but 0 * NaN is NaN. The row
    that does see the key is NaN all the same, through its score, which was computed before.
    """
    shape = _SHAPES[spec.format]
    threads_log2 = shape.threads.bit_length() - 1
    row = (thread >> threads_log2) * ROW_BYTES + (thread & (shape.threads - 1)) * shape.piece_lds
    keys_a_pass = 256 // shape.threads
    if spec.format == "fp8_tile128":  # a scale a thread
        bits = lds.load(thread * 4, fx.Int32, offset=spec.lds.scales, align=4)
        finite = ops.select((bits & 0x7F800000) == 0x7F800000, fx.Int32(0), bits)
        lds.store(thread * 4, finite, offset=spec.lds.scales, align=4)
    for key in range(shape.keys):
        for j in range(PIECES):
            for part in range(0, shape.piece_lds, 16):
                offset = key * keys_a_pass * ROW_BYTES + j * shape.threads * shape.piece_lds + part
                words = lds.load(row, fx.Int32, 4, offset=offset)
                lds.store(row, V.from_elements([_finite_pair(words[i]) for i in range(4)], fx.Int32), offset=offset)


def _finite_pair(word):
    """Two bf16 in an int32; an exponent of all ones makes a half 0."""
    low = ops.select((word & 0x7F80) == 0x7F80, fx.Int32(0), word & 0xFFFF)
    high = ops.select((word & 0x7F800000) == 0x7F800000, fx.Int32(0), word & fx.Int32(-65536))
    return low | high


def key_scale(format: str, kv_scale):
    """The fp32 factor that keys and values still lack after :func:`write`."""
    return ops.global_load(kv_scale, fx.Float32, constant=True) if format == "fp8" else fx.Float32(1.0)


def _join(pairs):
    """Four bf16 pairs as int32 x 4."""
    return V.from_elements([pair.bitcast(fx.Int32)[0] if isinstance(pair, V) else pair for pair in pairs], fx.Int32)


def _fp8_pairs(words):
    """16 e4m3 bytes -> 8 bf16 pairs. NaN stays NaN."""
    one = fx.Float32(1.0)
    return [ops.bf16_from_fp8(words[i], one, half) for i in range(4) for half in range(2)]


def _block_scales(held):
    """For each of the 9 pieces (scale as fp32 exponent bits, NaN mask).

    Piece j of a thread lies in block 2 j (+ 1 for the upper threads): bytes 0, 2, 4, ... of the shifted scale row.
    """
    words, shift = held["scales"], held["shift"]
    scales = []
    for j in range(PIECES):
        low, high = words[j // 2], words[j // 2 + 1] if j // 2 + 1 < SCALE_WORDS else fx.Int32(0)
        if j % 2 == 0:
            shifted = ops.align_bytes(high, low, shift)
        byte = (shifted >> (16 * (j % 2))) & 255
        bits = byte << 23
        # Byte 255 is NaN. One NaN in a block is enough: it makes the key's score NaN, and with it the row's output.
        nan = ops.select(byte == 255, fx.Int32(0x7FFF7FFF), fx.Int32(0))
        scales.append((bits.bitcast(fx.Float32), nan))
    return scales


def _fp4_pairs(words, scale):
    """16 E2M1 codes -> 8 bf16 pairs, times the block's scale."""
    bits, nan = scale
    pairs = [ops.bf16_from_fp4(words[i], bits, byte) for i in range(2) for byte in range(4)]
    return [pairs[0].bitcast(fx.Int32)[0] | nan, *pairs[1:]]

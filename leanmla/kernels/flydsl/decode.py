"""Split-KV MLA decode on MFMA: one block works on 16, 32 or 64 (query row, head) pairs and a range of keys.

Grid: block = row_block * max_items + item, where an item is a range of keys of one sequence. Row blocks of one item are
``max_items`` blocks apart, which is kept a multiple of 8: they land on the same one of MI355X's eight dies and find the keys in
its L2.

A block has 4 waves and walks its keys in tiles of 64. Every key is read from memory once, converted to bf16 in registers
if it is not, put into LDS, and used from there as key (all 576 values) and as value (the first 512) by all rows:

==========================  ==============================================================================================
step                        what happens (R = row tiles of 16 rows, G = 4 / R key groups; wave w: row tile w % R, group w / R)
==========================  ==============================================================================================
1  tile -> LDS              wait for the tile's loads, convert, write rows of 576 bf16; barrier
2  next tile's loads        issued now, consumed in step 1 of the next tile; its page ids were read a tile earlier
3  scores                   S^T = K q^T: a wave has R x 16 keys of its group and the 16 rows of its row tile, whose q stays in
                            72 registers. A lane holds one row (lane & 15) and 4 keys of each 16
4  maximum                  over registers, over lane groups (xor 16, 32), over key groups through LDS; barrier
5  probabilities            p = 2^(s - m), to LDS as bf16 in the order the next step contracts; barrier
6  values                   O^T += V^T p^T: a wave has 128 of the 512 dims and all R row tiles; V^T comes by transposing reads
7  barrier                  before the tile in LDS is overwritten
==========================  ==============================================================================================

Both products put rows (of q) on lane & 15, so maxima, sums and rescaling factors are one register a row tile.

Masking selects; it never adds -inf. Rows past the last key read a row of zeros instead of the cache, so whatever the cache
holds there has no way in; a score that a row may not see is replaced by a finite sentinel before the maximum and its
probability is set to zero after the exponential. A row that saw nothing has sum 0: out 0, lse -inf. Where rows of a block differ in
what they see, values that are not finite are dropped between steps 4 and 6 (staging.drop_non_finite).
"""

from __future__ import annotations

from types import SimpleNamespace

import flydsl.compiler as flyc
import flydsl.expr as fx

from . import lanes, ops, scaled, staging
from .pages import KeyRows, kv_length
from .spec import NUM_THREADS, ROW_BYTES, TILE, DecodeSpec

__all__ = ["make_decode"]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

#: tanh(y) / y in powers of y^2. Below NEAR_ZERO the next term is 2e-9 of the sum.
TANH_SERIES = (1.0, -1 / 3, 2 / 15, -17 / 315, 62 / 2835, -1382 / 155925)
NEAR_ZERO = 0.25

#: Stands for "not seen" inside a tile. Below every score that can matter, and finite, so no instruction has to
#: get infinities right.
SENTINEL = -3.0e38
NEGATIVE_INFINITY_BITS = -(1 << 23)  # 0xFF800000

QK_STEPS = 18  # 576 / 32
TILE_STEPS = 4  # of these, in 128 values
DIM_BLOCKS = 8  # 128 dims a wave / 16
V = fx.Vector


def _zero4():
    return V.filled(4, 0.0, fx.Float32)


# -- what a block works on ----------------------------------------------------------------------------------------------


def _find_item(spec: DecodeSpec, item, items, first_item, split_counts, num_items, num_splits):
    """(sequence, split, splits of the sequence, whether there is such an item)."""
    if spec.split_mode == "one":
        return item, fx.Int32(0), fx.Int32(1), fx.Int32(1)
    if spec.split_mode == "count":
        return ops.udiv(item, num_splits), ops.umod(item, num_splits), num_splits, fx.Int32(1)
    # Past the last item the table holds nothing; item 0 exists in every batch.
    exists = ops.select(item < ops.global_load(num_items, fx.Int32, constant=True), fx.Int32(1), fx.Int32(0))
    item = ops.select(exists != 0, item, fx.Int32(0))
    sequence = ops.global_load(items + ops.widen(item) * 4, fx.Int32, constant=True)
    at = ops.widen(sequence) * 4
    split = item - ops.global_load(first_item + at, fx.Int32, constant=True)
    return sequence, split, ops.global_load(split_counts + at, fx.Int32, constant=True), exists


def _split_range(spec: DecodeSpec, kv_len, split, count, split_size):
    """(first key, end): the definition is split_plan.plan_splits with blocks of one tile."""
    if spec.split_mode == "one":
        return fx.Int32(0), kv_len
    if spec.split_mode == "size":
        first = ops.minimum(split * split_size, kv_len)
        return first, ops.minimum(first + split_size, kv_len)
    tiles = (kv_len + (TILE - 1)) >> 6
    # tiles * split // count, without the product's 64 bits: tiles = whole * count + rest.
    whole = ops.udiv(tiles, count)
    rest = tiles - whole * count
    first = whole * split + ops.udiv(rest * split, count)
    end = whole * (split + 1) + ops.udiv(rest * (split + 1), count)
    return ops.minimum(first << 6, kv_len), ops.minimum(end << 6, kv_len)


def _query_rows(spec: DecodeSpec, qo_indptr, q_len, sequence):
    """(first query row, number of query rows) of a sequence."""
    if not spec.ragged_q:
        return sequence * q_len, q_len
    address = qo_indptr + ops.widen(sequence) * 4
    first = ops.global_load(address, fx.Int32, constant=True)
    return first, ops.global_load(address, fx.Int32, offset=4, constant=True) - first


def _visible_keys(spec: DecodeSpec, kv_len, q_len, row):
    """Keys that query row ``row`` of the sequence sees: bottom-right causal."""
    if not spec.causal:
        return kv_len
    keys = kv_len - q_len + row + 1
    return ops.select(keys > 0, keys, fx.Int32(0))


# -- steps of a tile ----------------------------------------------------------------------------------------------------


def _load_query(spec: DecodeSpec, address, lane):
    """Operand B of the score product: 8 values at dims 32 k + 8 group, for 18 steps."""
    group = lanes.mfma_group(lane)
    if spec.scaled_scores:
        return scaled.load_query(address + ops.widen(group * 32), lane, spec.query_terms)
    address = address + ops.widen(group * 16)
    return [ops.global_load(address, fx.BFloat16, 8, offset=64 * k) for k in range(QK_STEPS)]


def _scores(spec: DecodeSpec, lds, key_row, query, operands, scale_keys):
    """Raw scores of this wave's keys: one vector of 4 keys for each of its 16-key subtiles."""
    if spec.scaled_scores:
        return [scaled.scores(query, *operands)]
    if spec.tile_scales:
        return [_tile_scaled_scores(spec, lds, key_row, query, subtile, scale_keys) for subtile in range(spec.row_tiles)]
    scores = []
    for subtile in range(spec.row_tiles):
        # Two accumulators halve the chain of dependent MFMAs.
        sums = [_zero4(), _zero4()]
        for k in range(QK_STEPS):
            keys = lds.load(key_row, fx.BFloat16, 8, offset=subtile * 16 * ROW_BYTES + 64 * k)
            sums[k & 1] = ops.mfma_bf16(keys, query[k], sums[k & 1])
        scores.append(sums[0] + sums[1])
    return scores


def _tile_scaled_scores(spec: DecodeSpec, lds, key_row, query, subtile, scale_keys):
    """Scores where each 128 values of a key have a scale: a sum for each of them, scaled in fp32, and one for the rope part."""
    offset = subtile * 16 * ROW_BYTES
    total = _zero4()
    for k in range(4 * TILE_STEPS, QK_STEPS):
        total = ops.mfma_bf16(lds.load(key_row, fx.BFloat16, 8, offset=offset + 64 * k), query[k], total)
    for tile in range(4):
        part = _zero4()
        for k in range(TILE_STEPS * tile, TILE_STEPS * (tile + 1)):
            part = ops.mfma_bf16(lds.load(key_row, fx.BFloat16, 8, offset=offset + 64 * k), query[k], part)
        total = total + part * _key_scales(spec, lds, scale_keys, tile, 16 * subtile)
    return total


def _key_scales(spec: DecodeSpec, lds, first_key, tile, key_offset):
    """fp32 scales of 4 keys of the tile in LDS, for their values 128 tile .. + 127 (tile: int, or 256 bytes each in ``first_key``)."""
    return lds.load(first_key, fx.Float32, 4, offset=spec.lds.scales + tile * 4 * TILE + key_offset * 4)


def _capped(spec: DecodeSpec, x, scale, logit_cap):
    """Score in units of log 2: x * scale, or the soft cap of it. ``scale`` holds log2(e) unless there is a cap."""
    if not spec.has_cap:
        return x * scale
    # tanh(y) = 1 - 2 / (1 + e^2y); e^2y runs to infinity or 0 at the ends, where the quotient is right. Near 0 the difference cancels,
    # and a large cap would multiply what is lost: there cap * tanh(x / cap) = x * (1 - y^2 / 3 + ...), whatever the cap.
    score = x * scale
    y = score / logit_cap
    square = y * y
    series = fx.Float32(TANH_SERIES[-1])
    for coefficient in TANH_SERIES[-2::-1]:
        series = series * square + coefficient
    tanh = fx.Float32(1.0) - fx.Float32(2.0) * ops.reciprocal(ops.exp2(y * (2 * LOG2_E)) + 1.0)
    return ops.select(square < NEAR_ZERO * NEAR_ZERO, score * series, tanh * logit_cap) * LOG2_E


def _pick(values, index):
    """values[index] for a wave-uniform index."""
    picked = values[0]
    for i in range(1, len(values)):
        picked = ops.select(index == i, values[i], picked)
    return picked


def _score_tile(spec: DecodeSpec, lds, at, query, operands, first_key, maxima):
    """Steps 3 and 4: (which keys this row sees, scores, new maxima, factors that bring older sums to them)."""
    layout = spec.lds
    seen, values = [], []
    for subtile, raw in enumerate(_scores(spec, lds, at.key_row, query, operands, at.score_scales)):
        for element in range(4):
            key = first_key + at.first_score_key + (16 * subtile + element)
            visible = key < at.row_keys
            value = _capped(spec, raw[element], at.scale, at.logit_cap)
            seen.append(visible)
            values.append(ops.select(visible, value, fx.Float32(SENTINEL)))

    peak = values[0]
    for value in values[1:]:
        peak = ops.maximum(peak, value)
    peak = ops.maximum(peak, ops.xor_lanes(peak, 16))
    peak = ops.maximum(peak, ops.xor_lanes(peak, 32))
    lds.store(at.maximum_slot, peak, offset=layout.maxima, align=4)
    ops.barrier()
    peaks = lds.load(at.row16 * 16, fx.Float32, 4, offset=layout.maxima)
    new_maxima, factors = [], []
    for tile in range(spec.row_tiles):
        new = maxima[tile]
        for group in range(spec.key_groups):
            new = ops.maximum(new, peaks[tile * spec.key_groups + group])
        factors.append(ops.exp2(maxima[tile] - new))
        new_maxima.append(new)
    return seen, values, new_maxima, factors


def _probabilities(spec: DecodeSpec, lds, at, chunk):
    """Operand B of the value product for each row tile: terms to multiply one after the other, of 8 probabilities.

    fp8_tile128: a probability times its key's scale for this wave's 128 dims, as the sum of two bf16. Rounded to one, the product
    would lose 8 bits where the probability alone is exact: a sequence of one key would get a rounded scale.
    """
    offset = spec.lds.probabilities
    if not spec.tile_scales:
        return [
            [lds.load(at.probability_row, fx.BFloat16, 8, offset=offset + (2 * tile + chunk) * 1024)] for tile in range(spec.row_tiles)
        ]
    first = lanes.KEYS_PER_CHUNK * chunk
    scales = [_key_scales(spec, lds, at.value_scales, 0, first + 16 * half) for half in range(2)]
    scaled_rows = []
    for tile in range(spec.row_tiles):
        values = []
        for half in range(2):
            p = lds.load(at.probability_row, fx.Float32, 4, offset=offset + (2 * tile + chunk) * 2048 + 16 * half)
            product = p * scales[half]
            values += [product[i] for i in range(4)]
        high = ops.pack_bf16(values)
        kept = high.to(fx.Float32)
        scaled_rows.append([high, ops.pack_bf16([values[i] - kept[i] for i in range(8)])])
    return scaled_rows


def _value_tile(spec: DecodeSpec, lds, at, seen, values, new_maxima, factors, total, accumulators):
    """Steps 5 and 6: the new (total, accumulators)."""
    layout = spec.lds
    own = _pick(new_maxima, at.row_tile)
    total = total * _pick(factors, at.row_tile)
    for subtile in range(spec.row_tiles):
        quad = []
        for element in range(4):
            i = 4 * subtile + element
            p = ops.select(seen[i], ops.exp2(values[i] - own), fx.Float32(0.0))
            total = total + p
            quad.append(p)
        # Subtiles are placed in pairs: chunk = subtile / 2, halves of a slot of 8 probabilities = subtile % 2.
        width = spec.probability_bytes
        place = ((subtile >> 1) * 512 + (subtile & 1) * 4) * width
        stored = V.from_elements(quad, fx.Float32) if spec.tile_scales else ops.pack_bf16(quad)
        lds.store(at.probability_slot, stored, offset=layout.probabilities + place, align=4 * width)
    ops.barrier()

    new_accumulators = []
    for tile in range(spec.row_tiles):
        for block in range(DIM_BLOCKS):
            new_accumulators.append(accumulators[tile * DIM_BLOCKS + block] * factors[tile])
    for chunk in range(TILE // lanes.KEYS_PER_CHUNK):
        probabilities = _probabilities(spec, lds, at, chunk)
        for block in range(DIM_BLOCKS):
            offset = chunk * lanes.KEYS_PER_CHUNK * ROW_BYTES + block * 32
            low = lds.load_transposed(at.value_row, offset=offset)
            high = lds.load_transposed(at.value_row, offset=offset + 16 * ROW_BYTES)
            transposed = low.shuffle(high, list(range(8)))
            for tile in range(spec.row_tiles):
                i = tile * DIM_BLOCKS + block
                for term in probabilities[tile]:
                    new_accumulators[i] = ops.mfma_bf16(transposed, term, new_accumulators[i])
    return total, new_accumulators


# -- writing results ----------------------------------------------------------------------------------------------------


def _row_result(spec: DecodeSpec, maximum, total, accumulators, out_scale):
    """(out values [8 blocks][4], natural-log lse) of this lane's row."""
    empty = total == 0.0
    inverse = ops.reciprocal(total) * out_scale
    zero = fx.Float32(0.0)
    out = [[ops.select(empty, zero, part[element] * inverse) for element in range(4)] for part in accumulators]
    natural = (maximum + ops.log2(total)) * LN_2
    return out, ops.select(empty, fx.Int32(NEGATIVE_INFINITY_BITS).bitcast(fx.Float32), natural)


def make_decode(spec: DecodeSpec):
    """The ``@flyc.jit`` launcher of the decode kernel for ``spec``; arguments as in spec.DECODE_ARGS."""
    layout = spec.lds

    @flyc.kernel(name=spec.name, known_block_size=[NUM_THREADS, 1, 1])
    def kernel(
        q: fx.Int64, kv: fx.Int64, kv_scale: fx.Int64, page_ids: fx.Int64, kv_indptr: fx.Int64, kv_lens: fx.Int64,
        qo_indptr: fx.Int64, zeros: fx.Int64, items: fx.Int64, first_item: fx.Int64, split_counts: fx.Int64,
        num_items: fx.Int64, out: fx.Int64, lse: fx.Int64, partial_out: fx.Int64, partial_lse: fx.Int64,
        kv_page_stride: fx.Int64, kv_token_stride: fx.Int64, scale_page_stride: fx.Int64, scale_token_stride: fx.Int64,
        q_row_stride: fx.Int64, q_head_stride: fx.Int64, out_row_stride: fx.Int64, out_head_stride: fx.Int64,
        max_items: fx.Int32, row_capacity: fx.Int32, total_q: fx.Int32, q_len: fx.Int32, table_stride: fx.Int32,
        num_splits: fx.Int32, split_size: fx.Int32, sm_scale: fx.Float32, logit_cap: fx.Float32, reserved: fx.Int32,
    ):  # fmt: skip
        lds = ops.Lds(layout.size)
        thread = fx.thread_idx.x
        wave = ops.uniform(thread >> 6)
        lane = thread & 63
        row16, group = lanes.mfma_row(lane), lanes.mfma_group(lane)
        row_tile, key_group = wave & (spec.row_tiles - 1), wave // spec.row_tiles

        # -- which work
        block = fx.block_idx.x
        item = ops.umod(block, max_items)
        first_row = ops.udiv(block, max_items) * spec.rows
        sequence, split, split_count, exists = _find_item(
            spec, item, items, first_item, split_counts, num_items, num_splits
        )
        first_query_row, rows_q = _query_rows(spec, qo_indptr, q_len, sequence)
        num_rows = rows_q * spec.num_heads
        kv_len, first_page = kv_length(spec, kv_indptr, kv_lens, table_stride, sequence)
        first, end = _split_range(spec, kv_len, split, split_count, split_size)
        # Keys beyond what the block's last row sees are never touched.
        last_row = ops.minimum(ops.udiv(first_row + (spec.rows - 1), spec.num_heads), rows_q - 1)
        end = ops.minimum(end, _visible_keys(spec, kv_len, rows_q, last_row))
        # From here on some row of the block sees less than another.
        first_hidden = _visible_keys(spec, kv_len, rows_q, ops.udiv(first_row, spec.num_heads))
        in_use = (first_row < num_rows) & (end > first) & (exists != 0)
        tiles = ops.select(in_use, (end - first + (TILE - 1)) >> 6, fx.Int32(0))

        # -- this lane's query row (rows past the last repeat it; they are not stored)
        own_row = first_row + row_tile * 16 + row16
        read_row = ops.minimum(own_row, ops.maximum_int(num_rows - 1, 0))
        query_index = ops.udiv(read_row, spec.num_heads)
        token = ops.minimum(first_query_row + query_index, total_q - 1)
        head = ops.umod(read_row, spec.num_heads)
        query = _load_query(spec, q + ops.widen(token) * q_row_stride + ops.widen(head) * q_head_stride, lane)

        key_scale = staging.key_scale(spec.format, kv_scale)
        scale = sm_scale * key_scale * (1.0 if spec.has_cap else LOG2_E)
        source_row, source_column = lanes.transposed_read_source(lane)
        first_subtile = key_group * spec.row_tiles
        width = spec.probability_bytes
        at = SimpleNamespace(
            wave=wave, group=group, row16=row16, row_tile=row_tile, scale=scale, logit_cap=logit_cap,
            row_keys=_visible_keys(spec, kv_len, rows_q, query_index),
            # LDS offsets of this lane
            key_row=(first_subtile * 16 + row16) * ROW_BYTES + group * 16,
            value_row=(group * 4 + source_row) * ROW_BYTES + source_column * 2 + wave * 256,
            maximum_slot=row16 * 16 + (row_tile * spec.key_groups + key_group) * 4,
            probability_slot=(row_tile * 1024 + (first_subtile >> 1) * 512 + (first_subtile & 1) * 4 + row16 * 32 + group * 8) * width,
            probability_row=(row16 * 32 + group * 8) * width,
            # fp8_tile128: scales of this lane's 4 keys of a subtile; of its keys of a chunk, for the wave's 128 dims
            score_scales=(first_subtile * 16 + group * 4) * 4,
            value_scales=(wave * TILE + group * 4) * 4,
            first_score_key=first_subtile * 16 + group * 4,
        )  # fmt: skip
        # A split ends where the next begins, so no row sees past it.
        at.row_keys = ops.minimum(at.row_keys, end)

        rows = KeyRows(
            spec=spec, thread=thread, kv=kv, kv_scale=kv_scale, zeros=zeros, page_ids=page_ids, first_page=first_page,
            kv_page_stride=kv_page_stride, kv_token_stride=kv_token_stride,
            scale_page_stride=scale_page_stride, scale_token_stride=scale_token_stride, end=end,
        )  # fmt: skip

        maxima = [fx.Float32(SENTINEL) for _ in range(spec.row_tiles)]
        total = fx.Float32(0.0)
        accumulators = [_zero4() for _ in range(spec.row_tiles * DIM_BLOCKS)]
        pages = staging.no_pages(spec)
        held = staging.nothing_held(spec)
        if tiles > 0:
            pages = staging.find_pages(rows, first)
            held = staging.load(rows, pages, first)
            pages = staging.find_pages(rows, first + TILE)

        for index in range(0, tiles, 1):
            first_key = first + fx.Int32(index) * TILE
            operands = staging.write(spec, lds, thread, held)
            ops.barrier()
            if first_key + TILE < end:
                held = staging.load(rows, pages, first_key + TILE)
                pages = staging.find_pages(rows, first_key + 2 * TILE)
            seen, values, maxima, factors = _score_tile(spec, lds, at, query, operands, first_key, maxima)
            if fx.const_expr(spec.hides_keys):  # noqa: SIM102 (one is decided while compiling, the other on the device)
                if first_key + TILE > first_hidden:
                    staging.drop_non_finite(spec, lds, thread)
            total, accumulators = _value_tile(spec, lds, at, seen, values, maxima, factors, total, accumulators)
            ops.barrier()

        # -- sum over lane groups and key groups
        total = total + ops.xor_lanes(total, 16)
        total = total + ops.xor_lanes(total, 32)
        lds.store(at.maximum_slot, total, offset=layout.maxima, align=4)
        ops.barrier()
        sums = lds.load(row16 * 16, fx.Float32, 4, offset=layout.maxima)

        first_dim = wave * 128 + group * 4
        writes_lse = (wave == 0) & (group == 0)
        for tile in fx.range_constexpr(spec.row_tiles):
            row = first_row + (16 * tile + row16)
            row_sum = sums[tile * spec.key_groups]
            for other in fx.range_constexpr(1, spec.key_groups):
                row_sum = row_sum + sums[tile * spec.key_groups + other]
            part = accumulators[tile * DIM_BLOCKS : (tile + 1) * DIM_BLOCKS]
            result, row_lse = _row_result(spec, maxima[tile], row_sum, part, key_scale)
            if (row < num_rows) & (exists != 0):
                if split_count == 1:
                    query_row = first_query_row + ops.udiv(row, spec.num_heads)
                    row_head = ops.umod(row, spec.num_heads)
                    address = (
                        out + ops.widen(query_row) * out_row_stride + ops.widen(row_head) * out_head_stride
                        + ops.widen(first_dim) * 2
                    )  # fmt: skip
                    for b in fx.range_constexpr(DIM_BLOCKS):
                        ops.global_store(address, ops.pack_bf16(result[b]), offset=32 * b, align=4)
                    if writes_lse & (lse != 0):
                        flat_row = ops.widen(query_row) * spec.num_heads + ops.widen(row_head)
                        ops.global_store(lse + flat_row * 4, row_lse)
                else:
                    slot = ops.widen(item) * ops.widen(row_capacity) + ops.widen(row)
                    if writes_lse:
                        ops.global_store(partial_lse + slot * 4, row_lse)
                    # A split without keys is skipped by its lse; its values need not exist.
                    if tiles > 0:
                        address = partial_out + slot * 2048 + ops.widen(first_dim) * 4
                        for b in fx.range_constexpr(DIM_BLOCKS):
                            ops.global_store(address, V.from_elements(result[b], fx.Float32), offset=64 * b, align=16)

    @flyc.jit
    def launch(
        q: fx.Int64, kv: fx.Int64, kv_scale: fx.Int64, page_ids: fx.Int64, kv_indptr: fx.Int64, kv_lens: fx.Int64,
        qo_indptr: fx.Int64, zeros: fx.Int64, items: fx.Int64, first_item: fx.Int64, split_counts: fx.Int64,
        num_items: fx.Int64, out: fx.Int64, lse: fx.Int64, partial_out: fx.Int64, partial_lse: fx.Int64,
        kv_page_stride: fx.Int64, kv_token_stride: fx.Int64, scale_page_stride: fx.Int64, scale_token_stride: fx.Int64,
        q_row_stride: fx.Int64, q_head_stride: fx.Int64, out_row_stride: fx.Int64, out_head_stride: fx.Int64,
        max_items: fx.Int32, row_capacity: fx.Int32, total_q: fx.Int32, q_len: fx.Int32, table_stride: fx.Int32,
        num_splits: fx.Int32, split_size: fx.Int32, sm_scale: fx.Float32, logit_cap: fx.Float32, reserved: fx.Int32, grid: fx.Int32,
    ):  # fmt: skip
        kernel(
            q, kv, kv_scale, page_ids, kv_indptr, kv_lens, qo_indptr, zeros, items, first_item, split_counts, num_items, out, lse,
            partial_out, partial_lse, kv_page_stride, kv_token_stride, scale_page_stride, scale_token_stride, q_row_stride,
            q_head_stride, out_row_stride, out_head_stride, max_items, row_capacity, total_q, q_len, table_stride, num_splits,
            split_size, sm_scale, logit_cap, reserved,
        ).launch(grid=(grid, 1, 1), block=(NUM_THREADS, 1, 1))  # fmt: skip

    return launch

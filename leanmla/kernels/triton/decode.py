"""Split-KV MLA decode attention for every cache format: one program computes one item for one tile of query rows.

Query rows of a sequence are (token, head) pairs, row r = token * num_heads + head; tiles of R rows share a pass over the
keys, so 16 heads and 1 token fill a tile of 16, 20 heads and 3 tokens fill a tile of 64 but for 4 masked rows.

Two orders of the matrix products. In the plain one query rows are on the M side of 16-row instructions (mma.sync, MFMA)::

    S [R rows x BN keys] = Q [R x 576] K^T [576 x BN]      O [R x 512] += P [R x BN] V [BN x 512]

In the swapped one (wgmma) keys are, so that 16 rows cost 16 columns instead of being padded to wgmma's 64 rows::

    S^T [BN x R]         = K [BN x 576] Q^T [576 x R]      O^T [512 x R] += V^T [512 x BN] P^T [BN x R]

V is K read again, from the same shared memory.

Grid: (items * row_tiles,), row tiles of an item next to each other so that they share the keys through L2. A program
beyond the last item exits. An item that is its sequence's only one writes the output; others write partial results
for ``combine``.

In flight, RAW_TILES (bf16, and fp8 formats in the plain order): shared memory holds tiles as stored. e4m3 is decoded, in each
product's own layout, after the fragments are read::

    step i      wait for tile i | copy tile i+2 (asynchronous), read the page id of tile i+4 | QK(i) | softmax(i) | PV(i)

Otherwise registers are the pipeline stage and shared memory holds one decoded tile::

    step i      decode tile i -> shared | issue loads of tile i+1 | QK(i) | softmax(i) | PV(i)

Keys past a range's end are hidden by selecting -inf, never by multiplying, and what stands in for them is finite: zeros,
or a repetition of the last key. Page-table slots past the last key are not read.
"""

# mypy: ignore-errors
import triton
import triton.language as tl

from .formats import decode, e4m3_halves, half_words, hide_rows, load_words, tile_scales
from .plan import find_item, key_range, kv_length, read_item

#: P is stored as 16-bit floats scaled by 2**P_SHIFT, so that fp16's subnormals begin at weights of 2**-24.
P_SHIFT = tl.constexpr(10.0)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def token_rows(
    n,  # first key of the tile
    end,  # end of the range, > 0
    pages_ptr,  # int32: this sequence's page ids (unused for contiguous)
    first_slot,  # int64: slot of key 0 (contiguous)
    stride_page,
    STRIDE_TOKEN: tl.constexpr,  # elements
    UNIT: tl.constexpr,  # stride_page counts this many elements
    BN: tl.constexpr,
    TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,  # PAGE_SIZE is a multiple of BN and n of BN: one page id serves the tile
):
    """Where the tile's rows lie, in elements: (int64 offset of the tile, offsets [BN] in it).

    In page mode rows past the end are the rest of the page, which exists; their offsets are constants. Otherwise rows past
    the end repeat the last key, and no page id past it is read.
    """
    row = tl.arange(0, BN)
    if BN * STRIDE_TOKEN >= 2**31:
        row = row.to(tl.int64)
    if TILE_IN_PAGE:
        page = tl.load(pages_ptr + n // PAGE_SIZE).to(tl.int64)
        first = page * stride_page * UNIT + (tl.zeros([], tl.int64) + n % PAGE_SIZE) * STRIDE_TOKEN
        at = row * STRIDE_TOKEN
    elif TABLE == "contiguous":
        first = (first_slot + n) * STRIDE_TOKEN
        at = tl.minimum(row, end - 1 - n) * STRIDE_TOKEN
    else:
        key = tl.minimum(n + row, end - 1)
        page = tl.load(pages_ptr + key // PAGE_SIZE).to(tl.int64)
        first = tl.zeros([], tl.int64)
        at = page * stride_page * UNIT + (key % PAGE_SIZE).to(tl.int64) * STRIDE_TOKEN
    return first, at


@triton.jit
def load_tile(
    n, end, words_ptr, scale_ptr, pages_ptr, first_slot, stride_page, stride_scale_page,
    FORMAT: tl.constexpr, UNIT: tl.constexpr, BN: tl.constexpr, TABLE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr, STRIDE_TOKEN: tl.constexpr, STRIDE_SCALE: tl.constexpr,
):  # fmt: skip
    """Keys n .. n + BN - 1 as stored; of those past the end, any."""
    base, at = token_rows(n, end, pages_ptr, first_slot, stride_page, STRIDE_TOKEN, UNIT, BN, TABLE, PAGE_SIZE, TILE_IN_PAGE)
    if FORMAT == "mxfp4":
        base_scale, at_scale = token_rows(
            n, end, pages_ptr, first_slot, stride_scale_page, STRIDE_SCALE, 1, BN, TABLE, PAGE_SIZE, TILE_IN_PAGE
        )
        return load_words(words_ptr + base, scale_ptr + base_scale, at, at_scale, FORMAT)
    else:
        return load_words(words_ptr + base, scale_ptr, at, at, FORMAT)


@triton.jit
def load_columns(rows_ptr, FIRST: tl.constexpr, N: tl.constexpr, keep, MASKED: tl.constexpr):
    """Columns FIRST .. FIRST + N - 1 of rows at rows_ptr [BN, 1], zeros in the rows that are not kept."""
    at = rows_ptr + (FIRST + tl.arange(0, N))[None, :]
    if MASKED:
        return tl.load(at, mask=keep[:, None], other=0)
    else:
        return tl.load(at)


@triton.jit
def by_key(v, SWAPPED: tl.constexpr):
    """A vector over keys, to be combined with S."""
    return tl.expand_dims(v, 1 if SWAPPED else 0)


@triton.jit
def by_row(v, SWAPPED: tl.constexpr):
    """A vector over query rows, to be combined with S or O."""
    return tl.expand_dims(v, 0 if SWAPPED else 1)


@triton.jit
def load_queries(q_ptr, token, head, stride_q_token, stride_q_head, used):
    """Query rows (token, head) [R]: latent part [R, 512] and rope part [R, 64], zeros in the rows that are not used."""
    at = q_ptr + (token.to(tl.int64) * stride_q_token + head.to(tl.int64) * stride_q_head)[:, None]
    nope = tl.load(at + tl.arange(0, 512)[None, :], mask=used[:, None], other=0.0)
    rope = tl.load(at + (512 + tl.arange(0, 64))[None, :], mask=used[:, None], other=0.0)
    return nope, rope


@triton.jit
def zero_outputs(R: tl.constexpr, PARTS: tl.constexpr, SWAPPED: tl.constexpr):
    """PARTS accumulators of 512 / PARTS dimensions each."""
    accs = ()
    for _ in tl.static_range(PARTS):
        if SWAPPED:
            accs = accs + (tl.zeros([512 // PARTS, R], tl.float32),)
        else:
            accs = accs + (tl.zeros([R, 512 // PARTS], tl.float32),)
    return accs


@triton.jit
def split2(x):
    """[m, n] -> columns with even and odd index."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def split4(x):
    """[m, n] -> columns with index 0, 1, 2, 3 mod 4."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def chunks4(x):
    """[m, n] -> four [m, n // 4] of consecutive columns."""
    x = tl.permute(tl.reshape(x, [x.shape[0], 2, 2, x.shape[1] // 4]), (0, 3, 1, 2))
    even, odd = tl.split(x)
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def zeroed(xs):
    """Zeros like each of a tuple."""
    ys = ()
    for j in tl.static_range(len(xs)):
        ys = ys + (tl.zeros_like(xs[j]),)
    return ys


@triton.jit
def as_operands(xs, SWAPPED: tl.constexpr):
    """Query rows as the second operand (transposed) or the first."""
    ys = ()
    for j in tl.static_range(len(xs)):
        ys = ys + (tl.trans(xs[j]) if SWAPPED else xs[j],)
    return ys


@triton.jit
def query_operands(nope, rope, FORMAT: tl.constexpr, SWAPPED: tl.constexpr):
    """[R, 512] and [R, 64] -> (latent, rope) operands as tuples, split along d as ``formats.decode`` splits keys."""
    if FORMAT == "mxfp4":
        latent = split4(nope)
        ropes = split4(rope)
    elif FORMAT == "fp8":
        latent = split2(nope)
        ropes = split2(rope)
    elif FORMAT == "fp8_tile128":
        c0, c1, c2, c3 = chunks4(nope)
        latent = split2(c0) + split2(c1) + split2(c2) + split2(c3)
        ropes = (rope,)
    else:
        latent = (nope,)
        ropes = (rope,)
    return as_operands(latent, SWAPPED), as_operands(ropes, SWAPPED)


@triton.jit
def dot_keys(k, q, s, SWAPPED: tl.constexpr):
    """s + K Q^T, or its transpose."""
    if SWAPPED:
        return tl.dot(k, q, s)
    else:
        return tl.dot(q, tl.trans(k), s)


@triton.jit
def dot_all(s, ks, qs, SWAPPED: tl.constexpr):
    """s + the sum of the products of two tuples of operands."""
    for j in tl.static_range(len(ks)):
        s = dot_keys(ks[j], qs[j], s, SWAPPED)
    return s


@triton.jit
def logits(k, r, q, qr, q_lo, qr_lo, scales, latent_factor, zero, FORMAT: tl.constexpr, SPLIT_Q: tl.constexpr, SWAPPED: tl.constexpr):
    """S, to be multiplied by ``factor``."""
    if FORMAT == "fp8_tile128":
        # Operands 2t and 2t + 1 are tile t, whose sum takes its scale.
        s = dot_keys(k[1], q[1], dot_keys(k[0], q[0], zero, SWAPPED), SWAPPED) * by_key(scales[0], SWAPPED)
        for t in tl.static_range(1, 4):
            part = dot_keys(k[2 * t + 1], q[2 * t + 1], dot_keys(k[2 * t], q[2 * t], zero, SWAPPED), SWAPPED)
            s += part * by_key(scales[t], SWAPPED)
        s = s * by_row(latent_factor, SWAPPED)
    else:
        s = dot_all(zero, k, q, SWAPPED)
        if SPLIT_Q:
            s = dot_all(s, k, q_lo, SWAPPED)
    s = dot_all(s, r, qr, SWAPPED)
    if SPLIT_Q:
        s = dot_all(s, r, qr_lo, SWAPPED)
    return s


@triton.jit
def soft_weights(
    s, m, n, bound, factor, cap, lift, BN: tl.constexpr, CAPPED: tl.constexpr, LIFTED: tl.constexpr, SWAPPED: tl.constexpr
):
    """Logits to weights against a running reference: (P * 2**P_SHIFT, factor for old sums [R], new reference [R]).

    The reference is the largest logit, or with LIFTED the largest logit + lift, lift [BN] being log2 of what the weights of
    a key are multiplied with later.
    """
    x = s * by_row(factor, SWAPPED)
    if CAPPED:
        # cap * tanh(y), y = x / cap in natural units. tanh(y) = 1 - 2 / (exp(2 y) + 1) is right at both infinities but
        # cancels near 0, where a series takes over: a large cap must change nothing. Both are good to 4e-7.
        y = x * (1.0 / (cap * LOG2E))
        y2 = y * y
        series = y * (1.0 + y2 * (-0.33333334 + y2 * (0.13333334 - y2 * 0.053968254)))
        x = (cap * LOG2E) * tl.where(tl.abs(y) < 0.2, series, 1.0 - 2.0 / (tl.exp2(y * (2.0 * LOG2E)) + 1.0))
    x = tl.where(by_key(n + tl.arange(0, BN), SWAPPED) < by_row(bound, SWAPPED), x, float("-inf"))
    if LIFTED:
        top = tl.maximum(m, tl.max(x + by_key(lift, SWAPPED), 0 if SWAPPED else 1))
    else:
        top = tl.maximum(m, tl.max(x, 0 if SWAPPED else 1))
    # A row that has seen nothing yet: -inf - 0 keeps its weights 0, -inf - -inf would be NaN.
    reference = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp2(x - by_row(reference - P_SHIFT, SWAPPED)), tl.exp2(m - reference), top


@triton.jit
def log2_of_largest(scales):
    """tile128: log2 of a token's largest scale [BN], at least -64 so that no weight overflows."""
    top = tl.maximum(tl.maximum(tl.abs(scales[0]), tl.abs(scales[1])), tl.maximum(tl.abs(scales[2]), tl.abs(scales[3])))
    return tl.log2(tl.maximum(top, 5.421010862427522e-20))  # 2**-64


@triton.jit
def accumulate(accs, ks, p, alpha, scales, FORMAT: tl.constexpr, SWAPPED: tl.constexpr):
    """O * alpha + P V for each part of d."""
    new = ()
    for j in tl.static_range(len(ks)):
        if FORMAT == "fp8_tile128":
            # A key that a row does not see has weight 0, also if its scale is not finite.
            weights = tl.where(p == 0.0, 0.0, p * by_key(scales[j // 2], SWAPPED)).to(ks[j].dtype)
        else:
            weights = p.to(ks[j].dtype)
        if SWAPPED:
            new = new + (tl.dot(tl.trans(ks[j]), weights, accs[j] * alpha[None, :]),)
        else:
            new = new + (tl.dot(weights, ks[j], accs[j] * alpha[:, None]),)
    return new


@triton.jit
def interleave2(even, odd, SWAPPED: tl.constexpr):
    """Two parts with their d in turns: [n, R] twice -> [2n, R], or [R, n] twice -> [R, 2n]."""
    if SWAPPED:
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 1)), [2 * even.shape[0], even.shape[1]])
    else:
        return tl.reshape(tl.join(even, odd), [even.shape[0], 2 * even.shape[1]])


@triton.jit
def in_order(accs, R: tl.constexpr, FORMAT: tl.constexpr, SWAPPED: tl.constexpr):
    """Parts of d back in order: [512, R] or [R, 512]."""
    if FORMAT == "bf16":
        return accs[0]
    elif FORMAT == "fp8":
        return interleave2(accs[0], accs[1], SWAPPED)
    elif FORMAT == "mxfp4":
        x = tl.join(tl.join(accs[0], accs[1]), tl.join(accs[2], accs[3]))  # [.., .., d % 2, d // 2 % 2]
        if SWAPPED:
            return tl.reshape(tl.permute(x, (0, 3, 2, 1)), [512, R])
        else:
            return tl.reshape(tl.permute(x, (0, 1, 3, 2)), [R, 512])
    else:
        low = tl.join(interleave2(accs[0], accs[1], SWAPPED), interleave2(accs[2], accs[3], SWAPPED))
        high = tl.join(interleave2(accs[4], accs[5], SWAPPED), interleave2(accs[6], accs[7], SWAPPED))
        x = tl.join(low, high)  # [.., .., tile % 2, tile // 2]
        if SWAPPED:
            return tl.reshape(tl.permute(x, (3, 2, 0, 1)), [512, R])
        else:
            return tl.reshape(tl.permute(x, (0, 3, 2, 1)), [R, 512])


@triton.jit
def careful_pass(
    data_ptr, pages_ptr, first_slot, stride_page, start, end, bound, factor, cap, q, qr, q_lo, qr_lo,
    R: tl.constexpr, UNIT: tl.constexpr, TABLE: tl.constexpr, PAGE_SIZE: tl.constexpr, CAPPED: tl.constexpr,
    SPLIT_Q: tl.constexpr, STRIDE_TOKEN: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """bf16: a range once more, with values that are not finite hidden from the rows that do not see their key.

    Only run when the fast pass met one. Small tiles: it need not be fast, and must not cost the fast pass registers.
    """
    BS: tl.constexpr = 16
    m = tl.full([R], float("-inf"), tl.float32)
    l = tl.zeros([R], tl.float32)
    accs = zero_outputs(R, 1, SWAPPED)
    for n in tl.range(start, end, BS, num_stages=1):
        base, at = token_rows(n, end, pages_ptr, first_slot, stride_page, STRIDE_TOKEN, UNIT, BS, TABLE, PAGE_SIZE, False)
        k = tl.load(data_ptr + base + at[:, None] + tl.arange(0, 512)[None, :])
        r = tl.load(data_ptr + base + at[:, None] + (512 + tl.arange(0, 64))[None, :])
        zero = tl.zeros([BS, R] if SWAPPED else [R, BS], tl.float32)
        s = logits((k,), (r,), q, qr, q_lo, qr_lo, (), 0.0, zero, "bf16", SPLIT_Q, SWAPPED)
        p, alpha, m = soft_weights(s, m, n, bound, factor, cap, 0.0, BS, CAPPED, False, SWAPPED)
        l = l * alpha + tl.sum(p, 0 if SWAPPED else 1)
        # Rows that see such a key already have NaN (or infinite) weights from its logit.
        v = tl.where(tl.abs(k.to(tl.float32)) < float("inf"), k, tl.zeros_like(k))
        accs = accumulate(accs, (v,), p, alpha, (), "bf16", SWAPPED)
    return accs, m, l


@triton.jit
def decoded_pass(
    data_ptr, scale_ptr, pages_ptr, first_slot, stride_page, stride_scale_page, start, end, bound, factor, latent_factor, cap,
    q, qr, q_lo, qr_lo, batch,
    FORMAT: tl.constexpr, R: tl.constexpr, PARTS: tl.constexpr, BN: tl.constexpr, UNIT: tl.constexpr, TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr, TILE_IN_PAGE: tl.constexpr, CAPPED: tl.constexpr, SPLIT_Q: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr, STRIDE_SCALE: tl.constexpr, PTX: tl.constexpr, SWAPPED: tl.constexpr,
    HOIST: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """All keys of a range by tiles that are decoded into shared memory: (output parts, reference [R], sum of P [R]).

    CAREFUL: once more, because the fast pass met values that are not finite, which reach rows that do not see their key as
    0 * NaN. Such keys become zeros with a logit of NaN.
    """
    TILED: tl.constexpr = FORMAT == "fp8_tile128"
    m = tl.full([R], float("-inf"), tl.float32)
    accs = zero_outputs(R, PARTS, SWAPPED)
    zero = tl.zeros([BN, R] if SWAPPED else [R, BN], tl.float32)
    sums = zero  # of P, per lane; one exchange at the end
    words_ptr = data_ptr.to(tl.pointer_type(tl.int32))
    last = start + (end - 1 - start) // BN * BN
    raw = load_tile(
        start, end, words_ptr, scale_ptr, pages_ptr, first_slot, stride_page, stride_scale_page,
        FORMAT, UNIT, BN, TABLE, PAGE_SIZE, TILE_IN_PAGE, STRIDE_TOKEN, STRIDE_SCALE,
    )  # fmt: skip
    # One trip, which the machine-code compiler can tell and the tile compiler cannot: inside, the decoded latent is a
    # block argument, and those become operands in shared memory that both products read. Outside, the tile
    # compiler would bring each product's operand into registers by a trip through shared memory of its own.
    # The rope part serves one product and stays outside: a register operand. (In shared memory its space would be
    # reused for P, and ptxas 12.8 then takes the upper half of P's matrix descriptors from an undefined register.)
    one = tl.minimum(tl.maximum(batch, 1), 1)
    for n in tl.range(start, end, BN, num_stages=1, disable_licm=not HOIST):
        if TILE_IN_PAGE and n + BN > end:
            # The rest of the page is not ours, and weight 0 does not hide a NaN.
            raw = hide_rows(raw, n + tl.arange(0, BN) < end)
        k, r = decode(raw, FORMAT, PTX)
        scales = tile_scales(raw, FORMAT)
        if CAREFUL:
            sound = finite_rows(k)
            k = hide_rows(k, sound)
        for i in tl.range(0, one, num_stages=1, disable_licm=not HOIST):
            # i is 0; with it in the address the loads stay here, behind the stores of the decoded tile, whose
            # registers they take over.
            raw = load_tile(
                tl.minimum(n + BN + i * BN, last), end, words_ptr, scale_ptr, pages_ptr, first_slot, stride_page,
                stride_scale_page, FORMAT, UNIT, BN, TABLE, PAGE_SIZE, TILE_IN_PAGE, STRIDE_TOKEN, STRIDE_SCALE,
            )  # fmt: skip
            lift = 0.0
            if TILED:
                lift = log2_of_largest(scales)
            s = logits(k, r, q, qr, q_lo, qr_lo, scales, latent_factor, zero, FORMAT, SPLIT_Q, SWAPPED)
            if CAREFUL:
                s += by_key(tl.where(sound, 0.0, float("nan")), SWAPPED)
            p, alpha, m = soft_weights(s, m, n, bound, factor, cap, lift, BN, CAPPED, TILED, SWAPPED)
            sums = sums * by_row(alpha, SWAPPED) + p
            accs = accumulate(accs, k, p, alpha, scales, FORMAT, SWAPPED)
            # Never used: it makes the operands loop-carried.
            k = zeroed(k)
    return accs, m, tl.sum(sums, 0 if SWAPPED else 1)


@triton.jit
def finite_rows(xs):
    """Which rows of a tuple of [m, n] hold nothing but finite values."""
    worst = tl.max(tl.abs(xs[0].to(tl.float32)).to(tl.int32, bitcast=True), 1)  # ordered like the magnitudes
    for j in tl.static_range(1, len(xs)):
        worst = tl.maximum(worst, tl.max(tl.abs(xs[j].to(tl.float32)).to(tl.int32, bitcast=True), 1))
    return worst < 0x7F800000


@triton.jit
def all_finite(xs):
    """Whether all of a tuple of tensors is finite, as int32."""
    worst = tl.max(tl.abs(xs[0]).to(tl.int32, bitcast=True))  # ordered like the magnitudes, NaN above infinity
    for j in tl.static_range(1, len(xs)):
        worst = tl.maximum(worst, tl.max(tl.abs(xs[j]).to(tl.int32, bitcast=True)))
    return worst < 0x7F800000


# Triton compiles a kernel of its own for arguments that are 1. With a batch of 1 it would see through the loop of one trip in
# decoded_pass: 280 bytes of spills instead of 8 (mxfp4). The others would only multiply the kernels to compile.
@triton.jit(do_not_specialize=["batch", "num_workers", "num_splits", "split_size"])
def decode_kernel(
    out_ptr,  # [total_q, num_heads, 512] bf16 | fp16
    lse_ptr,  # [total_q, num_heads] fp32, natural log
    partial_out_ptr,  # [items, row_tiles, R, 512] fp32
    partial_lse_ptr,  # [items, row_tiles, R] fp32, base 2
    splits_ptr,  # [batch] int32: splits of each sequence; written here unless PLAN == "table"
    first_ptr,  # [batch] int32: number of each sequence's first item; likewise
    items_ptr,  # [items, 2] int32: see plan_kernel (PLAN == "table")
    num_items_ptr,  # [1] int32 (PLAN == "table")
    factors_ptr,  # [32] int32: split_plan.CHUNK_CANDIDATES, then 0
    q_ptr,  # [total_q, num_heads, 576] bf16 | fp16
    data_ptr,  # [num_pages, page_size, W]: bf16, or bytes (fp8, mxfp4, fp8_tile128)
    scale_ptr,  # fp8: fp32 [1]; mxfp4: E8M0 bytes [num_pages, page_size, 18]
    page_ids_ptr,  # csr: [n] int32; block_table: [batch, width] int32
    kv_indptr_ptr,  # [batch+1] int32
    kv_last_ptr,  # [batch] int32
    seqlens_ptr,  # [batch] int32
    qo_indptr_ptr,  # [batch+1] int32 (RAGGED_Q)
    batch,
    num_workers,  # items that run at the same time
    num_splits,  # splits of every sequence (PLAN == "fixed")
    split_size,  # keys of an item (FIXED_SIZE)
    q_len,  # query rows of every sequence (not RAGGED_Q)
    sm_scale,
    logit_cap,
    stride_q_token,
    stride_q_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_page,  # in units of UNIT elements (bf16) or words
    stride_scale_page,  # bytes
    stride_table,
    H: tl.constexpr,
    R: tl.constexpr,  # query rows a tile
    ROW_TILES: tl.constexpr,
    BN: tl.constexpr,  # keys a tile
    FORMAT: tl.constexpr,
    UNIT: tl.constexpr,  # strides are multiples of this many elements or words: tells the compiler that rows are aligned
    STRIDE_TOKEN: tl.constexpr,  # elements or words; constant, so that a tile's rows are constant offsets
    STRIDE_SCALE: tl.constexpr,  # bytes
    TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TILE_IN_PAGE: tl.constexpr,
    RAGGED_Q: tl.constexpr,
    CAUSAL: tl.constexpr,
    MANY_Q: tl.constexpr,  # some sequence may have several query tokens
    CAPPED: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SPLIT_Q: tl.constexpr,  # fp16 queries on bf16 keys: two bf16 terms, hi + lo, hold them exactly
    PLAN: tl.constexpr,  # "fixed" | "inline" | "table"
    FIXED_SIZE: tl.constexpr,
    BATCH_POW2: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SWAPPED: tl.constexpr,  # keys on the M side
    HOIST: tl.constexpr,  # what does not change in the loop over keys may be computed before it
    RAW_TILES: tl.constexpr,  # shared memory holds keys as stored (always with bf16)
    ISA: tl.constexpr,  # NVIDIA: 80, 89 (converts e4m3), for inline PTX; otherwise 0
    PDL: tl.constexpr,  # launched while the plan kernel still runs: wait for its results
    NUM_WARPS: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    pid = tl.program_id(0)
    unit = pid // ROW_TILES
    tile = pid % ROW_TILES

    # -- which item
    if PLAN == "fixed":
        b = unit // num_splits
        split = unit % num_splits
        n_splits = num_splits
    elif PLAN == "inline":
        b, split, n_splits = find_item(
            unit, batch, num_workers, split_size, factors_ptr, kv_indptr_ptr, kv_last_ptr, seqlens_ptr,
            TABLE, PAGE_SIZE, GRANULARITY, FIXED_SIZE, BATCH_POW2,
        )  # fmt: skip
    else:
        if PDL:
            tl.extra.cuda.gdc_wait()
        b, split, n_splits = read_item(unit, batch, items_ptr, num_items_ptr)
    if b >= batch:
        return
    if PLAN == "inline" and (split == 0) & (tile == 0):
        tl.store(splits_ptr + b, n_splits)
        tl.store(first_ptr + b, unit)

    # -- its query rows and keys
    if RAGGED_Q:
        q_first = tl.load(qo_indptr_ptr + b)
        n_tokens = tl.load(qo_indptr_ptr + b + 1) - q_first
    else:
        q_first = b * q_len
        n_tokens = q_len
    if tile * R >= n_tokens * H:
        return
    row = tile * R + tl.arange(0, R)
    token = row // H
    head = row % H
    used = token < n_tokens
    if not SWAPPED:
        # Asked for before the length of the sequence is waited for. (mxfp4's swapped kernel would spill.)
        nope, rope = load_queries(q_ptr, q_first + token, head, stride_q_token, stride_q_head, used)
    kv_len = kv_length(b, True, kv_indptr_ptr, kv_last_ptr, seqlens_ptr, TABLE, PAGE_SIZE)
    start, end = key_range(kv_len, split, n_splits, split_size, GRANULARITY, FIXED_SIZE)
    if CAUSAL:
        bound = tl.where(used, kv_len - n_tokens + token + 1, 0)  # keys below it are visible to the row
    else:
        bound = tl.where(used, kv_len, 0)
    bound = tl.minimum(bound, end)
    end = tl.minimum(end, tl.max(bound, 0))

    m = tl.full([R], float("-inf"), tl.float32)
    l = tl.zeros([R], tl.float32)
    PARTS: tl.constexpr = 1 if FORMAT == "bf16" else (2 if FORMAT == "fp8" else (4 if FORMAT == "mxfp4" else 8))
    PTX: tl.constexpr = ISA > 0
    KEY_FACTOR: tl.constexpr = 1.0 if RAW_TILES and ISA >= 89 else 256.0  # fp8: what a stored value is to its operand's
    accs = zero_outputs(R, PARTS, SWAPPED)
    value_factor = 1.0
    if start < end:
        # -- where the keys are
        pages_ptr = page_ids_ptr
        first_slot = tl.zeros([], tl.int64)
        if TABLE == "csr":
            pages_ptr = page_ids_ptr + tl.load(kv_indptr_ptr + b)
        elif TABLE == "block_table":
            pages_ptr = page_ids_ptr + b.to(tl.int64) * stride_table
        else:
            first_slot = tl.load(kv_indptr_ptr + b).to(tl.int64)

        # -- queries, as operands of the keys' types
        if SWAPPED:
            nope, rope = load_queries(q_ptr, q_first + token, head, stride_q_token, stride_q_head, used)
        factor = tl.full([R], sm_scale * LOG2E, tl.float32)
        latent_factor = factor  # of the latent part of a logit where it differs (tile128)
        if FORMAT == "fp8" or FORMAT == "fp8_tile128":
            # To fp16 by a power of two of the row, so exactly: the row's largest value lands in 2**12 .. 2**13. Its inverse
            # goes into the logits with the keys' 2**8; the values' 2**8 is undone at the end.
            value_factor = KEY_FACTOR
            peak = tl.max(tl.abs(nope.to(tl.float32)), 1)
            if FORMAT == "fp8":
                value_factor = tl.load(scale_ptr) * KEY_FACTOR
                peak = tl.maximum(peak, tl.max(tl.abs(rope.to(tl.float32)), 1))
            exponent = tl.minimum(tl.maximum(peak.to(tl.int32, bitcast=True) >> 23, 13), 253)
            up = ((266 - exponent) << 23).to(tl.float32, bitcast=True)
            latent_factor = ((exponent - 12) << 23).to(tl.float32, bitcast=True) * value_factor
            hi = (nope.to(tl.float32) * up[:, None]).to(tl.float16)
            if FORMAT == "fp8":
                factor = factor * latent_factor
                rope_hi = (rope.to(tl.float32) * up[:, None]).to(tl.float16)
            else:
                rope_hi = rope.to(tl.bfloat16)
        else:
            hi = nope.to(tl.bfloat16)
            rope_hi = rope.to(tl.bfloat16)
        q, qr = query_operands(hi, rope_hi, FORMAT, SWAPPED)
        q_lo, qr_lo = q, qr
        if SPLIT_Q:
            lo = (nope.to(tl.float32) - hi.to(tl.float32)).to(hi.dtype)
            rope_lo = (rope.to(tl.float32) - rope_hi.to(tl.float32)).to(tl.bfloat16)
            q_lo, qr_lo = query_operands(lo, rope_lo, FORMAT, SWAPPED)

        # -- keys
        zero = tl.zeros([BN, R] if SWAPPED else [R, BN], tl.float32)
        sums = zero  # of P, per lane; one exchange at the end
        TILED: tl.constexpr = FORMAT == "fp8_tile128"
        if RAW_TILES:
            for n in tl.range(start, end, BN, num_stages=NUM_STAGES, disable_licm=not HOIST):
                base, at = token_rows(
                    n, end, pages_ptr, first_slot, stride_page, STRIDE_TOKEN, UNIT, BN, TABLE, PAGE_SIZE, TILE_IN_PAGE
                )
                scales = ()
                if TILE_IN_PAGE:
                    # The rest of the page is not ours; asynchronous copies fill with zeros at no cost.
                    keep = n + tl.arange(0, BN) < end
                else:
                    keep = tl.full([BN], True, tl.int1)
                if FORMAT == "bf16":
                    rows_ptr = data_ptr + base + at[:, None]
                    k = (load_columns(rows_ptr, 0, 512, keep, TILE_IN_PAGE),)
                    v = k
                    if SWAPPED:
                        # The rope part as words, so that it becomes a register operand (see below).
                        words = (data_ptr + base).to(tl.pointer_type(tl.int32)) + (at // 2)[:, None]
                        r = (half_words(load_columns(words, 256, 32, keep, TILE_IN_PAGE), tl.bfloat16),)
                    else:
                        r = (load_columns(rows_ptr, 512, 64, keep, TILE_IN_PAGE),)
                else:
                    words_ptr = data_ptr.to(tl.pointer_type(tl.int32)) + base
                    rows_ptr = words_ptr.to(tl.pointer_type(tl.int16)) + (at * 2)[:, None]
                    if TILED:
                        w0 = load_columns(rows_ptr, 0, 64, keep, TILE_IN_PAGE)
                        w1 = load_columns(rows_ptr, 64, 64, keep, TILE_IN_PAGE)
                        w2 = load_columns(rows_ptr, 128, 64, keep, TILE_IN_PAGE)
                        w3 = load_columns(rows_ptr, 192, 64, keep, TILE_IN_PAGE)
                        k = e4m3_halves(w0, False, ISA) + e4m3_halves(w1, False, ISA)
                        k = k + e4m3_halves(w2, False, ISA) + e4m3_halves(w3, False, ISA)
                        v = e4m3_halves(w0, MANY_Q, ISA) + e4m3_halves(w1, MANY_Q, ISA)
                        v = v + e4m3_halves(w2, MANY_Q, ISA) + e4m3_halves(w3, MANY_Q, ISA)
                        r = (load_columns(words_ptr.to(tl.pointer_type(tl.bfloat16)) + (at * 2)[:, None], 264, 64, keep, TILE_IN_PAGE),)
                        factors = words_ptr.to(tl.pointer_type(tl.float32)) + at
                        scales = (
                            tl.load(factors + 128, mask=keep, other=0.0), tl.load(factors + 129, mask=keep, other=0.0),
                            tl.load(factors + 130, mask=keep, other=0.0), tl.load(factors + 131, mask=keep, other=0.0),
                        )  # fmt: skip
                    else:
                        w = load_columns(rows_ptr, 0, 256, keep, TILE_IN_PAGE)
                        k = e4m3_halves(w, False, ISA)
                        v = e4m3_halves(w, MANY_Q, ISA)
                        r = e4m3_halves(load_columns(rows_ptr, 256, 32, keep, TILE_IN_PAGE), False, ISA)
                lift = 0.0
                if TILED:
                    lift = log2_of_largest(scales)
                s = logits(k, r, q, qr, q_lo, qr_lo, scales, latent_factor, zero, FORMAT, SPLIT_Q, SWAPPED)
                p, alpha, m = soft_weights(s, m, n, bound, factor, logit_cap, lift, BN, CAPPED, TILED, SWAPPED)
                sums = sums * by_row(alpha, SWAPPED) + p
                accs = accumulate(accs, v, p, alpha, scales, FORMAT, SWAPPED)
            l = tl.sum(sums, 0 if SWAPPED else 1)
            if FORMAT == "bf16" and MANY_Q and CAUSAL:  # noqa: SIM102 (one is known when compiling, the other when running)
                # A value that is not finite reaches the rows that do not see it as 0 * NaN: look again if one turned up.
                if all_finite(accs) == 0:
                    accs, m, l = careful_pass(
                        data_ptr, pages_ptr, first_slot, stride_page, start, end, bound, factor, logit_cap, q, qr, q_lo, qr_lo,
                        R, UNIT, TABLE, PAGE_SIZE, CAPPED, SPLIT_Q, STRIDE_TOKEN, SWAPPED,
                    )  # fmt: skip
        else:
            accs, m, l = decoded_pass(
                data_ptr, scale_ptr, pages_ptr, first_slot, stride_page, stride_scale_page, start, end, bound, factor,
                latent_factor, logit_cap, q, qr, q_lo, qr_lo, batch, FORMAT, R, PARTS, BN, UNIT, TABLE, PAGE_SIZE, TILE_IN_PAGE,
                CAPPED, SPLIT_Q, STRIDE_TOKEN, STRIDE_SCALE, PTX, SWAPPED, HOIST, False,
            )  # fmt: skip
            if MANY_Q and CAUSAL:  # noqa: SIM102
                if all_finite(accs) == 0:
                    accs, m, l = decoded_pass(
                        data_ptr, scale_ptr, pages_ptr, first_slot, stride_page, stride_scale_page, start, end, bound, factor,
                        latent_factor, logit_cap, q, qr, q_lo, qr_lo, batch, FORMAT, R, PARTS, BN, UNIT, TABLE, PAGE_SIZE,
                        TILE_IN_PAGE, CAPPED, SPLIT_Q, STRIDE_TOKEN, STRIDE_SCALE, PTX, SWAPPED, HOIST, True,
                    )  # fmt: skip

    # -- results; a row that saw nothing has l = 0
    seen = l != 0.0  # NaN counts as seen
    lse2 = tl.where(seen, m + (tl.log2(l) - P_SHIFT), float("-inf"))
    inverse = tl.where(seen, value_factor / tl.where(seen, l, 1.0), 0.0)
    o = in_order(accs, R, FORMAT, SWAPPED) * by_row(inverse, SWAPPED)
    d = tl.arange(0, 512)
    if n_splits == 1:
        out_at = (q_first + token).to(tl.int64) * stride_out_token + head.to(tl.int64) * stride_out_head
        out_at = out_ptr + by_row(out_at, SWAPPED) + by_key(d, SWAPPED)
        tl.store(out_at, o.to(out_ptr.dtype.element_ty), mask=by_row(used, SWAPPED))
        if WRITE_LSE:
            lse_at = (q_first + token).to(tl.int64) * stride_lse_token + head
            tl.store(lse_ptr + lse_at, lse2 / LOG2E, mask=used)
    else:
        slot = (unit.to(tl.int64) * ROW_TILES + tile) * R + tl.arange(0, R)
        tl.store(partial_lse_ptr + slot, lse2)
        if start < end:
            # Of an empty item only the lse is read.
            tl.store(partial_out_ptr + by_row(slot, SWAPPED) * 512 + by_key(d, SWAPPED), o)

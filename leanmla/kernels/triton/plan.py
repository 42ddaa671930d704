"""Split-KV planning on the device: the same integers as ``leanmla.split_plan``, from the lengths the tables hold now.

Two ways in. Where all programs run at once they plan inside the decode kernel: every program reads all lengths and finds its
own item, which costs no launch. Otherwise :func:`plan_kernel` plans, one program, one launch before the decode: the grid has
room for more items than there mostly are, and programs that plan only to find that there is nothing to do come after the work,
wave by wave. Neither is needed where the host may give every sequence the same number of splits (``backend.even_splits``).

Work is counted in *blocks* of ``GRANULARITY`` keys. Items are numbered in sequence order: item ``first[b] + s`` is
split ``s`` of sequence ``b``.
"""

import triton
import triton.language as tl

# Bounds that TritonBackend.why_not checks; they keep everything here in 32 bits (64-bit divisions are calls, and calls in
# the decode kernel cost its loop registers): below 2**22 blocks a sequence, 2**30 blocks a batch, 2**15 splits a sequence.
MAX_SEQ_BLOCKS = 1 << 22
MAX_BATCH_BLOCKS = 1 << 30
MAX_SPLITS = (1 << 15) - 1


@triton.jit
def ceil_div_fast(a, b):
    """ceil(a / b) for 0 <= a < 2**22, b >= 1, in 6 instructions instead of the ~20 of an integer division.

    The fp32 quotient is off by less than 2**-22 * a / b < 1 / b, so truncation gives the floor or, when a / b is an
    integer, one less; the remainder repairs the latter.
    """
    q = (a.to(tl.float32) * (1.0 / b.to(tl.float32))).to(tl.int32)
    return q + ((a - q * b) > 0).to(tl.int32)


@triton.jit
def floor_div_fast(a, b):
    """a // b under the conditions of :func:`ceil_div_fast`."""
    q = (a.to(tl.float32) * (1.0 / b.to(tl.float32))).to(tl.int32)
    return q + ((a - q * b) >= b).to(tl.int32)


@triton.jit
def kv_length(
    b,  # int32 scalar or vector, sequence
    live,  # bool like b: lanes that are sequences
    kv_indptr_ptr,  # [batch+1] int32: pages ("csr") or tokens ("contiguous")
    kv_last_ptr,  # [batch] int32 ("csr")
    seqlens_ptr,  # [batch] int32 ("block_table")
    TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Keys of sequence b."""
    if TABLE == "block_table":
        n = tl.load(seqlens_ptr + b, mask=live, other=0)
    else:
        n = tl.load(kv_indptr_ptr + b + 1, mask=live, other=0) - tl.load(kv_indptr_ptr + b, mask=live, other=0)
        if TABLE == "csr" and PAGE_SIZE > 1:
            last = tl.load(kv_last_ptr + b, mask=live & (n > 0), other=0)
            n = tl.where(n > 0, (n - 1) * PAGE_SIZE + last, 0)
    return n


@triton.jit
def items_of_chunks(blocks, live, chunks):
    """For each candidate chunk [32]: how many items it makes, and blocks of the largest and of the smallest one."""
    splits = tl.maximum(ceil_div_fast(blocks[None, :], chunks[:, None]), 1)
    items = tl.sum(tl.where(live[None, :], splits, 0), 1)
    largest = tl.max(ceil_div_fast(blocks[None, :], splits), 1)
    return items, largest, tl.min(tl.where(live[None, :], floor_div_fast(blocks[None, :], splits), 2147483647), 1)


@triton.jit
def candidate_chunks(factors_ptr, total, longest, num_workers):
    """Chunks [32] from the factors in sixteenths of the ideal share; factor 0 stands for the longest sequence."""
    factor = tl.load(factors_ptr + tl.arange(0, 32))
    # Beyond 2**23 every candidate is the longest sequence; 128 / 16 is the largest factor.
    ideal = tl.minimum((total + num_workers - 1) // num_workers, 1 << 23)
    chunk = tl.minimum(tl.maximum((ideal * factor + 15) // 16, 1), longest)
    return tl.maximum(tl.where(factor == 0, longest, chunk), 1)


@triton.jit
def cheapest_chunk(chunks, items, largest, smallest, total, num_workers):
    """The chunk that ``split_plan.choose_chunk`` takes: see there. An item's overhead counts as one block."""
    unit = largest + 1
    # Above 2**30 the wave holds everything, so its exact size does not matter.
    wave = tl.minimum(unit.to(tl.int64) * num_workers, 1 << 30).to(tl.int32)
    waves = (total + items + (wave - 1)) // wave
    cost = tl.maximum(waves * unit, ((items + num_workers - 1) // num_workers) * (smallest + 1))
    # 32-bit sums here and in find_item: packed into 64 bits they would be fewer, but each of them ten shuffles instead of one
    # instruction, and fp8_tile128 spills 104 bytes instead of 16.
    order = tl.arange(0, 32)
    best = tl.max(tl.where(cost == tl.min(cost, 0), order, -1), 0)  # ties go to the later, larger chunk
    return tl.sum(tl.where(order == best, chunks, 0), 0)


@triton.jit
def choose_chunk(blocks, live, factors_ptr, num_workers):
    """``split_plan.choose_chunk`` for lengths held in one vector."""
    total = tl.sum(blocks, 0)
    longest = tl.max(blocks, 0)
    chunks = candidate_chunks(factors_ptr, total, longest, num_workers)
    # No branch for the common batch of equal lengths: behind one, Triton 3.9 forgets that rows of the cache are aligned and
    # loads keys 2 bytes at a time.
    items, largest, smallest = items_of_chunks(blocks, live, chunks)
    return cheapest_chunk(chunks, items, largest, smallest, total, num_workers)


@triton.jit
def find_item(
    unit,  # int32, item number
    batch,
    num_workers,
    split_size,
    factors_ptr,  # [32] int32
    kv_indptr_ptr,
    kv_last_ptr,
    seqlens_ptr,
    TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GRANULARITY: tl.constexpr,
    FIXED_SIZE: tl.constexpr,  # items of split_size keys (reproducible mode)
    BATCH_POW2: tl.constexpr,  # batch rounded up; all lengths fit one vector
):
    """(sequence, split, splits of the sequence) of item ``unit``; sequence >= batch if there is no such item."""
    lane = tl.arange(0, BATCH_POW2)
    live = lane < batch
    lens = kv_length(lane, live, kv_indptr_ptr, kv_last_ptr, seqlens_ptr, TABLE, PAGE_SIZE)
    if FIXED_SIZE:
        counts = tl.maximum((lens + split_size - 1) // split_size, 1)
    else:
        blocks = (lens + GRANULARITY - 1) // GRANULARITY
        chunk = choose_chunk(blocks, live, factors_ptr, num_workers)
        counts = tl.maximum(ceil_div_fast(blocks, chunk), 1)
    counts = tl.where(live, counts, 0)
    upto = tl.cumsum(counts, 0)
    before = (upto <= unit) & live
    b = tl.sum(before.to(tl.int32), 0)
    s = unit - tl.sum(tl.where(before, counts, 0), 0)
    n = tl.sum(tl.where(lane == b, counts, 0), 0)
    return b, s, n


@triton.jit
def key_range(kv_len, s, n, split_size, GRANULARITY: tl.constexpr, FIXED_SIZE: tl.constexpr):
    """First and end key of split s of n."""
    if FIXED_SIZE:
        start = tl.minimum(s * split_size, kv_len)
        end = tl.minimum(start + split_size, kv_len)
    else:
        blocks = (kv_len + GRANULARITY - 1) // GRANULARITY
        # blocks * s // n, in parts that fit 32 bits.
        each = blocks // n
        rest = blocks - each * n
        start = (each * s + rest * s // n) * GRANULARITY
        end = (each * (s + 1) + rest * (s + 1) // n) * GRANULARITY
        start = tl.minimum(start, kv_len)
        end = tl.minimum(end, kv_len)
    return start, end


@triton.jit(do_not_specialize=["batch", "num_workers", "split_size"])
def plan_kernel(
    splits_ptr,  # [batch] int32 out: items of each sequence
    first_ptr,  # [batch] int32 out: number of its first item
    items_ptr,  # [max_items, 2] int32 out: sequence of each item; its split + splits of the sequence * 2**15
    num_items_ptr,  # [1] int32 out
    kv_indptr_ptr,
    kv_last_ptr,
    seqlens_ptr,
    factors_ptr,  # [32] int32
    batch,
    num_workers,
    split_size,
    TABLE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GRANULARITY: tl.constexpr,
    FIXED_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,  # sequences a step
    ONE_STEP: tl.constexpr,  # batch <= CHUNK: lengths are read once
    PDL: tl.constexpr,  # the decode kernel may be launched now; it waits for the plan itself
):
    """Plan a batch. Grid: one program, which walks the batch in steps of CHUNK sequences."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    lane = tl.arange(0, CHUNK)
    if ONE_STEP:
        live = lane < batch
        lens = kv_length(lane, live, kv_indptr_ptr, kv_last_ptr, seqlens_ptr, TABLE, PAGE_SIZE)
        blocks = (lens + GRANULARITY - 1) // GRANULARITY
        if FIXED_SIZE:
            counts = tl.maximum((lens + split_size - 1) // split_size, 1)
        else:
            counts = tl.maximum(ceil_div_fast(blocks, choose_chunk(blocks, live, factors_ptr, num_workers)), 1)
        write_items(splits_ptr, first_ptr, items_ptr, lane, live, counts, 0)
        tl.store(num_items_ptr, tl.sum(tl.where(live, counts, 0), 0))
    else:
        chunk = 1
        if not FIXED_SIZE:
            total = tl.sum(tl.zeros([CHUNK], tl.int32), 0)
            longest = tl.max(tl.zeros([CHUNK], tl.int32), 0)
            for b0 in range(0, batch, CHUNK):
                live = b0 + lane < batch
                lens = kv_length(b0 + lane, live, kv_indptr_ptr, kv_last_ptr, seqlens_ptr, TABLE, PAGE_SIZE)
                blocks = (lens + GRANULARITY - 1) // GRANULARITY
                total += tl.sum(blocks, 0)
                longest = tl.maximum(longest, tl.max(blocks, 0))
            chunks = candidate_chunks(factors_ptr, total, longest, num_workers)
            items = tl.zeros([32], tl.int32)
            largest = tl.zeros([32], tl.int32)
            smallest = tl.full([32], 2147483647, tl.int32)
            for b0 in range(0, batch, CHUNK):
                live = b0 + lane < batch
                lens = kv_length(b0 + lane, live, kv_indptr_ptr, kv_last_ptr, seqlens_ptr, TABLE, PAGE_SIZE)
                more, most, least = items_of_chunks((lens + GRANULARITY - 1) // GRANULARITY, live, chunks)
                items += more
                largest = tl.maximum(largest, most)
                smallest = tl.minimum(smallest, least)
            chunk = cheapest_chunk(chunks, items, largest, smallest, total, num_workers)
        done = tl.sum(tl.zeros([CHUNK], tl.int32), 0)
        for b0 in range(0, batch, CHUNK):
            live = b0 + lane < batch
            lens = kv_length(b0 + lane, live, kv_indptr_ptr, kv_last_ptr, seqlens_ptr, TABLE, PAGE_SIZE)
            if FIXED_SIZE:
                counts = tl.maximum((lens + split_size - 1) // split_size, 1)
            else:
                counts = tl.maximum(ceil_div_fast((lens + GRANULARITY - 1) // GRANULARITY, chunk), 1)
            write_items(splits_ptr, first_ptr, items_ptr, b0 + lane, live, counts, done)
            done += tl.sum(tl.where(live, counts, 0), 0)
        tl.store(num_items_ptr, done)


@triton.jit
def write_items(splits_ptr, first_ptr, items_ptr, b, live, counts, done):
    """Items of sequences b [CHUNK], which come after the ``done`` items of earlier ones."""
    counts = tl.where(live, counts, 0)
    first = done + tl.cumsum(counts, 0) - counts
    tl.store(splits_ptr + b, counts, mask=live)
    tl.store(first_ptr + b, first, mask=live)
    for s in range(tl.max(counts, 0)):
        tl.store(items_ptr + 2 * (first + s), b, mask=s < counts)
        tl.store(items_ptr + 2 * (first + s) + 1, s + (counts << 15), mask=s < counts)


@triton.jit
def read_item(unit, batch, items_ptr, num_items_ptr):
    """(sequence, split, splits of the sequence) of item ``unit``; sequence = batch if there is no such item."""
    b = tl.load(items_ptr + 2 * unit)
    cut = tl.load(items_ptr + 2 * unit + 1)
    return tl.where(unit < tl.load(num_items_ptr), b, batch), cut & 32767, cut >> 15

// Merging the partial results of one sequence inside the launch that made them, as kernels/hopper/reduction.py does (which see).
//
// Every block of a sequence stores its partial result and counts itself in. Blocks that have nothing else to do wait until all have
// arrived, and each merges its share; if somebody could not wait, or lost patience, the last to arrive merges everything. The low half
// of a counter counts arrivals, the high half those that do not wait; it says to all the same which of the two it is. The order in which
// partial results are added depends on the number of splits alone.
//
// Counters come in two sets after HEADER words; word 0 names the set in use, and a launch zeroes the other.
//
// A partial result is divided by its own denominator and laid out as the summing group holds it, so that stores and loads are whole
// lines: float4 [4 warps][4 row columns j][4 pairs of chunks][32 lanes], in it the values of M rows g, g + 8 of two chunks.
#pragma once
#include "schedule.cuh"

constexpr int HEADER = 4;
constexpr int PATIENCE = 64;  // reads of a counter before a block stops waiting: about 50 us
constexpr int LEFT = 65536;

DEVICE u16* out_row(const Arguments& a, const Segment& s, int row_tile, int row) {
  const int at = row_tile * ROWS + row, token = a.by_heads(at);
  return a.out + (s.q_first + token) * a.out_stride_token + (at - token * a.heads) * a.out_stride_head;
}
DEVICE void store_pair(const Arguments& a, u16* to, float x, float y) {
  const u32 both = Q_IS_FP16 ? pack_f16(x, y) : pack_bf16(x, y);
  if (a.pairs) {
    *(u32*)to = both;
  } else {
    to[0] = (u16)both;
    to[1] = (u16)(both >> 16);
  }
}
DEVICE void store_lse(const Arguments& a, const Segment& s, int row_tile, int row, float lse2) {
  if (a.lse == nullptr) return;
  const int at = row_tile * ROWS + row, token = a.by_heads(at);
  a.lse[(s.q_first + token) * a.lse_stride + (at - token * a.heads)] = lse2 * 0.6931471805599453f;
}

// By one warp of every block, once word 0 was read.
DEVICE void turn_over(const Arguments& a, int turn) {
  int* other = a.counters + HEADER + (1 - turn) * a.num_counters;
  for (int at = blockIdx.x * 32 + lane_index(); at < a.num_counters; at += gridDim.x * 32) other[at] = 0;
  if (lane_index() == 0) {
    if (add_release_acquire(a.counters + 1 + turn, 1) == gridDim.x - 1) {
      a.counters[1 + turn] = 0;
      a.counters[0] = 1 - turn;
    }
  }
}

enum Role { NOTHING = 0, SHARE = 1, EVERYTHING = 2 };

// Count this block in, and wait if it may: by one thread.
DEVICE int count_in(int* counter, int splits, int stay, bool waits) {
  const int step = waits ? 1 : 1 + LEFT, expected = splits + (splits - stay) * LEFT;
  int value = add_release_acquire(counter, step) + step;
  if ((value & (LEFT - 1)) == splits) return value != expected || stay == 0 ? EVERYTHING : waits ? SHARE : NOTHING;
  if (!waits) return NOTHING;
#pragma unroll 1
  for (int tries = 0; (value & (LEFT - 1)) < splits && tries < PATIENCE; tries++) value = load_acquire(counter);
  while ((value & (LEFT - 1)) < splits) {
    const int seen = swap_release_acquire(counter, value, value + LEFT);
    if (seen == value) return NOTHING;
    value = seen;
  }
  return value == expected ? SHARE : NOTHING;
}

// One float4 a thread of the summing group: chunk c = 4 * warp of the layout + j.
template <int PARTS_AT_ONCE>
DEVICE void merge_chunk(const Arguments& a, const Segment& s, const Shares& x, int row_tile, int c) {
  const int thread = threadIdx.x & 127, lane = thread & 31, g = lane >> 2, j = c & 3, pair = thread >> 5;
  const int row = (j >> 1) * 8 + 2 * (lane & 3) + (j & 1);
  float m = MASKED, total = 0.f;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int at = 0; at < x.splits; at += PARTS_AT_ONCE) {  // so many in flight
    float4 part[PARTS_AT_ONCE];
    float lse[PARTS_AT_ONCE];
#pragma unroll
    for (int k = 0; k < PARTS_AT_ONCE; k++) {
      const int split = at + k;
      const i64 slot = split == 0 ? x.first_slot : x.next_slot + (i64)(split - 1) * x.step;
      const bool real = split < x.splits;
      lse[k] = real ? load_other_sm(a.part_lse + slot * ROWS + row) : MASKED;
      part[k] = real ? load_other_sm((const float4*)(a.part_out + slot * (ROWS * LATENT)) + c * 128 + thread) : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float top = m;
#pragma unroll
    for (int k = 0; k < PARTS_AT_ONCE; k++) top = fmaxf(top, lse[k]);
    const float reference = top == MASKED ? 0.f : top, old = exp2_fast(m - reference);
    m = top;
    total *= old;
    sum.x *= old, sum.y *= old, sum.z *= old, sum.w *= old;
#pragma unroll
    for (int k = 0; k < PARTS_AT_ONCE; k++) {
      const float weight = exp2_fast(lse[k] - reference);  // of a part without keys, which holds zeros, 0
      total += weight;
      sum.x = fmaf(weight, part[k].x, sum.x), sum.y = fmaf(weight, part[k].y, sum.y);
      sum.z = fmaf(weight, part[k].z, sum.z), sum.w = fmaf(weight, part[k].w, sum.w);
    }
  }
  if (row >= s.rows) return;
  const float inverse = total == 0.f ? 0.f : reciprocal(total);
  u16* out = out_row(a, s, row_tile, row) + 128 * (c >> 2) + 32 * (g >> 1) + 2 * (g & 1) + 8 * pair;
  store_pair(a, out, sum.x * inverse, sum.y * inverse);
  store_pair(a, out + 4, sum.z * inverse, sum.w * inverse);
  if (c < 4 && pair == 0 && g == 0) store_lse(a, s, row_tile, row, total == 0.f ? MASKED : m + log2_fast(total));
}

// By the summing group, once its partial result is stored; the output is complete when all blocks of the sequence have returned.
DEVICE void meet(const Arguments& a, const Piece& piece, const Segment& s, const Shares& x, u32 shared, int row_tile, int turn) {
  sync_threads(SUMMING, SUMMERS);  // every thread's part is stored before one publishes it
  if ((threadIdx.x & 127) == 0) {
    int* counter = a.counters + HEADER + turn * a.num_counters + s.b * a.tiles + row_tile;
    const bool waits = a.may_wait && s.follow >= piece.end;
    store_u32(shared + AT_PLAN + 120, count_in(counter, x.splits, a.may_wait ? x.stay : 0, waits));
  }
  sync_threads(SUMMING, SUMMERS);
  const int role = load_u32(shared + AT_PLAN + 120);
  if (role == NOTHING) return;
  for (int c = role == SHARE ? x.rank : 0; c < 16; c += role == SHARE ? x.stay : 1)
    if (x.splits <= 4)
      merge_chunk<4>(a, s, x, row_tile, c);
    else
      merge_chunk<PARTS>(a, s, x, row_tile, c);
}

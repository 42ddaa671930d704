// The summing group: probabilities times values, and what becomes of the sum.
//
// Warp w has the values 128 w .. 128 w + 127 of the output of all 16 rows: eight accumulators [16 of the M side, 16 rows], one for each chunk
// of 16 bytes of a value row. Transposed loads bring pairs of values of two keys to a lane, which two byte operations turn into f16:
// an e5m2 number is the upper byte of the same f16 number.
//
//   M row g of chunk t     value 128 w + 32 (g / 2) + 4 t + 2 (g % 2)       M row g + 8: the next value
//   column of a lane       query rows 2 q, 2 q + 1 (registers 0, 1 of M row g; 2, 3 of g + 8), 8 + 2 q, 9 + 2 q (4, 5; 6, 7)
#pragma once
#include "reduction.cuh"

DEVICE void rescale_sums(float (&sum)[8][8], u32 shared, int stage, int lane) {
  if (!load_u32(shared + AT_FLAGS + 4 * stage)) return;
  const u32 at = shared + AT_RESCALE + stage * 64 + 8 * (lane & 3);
  const float2 low = load_f32x2(at), high = load_f32x2(at + 32);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    sum[t][0] *= low.x, sum[t][1] *= low.y, sum[t][2] *= low.x, sum[t][3] *= low.y;
    sum[t][4] *= high.x, sum[t][5] *= high.y, sum[t][6] *= high.x, sum[t][7] *= high.y;
  }
}

// 16 keys of a chunk, from what a transposed load brings for them: [16 values, 16 keys] f16
DEVICE void to_operand(u32 (&x)[4], const u32* pair) {
  x[0] = permute(pair[0], 0, 0x2404), x[1] = pair[0] & 0xFF00FF00u;
  x[2] = permute(pair[1], 0, 0x2404), x[3] = pair[1] & 0xFF00FF00u;
}

DEVICE void add_tile(float (&sum)[8][8], u32 shared, int stage, int warp, int lane) {
  const u32 values = shared + AT_V + stage * V_BYTES + warp * V_PANEL + lane * 128, row = lane & 7;
  const u64 probabilities = descriptor(shared + AT_P, 8 * 128, Swizzle::B128) + stage * (P_BYTES >> 4);
  u32 pairs[2][8];  // of this chunk and the next: keys 0..31, then 32..63
  load_matrices_transposed(pairs[0], values + (row << 4));
  load_matrices_transposed(pairs[0] + 4, values + 32 * 128 + (row << 4));
  rescale_sums(sum, shared, stage, lane);
#pragma unroll
  for (int t = 0; t < 8; t++) {
    if (t < 7) {
      load_matrices_transposed(pairs[(t + 1) & 1], values + (((t + 1) ^ row) << 4));
      load_matrices_transposed(pairs[(t + 1) & 1] + 4, values + 32 * 128 + (((t + 1) ^ row) << 4));
    }
    u32 x[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) to_operand(x[k], pairs[t & 1] + 2 * k);
    products_begin();
#pragma unroll
    for (int k = 0; k < 4; k++) multiply_values(sum[t], x[k], probabilities + 2 * k);
    products_commit();
    products_wait<1>();
  }
  products_wait<0>();
}

// The same segments in the same order as score_segments.
DEVICE void sum_segments(const Arguments& a, const Piece& piece, u32 shared, int row_tile, Segment s, int turn) {
  const int lane = lane_index(), g = lane >> 2, q = lane & 3, warp = warp_index() & 3;
  int n = 0, served = 0;
  for (;;) {
    if (s.rows > 0) {
      float sum[8][8];
#pragma unroll
      for (int t = 0; t < 8; t++)
#pragma unroll
        for (int k = 0; k < 8; k++) sum[t][k] = 0.f;
#pragma unroll 1
      for (int i = s.lo; i < s.hi; i++, n++) {
        barrier_wait(shared + STAGE_FULL + 8 * (n % STAGES), n / STAGES & 1);
        add_tile(sum, shared, n % STAGES, warp, lane);
        __syncwarp();
        if (lane == 0) barrier_arrive(shared + STAGE_EMPTY + 8 * (n % STAGES));
      }

      if (!has_next(a, piece, s)) let_kernel_after_begin();  // only the end of the last segment is left
      // The groups' denominators, each against the reference that it saw last; the highest is the one of `sum`.
      barrier_wait(shared + SUMS_FULL, served & 1);
      float lse[4], inverse[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 at = 4 * ((j >> 1) * 8 + 2 * q + (j & 1));
        float reference[GROUPS], m = NO_REFERENCE, total = 0.f;
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
          reference[k] = load_f32(shared + AT_SUM_REFERENCE + k * 64 + at);
          m = fmaxf(m, reference[k]);
        }
#pragma unroll
        for (int k = 0; k < GROUPS; k++) {
          float part = 0.f;
#pragma unroll
          for (int w = 0; w < 4; w++) part += load_f32(shared + AT_SUMS + (4 * k + w) * 64 + at);
          total += part * exp2_fast(reference[k] - m);
        }
        // a row without keys: 0 and -inf; NaN stays NaN
        inverse[j] = total == 0.f ? 0.f : reciprocal(total) * DENOMINATOR_UNIT;
        lse[j] = total == 0.f ? MASKED : m + DENOMINATOR_SHIFT + log2_fast(total);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared + SUMS_EMPTY);
      served++;

      const Shares shares = shares_of(a, piece, s, row_tile);
      if (shares.splits == 1) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int row = (j >> 1) * 8 + 2 * q + (j & 1), r = (j >> 1) * 4 + (j & 1);
          if (row < s.rows) {
            u16* out = out_row(a, s, row_tile, row) + 128 * warp + 32 * (g >> 1) + 2 * (g & 1);
#pragma unroll
            for (int t = 0; t < 8; t++) store_pair(a, out + 4 * t, sum[t][r] * inverse[j], sum[t][r + 2] * inverse[j]);
            if (warp == 0 && g == 0) store_lse(a, s, row_tile, row, lse[j]);
          }
        }
      } else {
        const i64 slot = shares.rank == 0 ? shares.first_slot : shares.next_slot + (i64)(shares.rank - 1) * shares.step;
        float4* part = (float4*)(a.part_out + slot * (ROWS * LATENT)) + warp * 512 + lane;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int r = (j >> 1) * 4 + (j & 1);
#pragma unroll
          for (int t = 0; t < 8; t += 2)
            part[(j * 4 + t / 2) * 32] = make_float4(sum[t][r] * inverse[j], sum[t][r + 2] * inverse[j], sum[t + 1][r] * inverse[j],
                                                     sum[t + 1][r + 2] * inverse[j]);
          if (warp == 0 && g == 0) a.part_lse[slot * ROWS + (j >> 1) * 8 + 2 * q + (j & 1)] = lse[j];
        }
        meet(a, piece, s, shares, shared, row_tile, turn);
      }
    }
    if (!has_next(a, piece, s)) return;
    s = next_segment(a, piece, row_tile, s);
  }
}

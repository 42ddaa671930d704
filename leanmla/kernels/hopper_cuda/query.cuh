// The query rows of a segment as fp8: each value is the sum of two e4m3 numbers, hi + lo / 16, stacked as 32 rows of the wgmma.
//
// A row's latent and rope parts are scaled apart, by powers of two that bring their largest magnitude to 224 .. 448: a bf16
// value is then hi + lo / 16 exactly unless it is 2^-14 of the largest or less. Parts of very different size would otherwise lose the smaller
// one, since fp8 wgmma keeps about 14 bits of a running sum.
//
// Order of the values inside a panel. Lane q of a quad reads 16 bytes of a cache row, values 32 q .. 32 q + 31 of a panel of 128, and
// expands its word j to two A registers, which wgmma takes for the k positions 4 q .. 4 q + 3 and 16 + 4 q .. of slice j. So value
// 32 q + 8 j + 4 h + i of a panel goes to position 32 j + 16 h + 4 q + i. Likewise 16 q + 8 j + 4 h + i of the rope part, with j < 2.
#pragma once
#include "scales.cuh"
#include "schedule.cuh"

DEVICE float from_16_bits(u32 x) { return Q_IS_FP16 ? from_f16((u16)x) : as_float(x << 16); }

// To the nearest e4m3 number, as fp32. Not by converting there and back, which ptxas before 13.0 compiles wrongly.
DEVICE float round_e4m3(float x) {
  const u32 bits = __float_as_uint(x);
  const float normal = as_float((bits + 0x7FFFF + ((bits >> 20) & 1)) & 0xFFF00000);
  const float subnormal = (x + 24576.f) - 24576.f;  // 1.5 * 2^14 has its last bit at 2^-9
  return fabsf(x) < 0x1p-6f ? subnormal : normal;
}

// 2^k with amax * 2^k in (224, 448]; NaN for an infinite amax
DEVICE float query_factor(float amax) {
  const int exponent = max((int)(__float_as_uint(amax) >> 23) - 127, -110);
  const float factor = as_float((127 + 8 - exponent) << 23);
  if (!(amax < __int_as_float(0x7F800000))) return __int_as_float(0x7FC00000);
  return amax * factor > 448.f ? factor * 0.5f : factor;
}

DEVICE float reciprocal_of_power(float x) { return as_float((254u << 23) - __float_as_uint(x)); }

DEVICE float max_over_warp(float x) {
#pragma unroll
  for (int d = 16; d; d /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, d));
  return x;
}

// Two neighbouring values of a row, which is one of the 16 rows of a panel whose rows have `row_bytes`.
DEVICE void store_query_pair(u32 panel, int row, int row_bytes, int position, u32 swizzle, float a, float b) {
  const u32 at = panel + row * row_bytes + ((position & ~15) ^ (swizzle << 4)) + (position & 15);
  const float ha = round_e4m3(a), hb = round_e4m3(b);
  store_u16(at, pack_e4m3(ha, hb));
  store_u16(at + 16 * row_bytes, pack_e4m3((a - ha) * 16.f, (b - hb) * 16.f));
}

// Rows `warp`, `warp` + WARPS, ... of the 16, in a warp's registers.
template <int WARPS>
struct QueryRows {
  static constexpr int COUNT = (ROWS + WARPS - 1) / WARPS;
  u32 x[COUNT][9];  // values 64 k + 2 lane and the next

  DEVICE void load(const Arguments& a, const Segment& s, int row_tile, int warp) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int row = warp + i * WARPS, at_row = row_tile * ROWS + row, token = a.by_heads(at_row), head = at_row - token * a.heads;
      const u16* q = a.q + (s.q_first + token) * a.q_stride_token + head * a.q_stride_head + 2 * lane_index();
      const bool real = row < min(s.rows, ROWS);
#pragma unroll
      for (int k = 0; k < 9; k++) x[i][k] = !real ? 0 : a.pairs ? *(const u32*)(q + 64 * k) : q[64 * k] | (u32)q[64 * k + 1] << 16;
    }
  }

  DEVICE void convert(const Arguments& a, const Segment& s, u32 shared, int row_tile, int warp) const {
    const int lane = lane_index();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const int row = warp + i * WARPS;
      if (row >= ROWS) break;
      float amax = 0.f;
#pragma unroll
      for (int k = 0; k < 8; k++) amax = fmaxf(amax, fmaxf(fabsf(from_16_bits(x[i][k] & 0xFFFF)), fabsf(from_16_bits(x[i][k] >> 16))));
      const float latent = query_factor(max_over_warp(amax));
      const float rope = query_factor(max_over_warp(fmaxf(fabsf(from_16_bits(x[i][8] & 0xFFFF)), fabsf(from_16_bits(x[i][8] >> 16)))));
#pragma unroll
      for (int k = 0; k < 9; k++) {
        const float factor = k < 8 ? latent : rope;
        const float low = from_16_bits(x[i][k] & 0xFFFF) * factor, high = from_16_bits(x[i][k] >> 16) * factor;
        if (k < 8) {
          const int r = (64 * k + 2 * lane) & 127;
          const int position = ((r >> 3) & 3) * 32 + ((r >> 2) & 1) * 16 + (r >> 5) * 4 + (r & 3);
          store_query_pair(shared + AT_Q + k / 2 * Q_PANEL, row, 128, position, row & 7, low, high);
        } else {
          const int r = 2 * lane;
          const int position = ((r >> 3) & 1) * 32 + ((r >> 2) & 1) * 16 + (r >> 4) * 4 + (r & 3);
          store_query_pair(shared + AT_Q_ROPE, row, 64, position, (row >> 1) & 3, low, high);
        }
      }
      if (lane == 0) {
        store_f32(shared + AT_SCALES + 4 * row, a.scale * SCORE_UNIT * reciprocal_of_power(latent));
        store_f32(shared + AT_SCALES + 4 * (ROWS + row), a.scale * SCORE_UNIT * reciprocal_of_power(rope));
        const int token = a.by_heads(row_tile * ROWS + row);
        const int limit = a.causal ? min(s.kv_len - s.q_count + 1 + token, s.kv_len) : s.kv_len;
        store_u32(shared + AT_LIMITS + 4 * row, row < s.rows ? max(limit, 0) : 0);
        store_f32(shared + AT_REFERENCE + 4 * row, NO_REFERENCE);
      }
    }
    fence_async_proxy();
  }
};

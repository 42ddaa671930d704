// The block scales of a lane's two keys, g and g + 8 of its warp's 16, in the two cache formats that the kernel is compiled for:
//
//   mxfp4_row320   deficits and the token's exponent lie in the row itself, as formats/mxfp4_row320.py has arranged them
//   mxfp4 (OCP)    18 E8M0 bytes a token in a tensor of their own, fetched into the slot behind the rows (scores.cuh). Exponents and
//                  deficits are worked out here, for both keys at a time: key g in the low 16 bits of a register, key g + 8 in the high.
//
// A block's scale is 2^(exponent - deficit). The deficit, 0 to 26 octaves, goes into the e5m2 numbers, the exponent into scores and
// probabilities. OCP blocks further below their token's largest are taken for 26 below. There, latent and rope blocks have exponents of
// their own; of mxfp4_row320 both are the same.
#pragma once
#include "schedule.cuh"

// Of the warp's 16 rows, the one of lane quad g; that of key g + 8 lies eight on. A load of 16 bytes serves two quads at a time: their rows
// must not meet in a bank. 320 bytes apart neighbours do not; 288 bytes apart those two apart do not.
DEVICE int key_of_quad(int g) { return ROWS_ARE_OCP ? (g & 4) | (g & 1) << 1 | (g >> 1 & 1) : g; }

constexpr int EXPANSION = 13;  // e5m2 numbers are the values times 2^13: a deficit of 26 still leaves 0.5 a normal number

// e5m2 bytes of 2^13 times 0, 0.5, 1, 1.5 and 2, 3, 4, 6
__device__ constexpr u32 E5M2(int exponent, int half) { return (u32)((EXPANSION + 15 + exponent) * 4 + 2 * half); }
constexpr u32 SMALL = E5M2(-1, 0) << 8 | E5M2(0, 0) << 16 | E5M2(0, 1) << 24;
constexpr u32 LARGE = E5M2(1, 0) | E5M2(1, 1) << 8 | E5M2(2, 0) << 16 | E5M2(2, 1) << 24;
constexpr u32 SMALL_OCTAVE = 0x04040400, LARGE_OCTAVE = 0x04040404;  // 0 stays 0
static_assert(EXPANSION + 15 - 1 > MAX_DEFICIT, "0.5 with the largest deficit is a normal number");

// The magnitudes of a block by code, with its deficit taken from the exponents.
struct Magnitudes {
  u32 small, large;
};

#if ROWS_ARE_OCP

// Every exponent is at least that, so that all smaller bytes are deficits and 2^(exponent - 127) is a normal number.
constexpr u32 LEAST_EXPONENT = MAX_DEFICIT;
constexpr float SCORE_UNIT = 0x1p-13f;  // what `factor` leaves to the query's scale

// The scales of a tile come to the slot in units of 16 bytes, with what lies between and around them: in one piece (`whole_scales`) if a
// page has 16 rows in one piece and begins at a multiple of 16 bytes, and a token's scales are at most SCALE_ROOM apart. Otherwise each
// token's alone, wherever they are.
DEVICE u32 scale_bytes(u32 before) { return (before + SCALES + 15) & ~15u; }

struct LoneScales {
  const u8* from;
  u32 before, bytes, bytes_of_warp;

  // `row`: the scales of the token that this lane fetches, see fetched_token.
  DEVICE LoneScales(const Arguments& a, const u8* row, int rows) {
    const int lane = lane_index();
    if (a.whole_slots) row += (lane & 15) * (i64)a.scale_token_stride;
    before = (u32)(u64)row & 15;
    from = row - before;
    bytes = scale_bytes(before);  // 32 or 48
    bytes_of_warp = 32 * rows + 16 * __popc(__ballot_sync(~0u, lane < rows && bytes > 32));
  }
  DEVICE void start(int rows, u32 slot, u32 arrived) const {
    const int lane = lane_index();
    if (lane < 16) store_u32(slot + STARTS_AT + 4 * lane, lane * SCALE_ROOM + before);
    __syncwarp();
    if (lane < rows) copy_to_shared(slot + SCALES_AT + lane * SCALE_ROOM, from, bytes, arrived);
  }
};

struct BlockScales {
  u32 below[4];                   // of panels: -1 - deficit
  u32 exponents;                  // E8M0 bytes
  u32 rope_below, rope_exponents;
  u32 rope_front;                 // `rope_below` until the last use of the tile before is over

  DEVICE static u32 pair(u32 first, u32 second) { return permute(first, second, 0x7410); }
  DEVICE static u32 deficits(u32 byte, u32 exponent) { return add_max_s16x2(byte, ~exponent, (u32)(~MAX_DEFICIT & 0xFFFF) * 0x10001u); }
  DEVICE static int half(u32 x, int h) { return h ? (int)x >> 16 : (int)(short)x; }
  DEVICE static float power(u32 exponents, int h) {  // 2^(byte - 127), NaN for 255
    const float x = as_float(h ? (exponents & 0xFFFF0000u) << 7 : exponents << 23);
    return fmaf(x, 0.f, x);
  }

  // Of the rows `key` and `key` + 8 of a slot.
  DEVICE void load_front(const Arguments& a, u32 slot, int key, int q) {
    u32 first = slot + SCALES_AT, second = first;
    if (a.whole_scales) {
      first += key * a.scale_token_stride;
      second = first + 8 * a.scale_token_stride;
    } else {
      __syncwarp();
      first += load_u32(slot + STARTS_AT + 4 * key), second += load_u32(slot + STARTS_AT + 4 * key + 32);
    }
#pragma unroll
    for (int p = 0; p < 4; p++) below[p] = pair(load_u8(first + q + 4 * p), load_u8(second + q + 4 * p));
    rope_front = pair(load_u8(first + 16 + (q >> 1)), load_u8(second + 16 + (q >> 1)));
    exponents = max_u16x2(max_u16x2(below[0], below[1]), max_u16x2(below[2], below[3]));
    exponents = max_u16x2(exponents, LEAST_EXPONENT * 0x10001u);
#pragma unroll
    for (int d = 1; d < 4; d *= 2) exponents = max_u16x2(exponents, __shfl_xor_sync(~0u, exponents, d));
#pragma unroll
    for (int p = 0; p < 4; p++) below[p] = deficits(below[p], exponents);
    rope_exponents = max_u16x2(rope_front, LEAST_EXPONENT * 0x10001u);
    rope_exponents = max_u16x2(rope_exponents, __shfl_xor_sync(~0u, rope_exponents, 2));
    rope_front = deficits(rope_front, rope_exponents);
  }
  DEVICE void load_back(u32, int) { rope_below = rope_front; }
  // Whatever was read for key h, its scores are 0. Every code stands for something finite.
  DEVICE void forget(int h) {
    exponents &= h ? 0xFFFFu : 0xFFFF0000u;
    rope_exponents &= h ? 0xFFFFu : 0xFFFF0000u;
  }

  DEVICE static Magnitudes magnitudes(int n) {
    return {SMALL + SMALL_OCTAVE + (u32)n * SMALL_OCTAVE, LARGE + LARGE_OCTAVE + (u32)n * LARGE_OCTAVE};
  }
  DEVICE Magnitudes latent(int p, int h) const { return magnitudes(half(below[p], h)); }
  DEVICE Magnitudes rope(int h, int) const { return magnitudes(half(rope_below, h)); }
  // Exponent of key h less 140: 127 is the bias of E8M0, 13 that of the expansion.
  DEVICE float exponent(int h) const { return (float)(int)(h ? exponents >> 16 : exponents & 0xFFFF) - (127.f + EXPANSION); }
  DEVICE float factor(int h, float) const { return power(exponents, h); }
  DEVICE float rope_factor(int h, float) const { return power(rope_exponents, h); }
};

// A score from its two sums of products.
DEVICE float join_score(float latent, float rope, float latent_scale, float rope_scale, float factor, float rope_factor) {
  return fmaf(rope * rope_scale, rope_factor, latent * latent_scale * factor);
}

#else

static_assert(EXPONENT_AT == DEFICITS_AT + 18, "one word has the rope deficits and the reference exponent");
static_assert(DEFICIT_UNIT == 4, "stored deficits are subtracted from e5m2 exponents as they are");
constexpr float SCORE_UNIT = 1.f;

DEVICE u32 scale_bytes(u32) { return 0; }

struct LoneScales {  // they come with the rows
  static constexpr u32 bytes_of_warp = 0;
  DEVICE LoneScales(const Arguments&, const u8*, int) {}
  DEVICE void start(int, u32, u32) const {}
};

struct BlockScales {
  u32 deficits[2], heads[2];  // of the blocks of panels 0..3; of the rope blocks, with the exponent

  // Of the rows `key` and `key` + 8 of a slot.
  DEVICE void load_front(const Arguments&, u32 slot, int key, int q) {
#pragma unroll
    for (int h = 0; h < 2; h++) deficits[h] = load_u32(slot + (key + 8 * h) * ROW_BYTES + DEFICITS_AT + 4 * q);
  }
  DEVICE void load_back(u32 slot, int key) {
#pragma unroll
    for (int h = 0; h < 2; h++) heads[h] = load_u32(slot + (key + 8 * h) * ROW_BYTES + DEFICITS_AT + 16);
  }
  // Whatever was read for key h: with deficit 0 every code stands for something finite.
  DEVICE void forget(int h) { deficits[h] = heads[h] = 0; }

  DEVICE static Magnitudes magnitudes(u32 deficit) { return {SMALL - deficit * (SMALL_OCTAVE / 4), LARGE - deficit * (LARGE_OCTAVE / 4)}; }
  DEVICE Magnitudes latent(int p, int h) const { return magnitudes(permute(deficits[h], 0, 0x4440 | p)); }
  DEVICE Magnitudes rope(int h, int q) const { return magnitudes(permute(heads[h], 0, 0x4440 | (q >> 1))); }
  // Exponent of key h less 140: 127 is the bias of E8M0, 13 that of the expansion.
  DEVICE float exponent(int h) const {
    const u32 byte = permute(heads[h], 0, 0x4442);
    return byte == 255 ? __int_as_float(0x7FC00000) : (float)(int)byte - (127.f + EXPANSION);
  }
  DEVICE float factor(int, float exponent) const { return exp2_fast(exponent); }
  DEVICE float rope_factor(int, float) const { return 1.f; }  // the same as `factor`, applied to both
};

DEVICE float join_score(float latent, float rope, float latent_scale, float rope_scale, float factor, float) {
  return fmaf(rope, rope_scale, latent * latent_scale) * factor;
}

#endif

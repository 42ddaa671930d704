// The scoring groups: cache rows to scores, probabilities and values for the summing group.
//
// A group of four warps has a tile of 64 keys at a time, each warp 16 of them, two a thread: keys g and g + 8, with g = lane / 4 (of OCP rows
// key_of_quad(g) in place of g; where values and probabilities of a key lie in shared memory goes by g). A warp
// fetches its own rows, and waits only for them. Of a row, lane q = lane % 4 of a quad has 16 bytes of each panel of 128 values.
//
//   cache row -> registers -> e5m2 ----> A registers of wgmma: scores^T [64 keys, 16 rows hi | lo]
//                                \----> the same registers as the tile of values in shared memory
//
// In a tile's time a warp has in flight: the row fetch for its next tile (from the moment the last byte is in registers), up to four
// products, and the first half of the next tile's bytes.
//
// Exponents. With e the reference exponent of a key's row less 140 (127 is the bias of E8M0, 13 that of the expansion),
//     score s = 2^e * products,   probability for the values P = 2^(s + e - m),   for the denominator 2^(s - m - 30)
// so the values need no scaling by e. 30 centres what fp32 can hold: rows of any exponent up to 216 can be mixed with rows of zeros. With OCP
// scales it is 11: there exponents go from 26 up to 254, and a sum must neither overflow at the lower end nor lose its terms at the upper.
//
// The reference m is one for the whole block and rises only where a score exceeds it by 8 (P is f16, exact to 2^8 times that), so
// nearly always a tile needs no maximum over its keys. With several groups it is handed from tile to tile, from group to group, in order.
//
// fp8 wgmma keeps about 14 bits of a running sum, an error of 1e-3 of a score. A tile with scores that are so large that this shows, and
// that matter, has all its scores computed again, by f16 products from the values just stored, with fp32 sums.
#pragma once
#include "query.cuh"
#include "scales.cuh"
#include "schedule.cuh"

constexpr float HEADROOM = 8.f;
constexpr float DENOMINATOR_SHIFT = ROWS_ARE_OCP ? 11.f : 30.f;
constexpr float DENOMINATOR_UNIT = ROWS_ARE_OCP ? 0x1p-11f : 0x1p-30f;  // 2^-shift
constexpr float ROUGH_SCORE = 12.f;  // above, fp8 sums are too rough: 14 bits leave an error of about 1e-3 of a score
constexpr float FAR_BELOW = 24.f;    // a key so far below the reference does not matter

// Eight values of a word as e5m2 with signs, 0..3 and 4..7: seven instructions where the format has put the signs in place, nine of OCP.
DEVICE void expand(u32 word, const Magnitudes& m, u32& low, u32& high) {
  const u32 codes = word & 0x77777777u, shifted = word << 4;
  const u32 low_signs = ROWS_ARE_OCP ? permute(shifted, word, 0x5140) : word;  // at the tops of bytes
  const u32 high_signs = ROWS_ARE_OCP ? permute(shifted, word, 0x7362) : shifted;
  low = permute(m.small, m.large, codes) | (low_signs & 0x80808080u);
  high = permute(m.small, m.large, codes >> 16) | (high_signs & 0x80808080u);
}

// -- fetching rows ----------------------------------------------------------------------------------------------------------

// Token of a segment's sequence that this lane fetches: the first of the warp's 16 if they are one piece, else one each.
DEVICE int fetched_token(const Arguments& a, int tile, int warp) {
  return tile * KEYS + 16 * warp + (a.whole_slots ? 0 : lane_index() & 15);
}

// The page id for a fetch, asked for a tile earlier. Never past the sequence's last key.
DEVICE int page_id(const Arguments& a, const Segment& s, int tile, int warp) {
  const int token = fetched_token(a, tile, warp);
  if (a.kind == CONTIGUOUS || token >= s.kv_len) return 0;
  return a.ids[s.first_id + a.by_page_size(token)];
}

// Start copying this warp's rows of a tile, and the scales of the OCP format. Rows past the end are not read, and keep what they held.
DEVICE void fetch_rows(const Arguments& a, const Segment& s, int tile, int warp, int id, u32 slot, u32 arrived) {
  const int lane = lane_index(), token = fetched_token(a, tile, warp);
  const int rows = min(max(s.kv_len - (tile * KEYS + 16 * warp), 0), 16);
  const u8 *from = a.cache, *scales = a.scales;
  if (a.kind == CONTIGUOUS) {
    from += (s.first_id + token) * a.token_stride;
    if (ROWS_ARE_OCP) scales += (s.first_id + token) * a.scale_token_stride;
  } else {
    const int in_page = token - a.by_page_size(token) * a.page_size;
    from += (i64)id * a.page_stride + (i64)in_page * a.token_stride;
    if (ROWS_ARE_OCP) scales += (i64)id * a.scale_page_stride + (i64)in_page * a.scale_token_stride;
  }
  if (ROWS_ARE_OCP && a.whole_scales) {  // then the rows are one piece too
    if (lane == 0) {
      const u32 bytes = rows > 0 ? scale_bytes((rows - 1) * a.scale_token_stride) : 0;
      barrier_arrive_expecting(arrived, rows * ROW_BYTES + bytes);
      if (rows > 0) {
        copy_to_shared(slot, from, rows * ROW_BYTES, arrived);
        copy_to_shared(slot + SCALES_AT, scales, bytes, arrived);
      }
    }
    return;
  }
  const LoneScales piece(a, scales, rows);
  if (lane == 0) barrier_arrive_expecting(arrived, rows * ROW_BYTES + piece.bytes_of_warp);
  if (a.whole_slots) {
    if (lane == 0 && rows > 0) copy_to_shared(slot, from, rows * ROW_BYTES, arrived);
  } else {
    __syncwarp();
    if (lane < rows) copy_to_shared(slot + lane * ROW_BYTES, from, ROW_BYTES, arrived);
  }
  piece.start(rows, slot, arrived);
}

// -- scoring ------------------------------------------------------------------------------------------------------------------

// cap * tanh(x / cap) for s = x log2(e). 1 - 2 / (exp(2 r) + 1) is right at both infinities and keeps NaN, but cancels near 0, where a
// series takes over: a large cap must change nothing. Both are good to 4e-7.
DEVICE float cap_score(const Arguments& a, float s) {
  if (!HAS_CAP) return s;
  const float r = s * a.cap_inverse, square = r * r;
  const float series = fmaf(square, fmaf(square, fmaf(square, 62.f / 2835, -17.f / 315), 2.f / 15), -1.f / 3);
  const float large = a.cap * (1.f - 2.f * reciprocal(exp2_fast(r * 2.885390081777927f) + 1.f));
  return fabsf(r) < 0.25f ? fmaf(s, square * series, s) : large;
}

// Add 32 positions of two keys and both query halves to sums [2 of 8 rows][2 keys][2 rows], by f16 products: x as for multiply_scores,
// `row` where query row g begins, `row_8` row g + 8, of which lo lies 16 rows on.
DEVICE void add_precisely(float (&sum)[8], const u32* x, u32 row, u32 row_8, u32 chunk, u32 swizzle, u32 lo) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const u32 at = chunk + 16 * half ^ swizzle;
    u32 a[4], b[4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      a[h] = permute(x[2 * half + h], 0, 0x1404), a[2 + h] = permute(x[2 * half + h], 0, 0x3424);
      const u32 hi_bytes = load_u32((h ? row_8 : row) + at), lo_bytes = load_u32((h ? row_8 : row) + lo + at);
#pragma unroll
      for (int i = 0; i < 2; i++)  // hi + lo / 16 is the query's value itself
        b[2 * h + i] = multiply_add_f16x2(unpack_e4m3((u16)(lo_bytes >> 16 * i)), 0x2C002C00u, unpack_e4m3((u16)(hi_bytes >> 16 * i)));
    }
    multiply_by_warp(sum, a, b);
  }
}

// All segments of the piece from `s` on, which this warp fetches the first rows of, with `id` the page of the next. If `s` has rows at all,
// its query is converted.
DEVICE void score_segments(const Arguments& a, const Piece& piece, u32 shared, int row_tile, Segment s, int id) {
  const int lane = lane_index(), g = lane >> 2, q = lane & 3;
  const int warp = warp_index() & 3, group = warp_index() >> 2;
  const u32 slot = shared + AT_RAW + (4 * group + warp) * SLOT_BYTES, arrived = shared + RAW_ARRIVED + 8 * (4 * group + warp);
  const int key = 16 * warp + key_of_quad(g);  // of a tile; the other of this lane is key + 8
  const u32 row = slot + key_of_quad(g) * ROW_BYTES;
  // chunk c = 2 word + half of a value row lies at chunk c ^ (key % 8); adding 4 q picks this lane's four values
  const u32 value_at = shared + AT_V + (16 * warp + g) * 128 + (g << 4) + 4 * q;
  const u32 probability_at = shared + AT_P + ((lane & 7) + 8 * (lane >> 4)) * 128 + (((2 * warp + ((lane >> 3) & 1)) ^ (lane & 7)) << 4);
  const u64 query = descriptor(shared + AT_Q, 8 * 128, Swizzle::B128), query_rope = descriptor(shared + AT_Q_ROPE, 8 * 64, Swizzle::B64);
  u32 raw_parity = 0;
  int tiles_before = 0, served = 0;
  bool converted = s.rows > 0;

  for (;;) {
    if (s.rows > 0) {
      if (!converted) {
        QueryRows<SCORERS / 32> rows;
        rows.load(a, s, row_tile, warp_index());
        sync_threads(SCORING, SCORERS);  // every group is done with the last query
        rows.convert(a, s, shared, row_tile, warp_index());
        sync_threads(SCORING, SCORERS);
      }
      converted = false;
      float m[4], sum[4];  // query rows 2 q, 2 q + 1, 8 + 2 q, 9 + 2 q
#pragma unroll
      for (int j = 0; j < 4; j++) m[j] = NO_REFERENCE, sum[j] = 0.f;
      const int seen_by_all = load_u32(shared + AT_LIMITS);

      BlockScales scales;
      uint4 words[4][2];          // of panels and keys
      uint2 rope_words[2];
      bool have_front = false;
      const auto load_front = [&] {
        scales.load_front(a, slot, key_of_quad(g), q);
#pragma unroll
        for (int p = 0; p < 2; p++)
#pragma unroll
          for (int h = 0; h < 2; h++) words[p][h] = load_u32x4(row + h * 8 * ROW_BYTES + p * 64 + q * 16);
      };
      const auto load_back = [&] {
#pragma unroll
        for (int p = 2; p < 4; p++)
#pragma unroll
          for (int h = 0; h < 2; h++) words[p][h] = load_u32x4(row + h * 8 * ROW_BYTES + p * 64 + q * 16);
#pragma unroll
        for (int h = 0; h < 2; h++) rope_words[h] = load_u32x2(row + h * 8 * ROW_BYTES + LATENT / 2 + q * 8);
        scales.load_back(slot, key_of_quad(g));
      };

#pragma unroll 1
      for (int i = s.lo + group; i < s.hi; i += GROUPS) {
        const u32 n = tiles_before + i - s.lo, stage = n % STAGES;
        if (!have_front) {
          barrier_wait(arrived, raw_parity);
          raw_parity ^= 1;
          load_front();
        }
        if (!ROWS_ARE_OCP) load_back();
        if (i * KEYS + KEYS > s.kv_len) {
          // A row past the end holds anything: its values must be finite, since its probability is 0.
#pragma unroll
          for (int h = 0; h < 2; h++)
            if (i * KEYS + key + 8 * h >= s.kv_len) scales.forget(h);
        }
        barrier_wait(shared + STAGE_EMPTY + 8 * stage, (n / STAGES & 1) ^ 1);

        // products with hi, then with lo: [2 of 8 rows][2 keys][2 rows]
        float latent[16], rope[16];
        const u32 to = value_at + stage * V_BYTES;
#pragma unroll
        for (int p = 0; p < 4; p++) {
          if (p == 1) {
            if (ROWS_ARE_OCP) load_back();  // this late, or registers do not suffice
            __syncwarp();  // the whole slot is in registers
            if (i + GROUPS < s.hi) {
              fetch_rows(a, s, i + GROUPS, warp, id, slot, arrived);
              id = page_id(a, s, i + 2 * GROUPS, warp);
            }
          }
          const Magnitudes first = scales.latent(p, 0), second = scales.latent(p, 1);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            u32 x[4];
            expand(((const u32*)&words[p][0])[j], first, x[0], x[2]);
            expand(((const u32*)&words[p][1])[j], second, x[1], x[3]);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              store_u32((to ^ (j * 32)) + p * V_PANEL + h * 8 * 128, x[h]);
              store_u32((to ^ (j * 32 + 16)) + p * V_PANEL + h * 8 * 128, x[2 + h]);
            }
            products_begin();
            multiply_scores(latent, x, query + ((p * Q_PANEL + j * 32) >> 4), p + j > 0);
            products_commit();
            products_wait<3>();
          }
        }
        {
          u32 x[2][4];
          const Magnitudes first = scales.rope(0, q), second = scales.rope(1, q);
          expand(rope_words[0].x, first, x[0][0], x[0][2]);
          expand(rope_words[1].x, second, x[0][1], x[0][3]);
          expand(rope_words[0].y, first, x[1][0], x[1][2]);
          expand(rope_words[1].y, second, x[1][1], x[1][3]);
          products_begin();
          multiply_scores(rope, x[0], query_rope, false);
          multiply_scores(rope, x[1], query_rope + 2, true);
          products_commit();
        }

        float e[2], factor[2], rope_factor[2];
#pragma unroll
        for (int h = 0; h < 2; h++) {
          e[h] = scales.exponent(h);
          factor[h] = scales.factor(h, e[h]);
          rope_factor[h] = scales.rope_factor(h, e[h]);
        }
        float scale[2][4];
#pragma unroll
        for (int k = 0; k < 2; k++) {
          const float2 low = load_f32x2(shared + AT_SCALES + 4 * (k * ROWS + 2 * q)), high = load_f32x2(shared + AT_SCALES + 4 * (k * ROWS + 8 + 2 * q));
          scale[k][0] = low.x, scale[k][1] = low.y, scale[k][2] = high.x, scale[k][3] = high.y;
        }
        have_front = i + GROUPS < s.hi && __all_sync(~0u, barrier_passed(arrived, raw_parity));
        if (have_front) {
          raw_parity ^= 1;
          load_front();
        }
        products_wait<0>();

        float score[8], v[8];  // [2 of 8 rows][2 keys][2 rows]
        bool precise_enough = true;
#pragma unroll
        for (int k = 0; k < 8; k++) {
          const int h = k >> 1 & 1, j = (k >> 2) * 2 + (k & 1);
          score[k] = join_score(fmaf(latent[8 + k], 0.0625f, latent[k]), fmaf(rope[8 + k], 0.0625f, rope[k]), scale[0][j], scale[1][j], factor[h],
                                rope_factor[h]);
          precise_enough &= !(fabsf(score[k]) > ROUGH_SCORE && (HAS_CAP || score[k] + e[h] > m[j] - FAR_BELOW));
        }
        if (__builtin_expect(!__all_sync(~0u, precise_enough), 0)) {
          float all[8] = {}, rope_only[8] = {};
#pragma unroll 1
          for (int p = 0; p < 4; p++)
#pragma unroll 1
            for (int j = 0; j < 4; j++) {
              u32 x[4];
#pragma unroll
              for (int h = 0; h < 2; h++) {
                x[h] = load_u32((to ^ (j * 32)) + p * V_PANEL + h * 8 * 128);
                x[2 + h] = load_u32((to ^ (j * 32 + 16)) + p * V_PANEL + h * 8 * 128);
              }
              const u32 query_row = shared + AT_Q + p * Q_PANEL + g * 128 + 4 * q;
              add_precisely(all, x, query_row, query_row + 8 * 128, j * 32, g << 4, 16 * 128);
            }
          const Magnitudes first = scales.rope(0, q), second = scales.rope(1, q);
          const u32 query_row = shared + AT_Q_ROPE + g * 64 + 4 * q;
#pragma unroll
          for (int j = 0; j < 2; j++) {
            u32 x[4];
            expand(j ? rope_words[0].y : rope_words[0].x, first, x[0], x[2]);
            expand(j ? rope_words[1].y : rope_words[1].x, second, x[1], x[3]);
            add_precisely(rope_only, x, query_row, query_row + 8 * 64, j * 32, (g >> 1) << 4, 16 * 64);
          }
#pragma unroll
          for (int k = 0; k < 8; k++) {
            const int h = k >> 1 & 1, j = (k >> 2) * 2 + (k & 1);
            score[k] = join_score(all[k], rope_only[k], scale[0][j], scale[1][j], factor[h], rope_factor[h]);
          }
        }
#pragma unroll
        for (int k = 0; k < 8; k++) {
          score[k] = cap_score(a, score[k]);
          v[k] = score[k] + e[k >> 1 & 1];
        }
        if (i * KEYS + KEYS > seen_by_all) {  // by selection: what is masked may be NaN
          const uint2 low = load_u32x2(shared + AT_LIMITS + 8 * q), high = load_u32x2(shared + AT_LIMITS + 32 + 8 * q);
          const int limit[4] = {(int)low.x, (int)low.y, (int)high.x, (int)high.y};
#pragma unroll
          for (int k = 0; k < 8; k++)
            if (i * KEYS + key + 8 * (k >> 1 & 1) >= limit[(k >> 2) * 2 + (k & 1)]) score[k] = v[k] = MASKED;
        }
        float top[4];
#pragma unroll
        for (int j = 0; j < 4; j++) top[j] = fmaxf(v[(j >> 1) * 4 + (j & 1)], v[(j >> 1) * 4 + 2 + (j & 1)]);

        // In order of tiles: the reference so far, and whether this tile raises it.
        float now[4] = {m[0], m[1], m[2], m[3]};
        if (GROUPS > 1) {
          if (i > s.lo) sync_threads(TURN + group, 256);
          const float2 low = load_f32x2(shared + AT_REFERENCE + 8 * q), high = load_f32x2(shared + AT_REFERENCE + 32 + 8 * q);
          now[0] = low.x, now[1] = low.y, now[2] = high.x, now[3] = high.y;
        }
        bool raise = false;
#pragma unroll
        for (int j = 0; j < 4; j++) raise |= top[j] > now[j] + HEADROOM;
        raise = any_of_threads(GROUP + group, 128, raise);
        if (raise) {
#pragma unroll
          for (int d = 4; d < 32; d *= 2)
#pragma unroll
            for (int j = 0; j < 4; j++) top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], d));
          const u32 maxima = shared + AT_MAXIMA + group * (4 * ROWS * 4) + 8 * q;
          if (g == 0) {
            store_f32x2(maxima + warp * 64, top[0], top[1]);
            store_f32x2(maxima + warp * 64 + 32, top[2], top[3]);
          }
          sync_threads(GROUP + group, 128);
#pragma unroll
          for (int w = 0; w < 4; w++) {
            const float2 low = load_f32x2(maxima + w * 64), high = load_f32x2(maxima + w * 64 + 32);
            top[0] = fmaxf(top[0], low.x), top[1] = fmaxf(top[1], low.y), top[2] = fmaxf(top[2], high.x), top[3] = fmaxf(top[3], high.y);
          }
          float down[4];
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const float raised = fmaxf(now[j], top[j]);
            down[j] = exp2_fast(now[j] - raised);
            now[j] = raised;
          }
          if (warp == 0 && g == 0) {
            if (GROUPS > 1) {
              store_f32x2(shared + AT_REFERENCE + 8 * q, now[0], now[1]);
              store_f32x2(shared + AT_REFERENCE + 32 + 8 * q, now[2], now[3]);
            }
            store_f32x2(shared + AT_RESCALE + stage * 64 + 8 * q, down[0], down[1]);
            store_f32x2(shared + AT_RESCALE + stage * 64 + 32 + 8 * q, down[2], down[3]);
          }
        }
        if (GROUPS > 1 && i + 1 < s.hi) arrive_threads(TURN + (group + 1) % GROUPS, 256);
        if (warp == 0 && lane == 0) store_u32(shared + AT_FLAGS + 4 * stage, raise);

#pragma unroll
        for (int j = 0; j < 4; j++) {
          if ((GROUPS > 1 || raise) && now[j] != m[j]) sum[j] *= exp2_fast(m[j] - now[j]);
          m[j] = now[j];
          const int k = (j >> 1) * 4 + (j & 1);
          const float below = m[j] + DENOMINATOR_SHIFT;
          sum[j] += exp2_fast(score[k] - below) + exp2_fast(score[k + 2] - below);
          v[k] = exp2_fast(v[k] - m[j]);
          v[k + 2] = exp2_fast(v[k + 2] - m[j]);
        }
        store_matrices_transposed(probability_at + stage * P_BYTES, pack_f16(v[0], v[1]), pack_f16(v[2], v[3]), pack_f16(v[4], v[5]), pack_f16(v[6], v[7]));
        fence_async_proxy();  // wgmma reads probabilities
        __syncwarp();
        if (lane == 0) barrier_arrive(shared + STAGE_FULL + 8 * stage);
      }
      tiles_before += max(s.hi - s.lo, 0);

      // the denominators of this group, a warp at a time
#pragma unroll
      for (int d = 4; d < 32; d *= 2)
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += __shfl_xor_sync(~0u, sum[j], d);
      barrier_wait(shared + SUMS_EMPTY, (served & 1) ^ 1);
      if (g == 0) {
        const u32 sums = shared + AT_SUMS + (4 * group + warp) * 64 + 8 * q;
        store_f32x2(sums, sum[0], sum[1]);
        store_f32x2(sums + 32, sum[2], sum[3]);
        if (warp == 0) {
          store_f32x2(shared + AT_SUM_REFERENCE + group * 64 + 8 * q, m[0], m[1]);
          store_f32x2(shared + AT_SUM_REFERENCE + group * 64 + 32 + 8 * q, m[2], m[3]);
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared + SUMS_FULL);
      served++;
    }
    if (!has_next(a, piece, s)) return;
    s = next_segment(a, piece, row_tile, s);
    if (s.rows > 0 && s.lo + group < s.hi) {
      fetch_rows(a, s, s.lo + group, warp, page_id(a, s, s.lo + group, warp), slot, arrived);
      id = page_id(a, s, s.lo + group + GROUPS, warp);
    }
  }
}

// What every part of the kernel shares: its arguments, the division of a block into roles, and the map of shared memory.
// The constants ROW_BYTES, SCALES, DEFICITS_AT, EXPONENT_AT, DEFICIT_UNIT, LATENT and ROPE come from the Python definitions of the cache
// formats, GROUPS, STAGES, BLOCKS_PER_SM, the two numbers of registers, and PARTS from the arrangement
// (launch_configs.py); compiler.py puts them in front of this file. ROWS_ARE_OCP, Q_IS_FP16 and HAS_CAP are macros of the
// variant.
#pragma once
#include "ptx.cuh"

// -- roles: GROUPS groups of four warps score keys, one more sums values ----------------------------------------------------
//
// Scoring group k takes the tiles k, k + GROUPS, ... of a segment. STAGES tiles of values and probabilities are in flight: one for each
// scoring group, one being summed.

constexpr int KEYS = 64;  // a tile: the M side of one wgmma
constexpr int ROWS = 16;  // (query token, head) pairs a block works on
constexpr int SCORERS = 128 * GROUPS, SUMMERS = 128, THREADS = SCORERS + SUMMERS;
constexpr int LAUNCHED_REGISTERS = 65536 / BLOCKS_PER_SM / THREADS / 8 * 8;  // a thread
static_assert(GROUPS * SCORER_REGISTERS + SUMMER_REGISTERS <= (GROUPS + 1) * LAUNCHED_REGISTERS, "taking more waits for ever");

// -- shared memory (bytes from a multiple of 1024) ----------------------------------------------------------------------

// What one scoring warp fetches: 16 rows; behind them, of the OCP format, their scales (scales.cuh) and where a row's begin.
constexpr int SCALES_AT = 16 * ROW_BYTES, STARTS_AT = SCALES_AT + 16 * SCALE_ROOM, SLOT_BYTES = ROWS_ARE_OCP ? STARTS_AT + 16 * 4 : SCALES_AT;
constexpr int Q_PANEL = 32 * 128;           // [16 rows hi, 16 rows lo][128 values] e4m3, 128-byte swizzle
constexpr int AT_Q = 0, AT_Q_ROPE = 4 * Q_PANEL;  // the rope panel is [32][64], 64-byte swizzle
constexpr int AT_P = AT_Q_ROPE + 32 * 64, P_BYTES = ROWS * KEYS * 2;     // f16 [16 rows][64 keys], 128-byte swizzle
constexpr int AT_V = AT_P + STAGES * P_BYTES, V_PANEL = KEYS * 128, V_BYTES = 4 * V_PANEL;  // e5m2 [64 keys][128 values]
constexpr int AT_RAW = AT_V + STAGES * V_BYTES;                          // cache rows as fetched, a slot a scoring warp
constexpr int AT_SCALES = AT_RAW + 4 * GROUPS * SLOT_BYTES;              // f32 [2][16]: latent, rope
constexpr int AT_LIMITS = AT_SCALES + 2 * ROWS * 4;                      // i32 [16]: keys that a row sees
constexpr int AT_REFERENCE = AT_LIMITS + ROWS * 4;                       // f32 [16]: what exponents are taken against
constexpr int AT_RESCALE = AT_REFERENCE + ROWS * 4;                      // f32 [STAGES][16]
constexpr int AT_FLAGS = AT_RESCALE + STAGES * ROWS * 4;                 // u32 [STAGES]: whether AT_RESCALE holds anything
constexpr int AT_MAXIMA = AT_FLAGS + 32;                                 // f32 [GROUPS][4 warps][16]
constexpr int AT_SUMS = AT_MAXIMA + GROUPS * 4 * ROWS * 4;               // f32 [GROUPS][4 warps][16]
constexpr int AT_SUM_REFERENCE = AT_SUMS + GROUPS * 4 * ROWS * 4;        // f32 [GROUPS][16]
constexpr int AT_PLAN = AT_SUM_REFERENCE + GROUPS * ROWS * 4;            // i32 [32]
constexpr int AT_BARRIERS = AT_PLAN + 32 * 4;
constexpr int RAW_ARRIVED = AT_BARRIERS;                  // [GROUPS * 4]
constexpr int STAGE_FULL = RAW_ARRIVED + 8 * GROUPS * 4;  // [STAGES]
constexpr int STAGE_EMPTY = STAGE_FULL + 8 * STAGES;      // [STAGES]
constexpr int SUMS_FULL = STAGE_EMPTY + 8 * STAGES, SUMS_EMPTY = SUMS_FULL + 8;
constexpr int SHARED_BYTES = SUMS_EMPTY + 8;
static_assert(LATENT == 4 * 128 && ROPE == 64, "panels");
static_assert(AT_P % 1024 == 0 && AT_V % 1024 == 0 && AT_RAW % 16 == 0 && AT_BARRIERS % 8 == 0, "alignment");
static_assert(STAGES <= 8, "flags");
static_assert(SHARED_BYTES + 1024 <= BLOCK_SHARED_BYTES, "what the launch asks for");
static_assert(BLOCK_SHARED_BYTES <= 232448 && BLOCKS_PER_SM * (BLOCK_SHARED_BYTES + 1024) <= 228 * 1024, "what sm_90 has");

#define MASKED __int_as_float(0xFF800000)  // -inf: the score of a key that a row does not see
constexpr float NO_REFERENCE = -3e38f;            // before the first score: lower than any, but finite, since -inf less -inf is NaN

// Numbers of the block's barriers.
enum Meeting { ALL = 0, SCORING = 1, SUMMING = 2, TURN = 3, GROUP = TURN + GROUPS };

enum TableKind { CSR = 0, BLOCK_TABLE = 1, CONTIGUOUS = 2 };
enum Mode { BALANCED = 0, FIXED_COUNT = 1, FIXED_SIZE = 2 };

// n / x is n * magic >> shift for 0 <= n < 2^31
struct Divisor {
  u32 magic, shift;
  DEVICE int operator()(int n) const { return (int)((u64)(u32)n * magic >> shift); }
};

// Mirrored by arguments.py: eight-byte fields first.
struct Arguments {
  const u16* q;         // [total_q, heads, 576] bf16 or fp16
  u16* out;             // [total_q, heads, 512] like q
  float* lse;           // [total_q, heads], or null
  float* part_out;      // [slots][16 rows * 512], in the order of reduction.cuh
  float* part_lse;      // [slots][16], base 2
  int* counters;        // see reduction.cuh
  const u8* cache;      // rows of ROW_BYTES
  const u8* scales;     // OCP: 18 E8M0 bytes a token, or null
  const int* lens;      // csr: kv_indptr in pages; block table: cache_seqlens; contiguous: kv_indptr in tokens
  const int* last;      // csr: kv_last_page_len, null for page size 1
  const int* ids;       // csr: [n]; block table: [batch, max_pages]
  const int* qo;        // qo_indptr, or null for q_len tokens each
  i64 q_stride_token, q_stride_head, out_stride_token, out_stride_head, lse_stride;  // elements
  i64 ids_stride;                                                                    // block table: of a row; csr: number of ids
  Divisor by_page_size, by_heads;
  int num_counters, kind, page_size;
  int whole_slots;                                // the 16 rows of a slot are one piece
  int whole_scales;                               // and their scales are one piece, see scales.cuh
  int page_stride, token_stride, scale_page_stride, scale_token_stride;  // bytes
  int q_len, batch, heads, tiles, causal;
  int mode, workers, splits, may_wait;  // see schedule.cuh
  int pairs;                                        // q and out may be accessed two values at a time
  float scale;                                      // sm_scale * log2(e)
  float cap, cap_inverse;                           // cap * log2(e) and its reciprocal
};

DEVICE int lane_index() { return threadIdx.x & 31; }
// through a shuffle, so that the compiler knows it to be the same in all lanes
DEVICE int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }

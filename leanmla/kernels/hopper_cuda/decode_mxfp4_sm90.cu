// MLA decode over an mxfp4 or mxfp4_row320 cache on sm_90: 16 (query token, head) rows a block, keys and values in 4 bits until they are in
// registers. ROWS_ARE_OCP says which of the two formats.
//
// grid: workers * row tiles (balanced), or sequences * splits * row tiles; row tiles of a worker are neighbours, so that they share what
// they read through L2. BLOCKS_PER_SM blocks an SM, each:
//
//   GROUPS * 4 warps   scoring groups, each with its own tile of 64 keys (scores.cuh)
//   4 warps            the summing group, one tile after the other (values.cuh), then epilogue and merge (reduction.cuh)
//
// How many of what: launch_configs.py, with the measurements. Values and probabilities go through a ring of STAGES tiles.
//
// What a cache row holds: leanmla/formats/mxfp4.py and mxfp4_row320.py. NaN: a scale byte (byte 306) of 255 makes a key's scores NaN.
#include "layout.cuh"
#include "query.cuh"
#include "scales.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "values.cuh"

// Ask L2 for the lengths, and for the query and page ids that this worker will need if all sequences are as long, before the plan says
// which and while the kernel before may still run; a wrong guess costs nothing. First touches of a page also wait for its translation.
DEVICE void prefetch_guess(const Arguments& a, int worker, int row_tile) {
  const int workers = a.mode == BALANCED ? a.workers : a.workers * a.batch;
  const float place = __fdividef((float)worker, (float)workers);
  if (a.mode == BALANCED && threadIdx.x * 32 <= a.batch) prefetch_l2(a.lens + threadIdx.x * 32);
  if (a.ids != nullptr && threadIdx.x == THREADS - 1) {
    const i64 ids = a.kind == BLOCK_TABLE ? a.batch * a.ids_stride : a.ids_stride;
    if (ids > 0) prefetch_l2(a.ids + min((i64)(place * (float)ids), ids - 1));
  }
  if (a.qo == nullptr && threadIdx.x < ROWS * 9) {
    const int b = min((int)(place * (float)a.batch), a.batch - 1);
    const int row = row_tile * ROWS + threadIdx.x / 9, token = a.by_heads(row);
    if (token < a.q_len)
      prefetch_l2(a.q + ((i64)b * a.q_len + token) * a.q_stride_token + (row - token * a.heads) * a.q_stride_head + threadIdx.x % 9 * 64);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) decode_mxfp4(const __grid_constant__ Arguments a) {
  extern __shared__ u8 shared_memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;
  const int warp = warp_index(), lane = lane_index(), row_tile = blockIdx.x % a.tiles, worker = blockIdx.x / a.tiles;
  const u32 slot = shared + AT_RAW + warp * SLOT_BYTES, arrived = shared + RAW_ARRIVED + 8 * warp;
  prefetch_guess(a, worker, row_tile);
  if (lane == 0) {
    if (warp < SCORERS / 32) barrier_init(arrived, 1);
    if (warp == SCORERS / 32) {
      for (int i = 0; i < STAGES; i++) {
        barrier_init(shared + STAGE_FULL + 8 * i, 4);
        barrier_init(shared + STAGE_EMPTY + 8 * i, 4);
      }
      barrier_init(shared + SUMS_FULL, SCORERS / 32);
      barrier_init(shared + SUMS_EMPTY, 4);
    }
    barrier_inits_visible();
  }
  __syncwarp();
  wait_for_kernel_before();
  const int turn = a.counters[0];

  const Piece piece = plan_piece(a, shared, worker);
  Segment s;
  s.rows = 0;
  int id = 0;
  if (piece.work) {
    s = segment_at(a, piece, row_tile, piece.b, piece.base, piece.start);
    if (s.rows > 0) {
      const int first = s.lo + warp / 4;  // of this warp's group
      QueryRows<THREADS / 32> query;
      query.load(a, s, row_tile, warp);  // comes in while the page id does
      if (warp < SCORERS / 32 && first < s.hi) {
        fetch_rows(a, s, first, warp & 3, page_id(a, s, first, warp & 3), slot, arrived);
        id = page_id(a, s, first + GROUPS, warp & 3);
      }
      query.convert(a, s, shared, row_tile, warp);
    }
  }
  __syncthreads();

  if (warp < SCORERS / 32) {
    set_registers<SCORER_REGISTERS, LAUNCHED_REGISTERS>();
    if (piece.work) score_segments(a, piece, shared, row_tile, s, id);
    let_kernel_after_begin();
  } else {
    set_registers<SUMMER_REGISTERS, LAUNCHED_REGISTERS>();
    if (warp == SCORERS / 32) turn_over(a, turn);
    if (piece.work) sum_segments(a, piece, shared, row_tile, s, turn);
    else let_kernel_after_begin();
  }
}

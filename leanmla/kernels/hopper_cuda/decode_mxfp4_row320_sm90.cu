// MLA decode over an mxfp4_row320 cache on sm_90: 16 (query token, head) rows a block, keys and values in 4 bits until they are in registers.
//
// grid: workers * row tiles (balanced), or sequences * splits * row tiles; row tiles of a worker are neighbours, so that they share what
// they read through L2. One block an SM:
//
//   warps 0..11   three scoring groups, each with its own tile of 64 keys (scores.cuh)
//   warps 12..15  the summing group, one tile after the other (values.cuh), then epilogue and merge (reduction.cuh)
//
// A scoring group needs about three times as long for a tile as the summing group, and both wait most of that time for each other's
// and their own results; three to one keeps the tensor cores and the ALUs busy. Values and probabilities go through a ring of four stages.
//
// What a cache row holds: leanmla/formats/mxfp4_row320.py. NaN: byte 306 of 255 makes a key's scores NaN.
#include "layout.cuh"
#include "query.cuh"
#include "schedule.cuh"
#include "scores.cuh"
#include "values.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) decode_mxfp4_row320(const __grid_constant__ Arguments a) {
  extern __shared__ u8 shared_memory[];
  const u32 shared = ((u32)__cvta_generic_to_shared(shared_memory) + 1023) & ~1023u;
  const int warp = warp_index(), lane = lane_index(), row_tile = blockIdx.x % a.tiles;
  const u32 slot = shared + AT_RAW + warp * SLOT_BYTES, arrived = shared + RAW_ARRIVED + 8 * warp;
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

  const int turn = a.counters[0];
  const Piece piece = plan_piece(a, shared, blockIdx.x / a.tiles);
  Segment s;
  s.rows = 0;
  int id = 0;
  if (piece.work) {
    s = segment_at(a, piece, row_tile, piece.b, piece.base, piece.start);
    if (s.rows > 0) {
      const int first = s.lo + warp / 4;  // of this warp's group
      if (warp < SCORERS / 32 && first < s.hi) {
        fetch_rows(a, s, first, warp & 3, page_id(a, s, first, warp & 3), slot, arrived);
        id = page_id(a, s, first + GROUPS, warp & 3);
      }
      convert_query(a, s, shared, row_tile, warp, THREADS / 32);
    }
  }
  __syncthreads();

  if (warp < SCORERS / 32) {
    give_registers<SCORER_REGISTERS>();
    if (piece.work) score_segments(a, piece, shared, row_tile, s, id);
  } else {
    take_registers<SUMMER_REGISTERS>();
    if (warp == SCORERS / 32) turn_over(a, turn);
    if (piece.work) sum_segments(a, piece, shared, row_tile, s, turn);
  }
}

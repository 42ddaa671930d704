// Who reads which keys: the same schedule as kernels/hopper/schedule.py, worked out by every block at its start.
//
// The batch is one line of 64-key tiles, sequence after sequence (an empty one counts as one tile, so that somebody writes its
// output). Workers take equal pieces of the line; a segment is the part of one sequence inside a piece. Everything follows
// from lengths in device memory. With a fixed number or size of splits a worker is one (sequence, split) pair instead.
#pragma once
#include "layout.cuh"

struct Piece {
  int start, end;  // tiles of the line
  int b, base;     // the sequence in which it starts, whose own first tile is `base`
  int piece;       // tiles a worker; in fixed modes: splits of the sequence
  int worker;      // in fixed modes: the split
  int total;       // tiles of the line
  bool work;       // whether there is a segment at all; an empty split is one
};

struct Segment {
  int b, base;       // as in Piece
  int kv_len;
  i64 first_id;      // the sequence's first page id, or its first token
  int lo, hi;        // tiles of the sequence
  int follow;        // where the line goes on
  int q_first;       // first query token
  int q_count;
  int rows;          // of this block's row tile; not positive if the sequence has fewer
};

DEVICE int kv_len_of(const Arguments& a, int b) {
  const int x = a.lens[b];
  if (a.kind == BLOCK_TABLE) return x;
  const int n = a.lens[b + 1] - x;
  return a.last != nullptr && n > 0 ? (n - 1) * a.page_size + a.last[b] : n;
}

DEVICE int tiles_of(int kv_len) { return (kv_len + KEYS - 1) / KEYS; }

DEVICE int tiles_on_line(const Arguments& a, int b) { return b < a.batch ? max(tiles_of(kv_len_of(a, b)), 1) : 0; }

// Sum over all threads and, in `upto`, over those up to this one.
DEVICE int scan_block(u32 shared, int x, int& upto) {
  const int lane = lane_index(), warp = warp_index();
  upto = x;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int y = __shfl_up_sync(~0u, upto, d);
    if (lane >= d) upto += y;
  }
  if (lane == 31) store_u32(shared + AT_PLAN + 4 * warp, upto);
  __syncthreads();
  int sums = lane < THREADS / 32 ? load_u32(shared + AT_PLAN + 4 * lane) : 0;
#pragma unroll
  for (int d = 1; d < THREADS / 32; d *= 2) {
    const int y = __shfl_up_sync(~0u, sums, d);
    if (lane >= d) sums += y;
  }
  upto += __shfl_sync(~0u, sums, max(warp - 1, 0)) * (warp > 0);
  return __shfl_sync(~0u, sums, THREADS / 32 - 1);
}

// The sequence that holds place `start` of the line is published at AT_PLAN + 112 by the thread that has it.
DEVICE void publish_start(u32 shared, int b, int tiles, int upto, int start) {
  if (upto - tiles <= start && start < upto) {
    store_u32(shared + AT_PLAN + 112, b);
    store_u32(shared + AT_PLAN + 116, upto - tiles);
  }
}

DEVICE Piece plan_piece(const Arguments& a, u32 shared, int worker) {
  Piece p;
  if (a.mode == BALANCED) {
    int upto;
    const int tiles = tiles_on_line(a, threadIdx.x);
    int total = scan_block(shared, tiles, upto);
    for (int at = THREADS; at < a.batch; at += THREADS) {
      int unused;
      __syncthreads();
      total += scan_block(shared, tiles_on_line(a, at + threadIdx.x), unused);
    }
    int piece = max((total + a.workers - 1) / a.workers, a.splits);
    // Rounded up to a multiple of a power of two at most 1/16 of it, so that equal lengths are cut at equal places.
    const int unit = 1 << max(31 - __clz(piece) - 4, 0);
    piece = (piece + unit - 1) / unit * unit;
    p.start = min(worker * piece, total);
    p.end = min(p.start + piece, total);
    publish_start(shared, threadIdx.x, tiles, upto, p.start);
    if (a.batch > THREADS) {
      int before = 0;
      for (int at = 0; at < a.batch; at += THREADS) {
        const int t = tiles_on_line(a, at + threadIdx.x);
        __syncthreads();
        const int sum = scan_block(shared, t, upto);
        publish_start(shared, at + threadIdx.x, t, before + upto, p.start);
        before += sum;
      }
    }
    __syncthreads();
    p.b = load_u32(shared + AT_PLAN + 112);
    p.base = load_u32(shared + AT_PLAN + 116);
    p.piece = piece;
    p.worker = worker;
    p.total = total;
    p.work = p.start < p.end;
  } else {
    p.b = worker / a.workers;
    p.worker = worker % a.workers;
    p.base = 0;
    const int tiles = tiles_of(kv_len_of(a, p.b));
    if (a.mode == FIXED_COUNT) {
      p.piece = a.splits;
      p.start = (int)((i64)p.worker * tiles / p.piece);
      p.end = (int)((i64)(p.worker + 1) * tiles / p.piece);
    } else {
      p.piece = max((tiles + a.splits - 1) / a.splits, 1);
      p.start = p.worker * a.splits;
      p.end = min(p.start + a.splits, tiles);
    }
    p.total = tiles;
    p.work = p.worker < p.piece;
  }
  return p;
}

// The part of sequence b in a piece that goes on from place `at` of the line.
DEVICE Segment segment_at(const Arguments& a, const Piece& p, int row_tile, int b, int base, int at) {
  Segment s;
  s.b = b;
  s.base = base;
  s.kv_len = kv_len_of(a, b);
  s.first_id = a.kind == BLOCK_TABLE ? b * a.ids_stride : (i64)a.lens[b];
  s.q_first = a.qo != nullptr ? a.qo[b] : b * a.q_len;
  s.q_count = a.qo != nullptr ? a.qo[b + 1] - s.q_first : a.q_len;
  s.rows = min(s.q_count * a.heads - row_tile * ROWS, ROWS);
  const int tiles = tiles_of(s.kv_len);
  if (a.mode == BALANCED) {
    const int stop = min(p.end - base, max(tiles, 1));
    s.lo = at - base;
    s.hi = min(stop, tiles);
    s.follow = base + stop;
  } else {
    s.lo = p.start;
    s.hi = p.end;
    s.follow = p.end;
  }
  return s;
}

DEVICE bool has_next(const Arguments& a, const Piece& p, const Segment& s) { return a.mode == BALANCED && s.follow < p.end; }

DEVICE Segment next_segment(const Arguments& a, const Piece& p, int row_tile, const Segment& s) {
  return segment_at(a, p, row_tile, s.b + 1, s.follow, s.follow);
}

// How a sequence is shared out.
struct Shares {
  int splits, rank;
  int stay;                      // ranks that may wait at its end
  int first_slot, next_slot, step;  // split 0 is in first_slot, split s in next_slot + (s - 1) * step
};

// Balanced: a worker keeps its last segment, if that opens a sequence, in slot 2 w + 1 and its first, if it goes on with one, in
// slot 2 w. Only the last worker of a sequence can have more to do after it. Row tiles have their slots side by side.
DEVICE Shares shares_of(const Arguments& a, const Piece& p, const Segment& s, int row_tile) {
  Shares x;
  if (a.mode == BALANCED) {
    const int first = s.base / p.piece, stop = s.base + max(tiles_of(s.kv_len), 1);
    x.splits = (stop - 1) / p.piece - first + 1;
    x.rank = p.worker - first;
    x.stay = x.splits - (stop < min((first + x.splits) * p.piece, p.total));
    x.first_slot = (2 * first + 1) * a.tiles + row_tile;
    x.next_slot = (2 * first + 2) * a.tiles + row_tile;
    x.step = 2 * a.tiles;
  } else {
    x.splits = p.piece;
    x.rank = p.worker;
    x.stay = 0;
    x.first_slot = s.b * a.workers * a.tiles + row_tile;
    x.next_slot = x.first_slot + a.tiles;
    x.step = a.tiles;
  }
  return x;
}

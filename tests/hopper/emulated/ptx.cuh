// A stand-in for leanmla/kernels/hopper_cuda/ptx.cuh that runs the kernel's sources on a CPU, one fiber a GPU thread.
//
// Modelled: every thread's own flow, warp and warp-group collectives, named barriers, mbarriers with transaction counts, bulk copies that
// arrive late and in any order, shared memory full of NaN at the start, wgmma with its register layouts and swizzled descriptors, and
// blocks that run side by side, and on request the 14 bits in which fp8 wgmma sums. A block that cannot go on is reported. Not modelled:
// memory ordering and proxies, wgmma's own asynchrony, setmaxnreg, time.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

#define DEVICE inline
#define __device__
#define __global__
#define __shared__
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;
inline i64 min(i64 a, int b) { return a < b ? a : b; }

namespace emulator {

struct Dim { u32 x; };

struct Barrier { int count = 0, pending = 0, phase = 0; i64 bytes = 0; };

struct Meeting {  // of a fixed set of threads, over and over
  int arrived = 0, generation = 0;
  u32 any = 0, last_any = 0;
};

struct Collective : Meeting {  // of a warp or a warp group: what each member brings
  u64 in[128], out[128];
  float* d[128];
  const u32 *a[128], *b[128];
};

struct Copy { u32 to; const u8* from; u32 bytes, barrier; };

struct Block {
  u32 index;
  std::vector<u8> shared;
  std::vector<Barrier> barriers;
  Meeting named[16];
  std::vector<Collective> warps, groups;
  std::deque<Copy> copies;
  int running = 0;
};

struct Fiber {
  Block* block = nullptr;
  u32 thread = 0;
  bool done = false, entered = false;
  std::unique_ptr<char[]> stack;
  ucontext_t start;
  jmp_buf at;
};

inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline u64 progress = 0;
inline u32 grid = 0, random_state = 1;
inline const char* trouble = nullptr;
inline bool fp16 = false, cap = false;  // the variant, which is fixed when a GPU's code is compiled
inline int sum_bits = 0;  // of fp8 products: terms are cut to so many bits of the largest; 0: exact

inline u32 random() {
  random_state = random_state * 1664525u + 1013904223u;
  return random_state >> 8;
}
inline void yield() {
  if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}
inline u8* shared(u32 at) {
  if (at + 16 > current->block->shared.size() + 16) trouble = "shared memory out of bounds";
  return current->block->shared.data() + at;
}
template <class T> T read(u32 at) {
  if (at % sizeof(T)) trouble = "misaligned shared memory";
  T v;
  memcpy(&v, shared(at), sizeof(T));
  return v;
}
template <class T> void write(u32 at, T v) {
  if (at % sizeof(T)) trouble = "misaligned shared memory";
  memcpy(shared(at), &v, sizeof(T));
}

// Waits for `members` threads; the last calls `act`.
template <class F> void meet(Meeting& m, int members, F act) {
  const int generation = m.generation;
  progress++;
  if (++m.arrived == members) {
    act();
    m.arrived = 0;
    m.generation++;
    return;
  }
  while (m.generation == generation) yield();
}
inline Collective& warp() { return current->block->warps[current->thread / 32]; }
inline u32 lane() { return current->thread % 32; }
// The value that lane source(lane) brought.
template <class T, class F> T exchange(T v, F source) {
  Collective& w = warp();
  u64 bits = 0;
  memcpy(&bits, &v, sizeof(T));
  w.in[lane()] = bits;
  meet(w, 32, [&] { std::copy(w.in, w.in + 32, w.out); });
  T r;
  memcpy(&r, &w.out[source(lane())], sizeof(T));
  meet(w, 32, [] {});
  return r;
}

inline void settle(Barrier& b) {
  if (b.pending == 0 && b.bytes == 0) {
    b.phase ^= 1;
    b.pending = b.count;
  }
}
inline Barrier& barrier(u32 at) { return current->block->barriers[at / 8]; }

inline float e4m3(u8 x) {
  const int e = x >> 3 & 15, m = x & 7;
  const float v = (x & 127) == 127 ? NAN : e ? ldexpf(1 + m / 8.f, e - 7) : ldexpf(m / 8.f, -6);
  return x & 128 ? -v : v;
}
inline float e5m2(u8 x) {
  const int e = x >> 2 & 31, m = x & 3;
  const float v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexpf(1 + m / 4.f, e - 15) : ldexpf(m / 4.f, -14);
  return x & 128 ? -v : v;
}
inline float f16(u16 x) {
  _Float16 h;
  memcpy(&h, &x, 2);
  return (float)h;
}
inline u16 f16_bits(float x) {
  const _Float16 h = (_Float16)x;
  u16 r;
  memcpy(&r, &h, 2);
  return r;
}
inline u16 bf16_bits(float x) {
  u32 b;
  memcpy(&b, &x, 4);
  return std::isnan(x) ? 0x7FFF : (u16)((b + 0x7FFF + (b >> 16 & 1)) >> 16);
}
inline u8 e4m3_bits(float x) {
  if (std::isnan(x)) return 0x7F;
  const float a = fminf(fabsf(x), 448.f);
  const int e = a < 0x1p-6f ? -6 : ilogbf(a);
  const int m = (int)nearbyintf(ldexpf(a, 3 - e));  // 8 .. 16, or less below the normal numbers
  return (u8)((e + 6) * 8 + m) | (std::signbit(x) ? 128 : 0);
}
inline float cut_sum(const float* x, const float* y, int count, float start) {
  float largest = fabsf(start);
  for (int k = 0; k < count; k++) largest = fmaxf(largest, fabsf(x[k] * y[k]));
  if (!(largest > 0 && largest < INFINITY)) return start;
  const double unit = ldexp(1.0, ilogbf(largest) + 1 - sum_bits);
  double sum = trunc(start / unit);
  for (int k = 0; k < count; k++) sum += trunc((double)x[k] * y[k] / unit);
  return (float)(sum * unit);
}
// byte `k_byte` of row n of a K-major operand
inline u8 operand_byte(u64 descriptor, int n, int k_byte) {
  const u32 start = (u32)(descriptor & 0x3FFF) << 4, group = (u32)(descriptor >> 32 & 0x3FFF) << 4;
  const bool wide = descriptor >> 62 == 1;
  u32 at = start + n / 8 * group + n % 8 * (wide ? 128 : 64) + k_byte;
  at ^= wide ? (at >> 7 & 7) << 4 : (at >> 7 & 3) << 4;
  return *shared(at);
}
template <int N, bool FP8> void multiply(float* d, const u32* a, u64 b, bool add) {
  Collective& group = current->block->groups[current->thread / 128];
  const int member = current->thread % 128;
  group.d[member] = d;
  group.a[member] = a;
  meet(group, 128, [&] {
    constexpr int K = FP8 ? 32 : 16;
    static float x[64][32], y[64][32];
    for (int t = 0; t < 128; t++) {
      const int w = t / 32, g = t % 32 / 4, q = t % 4;
      for (int r = 0; r < 4; r++) {
        const int row = 16 * w + g + 8 * (r & 1);
        if (FP8)
          for (int i = 0; i < 4; i++) x[row][16 * (r >> 1) + 4 * q + i] = e5m2((u8)(group.a[t][r] >> 8 * i));
        else
          for (int i = 0; i < 2; i++) x[row][8 * (r >> 1) + 2 * q + i] = f16((u16)(group.a[t][r] >> 16 * i));
      }
    }
    for (int n = 0; n < N; n++)
      for (int k = 0; k < K; k++)
        y[n][k] = FP8 ? e4m3(operand_byte(b, n, k)) : f16((u16)(operand_byte(b, n, 2 * k) | operand_byte(b, n, 2 * k + 1) << 8));
    for (int t = 0; t < 128; t++) {
      const int w = t / 32, g = t % 32 / 4, q = t % 4;
      for (int r = 0; r < N / 2; r++) {
        const int row = 16 * w + g + 8 * (r >> 1 & 1), column = r / 4 * 8 + 2 * q + (r & 1);
        double sum = add ? group.d[t][r] : 0;
        if (FP8 && sum_bits) {
          group.d[t][r] = cut_sum(x[row], y[column], K, (float)sum);
          continue;
        }
        for (int k = 0; k < K; k++) sum += (double)x[row][k] * y[column][k];
        group.d[t][r] = (float)sum;
      }
    }
  });
}

}  // namespace emulator

#define threadIdx (emulator::Dim{emulator::current->thread})
#define blockIdx (emulator::Dim{emulator::current->block->index})
#define gridDim (emulator::Dim{emulator::grid})

template <class T> T __shfl_sync(u32, T v, int source) { return emulator::exchange(v, [=](u32) { return source; }); }
template <class T> T __shfl_xor_sync(u32, T v, int mask) { return emulator::exchange(v, [=](u32 l) { return l ^ mask; }); }
template <class T> T __shfl_up_sync(u32, T v, int d) { return emulator::exchange(v, [=](u32 l) { return (int)l >= d ? l - d : l; }); }
inline bool __all_sync(u32, u32 x) {
  emulator::Collective& w = emulator::warp();
  w.in[emulator::lane()] = x;
  emulator::meet(w, 32, [&] { w.last_any = std::all_of(w.in, w.in + 32, [](u64 v) { return v != 0; }); });
  const bool r = w.last_any;
  emulator::meet(w, 32, [] {});
  return r;
}
inline u32 __ballot_sync(u32, bool x) {
  emulator::Collective& w = emulator::warp();
  w.in[emulator::lane()] = x;
  emulator::meet(w, 32, [&] {
    w.last_any = 0;
    for (u32 l = 0; l < 32; l++) w.last_any |= (u32)w.in[l] << l;
  });
  const u32 r = w.last_any;
  emulator::meet(w, 32, [] {});
  return r;
}
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline void __syncwarp() { emulator::meet(emulator::warp(), 32, [] {}); }
inline int __clz(int x) { return x ? __builtin_clz((u32)x) : 32; }
inline u32 __float_as_uint(float x) { u32 r; memcpy(&r, &x, 4); return r; }
inline float __uint_as_float(u32 x) { float r; memcpy(&r, &x, 4); return r; }
inline float __int_as_float(int x) { return __uint_as_float((u32)x); }
inline float __fdividef(float a, float b) { return a / b; }
inline u32 __cvta_generic_to_shared(const void*) { return 16; }  // not a multiple of 1024: the kernel must align
inline u8 shared_memory[16];

inline u32 load_u8(u32 at) { return emulator::read<u8>(at); }
inline u32 load_u32(u32 at) { return emulator::read<u32>(at); }
inline uint2 load_u32x2(u32 at) { return emulator::read<uint2>(at); }
inline uint4 load_u32x4(u32 at) { return emulator::read<uint4>(at); }
inline float load_f32(u32 at) { return emulator::read<float>(at); }
inline float2 load_f32x2(u32 at) { return emulator::read<float2>(at); }
inline void store_u16(u32 at, u16 x) { emulator::write(at, x); }
inline void store_u32(u32 at, u32 x) { emulator::write(at, x); }
inline void store_f32(u32 at, float x) { emulator::write(at, x); }
inline void store_f32x2(u32 at, float x, float y) { emulator::write(at, float2{x, y}); }
inline void load_matrices_transposed(u32* r, u32 at) {
  emulator::Collective& w = emulator::warp();
  const u32 l = emulator::lane();
  w.in[l] = at;
  emulator::meet(w, 32, [] {});
  for (int m = 0; m < 4; m++)  // lane l gets column l / 4 of rows 2 (l % 4) and the next
    r[m] = emulator::read<u16>((u32)w.in[8 * m + 2 * (l % 4)] + 2 * (l / 4)) | (u32)emulator::read<u16>((u32)w.in[8 * m + 2 * (l % 4) + 1] + 2 * (l / 4)) << 16;
  emulator::meet(w, 32, [] {});
}
inline void load_matrices(u32* r, u32 at) {
  emulator::Collective& w = emulator::warp();
  const u32 l = emulator::lane();
  w.in[l] = at;
  emulator::meet(w, 32, [] {});
  for (int m = 0; m < 4; m++) r[m] = emulator::read<u32>((u32)w.in[8 * m + l / 4] + 4 * (l % 4));
  emulator::meet(w, 32, [] {});
}
inline void store_matrices_transposed(u32 at, u32 r0, u32 r1, u32 r2, u32 r3) {
  emulator::Collective& w = emulator::warp();
  const u32 l = emulator::lane(), r[4] = {r0, r1, r2, r3};
  w.in[l] = at;
  emulator::meet(w, 32, [] {});
  for (int m = 0; m < 4; m++) {
    emulator::write((u32)w.in[8 * m + 2 * (l % 4)] + 2 * (l / 4), (u16)r[m]);
    emulator::write((u32)w.in[8 * m + 2 * (l % 4) + 1] + 2 * (l / 4), (u16)(r[m] >> 16));
  }
  emulator::meet(w, 32, [] {});
}

inline void barrier_init(u32 at, int arrivals) { emulator::barrier(at) = {arrivals, arrivals, 0, 0}; }
inline void barrier_inits_visible() {}
inline void barrier_arrive(u32 at) {
  emulator::Barrier& b = emulator::barrier(at);
  emulator::progress++;
  if (b.count == 0) emulator::trouble = "arrival at a barrier that was not initialised";
  b.pending--;
  emulator::settle(b);
}
inline void barrier_arrive_expecting(u32 at, u32 bytes) {
  emulator::barrier(at).bytes += bytes;
  barrier_arrive(at);
}
inline bool barrier_passed(u32 at, u32 parity) { return emulator::barrier(at).phase != (int)parity; }
inline void barrier_wait(u32 at, u32 parity) {
  while (!barrier_passed(at, parity)) emulator::yield();
}
inline void sync_threads(int id, int threads) { emulator::meet(emulator::current->block->named[id], threads, [] {}); }
inline void arrive_threads(int id, int threads) {
  emulator::Meeting& m = emulator::current->block->named[id];
  emulator::progress++;
  if (++m.arrived == threads) m.arrived = 0, m.generation++;
}
inline bool any_of_threads(int id, int threads, bool x) {
  emulator::Meeting& m = emulator::current->block->named[id];
  m.any |= x;
  emulator::meet(m, threads, [&] { m.last_any = m.any, m.any = 0; });
  return m.last_any;
}
inline void fence_async_proxy() {}

inline void copy_to_shared(u32 to, const u8* from, u32 bytes, u32 barrier) {
  if (to % 16 || bytes % 16 || (uintptr_t)from % 16 || bytes == 0) emulator::trouble = "bulk copy: not multiples of 16 bytes";
  emulator::current->block->copies.push_back({to, from, bytes, barrier});
}
inline void prefetch_l2(const void*) {}
inline float4 load_other_sm(const float4* p) { return *p; }
inline float load_other_sm(const float* p) { return *p; }
inline int add_release_acquire(int* p, int x) { emulator::yield(); emulator::progress++; const int r = *p; *p += x; return r; }
inline int load_acquire(const int* p) { emulator::yield(); emulator::progress++; return *p; }
inline int swap_release_acquire(int* p, int expected, int x) {
  emulator::progress++;
  const int r = *p;
  if (r == expected) *p = x;
  return r;
}
inline void __syncthreads();
inline void wait_for_kernel_before() {}
inline void let_kernel_after_begin() {}

inline float exp2_fast(float x) { const float y = exp2f(x); return y < 0x1p-126f ? 0.f : y; }
inline float log2_fast(float x) { return log2f(x); }
inline float reciprocal(float x) { return 1.f / x; }
inline u32 pack_f16(float low, float high) { return emulator::f16_bits(low) | (u32)emulator::f16_bits(high) << 16; }
inline u32 pack_bf16(float low, float high) { return emulator::bf16_bits(low) | (u32)emulator::bf16_bits(high) << 16; }
inline float from_f16(u16 x) { return emulator::f16(x); }
inline u16 pack_e4m3(float low, float high) { return (u16)(emulator::e4m3_bits(low) | emulator::e4m3_bits(high) << 8); }
inline u32 unpack_e4m3(u16 x) { return emulator::f16_bits(emulator::e4m3((u8)x)) | (u32)emulator::f16_bits(emulator::e4m3(x >> 8)) << 16; }
inline u32 multiply_add_f16x2(u32 a, u32 b, u32 c) {
  const auto one = [](u32 x, u32 y, u32 z) { return (u32)emulator::f16_bits((float)((double)emulator::f16((u16)x) * emulator::f16((u16)y) + emulator::f16((u16)z))); };
  return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
inline u32 permute(u32 low, u32 high, u32 selectors) {
  const u64 bytes = low | (u64)high << 32;
  u32 r = 0;
  for (int i = 0; i < 4; i++) {
    const u32 s = selectors >> 4 * i & 15;
    u32 b = (u32)(bytes >> 8 * (s & 7)) & 255;
    if (s & 8) b = b & 128 ? 255 : 0;
    r |= b << 8 * i;
  }
  return r;
}
inline u32 max_u16x2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }
inline u32 add_max_s16x2(u32 a, u32 b, u32 c) {
  const auto one = [](u32 x, u32 y, u32 z) { return (u32)(u16)max((int)(int16_t)(x + y), (int)(int16_t)z); };
  return one(a, b, c) | one(a >> 16, b >> 16, c >> 16) << 16;
}
inline float as_float(u32 x) { return __uint_as_float(x); }

enum class Swizzle : u64 { B128 = 1, B64 = 2 };
inline u64 descriptor(u32 at, u32 group_bytes, Swizzle swizzle) {
  return (u64)((at & 0x3FFFF) >> 4) | (1ull << 16) | ((u64)(group_bytes >> 4) << 32) | ((u64)swizzle << 62);
}
inline void products_begin() {}
inline void products_commit() {}
template <int N> void products_wait() {}
inline void multiply_scores(float* d, const u32* a, u64 b, bool add) { emulator::multiply<32, true>(d, a, b, add); }
inline void multiply_values(float* d, const u32* a, u64 b) { emulator::multiply<16, false>(d, a, b, true); }
inline void multiply_by_warp(float* d, const u32* a, const u32* b) {
  emulator::Collective& w = emulator::warp();
  const u32 l = emulator::lane();
  w.d[l] = d;
  w.a[l] = a;
  w.b[l] = b;
  emulator::meet(w, 32, [&] {
    float x[16][16], y[16][16];
    for (int t = 0; t < 32; t++)
      for (int r = 0; r < 4; r++)
        for (int i = 0; i < 2; i++) {
          x[t / 4 + 8 * (r & 1)][8 * (r >> 1) + 2 * (t % 4) + i] = emulator::f16((u16)(w.a[t][r] >> 16 * i));
          y[t / 4 + 8 * (r >> 1)][8 * (r & 1) + 2 * (t % 4) + i] = emulator::f16((u16)(w.b[t][r] >> 16 * i));
        }
    for (int t = 0; t < 32; t++)
      for (int r = 0; r < 8; r++) {
        const int row = t / 4 + 8 * (r >> 1 & 1), column = r / 4 * 8 + 2 * (t % 4) + (r & 1);
        double sum = w.d[t][r];
        for (int k = 0; k < 16; k++) sum += (double)x[row][k] * y[column][k];
        w.d[t][r] = (float)sum;
      }
  });
}
template <int, int> void set_registers() {}

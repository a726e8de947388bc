// Runs quantize_rows on the host, a thread for each of two warps' lanes. The parts of device.cuh that it
// needs are given as QUANTIZER, a file with that header's quantizer; the rest stands here.
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
#define DEVICE inline
using std::max;
using std::min;

constexpr int WARPS = 2, THREADS = WARPS * 32, MAX_ROWS = 32;

static u8* memory;
static u32 exchanged[THREADS];
static std::barrier<> everyone(THREADS);
static std::barrier<> of_warp[WARPS] = {std::barrier<>(32), std::barrier<>(32)};
static thread_local struct { int x; } threadIdx;

DEVICE u32 load_shared(u32 at) { u32 v; memcpy(&v, memory + at, 4); return v; }
DEVICE void store_shared(u32 at, u32 value) { memcpy(memory + at, &value, 4); }
DEVICE u8* shared_address(void* p) { return (u8*)p; }
DEVICE void copy_word(u8* target, const void* source) { memcpy(target, source, 4); }
DEVICE float as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
DEVICE u32 as_bits(float value) { u32 v; memcpy(&v, &value, 4); return v; }
DEVICE float bf16_low(u32 pair) { return as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return as_float(pair & 0xFFFF0000u); }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float __fsub_rn(float a, float b) { return a - b; }
DEVICE float __fdiv_rn(float a, float b) { return a / b; }
DEVICE u32 pack_fp16(float low, float high) {
  return (u32)_cvtss_sh(low, 0) | (u32)_cvtss_sh(high, 0) << 16;
}
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE float __frcp_rn(float a) { return 1.0f / a; }
DEVICE int __ffs(u32 v) { return __builtin_ffs(v); }
DEVICE u32 larger_halves(u32 a, u32 b) {
  return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
}
DEVICE u32 spread_signs(u32 bits) {
  return (bits & 0x80u ? 0xFFFFu : 0) | (bits & 0x8000u ? 0xFFFF0000u : 0);
}
DEVICE void __syncthreads() { everyone.arrive_and_wait(); }
DEVICE void atomicMax(u32* target, u32 value) {
  std::atomic_ref<u32> all(*target);
  for (u32 old = all; old < value && !all.compare_exchange_weak(old, value);) {}
}
template <typename T>
DEVICE T __shfl_xor_sync(u32, T value, int step) {
  const int thread = threadIdx.x;
  memcpy(&exchanged[thread], &value, 4);
  of_warp[thread / 32].arrive_and_wait();
  T other;
  memcpy(&other, &exchanged[thread ^ step], 4);
  of_warp[thread / 32].arrive_and_wait();
  return other;
}

#include QUANTIZER
#include "compensate.cuh"

constexpr int ROW = K_BLOCKS * 32, PLANE = K_BLOCKS * 4;

// The first `split` rows with the first lists, the others with the second ones.
template <int LANES, bool RAC, bool SPLICE, bool COLUMNS>
static void run(u8* rows, float* scales, int count, int split, Compensation from) {
  Maxima maxima[2] = {};
  Lists<K_BLOCKS> lists[2];
  memory = rows;
  std::vector<std::thread> threads;
  for (int thread = 0; thread < THREADS; thread++)
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      for (int i = 0; i < 2; i++) lists[i].template fetch<RAC, SPLICE>(from, i);
      __syncthreads();
      quantize_rows<K_BLOCKS, PLANE, ROW, LANES, RAC, SPLICE, COLUMNS>(
          0, split, split * ROW, count - split, maxima, lists, from.alpha,
          [&](int i, int row, float factor) { scales[i * split + row] = factor; });
    });
  for (auto& thread : threads) thread.join();
}

template <int LANES>
static auto form(bool rac, bool splice, bool columns) {
  if (columns) return rac ? run<LANES, true, true, true> : run<LANES, false, true, true>;
  if (splice) return rac ? run<LANES, true, true, false> : run<LANES, false, true, false>;
  return rac ? run<LANES, true, false, false> : run<LANES, false, false, false>;
}

// rows: bfloat16 [count, 8, 2 * K_BLOCKS], replaced by float16. mask, bits: [2, K_BLOCKS].
extern "C" void compensate(u8* rows, float* scales, int count, int split, const u8* mask,
                           const int* bits, float alpha, int rac, int splice, int columns,
                           int lanes) {
  const Compensation from = {mask, bits, K_BLOCKS, K_BLOCKS, alpha};
  const auto chosen = lanes == 1   ? form<1>(rac, splice, columns)
                      : lanes == 2 ? form<2>(rac, splice, columns)
                                   : form<4>(rac, splice, columns);
  chosen(rows, scales, count, split, from);
}

// rows: 16-bit [count, 8, 2 * K_BLOCKS]; to target [count, 16 * K_BLOCKS] as stage_products does it.
extern "C" void in_order(u8* rows, u8* target, int count) {
  memory = rows;
  for (int row = 0; row < count; row++)
    for (int word = 0; word < K_BLOCKS; word++)
      store_in_order(target + row * ROW + word * 32, row * ROW + word * 4, K_BLOCKS * 4);
}

// rows: as in_order's; to target [count, 32] the channels [count, 32] of each row.
extern "C" void gather(u8* rows, int count, const int* channels, u8* target) {
  constexpr int BYTES = K_BLOCKS * 32;
  std::vector<u8> row_and_list(BYTES + 64);
  memory = row_and_list.data();
  for (int row = 0; row < count; row++) {
    memcpy(memory, rows + row * BYTES, BYTES);
    for (int lane = 0; lane < 32; lane++)
      gather_row<32, K_BLOCKS * 4>(0, BYTES, channels + row * 32, lane);
    memcpy(target + row * 64, memory + BYTES, 64);
  }
}

// Runs compensate_row on the host, 32 threads for the lanes of a warp. The parts of device.cuh that
// it needs are given as QUANTIZER, a file with that header's quantizer; the rest stands here.
#include <immintrin.h>

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
struct uint4 { u32 x, y, z, w; };
#define DEVICE static inline
using std::max;
using std::min;

static u8* memory;
static thread_local std::barrier<>* all;
static thread_local u32* shared_max;
static thread_local int this_lane;

DEVICE u32 load_shared(u32 at) { u32 v; memcpy(&v, memory + at, 4); return v; }
DEVICE void store_shared(u32 at, u32 value) { memcpy(memory + at, &value, 4); }
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
DEVICE u32 __reduce_max_sync(u32, u32 value) {
  shared_max[this_lane] = value;
  all->arrive_and_wait();
  const u32 result = *std::max_element(shared_max, shared_max + 32);
  all->arrive_and_wait();
  return result;
}

#include QUANTIZER
#include "compensate.cuh"

template <bool RAC, bool SPLICE, bool COLUMNS>
static void run(u8* rows, float* scales, int count, const u8* mask, const int* bits, float alpha) {
  constexpr int BYTES = K_BLOCKS * 32;
  for (int row = 0; row < count; row++) {
    memory = rows + row * BYTES;
    std::barrier<> barrier(32);
    u32 values[32];
    std::vector<std::thread> lanes;
    for (int lane = 0; lane < 32; lane++)
      lanes.emplace_back([&, lane] {
        all = &barrier, shared_max = values, this_lane = lane;
        const float scale = compensate_row<K_BLOCKS, K_BLOCKS * 4, RAC, SPLICE, COLUMNS>(
            0, lane, mask + row * K_BLOCKS, bits + row * K_BLOCKS, alpha);
        if (lane == 0) scales[row] = scale;
      });
    for (auto& lane : lanes) lane.join();
  }
}

// rows: bfloat16 [count, 8, 2 * K_BLOCKS], replaced by float16. mask, bits: [count, K_BLOCKS].
extern "C" void compensate(u8* rows, float* scales, int count, const u8* mask, const int* bits,
                           float alpha, int rac, int splice, int columns) {
  auto form = rac ? (columns  ? run<true, true, true>
                     : splice ? run<true, true, false>
                              : run<true, false, false>)
                  : (columns  ? run<false, true, true>
                     : splice ? run<false, true, false>
                              : run<false, false, false>);
  form(rows, scales, count, mask, bits, alpha);
}

// rows: 16-bit [count, 8, 2 * K_BLOCKS]; to target [count, 16 * K_BLOCKS] as stage_products does it.
extern "C" void in_order(u8* rows, u8* target, int count) {
  constexpr int BYTES = K_BLOCKS * 32;
  memory = rows;
  for (int row = 0; row < count; row++)
    for (int word = 0; word < K_BLOCKS; word++)
      store_in_order(target + row * BYTES + word * 32, row * BYTES + word * 4, K_BLOCKS * 4);
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

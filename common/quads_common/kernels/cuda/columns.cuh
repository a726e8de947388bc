// BF16 columns of hot channels: a thin product onto accumulators that are in final units already.
// After device.cuh, whose functions it uses.
#pragma once

struct Columns {
  const u8* w13;        // bfloat16 [E, 2I, COLUMNS13], tiled; null with COLUMNS13 = 0
  const u8* hot;        // bfloat16 [T, COLUMNS13]: the hot channels of the layer's input
  const u8* w2;         // bfloat16 [E, H, COLUMNS2], tiled
  const int* channels;  // [lists, COLUMNS2]: those of GEMM2's input, -1 for none
  int channels_stride;  // 0: one list for all experts
  int buffer;           // where warps' copies of columns begin in shared memory
};

// Columns are tiled (`weight_tiles`): of 8 rows, 16 columns lie together. How far behind the first of a
// strip another one is, in bytes.
DEVICE u32 columns_before(int column) { return 8 * 2 * column; }

// The first of ALL columns of a strip, where every expert has STRIPS.
template <int ALL, int STRIPS>
DEVICE const u8* strip_columns(const u8* columns, int expert, int strip) {
  return columns + (u64)(u32)(expert * STRIPS + strip) * (32 * 2 * ALL);
}

// COUNT columns, a multiple of 16, of a strip of ALL. A lane's four weight rows have the places g,
// g + 8, g + 16 and g + 24 in a strip. A sum may take K in any order, so of every 32 columns lane t of a
// quad has 8 that follow each other, of 16 that are left over 4, and of the hot values the same.
//
// A warp's load is of 512 or 256 contiguous bytes. Of copies in shared memory, where 8 lanes load at a
// time, lanes t and t + 2 meet in the same banks.
//
// In shared memory the hot values of 8 slots further are GROUP bytes behind.
template <int COUNT, int ALL, int GROUP>
struct ColumnPart {
  static constexpr int WHOLE = COUNT / 32, LEFT = COUNT % 32, ROWS = 8 * 2 * ALL, TILE = 8 * 2 * 16;

  // Where a lane's columns begin in two tiles, and in one that is left over.
  static DEVICE u32 in_two(int lane) { return (lane & 2) / 2 * TILE + (lane >> 2) * 32 + (lane & 1) * 16; }
  static DEVICE u32 in_one(int lane) { return WHOLE * 2 * TILE + lane * 8; }

  // acc += columns in shared memory x hot values. columns: shared address of the strip's first of them,
  // hot: that of the values of the lane's slot.
  template <int TILES>
  static DEVICE void multiply_copied(float (&acc)[2][TILES][4], u32 columns, u32 hot, int lane) {
    const int t = lane & 3;
#pragma unroll
    for (int w = 0; w < WHOLE; w++) {
      uint4 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = load_shared4(columns + in_two(lane) + i * ROWS + w * 2 * TILE);
      add_whole(acc, a, hot + t * 16 + w * 64);
    }
    if constexpr (LEFT > 0) {
      uint2 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++) a[i] = load_shared2<0>(columns + in_one(lane) + i * ROWS);
      add_left(acc, a, hot + t * 8 + WHOLE * 64);
    }
  }

  uint4 whole[WHOLE ? WHOLE : 1][4];
  uint2 left[4];

  DEVICE void load(const u8* columns, int lane) {
    const u8 *mine = columns + in_two(lane), *mine_left = columns + in_one(lane);
    keep_base(mine);
#pragma unroll
    for (int w = 0; w < WHOLE; w++)
#pragma unroll
      for (int i = 0; i < 4; i++) whole[w][i] = load_stream16(mine + i * ROWS + w * 2 * TILE);
    if constexpr (LEFT > 0) {
      keep_base(mine_left);
#pragma unroll
      for (int i = 0; i < 4; i++) left[i] = load_stream8(mine_left + i * ROWS);
    }
  }

  // As multiply_copied, after load.
  template <int TILES>
  DEVICE void multiply(float (&acc)[2][TILES][4], u32 hot, int lane) const {
    const int t = lane & 3;
#pragma unroll
    for (int w = 0; w < WHOLE; w++) add_whole(acc, whole[w], hot + t * 16 + w * 64);
    if constexpr (LEFT > 0) add_left(acc, left, hot + t * 8 + WHOLE * 64);
  }

 private:
  template <int TILES>
  static DEVICE void add_whole(float (&acc)[2][TILES][4], const uint4 (&a)[4], u32 hot) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const uint4 b = load_shared4(hot + n * GROUP);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const uint4 low = a[2 * m], high = a[2 * m + 1];
        const u32 first[4] = {low.x, high.x, low.y, high.y};
        const u32 second[4] = {low.z, high.z, low.w, high.w};
        mma<BF16>(acc[m][n], first, b.x, b.y);
        mma<BF16>(acc[m][n], second, b.z, b.w);
      }
    }
  }

  template <int TILES>
  static DEVICE void add_left(float (&acc)[2][TILES][4], const uint2 (&a)[4], u32 hot) {
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const uint2 b = load_shared2<0>(hot + n * GROUP);
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const u32 rows[4] = {a[2 * m].x, a[2 * m + 1].x, a[2 * m].y, a[2 * m + 1].y};
        mma<BF16>(acc[m][n], rows, b.x, b.y);
      }
    }
  }
};

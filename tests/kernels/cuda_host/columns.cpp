// Runs ColumnPart on the host, 32 threads for the lanes of a warp that share its matrix instruction.
#include <barrier>
#include <cstring>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
#define DEVICE inline
enum Format { BF16 };

static u8* memory;
static std::barrier<>* all;
static u32 operands[32][6];
static thread_local int this_lane;

template <typename T>
static T read(const u8* at) { T v; memcpy(&v, at, sizeof v); return v; }
DEVICE uint4 load_stream16(const u8* p) { return read<uint4>(p); }
DEVICE uint2 load_stream8(const u8* p) { return read<uint2>(p); }
DEVICE void keep_base(const u8*&) {}
DEVICE uint4 load_shared4(u32 at) { return read<uint4>(memory + at); }
template <int OFFSET>
DEVICE uint2 load_shared2(u32 at) { return read<uint2>(memory + at + OFFSET); }

// Element k of a row or column of the operands: lane of k in a quad, word, half of it.
static float element(int group, int word, int k) {
  const u32 pair = operands[group * 4 + k % 8 / 2][word];
  const u32 bits = k % 2 ? pair & 0xFFFF0000u : pair << 16;
  float v;
  memcpy(&v, &bits, 4);
  return v;
}

// m16n8k16 as PTX defines it: words 0 to 3 hold rows g, g + 8, g, g + 8 of k 0-7, 0-7, 8-15, 8-15.
template <Format F>
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
  u32* mine = operands[this_lane];
  memcpy(mine, a, 16), mine[4] = b0, mine[5] = b1;
  all->arrive_and_wait();
  const int g = this_lane >> 2, t = this_lane & 3;
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 16; k++)
      d[i] += element(g, (i >> 1) + (k >= 8) * 2, k) * element(2 * t + (i & 1), 4 + (k >= 8), k);
  all->arrive_and_wait();
}

#include "columns.cuh"

constexpr int ROW = 2 * ALL_COLUMNS + 32;

// columns: bfloat16 [experts, 32 * STRIPS_OF_EXPERT, ALL_COLUMNS], tiled, of which COLUMN_COUNT from FIRST_COLUMN on
// are multiplied. hot: shared memory, bfloat16 [16, ROW / 2], and behind it room for a strip's columns,
// which are taken from there if `copied`. y: [32, 16], the sums of all places of a strip.
extern "C" void multiply(const u8* columns, int expert, int strip, u8* hot, float* y, int copied) {
  memory = hot;
  columns = strip_columns<ALL_COLUMNS, STRIPS_OF_EXPERT>(columns, expert, strip);
  memcpy(memory + 16 * ROW, columns, 64 * ALL_COLUMNS);
  std::barrier<> barrier(32);
  all = &barrier;
  std::vector<std::thread> lanes;
  for (int lane = 0; lane < 32; lane++)
    lanes.emplace_back([=] {
      this_lane = lane;
      const int g = lane >> 2, t = lane & 3;
      float acc[2][2][4] = {};
      using Part = ColumnPart<COLUMN_COUNT, ALL_COLUMNS, 8 * ROW>;
      const u32 first = columns_before(FIRST_COLUMN), values = g * ROW + 2 * FIRST_COLUMN;
      if (copied) {
        Part::multiply_copied(acc, 16 * ROW + first, values, lane);
      } else {
        Part part;
        part.load(columns + first, lane);
        part.multiply(acc, values, lane);
      }
      for (int m = 0; m < 2; m++)
        for (int n = 0; n < 2; n++)
          for (int i = 0; i < 4; i++)
            y[(m * 16 + (i >> 1) * 8 + g) * 16 + n * 8 + 2 * t + (i & 1)] = acc[m][n][i];
    });
  for (auto& lane : lanes) lane.join();
}

// The BF16 columns of a strip in the kernels: where they are, who copies and who adds them. See moe.cu.
#pragma once
#include "strips.cuh"

// Columns of a part, where `parts` warps share a strip's: equal shares of whole groups of 16, so that
// the last parts may have none.
constexpr int column_share(int columns, int parts) {
  const int groups = columns / 16;
  int share = (groups + parts - 1) / parts;
  while (share > 0 && groups % share) share++;
  return share * 16;
}

// The BF16 columns of a strip, of which each of SPLIT warps that share its K multiplies a part.
//
// Warps that share strips have few stages each, so the copy engine brings the columns to shared memory
// during the main loop. (Registers cannot wait for them: a load to registers that is under way at the
// loop is waited for together with the loop's first stage.) A warp that has a strip for itself loads
// them behind the loop; its neighbours keep the memory busy.
template <bool DOWN, int SPLIT = 1>
struct StripColumns {
  static constexpr int ALL = DOWN ? COLUMNS2 : COLUMNS13, BYTES = 2 * ALL;
  static constexpr int COUNT = column_share(ALL, SPLIT);
  static constexpr bool COPIES = ALL > 0 && SPLIT > 1;
  static constexpr int GROUP = 8 * (DOWN ? PRODUCT_ROW : X_ROW), STRIP_BYTES = 32 * BYTES;

  // How far behind a strip's first column another one is.
  static DEVICE u32 at(int column) { return 8 * 2 * column; }

  // Of a strip, in memory.
  static DEVICE const u8* columns(const MoeArguments& A, int expert, int strip) {
    const u32 first = expert * (DOWN ? DOWN_STRIPS : UP_STRIPS) + strip;
    return (DOWN ? A.columns.w2 : A.columns.w13) + (u64)first * STRIP_BYTES;
  }

  // Shared address of the copies of this warp's strip. x: that of all dynamic shared memory.
  static DEVICE u32 copies(const MoeArguments& A, u32 x) {
    return x + A.columns.buffer + (threadIdx.x >> 5) / SPLIT * STRIP_BYTES;
  }

  // Copy a strip's columns, by one of the warps that share it; all have used what was copied before.
  static DEVICE void copy(const MoeArguments& A, int expert, int strip, int lane, u32 x, u32 barrier) {
    if (lane == 0) {
      barrier_expect(barrier, STRIP_BYTES);
      bulk_copy(copies(A, x), columns(A, expert, strip), STRIP_BYTES, barrier);
    }
  }

  // acc, sums of a strip or of a part of it, to final units; += columns x hot values. hot: shared
  // address of those of this lane's slot. phase: of the barrier, which changes.
  template <int TILES>
  static DEVICE void add(const MoeArguments& A, float (&acc)[2][TILES][4], const Slots& slots,
                         int expert, int strip, int lane, u32 x, u32 hot, u32 barrier, u32& phase,
                         int part) {
    if constexpr (COPIES) {
      to_units(acc, slots, lane);
      barrier_wait(barrier, phase);
      phase ^= 1;
      if (part * COUNT < ALL)
        ColumnPart<COUNT, ALL, GROUP>::multiply_copied(
            acc, copies(A, x) + columns_before(part * COUNT), hot + part * (2 * COUNT), lane);
    } else {
      add(A, acc, slots, expert, strip, lane, hot);
    }
  }

  template <int TILES>
  static DEVICE void add(const MoeArguments& A, float (&acc)[2][TILES][4], const Slots& slots,
                         int expert, int strip, int lane, u32 hot) {
    if constexpr (ALL > 0) {
      constexpr int BEGIN = COUNT < 64 ? COUNT : 64, REST = COUNT - BEGIN;
      const u8* source = columns(A, expert, strip);
      ColumnPart<BEGIN, ALL, GROUP> begin;
      begin.load(source, lane);
      to_units(acc, slots, lane);
      begin.multiply(acc, hot, lane);
      if constexpr (REST > 0) {
        ColumnPart<REST, ALL, GROUP> rest;
        rest.load(source + columns_before(BEGIN), lane);
        rest.multiply(acc, hot + 2 * BEGIN, lane);
      }
    }
  }

 private:
  template <int TILES>
  static DEVICE void to_units(float (&acc)[2][TILES][4], const Slots& slots, int lane) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int c = 0; c < 2; c++) {
        const int slot = n * 8 + 2 * (lane & 3) + c;
        const float factor = DOWN ? slots.down_factor[slot] : slots.gate_up_factor[slot];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float& sum = acc[i >> 1][n][2 * (i & 1) + c];
          sum = in_units<false>(sum, factor);
        }
      }
  }
};

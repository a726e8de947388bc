// What the kernels take, and a strip of weights on the tensor cores: stages in registers, the main
// loop, and what is made of the sums. See moe.cu.
#pragma once
#include "device.cuh"
#include "columns.cuh"
#include "routes.cuh"
#include "compensate.cuh"

struct MoeArguments {
  const u8* w13;           // tiles of codes [E, I/16, H/128, 2048]
  const u8* w13_scale;     // tiles of E4M3 bytes [E, I/16, H/128, 256]
  const u8* w2;            // [E, H/32, I/128, 2048]
  const u8* w2_scale;      // [E, H/32, I/128, 256]
  const float* w13_global; // [E]
  const float* w2_global;  // [E]
  const u8* x;             // 16-bit operands [T, 8, plane], see `rows.Operand`
  const float* row_scale;  // [T] with FP16, else null
  const float* router;     // [slots] float32, or null: 1
  u8* product;             // moe_up writes, moe_down reads: bfloat16 [slots, 8, I/8]; with INSPECT
                           // moe_both writes it too
  float* out;              // [slots, H]
  const int* sample_map;   // [T] the place of each sampled token, else -1; null: nothing is kept
  u8* staged_rows;         // bfloat16 [places * k, I]: GEMM2's input before it is quantized
  int* staged_groups;      // [places * k]: its expert
  u8* inspect_y;           // with INSPECT: GEMM1's rounded result, bfloat16 [slots, 2I]
  u8* inspect_operand;     // with INSPECT: GEMM2's operand [slots, 8, I/8]
  float* inspect_scale;    // with INSPECT: its row scale [slots]
  Routes routes;
  int rows;                // that fit in shared memory: a multiple of 8
  float limit;             // SwiGLU's clamp, infinity for none
  Compensation compensation;  // of GEMM2's input
  Columns columns;
};

static_assert(sizeof(MoeArguments) == ARGUMENT_BYTES, "the launcher knows another structure");
static_assert(COLUMN_STEP == 16, "see ColumnPart");
static_assert(COLUMNS13 >= 0 && COLUMNS13 % COLUMN_STEP == 0 && COLUMNS13 <= MAX_COLUMNS);
static_assert(COLUMNS2 >= 0 && COLUMNS2 % COLUMN_STEP == 0 && COLUMNS2 <= MAX_COLUMNS);
static_assert(WITH_SPLICE || COLUMNS2 == 0);
static_assert(MAX_COLUMNS <= 128, "StripColumns loads at most twice 64");
static_assert(FORMAT == FP16 || COLUMNS13 + COLUMNS2 == 0, "rows are not scaled without FP4");

constexpr int CODE_TILE = 2048, SCALE_TILE = 256;
constexpr int UP_STRIPS = INNER / 16, DOWN_STRIPS = HIDDEN / 32;

// Rows in shared memory: operand, then hot values, then padding. Planes of the layer's input are padded
// to 32 elements. X_ROW and PRODUCT_ROW, their bytes, are the host's (`hopper_memory.row_bytes`).
constexpr int X_PLANE = (HIDDEN + 255) / 256 * 64, PRODUCT_PLANE = INNER / 4;
constexpr int X_BYTES = 8 * X_PLANE, PRODUCT_BYTES = 8 * PRODUCT_PLANE;
// What the copy engine brings of a row.
constexpr int X_FETCHED = X_BYTES + 2 * COLUMNS13;

// At most 32 bytes of padding, which are enough for rows that begin 32 or 96 bytes apart, modulo 128:
// the 16 lanes that read 8 bytes at a time then fall on different banks.
constexpr bool row_fits(int row, int used) {
  return row >= used && row <= used + 32 && (row % 128 == 32 || row % 128 == 96);
}
static_assert(row_fits(X_ROW, X_FETCHED), "the host knows another X_ROW");
static_assert(row_fits(PRODUCT_ROW, PRODUCT_BYTES + 2 * COLUMNS2), "the host knows another PRODUCT_ROW");

template <int N>
struct Constant {
  static constexpr int value = N;
};

// What a slot needs besides its operand.
struct Slots {
  int ids[MAX_ROWS];
  int staged[MAX_ROWS];  // the row of staged_rows, -1: none
  float gate_up_factor[MAX_ROWS];
  float down_factor[MAX_ROWS];
  float router[MAX_ROWS];
  int channels[COLUMNS2 ? COLUMNS2 : 1];  // of GEMM2's input, of the block's expert
};

// One stage of weights in registers: 32 rows of 128 of K; a lane has two blocks of 4 rows.
struct Stage {
  uint4 codes[4];
  u32 scales[4];
};

template <bool DOWN>
constexpr int STAGES = (DOWN ? INNER : HIDDEN) / 128;

// Where a lane reads its part of a stage: 16 bytes of each 512 codes, 2 bytes of each 64 scales, so
// one offset in units of (16, 2) bytes serves both.
constexpr u32 STAGE_UNITS = CODE_TILE / 16;

template <bool DOWN>
DEVICE void load_stage(const MoeArguments& A, u32 offset, Stage& stage) {
  const u8* codes = (DOWN ? A.w2 : A.w13) + (u64)offset * 16;
  const u8* scales = (DOWN ? A.w2_scale : A.w13_scale) + (u64)offset * 2;
#pragma unroll
  for (int i = 0; i < 4; i++) stage.codes[i] = load_stream16(codes + i * 512);
#pragma unroll
  for (int i = 0; i < 4; i++) stage.scales[i] = load_stream2(scales + i * 64);
}

// acc[m][n][..] += 16 weight rows x 8 slots over 128 of K. x: shared address of this lane's slot and
// first block.
template <bool DOWN, int TILES>
DEVICE void multiply_stage(float (&acc)[2][TILES][4], const Stage& stage, u32 x) {
  constexpr Format F = FORMAT;
  constexpr int PLANE = DOWN ? PRODUCT_PLANE : X_PLANE, GROUP = 8 * (DOWN ? PRODUCT_ROW : X_ROW);
  u32 scale[4][2];
#pragma unroll
  for (int i = 0; i < 4; i++) widen_scales<F>(stage.scales[i], scale[i][0], scale[i][1]);
  auto plane = [&](auto word, auto code) {
    constexpr int W = decltype(word)::value, J = decltype(code)::value;
    uint2 b[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++)
      b[n] = load_shared2<(4 * W + J) * PLANE>(x + n * GROUP);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 low = stage.codes[2 * m], high = stage.codes[2 * m + 1];
      u32 a[4] = {multiply<F>(unpack<F, J>(W ? low.y : low.x), scale[2 * m][0]),
                  multiply<F>(unpack<F, J>(W ? high.y : high.x), scale[2 * m + 1][0]),
                  multiply<F>(unpack<F, J>(W ? low.w : low.z), scale[2 * m][1]),
                  multiply<F>(unpack<F, J>(W ? high.w : high.z), scale[2 * m + 1][1])};
#pragma unroll
      for (int n = 0; n < TILES; n++) mma<F>(acc[m][n], a, b[n].x, b[n].y);
    }
  };
  plane(Constant<0>(), Constant<0>());
  plane(Constant<0>(), Constant<1>());
  plane(Constant<0>(), Constant<2>());
  plane(Constant<0>(), Constant<3>());
  plane(Constant<1>(), Constant<0>());
  plane(Constant<1>(), Constant<1>());
  plane(Constant<1>(), Constant<2>());
  plane(Constant<1>(), Constant<3>());
}

// acc = weights x slots over STAGES stages from `offset` on. `current` holds the first of them, at the
// end that of `next_offset`.
template <bool DOWN, int TILES, int STAGES>
DEVICE void multiply_strip(const MoeArguments& A, float (&acc)[2][TILES][4], Stage& current,
                           u32 offset, u32 next_offset, u32 x) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
  Stage other;
  const u32 end = x + STAGES / 2 * 64;  // of what pairs of stages read
#pragma unroll 1
  while (x != end) {
    load_stage<DOWN>(A, offset + STAGE_UNITS, other);
    multiply_stage<DOWN, TILES>(acc, current, x);
    offset += 2 * STAGE_UNITS;
    if (STAGES % 2 == 0 && x + 64 == end) offset = next_offset;
    load_stage<DOWN>(A, offset, current);
    multiply_stage<DOWN, TILES>(acc, other, x + 32);
    x += 64;
  }
  if constexpr (STAGES % 2 != 0) {
    load_stage<DOWN>(A, next_offset, other);
    multiply_stage<DOWN, TILES>(acc, current, x);
    current = other;
  }
}

// A whole sum in final units; what columns were added to is there.
template <bool COLUMNS>
DEVICE float in_units(float sum, float factor) {
  return COLUMNS ? sum : __fmul_rn(sum * undo<FORMAT>(), factor);
}

DEVICE float silu_and_multiply(float gate, float up, float limit) {
  // Comparisons, not min and max, keep NaN.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return __fmul_rn(__fdiv_rn(gate, 1.0f + __expf(-gate)), up);
}

// A strip of gate and up: their product, rounded, to `store(slot, offset, pair)`.
template <int TILES, typename Store>
DEVICE void finish_up(const MoeArguments& A, const float (&acc)[2][TILES][4], const Slots& slots,
                      int rows, int strip, int lane, Store store) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int slot = n * 8 + 2 * t + c;
      if (slot < rows) {
        const float factor = slots.gate_up_factor[slot];
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          y[i] = round_bf16(in_units<COLUMNS13 != 0>(acc[i >> 1][n][2 * (i & 1) + c], factor));
        const u32 pair = pack_bf16(silu_and_multiply(y[0], y[2], A.limit),
                                   silu_and_multiply(y[1], y[3], A.limit));
        const u32 offset = g * PRODUCT_PLANE + strip * 4;
        store(slot, offset, pair);
#ifdef INSPECT
        u16* line = (u16*)A.inspect_y + (u64)slots.ids[slot] * 2 * INNER;
#pragma unroll
        for (int i = 0; i < 4; i++)
          line[(i >> 1) * INNER + strip * 16 + (i & 1) * 8 + g] = as_bits(y[i]) >> 16;
#endif
      }
    }
}

// A strip of down: (acc * factor) * router weight in float32, to `out`.
template <int TILES>
DEVICE void finish_down(const MoeArguments& A, const float (&acc)[2][TILES][4], const Slots& slots,
                        int rows, int strip, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int slot = n * 8 + 2 * t + c;
      if (slot < rows) {
        const float factor = slots.down_factor[slot], router = slots.router[slot];
        float y[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
          y[i] = __fmul_rn(in_units<COLUMNS2 != 0>(acc[i >> 1][n][2 * (i & 1) + c], factor), router);
        float4* target = (float4*)(A.out + (u64)slots.ids[slot] * HIDDEN + strip * 32 + g * 4);
        *target = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
}

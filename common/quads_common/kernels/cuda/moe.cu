// The routed experts of an MoE layer for few tokens: NVFP4 weights, 16-bit operands, sm_90a.
//
// Weights are the left operand of the tensor cores, unpacked in registers, read from memory once and
// straight into registers one stage ahead; activations stay in shared memory. A *block* is up to 32
// slots of one expert, a *strip* 32 rows of a weight tile (`weight_tiles.TileLayout`): 16 of gate and
// the same 16 of up, or 32 of down. A warp computes whole strips (but for the few), so a slot's result
// depends on no other slot, nor on which kernel it is.
//
// moe_both does both GEMMs of a block in one thread block; moe_up and moe_down do one each, with the
// strips of all blocks spread evenly; moe_up_few and moe_down_few, of blocks of at most 8 slots, also
// spread K over several warps. The rounding points are those of `quads_common.moe`.
//
// Compiled for one shape: HIDDEN and INNER (multiples of 128), FORMAT (BF16 or FP16), WITH_RAC and
// WITH_SPLICE (0 or 1): what compensates GEMM2's input; COLUMNS13 and COLUMNS2 (multiples of 16): how
// many hot channels of the GEMMs' inputs have BF16 columns. With COLUMNS2 there is WITH_SPLICE.
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
static_assert(COLUMNS13 % 16 == 0 && COLUMNS13 <= MAX_COLUMNS);
static_assert(COLUMNS2 % 16 == 0 && COLUMNS2 <= MAX_COLUMNS && (WITH_SPLICE || COLUMNS2 == 0));
static_assert(FORMAT == FP16 || COLUMNS13 + COLUMNS2 == 0, "rows are not scaled without FP4");

constexpr int CODE_TILE = 2048, SCALE_TILE = 256;
constexpr int UP_STRIPS = INNER / 16, DOWN_STRIPS = HIDDEN / 32;

// Rows in shared memory: operand, then hot values. Planes of the layer's input are padded to 32
// elements.
constexpr int X_PLANE = (HIDDEN + 255) / 256 * 64, PRODUCT_PLANE = INNER / 4;
constexpr int X_BYTES = 8 * X_PLANE, PRODUCT_BYTES = 8 * PRODUCT_PLANE;
constexpr int X_ROW = X_BYTES + row_end(COLUMNS13), PRODUCT_ROW = PRODUCT_BYTES + row_end(COLUMNS2);
// What the copy engine brings of a row.
constexpr int X_FETCHED = X_BYTES + 2 * COLUMNS13;

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

// Columns of a part, where `parts` warps share a strip's: equal shares of whole groups of 16, so that
// the last parts may have none.
constexpr int column_share(int columns, int parts) {
  const int groups = columns / 16;
  int share = (groups + parts - 1) / parts;
  while (share > 0 && groups % share) share++;
  return share * 16;
}

// The BF16 columns of a strip, or of one of SPLIT parts. Where registers allow, a lane loads its part
// before the strip's main loop; else the strip's rows go to the L2 cache then.
template <bool DOWN, int TILES, int SPLIT = 1>
struct StripColumns {
  static constexpr int ALL = DOWN ? COLUMNS2 : COLUMNS13, BYTES = 2 * ALL;
  static constexpr int COUNT = column_share(ALL, SPLIT);
  static constexpr int FIRST = COUNT < 64 ? COUNT : 64, REST = COUNT - FIRST;
  static constexpr bool EARLY = TILES <= 2;
  // See finish_up and finish_down.
  static constexpr int LOW = DOWN ? BYTES : 8 * BYTES, HIGH = DOWN ? 2 * BYTES : INNER * BYTES;
  template <int PART>
  using Part = ColumnPart<PART, LOW, HIGH, 8 * (DOWN ? PRODUCT_ROW : X_ROW)>;
  Part<FIRST> first;

  // Of place `place` of a strip, up to 15.
  static DEVICE const u8* row(const MoeArguments& A, int expert, int strip, int place) {
    if (DOWN) return A.columns.w2 + (u64)(expert * HIDDEN + strip * 32 + place * 4) * BYTES;
    return A.columns.w13 + (u64)(expert * 2 * INNER + strip * 16 + place) * BYTES;
  }

  DEVICE void start(const MoeArguments& A, int expert, int strip, int lane, int part = 0) {
    if constexpr (ALL > 0) {
      if (EARLY && part * COUNT < ALL)
        first.load(row(A, expert, strip, lane >> 2) + part * (2 * COUNT), lane & 3);
      if ((!EARLY || REST > 0) && part == 0) {
        const u8* rows = row(A, expert, strip, 0);
        if (lane < (DOWN ? 1 : 2)) bulk_prefetch(rows + lane * HIGH, (DOWN ? 32 : 16) * BYTES);
      }
    }
  }

  // acc, sums of a strip or of a part of it, to final units; += columns x hot values. hot: shared
  // address of those of this lane's slot.
  DEVICE void add(const MoeArguments& A, float (&acc)[2][TILES][4], const Slots& slots, int expert,
                  int strip, int lane, u32 hot, int part = 0) {
    if constexpr (ALL > 0) {
      const int t = lane & 3;
      const u8* rows = row(A, expert, strip, lane >> 2) + part * (2 * COUNT);
      if (!EARLY) first.load(rows, t);
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const int slot = n * 8 + 2 * t + c;
          const float factor = DOWN ? slots.down_factor[slot] : slots.gate_up_factor[slot];
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float& sum = acc[i >> 1][n][2 * (i & 1) + c];
            sum = in_units<false>(sum, factor);
          }
        }
      if (part * COUNT >= ALL) return;
      hot += part * (2 * COUNT);
      first.multiply(acc, hot, t);
      if constexpr (REST > 0) {
        Part<REST> rest;
        rest.load(rows + 2 * FIRST, t);
        rest.multiply(acc, hot + 2 * FIRST, t);
      }
    }
  }
};

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

// Start the copies of a block's rows and note its slots' factors. All threads; a barrier must follow.
template <bool DOWN>
DEVICE void fetch_rows(const MoeArguments& A, const Block& block, Slots& slots, Maxima& maxima,
                       u32 target, u32 barrier) {
  constexpr int BYTES = DOWN ? PRODUCT_BYTES : X_BYTES, ROW = DOWN ? PRODUCT_ROW : X_ROW;
  const int tid = threadIdx.x;
  if (tid < MAX_ROWS) maxima.cold[tid] = maxima.hot[tid] = 0;
  if (tid < block.rows) {
    const int slot = block.slots[tid], token = slot / A.routes.top_k;
    const u8* source = DOWN ? A.product + (u64)slot * BYTES : A.x + (u64)token * BYTES;
    bulk_copy(target + tid * ROW, source, BYTES, barrier);
    if (!DOWN && COLUMNS13 > 0)
      bulk_copy(target + tid * ROW + BYTES, A.columns.hot + (u64)token * (2 * COLUMNS13),
                2 * COLUMNS13, barrier);
    slots.ids[tid] = slot;
    const int place = A.sample_map ? A.sample_map[token] : -1;
    slots.staged[tid] = place < 0 ? -1 : place * A.routes.top_k + slot % A.routes.top_k;
    const float row_scale = A.row_scale ? A.row_scale[token] : 1.0f;
    slots.gate_up_factor[tid] = __fmul_rn(row_scale, A.w13_global[block.expert]);
    slots.down_factor[tid] = A.w2_global[block.expert];  // times the row's scale, if quantized
    slots.router[tid] = A.router ? A.router[slot] : 1.0f;
  }
  if (COLUMNS2 > 0 && tid < COLUMNS2)
    slots.channels[tid] = A.columns.channels[block.expert * A.columns.channels_stride + tid];
}

#ifdef INSPECT
// The rows of a block in shared memory to those of its slots in `target`, by all threads.
DEVICE void copy_rows(u8* target, const Block& block, const Slots& slots, u32 rows) {
  for (int row = 0; row < block.rows; row++)
    for (int word = threadIdx.x; word < PRODUCT_BYTES / 4; word += THREADS)
      ((u32*)(target + (u64)slots.ids[row] * PRODUCT_BYTES))[word] =
          load_shared(rows + row * PRODUCT_ROW + word * 4);
}
#endif

// The products of sampled tokens to `staged_rows`, a warp a row.
DEVICE void stage_products(const MoeArguments& A, const Block& block, const Slots& slots,
                           u32 products, int warp, int lane) {
#pragma unroll 1
  for (int row = warp; row < block.rows; row += WARPS) {
    const int staged = slots.staged[row];
    if (staged < 0) continue;
    if (lane == 0) A.staged_groups[staged] = block.expert;
#pragma unroll 1
    for (int word = lane; word < PRODUCT_PLANE / 4; word += 32)
      store_in_order(A.staged_rows + (u64)staged * (INNER * 2) + word * 32,
                     products + row * PRODUCT_ROW + word * 4, PRODUCT_PLANE);
  }
}

using ProductLists = Lists<INNER / 16>;

// The lists behind `rows` bytes of rows; the address is computed anew each time.
DEVICE ProductLists* lists_at(u8* memory, int rows) {
  keep_inside(rows);
  return (ProductLists*)(memory + rows);
}

// The products of hot channels to behind their rows, a warp a row; before a row is overwritten.
DEVICE void gather_hot(const Block& block, const Slots& slots, u32 products, int warp, int lane) {
  if (COLUMNS2 > 0) {
#pragma unroll 1
    for (int row = warp; row < block.rows; row += WARPS) {
      const u32 at = products + row * PRODUCT_ROW;
      gather_row<COLUMNS2, PRODUCT_PLANE>(at, at + PRODUCT_BYTES, slots.channels, lane);
    }
  }
}

// Quantize the products of a block, or of two. Begins and ends with what all threads see.
template <int LANES>
DEVICE void quantize_products(const MoeArguments& A, const Block* block, Slots* slots, Maxima* maxima,
                              const ProductLists* lists, u32 first, u32 second, bool two) {
  quantize_rows<INNER / 16, PRODUCT_PLANE, PRODUCT_ROW, LANES, WITH_RAC, WITH_SPLICE, COLUMNS2 != 0>(
      first, block[0].rows, second, two ? block[1].rows : 0, maxima, lists, A.compensation.alpha,
      [&](int i, int row, float factor) {
        slots[i].down_factor[row] = __fmul_rn(factor, slots[i].down_factor[row]);
#ifdef INSPECT
        A.inspect_scale[slots[i].ids[row]] = factor;
#endif
      });
#ifdef INSPECT
  copy_rows(A.inspect_operand, block[0], slots[0], first);
  if (two) copy_rows(A.inspect_operand, block[1], slots[1], second);
#endif
}

// acc of a team's first warp += those of its others, in their order. By all warps.
template <int SPLIT, int TILES>
DEVICE void sum_parts(float (&acc)[2][TILES][4], bool inside, int warp, int lane) {
  static_assert(TILES == 1);
  __shared__ float4 parts[WARPS][2][32];
  if (inside)
#pragma unroll
    for (int m = 0; m < 2; m++)
      parts[warp][m][lane] = make_float4(acc[m][0][0], acc[m][0][1], acc[m][0][2], acc[m][0][3]);
  __syncthreads();
  if (inside && warp % SPLIT == 0)
#pragma unroll
    for (int p = 1; p < SPLIT; p++)
#pragma unroll
      for (int m = 0; m < 2; m++) {
        const float4 other = parts[warp + p][m][lane];
        acc[m][0][0] += other.x;
        acc[m][0][1] += other.y;
        acc[m][0][2] += other.z;
        acc[m][0][3] += other.w;
      }
  __syncthreads();
}

template <typename Run>
DEVICE void by_tiles(int rows, Run run) {
  if (rows <= 8)
    run(Constant<1>());
  else if (rows <= 16)
    run(Constant<2>());
  else if (rows <= 24)
    run(Constant<3>());
  else
    run(Constant<4>());
}

// First unit of a strip of an expert, for this lane.
template <bool DOWN>
DEVICE u32 strip_offset(int expert, int strip, int lane) {
  constexpr u32 STRIPS = DOWN ? DOWN_STRIPS : UP_STRIPS;
  return (expert * STRIPS + strip) * (STAGES<DOWN> * STAGE_UNITS) + lane;
}

// Both GEMMs of a block in one thread block. Grid: any; blocks are dealt out in turn.
DEVICE void both_halves(const MoeArguments& A) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  __shared__ Block block;
  __shared__ Slots slots;
  __shared__ Maxima maxima;
  __shared__ int next_block;
  __shared__ __align__(8) u64 barrier_memory;
  const int tid = threadIdx.x, warp = tid >> 5;
  int lane = tid & 31;
  u32 x = shared_address(memory);
  const u32 barrier = shared_address(&barrier_memory);
  if (tid == 0) barrier_init(barrier, 1);
  if (tid == 0) next_block = blockIdx.x;  // in shared memory: registers are short below
  let_next_kernel_start();
  place_experts(A.routes, routing);  // the routes are older than the kernel in front
  while (true) {
    keep_inside(x);
    keep_inside(lane);
    const u32 products = x + A.rows * X_ROW;
    fence_copy_engine();
    __syncthreads();
    const int b = next_block;
    if (b >= routing.blocks) return;
    gather_block(A.routes, b, routing, block);
    if (tid == 0) next_block = b + gridDim.x;  // all have read it
    lists_at(memory, A.rows * (X_ROW + PRODUCT_ROW))
        ->fetch<WITH_RAC, WITH_SPLICE>(A.compensation, block.expert);
    Stage current;
    load_stage<false>(A, strip_offset<false>(block.expert, min(warp, UP_STRIPS - 1), lane), current);
    if (b == blockIdx.x) wait_for_previous_kernel();
    if (tid == 0) barrier_expect(barrier, block.rows * X_FETCHED);
    fetch_rows<false>(A, block, slots, maxima, x, barrier);
    __syncthreads();
    barrier_wait(barrier, b / gridDim.x & 1);  // one phase a round
    by_tiles(block.rows, [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      float acc[2][TILES][4];
      for (int strip = warp; strip < UP_STRIPS; strip += WARPS) {
        const int next = min(strip + WARPS, UP_STRIPS - 1);
        const u32 row = x + (lane >> 2) * X_ROW;
        StripColumns<false, TILES> columns;
        columns.start(A, block.expert, strip, lane);
        multiply_strip<false, TILES, STAGES<false>>(
            A, acc, current, strip_offset<false>(block.expert, strip, lane),
            strip_offset<false>(block.expert, next, lane), row + (lane & 3) * 8);
        columns.add(A, acc, slots, block.expert, strip, lane, row + X_BYTES);
        finish_up<TILES>(A, acc, slots, block.rows, strip, lane, [&](int slot, int at, u32 pair) {
          store_shared(products + slot * PRODUCT_ROW + at, pair);
        });
      }
    });
    load_stage<true>(A, strip_offset<true>(block.expert, min(warp, DOWN_STRIPS - 1), lane), current);
    wait_for_copies();
    __syncthreads();
#ifdef INSPECT
    copy_rows(A.product, block, slots, products);
#endif
    if (FORMAT == FP16) {
      if (A.sample_map) stage_products(A, block, slots, products, warp, lane);
      gather_hot(block, slots, products, warp, lane);
      quantize_products<1>(A, &block, &slots, &maxima,
                           lists_at(memory, A.rows * (X_ROW + PRODUCT_ROW)), products, 0, false);
    }
    by_tiles(block.rows, [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      float acc[2][TILES][4];
      for (int strip = warp; strip < DOWN_STRIPS; strip += WARPS) {
        const int next = min(strip + WARPS, DOWN_STRIPS - 1);
        const u32 row = products + (lane >> 2) * PRODUCT_ROW;
        StripColumns<true, TILES> columns;
        columns.start(A, block.expert, strip, lane);
        multiply_strip<true, TILES, STAGES<true>>(
            A, acc, current, strip_offset<true>(block.expert, strip, lane),
            strip_offset<true>(block.expert, next, lane), row + (lane & 3) * 8);
        columns.add(A, acc, slots, block.expert, strip, lane, row + PRODUCT_BYTES);
        finish_down<TILES>(A, acc, slots, block.rows, strip, lane);
      }
    });
  }
}

// Warps that share the K of a strip. With more than one, a strip's parts are summed in their order.
template <bool DOWN, bool FEW>
constexpr int PARTS = !FEW                   ? 1
                      : STAGES<DOWN> % 4 == 0 ? 4
                      : STAGES<DOWN> % 3 == 0 ? 3
                      : STAGES<DOWN> % 2 == 0 ? 2
                                              : 1;

// Strips begin .. end of all blocks' that a thread block has in shared memory; from split on they are
// the second block's, whose rows begin at second_row. `last`: where its share ends.
struct Work {
  int begin, split, end, last, second_row;

  DEVICE bool two() const { return end > split; }

  // First unit of a strip for this lane; of the last one for strips behind it.
  template <bool DOWN>
  DEVICE u32 offset(const Block (&block)[2], int strip, int lane) const {
    strip = min(strip, end - 1);
    const int i = strip >= split;
    const int own = strip - split + (i ? 0 : DOWN ? DOWN_STRIPS : UP_STRIPS);
    return strip_offset<DOWN>(block[i].expert, own, lane);
  }
};

// One GEMM of all blocks: thread block c has the strips c * n / grid .. (c + 1) * n / grid of all n.
// Two blocks are in shared memory at a time, if their rows fit. FEW: blocks have at most 8 rows.
template <bool DOWN, bool FEW>
DEVICE void one_half(const MoeArguments& A) {
  constexpr int BYTES = DOWN ? PRODUCT_BYTES : X_BYTES, ROW = DOWN ? PRODUCT_ROW : X_ROW;
  constexpr int FETCHED = DOWN ? PRODUCT_BYTES : X_FETCHED;
  constexpr int STRIPS = DOWN ? DOWN_STRIPS : UP_STRIPS;
  constexpr int SPLIT = PARTS<DOWN, FEW>, TEAMS = WARPS / SPLIT, SHARE = STAGES<DOWN> / SPLIT;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  __shared__ Block block[2];
  __shared__ Slots slots[2];
  __shared__ Maxima maxima[2];
  __shared__ Work work;
  __shared__ __align__(8) u64 barrier_memory;
  const int tid = threadIdx.x, warp = tid >> 5;
  int lane = tid & 31;
  const int team = warp / SPLIT, part = warp % SPLIT;
  const u32 part_offset = part * SHARE * STAGE_UNITS;
  u32 x = shared_address(memory);
  const u32 barrier = shared_address(&barrier_memory);
  if (tid == 0) barrier_init(barrier, 1);
  let_next_kernel_start();
  // The routes are older than the kernel in front.
  const bool few = FEW && A.routes.slots <= 32;
  FewSlots few_slots;
  if (few) {
    few_slots.load(A.routes);
    const int blocks = few_slots.blocks(A.routes);
    if (tid == 0) routing.blocks = blocks;
  } else {
    place_experts(A.routes, routing);
  }
  u32 phase = 0;
  for (bool started = false;; started = true) {
    keep_inside(x);
    keep_inside(lane);
    fence_copy_engine();
    __syncthreads();
    if (tid == 0) {
      const long long total = routing.blocks * STRIPS;
      work.begin = started ? work.end : (int)(total * blockIdx.x / gridDim.x);
      work.last = (int)(total * (blockIdx.x + 1) / gridDim.x);
      work.split = (work.begin / STRIPS + 1) * STRIPS;
      work.end = min(work.last, work.split + STRIPS);
    }
    __syncthreads();
    if (work.begin >= work.last) return;
    for (int i = 0; i <= (work.end > work.split); i++) {
      const int b = work.begin / STRIPS + i;
      if (few)
        few_slots.gather_block(A.routes, b, block[i]);
      else
        gather_block(A.routes, b, routing, block[i]);
    }
    if (tid == 0) {
      work.second_row = groups_of_8(block[0].rows) * 8;
      // Both are multiplied as if they had the rows of the larger one: none lies outside.
      if (work.end > work.split &&
          work.second_row + groups_of_8(max(block[0].rows, block[1].rows)) * 8 > A.rows)
        work.end = work.split;
    }
    __syncthreads();
    if (DOWN)
      for (int i = 0; i <= work.two(); i++)
        lists_at(memory, A.rows * ROW)[i].fetch<WITH_RAC, WITH_SPLICE>(A.compensation, block[i].expert);
    Stage current;
    load_stage<DOWN>(A, work.offset<DOWN>(block, work.begin + team, lane) + part_offset, current);
    if (!started) wait_for_previous_kernel();
    if (tid == 0)
      barrier_expect(barrier, (block[0].rows + (work.two() ? block[1].rows : 0)) * FETCHED);
    fetch_rows<DOWN>(A, block[0], slots[0], maxima[0], x, barrier);
    if (work.two())
      fetch_rows<DOWN>(A, block[1], slots[1], maxima[1], x + work.second_row * ROW, barrier);
    wait_for_copies();
    __syncthreads();
    barrier_wait(barrier, phase);
    phase ^= 1;
    if (DOWN && FORMAT == FP16) {
      const u32 second = x + work.second_row * ROW;
      // Of the thread blocks that share a block, the one that has its first strip.
      if (A.sample_map && work.begin % STRIPS == 0)
        stage_products(A, block[0], slots[0], x, warp, lane);
      if (A.sample_map && work.two()) stage_products(A, block[1], slots[1], second, warp, lane);
      gather_hot(block[0], slots[0], x, warp, lane);
      if (work.two()) gather_hot(block[1], slots[1], second, warp, lane);
      quantize_products<FEW ? 4 : 2>(A, block, slots, maxima, lists_at(memory, A.rows * ROW), x,
                                     second, work.two());
    }
    auto run = [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      for (int strip = work.begin + team; FEW ? strip - team < work.end : strip < work.end;
           strip += TEAMS) {
        float acc[2][TILES][4];
        const bool inside = !FEW || (strip < work.end && team < TEAMS);
        const int i = inside && strip >= work.split;
        const int own = strip - work.split + (i ? 0 : STRIPS);
        const int row = (i ? work.second_row : 0) + (lane >> 2);
        StripColumns<DOWN, TILES, SPLIT> columns;
        const u32 hot = x + row * ROW + BYTES;
        if (inside) {
          columns.start(A, block[i].expert, own, lane, part);
          multiply_strip<DOWN, TILES, SHARE>(
              A, acc, current, work.offset<DOWN>(block, strip, lane) + part_offset,
              work.offset<DOWN>(block, strip + TEAMS, lane) + part_offset,
              x + row * ROW + (lane & 3) * 8 + part * SHARE * 32);
          columns.add(A, acc, slots[i], block[i].expert, own, lane, hot, part);
        }
        if constexpr (SPLIT > 1) sum_parts<SPLIT, TILES>(acc, inside, warp, lane);
        if (inside && part == 0) {
          if constexpr (DOWN)
            finish_down<TILES>(A, acc, slots[i], block[i].rows, own, lane);
          else
            finish_up<TILES>(A, acc, slots[i], block[i].rows, own, lane,
                             [&](int slot, int at, u32 pair) {
              *(u32*)(A.product + (u64)slots[i].ids[slot] * PRODUCT_BYTES + at) = pair;
            });
        }
      }
    };
    if constexpr (FEW)
      run(Constant<1>());
    else
      by_tiles(work.two() ? max(block[0].rows, block[1].rows) : block[0].rows, run);
  }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
KERNEL moe_both(const __grid_constant__ MoeArguments A) { both_halves(A); }
KERNEL moe_up(const __grid_constant__ MoeArguments A) { one_half<false, false>(A); }
KERNEL moe_down(const __grid_constant__ MoeArguments A) { one_half<true, false>(A); }
KERNEL moe_up_few(const __grid_constant__ MoeArguments A) { one_half<false, true>(A); }
KERNEL moe_down_few(const __grid_constant__ MoeArguments A) { one_half<true, true>(A); }

// For tests: the blocks of a batch, int32 [blocks, 2 + MAX_ROWS] (expert, rows, slots), their number
// in front. Grid: the most blocks there can be.
#ifdef INSPECT
KERNEL list_blocks(const __grid_constant__ MoeArguments A) {
  __shared__ Routing routing;
  __shared__ Block block;
  place_experts(A.routes, routing);
  int* list = (int*)A.out;
  if (blockIdx.x == 0 && threadIdx.x == 0) list[0] = routing.blocks;
  if (blockIdx.x >= routing.blocks) return;
  gather_block(A.routes, blockIdx.x, routing, block);
  int* line = list + 1 + blockIdx.x * (2 + MAX_ROWS);
  if (threadIdx.x < MAX_ROWS) line[2 + threadIdx.x] = block.slots[threadIdx.x];
  if (threadIdx.x == 0) line[0] = block.expert;
  if (threadIdx.x == 0) line[1] = block.rows;
}
#endif

// The routed experts of an MoE layer for few tokens: NVFP4 weights, 16-bit operands, sm_90a.
//
// Weights are the left operand of the tensor cores, unpacked in registers, read from memory once and
// straight into registers one stage ahead; activations stay in shared memory. A *block* is up to 32
// slots of one expert, a *strip* 32 rows of a weight tile (`weight_tiles.TileLayout`): 16 of gate and
// the same 16 of up, or 32 of down. A warp computes whole strips, so nothing is summed across warps
// and a slot's result depends on no other slot.
//
// moe_both does both GEMMs of a block in one thread block; moe_up and moe_down do one each, with the
// strips of all blocks spread evenly. The rounding points are those of `quads_common.moe`.
#include "device.cuh"
#include "table.cuh"

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
  const int* table;        // see table.cuh; null: made here from ids, at most 32 slots
  u8* product;             // moe_up writes, moe_down reads: bfloat16 [slots, 8, I/8]
  float* out;              // [slots, H]
  u8* inspect_y;           // with INSPECT: GEMM1's rounded result, bfloat16 [slots, 2I]
  u8* inspect_operand;     // with INSPECT: GEMM2's operand [slots, 8, I/8]
  float* inspect_scale;    // with INSPECT: its row scale [slots]
  Routes routes;
  int hidden, inner, plane;
  int rows;                // slots of a block at most: a multiple of 8
  float limit;             // SwiGLU's clamp, infinity for none
};

constexpr int WARPS = 16;
constexpr int CODE_TILE = 2048, SCALE_TILE = 256;

template <int N>
struct Constant {
  static constexpr int value = N;
};

// What a slot needs besides its operand.
struct Slots {
  int ids[MAX_ROWS];
  float gate_up_factor[MAX_ROWS];
  float down_factor[MAX_ROWS];
  float router[MAX_ROWS];
};

// One stage of weights in registers: 32 rows of 128 of K; a lane has two blocks of 4 rows.
struct Stage {
  uint4 codes[4];
  u32 scales[4];
};

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
// first block. plane_bytes: distance of the 8 planes of an operand. group: of 8 slots.
template <Format F, int TILES>
DEVICE void multiply_stage(float (&acc)[2][TILES][4], const Stage& stage, u32 x, int plane_bytes,
                           int group_bytes) {
  u32 scale[4][2];
#pragma unroll
  for (int i = 0; i < 4; i++) widen_scales<F>(stage.scales[i], scale[i][0], scale[i][1]);
  auto plane = [&](auto word, auto code) {
    constexpr int W = decltype(word)::value, J = decltype(code)::value;
    uint2 b[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++)
      b[n] = load_shared2(x + n * group_bytes + (4 * W + J) * plane_bytes);
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

// A strip: acc = weights x slots over all of K. `current` holds the strip's first stage, that of
// `offset`, and at the end that of `next_offset`.
template <Format F, bool DOWN, int TILES>
DEVICE void multiply_strip(const MoeArguments& A, float (&acc)[2][TILES][4], Stage& current,
                           u32 offset, u32 next_offset, u32 x, int plane_bytes, int group_bytes) {
#pragma unroll
  for (int m = 0; m < 2; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
  Stage other;
  int left = (DOWN ? A.inner : A.hidden) / 128;
#pragma unroll 1
  for (;;) {
    offset = --left ? offset + STAGE_UNITS : next_offset;
    load_stage<DOWN>(A, offset, other);
    multiply_stage<F, TILES>(acc, current, x, plane_bytes, group_bytes);
    if (left == 0) {
      current = other;
      break;
    }
    offset = --left ? offset + STAGE_UNITS : next_offset;
    load_stage<DOWN>(A, offset, current);
    multiply_stage<F, TILES>(acc, other, x + 32, plane_bytes, group_bytes);
    if (left == 0) break;
    x += 64;
  }
}

DEVICE float silu_and_multiply(float gate, float up, float limit) {
  // Comparisons, not min and max, keep NaN.
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up;
  up = up < -limit ? -limit : up;
  return __fmul_rn(__fdiv_rn(gate, 1.0f + __expf(-gate)), up);
}

// A strip of gate and up: their product, rounded, to `store(slot, pair address, pair)`.
template <Format F, int TILES, typename Store>
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
          y[i] = round_bf16(__fmul_rn(acc[i >> 1][n][2 * (i & 1) + c] * undo<F>(), factor));
#ifdef INSPECT
        u16* line = (u16*)A.inspect_y + (u64)slots.ids[slot] * 2 * A.inner;
#pragma unroll
        for (int i = 0; i < 4; i++)
          line[(i >> 1) * A.inner + strip * 16 + (i & 1) * 8 + g] = as_bits(y[i]) >> 16;
#endif
        const u32 pair = pack_bf16(silu_and_multiply(y[0], y[2], A.limit),
                                   silu_and_multiply(y[1], y[3], A.limit));
        store(slot, g * (A.inner / 4) + strip * 4, pair);
      }
    }
}

// A strip of down: (acc * factor) * router weight in float32, to `out`.
template <Format F, int TILES>
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
          y[i] = __fmul_rn(__fmul_rn(acc[i >> 1][n][2 * (i & 1) + c] * undo<F>(), factor), router);
        float4* target = (float4*)(A.out + (u64)slots.ids[slot] * A.hidden + strip * 32 + g * 4);
        *target = make_float4(y[0], y[1], y[2], y[3]);
      }
    }
}

// Products of one slot in shared memory, bfloat16 [8, I/8], to float16 code * block scale, in place.
// One warp; returns the row's scale. As `_quantize.quantize_rows_kernel`.
DEVICE float quantize_row(u32 row, int inner, int lane) {
  const int plane_bytes = inner / 4, blocks = inner / 16;
  u32 largest = 0;
  for (int block = lane; block < blocks; block += 32)
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 pair = load_shared(row + j * plane_bytes + block * 4) & 0x7FFF7FFFu;
      largest = max(largest, max(pair << 16, pair & 0xFFFF0000u));
    }
  largest = __reduce_max_sync(~0u, largest);
  const bool bad = largest >= 0x7F800000u;
  const float amax = bad ? 0.0f : as_float(largest);
  const float inverse = amax < AMAX_FLOOR ? 1.0f : __fdiv_rn(2688.0f, amax);
  const float global = __fdiv_rn(1.0f, inverse);
  for (int block = lane; block < blocks; block += 32) {
    u32 pairs[8], block_max = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      pairs[j] = load_shared(row + j * plane_bytes + block * 4);
      const u32 pair = pairs[j] & 0x7FFF7FFFu;
      block_max = max(block_max, max(pair << 16, pair & 0xFFFF0000u));
    }
    const float scale = decode_e4m3(
        encode_e4m3(__fmul_rn(as_float(block_max), __fmul_rn(inverse, ONE_SIXTH))));
    const float decode = __fmul_rn(scale, global);
    const float encode = decode == 0.0f ? 0.0f : fminf(__fdiv_rn(1.0f, decode), FLT_MAX);
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const u32 pair = pack_fp16(round_e2m1(__fmul_rn(bf16_low(pairs[j]), encode)) * scale,
                                 round_e2m1(__fmul_rn(bf16_high(pairs[j]), encode)) * scale);
      store_shared(row + j * plane_bytes + block * 4, bad ? 0x7FFF7FFFu : pair);
    }
  }
  return bad ? as_float(0x7FC00000u) : global;
}

// Bytes of an operand row in shared memory: 32 more than its planes, so that the 16 lanes that read
// 8 bytes at a time fall on different banks.
DEVICE int row_bytes(int planes_bytes) { return planes_bytes + 32; }

// Start the copies of a block's rows and note its slots' factors. All threads; ends before a barrier.
template <bool DOWN>
DEVICE void fetch_rows(const MoeArguments& A, const Block& block, Slots& slots, u32 target,
                       u32 barrier) {
  const int tid = threadIdx.x;
  const u32 bytes = DOWN ? A.inner * 2 : A.plane * 16;
  if (tid < block.rows) {
    const int slot = block.slots[tid], token = slot / A.routes.top_k;
    const u8* source = DOWN ? A.product + (u64)slot * bytes : A.x + (u64)token * bytes;
    bulk_copy(target + tid * row_bytes(bytes), source, bytes, barrier);
    slots.ids[tid] = slot;
    const float row_scale = A.row_scale ? A.row_scale[token] : 1.0f;
    slots.gate_up_factor[tid] = __fmul_rn(row_scale, A.w13_global[block.expert]);
    slots.down_factor[tid] = A.w2_global[block.expert];  // times the row's scale, if quantized
    slots.router[tid] = A.router ? A.router[slot] : 1.0f;
  }
}

// Quantize the products of a block, a warp a row. A barrier must follow.
DEVICE void quantize_block(const MoeArguments& A, const Block& block, Slots& slots, u32 products,
                           int warp, int lane) {
  for (int row = warp; row < block.rows; row += WARPS) {
    const u32 at = products + row * row_bytes(A.inner * 2);
    const float scale = quantize_row(at, A.inner, lane);
    if (lane == 0) {
      slots.down_factor[row] = __fmul_rn(scale, slots.down_factor[row]);
#ifdef INSPECT
      A.inspect_scale[slots.ids[row]] = scale;
#endif
    }
#ifdef INSPECT
    __syncwarp();
    for (int word = lane; word < A.inner / 2; word += 32)
      ((u32*)A.inspect_operand)[(u64)slots.ids[row] * (A.inner / 2) + word] =
          load_shared(at + word * 4);
#endif
  }
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
DEVICE u32 strip_offset(const MoeArguments& A, int expert, int strip, int lane) {
  const u32 strips = DOWN ? A.hidden / 32 : A.inner / 16;
  const u32 k_tiles = (DOWN ? A.inner : A.hidden) / 128;
  return (expert * strips + strip) * k_tiles * STAGE_UNITS + lane;
}

// Both GEMMs of a block in one thread block. Grid: any; blocks are dealt out in turn.
template <Format F>
DEVICE void both_halves(const MoeArguments& A) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Block block;
  __shared__ Slots slots;
  __shared__ __align__(8) u64 barrier_memory;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int x_row = row_bytes(A.plane * 16), product_row = row_bytes(A.inner * 2);
  const u32 x = shared_address(memory), products = x + A.rows * x_row;
  const u32 barrier = shared_address(&barrier_memory);
  const int up_strips = A.inner / 16, down_strips = A.hidden / 32;
  if (tid == 0) barrier_init(barrier, 1);
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int blocks = block_count(A.table);
  Stage current;
  u32 phase = 0;
  for (int b = blockIdx.x; b < blocks; b += gridDim.x) {
    fence_copy_engine();
    __syncthreads();
    read_block(A.table, b, block);
    __syncthreads();
    const int rows = block.rows;
    load_stage<false>(A, strip_offset<false>(A, block.expert, min(warp, up_strips - 1), lane),
                      current);
    if (tid == 0) barrier_expect(barrier, rows * A.plane * 16);
    fetch_rows<false>(A, block, slots, x, barrier);
    __syncthreads();
    barrier_wait(barrier, phase);
    phase ^= 1;
    by_tiles(rows, [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      float acc[2][TILES][4];
      for (int strip = warp; strip < up_strips; strip += WARPS) {
        const u32 offset = strip_offset<false>(A, block.expert, strip, lane);
        const int next = min(strip + WARPS, up_strips - 1);
        multiply_strip<F, false, TILES>(
            A, acc, current, offset, strip_offset<false>(A, block.expert, next, lane),
            x + g * x_row + t * 8, A.plane * 2, 8 * x_row);
        finish_up<F, TILES>(A, acc, slots, rows, strip, lane, [&](int slot, int at, u32 pair) {
          store_shared(products + slot * product_row + at, pair);
#ifdef INSPECT
          *(u32*)(A.product + (u64)slots.ids[slot] * A.inner * 2 + at) = pair;
#endif
        });
      }
    });
    load_stage<true>(A, strip_offset<true>(A, block.expert, min(warp, down_strips - 1), lane),
                     current);
    __syncthreads();
    if (F == FP16) {
      quantize_block(A, block, slots, products, warp, lane);
      __syncthreads();
    }
    by_tiles(rows, [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      float acc[2][TILES][4];
      for (int strip = warp; strip < down_strips; strip += WARPS) {
        const u32 offset = strip_offset<true>(A, block.expert, strip, lane);
        const int next = min(strip + WARPS, down_strips - 1);
        multiply_strip<F, true, TILES>(
            A, acc, current, offset, strip_offset<true>(A, block.expert, next, lane),
            products + g * product_row + t * 8, A.inner / 4, 8 * product_row);
        finish_down<F, TILES>(A, acc, slots, rows, strip, lane);
      }
    });
  }
}

// One GEMM of all blocks: thread block c has the strips c * n / grid .. (c + 1) * n / grid of all n.
// Two blocks are in shared memory at a time. Blocks have at most 16 rows.
template <Format F, bool DOWN>
DEVICE void one_half(const MoeArguments& A) {
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Block block[2];
  __shared__ Slots slots[2];
  __shared__ __align__(8) u64 barrier_memory;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, t = lane & 3;
  const int bytes = DOWN ? A.inner * 2 : A.plane * 16, row = row_bytes(bytes);
  const u32 x = shared_address(memory), barrier = shared_address(&barrier_memory);
  const int strips = DOWN ? A.hidden / 32 : A.inner / 16;
  if (tid == 0) barrier_init(barrier, 1);
  let_next_kernel_start();
  // The routes are older than the kernel in front of this one, and moe_down's table is too: it was
  // complete before moe_up read it. So weights are fetched before the wait.
  const bool own_table = A.table == nullptr;
  bool waited = !DOWN && !own_table;
  if (waited) wait_for_previous_kernel();
  const int blocks = own_table ? count_blocks(A.routes) : block_count(A.table);
  const int total = blocks * strips;
  const int first = (int)((long long)total * blockIdx.x / gridDim.x);
  const int last = (int)((long long)total * (blockIdx.x + 1) / gridDim.x);
  Stage current;
  u32 phase = 0;
  for (int begin = first; begin < last;) {
    const int b = begin / strips, split = (b + 1) * strips;
    const int end = min(last, split + strips), used = end > split;
    fence_copy_engine();
    __syncthreads();
    for (int i = 0; i <= used; i++)
      if (own_table) make_block(A.routes, b + i, block[i]); else read_block(A.table, b + i, block[i]);
    __syncthreads();
    auto offset_of = [&](int strip) {
      const int i = strip >= split;
      return strip_offset<DOWN>(A, block[i].expert, strip - (b + i) * strips, lane);
    };
    load_stage<DOWN>(A, offset_of(min(begin + warp, end - 1)), current);
    if (!waited) wait_for_previous_kernel();
    waited = true;
    if (tid == 0) barrier_expect(barrier, (block[0].rows + (used ? block[1].rows : 0)) * bytes);
    for (int i = 0; i <= used; i++)
      fetch_rows<DOWN>(A, block[i], slots[i], x + i * A.rows * row, barrier);
    __syncthreads();
    barrier_wait(barrier, phase);
    phase ^= 1;
    if (DOWN && F == FP16) {
      for (int i = 0; i <= used; i++)
        quantize_block(A, block[i], slots[i], x + i * A.rows * row, warp, lane);
      __syncthreads();
    }
    for (int strip = begin + warp; strip < end; strip += WARPS) {
      const int i = strip >= split, own = strip - (b + i) * strips;
      const u32 offset = offset_of(strip), next = offset_of(min(strip + WARPS, end - 1));
      auto run = [&](auto tiles) {
        constexpr int TILES = decltype(tiles)::value;
        float acc[2][TILES][4];
        multiply_strip<F, DOWN, TILES>(A, acc, current, offset, next,
                                       x + (i * A.rows + g) * row + t * 8,
                                       DOWN ? A.inner / 4 : A.plane * 2, 8 * row);
        if constexpr (DOWN)
          finish_down<F, TILES>(A, acc, slots[i], block[i].rows, own, lane);
        else
          finish_up<F, TILES>(A, acc, slots[i], block[i].rows, own, lane,
                              [&](int slot, int at, u32 pair) {
            *(u32*)(A.product + (u64)slots[i].ids[slot] * A.inner * 2 + at) = pair;
          });
      };
      if (block[i].rows <= 8) run(Constant<1>()); else run(Constant<2>());
    }
    begin = end;
  }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
KERNEL moe_both(const __grid_constant__ MoeArguments A) { both_halves<FORMAT>(A); }
KERNEL moe_up(const __grid_constant__ MoeArguments A) { one_half<FORMAT, false>(A); }
KERNEL moe_down(const __grid_constant__ MoeArguments A) { one_half<FORMAT, true>(A); }

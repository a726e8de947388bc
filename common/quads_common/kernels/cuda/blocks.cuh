// What a thread block does with the rows of a block besides multiplying them: fetch, keep, gather hot
// values, quantize; sums over warps. See moe.cu.
#pragma once
#include "strip_columns.cuh"

// Start the copies of a block's rows and note what its slots need for GEMM1 (UP), GEMM2 (DOWN) or
// both. All threads; a barrier must follow.
template <bool UP, bool DOWN>
DEVICE void fetch_rows(const MoeArguments& A, const Block& block, Slots& slots, Maxima& maxima,
                       u32 target, u32 barrier) {
  constexpr int BYTES = UP ? X_BYTES : PRODUCT_BYTES, ROW = UP ? X_ROW : PRODUCT_ROW;
  const int tid = threadIdx.x;
  if (tid < MAX_ROWS) maxima.cold[tid] = maxima.hot[tid] = 0;
  if (tid < block.rows) {
    const int slot = block.slots[tid], top_k = A.routes.top_k, token = slot / top_k;
    const u8* source = UP ? A.x + (u64)token * BYTES : A.product + (u64)slot * BYTES;
    bulk_copy(target + tid * ROW, source, BYTES, barrier);
    if (UP && COLUMNS13 > 0)
      bulk_copy(target + tid * ROW + BYTES, A.columns.hot + (u64)token * (2 * COLUMNS13),
                2 * COLUMNS13, barrier);
    // All of these are under way before the first is waited for; a branch would wait.
    const float row_scale = UP && A.row_scale ? A.row_scale[token] : 1.0f;
    const float up = UP ? A.w13_global[block.expert] : 0.0f;
    const float down = DOWN ? A.w2_global[block.expert] : 0.0f;
    const float router = DOWN && A.router ? A.router[slot] : 1.0f;
    const int place = DOWN && A.sample_map ? A.sample_map[token] : -1;
    slots.ids[tid] = slot;
    slots.staged[tid] = max(place * top_k + slot - token * top_k, place);  // -1 stays -1
    slots.gate_up_factor[tid] = __fmul_rn(row_scale, up);
    slots.down_factor[tid] = down;  // times the row's scale, if quantized
    slots.router[tid] = router;
  }
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
static_assert(2 * sizeof(ProductLists) == LIST_BYTES, "the host leaves other room for two lists");

// Start the copies of what an expert has for GEMM2's input, by all threads.
DEVICE void fetch_lists(const MoeArguments& A, int expert, ProductLists* lists, Slots& slots) {
  lists->fetch<WITH_RAC, WITH_SPLICE>(A.compensation, expert);
  const int i = THREADS - 1 - threadIdx.x;
  if (i < COLUMNS2)
    copy_word(shared_address(slots.channels + i),
              A.columns.channels + expert * A.columns.channels_stride + i);
}

// The lists behind `rows` bytes of rows; the address is computed anew each time.
DEVICE ProductLists* lists_at(u8* memory, int rows) {
  keep_inside(rows);
  return (ProductLists*)(memory + rows);
}

// The products of hot channels to behind their rows, a warp a row; before a row is overwritten.
DEVICE void gather_hot(const Block& block, const Slots& slots, u32 products, int warp, int lane) {
  if (COLUMNS2 > 0) {
#pragma unroll 1
    for (int row = WARPS - 1 - warp; row < block.rows; row += WARPS) {  // the first quantize
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

// As `quantize_products`, of one block that may have few rows or many: lanes share their blocks of 16
// where that takes all threads no more than two rounds, which is when one lane each leaves most idle.
DEVICE void quantize_few_or_many(const MoeArguments& A, const Block& block, Slots& slots,
                                 Maxima& maxima, const ProductLists* lists, u32 products) {
  constexpr int LANES = 4;
  if (block.rows * (INNER / 16) * LANES <= 2 * THREADS)
    quantize_products<LANES>(A, &block, &slots, &maxima, lists, products, 0, false);
  else
    quantize_products<1>(A, &block, &slots, &maxima, lists, products, 0, false);
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

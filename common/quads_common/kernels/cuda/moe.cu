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
// many hot channels of the GEMMs' inputs have BF16 columns. With COLUMNS2 there is WITH_SPLICE. The
// host also gives its limits and its layout of shared memory (`hopper.moe_defines`).
#include "blocks.cuh"

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
    fetch_lists(A, block.expert, lists_at(memory, A.rows * (X_ROW + PRODUCT_ROW)), slots);
    Stage current;
    load_stage<false>(A, strip_offset<false>(block.expert, min(warp, UP_STRIPS - 1), lane), current);
    if (b == blockIdx.x) wait_for_previous_kernel();
    if (tid == 0) barrier_expect(barrier, block.rows * X_FETCHED);
    fetch_rows<true, true>(A, block, slots, maxima, x, barrier);
    __syncthreads();
    barrier_wait(barrier, b / gridDim.x & 1);  // one phase a round
    by_tiles(block.rows, [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      float acc[2][TILES][4];
      for (int strip = warp; strip < UP_STRIPS; strip += WARPS) {
        const int next = min(strip + WARPS, UP_STRIPS - 1);
        const u32 row = x + (lane >> 2) * X_ROW;
        multiply_strip<false, TILES, STAGES<false>>(
            A, acc, current, strip_offset<false>(block.expert, strip, lane),
            strip_offset<false>(block.expert, next, lane), row + (lane & 3) * 8);
        StripColumns<false>::add(A, acc, slots, block.expert, strip, lane, row + X_BYTES);
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
      quantize_few_or_many(A, block, slots, maxima,
                           lists_at(memory, A.rows * (X_ROW + PRODUCT_ROW)), products);
    }
    by_tiles(block.rows, [&](auto tiles) {
      constexpr int TILES = decltype(tiles)::value;
      float acc[2][TILES][4];
      for (int strip = warp; strip < DOWN_STRIPS; strip += WARPS) {
        const int next = min(strip + WARPS, DOWN_STRIPS - 1);
        const u32 row = products + (lane >> 2) * PRODUCT_ROW;
        multiply_strip<true, TILES, STAGES<true>>(
            A, acc, current, strip_offset<true>(block.expert, strip, lane),
            strip_offset<true>(block.expert, next, lane), row + (lane & 3) * 8);
        StripColumns<true>::add(A, acc, slots, block.expert, strip, lane, row + PRODUCT_BYTES);
        finish_down<TILES>(A, acc, slots, block.rows, strip, lane);
      }
    });
  }
}

// Warps that share the K of a strip (`hopper_memory.parts`). With more than one, a strip's parts are
// summed in their order.
template <bool DOWN, bool FEW>
constexpr int PARTS = !FEW ? 1 : DOWN ? DOWN_PARTS : UP_PARTS;
// Room for copies of columns, for as many strips as a thread block has at a time.
template <bool DOWN, bool FEW>
constexpr int COPY_BYTES = !FEW ? 0 : DOWN ? DOWN_COPY_BYTES : UP_COPY_BYTES;

// Strips begin .. end of all blocks' that a thread block has in shared memory; from split on they are
// the second block's, whose rows begin at second_row. `last`: where its share ends.
struct Work {
  int begin, split, end, last, second_row;

  DEVICE bool two() const { return end > split; }

  // Of the two blocks, the one of a strip; and which of its strips that is.
  DEVICE int which(int strip) const { return strip >= split; }
  template <bool DOWN>
  DEVICE int own(int strip) const {
    return strip - split + (which(strip) ? 0 : DOWN ? DOWN_STRIPS : UP_STRIPS);
  }

  // First unit of a strip for this lane; of the last one for strips behind it.
  template <bool DOWN>
  DEVICE u32 offset(const Block (&block)[2], int strip, int lane) const {
    strip = min(strip, end - 1);
    return strip_offset<DOWN>(block[which(strip)].expert, own<DOWN>(strip), lane);
  }
};

// One GEMM of all blocks: thread block c has the strips c * n / grid .. (c + 1) * n / grid of all n.
// Two blocks are in shared memory at a time, if their rows fit. FEW: blocks have at most FEW_ROWS rows.
template <bool DOWN, bool FEW>
DEVICE void one_half(const MoeArguments& A) {
  constexpr int BYTES = DOWN ? PRODUCT_BYTES : X_BYTES, ROW = DOWN ? PRODUCT_ROW : X_ROW;
  constexpr int FETCHED = DOWN ? PRODUCT_BYTES : X_FETCHED;
  constexpr int STRIPS = DOWN ? DOWN_STRIPS : UP_STRIPS;
  constexpr int SPLIT = PARTS<DOWN, FEW>, TEAMS = WARPS / SPLIT, SHARE = STAGES<DOWN> / SPLIT;
  using ItsColumns = StripColumns<DOWN, SPLIT>;
  static_assert(FEW_ROWS % 8 == 0 && FEW_ROWS <= MAX_ROWS, "rows are multiplied in groups of 8");
  static_assert(SHARE * SPLIT == STAGES<DOWN>, "parts of K are whole stages, the same number each");
  static_assert((ItsColumns::COPIES ? TEAMS * ItsColumns::STRIP_BYTES : 0) == COPY_BYTES<DOWN, FEW>,
                "the host leaves other room for copies of columns");
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Routing routing;
  __shared__ Block block[2];
  __shared__ Slots slots[2];
  __shared__ Maxima maxima[2];
  __shared__ Work work;
  __shared__ __align__(8) u64 barrier_memory, column_barriers[TEAMS + 1];
  const int tid = threadIdx.x, warp = tid >> 5;
  int lane = tid & 31;
  const int team = warp / SPLIT, part = warp % SPLIT;
  const u32 part_offset = part * SHARE * STAGE_UNITS;
  u32 x = shared_address(memory);
  const u32 barrier = shared_address(&barrier_memory);
  const u32 its_columns = shared_address(column_barriers + team);
  if (tid == 0) barrier_init(barrier, 1);
  if (ItsColumns::COPIES && part == 0 && lane == 0) barrier_init(its_columns, 1);
  u32 columns_phase = 0;
  let_next_kernel_start();
  // The routes are older than the kernel in front.
  const bool few = FEW && A.routes.slots <= FEW_SLOTS;
  FewSlots few_slots;
  if (few) {
    few_slots.load(A.routes);
    const int blocks = few_slots.blocks(A.routes);
    if (tid == 0) routing.blocks = blocks;
  } else {
    place_experts(A.routes, routing);
  }
  auto copy_columns = [&](int strip) {
    if (!ItsColumns::COPIES || strip >= work.end || team >= TEAMS || part > 0) return;
    const int expert = block[work.which(strip)].expert;
    ItsColumns::copy(A, expert, work.own<DOWN>(strip), lane, x, its_columns);
  };
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
        fetch_lists(A, block[i].expert, lists_at(memory, A.rows * ROW) + i, slots[i]);
    Stage current;
    load_stage<DOWN>(A, work.offset<DOWN>(block, work.begin + team, lane) + part_offset, current);
    copy_columns(work.begin + team);
    if (!started) wait_for_previous_kernel();
    if (tid == 0)
      barrier_expect(barrier, (block[0].rows + (work.two() ? block[1].rows : 0)) * FETCHED);
    fetch_rows<!DOWN, DOWN>(A, block[0], slots[0], maxima[0], x, barrier);
    if (work.two())
      fetch_rows<!DOWN, DOWN>(A, block[1], slots[1], maxima[1], x + work.second_row * ROW,
                              barrier);
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
        const int i = inside && work.which(strip), own = work.own<DOWN>(strip);
        const int row = (i ? work.second_row : 0) + (lane >> 2);
        const u32 hot = x + row * ROW + BYTES;
        if (inside) {
          multiply_strip<DOWN, TILES, SHARE>(
              A, acc, current, work.offset<DOWN>(block, strip, lane) + part_offset,
              work.offset<DOWN>(block, strip + TEAMS, lane) + part_offset,
              x + row * ROW + (lane & 3) * 8 + part * SHARE * 32);
          ItsColumns::add(A, acc, slots[i], block[i].expert, own, lane, x, hot, its_columns,
                          columns_phase, part);
        }
        if constexpr (SPLIT > 1) sum_parts<SPLIT, TILES>(acc, inside, warp, lane);
        copy_columns(strip + TEAMS);
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
      run(Constant<FEW_ROWS / 8>());
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

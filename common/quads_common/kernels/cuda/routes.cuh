// Which slots a thread block multiplies together: the router's choice to blocks, without a table.
//
// A slot is one (token, k) entry of the router's choice, numbered token * top_k + k; a block holds up
// to `Routes::rows` slots of one expert, in slot order. Every thread block counts all slots for
// itself, so that nothing has to run in front of it. No order depends on timing.
#pragma once
#include "device.cuh"

// Given by the host: WARPS of a thread block; MAX_ROWS of a block; MAX_EXPERTS, MAX_SLOTS of a layer;
// MAX_SPARES: how many multiprocessors may be left over for parts of large blocks; FEW_SLOTS, see
// FewSlots.
constexpr int THREADS = WARPS * 32;
static_assert(WARPS <= 32, "a lane adds the counts of a warp");
static_assert(MAX_ROWS == 32, "blocks are counted by 1 to 4 groups of 8 slots");
static_assert(MAX_EXPERTS == THREADS, "a thread places an expert");
static_assert(MAX_SLOTS <= 0xFFFF && MAX_EXPERTS < 0xFFFF, "both are kept in 16 bits");
static_assert(FEW_SLOTS <= 32, "a lane has a slot");

struct Routes {
  const void* ids;        // [slots] int32 or int64; negative: skipped
  const int* expert_map;  // [map_size] local id or -1, or null
  int map_size, experts;  // experts of this rank; ids that name none are skipped
  int slots, top_k;
  int wide;    // ids are int64
  int rows;    // slots of a block at most: a multiple of 8, up to 32
  int spread;  // multiprocessors: where blocks nearly fill them, the rest take parts of large ones
};

struct Block {
  int expert, rows;
  int slots[MAX_ROWS];
};

// Where the slots of an expert go: parts of `size`, `full` of them from block `first` on, `rest`
// slots in block `last`.
struct Placement {
  u16 size, rest;
  u16 full, first, last;
};

constexpr int NO_EXPERT = 0xFFFF;

struct Routing {  // in shared memory
  u16 experts[MAX_SLOTS];  // of each slot, NO_EXPERT if it is skipped
  int totals[MAX_EXPERTS];
  Placement placements[MAX_EXPERTS];
  u64 warp_sums[WARPS];
  int warp_counts[WARPS];
  int blocks;
};

DEVICE int local_expert(const Routes& R, int slot) {
  if (slot >= R.slots) return -1;
  long long id = R.wide ? ((const long long*)R.ids)[slot] : ((const int*)R.ids)[slot];
  if (R.expert_map) id = id >= 0 && id < R.map_size ? R.expert_map[id] : -1;
  return id >= 0 && id < R.experts ? (int)id : -1;
}

// Sum of `value` over the threads in front of this one, and over all. Has barriers.
DEVICE u64 sum_before(u64 value, u64* warp_sums, u64& total) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u64 sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  total = 0;
  u64 before = 0;
#pragma unroll
  for (int w = 0; w < WARPS; w++) {
    const u64 other = warp_sums[w];
    if (w < warp) before += other;
    total += other;
  }
  __syncthreads();
  return before + sum - value;
}

DEVICE int groups_of_8(int rows) { return (rows + 7) / 8; }
DEVICE int field(u64 counts, int groups) { return (counts >> (16 * (4 - groups))) & 0xFFFF; }

// Blocks are counted by their groups of 8 slots, 4, 3, 2, 1 in 16 bits each; most groups come first.
DEVICE u64 one_block(int rows) { return rows ? 1ull << (16 * (4 - groups_of_8(rows))) : 0; }

// For each number of groups the blocks with more.
DEVICE u64 larger_blocks(u64 counts) { return (counts << 16) + (counts << 32) + (counts << 48); }

// By all threads, thread e for expert e with `total` slots; returns the number of blocks.
DEVICE int place_expert(const Routes& R, int total, Placement& p, u64* warp_sums) {
  // Experts of one block with 4, 3, 2 groups can be cut in two; in the last field, all blocks.
  const bool can = total > 8 && total <= R.rows;
  const u64 mine = (can ? one_block(total) : 0) + ((u64)((total + R.rows - 1) / R.rows) << 48);
  u64 all;
  const u64 before = sum_before(mine, warp_sums, all);
  const int spares = R.spread - (int)(all >> 48);
  const int splits = spares > 0 && spares <= MAX_SPARES ? spares : 0;
  // The first `splits` of them in the order (most groups, lowest number) are.
  const int rank = can ? field(larger_blocks(all) + before, groups_of_8(total)) : 0;
  const int size = can && rank < splits ? (groups_of_8(total) + 1) / 2 * 8 : R.rows;
  p.size = size;
  p.full = total / size;
  p.rest = total - p.full * size;
  const u64 whole = p.full * one_block(size), part = one_block(p.rest);
  const u64 first = sum_before(whole + part, warp_sums, all) + larger_blocks(all);
  p.first = field(first, groups_of_8(size));
  p.last = p.rest ? field(first + whole, groups_of_8(p.rest)) : 0;
  return field(all, 4) + field(all, 3) + field(all, 2) + field(all, 1);
}

// By all threads; ends with a barrier.
DEVICE void place_experts(const Routes& R, Routing& routing) {
  const int tid = threadIdx.x;
  routing.totals[tid] = 0;
  __syncthreads();
#pragma unroll 2
  for (int slot = tid; slot < R.slots; slot += THREADS) {
    const int expert = local_expert(R, slot);
    routing.experts[slot] = expert < 0 ? NO_EXPERT : expert;
    if (expert >= 0) atomicAdd(&routing.totals[expert], 1);
  }
  __syncthreads();
  const int blocks =
      place_expert(R, routing.totals[tid], routing.placements[tid], routing.warp_sums);
  if (tid == 0) routing.blocks = blocks;
  __syncthreads();
}

// Block b into shared memory, by all threads, after place_experts; ends with a barrier.
DEVICE void gather_block(const Routes& R, int b, Routing& routing, Block& block) {
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const Placement mine = routing.placements[tid];
  if (b >= mine.first && b < mine.first + mine.full) {
    block.expert = tid;
    block.rows = mine.size;
  }
  if (mine.rest && b == mine.last) {
    block.expert = tid;
    block.rows = mine.rest;
  }
  __syncthreads();
  const int expert = block.expert, rows = block.rows;
  const Placement p = routing.placements[expert];
  int before = -(p.rest && b == p.last ? p.full : b - p.first) * p.size;  // rank of the next slot
#pragma unroll 1
  for (int start = 0; start < R.slots; start += THREADS) {
    const int slot = start + tid;
    const bool is_mine = slot < R.slots && routing.experts[slot] == expert;
    const u32 same = __ballot_sync(~0u, is_mine);
    if (lane == 0) routing.warp_counts[warp] = __popc(same);
    __syncthreads();
    // The counts of all warps, one a lane, so that a sum over lanes is one over warps.
    const int count = lane < WARPS ? routing.warp_counts[lane] : 0;
    const int at = before + (int)__reduce_add_sync(~0u, lane < warp ? count : 0) +
                   __popc(same & ((1u << lane) - 1));
    before += (int)__reduce_add_sync(~0u, count);
    if (is_mine && at >= 0 && at < rows) block.slots[at] = slot;
    __syncthreads();
  }
}

// The same for at most FEW_SLOTS slots, which a warp sees at a glance: slot `lane` of every warp. Blocks are
// in the order of their first slots.
struct FewSlots {
  int expert;
  u32 same;  // slots of the same expert

  DEVICE void load(const Routes& R) {
    expert = local_expert(R, threadIdx.x & 31);
    same = __match_any_sync(~0u, expert);
  }

  DEVICE int rank() const { return __popc(same & ((1u << (threadIdx.x & 31)) - 1)); }

  DEVICE u32 first_slots(const Routes& R) const {
    return __ballot_sync(~0u, expert >= 0 && rank() % R.rows == 0);
  }

  DEVICE int blocks(const Routes& R) const { return __popc(first_slots(R)); }

  // Block b into shared memory, by all threads; ends with a barrier.
  DEVICE void gather_block(const Routes& R, int b, Block& block) const {
    const int lane = threadIdx.x & 31, place = rank() % R.rows;
    const u32 firsts = first_slots(R);
    const int first = __fns(same, 0, rank() - place + 1);  // slot of this lane's block
    if (threadIdx.x < 32 && expert >= 0 && __popc(firsts & ((1u << first) - 1)) == b) {
      block.slots[place] = lane;
      if (lane == first) {
        block.expert = expert;
        block.rows = min(R.rows, __popc(same) - rank());
      }
    }
    __syncthreads();
  }
};

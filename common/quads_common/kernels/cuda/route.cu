// Sort the slots of a batch by expert into blocks, and write the work table of table.cuh. One thread
// block; no atomics, the same table in every run.
#include "table.cuh"

struct RouteArguments {
  Routes routes;
  int* table;
  int rows;    // slots of a block at most: a multiple of 8
  int spread;  // multiprocessors: where blocks nearly fill them, the rest take parts of large ones
};

constexpr int THREADS = 1024, WARPS = THREADS / 32, SLOTS_PER_THREAD = 4, MAX_EXPERTS = 512;
constexpr int EXPERT_WARPS = MAX_EXPERTS / 32;
// How many multiprocessors may be left over for that.
constexpr int MAX_SPARES = 12;

// Where the slots of an expert go: parts of `size`, `full` of them from block `first` on, the rest
// in block `last`.
struct Placement {
  int size, full, first, last;
};

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
  for (int w = 0; w < EXPERT_WARPS; w++) {
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

// By all threads, thread e for expert e with `total` slots.
DEVICE Placement place_expert(const RouteArguments& A, int total, u64* warp_sums) {
  // Experts of one block with 4, 3, 2 groups can be cut in two; in the last field, all blocks.
  const bool can = total > 8 && total <= A.rows;
  const u64 mine = (can ? one_block(total) : 0) + ((u64)((total + A.rows - 1) / A.rows) << 48);
  u64 all;
  const u64 before = sum_before(mine, warp_sums, all);
  const int spares = A.spread - (int)(all >> 48);
  const int splits = spares > 0 && spares <= MAX_SPARES ? spares : 0;
  // The first `splits` of them in the order (most groups, lowest number) are.
  const int rank = can ? field(larger_blocks(all) + before, groups_of_8(total)) : 0;
  Placement p;
  p.size = can && rank < splits ? (groups_of_8(total) + 1) / 2 * 8 : A.rows;
  p.full = total / p.size;
  const int rest = total - p.full * p.size;
  const u64 whole = p.full * one_block(p.size), part = one_block(rest);
  const u64 first = sum_before(whole + part, warp_sums, all) + larger_blocks(all);
  p.first = field(first, groups_of_8(p.size));
  p.last = rest ? field(first + whole, groups_of_8(rest)) : 0;
  if (threadIdx.x == 0)
    A.table[0] = field(all, 4) + field(all, 3) + field(all, 2) + field(all, 1);
  for (int i = 0; i < p.full + (rest > 0); i++) {
    const int block = i < p.full ? p.first + i : p.last;
    *(int2*)(A.table + (1 + block) * TABLE_ROW) =
        make_int2(threadIdx.x, i < p.full ? p.size : rest);
  }
  return p;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
route_slots(const __grid_constant__ RouteArguments A) {
  __shared__ u16 counts[WARPS][MAX_EXPERTS];  // then: slots of the expert in earlier warps
  __shared__ Placement placements[MAX_EXPERTS];
  __shared__ u64 warp_sums[WARPS];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, experts = A.routes.experts;
  for (int i = lane; i < (experts + 1) / 2; i += 32) ((u32*)counts[warp])[i] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  // Warp w has the slots w * per_warp ..; their ranks among the warp's slots of the same expert.
  const int per_warp = (A.routes.slots + THREADS - 1) / THREADS * 32;
  int expert[SLOTS_PER_THREAD], rank[SLOTS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < SLOTS_PER_THREAD; i++)
    expert[i] = i * 32 < per_warp ? local_expert(A.routes, warp * per_warp + i * 32 + lane) : -1;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < SLOTS_PER_THREAD; i++)
    if (i * 32 < per_warp) {
      const u32 same = __match_any_sync(~0u, expert[i]);
      const int before = __popc(same & ((1u << lane) - 1));
      rank[i] = before;
      if (expert[i] >= 0) rank[i] += counts[warp][expert[i]];
      __syncwarp();
      if (expert[i] >= 0 && before == 0) counts[warp][expert[i]] += (u16)__popc(same);
      __syncwarp();
    }
  __syncthreads();
  int total = 0;
  if (tid < experts) {
    u16 of_warp[WARPS];
#pragma unroll
    for (int w = 0; w < WARPS; w++) of_warp[w] = counts[w][tid];
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      counts[w][tid] = (u16)total;
      total += of_warp[w];
    }
  }
  const Placement mine = place_expert(A, total, warp_sums);
  if (tid < experts) placements[tid] = mine;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < SLOTS_PER_THREAD; i++)
    if (expert[i] >= 0) {
      const Placement p = placements[expert[i]];
      const int at = counts[warp][expert[i]] + rank[i], part = at / p.size;
      const int block = part < p.full ? p.first + part : p.last;
      A.table[(1 + block) * TABLE_ROW + TABLE_SLOTS + at - part * p.size] =
          warp * per_warp + i * 32 + lane;
    }
}

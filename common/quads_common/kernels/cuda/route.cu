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
// How many multiprocessors may be left over for that.
constexpr int MAX_SPARES = 12;

// Where the slots of an expert go: parts of `size`, `full` of them from block `first` on, the rest
// in block `last`.
struct Placement {
  int size, full, first, last;
};

DEVICE u64 scan(u64 value, int lane) {  // inclusive, of a warp
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

DEVICE int groups_of_8(int rows) { return (rows + 7) / 8; }

// Blocks with most groups of 8 slots first: counts of blocks with 4, 3, 2, 1 in 16 bits each.
DEVICE u64 one_block(int rows) { return rows ? 1ull << (16 * (4 - groups_of_8(rows))) : 0; }

// By one warp. totals: slots of each expert.
DEVICE void place_experts(const RouteArguments& A, const int* totals, Placement* placements) {
  const int lane = threadIdx.x, experts = A.routes.experts, chunks = (experts + 31) / 32;
  int blocks = 0;
  u64 splittable = 0;  // experts of one block with 4, 3, 2 groups
  for (int c = 0; c < chunks; c++) {
    const int e = c * 32 + lane, total = e < experts ? totals[e] : 0;
    blocks += (total + A.rows - 1) / A.rows;
    if (total > 8 && total <= A.rows) splittable += one_block(total);
  }
  blocks = __reduce_add_sync(~0u, blocks);
  splittable = __shfl_sync(~0u, scan(splittable, lane), 31);
  const int spares = A.spread - blocks;
  const int splits = spares > 0 && spares <= MAX_SPARES ? spares : 0;
  // The first `splits` experts in the order (most groups, lowest number) are cut in two.
  const u64 larger = (splittable << 16) + (splittable << 32) + (splittable << 48);
  u64 seen = larger, counts = 0;
  for (int c = 0; c < chunks; c++) {
    const int e = c * 32 + lane, total = e < experts ? totals[e] : 0;
    const bool can = total > 8 && total <= A.rows;
    const u64 mine = can ? one_block(total) : 0, sum = scan(mine, lane);
    const int shift = can ? 16 * (4 - groups_of_8(total)) : 0;
    const int rank = (int)(((seen + sum - mine) >> shift) & 0xFFFF);
    Placement p;
    p.size = can && rank < splits ? (groups_of_8(total) + 1) / 2 * 8 : A.rows;
    p.full = total / p.size;
    counts += p.full * one_block(p.size) + one_block(total - p.full * p.size);
    if (e < experts) placements[e] = p;
    seen += __shfl_sync(~0u, sum, 31);
  }
  counts = __shfl_sync(~0u, scan(counts, lane), 31);
  if (lane == 0)
    A.table[0] = (int)((counts & 0xFFFF) + ((counts >> 16) & 0xFFFF) + ((counts >> 32) & 0xFFFF) +
                       (counts >> 48));
  u64 next = (counts << 16) + (counts << 32) + (counts << 48);  // of each kind, the first block
  for (int c = 0; c < chunks; c++) {
    const int e = c * 32 + lane, total = e < experts ? totals[e] : 0;
    Placement p = {1, 0, 0, 0};
    if (e < experts) p = placements[e];
    const int rest = total - p.full * p.size;
    const u64 whole = p.full * one_block(p.size), part = one_block(rest);
    const u64 sum = scan(whole + part, lane), before = next + sum - whole - part;
    p.first = (int)((before >> (16 * (4 - groups_of_8(p.size)))) & 0xFFFF);
    p.last = (int)(((before + whole) >> (rest ? 16 * (4 - groups_of_8(rest)) : 0)) & 0xFFFF);
    if (e < experts) {
      placements[e] = p;
      for (int i = 0; i < p.full; i++) {
        A.table[(1 + p.first + i) * TABLE_ROW] = e;
        A.table[(1 + p.first + i) * TABLE_ROW + 1] = p.size;
      }
      if (rest) {
        A.table[(1 + p.last) * TABLE_ROW] = e;
        A.table[(1 + p.last) * TABLE_ROW + 1] = rest;
      }
    }
    next += __shfl_sync(~0u, sum, 31);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
route_slots(const __grid_constant__ RouteArguments A) {
  __shared__ u16 counts[WARPS][MAX_EXPERTS];  // then: slots of the expert in earlier warps
  __shared__ int totals[MAX_EXPERTS];
  __shared__ Placement placements[MAX_EXPERTS];
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, experts = A.routes.experts;
  for (int i = tid; i < WARPS * MAX_EXPERTS / 2; i += THREADS) ((u32*)counts)[i] = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  // Warp w has the slots w * per_warp ..; their ranks among the warp's slots of the same expert.
  const int per_warp = (A.routes.slots + THREADS - 1) / THREADS * 32;
  int expert[SLOTS_PER_THREAD], rank[SLOTS_PER_THREAD];
#pragma unroll
  for (int i = 0; i < SLOTS_PER_THREAD; i++) {
    const int slot = warp * per_warp + i * 32 + lane;
    expert[i] = i * 32 < per_warp ? local_expert(A.routes, slot) : -1;
    const u32 same = __match_any_sync(~0u, expert[i]);
    const int before = __popc(same & ((1u << lane) - 1));
    rank[i] = before;
    if (expert[i] >= 0) rank[i] += counts[warp][expert[i]];
    __syncwarp();
    if (expert[i] >= 0 && before == 0) counts[warp][expert[i]] += (u16)__popc(same);
    __syncwarp();
  }
  __syncthreads();
  for (int e = tid; e < experts; e += THREADS) {
    int total = 0;
    for (int w = 0; w < WARPS; w++) {
      const int count = counts[w][e];
      counts[w][e] = (u16)total;
      total += count;
    }
    totals[e] = total;
  }
  __syncthreads();
  if (warp == 0) place_experts(A, totals, placements);
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

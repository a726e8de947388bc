// Work tables: which slots of a batch form the blocks that a thread block multiplies together.
//
// A slot is one (token, k) entry of the router's choice, numbered token * top_k + k; a block holds up
// to 32 slots of one expert, in slot order. Table: int32 [1 + blocks, TABLE_ROW]; entry 0 of row 0 is
// the number of blocks, row 1 + b is (expert, rows, 0.., slots from TABLE_SLOTS on) of block b.
#pragma once
#include "device.cuh"

constexpr int MAX_ROWS = 32, TABLE_ROW = 40, TABLE_SLOTS = 8;

struct Routes {
  const void* ids;        // [slots] int32 or int64; negative: skipped
  const int* expert_map;  // [map_size] local id or -1, or null
  int map_size, experts;  // experts of this rank; ids that name none are skipped
  int slots, top_k;
  int wide;               // ids are int64
};

struct Block {
  int expert, rows;
  int slots[MAX_ROWS];
};

DEVICE int local_expert(const Routes& R, int slot) {
  if (slot >= R.slots) return -1;
  long long id = R.wide ? ((const long long*)R.ids)[slot] : ((const int*)R.ids)[slot];
  if (R.expert_map) id = id >= 0 && id < R.map_size ? R.expert_map[id] : -1;
  return id >= 0 && id < R.experts ? (int)id : -1;
}

DEVICE int block_count(const int* table) { return table[0]; }

// By all threads, between barriers.
DEVICE void read_block(const int* table, int b, Block& block) {
  const int* row = table + (1 + b) * TABLE_ROW;
  const int tid = threadIdx.x;
  if (tid < MAX_ROWS) block.slots[tid] = row[TABLE_SLOTS + tid];
  if (tid == MAX_ROWS) block.expert = row[0];
  if (tid == MAX_ROWS + 1) block.rows = row[1];
}

// At most 32 slots need no table: a warp sees them all. Blocks are in the order of their first slots.
constexpr int OWN_SLOTS = 32;

DEVICE u32 first_slots(int expert, u32 same_expert) {
  const u32 before = (1u << (threadIdx.x & 31)) - 1;
  return __ballot_sync(~0u, expert >= 0 && !(same_expert & before));
}

// Every warp for itself, with the same result.
DEVICE int count_blocks(const Routes& R) {
  const int expert = local_expert(R, threadIdx.x & 31);
  return __popc(first_slots(expert, __match_any_sync(~0u, expert)));
}

// Block b into shared memory, by the first warp, between barriers.
DEVICE void make_block(const Routes& R, int b, Block& block) {
  if (threadIdx.x >= 32) return;
  const int lane = threadIdx.x, expert = local_expert(R, lane);
  const u32 mine = __match_any_sync(~0u, expert), before = (1u << lane) - 1;
  const u32 firsts = first_slots(expert, mine);
  const int leader = 31 - __clz((int)mine & -(int)mine);  // the first slot of this lane's expert
  if (expert >= 0 && __popc(firsts & ((1u << leader) - 1)) == b) {
    block.slots[__popc(mine & before)] = lane;
    if (lane == leader) {
      block.expert = expert;
      block.rows = __popc(mine);
    }
  }
}

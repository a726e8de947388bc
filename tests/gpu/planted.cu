// One error for each tool of compute-sanitizer. Grid: one block of 64 threads.
struct Arguments {
  int* memory;
  int count;
};

#define KERNEL extern "C" __global__ void
// Writes behind ``count`` integers.
KERNEL planted_memcheck(const __grid_constant__ Arguments A) {
  A.memory[A.count + threadIdx.x] = threadIdx.x;
}

// Reads what other threads may not have written yet.
KERNEL planted_racecheck(const __grid_constant__ Arguments A) {
  __shared__ volatile int values[64];
  values[threadIdx.x] = threadIdx.x;
  A.memory[threadIdx.x] = values[63 - threadIdx.x];
}

// Reads memory that nothing has written.
KERNEL planted_initcheck(const __grid_constant__ Arguments A) {
  A.memory[threadIdx.x] += 1;
}

// Thread 16 is not in its own mask, and a part of a warp waits for the block.
KERNEL planted_synccheck(const __grid_constant__ Arguments A) {
  if (threadIdx.x <= 16) __syncwarp(0xffff);
  if (threadIdx.x < 48) __syncthreads();
  A.memory[threadIdx.x] = 0;
}

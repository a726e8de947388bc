// The quantizer of GEMM2's input: rows of bfloat16 in shared memory to float16 operands in their
// place. `quantize` of a token, with lists `compensation.operands` and then `compensation.fold`.
//
// A row of BLOCKS * 16 elements lies in planes of PLANE bytes: word b of plane j holds elements j and
// j + 8 of block b. LANES neighbouring lanes of a warp share a block: lane s of them has its words of
// planes s, s + LANES, .. So few rows keep all warps busy, and many repeat little.
//
// After device.cuh and routes.cuh, of which it uses functions and THREADS, MAX_ROWS.
#pragma once

// The lists of GEMM2's input: of each expert, or one for all where the stride is 0.
struct Compensation {
  const u8* block_mask;  // [lists, K/16]: 1 where a block's residual is added; null: no RAC
  const int* hot_bits;   // [lists, K/16]: the hot channels of each block as bits; null: no splice
  int mask_stride, bits_stride;
  float alpha;
};

// Those of one expert in shared memory.
template <int BLOCKS>
struct Lists {
  u32 hot[BLOCKS];
  u32 chosen[BLOCKS / 4];  // bytes

  // Start copies, by all threads; those need wait_for_copies and a barrier.
  template <bool RAC, bool SPLICE>
  DEVICE void fetch(const Compensation& from, int expert) {
    const u32 tid = threadIdx.x;
    if (SPLICE)
      for (u32 i = tid; i < BLOCKS; i += THREADS)
        copy_word(shared_address(hot + i), from.hot_bits + expert * from.bits_stride + i);
    if (RAC)
      for (u32 i = THREADS - 1 - tid; i < BLOCKS / 4; i += THREADS)
        copy_word(shared_address(chosen + i), from.block_mask + expert * from.mask_stride + i * 4);
  }
};

// The largest magnitudes of rows, of cold and of hot channels, as bits of bfloat16.
struct Maxima {
  u32 cold[MAX_ROWS], hot[MAX_ROWS];
};

// 16 elements of a row of 16-bit values, which lie in planes of `plane` bytes in shared memory (element
// k in plane k % 8, two of each plane from `source` on), to `target` in their order.
DEVICE void store_in_order(u8* target, u32 source, u32 plane) {
  u32 first[4], second[4];
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const u32 even = load_shared(source + 2 * j * plane);
    const u32 odd = load_shared(source + (2 * j + 1) * plane);
    first[j] = (even & 0xFFFFu) | odd << 16;
    second[j] = even >> 16 | (odd & 0xFFFF0000u);
  }
  ((uint4*)target)[0] = make_uint4(first[0], first[1], first[2], first[3]);
  ((uint4*)target)[1] = make_uint4(second[0], second[1], second[2], second[3]);
}

// The values of COUNT channels (even; -1: 0) of a row of 16-bit values, in planes as above, to `target`
// in the order of the list. One warp.
template <int COUNT, int PLANE>
DEVICE void gather_row(u32 row, u32 target, const int* channels, int lane) {
  auto value = [&](int channel) {
    if (channel < 0) return 0u;
    const u32 pair = load_shared(row + (channel & 7) * PLANE + (channel >> 4) * 4);
    return channel & 8 ? pair >> 16 : pair & 0xFFFFu;
  };
#pragma unroll 1
  for (int pair = lane; pair < COUNT / 2; pair += 32)
    store_shared(target + pair * 4, value(channels[2 * pair]) | value(channels[2 * pair + 1]) << 16);
}

DEVICE float power_of_two(int exponent) { return as_float((u32)(exponent + 127) << 23); }

// What the elements of a row have in common.
struct RowScale {
  bool bad;  // NaN or Inf in a cold channel
  float inverse, global;
  int shift;  // all elements are scaled by 2^-shift

  DEVICE RowScale(u32 largest, u32 largest_hot) {
    bad = largest >= 0x7F80u;
    const float amax = bad ? 0.0f : as_float(largest << 16);
    inverse = amax < AMAX_FLOOR ? 1.0f : __fdiv_rn(2688.0f, amax);
    global = __frcp_rn(inverse);
    const int exponent = (int)(largest_hot >> 7) - (int)(as_bits(global) >> 23);
    shift = largest_hot < 0x7F80u ? min(max(exponent + 1 - 15, 0), 126) : 0;
  }

  DEVICE float factor() const {
    return bad ? as_float(0x7FC00000u) : __fmul_rn(global, power_of_two(shift));
  }

  // The scale of a block with this largest magnitude, and what its elements are multiplied by. Rows
  // without NaN or Inf never reach the contract's two caps. largest <= amax, also of a residual, so the
  // product below exceeds 448 by a few roundings at most, and from 464 on it would round up. A scale
  // that is not 0 is at least 2^-9 and global at least AMAX_FLOOR / 2688, so 1 / decode < 2^121.
  DEVICE float block_scale(float largest) const {
    return round_e4m3(__fmul_rn(largest, __fmul_rn(inverse, ONE_SIXTH)));
  }
  DEVICE float encode_scale(float scale) const {
    const float decode = __fmul_rn(scale, global);
    return decode == 0.0f ? 0.0f : fminf(__frcp_rn(decode), FLT_MAX);
  }
};

// A lane's part of a block, words from `at` on. hot: the block's bits from the lane's first on.
// COLUMNS: hot channels become 0, as they have columns of their own; else they are folded.
template <int PLANE, int LANES, bool RAC, bool SPLICE, bool COLUMNS>
struct BlockPart {
  static constexpr int WORDS = 8 / LANES, STEP = LANES * PLANE;
  static constexpr bool FOLD = SPLICE && !COLUMNS;
  u32 at, hot;

  // All ones where the elements of word i are hot.
  DEVICE u32 hot_halves(int i) const {
    return SPLICE ? spread_signs(hot << (7 - i * LANES)) : 0;
  }

  // The largest magnitudes as bits of bfloat16: of cold channels in the low half, of hot ones in the
  // high half.
  DEVICE u32 largest() const {
    u32 cold = 0, warm = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const u32 word = load_shared(at + i * STEP) & 0x7FFF7FFFu, halves = hot_halves(i);
      cold = larger_halves(cold, word & ~halves);
      if (FOLD) warm = larger_halves(warm, word & halves);
    }
    cold = max(cold & 0xFFFFu, cold >> 16);
    return FOLD ? cold | max(warm << 16, warm & 0xFFFF0000u) : cold;
  }

  // By all lanes of a warp; those that have `write` read and store.
  DEVICE void quantize(const RowScale& row, bool chosen, float alpha, bool write) const {
    const float down = power_of_two(-row.shift);
    const float reciprocal = FOLD ? __frcp_rn(row.global) : 0.0f;
    auto fold = [&](float x) { return __fmul_rn(__fmul_rn(x, down), reciprocal); };
    u32 words[WORDS], folded[WORDS], largest = 0;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const u32 word = write ? load_shared(at + i * STEP) : 0, halves = hot_halves(i);
      words[i] = word & ~halves;
      folded[i] = FOLD ? pack_fp16(fold(bf16_low(word)), fold(bf16_high(word))) & halves : 0;
      largest = larger_halves(largest, words[i] & 0x7FFF7FFFu);
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      largest = larger_halves(largest, __shfl_xor_sync(~0u, largest, step));
    const float scale =
        row.block_scale(as_float(max(largest << 16, largest & 0xFFFF0000u)));
    const float encode = row.encode_scale(scale);
    float total[2 * WORDS], residual[2 * WORDS], residual_max = 0.0f;
#pragma unroll
    for (int k = 0; k < 2 * WORDS; k++) {
      const float value = k % 2 ? bf16_high(words[k / 2]) : bf16_low(words[k / 2]);
      total[k] = __fmul_rn(round_e2m1(__fmul_rn(value, encode)), scale);
      if (RAC) {
        residual[k] = __fsub_rn(value, __fmul_rn(total[k], row.global));
        residual_max = fmaxf(residual_max, fabsf(residual[k]));
      }
    }
    if (RAC) {
#pragma unroll
      for (int step = 1; step < LANES; step *= 2)
        residual_max = fmaxf(residual_max, __shfl_xor_sync(~0u, residual_max, step));
      const float scale_r = row.block_scale(residual_max), encode_r = row.encode_scale(scale_r);
      const float share = chosen ? alpha : 0.0f;
#pragma unroll
      for (int k = 0; k < 2 * WORDS; k++) {
        const float added = __fmul_rn(round_e2m1(__fmul_rn(residual[k], encode_r)), scale_r);
        total[k] = __fadd_rn(total[k], __fmul_rn(share, added));
      }
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      float low = total[2 * i], high = total[2 * i + 1];
      if (FOLD) low = __fmul_rn(low, down), high = __fmul_rn(high, down);
      const u32 word = pack_fp16(low, high) | folded[i];
      if (write) store_shared(at + i * STEP, row.bad ? 0x7FFF7FFFu : word);
    }
  }
};

// Quantize rows of ROW bytes in shared memory, by all threads: `rows` from `first` on, with maxima[0],
// all 0, and lists[0], then `second_rows` from `second` on with maxima[1] and lists[1].
// `finish(i, row, factor)` takes the factor of each row, by one thread. Ends with a barrier.
template <int BLOCKS, int PLANE, int ROW, int LANES, bool RAC, bool SPLICE, bool COLUMNS,
          typename Finish>
DEVICE void quantize_rows(u32 first, int rows, u32 second, int second_rows, Maxima* maxima,
                          const Lists<BLOCKS>* lists, float alpha, Finish finish) {
  static_assert(BLOCKS % 8 == 0, "8 blocks that lie together are of one row");
  constexpr bool FOLD = SPLICE && !COLUMNS;
  const int lane = threadIdx.x & 31, part = lane % LANES;
  const int blocks = (rows + second_rows) * BLOCKS;
  auto each = [&](auto run) {
#pragma unroll 1
    for (int start = threadIdx.x - lane; start < blocks * LANES; start += THREADS) {
      const u32 item = (u32)(start + lane) / LANES, block = min(item, (u32)blocks - 1);
      const int place = block / BLOCKS, own = block % BLOCKS, i = place >= rows;
      const int row = i ? place - rows : place;
      const u32 hot = SPLICE ? lists[i].hot[own] >> part : 0;
      const u32 at = (i ? second : first) + row * ROW + part * PLANE + own * 4;
      run(BlockPart<PLANE, LANES, RAC, SPLICE, COLUMNS>{at, hot}, i, row, own, item == block);
    }
  };
  each([&](auto block, int i, int row, int own, bool inside) {
    u32 largest = block.largest();
#pragma unroll
    for (int step = 1; step < 8 * LANES; step *= 2)
      largest = larger_halves(largest, __shfl_xor_sync(~0u, largest, step));
    if (inside && lane % (8 * LANES) == 0) {
      atomicMax(&maxima[i].cold[row], largest & 0xFFFFu);
      if (FOLD) atomicMax(&maxima[i].hot[row], largest >> 16);
    }
  });
  __syncthreads();  // rows are overwritten from here on
  each([&](auto block, int i, int row, int own, bool inside) {
    const RowScale scale(maxima[i].cold[row], FOLD ? maxima[i].hot[row] : 0);
    const bool chosen = RAC && ((const u8*)lists[i].chosen)[own];
    block.quantize(scale, chosen, alpha, inside);
    if (inside && own == 0 && part == 0) finish(i, row, scale.factor());
  });
  __syncthreads();
}

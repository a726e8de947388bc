// The folded quantizer of compensated rows: `compensation.operands`, then `compensation.fold`.
// After device.cuh, whose functions it uses.
#pragma once

// The lists of GEMM2's input: of each expert, or one for all where the stride is 0.
struct Compensation {
  const u8* block_mask;  // [lists, K/16]: 1 where a block's residual is added; null: no RAC
  const int* hot_bits;   // [lists, K/16]: the hot channels of each block as bits; null: no splice
  int mask_stride, bits_stride;
  float alpha;
};

// The E4M3 scale of a block from the bits of its largest magnitude.
DEVICE float block_scale(u32 largest, float inverse) {
  return decode_e4m3(encode_e4m3(__fmul_rn(as_float(largest), __fmul_rn(inverse, ONE_SIXTH))));
}

DEVICE float encode_scale(float scale, float global) {
  const float decode = __fmul_rn(scale, global);
  return decode == 0.0f ? 0.0f : fminf(__fdiv_rn(1.0f, decode), FLT_MAX);
}

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

// A row of K = BLOCKS * 16 bfloat16 in shared memory, as `rows.Operand` with planes of PLANE bytes,
// to float16 operands in its place. One warp; returns the row's scale. mask, bits: this expert's.
// COLUMNS: hot channels become 0, as they have columns of their own.
template <int BLOCKS, int PLANE, bool RAC, bool SPLICE, bool COLUMNS>
DEVICE float compensate_row(u32 row, int lane, const u8* mask, const int* bits, float alpha) {
  constexpr bool FOLD = SPLICE && !COLUMNS;
  constexpr int MINE = (BLOCKS + 31) / 32;
  u32 hot[MINE], chosen[MINE], largest = 0, largest_hot = 0;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int block = i * 32 + lane;
    hot[i] = SPLICE && block < BLOCKS ? bits[block] : 0;
    chosen[i] = RAC && block < BLOCKS ? mask[block] : 0;
  }
  // Word j of a block holds its elements j and j + 8: all ones where they are hot.
  auto hot_halves = [](u32 bits_of_block, int j) {
    return (bits_of_block >> j & 1) * 0xFFFFu | (bits_of_block >> (j + 8) & 1) * 0xFFFF0000u;
  };
#pragma unroll
  for (int i = 0; i < MINE; i++)
    if (i * 32 + lane < BLOCKS)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        const u32 pair = load_shared(row + j * PLANE + (i * 32 + lane) * 4);
        const u32 halves = SPLICE ? hot_halves(hot[i], j) : 0;
        largest = larger_magnitude(largest, pair & ~halves);
        if (FOLD) largest_hot = larger_magnitude(largest_hot, pair & halves);
      }
  largest = __reduce_max_sync(~0u, largest);
  const bool bad = largest >= 0x7F800000u;
  const float amax = bad ? 0.0f : as_float(largest);
  const float inverse = amax < AMAX_FLOOR ? 1.0f : __fdiv_rn(2688.0f, amax);
  const float global = __fdiv_rn(1.0f, inverse);
  int shift = 0;
  if (FOLD) {
    largest_hot = __reduce_max_sync(~0u, largest_hot);
    const int exponent = (int)(largest_hot >> 23) - (int)(as_bits(global) >> 23);
    shift = largest_hot < 0x7F800000u ? min(max(exponent + 1 - 15, 0), 126) : 0;
  }
  const float down = power_of_two(-shift), reciprocal = __fdiv_rn(1.0f, global);
#pragma unroll
  for (int i = 0; i < MINE; i++)
    if (i * 32 + lane < BLOCKS) {
      const u32 at = row + (i * 32 + lane) * 4;
      u32 pairs[8], block_max = 0, residual_max = 0;
      float total[16], residual[16];
#pragma unroll
      for (int j = 0; j < 8; j++) {
        pairs[j] = load_shared(at + j * PLANE);
        block_max = larger_magnitude(block_max, SPLICE ? pairs[j] & ~hot_halves(hot[i], j) : pairs[j]);
      }
      const float scale = block_scale(block_max, inverse), encode = encode_scale(scale, global);
#pragma unroll
      for (int k = 0; k < 16; k++) {
        const u32 pair = SPLICE ? pairs[k % 8] & ~hot_halves(hot[i], k % 8) : pairs[k % 8];
        const float value = k < 8 ? bf16_low(pair) : bf16_high(pair);
        total[k] = round_e2m1(__fmul_rn(value, encode)) * scale;
        if (RAC) {
          residual[k] = __fsub_rn(value, __fmul_rn(total[k], global));
          residual_max = max(residual_max, as_bits(residual[k]) & 0x7FFFFFFFu);
        }
      }
      if (RAC) {
        const float scale_r = block_scale(residual_max, inverse);
        const float encode_r = encode_scale(scale_r, global);
#pragma unroll
        for (int k = 0; k < 16; k++) {
          const float added = round_e2m1(__fmul_rn(residual[k], encode_r)) * scale_r;
          total[k] = __fadd_rn(total[k], chosen[i] ? __fmul_rn(alpha, added) : 0.0f);
        }
      }
#pragma unroll
      for (int j = 0; j < 8; j++) {
        float low = total[j], high = total[j + 8];
        if (FOLD) {
          const bool low_hot = hot[i] >> j & 1, high_hot = hot[i] >> (j + 8) & 1;
          low = low_hot ? __fmul_rn(__fmul_rn(bf16_low(pairs[j]), down), reciprocal)
                        : __fmul_rn(low, down);
          high = high_hot ? __fmul_rn(__fmul_rn(bf16_high(pairs[j]), down), reciprocal)
                          : __fmul_rn(high, down);
        }
        store_shared(at + j * PLANE, bad ? 0x7FFF7FFFu : pack_fp16(low, high));
      }
    }
  return bad ? as_float(0x7FC00000u) : __fmul_rn(global, power_of_two(shift));
}

// What the kernels of this folder share. No CUDA headers, so that NVRTC needs none.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__

// ---- shared memory, barriers, copies

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra WAIT;\n}" ::"r"(barrier), "r"(phase)
      : "memory");
}

// Copy engine, global to shared; both addresses and the size are multiples of 16.
DEVICE void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          target),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Shared memory that ordinary stores wrote and the copy engine writes next, or the other way round.
DEVICE void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int OFFSET>
DEVICE uint2 load_shared2(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2 + %3];"
               : "=r"(v.x), "=r"(v.y)
               : "r"(address), "n"(OFFSET));
  return v;
}

DEVICE uint4 load_shared4(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

DEVICE u32 load_shared(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

DEVICE void store_shared(u32 address, u32 value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

// 4 bytes, global to shared, behind the thread's back.
DEVICE void copy_word(u32 target, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Weights are read once: no place in the L1 cache.
DEVICE uint4 load_stream16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

DEVICE uint2 load_stream8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

DEVICE u32 load_stream2(const void* p) {
  u16 v;
  asm volatile("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=h"(v) : "l"(p));
  return v;
}

// Programmatic launch: begin before the kernel in front has ended, and wait for its results.
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// What is derived from `value` is not computed in front of the loop that this stands in: registers are
// short there.
template <typename T>
DEVICE void keep_inside(T& value) {
  asm volatile("" : "+r"(value));
}

// Addresses at constant distances from this one are computed by the loads: the compiler would keep
// some of them in registers.
DEVICE void keep_base(const u8*& pointer) { asm volatile("" : "+l"(pointer)); }

// ---- numbers

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float value) { return __float_as_uint(value); }
DEVICE float bf16_low(u32 pair) { return as_float(pair << 16); }
DEVICE float bf16_high(u32 pair) { return as_float(pair & 0xFFFF0000u); }

DEVICE u32 pack_bf16(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

DEVICE u32 pack_fp16(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Of both halves, as unsigned numbers.
DEVICE u32 larger_halves(u32 a, u32 b) {
  u32 larger;
  asm("max.u16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// A half of ones for bit 7, and one for bit 15.
DEVICE u32 spread_signs(u32 bits) {
  u32 halves;
  asm("prmt.b32 %0, %1, 0, 0x9988;" : "=r"(halves) : "r"(bits));
  return halves;
}

DEVICE float round_bf16(float value) { return bf16_low(pack_bf16(value, 0.0f)); }

// ---- E2M1 weights to 16-bit operands

// Which 16-bit format the tensor cores get: float16 or bfloat16 operands.
enum Format { BF16 = 0, FP16 = 1 };

// The code put at the lowest exponent bits and the highest mantissa bit is its value times 2^-14
// (float16) or 2^-126; times scale * 2^7 or scale * 2^118 that is code * scale times 1/UNDO.
template <Format F>
DEVICE constexpr float undo() {
  return F == FP16 ? 128.0f : 256.0f;
}

template <Format F>
DEVICE u32 multiply(u32 a, u32 b) {
  u32 product;
  if constexpr (F == FP16)
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  else
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// d += a[16 x 16] @ b[16 x 8].
template <Format F>
DEVICE void mma(float* d, const u32* a, u32 b0, u32 b1) {
  if constexpr (F == FP16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two E4M3 bytes to the scales of two blocks, each in both halves of a register.
template <Format F>
DEVICE void widen_scales(u32 bytes, u32& first, u32& second) {
  u32 pair = __byte_perm(bytes, 0, 0x4140);
  if constexpr (F == FP16) {
    pair = multiply<F>(pair * 128, 0x78007800u);  // scale * 2^-8, times 2^15
  } else {
    pair = multiply<F>(pair * 16, 0x7F007F00u);  // scale * 2^-120, times 2^127
    pair = multiply<F>(pair, 0x77007700u);       // times 2^111
  }
  first = __byte_perm(pair, pair, 0x1010);
  second = __byte_perm(pair, pair, 0x3232);
}

// Code J (0 to 3) of both halves of a word of `weight_tiles.TileLayout`: signs of codes 0, 2, 3, 1
// in bits 15 to 12 of a half, magnitudes of codes 0 to 3 in bits 11 to 0.
template <Format F, int J>
DEVICE u32 unpack(u32 word) {
  constexpr u32 SIGN = 0x80008000u;
  if constexpr (F == FP16) {
    constexpr u32 MAGNITUDE = 0x0E000E00u;
    if constexpr (J == 0) return word & (SIGN | MAGNITUDE);
    if constexpr (J == 1) return (word << 3) & (SIGN | MAGNITUDE);
    if constexpr (J == 2) return ((word << 6) & MAGNITUDE) | ((word << 1) & SIGN);
    return ((word << 9) & MAGNITUDE) | ((word << 2) & SIGN);
  } else {
    constexpr u32 MAGNITUDE = 0x01C001C0u;
    if constexpr (J == 0) return ((word >> 3) & MAGNITUDE) | (word & SIGN);
    if constexpr (J == 1) return (word & MAGNITUDE) | ((word << 3) & SIGN);
    if constexpr (J == 2) return ((word << 3) & MAGNITUDE) | ((word << 1) & SIGN);
    return ((word << 6) & MAGNITUDE) | ((word << 2) & SIGN);
  }
}

// ---- the quantizer of `quads_common.quantize`; compiled without contraction of multiply-adds

// The nearest E4M3 value of x >= 0: ties to even, saturating at 448.
DEVICE float round_e4m3(float x) {
  const float magic = as_float(as_bits(fmaxf(x, 0.015625f)) & 0x7F800000u) * 1048576.0f;
  return fminf((x + magic) - magic, 448.0f);
}

// The nearest E2M1 value with the sign of x: ties to even, saturating at 6. See
// `kernels/_coding.round_e2m1`.
DEVICE float round_e2m1(float x) {
  float a = fminf(fabsf(x), 6.0f);
  float magic = as_float(as_bits(fmaxf(a, 1.0f)) & 0x7F800000u) * 4194304.0f;
  return copysignf((a + magic) - magic, x);
}

// Hopper's asynchronous products of a warpgroup (wgmma), the left operand in registers or in shared
// memory. sm_90a alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace flint::cuda {

// Before the first product of a group: what threads wrote into its registers is there.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void close_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most the `kOpen` youngest groups are still under way.
template <int kOpen>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kOpen) : "memory");
}

// After a wait: what a product left in `sums` is read from here on, and not before.
template <int kCount>
__device__ __forceinline__ void settle(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// A right operand: rows of 64 BF16 in 128 bytes, eight rows after eight rows, chunks exchanged as
// the copy unit does (tensor_map.h); `address` is a multiple of 1024. The next 16 columns of it are
// kNextColumns further on.
inline constexpr uint64_t kNextColumns = 32 >> 4;

__device__ __forceinline__ uint64_t right_operand(uint32_t address) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{1} << 16 | (address & 0x3ffff) >> 4;
}

// A right operand as it lies, b[16][128]: rows as above, its columns 64 ... 127 in rows of their
// own `apart` bytes further on. The next 16 rows of it are kNextRows further on.
inline constexpr uint64_t kNextRows = 2048 >> 4;

__device__ __forceinline__ uint64_t upright_operand(uint32_t address, uint32_t apart) {
  return right_operand(address) - (uint64_t{1} << 16) + (uint64_t{apart >> 4} << 16);
}

// sums[64 rows][kRows] += a[64][16] * b[kRows][16]^T, over the four warps of a warpgroup: a warp
// has 16 rows, and its lanes hold `a` and each eight columns of the sums as in mma.cuh. Without
// `add` the sums begin with this product.
template <int kRows>
__device__ __forceinline__ void multiply_rows(float (&sums)[kRows / 2], const uint32_t (&a)[4],
                                              uint64_t b, bool add);

// The same with `a` in shared memory, as a right operand lies there.
template <int kRows>
__device__ __forceinline__ void multiply_rows_shared(float (&sums)[kRows / 2], uint64_t a,
                                                     uint64_t b, bool add);

// The operands by number: sums, then `a`, `b` and `add`.
#define FLINT_TEXT_0                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, " \
  "%8, %9, %10, %11, %12, %13, %14, %15"
#define FLINT_TEXT_1                         \
  "%16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define FLINT_TEXT_2                         \
  "%32, %33, %34, %35, %36, %37, %38, %39, " \
  "%40, %41, %42, %43, %44, %45, %46, %47"
#define FLINT_TEXT_3                         \
  "%48, %49, %50, %51, %52, %53, %54, %55, " \
  "%56, %57, %58, %59, %60, %61, %62, %63"
#define FLINT_TEXT_4                         \
  "%64, %65, %66, %67, %68, %69, %70, %71, " \
  "%72, %73, %74, %75, %76, %77, %78, %79"
#define FLINT_TEXT_5                         \
  "%80, %81, %82, %83, %84, %85, %86, %87, " \
  "%88, %89, %90, %91, %92, %93, %94, %95"
#define FLINT_TEXT_6                             \
  "%96, %97, %98, %99, %100, %101, %102, %103, " \
  "%104, %105, %106, %107, %108, %109, %110, %111"
#define FLINT_TEXT_7                                 \
  "%112, %113, %114, %115, %116, %117, %118, %119, " \
  "%120, %121, %122, %123, %124, %125, %126, %127"
#define FLINT_FOUR(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define FLINT_SUMS(i) FLINT_FOUR(i), FLINT_FOUR(i + 4), FLINT_FOUR(i + 8), FLINT_FOUR(i + 12)
#define FLINT_MULTIPLY(rows, text, a_text, b_text, add_text, ...)                          \
  template <>                                                                              \
  __device__ __forceinline__ void multiply_rows<rows>(                                     \
      float (&sums)[rows / 2], const uint32_t (&a)[4], uint64_t b, bool add) {             \
    asm volatile("{.reg .pred more; setp.ne.b32 more, " add_text                           \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.bf16.bf16 {" text \
                 "}, {" a_text "}, " b_text ", more, 1, 1, 0;}"                            \
                 : __VA_ARGS__                                                             \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b),                     \
                   "r"(static_cast<int>(add)));                                            \
  }
FLINT_MULTIPLY(32, FLINT_TEXT_0, "%16, %17, %18, %19", "%20", "%21", FLINT_SUMS(0))
FLINT_MULTIPLY(64, FLINT_TEXT_0 ", " FLINT_TEXT_1, "%32, %33, %34, %35", "%36", "%37",
               FLINT_SUMS(0), FLINT_SUMS(16))
FLINT_MULTIPLY(96, FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2, "%48, %49, %50, %51", "%52",
               "%53", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32))
FLINT_MULTIPLY(128, FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3,
               "%64, %65, %66, %67", "%68", "%69", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
               FLINT_SUMS(48))
FLINT_MULTIPLY(160,
               FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3 ", " FLINT_TEXT_4,
               "%80, %81, %82, %83", "%84", "%85", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
               FLINT_SUMS(48), FLINT_SUMS(64))
FLINT_MULTIPLY(192,
               FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3 ", " FLINT_TEXT_4
                            ", " FLINT_TEXT_5,
               "%96, %97, %98, %99", "%100", "%101", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
               FLINT_SUMS(48), FLINT_SUMS(64), FLINT_SUMS(80))
FLINT_MULTIPLY(224,
               FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3 ", " FLINT_TEXT_4
                            ", " FLINT_TEXT_5 ", " FLINT_TEXT_6,
               "%112, %113, %114, %115", "%116", "%117", FLINT_SUMS(0), FLINT_SUMS(16),
               FLINT_SUMS(32), FLINT_SUMS(48), FLINT_SUMS(64), FLINT_SUMS(80), FLINT_SUMS(96))
FLINT_MULTIPLY(256,
               FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3 ", " FLINT_TEXT_4
                            ", " FLINT_TEXT_5 ", " FLINT_TEXT_6 ", " FLINT_TEXT_7,
               "%128, %129, %130, %131", "%132", "%133", FLINT_SUMS(0), FLINT_SUMS(16),
               FLINT_SUMS(32), FLINT_SUMS(48), FLINT_SUMS(64), FLINT_SUMS(80), FLINT_SUMS(96),
               FLINT_SUMS(112))

#define FLINT_MULTIPLY_SHARED(rows, text, a_text, b_text, add_text, ...)                          \
  template <>                                                                                     \
  __device__ __forceinline__ void multiply_rows_shared<rows>(float (&sums)[rows / 2], uint64_t a, \
                                                             uint64_t b, bool add) {              \
    asm volatile("{.reg .pred more; setp.ne.b32 more, " add_text                                  \
                 ", 0; wgmma.mma_async.sync.aligned.m64n" #rows "k16.f32.bf16.bf16 {" text        \
                 "}, " a_text ", " b_text ", more, 1, 1, 0, 0;}"                                  \
                 : __VA_ARGS__                                                                    \
                 : "l"(a), "l"(b), "r"(static_cast<int>(add)));                                   \
  }
FLINT_MULTIPLY_SHARED(32, FLINT_TEXT_0, "%16", "%17", "%18", FLINT_SUMS(0))
FLINT_MULTIPLY_SHARED(64, FLINT_TEXT_0 ", " FLINT_TEXT_1, "%32", "%33", "%34", FLINT_SUMS(0),
                      FLINT_SUMS(16))
FLINT_MULTIPLY_SHARED(96, FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2, "%48", "%49", "%50",
                      FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32))
FLINT_MULTIPLY_SHARED(128, FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3,
                      "%64", "%65", "%66", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
                      FLINT_SUMS(48))
FLINT_MULTIPLY_SHARED(160,
                      FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3
                                   ", " FLINT_TEXT_4,
                      "%80", "%81", "%82", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
                      FLINT_SUMS(48), FLINT_SUMS(64))
FLINT_MULTIPLY_SHARED(192,
                      FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3
                                   ", " FLINT_TEXT_4 ", " FLINT_TEXT_5,
                      "%96", "%97", "%98", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
                      FLINT_SUMS(48), FLINT_SUMS(64), FLINT_SUMS(80))
FLINT_MULTIPLY_SHARED(224,
                      FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3
                                   ", " FLINT_TEXT_4 ", " FLINT_TEXT_5 ", " FLINT_TEXT_6,
                      "%112", "%113", "%114", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
                      FLINT_SUMS(48), FLINT_SUMS(64), FLINT_SUMS(80), FLINT_SUMS(96))
FLINT_MULTIPLY_SHARED(256,
                      FLINT_TEXT_0 ", " FLINT_TEXT_1 ", " FLINT_TEXT_2 ", " FLINT_TEXT_3
                                   ", " FLINT_TEXT_4 ", " FLINT_TEXT_5 ", " FLINT_TEXT_6
                                   ", " FLINT_TEXT_7,
                      "%128", "%129", "%130", FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32),
                      FLINT_SUMS(48), FLINT_SUMS(64), FLINT_SUMS(80), FLINT_SUMS(96),
                      FLINT_SUMS(112))

// sums[64 rows][112] (+)= a[64][16] * b[112][16]^T, `a` in shared memory as a right operand lies
// there.
__device__ __forceinline__ void multiply_shared(float (&sums)[56], uint64_t a, uint64_t b,
                                                bool add) {
  asm volatile(
      "{.reg .pred more; setp.ne.b32 more, %58, 0; "
      "wgmma.mma_async.sync.aligned.m64n112k16.f32.bf16.bf16 {" FLINT_TEXT_0 ", " FLINT_TEXT_1
      ", " FLINT_TEXT_2 ", %48, %49, %50, %51, %52, %53, %54, %55}, %56, %57, more, 1, 1, 0, 0;}"
      : FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32), FLINT_FOUR(48), FLINT_FOUR(52)
      : "l"(a), "l"(b), "r"(static_cast<int>(add)));
}

// sums[64 rows][128] += a[64][16] * b[16][128], `a` in registers and `b` upright.
__device__ __forceinline__ void multiply_upright(float (&sums)[64], const uint32_t (&a)[4],
                                                 uint64_t b, bool add) {
  asm volatile(
      "{.reg .pred more; setp.ne.b32 more, %69, 0; "
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" FLINT_TEXT_0 ", " FLINT_TEXT_1
      ", " FLINT_TEXT_2 ", " FLINT_TEXT_3 "}, {%64, %65, %66, %67}, %68, more, 1, 1, 1;}"
      : FLINT_SUMS(0), FLINT_SUMS(16), FLINT_SUMS(32), FLINT_SUMS(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)));
}

#undef FLINT_MULTIPLY
#undef FLINT_MULTIPLY_SHARED
#undef FLINT_SUMS
#undef FLINT_FOUR
#undef FLINT_TEXT_0
#undef FLINT_TEXT_1
#undef FLINT_TEXT_2
#undef FLINT_TEXT_3
#undef FLINT_TEXT_4
#undef FLINT_TEXT_5
#undef FLINT_TEXT_6
#undef FLINT_TEXT_7

}  // namespace flint::cuda

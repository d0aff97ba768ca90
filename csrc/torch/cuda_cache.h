// Paged caches, positions and slots as the GPU kernels take them.
#pragma once

#include "cuda/kv_write.h"
#include "torch/cuda_binding.h"

namespace flint {

inline PageStrides page_strides(const Tensor& cache) {
  return {cache.stride(0), cache.stride(1), cache.stride(2)};
}

inline cuda::KvCache checked_cache(const CudaCall& call, const Tensor& k, const Tensor& v,
                                   bool bf16) {
  call.check_rows(k, "k_cache", bf16);
  call.check_rows(v, "v_cache", bf16);
  STD_TORCH_CHECK(k.dim() == 4 && v.dim() == 4,
                  "k_cache, v_cache: want [blocks, page_size, kv_heads, head_dim]");
  for (int64_t i = 0; i < 4; ++i) {
    STD_TORCH_CHECK(k.size(i) == v.size(i), "v_cache: want the shape of k_cache");
  }
  STD_TORCH_CHECK(k.size(0) * k.size(1) <= 0xffffffff && k.size(2) * k.size(3) <= 0x7fffffff,
                  "k_cache: got ", k.size(0) * k.size(1), " slots, want fewer than 2^32");
  return {mutable_data<void>(k),
          mutable_data<void>(v),
          page_strides(k),
          page_strides(v),
          k.size(0) * k.size(1),
          k.size(1),
          static_cast<int>(k.size(2)),
          static_cast<int>(k.size(3))};
}

inline cuda::Indices checked_indices(const CudaCall& call, const Tensor& indices,
                                     const char* name) {
  const bool wide = indices.scalar_type() == ScalarType::Long;
  call.check_dense(indices, name, wide ? ScalarType::Long : ScalarType::Int, indices.numel());
  return {data<void>(indices), indices.numel(), wide};
}

}  // namespace flint

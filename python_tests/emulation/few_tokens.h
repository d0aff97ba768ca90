// What a CTA has of dynamic shared memory, under the name that the kernels of a few tokens give it.
// Each of their sources is compiled by itself, with this in front of it.
#pragma once

#include <cstdint>

namespace flint::cuda {
namespace {

alignas(128) thread_local uint8_t shared[232448];

}  // namespace
}  // namespace flint::cuda

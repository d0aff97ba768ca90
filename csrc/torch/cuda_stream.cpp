#include "torch/cuda_stream.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

namespace flint {
namespace {

using GetStream = AOTITorchError (*)(int32_t device, void** stream);

// Named here and not linked, so that the same file loads under a torch without CUDA. torch loads
// its libraries privately, so the global scope does not have the function: it is asked of the
// library itself, which is not loaded by this.
GetStream find_get_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  void* function = dlsym(library, "aoti_torch_get_current_cuda_stream");
  dlclose(library);  // gives back the count that dlopen took; torch keeps it loaded
  return reinterpret_cast<GetStream>(function);
}

}  // namespace

cudaStream_t current_cuda_stream(int32_t device) {
  static const GetStream get_stream = find_get_stream();
  STD_TORCH_CHECK(get_stream != nullptr,
                  "this torch has no CUDA: aoti_torch_get_current_cuda_stream was not found in a "
                  "loaded libtorch_cuda.so; install a CUDA build of torch");
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device, &stream) == 0, "torch gives no stream for CUDA device ",
                  device);
  return static_cast<cudaStream_t>(stream);
}

}  // namespace flint

// Runs the package that export_layer.py has made, from C++; prints what load_layer.py prints.
//
//     load_layer layer.pt2
//
// The ops are declared in Python, so the process needs an interpreter that imports flint_kernels
// once, before the package is loaded; on the CPU every op then takes the GIL for as long as it
// runs.
#include <Python.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>

namespace {

constexpr int64_t kHidden = 128, kKvHeads = 1, kHeadDim = 128, kPage = 16;
constexpr int64_t kWorkspaceBytes = 16;  // flint_kernels.ops.workspace_bytes("cpu")

at::Tensor wave(at::IntArrayRef shape) {
  const int64_t count = c10::multiply_integers(shape);
  return torch::arange(count).sin().view(shape).to(torch::kBFloat16);
}

std::vector<at::Tensor> inputs(int64_t requests) {
  const at::Tensor b = torch::arange(requests, torch::kInt32);
  const at::Tensor positions = b + 4;
  const at::Tensor rows = wave({2, requests, kHidden});
  const at::Tensor slots = b * 2 * kPage + positions;
  const at::Tensor table = torch::stack({2 * b, 2 * b + 1}, 1);
  const at::Tensor cache = wave({2 * requests, 2, kPage, kKvHeads, kHeadDim});
  const at::Tensor workspace = torch::zeros({kWorkspaceBytes}, torch::kUInt8);
  return {rows[0], rows[1], positions, slots, table, positions + 1, cache, workspace};
}

void report(torch::inductor::AOTIModelPackageLoader& layer) {
  for (const int64_t requests : {1, 2, 8}) {
    std::vector<at::Tensor> given = inputs(requests);
    std::vector<at::Tensor> shown = layer.run(given);
    shown.push_back(given[6]);
    std::printf("%ld:", static_cast<long>(requests));
    for (const at::Tensor& tensor : shown)
      std::printf(" %.6f", tensor.to(torch::kDouble).sum().item<double>());
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: load_layer layer.pt2\n");
    return 2;
  }
  Py_Initialize();
  if (PyRun_SimpleString("import flint_kernels") != 0) return 1;
  PyThreadState* const state = PyEval_SaveThread();  // the ops take the GIL themselves
  {
    torch::inductor::AOTIModelPackageLoader layer(argv[1]);
    report(layer);
  }
  PyEval_RestoreThread(state);
  return Py_FinalizeEx() == 0 ? 0 : 1;
}

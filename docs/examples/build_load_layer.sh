#!/usr/bin/env bash
# Compiles load_layer.cpp against the torch of a Python: build_load_layer.sh OUTPUT [PYTHON]
set -euo pipefail
output=$1
python=${2:-python}
torch=$("$python" -c 'import torch; print(torch.__path__[0])')
read -r include lib version < <("$python" -c '
import sysconfig as s
print(s.get_path("include"), s.get_config_var("LIBDIR"), s.get_config_var("LDVERSION"))')
"${CXX:-g++}" -std=c++20 -O1 "$(dirname "$0")/load_layer.cpp" -o "$output" \
  -isystem "$torch/include" -isystem "$torch/include/torch/csrc/api/include" -isystem "$include" \
  -L"$torch/lib" -L"$lib" -Wl,-rpath,"$torch/lib" -Wl,-rpath,"$lib" \
  -Wl,--no-as-needed -ltorch -ltorch_cpu -lc10 -lpython"$version"

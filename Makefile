# make demo    installs into .venv and generates text with the packaged checkpoint
# make test    installs with the test extras and runs the tests
# make wheel   builds a wheel for every Python and torch into dist/; with nvcc, for GPUs too
# make lint    installs with the development tools and runs all static checks
# make format  rewrites the sources as `make lint` wants them
# make docs    regenerates what is generated in the documents
# make bench   measures the figures of docs/results/cpu, on a machine that does nothing else
# make slow-test  as test, the tests that take a minute or more: a layer in a C++ program
# make vllm-test VENV=DIR  installs vLLM and the package into DIR, and runs the plug-in's tests
# make gpu-test   as test, the tests that need an NVIDIA GPU
# make gpu-test-two  the tests that need two of them
# make fuzz       the file readers and the C++ repack under a fuzzer, EXECUTIONS times each
# make sanitize   the C++ code with AddressSanitizer and UBSan, by the CPU tests that call it;
#                 `make gpu-sanitize` runs compute-sanitizer over every kernel
# make gpu-endurance  a million decode steps of flint-tiny, with requests that come and go
# make gpu-generate   Transformers' generate() beside the library's own loop, measured
# make gpu-test-wheel the GPU tests of an installed wheel
# make planted    faults put into a copy of the tree: each must make a test fail; `make gpu-planted`
# make properties      many examples of the property tests; `make gpu-properties` on a GPU
# make gpu-forward  whole forwards, tokens and loading at the full size (23 GB of disk), measured
# make gpu-bench  measures the kernels for docs/results/$(GPU), on a GPU that does nothing else
# make clean   removes what was built; `make distclean` the virtual environment too
#
# VENV=DIR     the virtual environment, made where it is missing (.venv)
# PYTHON=EXE   the Python that makes it; with VENV= (empty), the one to install into as it is
# TORCH=...    what pip installs as torch (-r requirements.txt); TORCH= (empty) keeps what is there
# PYTEST_ARGS  further arguments of pytest, such as `-k norm`
# WORKERS=2    processes that share the tests
# EXAMPLES=2000  of each property test in `make properties`
# EXECUTIONS=100000  of each target of `make fuzz`, whose C++ one is built by CLANGXX (clang++)
# GPU=NAME     the folder of docs/results for what is measured on the GPU (h200)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= -r requirements.txt
PYTEST_ARGS ?=
WORKERS ?= 2
GPU ?= h200
EXECUTIONS ?= 100000
EXAMPLES ?= 2000
CLANGXX ?= clang++

# As in pyproject.toml's [build-system]. Without build isolation they must be there beforehand;
# with it pip would download a second torch to compile against.
BUILD_REQUIREMENTS := "setuptools>=77" ninja

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := demo

ifeq ($(strip $(VENV)),)
  PY := $(PYTHON)
  STAMPS := build/stamps/$(subst /,+,$(shell $(PYTHON) -c 'import sys; print(sys.prefix)'))
else
  PY := $(VENV)/bin/python
  STAMPS := $(VENV)/flint-kernels-stamps
endif
PIP := $(PY) -m pip --disable-pip-version-check
CLANG_FORMAT := $(PY) -c 'from clang_format import clang_format; clang_format()'
INSTALL := $(PIP) install --quiet --no-build-isolation --editable

NATIVE_SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
PACKAGE_INPUTS := pyproject.toml setup.py $(NATIVE_SOURCES)
FORMATTED := $(NATIVE_SOURCES) docs/examples/*.cpp $(shell find python_tests/emulation -type f) fuzz/repack.cpp
# Those that need no file of the tree but the tests.
WHEEL_TESTS := $(addprefix python_tests/gpu/test_,rows_gpu.py low_latency_gpu.py general_gpu.py \
  many_gpu.py attention_decode_gpu.py attention_prefill_gpu.py graph_decoder_gpu.py \
  decode_loop_gpu.py sampling_gpu.py model_gpu.py)
# One thread a process: OpenMP threads that spin while others want the core cost more than they do.
ONE_THREAD := OMP_NUM_THREADS=1

DEBIAN_HINT := (Debian, Ubuntu: apt-get install python3-venv python3-dev g++)

.PHONY: demo test slow-test vllm-test wheel lint format docs bench fuzz sanitize planted properties \
  gpu-test gpu-test-two gpu-planted gpu-sanitize gpu-properties gpu-endurance gpu-generate \
  gpu-test-wheel gpu-bench gpu-forward clean distclean compiler FORCE

demo: $(STAMPS)/package
	$(ONE_THREAD) $(PY) -m flint_kernels.cli generate flint-tiny --seed 0

test: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) -m pytest -n $(WORKERS) $(PYTEST_ARGS)

# A file that an earlier version of the package left in build/lib* would be packed too.
wheel: compiler $(STAMPS)/torch
	rm -rf build/lib* build/bdist* dist/flint_kernels-*.whl
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .
	$(PY) -m microbench.wheel dist/flint_kernels-*.whl --output build/results/wheel.json

lint: $(STAMPS)/dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(CLANG_FORMAT) --dry-run --Werror $(FORMATTED)

format: $(STAMPS)/dev
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(CLANG_FORMAT) -i $(FORMATTED)

docs: $(STAMPS)/package
	$(PY) docs/generate_ops.py
	$(PY) docs/generate_architectures.py
	$(PY) docs/generate_faults.py
	$(PY) docs/draw_layer.py
	$(PY) -m microbench.tables

# Written elsewhere first: a changed result file would make the tree that is measured a dirty one.
bench: $(STAMPS)/package
	$(PY) -m microbench.cpu --output build/results
	$(PY) -m flint_kernels.cli validate flint-tiny flint-tiny-bf16 --device cpu \
	  --output build/results/validate.json
	FLINT_KERNELS_NO_NATIVE=1 $(PY) -m flint_kernels.cli validate flint-tiny flint-tiny-bf16 \
	  --device cpu --path prefill --output build/results/validate_reference.json
	mkdir -p docs/results/cpu
	cp build/results/*.json docs/results/cpu/
	$(PY) -m microbench.tables

slow-test: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) -m pytest -m slow $(PYTEST_ARGS)

vllm-test: $(STAMPS)/vllm
	$(ONE_THREAD) $(PY) -m pytest -m vllm python_tests/test_vllm.py $(PYTEST_ARGS)

gpu-test: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) -m pytest -m gpu python_tests/gpu $(PYTEST_ARGS)

gpu-test-two: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) -m pytest -m two_gpus python_tests/gpu $(PYTEST_ARGS)

# The Python targets need atheris (Linux), that of C++ a clang++ with libFuzzer.
fuzz: $(STAMPS)/fuzz
	CLANGXX=$(CLANGXX) $(ONE_THREAD) $(PY) fuzz/campaign.py --executions $(EXECUTIONS) \
	  --output build/results/fuzz.json
	mkdir -p docs/results/cpu
	cp build/results/fuzz.json docs/results/cpu/
	$(PY) docs/generate_faults.py

sanitize: compiler $(STAMPS)/test
	$(PY) python_tests/run_sanitizers.py --output build/results/sanitizers.json -- -n $(WORKERS)
	mkdir -p docs/results/cpu
	cp build/results/sanitizers.json docs/results/cpu/
	$(PY) docs/generate_faults.py

planted: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/planted_faults.py --output build/results/planted_faults.json
	mkdir -p docs/results/cpu
	cp build/results/planted_faults.json docs/results/cpu/
	$(PY) docs/generate_faults.py

gpu-planted: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/planted_faults.py --device cuda --workers $(WORKERS) \
	  --output build/results/$(GPU)/planted_faults.json
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/planted_faults.json docs/results/$(GPU)/
	$(PY) docs/generate_faults.py

gpu-sanitize: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/gpu/run_compute_sanitizer.py --workers $(WORKERS) \
	  --output build/results/$(GPU)/sanitizers.json
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/sanitizers.json docs/results/$(GPU)/
	$(PY) docs/generate_faults.py

gpu-endurance: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/run_endurance.py --workers $(WORKERS) \
	  --output build/results/$(GPU)/endurance.json
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/endurance.json docs/results/$(GPU)/
	$(PY) docs/generate_faults.py

gpu-generate: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) -m microbench.generate --output build/results/$(GPU)/generate.json
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/generate.json docs/results/$(GPU)/
	$(PY) -m microbench.tables

gpu-test-wheel: wheel $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/run_wheel_tests.py --wheel dist/flint_kernels-*.whl \
	  --output build/results/$(GPU)/wheel_tests.json -- -m gpu $(WHEEL_TESTS)
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/wheel_tests.json docs/results/$(GPU)/
	$(PY) -m microbench.tables

properties: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/run_properties.py --examples $(EXAMPLES) \
	  --output build/results/properties.json
	mkdir -p docs/results/cpu
	cp build/results/properties.json docs/results/cpu/
	$(PY) docs/generate_faults.py

gpu-properties: compiler $(STAMPS)/test
	$(ONE_THREAD) $(PY) python_tests/run_properties.py --device cuda --examples $(EXAMPLES) \
	  --output build/results/$(GPU)/properties.json -- -m gpu -n $(WORKERS)
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/properties.json docs/results/$(GPU)/
	$(PY) docs/generate_faults.py

gpu-forward: $(STAMPS)/package
	rm -rf build/results/$(GPU)/forward
	$(PY) -m microbench.forward.suite --output build/results/$(GPU)/forward
	$(PY) -m microbench.load build/full-size --output build/results/$(GPU)/forward
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/forward/*.json docs/results/$(GPU)/
	$(PY) -m microbench.tables

gpu-bench: $(STAMPS)/package
	rm -rf build/results/$(GPU)/kernels
	$(PY) -m microbench.kernels --output build/results/$(GPU)/kernels
	$(PY) -m microbench.scratch --output build/results/$(GPU)/kernels
	mkdir -p docs/results/$(GPU)
	cp build/results/$(GPU)/kernels/*.json docs/results/$(GPU)/
	$(PY) -m microbench.tables

clean:
	rm -rf build dist *.egg-info flint_kernels/lib
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f $(STAMPS)/package $(STAMPS)/test $(STAMPS)/dev $(STAMPS)/fuzz $(STAMPS)/vllm

distclean: clean
	$(if $(strip $(VENV)),rm -rf $(VENV))

# ------------------------------------------------------------------------------ installation

$(STAMPS)/package: $(STAMPS)/torch $(PACKAGE_INPUTS)
	$(INSTALL) .
	touch $@

$(STAMPS)/test: $(STAMPS)/torch $(PACKAGE_INPUTS)
	$(INSTALL) '.[test]'
	touch $@

$(STAMPS)/fuzz: $(STAMPS)/torch $(PACKAGE_INPUTS)
	$(INSTALL) '.[test,fuzz]'
	touch $@

# vLLM brings the torch that it wants.
$(STAMPS)/vllm: $(STAMPS)/environment $(PACKAGE_INPUTS)
	$(PIP) install --quiet $(BUILD_REQUIREMENTS) 'vllm==0.33.*' pytest 'gguf>=0.19'
	$(INSTALL) --no-deps .
	touch $@

$(STAMPS)/dev: $(STAMPS)/torch $(PACKAGE_INPUTS)
	$(INSTALL) '.[test,dev]'
	touch $@

# Remembers what was asked for, so that another TORCH= installs anew and the same one does not.
$(STAMPS)/torch: $(STAMPS)/environment FORCE
	@wanted='$(TORCH) '"$$(cat requirements.txt)"; \
	if [ "$$(cat $@ 2>/dev/null)" != "$$wanted" ]; then \
	  echo 'Installing the build requirements and torch into $(or $(strip $(VENV)),$(PYTHON)):' \
	       'minutes where torch has to be downloaded'; \
	  $(PIP) install --quiet $(BUILD_REQUIREMENTS) $(TORCH); \
	  printf '%s\n' "$$wanted" > $@; \
	fi

$(STAMPS)/environment:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'error: PYTHON=$(PYTHON) is missing or older than Python 3.10; name another with' \
	       'make PYTHON=python3.12' >&2; exit 1; }
ifneq ($(strip $(VENV)),)
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV); \
	  echo 'error: $(PYTHON) cannot make a virtual environment; install its venv module' \
	       '$(DEBIAN_HINT)' >&2; exit 1; }
endif
	@mkdir -p $(@D) && touch $@

# The package installs without a compiler; torch.compile, which the tests use, does not work so.
compiler: $(STAMPS)/environment
	@command -v "$${CXX:-g++}" >/dev/null || { \
	  echo "error: no C++ compiler: $${CXX:-g++} was not found; install g++ or set CXX" \
	       '$(DEBIAN_HINT)' >&2; exit 1; }
	@$(PY) -c 'import os, sys, sysconfig; \
	  sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || { \
	  echo 'error: Python.h was not found: torch.compile needs the headers of $(PYTHON)' \
	       '$(DEBIAN_HINT)' >&2; exit 1; }

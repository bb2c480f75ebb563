# `make train` and `make test` set up all they need, on a fresh machine too; `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help setup build tools cuda train reproduce test test-all test-cpp test-cuda test-neon test-python lint types format docs site bench lab \
  explore endurance scale aggregator sanitize sanitize-core sanitize-quick sanitize-python sanitize-python-quick sanitize-torch fuzz clean

PYTHON ?= python3
TORCH ?= torch==2.13.0
# nproc heeds this variable, which is about threads, not compilers
JOBS ?= $(shell env -u OMP_NUM_THREADS nproc)
# Tests at once: many wait more than they compute.
TEST_JOBS ?= $(shell expr 2 \* $(JOBS))
# No test takes longer, in seconds.
CTEST = ctest --output-on-failure --timeout $$(awk "BEGIN { print 300 * $${SPARSECOMM_TEST_PATIENCE:-1} }")
# make train
RANKS ?= 2
EPOCHS ?= 3
DENSITY ?= 0.02
BATCH ?=
SEED ?= 1
# make explore
SEEDS ?= 100000
MINUTES ?= 60
# make fuzz, for each target
FUZZ_SECONDS ?= 60
# make scale: short, or full
export SCALE ?= short
# make reproduce: 1 for a quick one
FAST ?=
# arguments handed on to: pytest, the benchmarks, the lab
ARGS ?=

VENV := .venv
export VIRTUAL_ENV := $(CURDIR)/$(VENV)
export PATH := $(VIRTUAL_ENV)/bin:$(PATH)
export MAX_JOBS := $(JOBS)
# Objects found in the compiler cache by any clone of this repository: paths below are made relative.
export CCACHE_NOHASHDIR := 1
export CCACHE_BASEDIR := $(CURDIR)

# Warnings are errors here, not where a user's compiler may have more of them.
STRICT := -DSPARSECOMM_WERROR=ON

# Where setup.py has CMake build the Python module; the C++ tests link with the same core.
BUILD := build/python
CONFIGURE = cmake -S csrc -B $(BUILD) $(if $(wildcard $(BUILD)/CMakeCache.txt),,-G Ninja) -DSPARSECOMM_BUILD_TESTS=ON $(STRICT)

SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cmake' -o -name CMakeLists.txt)
CPP := $(shell find csrc benchmarks/scale tests/cpp tests/fuzz -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
# make lint: clang-tidy reads what has changed since then; everything if this is empty.
BASE ?= $(shell git merge-base HEAD origin/main 2> /dev/null)

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# ---- set-up: each step runs once, and again when what it depends on changes

$(VENV)/.system: scripts/system_packages.sh
	@scripts/system_packages.sh $(PYTHON)
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.torch: $(VENV)/.system Makefile
	python -m pip install --quiet "setuptools>=77" "cmake>=3.20" ninja "$(TORCH)"
	@# What the transports ucx and mpi are compiled against, where the system has none.
	python -m pip install --quiet libucx-cu13 || echo "libucx-cu13 is not to be had; going on without" >&2
	python -m pip install --quiet mpich==5.0.2 || echo "mpich is not to be had; going on without" >&2
	@touch $@

$(VENV)/.extension: $(VENV)/.torch setup.py pyproject.toml $(SOURCES)
	python -m pip install --quiet --no-build-isolation --editable '.[examples]'
	@touch $@

# Extras of what is installed: nothing is compiled again. The first line fails if it is not there: an index may have another
# project of that name.
$(VENV)/.tools: pyproject.toml | $(VENV)/.extension
	python -m pip install --quiet --no-index --no-deps sparsecomm
	python -m pip install --quiet 'sparsecomm[integrations,mpi,test,lint,docs]'
	@touch $@

$(VENV)/.simgrid: scripts/system_packages.sh
	@scripts/system_packages.sh $(PYTHON) scale
	@touch $@

$(VENV)/.neon: scripts/system_packages.sh
	@scripts/system_packages.sh $(PYTHON) neon
	@touch $@

setup: $(VENV)/.torch ## install the system's packages, the virtual environment and torch
build: $(VENV)/.extension ## compile and install sparsecomm in the virtual environment
tools: build $(VENV)/.tools ## install what tests and checks need beside it

# ---- use

TRAIN = OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node $(RANKS) examples/train_vgg16.py \
  --epochs $(EPOCHS) --lr-warmup 0.25 --seed $(SEED) $(if $(BATCH),--batch $(BATCH))

train: build ## train VGG-16 with dense and with sparse exchange, and compare (RANKS EPOCHS DENSITY BATCH SEED)
	$(TRAIN) --hook ddp --output runs/vgg16-ddp
	$(TRAIN) --hook oktopk --density $(DENSITY) --output runs/vgg16-oktopk
	$(TRAIN) --hook prepare --density $(DENSITY) --output runs/vgg16-prepare
	python examples/report.py runs/vgg16-ddp runs/vgg16-oktopk runs/vgg16-prepare --picture runs/vgg16.png

reproduce: build ## compare every method on every task, in hours; FAST=1: in minutes (ARGS="--tasks vgg16")
	OMP_NUM_THREADS=1 python benchmarks/reproduce.py $(if $(FAST),--fast) $(ARGS)

bench: build ## measure the collectives on this machine
	OMP_NUM_THREADS=1 sparsecomm bench allreduce --ranks $(RANKS) $(ARGS)

lab: build ## measure over rate-limited links between network namespaces, as root (ARGS="--grid goals" for minutes)
	python benchmarks/lab.py $(ARGS)

aggregator: ## compile the program of in-network aggregation, build/aggregator/sparsecomm-aggregator; needs CMake and a compiler alone
	cmake -S csrc -B build/aggregator -DSPARSECOMM_CUDA=OFF
	cmake --build build/aggregator --parallel $(JOBS) --target sparsecomm_aggregator

scale: build $(VENV)/.simgrid ## simulate 4 to 256 ranks with SimGrid; SCALE=full: also 1,024
	python benchmarks/scale/scale.py $(ARGS)

# ---- checks

test: cuda test-cpp sanitize-quick sanitize-python-quick test-python lint types ## run what a change must pass, in 25 minutes

test-all: cuda test-cpp endurance test-neon sanitize tools ## run every test and check, in hours
	OMP_NUM_THREADS=1 python -m pytest -m "slow or not slow" $(ARGS)
	$(MAKE) lint types BASE=
	$(MAKE) fuzz

test-cpp: setup $(VENV)/.simgrid ## run the C++ tests
	$(CONFIGURE)
	cmake --build $(BUILD) --parallel $(JOBS)
	$(CTEST) --test-dir $(BUILD) --parallel $(TEST_JOBS)

cuda: setup ## compile the CUDA kernels, and their tests for a device, where there is an nvcc
	@if ! command -v nvcc > /dev/null; then \
	  echo "Not installed, and done without: nvcc (the CUDA kernels)"; \
	else \
	  $(CONFIGURE) && \
	  cmake --build $(BUILD) --parallel $(JOBS) --target sparsecomm_cuda cuda_device_tests; \
	fi

test-cuda: tools cuda ## run the CUDA tests and benchmarks on a GPU; torch must have CUDA (ARGS are pytest's)
	OMP_NUM_THREADS=1 python -m pytest -m cuda tests/python/test_cuda.py $(ARGS)
	python benchmarks/cuda_kernels.py

explore: setup ## simulate failures, one for each seed, on all cores (SEEDS MINUTES ARGS="--seed FIRST")
	$(CONFIGURE)
	cmake --build $(BUILD) --parallel $(JOBS) --target explore
	$(BUILD)/tests/explore --seeds $(SEEDS) --minutes $(MINUTES) $(ARGS)
	$(BUILD)/tests/explore --faults aggregators --seeds $(SEEDS) --minutes $(MINUTES) $(ARGS)

endurance: setup ## make 10,000 communicators, 200,000 steps, and 200,000 operations in any order, which must leave nothing behind
	$(CONFIGURE)
	cmake --build $(BUILD) --parallel $(JOBS) --target endurance
	GLIBC_TUNABLES=glibc.malloc.tcache_count=0 $(BUILD)/tests/endurance

# The loops over memory, and what is made of them; and the aggregator, which SmartNICs run. Without the test that delivers messages
# in every order: all of that is computing, which takes 40 times as long under the emulator.
NEON_TESTS := kernels_test fused_test top_k_test block_scan_test half_test parallel_test sparse_test wire_test values_test qsgd_test \
  $(filter-out ina_exhaustive_test,$(patsubst tests/cpp/%.cc,%,$(wildcard tests/cpp/ina_*_test.cc tests/cpp/aggregator_*_test.cc))) message_stream_test

test-neon: setup $(VENV)/.neon ## run tests of the kernels for NEON and of the aggregator, compiled for aarch64, under an emulator
	cmake -S csrc -B build/neon -G Ninja -DCMAKE_TOOLCHAIN_FILE=$(CURDIR)/csrc/cmake/aarch64.cmake \
	  $(STRICT) -DSPARSECOMM_CUDA=OFF -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON
	cmake --build build/neon --parallel $(JOBS) --target sparsecomm_aggregator $(NEON_TESTS)
	$(CTEST) --test-dir build/neon --parallel $(JOBS) --exclude-regex '_NOT_BUILT|^explore'

# One more at once than there are cores: many wait more than they compute.
test-python: tools $(VENV)/.simgrid ## run the Python tests (ARGS are pytest's)
	OMP_NUM_THREADS=1 python -m pytest --numprocesses $$(($(JOBS) + 1)) --dist worksteal --durations 20 $(ARGS)

lint: tools ## check the format, and for the usual mistakes what has changed since BASE, by default since origin/main
	$(CONFIGURE) > build/configure.log
	clang-format --dry-run -Werror $(CPP)
	python scripts/tidy_sources.py $(BUILD) $(BASE) \
	  | xargs -r -P $(JOBS) -n 1 clang-tidy -p $(BUILD) --quiet 2>&1 \
	  | { grep -v 'warnings generated' || true; }
	ruff check .
	ruff format --check .

types: tools ## check the types
	mypy

format: tools ## rewrite the sources in the project's format
	clang-format -i $(CPP)
	ruff check --fix-only .
	ruff format .

docs: tools ## rewrite the tables of the docs from those of the code
	python scripts/docs_table.py

site: tools ## build the documentation site into build/site, without a warning (a test does so too)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# Those of the decoders, which read what the network brings, and of the quicker loops over vectors;
# and those of what threads share.
SANITIZED_ADDRESS := cached_test wire_test values_test qsgd_test frame_test fuzz_replay_test ring_test sparse_test block_scan_test fused_test \
  ina_client_test ina_host_test message_stream_test aggregator_server_test aggregator_program_test
SANITIZED_THREAD := failure_test cached_test coordinator_test ring_test ucx_test parallel_test ina_client_test aggregator_server_test aggregator_program_test
# Their threads run one at a time, so that there are no races to find.
SIMULATED := FailureTest.AnyMessage|InaFailureTest|SparseFailureTest

sanitize-quick: setup ## run those C++ tests under the sanitizers where they matter most
	cmake -S csrc -B build/asan -G Ninja -DSPARSECOMM_SANITIZE=address,undefined $(STRICT)
	cmake --build build/asan --parallel $(JOBS) --target $(SANITIZED_ADDRESS)
	$(CTEST) --test-dir build/asan --parallel $(TEST_JOBS) --exclude-regex _NOT_BUILT
	cmake -S csrc -B build/tsan -G Ninja -DSPARSECOMM_SANITIZE=thread $(STRICT)
	cmake --build build/tsan --parallel $(JOBS) --target $(SANITIZED_THREAD)
	$(CTEST) --test-dir build/tsan --parallel $(TEST_JOBS) \
	  --exclude-regex '_NOT_BUILT|Parallel.*<(double|sparsecomm)|$(SIMULATED)'

sanitize: sanitize-core sanitize-python sanitize-torch ## run all that runs under the sanitizers

sanitize-core: setup ## run the C++ tests under the address, undefined-behaviour and thread sanitizers
	cmake -S csrc -B build/asan -G Ninja -DSPARSECOMM_SANITIZE=address,undefined $(STRICT)
	cmake --build build/asan --parallel $(JOBS)
	$(CTEST) --test-dir build/asan --parallel $(TEST_JOBS)
	cmake -S csrc -B build/tsan -G Ninja -DSPARSECOMM_SANITIZE=thread $(STRICT)
	cmake --build build/tsan --parallel $(JOBS)
	$(CTEST) --test-dir build/tsan --parallel $(TEST_JOBS) --exclude-regex '$(SIMULATED)'

# torch and Python themselves are not instrumented. Left alone: leaks as the interpreter ends, the signals that tests send,
# symbols that torch defines twice, memory that one library's allocator hands to another's, and UCX's cma, which has the
# kernel write over the list of addresses that it is given.
# With libstdc++, in which the sanitizers look for the function that throws before Python has loaded it.
PRELOAD = LD_PRELOAD="$(foreach library,$(1) stdc++,$$($(or $(CXX),c++) -print-file-name=lib$(library).so))"
SANITIZED_RUN := OMP_NUM_THREADS=1 SPARSECOMM_TEST_PATIENCE=5
PRELOAD_address = $(call PRELOAD,asan) UCX_TLS=^cma \
  ASAN_OPTIONS=detect_leaks=0:handle_segv=0:detect_odr_violation=0:alloc_dealloc_mismatch=0
PRELOAD_thread = $(call PRELOAD,tsan) UCX_MEM_MMAP_HOOK_MODE=none \
  TSAN_OPTIONS=suppressions=$(CURDIR)/scripts/tsan.supp:ignore_noninstrumented_modules=1:halt_on_error=1
PRELOADED := test_ddp.py test_transports.py test_collectives.py
INSTRUMENTED_address := test_ddp.py test_transports.py test_collectives.py test_hooks.py test_state.py
INSTRUMENTED_thread := test_stats.py test_collectives.py

sanitize-python: tools ## run Python tests with the address sanitizer's allocator under the extension as it is
	$(SANITIZED_RUN) $(PRELOAD_address) python -m pytest -k "not compiled" \
	  $(addprefix tests/python/,$(PRELOADED)) $(ARGS)

sanitize-python-quick: tools ## those of them where crashes were seen, and of each way into the extension
	$(SANITIZED_RUN) $(PRELOAD_address) python -m pytest \
	  $(addprefix tests/python/,$(PRELOADED)) -k "sparse_gradients or special_values or each_group"

sanitize-torch: sanitize-torch-address sanitize-torch-thread ## run Python tests of an extension compiled for the sanitizers

# Lets Python find the copy of the package that was compiled for the sanitizer, not this checkout's.
sanitize-torch-%: tools
	SPARSECOMM_SANITIZE=$* python setup.py --quiet build --build-lib build/sanitized-$*
	$(SANITIZED_RUN) $(PRELOAD_$*) PYTHONSAFEPATH=1 PYTHONPATH=build/sanitized-$* \
	  python -c 'from sparsecomm import _C; assert "sanitized-$*" in _C.__file__, _C.__file__'
	$(SANITIZED_RUN) $(PRELOAD_$*) PYTHONSAFEPATH=1 PYTHONPATH=$(CURDIR)/build/sanitized-$* \
	  python -m pytest -k "not compiled" $(addprefix tests/python/,$(INSTRUMENTED_$*)) $(ARGS)

CLANG = $(firstword $(foreach name,clang++ clang++-18 clang++-17 clang++-16 clang++-15 clang++-14,$(shell command -v $(name))))

fuzz: setup ## fuzz each parser for FUZZ_SECONDS; needs clang++
	@[ -n "$(CLANG)" ] || { echo "make fuzz needs clang++ with libFuzzer: apt-get install clang libclang-rt-dev" >&2; exit 1; }
	cmake -S csrc -B build/fuzz -G Ninja -DCMAKE_CXX_COMPILER=$(CLANG) -DSPARSECOMM_FUZZ=ON $(STRICT)
	for name in $(patsubst tests/fuzz/%_fuzz.cc,%,$(wildcard tests/fuzz/*_fuzz.cc)); do \
	  cmake --build build/fuzz --parallel $(JOBS) --target $${name}_fuzz; \
	  mkdir -p build/fuzz/corpus/$$name; \
	  build/fuzz/tests/fuzz/$${name}_fuzz -max_total_time=$(FUZZ_SECONDS) -max_len=9000 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus/$$name tests/fuzz/corpus/$$name; \
	done

clean: ## remove what was built; the virtual environment and runs/ stay
	rm -rf build dist *.egg-info sparsecomm/*.so sparsecomm/sparsecomm-aggregator $(VENV)/.extension
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis

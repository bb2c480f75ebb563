#!/usr/bin/env bash
# Checks the CUDA code on a machine with a GPU, in 8 minutes at most.
#
#   scripts/gpu_check.sh prepare           # with a network: puts what such a machine may lack into .gpu (14 MB)
#   scripts/gpu_check.sh DIR               # with a GPU, nvcc and a torch with CUDA, no network: every step
#   scripts/gpu_check.sh DIR STEP...       # only these steps
#
# The most valuable steps come first, and each has a time limit of its own. A step that fails does not keep the next
# ones from running. DIR gets log.txt (all output), summary.json (step, status, seconds) and the benchmarks' JSON; a line
# for each step goes to standard output. The exit status is 0 if all steps passed. SPARSECOMM_GPU_BUDGET, 480 by default, is
# the time limit of the whole in seconds: steps for which none is left are skipped, and count as failed.
set -uo pipefail
usage=$(sed -n '2,/^set/s/^# \{0,1\}//p' "$0")
[ $# = 0 ] || [ "$1" = prepare ] || { mkdir -p "$1" && out=$(cd "$1" && pwd); }
cd "$(dirname "$0")/.."

prefix=$PWD/.gpu
build=build/python

prepare() {
  set -e
  rm -rf "$prefix"
  mkdir -p "$prefix/packages"
  # Highway as a shared library: Debian has no other. The others are static, or headers alone.
  (cd "$prefix/packages" && apt-get -q download libhwy-dev:amd64 libhwy1:amd64 libgtest-dev:amd64 libgmock-dev:amd64 \
    libmbedtls-dev:amd64 libevent-dev:amd64 nlohmann-json3-dev libtomlplusplus-dev:amd64 libspdlog-dev:amd64 libfmt-dev:amd64)
  for package in "$prefix"/packages/*.deb; do
    dpkg -x "$package" "$prefix"
  done
  rm -rf "$prefix/packages" "$prefix"/usr/share
  du -sh "$prefix"
}

if [ "${1:-}" = prepare ]; then
  prepare
  exit
fi
if [ $# = 0 ]; then
  echo "$usage" >&2
  exit 2
fi

rm -f "$out/summary.json" "$out/log.txt"
shift
chosen=" $* "
budget=${SPARSECOMM_GPU_BUDGET:-480}
begin=$SECONDS
failed=0
rows=()
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 PYTHONPATH=$PWD
export CMAKE_PREFIX_PATH=$prefix/usr${CMAKE_PREFIX_PATH:+:$CMAKE_PREFIX_PATH}
export LD_LIBRARY_PATH=$prefix/usr/lib/x86_64-linux-gnu${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}

# Runs a function as the step NAME, for at most SECONDS, in a shell that ends at its first error: step NAME SECONDS FUNCTION...
step() {
  local name=$1 limit=$2 status=0 start=$SECONDS
  shift 2
  [[ $chosen == "  " || $chosen == *" $name "* ]] || return 0
  local left=$((budget - (SECONDS - begin)))
  [ "$left" -ge "$limit" ] || limit=$left
  echo "==== $name: $*" >> "$out/log.txt"
  if [ "$limit" -gt 0 ]; then
    timeout --kill-after=5 "$limit" bash -c 'set -euo pipefail; "$@"' "$name" "$@" >> "$out/log.txt" 2>&1 < /dev/null || status=$?
  else
    status=skipped
  fi
  local seconds=$((SECONDS - start)) words=ok
  if [ "$status" != 0 ]; then
    failed=1
    words="FAILED ($status) $(grep -v '^$' "$out/log.txt" | tail -1 | cut -c1-160)"
    [[ $status != 124 && $status != 137 ]] || words="TIMED OUT after $limit s"
    [ "$status" != skipped ] || words="SKIPPED: the $budget s of the whole are over"
  fi
  printf '%-16s %4d s  %s\n' "$name" "$seconds" "$words" | tee -a "$out/log.txt"
  rows+=("{\"step\": \"$name\", \"status\": \"$status\", \"seconds\": $seconds}")
  printf '[%s]\n' "$(IFS=,; echo "${rows[*]}")" > "$out/summary.json"
}

environment() {
  date -u
  nvidia-smi
  nvcc --version
  uname -a
  python3 -c 'import torch, sys; print(sys.version, torch.__version__, torch.cuda.get_device_name())'
}

compile_tests() {
  cmake -S csrc -B $build -G Ninja -DSPARSECOMM_BUILD_TESTS=ON -DCMAKE_CUDA_FLAGS=-lineinfo
  cmake --build $build --target sparsecomm_cuda cuda_device_tests
}

compile_module() {
  python3 setup.py build_ext --inplace egg_info  # the latter says for which torch
  python3 -c 'from sparsecomm.build import build_info; print(build_info())'
}

device_test() { $build/tests/cuda_"$1"_device_test --gtest_brief=1 "${@:2}"; }

shuffled() {  # a race moves with the order
  for _ in 1 2 3 4 5; do
    for name in logic packing; do
      device_test $name --gtest_shuffle
    done
  done
}

sanitizer() {
  compute-sanitizer --tool "$1" --error-exitcode 1 $build/tests/cuda_"$2"_device_test --gtest_brief=1
}

bench() { python3 benchmarks/cuda_kernels.py --numel "$1" --rounds "$2" --json "$out/kernels-$1.json"; }

hooks() {
  python3 -m pytest -q -p no:cacheprovider -m cuda tests/python/test_cuda.py -k 'not sanitizer and not kernels_equal'
}

steps() {
  python3 -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/cuda_step.py --json "$out/steps.json"
}

counters() {
  ncu --clock-control none --set basic -k regex:'select_tiles|count_segment|look_for' -c 6 \
    python3 benchmarks/cuda_kernels.py --numel 14728266 --rounds 1
}

export out build
export -f environment compile_tests compile_module device_test shuffled sanitizer bench hooks steps counters

step environment 30 environment
step compile-tests 200 compile_tests
for name in logic packing exchange; do
  step "$name" 60 device_test "$name"
done
step compile-module 200 compile_module
step hooks 150 hooks
step bench-14m 60 bench 14728266 20
step steps 60 steps
step shuffled 60 shuffled
for tool in memcheck racecheck; do
  step "$tool" 60 sanitizer "$tool" logic
done
step bench-134m 60 bench 133547324 10
step counters 60 counters
for tool in memcheck racecheck; do
  step "$tool-packing" 60 sanitizer "$tool" packing
done
if [ ${#rows[@]} = 0 ]; then
  echo "there is no step$chosen" >&2
  exit 2
fi
exit $failed

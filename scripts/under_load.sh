#!/usr/bin/env bash
# Runs a command N times beside busy loops, one more than there are cores, and prints how often it failed and how long it took:
#   scripts/under_load.sh N COMMAND [ARGUMENT ...]
# The output of the runs that fail is shown. Everything runs at the lowest priority, the loops too, which
# compete with the command.
set -euo pipefail
(($# >= 2)) || { sed -n '2,3s/^# *//p' "$0" >&2; exit 2; }
runs=$1
shift

output=$(mktemp)
loops=()
trap 'kill "${loops[@]}" || true; rm -f "$output"' EXIT
for _ in $(seq $(($(nproc) + 1))); do
  nice -n 19 bash -c 'while :; do :; done' &
  loops+=($!)
done

failures=0 longest=0
for ((run = 1; run <= runs; ++run)); do
  SECONDS=0
  status=0
  nice -n 19 "$@" > "$output" 2>&1 || status=$?
  echo "run $run: status $status, $SECONDS s"
  ((SECONDS <= longest)) || longest=$SECONDS
  if ((status != 0)); then
    failures=$((failures + 1))
    cat "$output"
  fi
done
echo "$runs runs, $failures failures, longest $longest s: $*"
((failures == 0))

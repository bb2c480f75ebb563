#!/usr/bin/env bash
# Installs what sparsecomm needs from the system and what is missing here, through apt-get as root or with a sudo that
# asks nothing. Where that cannot be, names the packages. Usage: system_packages.sh [PYTHON [scale|neon]]; with scale, the
# simulator too; with neon, a compiler for aarch64 and an emulator.
set -euo pipefail

python=${1:-python3}
extra=${2:-}
cxx=${CXX:-c++}  # several words, perhaps: ccache g++

has() { command -v "$1" > /dev/null; }
has_header() { echo "#include <$1>" | $cxx -std=c++20 -fsyntax-only -x c++ - 2> /dev/null; }

# Sets `required` and `optional` to the missing packages that sparsecomm cannot, and can, do without.
look() {
  required=()
  optional=()
  has ${cxx##* } || required+=(g++)
  if has "$python"; then
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
      echo "$python is $("$python" --version); sparsecomm needs 3.10 or newer: make PYTHON=python3.12" >&2
      exit 1
    fi
    # Debian's packages are named after the version: python3.11-venv.
    local name header
    name=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
    "$python" -c 'import ensurepip, venv' 2> /dev/null || required+=("$name-venv")
    [ -e "$header" ] || required+=("$name-dev")
  else
    required+=(python3 python3-venv python3-dev)
  fi
  has ccache || optional+=(ccache)                        # builds a second time at once
  has_header hwy/highway.h || optional+=(libhwy-dev)      # otherwise CMake downloads it
  has_header gtest/gtest.h || optional+=(libgtest-dev)    # likewise
  has_header mbedtls/md.h || optional+=(libmbedtls-dev)   # likewise, and for sparsecomm-aggregator as those below
  has_header event2/http.h || optional+=(libevent-dev)
  has_header nlohmann/json.hpp || optional+=(nlohmann-json3-dev)
  has_header toml++/toml.h || optional+=(libtomlplusplus-dev)
  has_header spdlog/version.h || optional+=(libspdlog-dev)
  has_header fmt/core.h || optional+=(libfmt-dev)
  [ "$extra" != scale ] || has smpicxx || optional+=(libsimgrid-dev)  # make scale
  has ip || [ -x /sbin/ip ] || optional+=(iproute2)       # make lab
  if [ "$extra" = neon ]; then                            # make test-neon
    has aarch64-linux-gnu-g++ || required+=(g++-aarch64-linux-gnu)
    has qemu-aarch64 || required+=(qemu-user)
    # Otherwise CMake downloads them.
    [ -e /usr/lib/aarch64-linux-gnu/libhwy.so ] || optional+=(libhwy-dev:arm64)
    [ -e /usr/lib/aarch64-linux-gnu/libgtest.a ] || optional+=(libgtest-dev:arm64)
    [ -e /usr/lib/aarch64-linux-gnu/libmbedcrypto.a ] || optional+=(libmbedtls-dev:arm64)
    # There is room for one libevent-dev, and its headers are those of both.
    [ -e /usr/lib/aarch64-linux-gnu/libevent_extra-2.1.so.7 ] || optional+=(libevent-core-2.1-7:arm64 libevent-extra-2.1-7:arm64)
  fi
}

look
if [ ${#required[@]} = 0 ] && [ ${#optional[@]} = 0 ]; then
  exit 0
fi

root=()
if [ "$(id -u)" != 0 ]; then
  root=(sudo -n)
fi
if has apt-get && "${root[@]}" true 2> /dev/null; then
  apt() { "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends "$@"; }
  [ "$extra" != neon ] || "${root[@]}" dpkg --add-architecture arm64
  apt update || echo "apt-get update failed; going on with the package lists that are here" >&2
  # All at once, and where one of them is unknown, one by one.
  apt install "${required[@]}" "${optional[@]}" || for package in "${required[@]}" "${optional[@]}"; do
    apt install "$package" || true
  done
  look
fi

if [ ${#optional[@]} != 0 ]; then
  echo "Not installed, and done without: ${optional[*]}"
fi
if [ ${#required[@]} != 0 ]; then
  echo "Please install these packages (Debian's names), then run make again: ${required[*]} ${optional[*]}" >&2
  exit 1
fi

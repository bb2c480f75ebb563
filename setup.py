"""Builds sparsecomm._C and its companions by CMake, against the torch that is installed.

Everything compiled stays under build/python between runs, of editable and of ordinary installs
alike, so that a rebuild compiles only what changed. With SPARSECOMM_SANITIZE=address or =thread
everything is compiled for that sanitizer, in a folder of its own; `make sanitize-torch` runs tests
of it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SANITIZE = os.environ.get("SPARSECOMM_SANITIZE", "")
BUILD = ROOT / "build" / "-".join(filter(None, ["python", SANITIZE]))
COMPILER_CACHES = ("ccache", "sccache")
# Commands that handle source files only, and so run on a machine that cannot compile. None stands
# for options without a command, such as --version.
SOURCE_COMMANDS = {None, "sdist", "egg_info", "clean"}

# A `cmake` or `ninja` wheel puts its program beside the interpreter, which is not on PATH unless
# the virtual environment was activated.
os.environ["PATH"] = os.pathsep.join(
    filter(None, [os.environ.get("PATH"), sysconfig.get_path("scripts")])
)


def find_compiler() -> list[str] | None:
    """The words of the compiler's command line, without a compiler cache before it."""
    if "CXX" in os.environ:
        words = shlex.split(os.environ["CXX"])
        if words and Path(words[0]).name in COMPILER_CACHES:
            words = words[1:]
        return words if words and shutil.which(words[0]) else None
    return next(([name] for name in ("c++", "g++", "clang++") if shutil.which(name)), None)


def compiles(compiler: list[str], source: str, *flags: str) -> bool:
    command = [*compiler, "-std=c++20", *flags, "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=source.encode(), capture_output=True).returncode == 0


def missing() -> list[str]:
    """What this machine lacks to build sparsecomm: one line each, with the way to get it."""
    lines = []
    compiler = find_compiler()
    if compiler is None:
        cxx = os.environ.get("CXX")
        reason = "none on PATH" if cxx is None else f"CXX={cxx!r} is not a program"
        lines.append(
            f"a C++20 compiler ({reason}): install GCC 11 or Clang 14, or newer "
            "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; "
            "conda: conda install gxx), or set CXX to yours"
        )
    elif not compiles(compiler, "#include <span>\n#include <bit>\nstd::span<int> s;"):
        lines.append(
            f"a C++20 compiler ({shlex.join(compiler)} does not compile C++20): "
            "install GCC 11 or Clang 14, or newer, or set CXX to one"
        )
    elif not compiles(compiler, "#include <Python.h>", f"-I{sysconfig.get_path('include')}"):
        lines.append(
            f"Python.h of Python {sysconfig.get_python_version()}: install the Python headers "
            "(Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)"
        )
    if shutil.which("cmake") is None:
        lines.append("cmake 3.20 or newer: pip install cmake, or from your system's packages")
    try:
        import torch  # noqa: F401
    except ImportError as error:
        lines.append(
            f"torch ({error}): install the torch you train with, then run "
            "pip install --no-build-isolation (sparsecomm is compiled against that torch, "
            "which pip hides from a build unless that option is given)"
        )
    return lines


def build_modules() -> list[Path]:
    """Compiles the shared objects of the package, and returns where they are."""
    import torch
    from torch.utils.cpp_extension import include_paths, library_paths

    includes = dict.fromkeys(
        [*include_paths(), sysconfig.get_path("include"), sysconfig.get_path("platinclude")]
    )
    variables = {
        "SPARSECOMM_SANITIZE": SANITIZE,
        "SPARSECOMM_TORCH_INCLUDE_DIRS": ";".join(includes),
        "SPARSECOMM_TORCH_LIBRARY_DIRS": ";".join(library_paths()),
        "SPARSECOMM_MODULE_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "SPARSECOMM_CUDA_MODULE": "OFF" if torch.version.cuda is None else "ON",
        "Python3_EXECUTABLE": sys.executable,  # whose packages may hold UCX's headers
    }
    # mpi4py prefers the MPI of the interpreter's environment, and so do we.
    mpicxx = Path(sysconfig.get_path("scripts")) / "mpicxx"
    if mpicxx.exists():
        variables["MPI_CXX_COMPILER"] = str(mpicxx)
    configure = ["cmake", "-S", str(ROOT / "csrc"), "-B", str(BUILD)]
    if not (BUILD / "CMakeCache.txt").exists():
        variables["SPARSECOMM_BUILD_TESTS"] = "OFF"  # `make test-cpp` turns them on, to stay
        if shutil.which("ninja"):
            configure += ["-G", "Ninja"]
    configure += [f"-D{name}={value}" for name, value in variables.items()]
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    build = ["cmake", "--build", str(BUILD), "--parallel", jobs, "--target", "python_modules"]
    compiler = find_compiler()
    assert compiler is not None
    for command in (configure, build):
        subprocess.run(command, check=True, env={**os.environ, "CXX": shlex.join(compiler)})
    return [Path(line) for line in (BUILD / "python_modules.txt").read_text().splitlines()]


class BuildModules(build_ext):
    """Has CMake compile, and copies the results into the package."""

    def run(self) -> None:
        package = Path(self.get_ext_fullpath("sparsecomm._C")).parent
        self.mkpath(str(package))
        for module in build_modules():
            self.copy_file(str(module), str(package / module.name))


def extension_arguments() -> dict[str, Any]:
    """The arguments of setup() that compile sparsecomm._C."""
    import torch

    release = torch.__version__.split("+")[0].split(".")
    return {
        "ext_modules": [Extension("sparsecomm._C", [])],
        "cmdclass": {"build_ext": BuildModules},
        # Torch's C++ interface changes with every minor release: a build fits one.
        "install_requires": ["numpy>=1.26", f"torch=={release[0]}.{release[1]}.*"],
    }


arguments: dict[str, Any] = {"install_requires": ["numpy>=1.26", "torch>=2.11"]}
command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
if command not in SOURCE_COMMANDS:
    if lines := missing():
        sys.exit("\n  - ".join(["\nsparsecomm cannot be built here. Missing:", *lines]))
    arguments = extension_arguments()
setup(**arguments)

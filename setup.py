"""Builds sparsecomm._C: the C++ core by CMake, then csrc/torch against the torch that is installed.

Everything compiled stays under build/ between runs, of editable and of ordinary installs alike, so
that a rebuild compiles only what changed. With SPARSECOMM_SANITIZE=address or =thread everything is
compiled for that sanitizer, in a folder of its own; `make sanitize-torch` runs tests of it.
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

from setuptools import setup

ROOT = Path(__file__).resolve().parent
SANITIZE = os.environ.get("SPARSECOMM_SANITIZE", "")
PARTS = ["python", sysconfig.get_platform(), sys.implementation.cache_tag, SANITIZE]
BUILD = ROOT / "build" / "-".join(filter(None, PARTS))
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


def prepare_compiler() -> None:
    """Settles CXX for CMake and torch, with a compiler cache where there is one."""
    from torch.utils import cpp_extension

    compiler = find_compiler()
    assert compiler is not None
    cache = next((name for name in COMPILER_CACHES if shutil.which(name)), None)
    # Newer torch puts the cache in front by itself, and would take "ccache g++" for one program.
    if cache and not hasattr(cpp_extension, "_wrap_compiler"):
        compiler = [cache, *compiler]
    os.environ["CXX"] = shlex.join(compiler)


def build_core() -> tuple[list[str], list[str]]:
    """Builds the C++ core; returns the files to link with, and the modules to install beside."""
    directory = BUILD / "core"
    compiler = find_compiler()
    assert compiler is not None
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", ROOT / "csrc", "-B", directory]
    if not (directory / "CMakeCache.txt").exists():
        configure += generator
    configure += ["-DCMAKE_BUILD_TYPE=RelWithDebInfo", "-DSPARSECOMM_BUILD_TESTS=OFF"]
    configure += [f"-DPython3_EXECUTABLE={sys.executable}"]  # whose packages may hold UCX's headers
    configure += [f"-DSPARSECOMM_SANITIZE={SANITIZE}"]
    # mpi4py prefers the MPI of the interpreter's environment, and so do we.
    mpicxx = Path(sysconfig.get_path("scripts")) / "mpicxx"
    if mpicxx.exists():
        configure.append(f"-DMPI_CXX_COMPILER={mpicxx}")
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    build = ["cmake", "--build", directory, "--parallel", jobs]
    environment = {**os.environ, "CXX": shlex.join(compiler)}
    for command in (configure, build):
        subprocess.run(list(map(str, command)), check=True, env=environment)
    link_files, modules = (
        (directory / name).read_text().split("\n")[:-1]
        for name in ("link_files.txt", "modules.txt")
    )
    return link_files, modules


def extension_arguments() -> dict[str, Any]:
    """The arguments of setup() that compile sparsecomm._C."""
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths

    class BuildCoreThenExtension(BuildExtension):
        def finalize_options(self) -> None:
            super().finalize_options()
            # An editable install asks for a temporary directory, which would lose the object files.
            self.build_temp = str(BUILD)

        def run(self) -> None:
            link_files, modules = build_core()
            for extension in self.extensions:
                extension.extra_objects = link_files
            super().run()
            package = Path(self.get_ext_fullpath("sparsecomm._C")).parent
            for module in modules:
                self.copy_file(module, str(package / Path(module).name))

    extension = CppExtension(
        "sparsecomm._C",
        [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("csrc/torch/*.cc"))],
        extra_compile_args=[
            *("-std=c++20", "-O2", "-g1", "-fvisibility=hidden", "-ffp-contract=off"),
            *("-Wall", "-Wextra", "-Werror"),
            # Without it at::parallel_for is a plain loop. The runtime is torch's, loaded before.
            "-fopenmp",
            # "base/error.h" is ours; <torch/library.h> never is, whatever csrc/torch holds.
            *("-iquote", str(ROOT / "csrc")),
        ],
    )
    # Warnings are errors in our files, not in torch's.
    extension.include_dirs = [d for d in extension.include_dirs if d not in include_paths()]
    extension.extra_compile_args += [f"-isystem{directory}" for directory in include_paths()]
    if SANITIZE:
        # Optimised less, as in csrc/CMakeLists.txt; GCC sees some of pybind11 as uninitialised.
        flags = ["-O1", f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
        flags.append("-Wno-maybe-uninitialized")
        extension.extra_compile_args += flags
        extension.extra_link_args = [f"-fsanitize={SANITIZE}"]
    release = torch.__version__.split("+")[0].split(".")
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": BuildCoreThenExtension.with_options(use_ninja=True)},
        # Torch's C++ interface changes with every minor release: a build fits one.
        "install_requires": ["numpy>=1.26", f"torch=={release[0]}.{release[1]}.*"],
    }


arguments: dict[str, Any] = {"install_requires": ["numpy>=1.26", "torch>=2.11"]}
command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
if command not in SOURCE_COMMANDS:
    if lines := missing():
        sys.exit("\n  - ".join(["\nsparsecomm cannot be built here. Missing:", *lines]))
    prepare_compiler()
    arguments = extension_arguments()
setup(**arguments)

"""A machine that cannot build sparsecomm is told what to install: all of it, before it compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


@dataclass
class Machine:
    """A Python that finds this one's packages, with only the programs that are put on its PATH."""

    python: Path
    programs: Path
    packages: list[str] = field(default_factory=lambda: [p for p in sys.path if "-packages" in p])

    def add(self, name: str, target: str | None = None) -> None:
        program = self.programs / name
        if target is not None:
            program.symlink_to(target)
        else:
            program.write_text("#!/bin/sh\nexit 0\n")
            program.chmod(0o755)

    def hide_torch(self, where: Path) -> None:
        (where / "torch").mkdir(parents=True)
        (where / "torch" / "__init__.py").write_text("raise ImportError('No module named torch')\n")
        self.packages.insert(0, str(where))

    def setup(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("CXX", "PYTHONPATH")}
        environment |= {"PATH": str(self.programs), "PYTHONPATH": os.pathsep.join(self.packages)}
        return subprocess.run(
            [self.python, ROOT / "setup.py", *arguments],
            cwd=ROOT,
            env=environment | variables,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    venv.create(tmp_path / "venv", with_pip=False)
    programs = tmp_path / "programs"
    programs.mkdir()
    return Machine(tmp_path / "venv" / "bin" / "python", programs)


def complaints(result: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the message; it is all that setup.py prints."""
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    heading, *lines = result.stderr.strip().splitlines()
    assert heading == "sparsecomm cannot be built here. Missing:"
    return lines


def test_no_compiler(machine: Machine) -> None:
    machine.add("cmake")
    (line,) = complaints(machine.setup("build_ext"))
    assert line.startswith("  - a C++20 compiler (none on PATH): install GCC")
    assert "apt-get install g++" in line


@pytest.mark.parametrize("value", ["/nonexistent/g++", "ccache /nonexistent/g++", "ccache", ""])
def test_cxx_names_no_program(machine: Machine, value: str) -> None:
    machine.add("cmake")
    (line,) = complaints(machine.setup("build_ext", CXX=value))
    assert line.startswith(f"  - a C++20 compiler (CXX={value!r} is not a program)")
    assert "apt-get install g++" in line


def test_compiler_that_does_not_compile(machine: Machine, tmp_path: Path) -> None:
    machine.add("cmake")
    (line,) = complaints(machine.setup("build_ext", CXX=shutil.which("false") or "false"))
    assert "does not compile C++20" in line


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_no_cmake(machine: Machine) -> None:
    machine.add("c++", COMPILER)
    (line,) = complaints(machine.setup("build_ext"))
    assert line.startswith("  - cmake 3.20 or newer: pip install cmake")


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_no_torch(machine: Machine, tmp_path: Path) -> None:
    machine.add("c++", COMPILER)
    machine.add("cmake")
    machine.hide_torch(tmp_path / "packages")
    (line,) = complaints(machine.setup("build_ext"))
    assert line.startswith("  - torch (No module named torch): install the torch you train with")
    assert "--no-build-isolation" in line


def test_all_that_is_missing_is_named_at_once(machine: Machine, tmp_path: Path) -> None:
    machine.hide_torch(tmp_path / "packages")
    lines = complaints(machine.setup("bdist_wheel"))
    assert [line.split()[1] for line in lines] == ["a", "cmake", "torch"]


def test_sources_are_packed_without_a_compiler(machine: Machine, tmp_path: Path) -> None:
    machine.hide_torch(tmp_path / "packages")
    egg_info = tmp_path / "egg-info"
    egg_info.mkdir()
    result = machine.setup(
        *("-q", "egg_info", "--egg-base", str(egg_info)),
        *("sdist", "--dist-dir", str(tmp_path / "dist")),
    )
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (tmp_path / "dist").iterdir()] == [
        f"sparsecomm-{version()}.tar.gz"
    ]


def version() -> str:
    result = subprocess.run(
        [sys.executable, ROOT / "setup.py", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout.split()[-1]

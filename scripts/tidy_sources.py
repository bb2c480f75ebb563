"""Lists what clang-tidy is to read: the sources of csrc as they are compiled.

Usage: tidy_sources.py BUILD [BASE], where BUILD was built by Ninja. If a commit BASE is given, only
the sources that have changed since it or include a file that has.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOR_ALL = {".clang-tidy", "pyproject.toml", "CMakeLists.txt"}  # of these every finding depends


def output(*command: str | Path) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def compiled(build: Path) -> set[Path]:
    """The sources in csrc, and the batches of those that are compiled so."""
    commands = json.loads((build / "compile_commands.json").read_text())
    sources = [Path(command["file"]).resolve() for command in commands]
    return {source for source in sources if {"csrc", "Unity"} & set(source.parts[:-1])}


def dependencies(build: Path) -> Iterator[set[Path]]:
    """The files that each object was compiled from."""
    files: set[Path] = set()
    for line in output("ninja", "-C", build, "-t", "deps"):
        if line.startswith(" "):
            files.add((build / line.strip()).resolve())
        else:
            yield files
            files = set()
    yield files


def main() -> None:
    build = Path(sys.argv[1]).resolve()
    sources = {source for source in compiled(build) if source.suffix in (".cc", ".cxx")}
    if len(sys.argv) > 2 and sys.argv[2]:
        root = Path(output("git", "rev-parse", "--show-toplevel")[0])
        names = output("git", "diff", "--name-only", sys.argv[2])
        names += output("git", "ls-files", "--others", "--exclude-standard")
        changed = {root / name for name in names}
        if not any(path.name in FOR_ALL for path in changed):
            units = [files for files in dependencies(build) if files & changed]
            sources &= changed.union(*units)
        print(f"clang-tidy reads {len(sources)} sources", file=sys.stderr)
    print("\n".join(sorted(map(str, sources))))


if __name__ == "__main__":
    main()

"""The commands, outside the package: one says why that does not load, the other needs no torch."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

REPORTS = ("doctor", "info")  # whose output is about what is broken
# The import of the extension, and sparsecomm.torch_release.require(), which has no path.
OWN_ERRORS = (("sparsecomm._C", True), ("sparsecomm", False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``sparsecomm.cli``; returns the exit status, 1 if what was compiled does not load."""
    try:
        from sparsecomm.cli import main as run
    except ImportError as error:
        if (error.name, error.path is not None) not in OWN_ERRORS:
            raise
        given = sys.argv[1:] if arguments is None else arguments
        file = sys.stdout if given and given[0] in REPORTS else sys.stderr
        version_of_python = platform.python_version()
        print(f"sparsecomm {version('sparsecomm')}, Python {version_of_python}", file=file)
        print(f"BROKEN  import: {error}\nBroken: import.", file=file)
        return 1
    return run(arguments)


def aggregator() -> NoReturn:
    """Becomes the program ``sparsecomm-aggregator``, which was compiled beside the package."""
    package = find_spec("sparsecomm")
    assert package is not None
    assert package.origin is not None
    program = Path(package.origin).with_name("sparsecomm-aggregator")
    if not program.exists():
        sys.exit(f"{program} is not there; install sparsecomm again: it is compiled with it")
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())

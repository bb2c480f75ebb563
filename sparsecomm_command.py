"""The command ``sparsecomm``, outside the package so that it can say why that does not load."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version

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


if __name__ == "__main__":
    sys.exit(main())

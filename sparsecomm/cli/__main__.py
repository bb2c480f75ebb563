"""The command ``sparsecomm``, as ``python -m sparsecomm.cli`` or under torchrun."""

import sys

from sparsecomm.cli import main

if __name__ == "__main__":
    sys.exit(main())

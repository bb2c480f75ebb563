"""How patient tests are: SPARSECOMM_TEST_PATIENCE, a factor, multiplies their limits."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

PATIENCE = float(os.environ.get("SPARSECOMM_TEST_PATIENCE", "1"))
# A limit that nothing comes near to, even on a loaded machine. What takes half as long has waited
# for it, and should not have.
LONG = 60 * PATIENCE
LONG_TIME = timedelta(seconds=LONG)


def wait_until(holds: Callable[[], object]) -> None:
    """Returns as soon as ``holds()``, which must be before LONG has passed."""
    deadline = time.monotonic() + LONG
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)

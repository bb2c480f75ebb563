"""What holds for every test."""

from __future__ import annotations

import os

import pytest
from patience import PATIENCE

# torch's TCPStore asks the name server who each peer is, even 127.0.0.1, at both ends of every
# connection. Tests talk to this machine alone, and a name server that is slow or counts queries
# would stall each connection for seconds: the C library is told to give up before it asks.
os.environ["RES_OPTIONS"] = "attempts:0"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiplies each test's limit by SPARSECOMM_TEST_PATIENCE, but not one of the command line."""
    for item in items:
        mark = item.get_closest_marker("timeout")
        if mark is None and config.getoption("timeout") is not None:
            continue
        limit = float(mark.args[0] if mark else config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(PATIENCE * limit), append=False)

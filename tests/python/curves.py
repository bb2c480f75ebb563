"""What two runs of an example that are the same have recorded."""

from __future__ import annotations

from typing import Any

import pytest


def assert_same_curves(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same numbers, but for bytes: a new process agrees on what it exchanges first.

    How often it does so later depends on what is pending together.
    """
    assert one.keys() == other.keys()
    for name, values in one.items():
        counted = name.endswith("sent_bytes")
        assert values == (pytest.approx(other[name], rel=1e-3) if counted else other[name]), name

"""The C++ runtime: torch's, and one that a compiler may link into our modules."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch  # noqa: F401  # loads its runtime

MODULE = Path(__file__).resolve().parents[2] / "build/python/tests/libruntime_module.so"


@pytest.mark.skipif(not MODULE.exists(), reason="not built; make test-cpp builds it")
def test_a_module_with_a_runtime_of_its_own_prints() -> None:
    module = ctypes.CDLL(str(MODULE))
    assert module.sparsecomm_text_size() == len("vector 12345 1.5")

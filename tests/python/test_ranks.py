"""What is left of a rank that crashes or hangs: enough to find the cause without a second time."""

from __future__ import annotations

import ctypes
import resource
import time

import pytest
import torch.distributed as dist
from patience import LONG
from ranks import RankError, run_ranks


def crash(function: str) -> None:
    if dist.get_rank() == 1:
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        assert resource.getrlimit(resource.RLIMIT_CORE)[0] == hard
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # of this crash no core file is needed
        if function == "abort":
            ctypes.CDLL(None).abort()
        ctypes.CDLL(None).strlen(ctypes.c_void_p(8))


@pytest.mark.parametrize(("function", "signal"), [("abort", "SIGABRT"), ("strlen", "SIGSEGV")])
def test_a_crashed_rank_leaves_the_frames_of_python_and_of_c(function: str, signal: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, crash, function)
    text = str(caught.value)
    assert f"rank 1: ended without a result, by {signal}" in text
    c_frames, python_frames = text.split("Fatal Python error")
    assert "C frames:" in c_frames
    assert "libc.so" in c_frames
    assert f"{function}+0x" in c_frames or function != "abort"  # strlen has a name per processor
    assert "in crash" in python_frames
    assert "rank 0" not in text


def hang() -> None:
    if dist.get_rank() == 0:
        time.sleep(10 * LONG)


def test_a_rank_that_hangs_says_where() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, hang, timeout=20)
    text = str(caught.value)
    assert "rank 0: still running after" in text
    assert "in hang" in text

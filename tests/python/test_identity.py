"""The identity of a communicator: who may join it, and what it leaves in the store."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from patience import LONG_TIME
from ranks import run_ranks
from test_exchange import TRANSPORTS
from torch.distributed import distributed_c10d

import sparsecomm
from sparsecomm import _C, Communicator
from sparsecomm.transports import checked_connect_timeout, connect_options, warn

CLAIM = "sparsecomm/join/0"  # the key of the place of rank 0


def connect_alone(store: dist.Store) -> _C.Transport:
    def make_gloo(store: dist.Store) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, 0, 1, LONG_TIME)

    return _C.connect(0, 1, store, make_gloo, warn, connect_options("c10d", LONG_TIME))


def claim_of(host: str, pid: int) -> str:
    """As a process of an earlier job has left it; this kernel has not started it at that time."""
    return f"{'f' * 32} {host} {pid} 1\nc10d"


def this_host() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/pid').st_ino}"


def test_a_rank_that_another_process_is_already_is_refused() -> None:
    store = dist.HashStore()
    store.set(CLAIM, claim_of("elsewhere", 4321))
    with pytest.raises(_C.TransportError, match=r"rank 0\b.*\b4321\b"):
        connect_alone(store)


def test_what_an_ended_process_has_left_is_taken_away() -> None:
    store = dist.HashStore()
    store.set(CLAIM, claim_of(this_host(), os.getppid()))
    connect_alone(store)
    assert not store.check([CLAIM])


def _count_keys(transport: str) -> list[int]:
    store = distributed_c10d._world.pg_map[distributed_c10d._get_default_group()][1]
    counts = []
    for _ in range(3):
        dist.barrier()
        before = store.num_keys()
        dist.barrier()
        with Communicator.from_process_group(transport=transport, timeout=LONG_TIME) as made:
            sparsecomm.allreduce(torch.ones(10), communicator=made)
            dist.barrier()
            counts.append(store.num_keys() - before)
    return counts


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_communicator_leaves_no_more_than_a_few_keys(transport: str) -> None:
    for counts in run_ranks(5, _count_keys, transport):
        assert max(counts) <= 2, counts


def test_the_time_for_connecting_is_checked() -> None:
    assert checked_connect_timeout("") is None
    assert checked_connect_timeout("2.5") == timedelta(seconds=2.5)
    for text in ("0", "-1", "soon", "nan", "1e30"):
        with pytest.raises(ValueError, match="SPARSECOMM_CONNECT_TIMEOUT"):
            checked_connect_timeout(text)

"""How a sparse vector is summed over all ranks: as it is, or as the dense one it stands for."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

EXCHANGES = ("sparse", "dense")


class Exchange(Protocol):
    """What was sent, in bytes, and how long it took, in seconds, adds up."""

    sent_bytes: float
    seconds: float

    def sum(self, columns: Tensor, values: Tensor) -> Tensor:
        """The sum over all ranks of vectors with float32 values at ascending columns."""
        ...


class SparseExchange:
    """sparsecomm's lossless sparse allreduce; its counters say what was sent."""

    def __init__(self, features: int, algorithm: str, timeout: timedelta) -> None:
        import sparsecomm

        self._allreduce = sparsecomm.allreduce
        self._communicator = sparsecomm.Communicator.from_process_group(timeout=timeout)
        self._features, self._algorithm = features, algorithm
        self.sent_bytes, self.seconds = 0.0, 0.0

    def sum(self, columns: Tensor, values: Tensor) -> Tensor:
        own = torch.sparse_coo_tensor(
            columns[None], values, (self._features,), is_coalesced=True, check_invariants=False
        )
        before = self._communicator.counters()["sent_bytes"]
        start = time.perf_counter()
        total = self._allreduce(own, self._algorithm, communicator=self._communicator)
        self.seconds += time.perf_counter() - start
        self.sent_bytes += self._communicator.counters()["sent_bytes"] - before
        return total


class DenseExchange:
    """torch.distributed's allreduce; the bytes are those that any dense one sends at least."""

    def __init__(self, features: int) -> None:
        self._buffer = torch.empty(features)
        ranks = dist.get_world_size()
        self._bytes = 2 * (ranks - 1) / ranks * features * self._buffer.itemsize
        self.sent_bytes, self.seconds = 0.0, 0.0

    def sum(self, columns: Tensor, values: Tensor) -> Tensor:
        self._buffer.zero_()
        self._buffer[columns] = values
        start = time.perf_counter()
        dist.all_reduce(self._buffer)
        self.seconds += time.perf_counter() - start
        self.sent_bytes += self._bytes
        return self._buffer


def make_exchange(name: str, features: int, algorithm: str, timeout: timedelta) -> Exchange:
    """One of EXCHANGES. Collective.

    Raises:
        ValueError: there is no such lossless algorithm.
    """
    if name == "dense":
        return DenseExchange(features)
    exchange = SparseExchange(features, algorithm, timeout)
    exchange.sum(torch.empty(0, dtype=torch.int64), torch.empty(0))  # refuses a wrong algorithm
    exchange.sent_bytes = exchange.seconds = 0.0
    return exchange

"""Contracts 1 to 4, 6 and 9 for every algorithm in the table, over real processes and gloo."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from aggregators import aggregators
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from sparsecomm import _C
from sparsecomm.schedule import SOURCES
from sparsecomm.transports import AUTO, aggregator_addresses, connect, connect_options, table, warn

ALGORITHMS = [row["name"] for row in _C.algorithms()]
EVERYWHERE = [row["name"] for row in _C.algorithms() if row["needs"] == "nothing"]
OVER_C10D = [row["name"] for row in _C.algorithms() if row["needs"] != "aggregators"]
TRANSPORTS = [row["name"] for row in table() if row["connects_processes"] and not row["problem"]]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
PATTERNS = ["uniform", "clustered", "shared", "zero", "zero on odd ranks", "equal"]


def make_gradient(
    pattern: str, rank: int, numel: int, step: int, dtype: torch.dtype
) -> torch.Tensor:
    """Small integers, so that all sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    gradient = torch.randint(-8, 9, (numel,), generator=generator)
    if pattern == "clustered":
        gradient[numel // 8 :] = 0
    elif pattern == "shared":
        gradient = torch.where(torch.arange(numel) % 11 == 3, 10 + gradient % 3, gradient % 2)
    elif pattern == "zero" or (pattern == "zero on odd ranks" and rank % 2):
        gradient.zero_()
    elif pattern == "equal":
        gradient.fill_(3)
    return gradient.to(dtype)


def make_options(algorithm: str, density: float, between: str = "sampled") -> _C.ExchangeOptions:
    return _C.ExchangeOptions(
        algorithm=algorithm,
        density=density,
        between=between,
        threshold_period=3,
        partition_period=2,
        balance_factor=1.2,
        index_codec="smallest",
        average=False,
    )


def exchange_ones(communicator: _C.Communicator, algorithm: str, numel: int) -> None:
    exchange = _C.Exchange(communicator, numel, torch.float32, make_options(algorithm, 0.1))
    exchange.run(torch.ones(numel))


def check_matrix(
    communicator: _C.Communicator,
    sum_over_ranks: Callable[[torch.Tensor], torch.Tensor],
    of_first_rank: Callable[[torch.Tensor], torch.Tensor],
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> tuple[int, int]:
    """Contracts 1 to 4 and 6 on ``communicator``; the other two are its ranks' collectives.

    Returns:
        The bytes that this rank sent to and received from other ranks.
    """
    rank, size = communicator.rank, communicator.size
    sent = received = 0
    for algorithm in ALGORITHMS:
        if missing := communicator.missing(algorithm):
            with pytest.raises(ValueError, match=re.escape(missing)):
                _C.Exchange(communicator, 10, torch.float32, make_options(algorithm, 1.0))
            continue
        before = communicator.counters()
        for dtype in dtypes:
            # Compared together: what takes long is a collective of small tensors.
            where: list[tuple[object, ...]] = []
            kept: list[torch.Tensor] = []
            expected: list[torch.Tensor] = []
            bits: list[torch.Tensor] = []
            for pattern in PATTERNS if dtype == torch.float32 else PATTERNS[:2]:
                for numel in (0, 1, 2049):
                    options = make_options(algorithm, 0.03)
                    exchange = _C.Exchange(communicator, numel, dtype, options)
                    carried = torch.zeros(numel, dtype=torch.float64)
                    for step in range(3):
                        gradient = make_gradient(pattern, rank, numel, step, dtype)
                        for other in range(size):
                            carried += make_gradient(pattern, other, numel, step, dtype)
                        exchange.run(gradient)
                        carried -= gradient.double()
                        where.append((algorithm, dtype, pattern, numel, step))
                        kept.append(exchange.residual.to(torch.float64, copy=True))
                        expected.append(carried.clone())
                        bits.append(gradient.to(torch.float64))
            of_all = sum_over_ranks(torch.cat(kept)).split([len(part) for part in kept])
            of_first = of_first_rank(torch.cat(bits)).split([len(part) for part in bits])
            for case, total, carried, first, own in zip(
                where, of_all, expected, of_first, bits, strict=True
            ):
                assert torch.equal(total, carried), case
                assert torch.equal(first.view(torch.int64), own.view(torch.int64)), case
        # An aggregator sends to all what it has received from some.
        if algorithm in OVER_C10D:
            after = communicator.counters()
            sent += after["sent_bytes"] - before["sent_bytes"]
            received += after["received_bytes"] - before["received_bytes"]
    return sent, received


def _check_matrix(transport: str, addresses: tuple[str, ...]) -> tuple[int, int]:
    def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor)
        return tensor

    def of_first_rank(tensor: torch.Tensor) -> torch.Tensor:
        dist.broadcast(tensor, 0)
        return tensor

    patience = timedelta(seconds=30)
    communicator = _C.Communicator(
        connect(None, patience, transport),
        patience,
        aggregators=aggregator_addresses(addresses, AUTO),
    )
    assert communicator.transport.startswith(transport)
    assert not communicator.missing("ina")
    return check_matrix(communicator, sum_over_ranks, of_first_rank)


@pytest.mark.parametrize(
    ("size", "transport"),
    [
        # Numbers of ranks beside 3 show what algorithms do, which is alike over all transports.
        pytest.param(size, name, marks=() if size == 3 or number == 0 else pytest.mark.slow)
        for size in (1, 2, 3, 4)
        for number, name in enumerate(TRANSPORTS)
    ],
)
def test_conservation_and_identical_replicas(size: int, transport: str) -> None:
    with aggregators(2) as addresses:
        counted = run_ranks(size, _check_matrix, transport, addresses, timeout=200)
    sent, received = (sum(column) for column in zip(*counted, strict=True))
    assert sent == received


def _check_against_torch() -> None:
    """Against torch.topk and torch's own sparse sum: u = TopK(sum of TopK(G))."""
    rank, size, numel, k = dist.get_rank(), dist.get_world_size(), 20_000, 200
    patience = timedelta(seconds=30)
    communicator = _C.Communicator(connect(None, patience), patience)
    selections = []
    for other in range(size):
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(other))
        places = gradient.abs().topk(k).indices
        selections.append(torch.sparse_coo_tensor(places[None], gradient[places], (numel,)))
    total = torch.stack(selections).sum(0).to_dense()
    largest = torch.zeros_like(total)
    places = total.abs().topk(k).indices
    largest[places] = total[places]
    for algorithm, expected in [("topk_a", total), ("oktopk", largest)]:
        exchange = _C.Exchange(
            communicator, numel, torch.float32, make_options(algorithm, k / numel, "exact")
        )
        gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
        exchange.run(gradient)
        assert torch.equal(gradient != 0, expected != 0), algorithm
        torch.testing.assert_close(gradient, expected)
    gradient = torch.randn(numel, generator=torch.Generator().manual_seed(rank))
    expected = gradient.clone()
    dist.all_reduce(expected)
    _C.Exchange(communicator, numel, torch.float32, make_options("dense", 1.0)).run(gradient)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("size", [2, 3])
def test_against_torch(size: int) -> None:
    run_ranks(size, _check_against_torch)


def _check_threads() -> None:
    """The same bits whatever the number of torch's threads that select."""
    rank, numel = dist.get_rank(), 300_000
    patience = timedelta(seconds=30)
    torch.set_num_threads(3)
    outcomes = []
    for threads in (1, 2, 3):
        communicator = _C.Communicator(connect(None, patience), patience, threads)
        tensors = []
        for dtype in (torch.float32, torch.bfloat16):
            random = torch.Generator().manual_seed(rank)
            exchange = _C.Exchange(communicator, numel, dtype, make_options("oktopk", 0.01))
            for _ in range(4):
                # Few different values, so that ties are cut off somewhere.
                gradient = torch.randint(-40, 40, (numel,), generator=random).to(dtype)
                exchange.run(gradient)
                tensors += [gradient, exchange.residual.clone()]
        outcomes.append(tensors)
    for other in outcomes[1:]:
        for expected, actual in zip(outcomes[0], other, strict=True):
            assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="threads = 0 is below 1"):
        _C.Communicator(connect(None, patience), patience, 0)


def test_threads_do_not_change_a_bit() -> None:
    run_ranks(2, _check_threads)


@pytest.fixture(scope="module")
def lone_communicator() -> _C.Communicator:
    patience = timedelta(seconds=10)

    def make_gloo(store: dist.Store) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(store, 0, 1, patience)

    options = connect_options("c10d", patience)
    transport = _C.connect(0, 1, dist.HashStore(), make_gloo, warn, options)
    return _C.Communicator(transport, patience)


@settings(deadline=None, max_examples=60)
@given(
    gradients=st.lists(
        st.lists(st.integers(-4, 4), min_size=23, max_size=23), min_size=1, max_size=5
    ),
    density=st.floats(0.01, 1.0),
    algorithm=st.sampled_from([row["name"] for row in _C.algorithms() if row["sparse"]]),
    between=st.sampled_from(SOURCES),
)
def test_error_feedback_of_one_rank(
    lone_communicator: _C.Communicator,
    gradients: list[list[int]],
    density: float,
    algorithm: str,
    between: str,
) -> None:
    exchange = _C.Exchange(
        lone_communicator, 23, torch.float32, make_options(algorithm, density, between)
    )
    residual = np.zeros(23)
    for values in gradients:
        gradient = torch.tensor(values, dtype=torch.float32)
        exchange.run(gradient)
        total = residual + np.array(values)
        residual = exchange.residual.numpy().astype(np.float64)
        assert (gradient.numpy() + residual == total).all()
        # An entry is sent whole or not at all.
        assert ((gradient.numpy() == 0) | (residual == 0)).all()


def test_wrong_gradients_are_refused(lone_communicator: _C.Communicator) -> None:
    exchange = _C.Exchange(lone_communicator, 10, torch.float32, make_options("oktopk", 0.1))
    for gradient in (torch.zeros(11), torch.zeros(10, dtype=torch.float64), torch.zeros(20)[::2]):
        with pytest.raises(ValueError, match="contiguous CPU tensor of 10 elements of Float"):
            exchange.run(gradient)
    with pytest.raises(ValueError, match="Int cannot be exchanged sparsely"):
        _C.Exchange(lone_communicator, 10, torch.int32, make_options("oktopk", 0.1))
    with pytest.raises(ValueError, match=f"choose one of {', '.join(ALGORITHMS)}"):
        make_options("allreduce", 0.1)

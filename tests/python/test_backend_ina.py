"""Dense all_reduce of the backend "sparsecomm" through aggregators."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from aggregators import aggregator, aggregators
from models import flat, make_ddp, make_model, train
from patience import LONG_TIME
from ranks import run_ranks

import sparsecomm
from sparsecomm import _C

BLOCK = 256  # entries of float32
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64)


@contextmanager
def serving(count: int) -> Iterator[list[Any]]:
    """Yields aggregators in this process, which tell what they have received."""
    made = [
        _C.ServingAggregator(
            listen="127.0.0.1:0", memory=1 << 28, policy="ina", log=lambda text: None
        )
        for _ in range(count)
    ]
    try:
        yield made
    finally:
        for each in made:
            each.stop()


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def remake_group(**options: Any) -> None:
    """Makes the default group one of our backend, with these options."""
    base = dist.PrefixStore("again", store())
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(
        "sparsecomm",
        store=base,
        rank=rank,
        world_size=size,
        timeout=LONG_TIME,
        pg_options=sparsecomm.Options(**options) if options else None,
    )


def in_blocks(size: int, share: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers in every ``share``-th block, in other ones on each rank; zeros elsewhere."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    drawn = torch.randint(-60, 60, (size,), generator=generator)
    blocks = torch.arange(size) // BLOCK % share
    return torch.where(blocks == dist.get_rank() % share, drawn, 0).to(dtype)


def _every_dtype(addresses: tuple[str, ...], deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    gloo = dist.new_group(backend="gloo")
    expected = []
    cases = [
        (dtype, share, size)
        for dtype in DTYPES
        for share in (1, 8)
        for size in (0, 1, 1_000, 200_000)
    ]
    for dtype, share, size in cases:
        wanted = in_blocks(size, share, dtype)
        dist.all_reduce(wanted, group=gloo)
        expected.append(wanted)
    remake_group(aggregators=addresses)
    for (dtype, share, size), wanted in zip(cases, expected, strict=True):
        tensor = in_blocks(size, share, dtype)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        assert torch.equal(tensor, wanted), (dtype, share, size)
        if dtype.is_floating_point and size > 0:
            tensor = in_blocks(size, share, dtype)
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            torch.testing.assert_close(tensor, wanted / dist.get_world_size())
    rows = in_blocks(200_000, 4).view(400, 500)
    expected_rows = rows.clone()
    dist.all_reduce(expected_rows)
    strided = rows.t()
    dist.all_reduce(strided)
    assert torch.equal(strided, expected_rows.t())


@pytest.mark.parametrize(("size", "deterministic"), [(2, False), (3, False), (3, True)])
def test_sums_and_averages_are_those_of_gloo(size: int, deterministic: bool) -> None:
    """In deterministic mode all go through the aggregators."""
    with serving(2) as made:
        addresses = tuple(each.address for each in made)
        run_ranks(size, _every_dtype, addresses, deterministic, timeout=120)
        received = sum(each.received_bytes for each in made)
    if deterministic:  # of each rank's 200,000 entries all, and an eighth; and averages of four
        bytes_of_all = 200_000 * sum(dtype.itemsize for dtype in DTYPES)
        assert received > size * bytes_of_all


def _others(addresses: tuple[str, ...]) -> None:
    remake_group(aggregators=addresses)
    rank, size = dist.get_rank(), dist.get_world_size()
    largest = torch.full((1000,), rank)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    assert (largest == size - 1).all()
    product = torch.full((1000,), 2.0)
    dist.all_reduce(product, op=dist.ReduceOp.PRODUCT)
    assert (product == 2.0**size).all()
    flags = torch.ones(1000, dtype=torch.uint8)
    dist.all_reduce(flags)
    assert (flags == size).all()
    with pytest.raises(RuntimeError):
        dist.all_reduce(torch.ones(10, dtype=torch.int64), op=dist.ReduceOp.AVG)


def test_what_aggregators_do_not_add_goes_through_gloo() -> None:
    with serving(1) as made:
        run_ranks(2, _others, (made[0].address,))
        assert made[0].received_bytes == 0


def _in_order(addresses: tuple[str, ...]) -> None:
    torch.use_deterministic_algorithms(True)
    remake_group(aggregators=addresses)
    generator = torch.Generator().manual_seed(dist.get_rank())
    own = torch.randn(100_000, generator=generator)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    expected = gathered[0]
    for other in gathered[1:]:
        expected = expected + other
    for _ in range(3):
        total = own.clone()
        dist.all_reduce(total)
        assert torch.equal(total, expected)


def test_in_deterministic_mode_aggregators_add_in_the_order_of_ranks() -> None:
    with serving(2) as made:
        run_ranks(3, _in_order, tuple(each.address for each in made))
        received = sum(each.received_bytes for each in made)
    assert received > 3 * 3 * 400_000  # three ranks, three times


def _modes_differ(addresses: tuple[str, ...]) -> str:
    torch.use_deterministic_algorithms(dist.get_rank() == 0)
    remake_group(aggregators=addresses)
    with pytest.raises(RuntimeError, match="ranks disagree") as raised:
        dist.all_reduce(torch.ones(1000))
    return str(raised.value)


def test_ranks_in_different_modes_are_named() -> None:
    with aggregators(1) as addresses:
        said = run_ranks(2, _modes_differ, addresses)
    assert said[0] == said[1]


def _differ(options: list[dict[str, Any]]) -> str:
    with pytest.raises(RuntimeError, match="ranks disagree") as raised:
        remake_group(**options[dist.get_rank()])
    return str(raised.value)


@pytest.mark.parametrize("how", ["some have none", "blocks"])
def test_ranks_whose_sums_would_go_other_ways_are_named(how: str) -> None:
    some: dict[str, Any] = {"aggregators": ("10.0.0.7:7000",)}
    other = {} if how == "some have none" else {**some, "block_bytes": 64}
    said = run_ranks(3, _differ, [some, some, other])
    assert said == [said[0]] * 3
    assert "aggregators 10.0.0.7:7000, block_bytes 1024 on rank 0" in said[0]
    assert "on rank 2" in said[0]


def _odd(addresses: tuple[str, ...]) -> None:
    """What gloo takes is taken, by it or by the engine."""
    remake_group(aggregators=addresses)
    rank, size = dist.get_rank(), dist.get_world_size()
    other_shape = torch.ones(6) if rank == 0 else torch.ones(2, 3)
    dist.all_reduce(other_shape)
    assert (other_shape == size).all()
    with torch.inference_mode():
        inferred = torch.ones(1000)
    dist.all_reduce(inferred)
    assert (inferred == size).all()
    with torch.inference_mode():
        dist.all_reduce(inferred)
    assert (inferred == size * size).all()
    leaf = torch.ones(1000, requires_grad=True)
    dist.all_reduce(leaf.detach())
    assert (leaf == size).all()


def _odd_with_details(addresses: tuple[str, ...]) -> None:
    _odd(addresses)
    assert sparsecomm.backend_stats()["messages"] > 0


def test_odd_tensors_are_reduced() -> None:
    with aggregators(1) as addresses:
        run_ranks(2, _odd, addresses)


def test_the_backend_is_found_behind_the_wrapper_of_debugging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with aggregators(1) as addresses:
        run_ranks(2, _odd_with_details, addresses)


def _ask_meanwhile(addresses: tuple[str, ...]) -> None:
    """Another thread asks for statistics while engines are made."""
    remake_group(aggregators=addresses)
    for _ in range(15):
        group = dist.new_group(
            backend="sparsecomm", pg_options=sparsecomm.Options(aggregators=addresses)
        )
        done = threading.Event()

        def ask(group: Any = group, done: threading.Event = done) -> None:
            while not done.is_set():
                sparsecomm.backend_stats(group)

        thread = threading.Thread(target=ask)
        thread.start()
        dist.all_reduce(torch.ones(1000), group=group)
        done.set()
        thread.join()
        dist.destroy_process_group(group)


def test_statistics_may_be_asked_for_at_any_time() -> None:
    with aggregators(1) as addresses:
        run_ranks(2, _ask_meanwhile, addresses)


def _through_store(addresses: tuple[str, ...]) -> None:
    if dist.get_rank() == 1:
        time.sleep(0.5)  # the others wait
        sparsecomm.announce_aggregators(store(), addresses)
    torch.use_deterministic_algorithms(True)
    remake_group(aggregators="store")
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()


def _through_environment(addresses: tuple[str, ...]) -> None:
    os.environ["SPARSECOMM_AGGREGATORS"] = ", ".join(addresses)
    torch.use_deterministic_algorithms(True)
    remake_group()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert (tensor == dist.get_world_size()).all()
    state = sparsecomm.BlockTopkState(timeout=LONG_TIME)
    assert state.algorithm == "ina_sparse"
    # One that uses none takes no notice.
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, sparsecomm.OkTopkState(timeout=LONG_TIME))
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(2))


def _by_name(addresses: tuple[str, ...]) -> None:
    remake_group(aggregators=addresses, block_bytes=64)
    tensor = torch.full((1000,), float(dist.get_rank()))
    sparsecomm.allreduce(tensor, "ina")
    assert (tensor == 1).all()


@pytest.mark.parametrize("found", [_through_store, _through_environment, _by_name])
def test_they_are_found(found: Callable[..., None]) -> None:
    with serving(2) as made:
        run_ranks(2, found, tuple(each.address for each in made))
        assert all(each.received_bytes > 2000 for each in made)


def _train() -> torch.Tensor:
    ddp = make_ddp(make_model())
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(4))
    return flat(ddp.parameters())


def _train_both(addresses: tuple[str, ...]) -> None:
    expected = _train()
    with pytest.raises(ValueError, match="has not the backend"):
        sparsecomm.backend_stats()
    remake_group(aggregators=addresses)
    assert sparsecomm.backend_stats()["sent_bytes"] == 0
    torch.testing.assert_close(_train(), expected)
    stats = sparsecomm.backend_stats()
    assert stats["sent_bytes"] > 0
    assert stats["lost_aggregators"] == {}


def test_plain_ddp_trains_as_over_gloo() -> None:
    with aggregators(2) as addresses:
        run_ranks(2, _train_both, addresses)


def _lose(address: str, process: int) -> None:
    torch.use_deterministic_algorithms(True)
    remake_group(aggregators=(address,))
    for step in range(3):
        if step == 1:
            dist.barrier()
            if dist.get_rank() == 0:
                os.kill(process, signal.SIGKILL)
            dist.barrier()
        tensor = in_blocks(100_000, 1)
        expected = tensor.clone()
        dist.all_reduce(expected, op=dist.ReduceOp.SUM)
        gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, tensor)
        assert torch.equal(expected, torch.stack(gathered).sum(0))
    assert [*sparsecomm.backend_stats()["lost_aggregators"]] == [address]


def test_without_aggregators_that_were_lost_the_ranks_go_on() -> None:
    with aggregator() as (process, address):
        run_ranks(2, _lose, address, process.pid)


def test_options_are_checked_at_once() -> None:
    for size in (0, 32, 1000, 1 << 17):
        with pytest.raises(ValueError, match=f"block_bytes = {size} is not a power of two"):
            sparsecomm.Options(block_bytes=size)
    with pytest.raises(TypeError, match="give a sequence"):
        sparsecomm.CommunicatorOptions(aggregators="store")
    given = sparsecomm.CommunicatorOptions(aggregators=("one:7000",))
    with pytest.raises(ValueError, match="exclude each other"):
        sparsecomm.Options(aggregators="store", communicator_options=given)
    assert 'aggregators="store"' in repr(sparsecomm.Options(aggregators="store"))
    with pytest.raises(ValueError, match="no addresses were given"):
        sparsecomm.announce_aggregators(dist.HashStore(), [])
    with pytest.raises(ValueError, match="must be HOST:PORT"):
        sparsecomm.announce_aggregators(dist.HashStore(), ["host"])

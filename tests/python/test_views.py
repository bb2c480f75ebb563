"""Views of every kind through every function of the backend.

What gloo gives for row-major tensors is what ours gives for views with the same entries, whatever
the strides of the other ranks, and nothing beside the entries is written.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import PATIENCE
from ranks import RankError, run_ranks
from torch import Tensor
from torch.distributed import distributed_c10d

import sparsecomm  # noqa: F401  (registers the backend)

LIMIT = 200.0  # seconds for all cases
BESIDE = 99.0  # what lies beside the entries of a view
SHAPE = (2, 3, 2, 2)
Shape = tuple[int, ...]
View = Callable[[Tensor], Tensor]

# For a shape, that of the memory and what takes the view of it.
KINDS: dict[str, Callable[[Shape], tuple[Shape, View]]] = {
    "whole": lambda s: (s, lambda b: b),
    "offset": lambda s: ((s[0] + 1, *s[1:]), lambda b: b[1:]),
    "column": lambda s: ((*s, 5), lambda b: b[..., 2]),
    "steps": lambda s: (
        tuple(2 * n for n in s),
        lambda b: b[tuple(slice(None, None, 2) for _ in s)],
    ),
    "block": lambda s: (tuple(n + 2 for n in s), lambda b: b[tuple(slice(1, -1) for _ in s)]),
    "transposed": lambda s: (s[::-1], lambda b: b.permute(*range(b.dim() - 1, -1, -1))),
    "channels last": lambda s: ((s[0], *s[2:], s[1]), lambda b: b.movedim(-1, 1)),
    "diagonal": lambda s: ((*s, s[-1]), lambda b: b.diagonal(dim1=-2, dim2=-1)),
    "real part": lambda s: (
        (*s, 2),
        lambda b: torch.view_as_complex(b).real if b.is_floating_point() else b[..., 0],
    ),
}


class Places:
    """Puts tensors into views of the kinds, one after the other."""

    def __init__(self, kinds: list[str]) -> None:
        self._kinds = kinds
        self._taken: list[tuple[Tensor, Tensor]] = []

    def __call__(self, values: Tensor) -> Tensor:
        shape, view = KINDS[self._kinds[len(self._taken) % len(self._kinds)]](tuple(values.shape))
        memory, beside = torch.full(shape, BESIDE), torch.ones(shape, dtype=torch.bool)
        view(beside).fill_(False)
        self._taken.append((memory, beside))
        placed = view(memory)
        placed.copy_(values)
        return placed

    def assert_nothing_else_written(self) -> None:
        for memory, beside in self._taken:
            assert (memory[beside] == BESIDE).all(), memory


def numbers(seed: int, first: int = SHAPE[0]) -> Tensor:
    random = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randint(1, 9, (first, *SHAPE[1:]), generator=random).float()


def empty(first: int = SHAPE[0]) -> Tensor:
    return torch.zeros(first, *SHAPE[1:])


# ---- every function: what it has written, in the places where that shall be


def all_reduce(group: Any, place: Places, op: Any = dist.ReduceOp.SUM) -> list[Tensor]:
    tensor = place(numbers(0))
    dist.all_reduce(tensor, op, group=group)
    return [tensor]


def all_reduce_coalesced(group: Any, place: Places) -> list[Tensor]:
    tensors = [place(numbers(0)), place(numbers(1, 4))]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def reduce(group: Any, place: Places) -> list[Tensor]:
    last = dist.get_world_size() - 1
    tensor = place(numbers(0))
    dist.reduce(tensor, last, group=group)
    return [tensor] if dist.get_rank() == last else []


def broadcast(group: Any, place: Places) -> list[Tensor]:
    tensor = place(numbers(0))
    dist.broadcast(tensor, dist.get_world_size() - 1, group=group)
    return [tensor]


def all_gather(group: Any, place: Places) -> list[Tensor]:
    outputs = [place(empty()) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, place(numbers(0)), group=group)
    return outputs


def all_gather_into_tensor(group: Any, place: Places) -> list[Tensor]:
    output = place(empty(2 * dist.get_world_size()))
    dist.all_gather_into_tensor(output, place(numbers(0)), group=group)
    return [output]


def all_gather_coalesced(group: Any, place: Places) -> list[Tensor]:
    outputs = [[place(empty()), place(empty(3))] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, [place(numbers(0)), place(numbers(1, 3))], group=group)
    return [tensor for tensors in outputs for tensor in tensors]


def gather(group: Any, place: Places) -> list[Tensor]:
    outputs = [place(empty()) for _ in range(dist.get_world_size() if dist.get_rank() == 0 else 0)]
    dist.gather(place(numbers(0)), outputs or None, 0, group=group)
    return outputs


def scatter(group: Any, place: Places) -> list[Tensor]:
    inputs = [place(numbers(peer)) for peer in range(dist.get_world_size())]
    output = place(empty())
    dist.scatter(output, inputs if dist.get_rank() == 0 else None, 0, group=group)
    return [output]


def reduce_scatter(group: Any, place: Places) -> list[Tensor]:
    output = place(empty())
    inputs = [place(numbers(peer)) for peer in range(dist.get_world_size())]
    dist.reduce_scatter(output, inputs, group=group)
    return [output]


def reduce_scatter_tensor(group: Any, place: Places) -> list[Tensor]:
    output = place(empty())
    dist.reduce_scatter_tensor(output, place(numbers(0, 2 * dist.get_world_size())), group=group)
    return [output]


def all_to_all(group: Any, place: Places) -> list[Tensor]:
    size = dist.get_world_size()
    outputs = [place(empty()) for _ in range(size)]
    dist.all_to_all(outputs, [place(numbers(peer)) for peer in range(size)], group=group)
    return outputs


def all_to_all_single(group: Any, place: Places) -> list[Tensor]:
    output = place(empty(2 * dist.get_world_size()))
    dist.all_to_all_single(output, place(numbers(0, 2 * dist.get_world_size())), group=group)
    return [output]


def all_to_all_uneven(group: Any, place: Places) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    output, sizes = place(empty(size * (rank + 1))), list(range(1, size + 1))
    dist.all_to_all_single(
        output, place(numbers(0, sum(sizes))), [rank + 1] * size, sizes, group=group
    )
    return [output]


def coalescing(group: Any, place: Places) -> list[Tensor]:
    size = dist.get_world_size()
    reduced = [place(numbers(0)), place(numbers(1, 3))]
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in reduced:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    gathered = [place(empty(2 * size)) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group):
        for seed, tensor in enumerate(gathered):
            dist.all_gather_into_tensor(tensor, place(numbers(seed)), group=group)
    shares = [place(empty()) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group):
        for seed, tensor in enumerate(shares):
            dist.reduce_scatter_tensor(tensor, place(numbers(seed, 2 * size)), group=group)
    return reduced + gathered + shares


def asynchronous(group: Any, place: Places) -> list[Tensor]:
    tensors, gathered = [place(numbers(seed)) for seed in range(3)], [place(empty())]
    gathered += [place(empty()) for _ in range(dist.get_world_size() - 1)]
    reductions = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    gathering = dist.all_gather(gathered, place(numbers(5)), group=group, async_op=True)
    for reduction, tensor in zip(reductions, tensors, strict=True):
        assert reduction is not None
        sums = reduction.get_future().then(lambda future: future.value()[0].sum()).wait()
        assert reduction.wait()
        assert reduction.is_completed()
        assert reduction.is_success()
        assert sums == tensor.sum()
        assert reduction.result()[0].data_ptr() == tensor.data_ptr()
    assert gathering is not None
    gathering.wait()
    return tensors + gathered


def send_and_receive(group: Any, place: Places) -> list[Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [place(empty()) for _ in range(3)]
    if size == 1:
        return []
    following, previous = (rank + 1) % size, (rank - 1) % size
    works = [
        dist.isend(place(numbers(0)), following, group=group, tag=1),
        dist.irecv(received[0], previous, group=group, tag=1),
    ]
    works += dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, place(numbers(1)), following, group=group),
            dist.P2POp(dist.irecv, received[1], previous, group=group),
        ]
    )
    for work in works:
        assert work is not None
        work.wait()
    if rank > 0:
        dist.send(place(numbers(2)), 0, group=group, tag=2)
        return received[:2]
    sums = {dist.recv(received[2], group=group, tag=2): received[2].sum() for _ in range(1, size)}
    assert sorted(sums) == list(range(1, size))
    return received[:2]


CALLS: dict[str, Callable[[Any, Places], list[Tensor]]] = {
    function.__name__: function
    for function in (
        all_reduce,
        all_reduce_coalesced,
        reduce,
        broadcast,
        all_gather,
        all_gather_into_tensor,
        all_gather_coalesced,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        all_to_all_uneven,
        coalescing,
        asynchronous,
        send_and_receive,
    )
} | {
    f"all_reduce {name}": functools.partial(all_reduce, op=getattr(dist.ReduceOp, name))
    for name in ("AVG", "MIN", "MAX", "PRODUCT")
}


def check_call(ours: Any, name: str) -> None:
    expected = CALLS[name](None, Places(["whole"]))
    kinds = list(KINDS)
    for number, kind in enumerate(kinds):
        turned = number + dist.get_rank()
        # All alike; then different ones, on each rank and in each call.
        for chosen in ([kind], kinds[turned:] + kinds[:turned]):
            place = Places(chosen)
            found = CALLS[name](ours, place)
            for wanted, got in zip(expected, found, strict=True):
                assert torch.equal(wanted, got), f"{chosen}: {got} instead of {wanted}"
            place.assert_nothing_else_written()


# ---- what a table does not show


def check_that_starting_does_not_block(ours: Any) -> None:
    # The last rank joins only after it has heard from the others, who have started already.
    last = dist.get_world_size() - 1
    tensor, message = Places(["column"])(numbers(0)), torch.zeros(1)
    expected = numbers(0)
    dist.all_reduce(expected)
    if dist.get_rank() < last:
        work = dist.all_reduce(tensor, group=ours, async_op=True)
        assert work is not None
        assert not work.is_completed()
        assert torch.equal(tensor, numbers(0))
        dist.send(message, last)
        work.wait()
    else:
        for peer in range(last):
            dist.recv(message, peer)
        dist.all_reduce(tensor, group=ours)
    assert torch.equal(tensor, expected)


def check_that_what_fails_changes_nothing(_: Any) -> None:
    group = dist.new_group(backend="sparsecomm", timeout=timedelta(seconds=2 * PATIENCE))
    place = Places(["steps"])
    tensor = place(numbers(0))
    if dist.get_rank() == 0 and dist.get_world_size() > 1:  # nobody else comes
        with pytest.raises(RuntimeError):
            dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, numbers(0))
        place.assert_nothing_else_written()
    dist.barrier()


def check_refused(ours: Any, tensor: Tensor) -> None:
    """No function writes into the tensor, nor into others that come with it."""
    size = dist.get_world_size()
    before, ones = tensor.clone(), torch.ones(2, 3)
    others = [torch.zeros(2, 3) for _ in range(size - 1)]
    attempts: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(tensor, group=ours),
        lambda: dist.all_reduce_coalesced([ones, tensor], group=ours),
        lambda: dist.all_gather([*others, tensor], ones, group=ours),
        lambda: dist.recv(tensor, (dist.get_rank() + 1) % size, group=ours),
    ]
    for attempt in attempts[: len(attempts) if size > 1 else -1]:
        with pytest.raises(RuntimeError, match=r"\[2, 3\].*tensor\.contiguous\(\)"):
            attempt()
        assert torch.equal(tensor, before)
        assert (ones == 1).all()
        assert not any(other.any() for other in others)


def check_shared_memory(ours: Any) -> None:
    """Entries that share memory can be sent, and cannot take a result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    memory = torch.arange(4.0)
    for tensor in (
        memory[:1].expand(2, 3),
        memory[:3].expand(2, 3),
        memory.as_strided((2, 3), (1, 1)),
    ):
        check_refused(ours, tensor)
        gathered = [torch.zeros(2, 3) for _ in range(size)]
        dist.all_gather(gathered, tensor, group=ours)
        assert all(torch.equal(output, tensor) for output in gathered)
        sent = tensor if rank == 0 else torch.zeros(2, 3)
        dist.broadcast(sent, 0, group=ours)
        assert torch.equal(sent, tensor)
    # Interlaced, so that no order of the dimensions nests them, and yet each has its place.
    memory = torch.full((8,), BESIDE)
    tensor = memory.as_strided((2, 3), (3, 2))
    tensor.fill_(rank)
    dist.all_reduce(tensor, group=ours)
    total = float(sum(range(size)))
    assert memory.tolist() == [total, BESIDE, total, total, total, total, BESIDE, total]


def check_what_autograd_knows(ours: Any) -> None:
    """Leaves that are trained and inference tensors take results as row-major ones do."""
    leaf = torch.full((3, 2), 2.0)[:, :1].requires_grad_()
    dist.all_reduce(leaf, group=ours)
    assert leaf.tolist() == [[2.0 * dist.get_world_size()]] * 3
    with torch.inference_mode():
        inferred = torch.ones(2, 3).t()
    dist.all_reduce(inferred, group=ours)
    assert inferred.tolist() == [[float(dist.get_world_size())] * 2] * 3


CASES: dict[str, Callable[[Any], None]] = {
    name: functools.partial(check_call, name=name) for name in CALLS
} | {
    function.__name__: function
    for function in (
        check_that_starting_does_not_block,
        check_shared_memory,
        check_what_autograd_knows,
        check_that_what_fails_changes_nothing,
    )
}


def run_cases() -> dict[str, str]:
    """On every rank: each case's traceback, empty where it passed."""
    outcomes = {}
    ours = dist.new_group(backend="sparsecomm")
    for name, function in CASES.items():
        try:
            function(ours)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
        if any(outcome for outcome in everywhere(outcomes[name])):
            # The ranks may be out of step.
            ours = dist.new_group(backend="sparsecomm")
    return outcomes


def everywhere(value: str) -> list[str]:
    values = [""] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@functools.cache
def world(size: int) -> list[dict[str, str]] | str:
    try:
        return run_ranks(size, run_cases, timeout=LIMIT)
    except RankError as error:
        return str(error)


@pytest.mark.timeout(LIMIT + 50)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_views(name: str, size: int) -> None:
    outcomes = world(size)
    assert not isinstance(outcomes, str), outcomes
    assert [outcome[name] for outcome in outcomes] == [""] * size

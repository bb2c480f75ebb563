"""The backend "sparsecomm" beside gloo: the same calls on the same inputs give the same results.

Starting ranks takes seconds, so one world of each size runs all cases, and each test reads the
outcome of one. In a world the default group is gloo's, and `ours` is a second group of all ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logs import Collect
from patience import LONG, LONG_TIME, PATIENCE, wait_until
from ranks import RankError, run_ranks
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore, ReduceOp
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
import sparsecomm.backend

LIMIT = 400.0  # seconds for all cases, of which a loaded machine may need many
CPU = torch.device("cpu")
Case = Callable[[Any], None]
CASES: dict[str, tuple[int, Case]] = {}  # name -> the smallest world it runs in, and the function


def case(*, smallest: int = 1) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        CASES[function.__name__] = (smallest, function)
        return function

    return add


def run_cases() -> dict[str, str]:
    """On every rank: each case's traceback, empty where it passed."""
    outcomes = {}
    ours = dist.new_group(backend="sparsecomm")
    for name, (smallest, function) in CASES.items():
        if dist.get_world_size() < smallest:
            continue
        try:
            function(ours)
            outcomes[name] = ""
        except Exception:
            outcomes[name] = traceback.format_exc()
            break  # the ranks may be out of step
    return outcomes


@functools.cache
def world(size: int) -> list[dict[str, str]] | str:
    try:
        return run_ranks(size, run_cases, timeout=LIMIT)
    except RankError as error:
        return str(error)


def everywhere(value: Any) -> list[Any]:
    """The value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def raised(function: Callable[[], Any]) -> BaseException:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def generator(*seed: object) -> torch.Generator:
    digest = hashlib.sha256(repr((seed, dist.get_rank())).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def dense(*shape: int, dtype: torch.dtype = torch.float32, seed: object = 0) -> torch.Tensor:
    return torch.randint(1, 5, shape, generator=generator(seed)).to(dtype)


def coo(indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True)


def sparse(
    shape: tuple[int, ...], sparse_dims: int, nnz: int, dtype: torch.dtype, seed: object = 0
) -> torch.Tensor:
    """Small integers at random places, some of them twice."""
    random = generator(seed)
    columns = [torch.randint(0, size, (nnz,), generator=random) for size in shape[:sparse_dims]]
    values = torch.randint(-3, 4, (nnz, *shape[sparse_dims:]), generator=random)
    values = values.abs() if dtype in (torch.uint8, torch.bool) else values
    return torch.sparse_coo_tensor(
        torch.stack(columns), values.to(dtype), shape, check_invariants=True
    )


def row(index: int, size: int = 6) -> torch.Tensor:
    """A sparse vector with a one at `index`."""
    return torch.sparse_coo_tensor(
        torch.tensor([[index]]), torch.ones(1), (size,), check_invariants=True
    )


# ---- the calls of torch.distributed


def all_reduce(group: Any, op: Any, dtype: torch.dtype) -> Any:
    tensor = dense(5, dtype=dtype)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def all_reduce_coalesced(group: Any) -> Any:
    tensors = [dense(3), dense(2, 2)]
    dist.all_reduce_coalesced(tensors, group=group)
    return tensors


def all_reduce_of_complex(group: Any) -> Any:
    tensor = torch.complex(dense(3), dense(3, seed=1))
    dist.all_reduce(tensor, group=group)
    return tensor


def broadcast(group: Any) -> Any:
    tensor = dense(4)
    dist.broadcast(tensor, dist.get_world_size() - 1, group=group)
    return tensor


def reduce(group: Any) -> Any:
    tensor = dense(4)
    dist.reduce(tensor, 0, group=group)
    return tensor if dist.get_rank() == 0 else None


def all_gather(group: Any) -> Any:
    outputs = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.all_gather(outputs, dense(3), group=group)
    return outputs


def all_gather_into_tensor(group: Any) -> Any:
    output = torch.empty(3 * dist.get_world_size())
    dist.all_gather_into_tensor(output, dense(3), group=group)
    return output


def all_gather_coalesced(group: Any) -> Any:
    outputs = [[torch.empty(3), torch.empty(2)] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(outputs, [dense(3), dense(2)], group=group)
    return outputs


def gather(group: Any) -> Any:
    outputs = [torch.empty(3) for _ in range(dist.get_world_size())]
    dist.gather(dense(3), outputs if dist.get_rank() == 0 else None, 0, group=group)
    return outputs if dist.get_rank() == 0 else None


def scatter(group: Any) -> Any:
    inputs = [dense(3, seed=peer) for peer in range(dist.get_world_size())]
    output = torch.empty(3)
    dist.scatter(output, inputs if dist.get_rank() == 0 else None, 0, group=group)
    return output


def reduce_scatter(group: Any) -> Any:
    output = torch.empty(3)
    inputs = [dense(3, seed=peer) for peer in range(dist.get_world_size())]
    dist.reduce_scatter(output, inputs, group=group)
    return output


def reduce_scatter_tensor(group: Any) -> Any:
    output = torch.empty(3)
    dist.reduce_scatter_tensor(output, dense(3 * dist.get_world_size()), group=group)
    return output


def all_to_all(group: Any) -> Any:
    size = dist.get_world_size()
    outputs = [torch.empty(2) for _ in range(size)]
    dist.all_to_all(outputs, [dense(2, seed=peer) for peer in range(size)], group=group)
    return outputs


def all_to_all_single(group: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    output = torch.empty(size * (rank + 1))
    sizes = list(range(1, size + 1))
    dist.all_to_all_single(output, dense(sum(sizes)), [rank + 1] * size, sizes, group=group)
    return output


def coalescing(group: Any) -> Any:
    tensors = [dense(3), dense(2)]
    with distributed_c10d._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    outputs = [torch.empty(3 * dist.get_world_size()) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group):
        for output in outputs:
            dist.all_gather_into_tensor(output, dense(3), group=group)
    shares = [torch.empty(3) for _ in range(2)]
    with distributed_c10d._coalescing_manager(group):
        for share in shares:
            dist.reduce_scatter_tensor(share, dense(3 * dist.get_world_size()), group=group)
    return tensors, outputs, shares


def neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def send_and_receive(group: Any) -> Any:
    following, previous = neighbours()
    received = [torch.empty(3), torch.empty(2)]
    if following == previous == dist.get_rank():
        return None
    works = [
        dist.isend(dense(3), following, group=group, tag=1),
        dist.irecv(received[0], previous, group=group, tag=1),
    ]
    for work in works:
        assert work is not None
        work.wait()
    if dist.get_rank() % 2 == 0:
        dist.send(dense(2), following, group=group)
        dist.recv(received[1], previous, group=group)
    else:
        dist.recv(received[1], previous, group=group)
        dist.send(dense(2), following, group=group)
    return received


def receive_from_any(group: Any) -> Any:
    if dist.get_rank() > 0:
        dist.send(torch.tensor([dist.get_rank()]), 0, group=group)
        return None
    received = [torch.empty(1, dtype=torch.long) for _ in range(1, dist.get_world_size())]
    senders = [dist.recv(tensor, group=group) for tensor in received]
    assert senders == [int(tensor) for tensor in received]
    return sorted(senders)


def batch_of_sends_and_receives(group: Any) -> Any:
    following, previous = neighbours()
    received = torch.empty(3)
    if following == previous == dist.get_rank():
        return None
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, dense(3), following, group=group),
            dist.P2POp(dist.irecv, received, previous, group=group),
        ]
    )
    for work in works:
        work.wait()
    return received


def objects(group: Any) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank}, group=group)
    sent = [rank, "text"]
    dist.broadcast_object_list(sent, 0, group=group)
    scattered: list[Any] = [None]
    dist.scatter_object_list(scattered, list(range(size)), 0, group=group)
    return gathered, sent, scattered


def barriers(group: Any) -> Any:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    assert work is not None
    work.wait()
    backend = (group or distributed_c10d._get_default_group())._get_backend(CPU)
    backend.monitored_barrier(LONG_TIME, True)


DTYPES_OF_GLOO = (torch.float32, torch.float64, torch.float16, torch.int64, torch.uint8)
CALLS: dict[str, Callable[[Any], Any]] = {
    function.__name__: function
    for function in (
        all_reduce_coalesced,
        all_reduce_of_complex,
        broadcast,
        reduce,
        all_gather,
        all_gather_into_tensor,
        all_gather_coalesced,
        gather,
        scatter,
        reduce_scatter,
        reduce_scatter_tensor,
        all_to_all,
        all_to_all_single,
        coalescing,
        send_and_receive,
        receive_from_any,
        batch_of_sends_and_receives,
        objects,
        barriers,
    )
} | {
    f"all_reduce {op} {dtype}": functools.partial(all_reduce, op=op, dtype=dtype)
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
    for dtype in DTYPES_OF_GLOO
}


def outcome(call: Callable[[Any], Any], group: Any) -> Any:
    try:
        return call(group)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return type(error).__name__


def flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    else:
        yield value


@case()
def every_call_gives_what_gloo_gives(ours: Any) -> None:
    for name, call in CALLS.items():
        if name.startswith("all_reduce "):
            call = functools.partial(call, op=getattr(ReduceOp, name.split()[1]))
        expected, found = (list(flat(outcome(call, group))) for group in (None, ours))
        assert len(expected) == len(found), name
        for wanted, got in zip(expected, found, strict=True):
            if isinstance(wanted, torch.Tensor):
                assert torch.equal(wanted, got), f"{name}: {wanted} from gloo, {got} from ours"
            else:
                assert wanted == got, f"{name}: {wanted} from gloo, {got} from ours"


# ---- sparse allreduce

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
OPS = ("SUM", "AVG", "MIN", "MAX", "PRODUCT")
SHAPES = (  # shape, sparse dimensions
    ((11,), 1),
    ((5, 4), 2),
    ((7, 3), 1),
    ((3, 2, 4, 2), 2),
    ((2, 3, 2, 2), 4),
    ((1 << 20, 1 << 20, 2), 2),
    ((4, 0), 1),
)
PATTERNS = ("all ranks", "one rank", "all but one rank", "no rank")


def entries(pattern: str) -> int:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    filled = {
        "all ranks": True,
        "one rank": rank == last,
        "all but one rank": rank != last,
        "no rank": False,
    }
    return 6 + rank if filled[pattern] else 0


def expected_of(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """The dense allreduce, computed in types in which nothing is rounded until the end."""
    wide = torch.float64 if tensor.is_floating_point() else torch.int64
    result = tensor.to_dense().to(wide)
    if tensor.dtype == torch.bool:
        op = {"SUM": "MAX", "PRODUCT": "MIN"}.get(op, op)
    dist.all_reduce(result, op=getattr(ReduceOp, "SUM" if op == "AVG" else op))
    if op == "AVG":
        result = result if tensor.dtype == torch.float64 else result.float()
        result = result / dist.get_world_size()
    return result.to(tensor.dtype)


def small(tensor: torch.Tensor) -> torch.Tensor:
    """The same entries in a shape that can be made dense."""
    if tensor.shape[0] < 1 << 20:
        return tensor
    remainders = tensor._indices() % 16
    shape = (16, 16, *tensor.shape[2:])
    return coo(remainders, tensor._values(), shape)


@case()
def sparse_allreduce_is_the_dense_one(ours: Any) -> None:
    variants = itertools.cycle(itertools.product(PATTERNS, (False, True)))
    for dtype, op, (shape, sparse_dims) in itertools.product(DTYPES, OPS, SHAPES):
        if op == "AVG" and not dtype.is_floating_point:
            continue
        if len(shape) == 3 and op != "SUM":
            continue
        pattern, coalesced = next(variants)
        name = f"{dtype} {op} {shape} {sparse_dims} {pattern} {coalesced}"
        tensor = sparse(shape, sparse_dims, entries(pattern), dtype, seed=name)
        tensor = tensor.coalesce() if coalesced else tensor
        expected = expected_of(small(tensor), op)
        dist.all_reduce(tensor, op=getattr(ReduceOp, op), group=ours)
        assert tensor.is_coalesced(), name
        assert (tensor.dtype, tuple(tensor.shape), tensor.sparse_dim()) == (
            dtype,
            shape,
            sparse_dims,
        )
        found = small(tensor).to_dense()
        assert torch.equal(found, expected), f"{name}: {found} instead of {expected}"


@case()
def bitwise_reductions(ours: Any) -> None:
    for op in ("BAND", "BOR", "BXOR"):
        tensor = sparse((9,), 1, 7, torch.int32, seed=op)
        expected = expected_of(tensor, op)
        dist.all_reduce(tensor, op=getattr(ReduceOp, op), group=ours)
        assert torch.equal(tensor.to_dense(), expected), op


@case()
def complex_numbers(ours: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.complex64, torch.complex128):
        for op, divisor in ((ReduceOp.SUM, 1), (ReduceOp.AVG, size)):
            values = torch.tensor([1 + 2j, rank * 1j], dtype=dtype)
            tensor = coo(torch.tensor([[3, rank % 2]]), values, (5,))
            ours.allreduce([tensor], op).wait()  # dist.all_reduce would hand over a copy
            expected = torch.zeros(5, dtype=dtype)
            expected[3] = size * (1 + 2j)
            for other in range(size):
                expected[other % 2] += other * 1j
            assert tensor.dtype == dtype
            assert torch.allclose(tensor.to_dense(), expected / divisor)


@case()
def rows_stay_that_are_zero(ours: Any) -> None:
    # Optimizers with lazy moments step the rows that are there.
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.full((1, 3), 2.0 * (rank % 2) - 1 if size % 2 == 0 else 0.0)
    tensor = coo(torch.tensor([[4]]), rows, (6, 3))
    dist.all_reduce(tensor, group=ours)
    assert tensor.indices().tolist() == [[4]]
    assert tensor.values().tolist() == [[0.0] * 3]


@case()
def all_ranks_get_the_same_bits(ours: Any) -> None:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT):
            indices = torch.randint(0, 50, (1, 100), generator=generator(dtype))
            values = torch.randn(100, 3, generator=generator(dtype)).to(dtype)
            tensor = coo(indices, values, (50, 3))
            dist.all_reduce(tensor, op=op, group=ours)
            bits = tensor.values().view(torch.uint8).numpy().tobytes()
            assert len(set(everywhere((bits, str(tensor.indices().tolist()))))) == 1


@case()
def half_precision_is_summed_in_float32(ours: Any) -> None:
    # 1 + 2048 rounds to 2048 in float16.
    value = 2048.0 if dist.get_rank() == 0 else 1.0
    tensor = row(2).to(torch.float16) * value
    dist.all_reduce(tensor, group=ours)
    others = dist.get_world_size() - 1
    assert tensor.to_dense()[2] == torch.tensor(2048.0 + others, dtype=torch.float16)


@case()
def non_finite_values_reach_every_rank(ours: Any) -> None:
    for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        tensor = row(1) * (float("nan") if dist.get_rank() == 0 else 1.0)
        dist.all_reduce(tensor, op=op, group=ours)
        assert tensor.to_dense().isnan().tolist() == [False, True] + [False] * 4


@case()
def asynchronous(ours: Any) -> None:
    size = dist.get_world_size()
    tensors = [row(i) for i in range(5)]
    works = [dist.all_reduce(tensor, group=ours, async_op=True) for tensor in tensors]
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work is not None
        value = work.get_future().then(lambda future: future.value()[0].to_dense().sum()).wait()
        assert float(value) == size
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert float(tensor.to_dense()[i]) == size


@case(smallest=2)
def starting_one_does_not_block(ours: Any) -> None:
    # The last rank joins only after it has heard from the others, who have started already.
    last = dist.get_world_size() - 1
    tensor, message = row(0), torch.zeros(1)
    if dist.get_rank() < last:
        work = dist.all_reduce(tensor, group=ours, async_op=True)
        dist.send(message, last, group=ours)
        assert work is not None
        assert raised(lambda: work.wait(timedelta(milliseconds=1)) or 1 / 0)
        dist.send(message, last, group=ours)
        work.wait()
    else:
        for _ in range(2):
            for peer in range(last):
                dist.recv(message, peer, group=ours)
        dist.all_reduce(tensor, group=ours)
    assert float(tensor.to_dense()[0]) == dist.get_world_size()


@case()
def in_inference_mode(ours: Any) -> None:
    with torch.inference_mode():
        tensor = row(3)
        dist.all_reduce(tensor, group=ours)
    assert float(tensor.to_dense()[3]) == dist.get_world_size()


def same_error(ours: Any, tensor: torch.Tensor, op: Any = ReduceOp.SUM) -> str:
    """The text that every rank raises; the tensor stays as it was, and the group usable."""
    before = (tensor._indices().clone(), tensor._values().clone(), tensor.shape)
    error = raised(lambda: dist.all_reduce(tensor, op=op, group=ours))
    texts = everywhere(str(error))
    assert len(set(texts)) == 1, texts
    assert torch.equal(tensor._indices(), before[0])
    assert torch.equal(tensor._values(), before[1])
    assert tensor.shape == before[2]
    usable = row(0)
    dist.all_reduce(usable, group=ours)
    assert float(usable.to_dense()[0]) == dist.get_world_size()
    return texts[0]


@case(smallest=2)
def ranks_that_disagree(ours: Any) -> None:
    odd = dist.get_rank() == 1
    text = same_error(ours, row(0, size=8 if odd else 7))
    assert "shape: [7] on rank" in text
    assert "[8] on rank 1" in text
    text = same_error(ours, row(0).double() if odd else row(0))
    assert "dtype: " in text
    assert "Double on rank 1" in text
    text = same_error(ours, row(0), ReduceOp.MAX if odd else ReduceOp.MIN)
    assert "reduction: " in text
    assert "max on rank 1" in text
    text = same_error(ours, sparse((3, 3), 1 if odd else 2, 2, torch.float32))
    assert "sparse dimensions: 1 on rank 1 but 2 on rank" in text


@case()
def what_cannot_be_reduced(ours: Any) -> None:
    assert "avg is not defined for Int" in same_error(ours, row(0).int(), ReduceOp.AVG)
    assert "band is not defined for Float" in same_error(ours, row(0), ReduceOp.BAND)
    unsorted = torch.sparse_coo_tensor(
        torch.tensor([[2, 1]]), torch.ones(2), (3,), is_coalesced=True, check_invariants=False
    )
    assert "not sorted" in same_error(ours, unsorted)


# ---- as torch.distributed and DDP use it


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 4, sparse=True)
        self.linear = torch.nn.Linear(4, 2)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(self.embedding(indices)).square().sum()
        return result


def train(group: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    model = DistributedDataParallel(Model(), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        model(batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@case()
def ddp_with_sparse_gradients(ours: Any) -> None:
    batches = [torch.randint(0, 20, (6,), generator=generator(step)) for step in range(3)]
    for expected, found in zip(train(None, batches), train(ours, batches), strict=True):
        assert torch.allclose(expected, found, rtol=0, atol=1e-6)
    for parameter in train(ours, batches):
        assert len(set(everywhere(parameter.numpy().tobytes()))) == 1


@case(smallest=2)
def ddp_where_a_rank_has_no_entries(ours: Any) -> None:
    last = dist.get_rank() == dist.get_world_size() - 1
    empty = torch.empty(0, dtype=torch.long)
    parameters = train(ours, [empty if last else torch.tensor([1, 5, 5])] * 2)
    for parameter in parameters:
        assert parameter.isfinite().all()
        assert len(set(everywhere(parameter.numpy().tobytes()))) == 1


@case()
def ddp_hooks_over_this_backend(ours: Any) -> None:
    torch.manual_seed(7)
    model = DistributedDataParallel(torch.nn.Linear(30, 4), process_group=ours)
    sparsecomm.register_comm_hook(model, sparsecomm.OkTopkState(density=0.2))
    for step in range(3):
        model(dense(5, 30, seed=step)).square().mean().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert len(set(everywhere(parameter.grad.numpy().tobytes()))) == 1


@case()
def under_detailed_debugging(_: Any) -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(backend="sparsecomm")
        tensor = row(0)
        dist.all_reduce(tensor, group=group)
        assert float(tensor.to_dense()[0]) == dist.get_world_size()
        batch = torch.randint(0, 20, (6,), generator=generator())
        detailed = train(group, [batch])
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)
    for expected, found in zip(train(None, [batch]), detailed, strict=True):
        assert torch.allclose(expected, found, rtol=0, atol=1e-6)


@case(smallest=2)
def subgroups(ours: Any) -> None:
    last = dist.get_world_size() - 1
    members = [0, last]
    group = dist.new_group(members, backend="sparsecomm")
    if dist.get_rank() in members:
        tensor = row(1)
        dist.all_reduce(tensor, group=group)
        assert float(tensor.to_dense()[1]) == 2
    for count in range(50):  # ranks are a little out of step each time
        split = ours.split_group(members, group_name=f"sparsecomm-split-{count}")
        assert (split is not None) == (dist.get_rank() in members)
        if split is not None:
            tensor = row(1)
            split.allreduce([tensor]).wait()
            assert float(tensor.to_dense()[1]) == 2
            assert split._get_backend(CPU).name() == "sparsecomm"
            assert split._get_backend(CPU) is split._get_backend(torch.device("cuda"))


@case()
def profiler_sees_the_backend(ours: Any) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(row(0), group=ours)
        dist.all_reduce(torch.ones(3), group=ours)
        dist.broadcast(torch.ones(3), 0, group=ours)
    names = [event.name for event in profile.events()]
    assert names.count("sparsecomm:all_reduce") == 2
    assert names.count("sparsecomm:broadcast") == 1


@case()
def destroying_a_group_waits_for_what_was_started(_: Any) -> None:
    group = dist.new_group(backend="sparsecomm")
    tensors = [row(0) for _ in range(4)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    dist.destroy_process_group(group)
    for tensor, work in zip(tensors, works, strict=True):
        assert work is not None
        work.wait()
        assert float(tensor.to_dense()[0]) == dist.get_world_size()


@case()
def an_aborted_group_says_so(_: Any) -> None:
    group: Any = dist.new_group(backend="sparsecomm")
    work = dist.all_reduce(row(0), group=group, async_op=True) if dist.get_rank() == 0 else None
    group._get_backend(CPU).abort()
    if work is not None and dist.get_world_size() > 1:
        assert "closed" in str(raised(work.wait))
    assert "shut down or aborted" in str(raised(lambda: dist.all_reduce(row(0), group=group)))


@case(smallest=2)
def aborting_breaks_off_what_runs(_: Any) -> None:
    group: Any = dist.new_group(backend="sparsecomm")
    dist.all_reduce(row(0), group=group)  # connects
    dist.barrier()
    start = time.monotonic()
    if dist.get_rank() == 0:
        work = dist.all_reduce(row(0), group=group, async_op=True)
        time.sleep(0.2)  # it now waits for the others
        group._get_backend(CPU).abort()
        assert "closed" in str(raised(work.wait))
    dist.barrier()
    if dist.get_rank() != 0:
        assert "rank 0" in str(raised(lambda: dist.all_reduce(row(0), group=group)))
    assert time.monotonic() - start < LONG


@case(smallest=2)
def a_rank_that_does_not_join(_: Any) -> None:
    last = dist.get_world_size() - 1
    for connected in (False, True):
        group = dist.new_group(backend="sparsecomm", timeout=timedelta(seconds=8 * PATIENCE))
        dist.barrier()
        if connected:
            dist.all_reduce(row(0), group=group)
        if dist.get_rank() < last:
            error = raised(lambda group=group: dist.all_reduce(row(0), group=group))  # type: ignore[misc]
            assert isinstance(error, dist.DistBackendError)
            assert f"rank {last}" in str(error), error
            again = raised(lambda group=group: dist.all_reduce(row(0), group=group))  # type: ignore[misc]
            assert "an earlier operation failed" in str(again)
        dist.barrier()


@case(smallest=2)
def options_reach_sparse_allreduces(_: Any) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    store = distributed_c10d._get_default_store()

    def group_with(**options: Any) -> Any:
        made = dist.new_group(backend="sparsecomm", pg_options=sparsecomm.Options(**options))
        dist.barrier()
        return made

    group = group_with(stall_limit=timedelta(seconds=0.3))
    dist.all_reduce(row(0), group=group)  # connects
    logged = Collect()
    logging.getLogger("sparsecomm").addHandler(logged)
    if rank == last:
        wait_until(lambda: store.check(["stalled"]))
    work = dist.all_reduce(row(0), group=group, async_op=True)
    assert work is not None
    if rank == 0:
        wait_until(lambda: any(f"rank {last}" in text for text in logged.texts))
        store.set("stalled", "")
    work.wait()
    logging.getLogger("sparsecomm").removeHandler(logged)

    group = group_with(timeout=timedelta(seconds=3 * PATIENCE))
    start = time.monotonic()
    if rank < last:
        error = raised(lambda: dist.all_reduce(row(0), group=group))
        assert isinstance(error, dist.DistBackendError)
        assert f"rank {last}" in str(error), error
        assert time.monotonic() - start < LONG / 2
    dist.barrier()

    group = group_with(transport="c10d" if rank == 0 else "ucx")
    text = str(raised(lambda: dist.all_reduce(row(0), group=group)))
    for name in ("c10d", "ucx"):
        assert name in text, text


@case()
def options_that_cannot_be_used(ours: Any) -> None:
    def new_group(options: Any) -> Any:
        return dist.new_group(backend="sparsecomm", pg_options=options)

    for make, kind, named in (
        (lambda: sparsecomm.Options(bandwidth=3), TypeError, "bandwidth"),  # type: ignore[call-arg]
        (lambda: sparsecomm.Options(transport="pigeon"), ValueError, "pigeon"),
        (lambda: sparsecomm.Options(stall_limit=3), TypeError, "stall_limit"),  # type: ignore[arg-type]
        (lambda: sparsecomm.Options(nccl="fast"), TypeError, "fast"),  # type: ignore[arg-type]
        (lambda: new_group({"transport": "ucx"}), TypeError, "{'transport': 'ucx'}"),
        (lambda: new_group(dist.ProcessGroupGloo._Options()), TypeError, "pg_options"),  # type: ignore[attr-defined]
    ):
        error = raised(make)
        assert isinstance(error, kind), error
        assert named in str(error), error
    options = sparsecomm.Options(transport="ucx")
    assert "ucx" in repr(options)
    members = list(range(dist.get_world_size()))
    error = raised(lambda: ours.split_group(members, opts=options, group_name="with-options"))
    assert "new_group" in str(error), error


@case()
def a_second_life(_: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    store = distributed_c10d._get_default_store()
    for life, name in enumerate(("sparsecomm", "cpu:sparsecomm", "cpu:sparsecomm", "gloo")):
        dist.destroy_process_group()
        own = PrefixStore(f"life/{life}", store)
        dist.init_process_group(name, store=own, rank=rank, world_size=size)
        tensor, ones = row(0), torch.ones(2)
        dist.all_reduce(tensor)
        dist.all_reduce(ones)
        assert float(tensor.to_dense()[0]) == size
        assert float(ones[0]) == size


@pytest.mark.timeout(LIMIT + 50)
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, size: int) -> None:
    if size < CASES[name][0]:
        pytest.skip(f"needs {CASES[name][0]} ranks")
    outcomes = world(size)
    assert not isinstance(outcomes, str), outcomes
    for rank, outcome in enumerate(outcomes):
        assert name in outcome, f"rank {rank} did not come to this case"
    # An error on one rank may follow from another's.
    assert [outcome[name] for outcome in outcomes] == [""] * size


def lose_a_rank() -> str:
    dist.all_reduce(row(0))
    if dist.get_rank() == 1:
        os._exit(1)
    return str(raised(lambda: dist.all_reduce(row(0))))


def test_a_rank_that_dies_is_named() -> None:
    texts = run_ranks(3, lose_a_rank, backend="sparsecomm", timeout=40, may_die=(1,))
    assert "rank 1" in texts[0]
    assert "rank 1" in texts[2]


def test_registering_twice_changes_nothing() -> None:
    plugin = dist.Backend._plugins["SPARSECOMM"]
    sparsecomm.backend.register()
    assert dist.Backend._plugins["SPARSECOMM"] is plugin
    assert dist.Backend.backend_list.count("sparsecomm") == 1

"""The collectives against torch's own reductions, on several ranks."""

from __future__ import annotations

import gc
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import count, cycle, islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import LONG_TIME
from ranks import run_ranks
from torch._subclasses import FakeTensorMode
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import sparsecomm
from sparsecomm import _C

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int32, torch.int64)
OPS = ("sum", "product", "min", "max", "avg")
# test_dense_inner.py has the transport's own allreduce, which not every transport has.
EXACT = (
    "auto",
    *(row["name"] for row in _C.algorithms() if row["exact"] and row["needs"] == "nothing"),
)
LOSSY = [row["name"] for row in _C.algorithms() if not row["exact"]]
REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def neutral(op: str, dtype: torch.dtype) -> float | int:
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype.is_floating_point:
        return math.inf if op == "min" else -math.inf
    info = torch.iinfo(dtype)
    return info.max if op == "min" else info.min


def held(rank: int, shape: tuple[int, ...], share: float, seed: int) -> torch.Tensor:
    """Where a rank has entries; every rank can compute every other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.rand(shape, generator=generator) < share


def numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Small integers but 0, whose sums and products of four are exact in every dtype."""
    generator = torch.Generator().manual_seed(7000 * seed + rank)
    values = torch.randint(-2, 2, shape, generator=generator)
    return torch.where(values >= 0, values + 1, values).to(dtype)


def filled(mask: torch.Tensor, values: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.where(mask, values, torch.full_like(values, fill))


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    wide = torch.stack(tensors)
    dtype = wide.dtype
    wide = wide.to(torch.float64) if dtype.is_floating_point else wide
    result = {
        "sum": lambda: wide.sum(0),
        "avg": lambda: wide.sum(0) / len(tensors),
        "product": lambda: wide.prod(0),
        "min": lambda: wide.amin(0),
        "max": lambda: wide.amax(0),
    }[op]()
    if op == "avg":  # divided in float32, then rounded
        result = result.to(torch.float32) if dtype != torch.float64 else result
    return result.to(dtype)


def coo(mask: torch.Tensor, values: torch.Tensor, sparse_dims: int) -> torch.Tensor:
    """A coalesced COO tensor with the entries, or rows, where the mask has any."""
    where = mask.flatten(sparse_dims).any(-1) if mask.dim() > sparse_dims else mask
    indices = where.nonzero().t()
    return torch.sparse_coo_tensor(
        indices, values[where], values.shape, is_coalesced=True, check_invariants=True
    )


def as_dense(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    """With `fill` where there is no entry."""
    tensor = tensor.coalesce()
    dense = torch.full(tensor.shape, fill, dtype=tensor.dtype)
    dense[tuple(tensor.indices())] = tensor.values()
    return dense


def check_coo(tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert tensor.layout == torch.sparse_coo
    assert tensor.is_coalesced()
    assert tensor.shape == shape
    assert tensor.dtype == dtype
    # Rebuilt with all checks, among them that indices are sorted and distinct.
    torch.sparse_coo_tensor(
        tensor.indices(), tensor.values(), shape, is_coalesced=True, check_invariants=True
    )


# name -> (shape, sparse dimensions, share of the entries)
SPARSE_CASES: dict[str, tuple[tuple[int, ...], int, float]] = {
    "vector": ((200,), 1, 0.1),
    "all entries": ((40,), 1, 1.0),
    "no entries": ((40,), 1, 0.0),
    "three dimensions": ((5, 6, 7), 3, 0.2),
    "rows": ((30, 4), 1, 0.1),
    "blocks": ((3, 8, 2, 3), 2, 0.1),
    "nothing": ((6, 0), 1, 0.0),
}


def allreduce_matrix(size: int) -> None:
    """Every dtype with every op and algorithm; the cases in turn."""
    rank = dist.get_rank()
    cases = cycle(enumerate(SPARSE_CASES.items()))
    for dtype in DTYPES:
        for op in OPS:
            if op == "avg" and dtype not in FLOATS:
                continue
            fill = neutral(op, dtype)
            for algorithm in EXACT:
                for seed, (name, (shape, sparse_dims, share)) in islice(cases, 1):
                    where = f"{dtype}, {op}, {algorithm}, {name}, P={size}"
                    masks = [held(r, shape, share, seed) for r in range(size)]
                    values = [numbers(r, shape, dtype, seed) for r in range(size)]
                    # A row that is there is there as a whole.
                    for mask in masks:
                        if sparse_dims < len(shape) and mask.numel():
                            rows = mask.flatten(sparse_dims)
                            rows[:] = rows.any(-1, keepdim=True)
                    expected = reduced(
                        [filled(m, v, fill) for m, v in zip(masks, values, strict=True)], op
                    )

                    own = coo(masks[rank], values[rank], sparse_dims)
                    before = own.clone()
                    result = sparsecomm.allreduce(own, algorithm, op)
                    check_coo(result, shape, dtype)
                    assert result.sparse_dim() == sparse_dims, where
                    assert torch.equal(as_dense(result, fill), expected), where
                    assert torch.equal(own.indices(), before.indices()), where
                    assert torch.equal(own.values(), before.values()), where

                    dense = filled(masks[rank], values[rank], fill)
                    assert sparsecomm.allreduce(dense, algorithm, op) is dense, where
                    assert torch.equal(dense, expected), where


def dense_tensors_like_gloo(size: int) -> None:
    """Zeros of dense tensors take part, as in torch.distributed, whatever the algorithm."""
    rank = dist.get_rank()
    shares = cycle((0.1, 0.0, 1.0, 0.5))
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        for op, reduce_op in REDUCE_OPS.items():
            for number, (algorithm, share) in enumerate(zip(EXACT, shares)):  # noqa: B905
                own = filled(held(rank, (20, 9), share, 3), numbers(rank, (20, 9), dtype, 3), 0)
                expected = own.clone()
                dist.all_reduce(expected, reduce_op)
                view = (
                    own.t().contiguous().t(),
                    torch.stack([own, own], -1)[..., 0],
                    own.clone().requires_grad_() if dtype.is_floating_point else own.clone(),
                )[number % 3]
                version = view._version
                assert sparsecomm.allreduce(view, algorithm, op) is view
                assert torch.equal(view, expected), (dtype, op, algorithm, share)
                assert view._version > version
    scalar = torch.tensor(float(rank + 1))
    assert sparsecomm.allreduce(scalar, op="product").item() == math.factorial(size)
    assert sparsecomm.allreduce(torch.empty(0, 3)).shape == (0, 3)
    with torch.inference_mode():
        inner = torch.ones(4).t()
        assert sparsecomm.allreduce(inner).tolist() == [size] * 4


def non_finite(size: int) -> None:
    rank = dist.get_rank()
    for algorithm in EXACT:
        values = torch.tensor([1.0, math.nan if rank == 0 else 2.0, math.inf, -math.inf])
        values[3] = math.inf if rank == 0 else -math.inf
        result = sparsecomm.allreduce(values, algorithm)
        assert result[0] == size
        assert result[1].isnan()
        assert result[2] == math.inf
        assert result[3].isnan() if size > 1 else result[3] == math.inf


def rounding(size: int) -> None:
    """Half precision is summed in float32: 2048 + 1 + 1 is not 2048."""
    value = 2048.0 if dist.get_rank() == 0 else 1.0
    for algorithm in EXACT:
        dense = sparsecomm.allreduce(torch.full((4,), value, dtype=torch.float16), algorithm)
        assert dense.tolist() == [2048 + size - 1] * 4, algorithm
        own = torch.full((4,), value, dtype=torch.float16).to_sparse()
        assert sparsecomm.allreduce(own, algorithm).to_dense().tolist() == [2048 + size - 1] * 4
    big = 2**53 + dist.get_rank()
    for algorithm in EXACT:
        result = sparsecomm.allreduce(torch.tensor([big]), algorithm)
        assert result.item() == sum(2**53 + r for r in range(size)), algorithm


def layouts(size: int) -> None:
    rank = dist.get_rank()
    shape = (12, 10)
    mask, values = held(rank, shape, 0.2, 5), numbers(rank, shape, torch.float32, 5)
    dense = filled(mask, values, 0)
    expected = dense.clone()
    dist.all_reduce(expected)
    csr = dense.to_sparse_csr()
    narrow = torch.sparse_csr_tensor(
        csr.crow_indices().int(), csr.col_indices().int(), csr.values(), shape
    )
    coalesced = dense.to_sparse()
    twice = torch.sparse_coo_tensor(
        torch.cat([coalesced.indices(), coalesced.indices()], 1).flip(1),
        torch.cat([coalesced.values() / 2, coalesced.values() / 2]).flip(0),
        shape,
    )
    transposed = dense.t().contiguous().to_sparse().t()
    strided = torch.sparse_coo_tensor(
        coalesced.indices().t().contiguous().t(),
        torch.stack([coalesced.values()] * 2, 1)[:, 0],
        shape,
        is_coalesced=True,
    )
    gradient = coalesced.clone().requires_grad_()
    for tensor in (csr, narrow, coalesced, twice, transposed, strided, gradient):
        result = sparsecomm.allreduce(tensor)
        check_coo(result, shape, torch.float32)
        assert not result.requires_grad
        assert torch.equal(result.to_dense(), expected)
    assert not twice.is_coalesced()
    empty = torch.sparse_coo_tensor(size=(), dtype=torch.float32)  # no dimensions, no entries
    check_coo(sparsecomm.allreduce(empty), (), torch.float32)
    scalar = torch.sparse_coo_tensor(torch.empty(0, 1), [2.0], ())
    assert sparsecomm.allreduce(scalar).to_dense().item() == 2 * size


def gather_and_scatter(size: int) -> None:
    rank = dist.get_rank()
    for dtype in DTYPES:
        for seed, (shape, sparse_dims, share) in enumerate(
            [
                ((24,), 1, 0.3),
                ((12, 5), 2, 0.3),
                ((24, 3), 1, 0.2),
                ((12, 2), 2, 0.0),
                ((0, 3), 2, 0),
            ]
        ):
            masks = [held(r, shape, share, seed) for r in range(size)]
            if sparse_dims < len(shape):
                masks = [m.any(-1, keepdim=True).expand(shape) for m in masks]
            values = [numbers(r, shape, dtype, seed) for r in range(size)]
            tensors = [coo(m, v, sparse_dims) for m, v in zip(masks, values, strict=True)]

            gathered = sparsecomm.allgather_sparse(tensors[rank])
            assert len(gathered) == size
            for got, expected in zip(gathered, tensors, strict=True):
                check_coo(got, shape, dtype)
                assert torch.equal(got.indices(), expected.indices())
                assert torch.equal(got.values(), expected.values())
            later = sparsecomm.allgather_sparse(tensors[rank], async_op=True).wait()
            assert all(
                torch.equal(a.values(), b.values()) for a, b in zip(later, gathered, strict=True)
            )

            for op in OPS:
                if op == "avg" and dtype not in FLOATS:
                    continue
                fill = neutral(op, dtype)
                parts = (
                    reduced(
                        [filled(m, v, fill) for m, v in zip(masks, values, strict=True)], op
                    ).chunk(size)
                    if shape[0]
                    else [torch.empty(shape, dtype=dtype)] * size
                )
                part = (shape[0] // size, *shape[1:])
                for result in (
                    sparsecomm.reduce_scatter_sparse(tensors[rank], op),
                    sparsecomm.reduce_scatter_sparse(tensors[rank], op, async_op=True).wait(),
                ):
                    check_coo(result, part, dtype)
                    assert torch.equal(as_dense(result, fill), parts[rank]), (dtype, op, shape)
    # Explicit zeros are entries.
    zeros = torch.sparse_coo_tensor([[1, 3]], [0.0, 0.0], (4 * size,), is_coalesced=True)
    assert [t._nnz() for t in sparsecomm.allgather_sparse(zeros)] == [2] * size
    csr = torch.eye(size).to_sparse_csr()
    assert sparsecomm.reduce_scatter_sparse(csr).to_dense()[0, rank] == size


def several_in_flight(size: int) -> None:
    rank = dist.get_rank()
    works: list[tuple[sparsecomm.Work[Any], Callable[[Any], bool]]] = []
    ended: list[int] = []
    recorded: list[torch.futures.Future[None]] = []
    for i in range(24):
        dense = torch.full((50,), float(rank + i))
        total = float(sum(range(size)) + size * i)
        if i % 3 == 0:
            work = sparsecomm.allreduce(dense, async_op=True)
            works.append((work, lambda got, d=dense, t=total: got is d and bool((d == t).all())))
        elif i % 3 == 1:
            work = sparsecomm.allreduce(dense.to_sparse(), async_op=True)
            works.append((work, lambda got, t=total: bool((got.to_dense() == t).all())))
        else:
            work = sparsecomm.allgather_sparse(dense.to_sparse(), async_op=True)
            works.append(
                (work, lambda got, i=i: [t.to_dense()[0].item() - i for t in got] == [*range(size)])
            )
        recorded.append(work.get_future().then(lambda _, i=i: ended.append(i)))
        torch.ones(64, 64) @ torch.ones(64, 64)  # computation between
    for work, holds in reversed(works):
        assert holds(work.wait())
        assert work.is_completed()
        assert work.cancel() is False
        assert holds(work.get_future().wait())
        assert holds(work.wait())
    torch.futures.wait_all(recorded)  # who waits for a future may wake before its callbacks run
    assert ended == sorted(ended)
    assert len(ended) == len(works)


def cancelling(size: int) -> list[str]:
    rank = dist.get_rank()
    data = torch.ones(10)
    sparsecomm.allreduce(data)
    messages = []
    # What is queued behind an operation that waits for all ranks cannot begin before they come.
    first = sparsecomm.allreduce(torch.ones(1000, 100).to_sparse(), async_op=True) if rank else None
    kept = torch.ones(10)
    second = sparsecomm.allreduce(kept, async_op=True) if rank else None
    if second is not None and rank == 1:
        assert second.cancel() is True
    dist.barrier()
    if first is None:
        first = sparsecomm.allreduce(torch.ones(1000, 100).to_sparse(), async_op=True)
        second = sparsecomm.allreduce(kept, async_op=True)
    assert second is not None
    assert first.wait().to_dense()[0, 0] == size
    with pytest.raises(sparsecomm.CancelledError) as error:
        second.wait()
    messages.append(str(error.value))
    with pytest.raises(RuntimeError, match="cancelled"):
        second.get_future().wait()
    assert second.is_completed()
    assert kept.tolist() == [1] * 10
    assert sparsecomm.allreduce(kept).tolist() == [size] * 10
    return messages


def test_cancelling_on_one_rank_cancels_on_all() -> None:
    assert run_ranks(3, cancelling, 3) == [["the operation was cancelled on rank 1"]] * 3


def shuffled(size: int) -> list[float]:
    """Each rank calls in an order of its own, from three threads, step after step."""
    rank = dist.get_rank()
    kinds: dict[str, Callable[..., Any]] = {
        "dense": lambda step, name: sparsecomm.allreduce(
            torch.full((5,), float(step)), name=name, async_op=True
        ),
        "sparse": lambda step, name: sparsecomm.allreduce(
            torch.tensor([0.0, step, 0.0]).to_sparse(), name=name, async_op=True
        ),
        "gathered": lambda step, name: sparsecomm.allgather_sparse(
            torch.tensor([0.0, step]).to_sparse(), name=name, async_op=True
        ),
        "scattered": lambda step, name: sparsecomm.reduce_scatter_sparse(
            torch.full((size,), float(step)).to_sparse(), name=name, async_op=True
        ),
    }
    checks: dict[str, Callable[[Any, int], bool]] = {
        "dense": lambda result, step: result.tolist() == [size * step] * 5,
        "sparse": lambda result, step: result.to_dense().tolist() == [0, size * step, 0],
        "gathered": lambda result, step: [r.to_dense()[1] for r in result] == [step] * size,
        "scattered": lambda result, step: result.to_dense().tolist() == [size * step],
    }
    names = [(kind, f"{kind} {i}") for kind in kinds for i in range(6)]
    done: list[bool] = []

    def call(thread: int, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * rank + 10 * thread + step)
        own = names[thread::3]
        order = torch.randperm(len(own), generator=generator).tolist()
        works = {own[i]: kinds[own[i][0]](step, own[i][1]) for i in order}
        done.extend(checks[kind](work.wait(), step) for (kind, _), work in works.items())

    for step in range(1, 6):
        threads = [threading.Thread(target=call, args=(i, step)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert done == [True] * (5 * len(names))
    # Beside those that have none.
    late = sparsecomm.allreduce(torch.ones(1), name=f"of {rank % 2}", async_op=True)
    assert sparsecomm.allreduce(torch.ones(2)).tolist() == [size] * 2
    assert not late.is_completed()
    sparsecomm.allreduce(torch.ones(1))  # all have looked
    other = sparsecomm.allreduce(torch.ones(1), name=f"of {1 - rank % 2}", async_op=True)
    return [*late.wait().tolist(), *other.wait().tolist()]


def test_names_meet_in_any_order() -> None:
    assert run_ranks(3, shuffled, 3) == [[3.0, 3.0]] * 3


def fusing(size: int) -> tuple[int, int]:
    """Returns the messages of a group of sparse tensors, exchanged each alone and together."""
    rank = dist.get_rank()
    tensors = [
        coo(held(rank, (40 + i,), 0.2, i), numbers(rank, (40 + i,), torch.float32, i), 1)
        for i in range(20)
    ]
    dense = [tensor.to_dense() for tensor in tensors]
    messages, results = [], []
    for limit in (0, 1 << 20):
        with sparsecomm.Communicator.from_process_group(fusion_bytes=limit) as ranks:
            allreduce = partial(
                sparsecomm.allreduce,
                algorithm="ssar_recursive_double",
                communicator=ranks,
                async_op=True,
            )
            order = sorted(range(20), key=lambda i: (i * (3 + limit + 2 * rank)) % 7)
            for _ in range(3):
                works = {i: allreduce(tensors[i], name=f"tensor {i}") for i in order}
                copies = [tensor.clone() for tensor in dense]
                dense_works = {i: allreduce(copies[i], name=f"dense {i}") for i in order}
                results.append([works[i].wait().to_dense() for i in range(20)])
                results.append([dense_works[i].wait() for i in range(20)])
            before = ranks.counters()["messages"]
            group = sparsecomm.grouped_allreduce(
                tensors, algorithm="ssar_recursive_double", communicator=ranks
            )
            messages.append(ranks.counters()["messages"] - before)
            assert all((tensor.values() != 0).all() for tensor in group)
            opposite = coo(torch.tensor([True, True]), torch.tensor([1.0, (-1.0) ** rank]), 1)
            held_once = sparsecomm.allreduce(opposite, "topk_a", communicator=ranks)
            assert held_once.indices().tolist() == [[0]], "the other sum cancels"
            results.append([tensor.to_dense() for tensor in group])
    for others in results:
        for one, other in zip(results[0], others, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
    alone, together = messages
    return alone, together


def test_tensors_that_are_ready_together_are_exchanged_as_one() -> None:
    for alone, together in run_ranks(4, fusing, 4):
        assert alone - together == 19 * 2, "each alone takes log2 P messages"


def joining(size: int) -> list[int]:
    """Rank r has data for r + 1 steps; returns who joined last, of each of two rounds."""
    rank = dist.get_rank()
    shape = (6, 5)

    def contribution(other: int, step: int, dtype: torch.dtype, fill: float) -> torch.Tensor:
        if other < step:
            return torch.full(shape, fill, dtype=dtype)
        return filled(held(other, shape, 0.3, step), numbers(other, shape, dtype, step), fill)

    def expected(step: int, dtype: torch.dtype, op: str) -> torch.Tensor:
        fill = neutral(op, dtype)
        return reduced([contribution(other, step, dtype, fill) for other in range(size)], op)

    def check(result: torch.Tensor, step: int, dtype: torch.dtype, op: str) -> None:
        dense = result if result.layout == torch.strided else as_dense(result, neutral(op, dtype))
        torch.testing.assert_close(dense, expected(step, dtype, op), rtol=0, atol=0)

    def run_step(step: int) -> None:
        works = []
        for dtype in DTYPES:
            for op in OPS if dtype.is_floating_point else OPS[:4]:
                mine = contribution(rank, step, dtype, neutral(op, dtype))
                mask, values = held(rank, shape, 0.3, step), numbers(rank, shape, dtype, step)
                allreduce = partial(sparsecomm.allreduce, op=op, async_op=True)
                name = f"{dtype} {op}"
                works += [
                    (allreduce(mine.clone(), name=name, priority=step), dtype, op),
                    (allreduce(coo(mask, values, 2), name=f"sparse {name}"), dtype, op),
                ]
        for algorithm in EXACT:
            mine = contribution(rank, step, torch.float32, 0)
            check(sparsecomm.allreduce(mine, algorithm), step, torch.float32, "sum")
        for work, dtype, op in works:
            check(work.wait(), step, dtype, op)
        # Rows of a hybrid tensor, and of a matrix.
        mine = contribution(rank, step, torch.float64, 0)
        for sparse in (mine.to_sparse(1), mine.to_sparse_csr()):
            check(sparsecomm.allreduce(sparse, name="rows"), step, torch.float64, "sum")
        group = sparsecomm.grouped_allreduce(
            [mine.clone(), mine.to_sparse(), mine.float(), mine.to_sparse(1)], name="group"
        )
        for result in group:
            check(result, step, result.dtype, "sum")
        for other, result in enumerate(sparsecomm.allgather_sparse(mine.to_sparse(), name="all")):
            assert result.to_dense().equal(contribution(other, step, torch.float64, 0))
        if step == 0:
            return
        with pytest.raises(RuntimeError, match="rank 0 failed before the exchange") as error:
            sparsecomm.reduce_scatter_sparse(torch.ones(size).to_sparse(), name="part")
        assert str(error.value).count("this rank has joined") == step
        if step + 1 == size:
            return
        with pytest.raises(RuntimeError, match="ranks disagree"):
            sparsecomm.allreduce(torch.ones(3 + rank))

    lasts = []
    for inference in (False, True):
        with torch.inference_mode(inference):
            for step in range(rank + 1):
                run_step(step)
            lasts.append(sparsecomm.join())
        assert sparsecomm.allreduce(torch.ones(2)).tolist() == [size] * 2
    return lasts


@pytest.mark.parametrize("size", [1, 3, 4])
def test_ranks_that_have_run_out_of_data_join(size: int) -> None:
    assert run_ranks(size, joining, size) == [[size - 1] * 2] * size


def losing_a_joined_rank(size: int) -> str:
    """One rank has joined when another is lost; those that are left say which."""
    rank = dist.get_rank()
    communicator = sparsecomm.Communicator.from_process_group(timeout=LONG_TIME)
    sparsecomm.allreduce(torch.ones(1), communicator=communicator)
    if rank == size - 1:
        threading.Timer(0.3, os._exit, (0,)).start()
    allreduce = partial(sparsecomm.allreduce, communicator=communicator, name="others")
    join = partial(sparsecomm.join, communicator=communicator)
    calls = [join] if rank == 0 else (partial(allreduce, torch.ones(1)) for _ in count())
    try:
        for call in calls:
            call()
    except dist.DistBackendError as error:
        return str(error)
    raise AssertionError("no rank was lost")


def test_a_rank_that_has_joined_hears_who_is_lost() -> None:
    errors = run_ranks(3, losing_a_joined_rank, 3, may_die=(2,))
    assert "rank 2" in errors[0]
    assert "rank 2" in errors[1]


def grouped(size: int) -> list[str]:
    rank = dist.get_rank()
    dense = torch.full((3, 2), float(rank + 1))
    strided = torch.arange(12.0).reshape(3, 4).t()
    halves = torch.ones(5, dtype=torch.float16)
    rows = torch.sparse_coo_tensor([[rank]], [[1.0, 2.0]], (size, 2))
    entries = torch.sparse_coo_tensor([[rank, 7]], [1, 2], (10,))
    tensors = [dense, strided, halves, rows, entries]
    alone = [sparsecomm.allreduce(tensor.clone()) for tensor in tensors]
    before = [tensor.clone() for tensor in tensors]

    def kept() -> bool:
        pairs = zip(tensors, before, strict=True)
        return all(torch.equal(a.to_dense(), b.to_dense()) for a, b in pairs)

    # What one rank has otherwise, or lacks: nothing is done to any of them, on any rank.
    odd = rank == size - 1
    messages = []
    for wrong in (
        tensors[:-1] if odd else tensors,
        [*tensors[:2], halves[:4] if odd else halves, *tensors[3:]],
        tensors[::-1] if odd else tensors,
    ):
        for name in (None, "group"):
            with pytest.raises(RuntimeError) as error:
                sparsecomm.grouped_allreduce(wrong, name=name)
            assert kept()
        messages.append(str(error.value))
    for refused, kind in (
        ([], ValueError),
        (dense, TypeError),
        ([dense, 3], TypeError),
        ([dense, torch.ones(2).expand(3, 2)], ValueError),
        ([dense, torch.ones(2, dtype=torch.bool)], ValueError),
    ):
        with pytest.raises(kind):
            sparsecomm.grouped_allreduce(refused)  # type: ignore[arg-type]
    assert kept()

    version = dense._version
    work = sparsecomm.grouped_allreduce(tensors, name="group", async_op=True)
    results = work.wait()
    assert [result.layout for result in results] == [tensor.layout for tensor in tensors]
    assert all(result is tensors[i] for i, result in enumerate(results[:3]))
    assert dense._version > version
    for result, expected in zip(results, alone, strict=True):
        assert torch.equal(result.to_dense(), expected.to_dense())
    for op in ("avg", "max"):
        single = torch.full((4,), float(rank))
        (result,) = sparsecomm.grouped_allreduce([single], op=op)
        assert result.tolist() == [(size - 1) / 2 if op == "avg" else size - 1] * 4
    return messages


def test_a_group_is_reduced_whole_or_not_at_all() -> None:
    first, *others = run_ranks(3, grouped, 3)
    assert others == [first] * 2
    lacks, shape, order = first
    assert "about 'group'" in lacks
    assert "tensors: 4 on rank 2 but 5 on ranks 0, 1" in lacks
    assert "tensor 2: [4] " in shape
    assert "on rank 2 but [5] " in shape
    assert "tensor 0: " in order
    assert "tensor 2" not in order


def losing(size: int, delay: float) -> int:
    """A rank is lost amid a group, of which survivors have all or nothing: how many they have."""
    rank = dist.get_rank()
    tensors = [torch.full((200_000,), float(rank + 1)) for _ in range(6)]
    sparsecomm.grouped_allreduce([torch.ones(3)])
    if rank == size - 1:
        threading.Timer(delay, os._exit, (0,)).start()
    sums = [1.0 * size * (size + 1) / 2] * 6
    for done in range(1000):
        own = [tensor.clone() for tensor in tensors]
        try:
            sparsecomm.grouped_allreduce(own)
        except dist.DistBackendError:
            assert all(torch.equal(a, b) for a, b in zip(own, tensors, strict=True))
            return done
        assert [tensor[0].item() for tensor in own] == sums
    raise AssertionError("no rank was lost")


@pytest.mark.parametrize("delay", [0.003, 0.0071, 0.0133])
def test_a_lost_rank_leaves_no_part_of_a_group(delay: float) -> None:
    one, other, _ = run_ranks(3, losing, 3, delay, may_die=(2,))
    assert one == other


def misnamed(size: int) -> list[str]:
    rank = dist.get_rank()
    ones = torch.ones(3)
    for name, error in (
        (3, TypeError),
        ("", ValueError),
        ("#", ValueError),
        ("a" * 1025, ValueError),
    ):
        for function in (
            sparsecomm.allreduce,
            sparsecomm.allgather_sparse,
            sparsecomm.reduce_scatter_sparse,
        ):
            tensor = ones if function is sparsecomm.allreduce else ones.to_sparse()
            for async_op in (False, True):
                with pytest.raises(error):
                    function(tensor, name=name, async_op=async_op)  # type: ignore[operator]
    for priority, error in ((1.5, TypeError), (True, TypeError), (2**31, ValueError)):
        with pytest.raises(error):
            sparsecomm.allreduce(ones, name="urgent", priority=priority)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a name"):
        sparsecomm.allreduce(ones, priority=1)
    assert ones.tolist() == [1] * 3
    sparsecomm.allreduce(torch.ones(3))  # connects
    for urgent in (3, 3, -2):
        done = sparsecomm.allreduce(torch.ones(3), name="urgent", priority=urgent)
        assert done.tolist() == [size] * 3
    with pytest.raises(RuntimeError, match="'urgent': priority: 0 on rank 0 but 1 on rank 1"):
        sparsecomm.allreduce(ones, name="urgent", priority=rank)
    # One that is pending already, of which the first goes on.
    if rank == 0:
        first = sparsecomm.allreduce(ones, name="twice", async_op=True)
        with pytest.raises(ValueError, match="'twice' is pending already"):
            sparsecomm.allreduce(torch.ones(3), name="twice", async_op=True)
        dist.barrier()
    else:
        dist.barrier()
        first = sparsecomm.allreduce(ones, name="twice", async_op=True)
    assert first.wait().tolist() == [size] * 3
    # Another shape on one rank: the same error on all, by name; others are not concerned.
    other = sparsecomm.allreduce(torch.ones(2), name="other", async_op=True)
    with pytest.raises(RuntimeError) as error_info:
        sparsecomm.allreduce(torch.ones(4 if rank == 1 else 3), name="twice")
    assert other.wait().tolist() == [size] * 2
    assert sparsecomm.allreduce(torch.ones(3), name="twice").tolist() == [size] * 3
    # Cancelled on one rank.
    work = sparsecomm.allreduce(torch.ones(3), name=f"only {rank}", async_op=True)
    assert sparsecomm.allreduce(torch.ones(1)).tolist() == [size]  # it has been told of, and waits
    while not (told := work.cancel()) and not work.is_completed():
        pass
    assert told
    dist.barrier()
    for name in (f"only {i}" for i in range(size)):
        if name != f"only {rank}":
            with pytest.raises(sparsecomm.CancelledError, match=f"'{name}' was cancelled on rank"):
                sparsecomm.allreduce(torch.ones(3), name=name)
        else:
            with pytest.raises(sparsecomm.CancelledError):
                work.wait()
    return [str(error_info.value)]


def test_names_that_are_wrong_are_refused_by_all_concerned() -> None:
    (message,), *others = run_ranks(3, misnamed, 3)
    assert others == [[message]] * 2
    assert "about 'twice'" in message
    assert "shape: [3] on ranks 0, 2 but [4] on rank 1" in message


def lacking() -> str:
    rank = dist.get_rank()
    communicator = sparsecomm.Communicator.from_process_group(timeout=timedelta(seconds=2))
    ones = torch.ones(3)
    sparsecomm.allreduce(ones, communicator=communicator, name="both")
    if rank != 1:
        work = sparsecomm.allreduce(ones, communicator=communicator, name="lacking", async_op=True)
    sparsecomm.allreduce(torch.ones(3), communicator=communicator, name="both")
    if rank == 1:
        time.sleep(3)
        call = partial(sparsecomm.allreduce, ones, communicator=communicator, name="both")
    else:
        call = work.wait
    with pytest.raises(dist.DistBackendError) as error:
        call()
    return str(error.value).split(";")[0]


def test_a_name_that_a_rank_does_not_call_ends_with_the_deadline() -> None:
    first, *others = run_ranks(3, lacking)
    assert others == [first] * 2
    assert "rank 1 did not take part" in first
    assert "'lacking' was submitted by ranks 0, 2 only" in first


def disagreeing(size: int) -> list[str]:
    rank = dist.get_rank()
    odd = rank == size - 1
    dense = torch.ones(6)
    outside = torch.ones(10).to_sparse()
    if odd:
        outside._indices()[0, -1] = 10
    attempts: list[Callable[[], Any]] = [
        lambda: sparsecomm.allreduce(torch.ones(7 if odd else 6)),
        lambda: sparsecomm.allreduce(dense, op="max" if odd else "sum"),
        lambda: sparsecomm.allreduce(dense, "topk_a" if odd else "auto"),
        lambda: sparsecomm.allreduce(dense.to_sparse() if odd else dense),
        lambda: sparsecomm.allreduce(torch.ones(6, dtype=torch.float64 if odd else torch.float32)),
        lambda: sparsecomm.allgather_sparse(torch.ones(2, 3 if odd else 4).to_sparse()),
        lambda: (
            sparsecomm.reduce_scatter_sparse(torch.ones(size).to_sparse())
            if odd
            else sparsecomm.allgather_sparse(torch.ones(size).to_sparse())
        ),
        # A tensor that only one rank cannot read.
        lambda: sparsecomm.allreduce(
            torch.sparse_coo_tensor(
                [[5, 2]] if odd else [[2, 5]], [1.0, 1.0], (6,), is_coalesced=True
            )
        ),
        lambda: sparsecomm.allreduce(outside),
    ]
    messages = []
    for attempt in attempts:
        with pytest.raises(RuntimeError) as error:
            attempt()
        messages.append(str(error.value))
        assert sparsecomm.allreduce(torch.ones(3)).tolist() == [size] * 3
    assert dense.tolist() == [1] * 6
    return messages


def test_ranks_that_disagree_raise_the_same_and_go_on() -> None:
    first, *others = run_ranks(3, disagreeing, 3)
    assert others == [first, first]
    for message, part in zip(
        first,
        [
            "shape: [6] on ranks 0, 1 but [7] on rank 2",
            "reduction: max on rank 2 but sum on ranks 0, 1",
            "algorithm: auto on ranks 0, 1 but topk_a on rank 2",
            "layout: dense on ranks 0, 1 but sparse on rank 2",
            "dtype: f32 on ranks 0, 1 but f64 on rank 2",
            "shape: [2, 3] on rank 2 but [2, 4] on ranks 0, 1",
            "operation: allgather of sparse vectors on ranks 0, 1 but reduce-scatter of sparse",
            "rank 2 failed before the exchange: the tensor is marked as coalesced, but its indices",
            "rank 2 failed before the exchange: index 10 is outside dimension 0 of shape 10",
        ],
        strict=True,
    ):
        assert part in message


def without_memory() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    wrapped = distribute_tensor(torch.ones(4, 2), mesh, [Replicate()])
    awaited = _functional_collectives.all_reduce(torch.ones(3), "sum", mesh)
    with FakeTensorMode():
        fake = torch.ones(5)
    freed, rows = torch.ones(6), torch.ones(7, 2).to_sparse(1)
    view = freed[2:]
    freed.untyped_storage().resize_(0)
    rows._values().untyped_storage().resize_(0)
    assert sparsecomm.allreduce(awaited.wait()).tolist() == [4.0] * 3  # as errors advise
    return [wrapped, awaited, fake, freed, view, rows]


def refused(size: int) -> None:
    dense, sparse = torch.ones(6), torch.ones(6).to_sparse()
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            ValueError,
            "op 'mean' is unknown; choose one of sum, product, min, max, avg",
            lambda: sparsecomm.allreduce(dense, op="mean"),
        ),
        (
            ValueError,
            "'avg' of Int is not defined",
            lambda: sparsecomm.allreduce(dense.int(), op="avg"),
        ),
        (ValueError, "dtype ComplexFloat cannot", lambda: sparsecomm.allreduce(dense.cfloat())),
        (ValueError, "dtype Bool cannot", lambda: sparsecomm.allgather_sparse(sparse.bool())),
        (ValueError, "on meta cannot", lambda: sparsecomm.allreduce(dense.to("meta"))),
        (
            ValueError,
            "layout SparseCsc cannot be exchanged; pass tensor.to_sparse",
            lambda: sparsecomm.allreduce(torch.eye(3).to_sparse_csc()),
        ),
        (
            ValueError,
            "is no plain matrix",
            lambda: sparsecomm.allreduce(torch.ones(2, 3, 3).to_sparse_csr()),
        ),
        (
            ValueError,
            "has several entries in one place",
            lambda: sparsecomm.allreduce(torch.ones(1).expand(5)),
        ),
        (
            ValueError,
            "more than 2^32 - 2; split it",
            lambda: sparsecomm.allgather_sparse(torch.sparse_coo_tensor(size=(2**16, 2**16))),
        ),
        (ValueError, "pass tensor.to_sparse", lambda: sparsecomm.allgather_sparse(dense)),
        (ValueError, "pass tensor.to_sparse", lambda: sparsecomm.reduce_scatter_sparse(dense)),
        (
            ValueError,
            "cannot be split evenly between 2 ranks; pad it to a multiple of 2",
            lambda: sparsecomm.reduce_scatter_sparse(torch.ones(5, 2).to_sparse()),
        ),
        (
            ValueError,
            "without sparse dimensions",
            lambda: sparsecomm.reduce_scatter_sparse(torch.sparse_coo_tensor(size=())),
        ),
        (
            TypeError,
            "not list; grouped_allreduce takes a list",
            lambda: sparsecomm.allreduce([dense]),  # type: ignore[call-overload]
        ),
        (
            TypeError,
            "sum, avg, product, min or max",
            lambda: sparsecomm.allreduce(dense, op=dist.ReduceOp.MAX),  # type: ignore[call-overload]
        ),
        *(
            (
                ValueError,
                f"a tensor of shape {list(tensor.shape)} has no memory of its own; of a DTensor",
                lambda tensor=tensor: sparsecomm.allreduce(tensor),
            )
            for tensor in without_memory()
        ),
        *(
            (
                ValueError,
                f"algorithm '{name}' is not exact; choose one of auto",
                lambda name=name: sparsecomm.allreduce(dense, name),
            )
            for name in LOSSY
        ),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind) as error:
            call()
        assert text in str(error.value)
    with torch.inference_mode():
        inference = torch.ones(3)
    with pytest.raises(ValueError, match="inference tensor"):
        sparsecomm.allreduce(inference)
    with sparsecomm.Communicator.from_process_group() as communicator:
        with pytest.raises(ValueError, match="not both"):
            sparsecomm.allreduce(dense, group=dist.group.WORLD, communicator=communicator)
        assert sparsecomm.allreduce(dense, communicator=communicator).tolist() == [2] * 6
        counted = communicator.counters()
        assert counted["messages"] > 0
    with pytest.raises(ValueError, match="this communicator is closed"):
        sparsecomm.allreduce(dense, communicator=communicator)


def groups() -> None:
    rank = dist.get_rank()
    pair = dist.new_group([0, 2])
    if rank != 1:
        assert sparsecomm.allreduce(torch.ones(2), group=pair).tolist() == [2, 2]
    else:
        with pytest.raises(RuntimeError, match="not a member"):
            sparsecomm.allreduce(torch.ones(2), group=pair)
    assert sparsecomm.allreduce(torch.ones(2)).tolist() == [3, 3]
    from sparsecomm.collectives import _of_group

    assert len(_of_group) == (1 if rank == 1 else 2)
    kept = [weakref.ref(communicator) for communicator in _of_group.values()]
    del pair
    dist.destroy_process_group()
    gc.collect()
    assert len(_of_group) == 0
    assert [ref() for ref in kept] == [None] * len(kept)


@pytest.mark.parametrize("backend", ["gloo", "sparsecomm"])
def test_each_group_has_its_communicator_as_long_as_it_lives(backend: str) -> None:
    run_ranks(3, groups, backend=backend)


def closing() -> None:
    """Completions want Python's lock while close() waits for the thread that runs them."""
    communicator = sparsecomm.Communicator.from_process_group()
    sparsecomm.allreduce(torch.ones(3), communicator=communicator)
    called = threading.Event()
    work = None
    if dist.get_rank() == 0:
        work = sparsecomm.allreduce(torch.ones(3), communicator=communicator, async_op=True)
        work.get_future().add_done_callback(lambda _: called.set())
    communicator.close()
    if work is not None:
        with pytest.raises(RuntimeError):
            work.wait()
        assert called.wait(10)
    dist.barrier()


def test_closing_breaks_off_what_runs() -> None:
    run_ranks(2, closing)


def two_threads(size: int) -> None:
    """Each thread has its own communicator, so their orders need not agree."""
    communicators = [sparsecomm.Communicator.from_process_group() for _ in range(2)]
    problems: list[str] = []

    def loop(communicator: sparsecomm.Communicator) -> None:
        for i in range(100):
            got = sparsecomm.allreduce(torch.full((9,), float(i)), communicator=communicator)
            if got.tolist() != [2.0 * i] * 9:
                problems.append(str(got))

    threads = [threading.Thread(target=loop, args=(c,)) for c in communicators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems


def one_thread_loses_a_rank(size: int) -> str:
    rank = dist.get_rank()
    communicator = sparsecomm.Communicator.from_process_group(timeout=LONG_TIME)
    sparsecomm.allreduce(torch.ones(3), communicator=communicator)
    dist.barrier()
    if rank == size - 1:
        os._exit(0)
    data = torch.ones(5)
    with pytest.raises(dist.DistBackendError) as error:
        sparsecomm.allreduce(data, communicator=communicator)
    assert data.tolist() == [1] * 5
    with pytest.raises(dist.DistBackendError, match="make a new one"):
        sparsecomm.allreduce(data, communicator=communicator, async_op=True).wait()
    return str(error.value)


def test_a_lost_rank_is_named() -> None:
    errors = run_ranks(3, one_thread_loses_a_rank, 3, may_die=(2,))
    assert "rank 2" in errors[0]
    assert "rank 2" in errors[1]


def test_needs_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialised"):
        sparsecomm.allreduce(torch.ones(3))


def in_turn(size: int, checks: list[Callable[[int], None]]) -> None:
    """To start processes takes longer than most checks."""
    for check in checks:
        check(size)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_are_those_of_torchs_reductions(size: int) -> None:
    run_ranks(size, in_turn, size, [allreduce_matrix, gather_and_scatter], timeout=110)


@pytest.mark.parametrize("size", [1, 3])
def test_rounding_dense_tensors_and_several_in_flight(size: int) -> None:
    run_ranks(size, in_turn, size, [rounding, dense_tensors_like_gloo, several_in_flight])


def test_layouts_special_values_threads_and_what_is_refused() -> None:
    assert LOSSY
    run_ranks(2, in_turn, 2, [layouts, non_finite, two_threads, refused])

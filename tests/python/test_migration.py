"""Every row of the table of docs/migration.md that comes from Horovod, run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import batch, checkpoint_of, flat, gathered, make_ddp, make_model
from patience import LONG
from ranks import run_ranks
from torch.distributed.algorithms.join import Join

import sparsecomm
from sparsecomm.optim import DistributedOptimizer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"


def rows_of_the_page() -> list[str]:
    """The left cells."""
    _, _, section = PAGE.read_text().partition("## From Horovod\n")
    table = [line for line in section.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    return [re.split(r"(?<!\\) \| ", line[2:])[0] for line in table[1:]]


def step(model: torch.nn.Module, number: int = 0) -> None:
    model(batch(number)).square().mean().backward()


def expect_alike(model: torch.nn.Module) -> None:
    mine = flat(model.parameters())
    assert all(torch.equal(mine, other) for other in gathered(mine))


# Each is run on two ranks, with a default process group.
CHECKS: dict[str, Callable[[], None]] = {}


def row(left: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS[left] = check
        return check

    return add


@row("`horovodrun -np 4 python train.py`")
def launched() -> None:
    """See :func:`test_the_launcher`, which is not for ranks that run already."""


@row("`hvd.init()`")
def initialised() -> None:
    assert dist.is_initialized()
    assert dist.get_backend() == "gloo"


@row("`hvd.rank()`, `hvd.size()`, `hvd.local_rank()`")
def placed() -> None:
    assert (dist.get_rank(), dist.get_world_size()) == (int(os.environ["LOCAL_RANK"]), 2)


@row("`hvd.broadcast_parameters(...)`")
def parameters_differ() -> None:
    expect_alike(make_ddp(make_model(seed=dist.get_rank())))
    model = make_model(seed=dist.get_rank())
    with pytest.raises(RuntimeError, match="ranks disagree"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())


@row("`hvd.DistributedOptimizer(optimizer, named_parameters=...)`")
def optimizers() -> None:
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, sparsecomm.OkTopkState(density=0.1))
    step(ddp)
    model = make_model()
    wrapped = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    step(model)
    wrapped.step()
    expect_alike(model)


@row("`optimizer.synchronize()`, `optimizer.skip_synchronize()`")
def synchronized() -> None:
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step(model)
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    steps = optimizer.exchange.stats()["steps"]
    optimizer.step()
    assert optimizer.exchange.stats()["steps"] == steps
    expect_alike(model)


@row("`compression=hvd.Compression.fp16`")
def halved() -> None:
    for kind in (sparsecomm.TopkState, sparsecomm.OkTopkState):
        ddp = make_ddp(make_model())
        state = kind(density=0.1, value_codec="f16")
        sparsecomm.register_comm_hook(ddp, state)
        step(ddp)
        assert any(residual.any() for residual in checkpoint_of(state)["residuals"].values())


@row("tensor fusion, `HOROVOD_FUSION_THRESHOLD`")
def fused() -> None:
    results = []
    for limit in (0, 1 << 16):
        communicator = sparsecomm.Communicator.from_process_group(fusion_bytes=limit)
        tensors = [torch.full((9,), 1.0 + i + dist.get_rank()) for i in range(5)]
        works = [
            sparsecomm.allreduce(tensor, name=f"{i}", communicator=communicator, async_op=True)
            for i, tensor in enumerate(tensors)
        ]
        for work in works:
            work.wait()
        results.append(torch.stack(tensors))
    assert torch.equal(*results)


@row("`num_groups=n`, `groups=[[...], ...]`")
def grouped() -> None:
    for groups, count in ((3, 4), ([["0", "2"], ["4", "6", "8"]], 3), ("1MB", 2), ("buckets", 2)):
        ddp = make_ddp(make_model())
        state = sparsecomm.OkTopkState(density=0.1, groups=groups)
        sparsecomm.register_comm_hook(ddp, state)
        step(ddp)
        assert len(state.stats()["groups"]) == count
    model = make_model()
    optimizer = sparsecomm.optim.TopkSGD(model.named_parameters(), lr=0.1, groups=3)
    step(model)
    optimizer.step()
    assert len(optimizer.exchange.stats()["groups"]) == 4


@row("`HOROVOD_CYCLE_TIME`, `HOROVOD_CACHE_CAPACITY`")
def agreed() -> None:
    communicator = sparsecomm.Communicator.from_process_group()
    messages, sent = [], []
    for _ in range(4):
        before = communicator.engine.counters()
        sparsecomm.allreduce(torch.zeros(0), name="nothing", communicator=communicator)
        after = communicator.engine.counters()
        messages.append(after["messages"] - before["messages"])
        sent.append(after["sent_bytes"] - before["sent_bytes"])
    assert messages[-1] == messages[-2] < messages[0]
    assert sent[-1] == sent[-2] < sent[0]


@row("`backward_passes_per_step=n`")
def accumulated() -> None:
    ddp = make_ddp(make_model())
    state = sparsecomm.OkTopkState(density=0.1)
    sparsecomm.register_comm_hook(ddp, state)
    with ddp.no_sync():
        step(ddp, 0)
    step(ddp, 1)
    assert state.stats()["steps"] == 1
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with optimizer.no_sync():
        step(model, 0)
    step(model, 1)
    optimizer.step()
    assert optimizer.exchange.stats()["steps"] == 1
    expect_alike(model)


@row("`op=hvd.Average`, `hvd.Sum`")
def reduced() -> None:
    for op, expected in (("avg", 1.5), ("sum", 3.0)):
        tensor = torch.full((3,), 1.0 + dist.get_rank())
        sparsecomm.allreduce(tensor, op=op)
        assert tensor.tolist() == [expected] * 3


@row("`sparse_as_dense=False`, an allgather of indices and of values")
def sparse_rows() -> None:
    group = dist.new_group(backend="sparsecomm")
    rows = torch.tensor([[0, 2 + dist.get_rank()]])
    tensor = torch.sparse_coo_tensor(rows, torch.ones(2, 3), (5, 3))
    dist.all_reduce(tensor, group=group)
    assert tensor.to_dense()[:, 0].tolist() == [2, 0, 1, 1, 0]
    dist.destroy_process_group(group)


@row("`hvd.allreduce(tensor)`")
def summed() -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2] * 3
    sparse = sparsecomm.allreduce(torch.ones(3).to_sparse())
    assert sparse is not None
    assert sparse.to_dense().tolist() == [2] * 3


@row("`hvd.allreduce_async_(tensor, name=...)`, `hvd.synchronize(handle)`")
def named() -> None:
    order = [0, 1, 2] if dist.get_rank() == 0 else [2, 0, 1]
    tensors = [torch.full((4,), 10.0**i) for i in range(3)]
    works = [sparsecomm.allreduce(tensors[i], name=f"{i}", async_op=True) for i in order]
    for work in works:
        work.wait()
    assert [tensor[0].item() for tensor in tensors] == [2, 20, 200]


@row("`hvd.grouped_allreduce(tensors)`")
def together() -> None:
    tensors = [torch.ones(2), torch.ones(3, 3)]
    sparsecomm.grouped_allreduce(tensors)
    assert all((tensor == 2).all() for tensor in tensors)


@row("`hvd.join()`")
def joined() -> None:
    for _ in range(1 + dist.get_rank()):
        sparsecomm.allreduce(torch.ones(3), name="uneven")
    sparsecomm.join()
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, sparsecomm.OkTopkState(density=0.1))
    with ddp.join():
        for number in range(1 + dist.get_rank()):
            ddp.zero_grad()
            step(ddp, number)
    model = make_model()
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with Join([optimizer]):
        for number in range(1 + dist.get_rank()):
            optimizer.zero_grad()
            step(model, number)
            optimizer.step()
    expect_alike(model)


@row("`hvd.sparse_allreduce_async(tensor, ...)`")
def sparse_async() -> None:
    total = sparsecomm.allreduce(torch.eye(3).to_sparse(), async_op=True).wait()
    assert total is not None
    assert torch.equal(total.to_dense(), 2 * torch.eye(3))


@row("`HOROVOD_TIMELINE=file.json`, `hvd.start_timeline(file)`")
def timed() -> None:
    """See tests/python/test_timeline.py."""
    assert callable(sparsecomm.timeline)


@row("`HOROVOD_AUTOTUNE=1`")
def tuned() -> None:
    """What it finds is in tests/python/test_tuning.py, and of "auto" in test_grouping_trial.py."""

    def start(groups: str) -> Callable[[], object]:
        ddp = make_ddp(make_model())
        sparsecomm.register_comm_hook(ddp, sparsecomm.OkTopkState(0.1, groups=groups))
        return lambda: step(ddp)

    tuning = sparsecomm.autotune(start, {"groups": ("model", "buckets")}, steps=1, warmup=1)
    assert len(tuning.trials) == 2
    assert sparsecomm.AutoState().compression.groups == "auto"


@row("process sets")
def subsets() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    ddp = torch.nn.parallel.DistributedDataParallel(make_model(), process_group=alone)
    state = sparsecomm.OkTopkState(0.1, process_group=alone)
    sparsecomm.register_comm_hook(ddp, state)
    step(ddp)
    assert [*state.state_dict()] == [f"rank_0_of_1_from_rank_{dist.get_rank()}"] or [
        *state.state_dict()
    ] == ["rank_0_of_1"]


@row("the stall inspector's warnings, `HOROVOD_STALL_CHECK_TIME_SECONDS`")
def stalled() -> None:
    """What it says is in tests/python/test_stats.py."""
    limit = timedelta(seconds=7)
    state = sparsecomm.OkTopkState(0.1, stall_limit=limit, timeout=timedelta(minutes=3))
    ddp = make_ddp(make_model())
    sparsecomm.register_comm_hook(ddp, state)
    step(ddp)


def check_all() -> None:
    for left, check in CHECKS.items():
        try:
            check()
        except BaseException as error:
            raise AssertionError(f"row {left}") from error


def test_every_row_runs() -> None:
    assert rows_of_the_page() == [*CHECKS]
    run_ranks(2, check_all, timeout=LONG)


def test_the_launcher(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist, sparsecomm
            dist.init_process_group("gloo")
            tensor = torch.ones(3)
            sparsecomm.allreduce(tensor)
            assert tensor.tolist() == [dist.get_world_size()] * 3 == [2] * 3
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    subprocess.run([*command, "--standalone", str(program)], check=True, timeout=LONG)

"""Programs of two ranks that end in some way, and how they did: statuses by kind, as JSON.

Each rank is forked from this process, which has imported what takes long, and ends as a program
does: the interpreter is torn down.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from patience import LONG, LONG_TIME
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
import sparsecomm.fsdp

KEPT: list[Any] = []  # until the interpreter has ended
OF_RANK_0: list[int] = []  # a pipe whose other end only rank 0 has, until its process has ended


def sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


def end(how: str, work: Any) -> None:
    """Waits, or leaves the work pending, with or without a callback. Rank 1 always waits."""
    future = work.get_future()
    if "callback" in how:
        future = future.then(lambda f: f.value())
    KEPT.append((work, future))
    if "pending" not in how:
        future.wait()
        work.wait()
    elif dist.get_rank() == 1:
        with suppress(RuntimeError):  # rank 0 has left
            future.wait()


def late(how: str, limit: float = LONG) -> None:
    """Has rank 1 come when rank 0 has left with something pending."""
    if "pending" in how and dist.get_rank() == 1:
        has_left = select.select(OF_RANK_0, [], [], limit)[0]
        assert has_left or limit < LONG


def communicator(how: str) -> None:
    KEPT.append(made := sparsecomm.Communicator.from_process_group())
    sparsecomm.allreduce(torch.ones(9), communicator=made)
    late(how)
    for _ in range(1 if "pending" in how else 3):
        end(how, sparsecomm.allreduce(sparse(), communicator=made, async_op=True))


def collectives(how: str) -> None:
    sparsecomm.allreduce(sparse())
    late(how)
    for _ in range(1 if "pending" in how else 3):
        end(how, sparsecomm.reduce_scatter_sparse(sparse(), async_op=True))


def backend(how: str) -> None:
    dist.all_reduce(sparse())
    late(how)
    for _ in range(1 if "pending" in how else 3):
        tensor = sparse()
        KEPT.append(tensor)
        end(how, dist.all_reduce(tensor, async_op=True))


def hook(how: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(64, 64))
    state = sparsecomm.OkTopkState(0.1)
    sparsecomm.register_comm_hook(model, state)
    KEPT.append((model, state))
    for _ in range(3):
        model(torch.randn(4, 64)).sum().backward()
    if "monitor" in how:
        monitor(state)
    if "pending" in how:
        gradient = torch.ones(64)
        parameter = torch.nn.Parameter(torch.zeros(64))
        other = sparsecomm.OkTopkState(0.1)
        other._connect()
        late(how)
        end(how, other._native.exchange(0, True, gradient, [parameter], [gradient]))


def monitor(state: sparsecomm.OkTopkState) -> None:
    looked = threading.Event()

    def look() -> None:
        while True:
            state.stats()
            looked.set()

    threading.Thread(target=look, daemon=True).start()
    assert looked.wait(LONG)


def optimizer(how: str) -> None:
    model = torch.nn.Linear(64, 64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    made = sparsecomm.optim.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), compression=sparsecomm.Compression(density=0.1)
    )
    KEPT.append((model, made))
    for _ in range(3):
        model(torch.ones(4, 64)).sum().backward()
        made.step()
        made.zero_grad()
    late(how)
    if "pending" in how:
        model(torch.ones(4, 64)).sum().backward()


def shards(how: str) -> None:
    model = torch.nn.Linear(64, 64)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    KEPT.append((model, sparsecomm.fsdp.apply_reduce_scatter(model, 0.1)))
    for _ in range(2):
        model(torch.ones(4, 64)).sum().backward()
    late(how)
    if "pending" in how and dist.get_rank() == 0:
        return
    if "pending" in how:
        with suppress(RuntimeError):  # rank 0 has left
            model(torch.ones(4, 64)).sum().backward()


def daemon(how: str) -> None:
    """A thread is in a blocking call as the program ends."""
    made = sparsecomm.Communicator.from_process_group(stall_limit=timedelta(milliseconds=50))
    waits = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda _: waits.set()  # type: ignore[method-assign]
    logging.getLogger("sparsecomm").addHandler(handler)

    def block() -> None:
        with suppress(RuntimeError):
            sparsecomm.allreduce(torch.ones(9), communicator=made)

    if dist.get_rank() == 0:
        threading.Thread(target=block, daemon=True).start()
        assert waits.wait(LONG)
    late("pending")


def control(how: str) -> None:
    """Torch alone, whose gloo may wait for rank 1 as rank 0 ends."""
    late(how, 0.3)
    for _ in range(1 if "pending" in how else 3):
        KEPT.append(tensor := torch.ones(4))
        end(how, dist.all_reduce(tensor, async_op=True))


PROGRAMS: dict[str, Callable[[str], None]] = {
    program.__name__: program
    for program in (communicator, collectives, backend, hook, optimizer, shards, daemon, control)
}


def run_program(kind: str, rank: int, port: int, number: int, timeout: float) -> None:
    """Runs ``kind``, as in "hook pending callback destroy"."""
    name, _, how = kind.partition(" ")
    signal.alarm(int(timeout))
    torch.set_num_threads(1)
    server = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LONG_TIME)
    store = dist.PrefixStore(f"{kind}/{number}", server)
    kind_of_group = "sparsecomm" if name == "backend" else "gloo"
    dist.init_process_group(kind_of_group, store=store, rank=rank, world_size=2)
    PROGRAMS[name](how)
    if "destroy" in how:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("rounds", type=int)
    parser.add_argument("kinds", nargs="+")
    parser.add_argument("--timeout", type=float, default=2 * LONG)
    options = parser.parse_args()
    statuses: dict[str, Counter[str]] = {kind: Counter() for kind in options.kinds}
    for kind in options.kinds:
        for number in range(options.rounds):
            children = []
            reader, writer = os.pipe()
            for rank in range(2):
                if (child := os.fork()) == 0:
                    OF_RANK_0.append(reader)
                    if rank == 1:
                        os.close(writer)
                    return run_program(kind, rank, options.port, number, options.timeout)
                children.append(child)
            os.close(reader)
            os.close(writer)
            for rank, child in enumerate(children):
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                statuses[kind][f"{status} on rank {rank}"] += 1
    json.dump(statuses, sys.stdout)
    return None


if __name__ == "__main__":
    main()

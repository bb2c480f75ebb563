"""The choice of a transport, and what processes do to one: die, stop, fork, handle signals."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logs import Collect
from patience import LONG, LONG_TIME, PATIENCE
from ranks import end_soon, run_ranks
from test_exchange import EVERYWHERE, OVER_C10D, TRANSPORTS, exchange_ones, make_options

import sparsecomm
from sparsecomm import _C, transports
from sparsecomm.transports import (
    AUTO,
    connect,
    connect_options,
    is_loopback,
    listening,
    names,
    store_host,
    table,
)

NOWHERE = "/nowhere/libucp.so.0"
UCX_PROBLEM = next(row["problem"] for row in table() if row["name"] == "ucx")
needs_ucx = pytest.mark.skipif(bool(UCX_PROBLEM), reason=UCX_PROBLEM or "ucx")


def options_of(density: float = 1.0) -> _C.ExchangeOptions:
    return _C.ExchangeOptions(
        algorithm="topk_a",
        density=density,
        between="sampled",
        threshold_period=1,
        partition_period=1,
        balance_factor=4.0,
        index_codec="smallest",
        average=False,
    )


class Sum:
    """An allreduce of everything, checked."""

    def __init__(self, transport: _C.Transport, timeout: timedelta = LONG_TIME) -> None:
        self.communicator = _C.Communicator(transport, timeout)
        self._exchange = _C.Exchange(self.communicator, 1000, torch.float32, options_of())

    def run(self) -> None:
        gradient = torch.full((1000,), float(1 + self.communicator.rank))
        self._exchange.run(gradient)
        size = self.communicator.size
        assert torch.equal(gradient, torch.full((1000,), size * (size + 1) / 2))


# ---- the choice


def test_the_table_says_what_there_is() -> None:
    rows = {row["name"]: row for row in table()}
    assert rows.keys() == {"inproc", "ucx", "c10d", "mpi"}
    assert names() == [AUTO, "ucx", "c10d"]
    assert rows["c10d"]["problem"] == ""
    info = sparsecomm.build_info()
    assert info["transports"] == [name for name, row in rows.items() if not row["problem"]]
    assert (info["ucx"] is None) == ("ucx" in info["transport_problems"])
    assert info["transport"] == ("c10d" if UCX_PROBLEM else "ucx")


def test_the_environment_says_what_calls_leave_open() -> None:
    environment = {
        "SPARSECOMM_TRANSPORT": "c10d",
        "SPARSECOMM_UCX_LIBRARY": "/opt/libucp.so",
        "UCX_TLS": "tcp",
        "GLOO_SOCKET_IFNAME": "eth0,eth1",
    }
    options = connect_options(AUTO, LONG_TIME, environment)
    assert options.transport == "c10d"
    assert options.ucx.library == "/opt/libucp.so"
    assert options.ucx.reserved == ["TLS"]
    ((name, value),) = options.ucx.settings
    assert name == "NET_DEVICES"
    assert value.split(",")[:2] == ["eth0", "eth1"]
    assert connect_options("ucx", LONG_TIME, environment).transport == "ucx"
    options = connect_options(AUTO, LONG_TIME, {})
    assert (options.transport, options.ucx.library, options.ucx.settings) == (AUTO, "", [])


def test_ranks_on_loopback_use_that_interface_alone() -> None:
    for host, here in [
        *(("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True)),
        *(("192.0.2.1", False), ("node0", False), ("", False)),  # a name may mean another host
    ]:
        assert is_loopback(host) == here, host
    with_store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store_host(dist.PrefixStore("a", dist.PrefixStore("b", with_store))) == "127.0.0.1"
    assert store_host(dist.HashStore()) == ""
    for environment, loopback, settings in [
        ({}, True, [("NET_DEVICES", "lo")]),
        ({}, False, []),
    ]:
        options = connect_options(AUTO, LONG_TIME, environment, loopback=loopback)
        assert options.ucx.settings == settings
    chosen = {"GLOO_SOCKET_IFNAME": "eth0", "UCX_TCP_PORT_RANGE": "41000-41010"}
    options = connect_options(AUTO, LONG_TIME, chosen, loopback=True)
    assert options.ucx.settings[0][1].split(",")[0] == "eth0"
    assert "eth0" in listening(True, chosen)["ucx"]
    assert "41000-41010" in listening(True, chosen)["ucx"]
    assert "loopback" in listening(True, {})["ucx"]
    assert "loopback" in listening(True, {})["c10d"]
    assert "all interfaces" in listening(False, {})["ucx"]


def test_what_is_said_of_listening_tells_interfaces_from_rdma(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ucx(**variables: str) -> str:
        return listening(False, variables)["ucx"]

    monkeypatch.setattr(transports, "_rdma_devices", list)
    assert "RDMA" not in ucx()
    assert ucx(UCX_NET_DEVICES="mlx5_0:1") == "RDMA on mlx5_0:1"
    assert "all interfaces" in ucx(UCX_NET_DEVICES="all")
    monkeypatch.setattr(transports, "_rdma_devices", lambda: ["mlx5_0:1", "mlx5_1:1"])
    assert "RDMA on mlx5_0:1, mlx5_1:1" in ucx()
    tcp, rdma = ucx(GLOO_SOCKET_IFNAME="eth0,eth1", UCX_TCP_PORT_RANGE="5-9").split("; ")
    assert (tcp, rdma) == ("TCP on eth0, eth1, ports 5-9", "RDMA on mlx5_0:1, mlx5_1:1")
    tcp, rdma = ucx(UCX_NET_DEVICES="eth0,mlx5_1:1").split("; ")
    assert tcp.startswith("TCP on eth0,")
    assert rdma == "RDMA on mlx5_1:1"
    assert "RDMA" not in listening(True, {})["ucx"]
    assert "UCX_TLS=posix" in ucx(UCX_TLS="posix")
    info = sparsecomm.build_info()
    assert info["listening"] == listening(False)
    assert info["listening_on_loopback"] == listening(True)


def _listening_sockets() -> set[str]:
    """The addresses that this process listens on, as the kernel writes them."""
    inodes = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one of this very listing
            inodes.add(os.readlink(link))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", name).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                found.add(fields[1])
    return found


def _in_a_clean_environment() -> Collect:
    for name in [name for name in os.environ if name.startswith(("UCX_", "GLOO_"))]:
        del os.environ[name]
    os.environ["UCX_TLS"] = "tcp"  # shared memory would not listen
    log = Collect()
    logging.getLogger("sparsecomm").addHandler(log)
    logging.getLogger("sparsecomm").setLevel(logging.INFO)
    return log


def _listen(transport: str) -> tuple[set[str], list[str]]:
    log = _in_a_clean_environment()
    before = _listening_sockets()  # of torch's own gloo, at this host's name
    total = Sum(connect(None, LONG_TIME, transport, call="this test"))
    total.run()
    return _listening_sockets() - before, log.texts


def _listen_in_the_backend(transport: str) -> tuple[set[str], list[str]]:
    log = _in_a_clean_environment()
    os.environ["SPARSECOMM_TRANSPORT"] = transport
    found = set()
    for timeout in (timedelta(minutes=1), timedelta.max):
        before = _listening_sockets()
        group = dist.new_group(backend="sparsecomm", timeout=timeout)
        tensor = torch.eye(2).to_sparse()
        dist.all_reduce(tensor, group=group)
        dist.all_reduce(torch.ones(2), group=group)
        assert torch.equal(tensor.to_dense(), 2 * torch.eye(2))
        found |= _listening_sockets() - before
    return found, log.texts


def _is_loopback_address(address: str) -> bool:
    """Reads an address as in /proc/net: words in hexadecimal, in the host's byte order."""
    host = address.split(":")[0]
    return host.endswith("7F") or host == "00000000" * 3 + "01000000"


@pytest.mark.parametrize("transport", [pytest.param("ucx", marks=needs_ucx), "c10d"])
def test_where_the_store_is_on_loopback_nothing_listens_elsewhere(transport: str) -> None:
    for rank, (addresses, texts) in enumerate(run_ranks(2, _listen, transport)):
        assert addresses
        assert all(map(_is_loopback_address, addresses)), addresses
        (text,) = texts
        for operand in (f"rank {rank} of 2", transport, "this test", "loopback"):
            assert operand in text


@pytest.mark.parametrize("transport", [pytest.param("ucx", marks=needs_ucx), "c10d"])
def test_the_backend_too_listens_on_loopback_alone(transport: str) -> None:
    for rank, (addresses, texts) in enumerate(run_ranks(2, _listen_in_the_backend, transport)):
        assert addresses
        assert all(map(_is_loopback_address, addresses)), addresses
        assert len(texts) >= 2, "one for each group"
        for text in texts:
            for operand in (f"rank {rank} of 2", "process group", "loopback"):
                assert operand in text


def test_hooks_refuse_a_transport_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="transport='inproc' is none of auto, ucx, c10d"):
        sparsecomm.OkTopkState(transport="inproc")


def _choose(transport: str, libraries: tuple[str | None, ...]) -> tuple[Any, list[str]]:
    library = libraries[dist.get_rank()]
    if library is not None:
        os.environ["SPARSECOMM_UCX_LIBRARY"] = library
    log = Collect()
    logging.getLogger("sparsecomm").addHandler(log)
    chosen = []
    for _ in range(2):
        try:
            made = connect(None, LONG_TIME, transport)
        except (RuntimeError, ValueError) as error:
            chosen.append(f"{type(error).__name__}: {error}")
            continue
        chosen.append(made.name)
        Sum(made).run()
    return chosen, log.texts


@needs_ucx
def test_auto_takes_ucx() -> None:
    assert run_ranks(2, _choose, AUTO, (None, None)) == [(["ucx", "ucx"], [])] * 2


def test_auto_falls_back_on_all_ranks_with_one_warning() -> None:
    outcomes = run_ranks(3, _choose, AUTO, (None, NOWHERE, None))
    assert [chosen for chosen, _ in outcomes] == [["c10d/gloo"] * 2] * 3
    warnings = [texts for _, texts in outcomes]
    assert warnings[1:] == [[], []]
    (text,) = warnings[0]
    assert text.startswith("transport ucx cannot be used: rank 1: libucp cannot be opened (")
    assert NOWHERE in text
    assert "pip install libucx-cu13" in text


def _choose_by_ways(ways: tuple[str, str]) -> tuple[Any, list[str]]:
    os.environ["UCX_TLS"] = ways[dist.get_rank()]
    return _choose(AUTO, (None, None))


@needs_ucx
def test_ucx_needs_but_shared_memory_within_a_host() -> None:
    assert run_ranks(2, _choose_by_ways, ("posix", "posix")) == [(["ucx", "ucx"], [])] * 2


@needs_ucx
def test_auto_falls_back_where_ucx_opens_but_finds_no_way() -> None:
    outcomes = run_ranks(2, _choose_by_ways, ("tcp", "posix"))
    assert [chosen for chosen, _ in outcomes] == [["c10d/gloo"] * 2] * 2
    (_, (text,)), (_, silent) = outcomes
    assert silent == []
    assert text.startswith("transport ucx cannot be used: rank 0: it finds no way to rank 1: ")
    assert "; rank 1: it finds no way to rank 0: " in text


def test_ucx_by_name_fails_with_the_same_text_on_all_ranks() -> None:
    outcomes = run_ranks(3, _choose, "ucx", ("libm.so.6", None, NOWHERE))
    assert outcomes == [outcomes[0]] * 3
    (text, again), warnings = outcomes[0]
    assert text == again
    assert warnings == []
    assert text.startswith("TransportError: transport ucx cannot be used: rank 0: libucp cannot")
    assert "libm.so.6 has no function" in text
    assert f"; rank 2: libucp cannot be opened ({NOWHERE}" in text


def _connect_with_few_descriptors() -> tuple[float, str]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if dist.get_rank() == 1:
        open_files = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (open_files + 3, limits[1]))
    start = time.monotonic()
    with pytest.raises(_C.TransportError) as error:
        connect(None, LONG_TIME, "ucx")
    took = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    Sum(connect(None, LONG_TIME, "ucx")).run()  # nothing of the first attempt is in the way
    return took, str(error.value)


def test_a_rank_with_too_few_descriptors_is_named_by_all_at_once() -> None:
    outcomes = run_ranks(3, _connect_with_few_descriptors)
    for took, text in outcomes:
        assert took < LONG / 2
        assert text == outcomes[0][1]
        assert re.search(r"rank 1: it needs \d+ file descriptors, \d+ of .* ulimit -n \d+", text)


def _disagree() -> str:
    with pytest.raises(RuntimeError) as error:
        connect(None, LONG_TIME, ("c10d", AUTO)[dist.get_rank()])
    return str(error.value)


def test_ranks_that_ask_for_different_transports_are_told() -> None:
    texts = run_ranks(2, _disagree)
    assert texts[0] == texts[1]
    assert "transport=c10d on rank 0 but transport=auto on rank 1" in texts[0]


def _come_alone(transport: str) -> str:
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["raised"])
        return ""
    with pytest.raises(RuntimeError) as error:
        connect(None, timedelta(seconds=1), transport)
    store.set("raised", "")
    return str(error.value)


@pytest.mark.parametrize("transport", ["ucx", "c10d"])
def test_a_rank_that_does_not_come_is_named(transport: str) -> None:
    text, _ = run_ranks(2, _come_alone, transport)
    assert text.startswith("rank 0: the 2 ranks did not all connect within 1 s")
    assert "rank 1 did not join" in text


def _backend() -> tuple[list[str], str]:
    if dist.get_rank() == 1:
        os.environ["SPARSECOMM_UCX_LIBRARY"] = NOWHERE
    log = Collect()
    logging.getLogger("sparsecomm").addHandler(log)
    outcomes = []
    for choice in ("auto", "ucx"):
        os.environ["SPARSECOMM_TRANSPORT"] = choice
        group = dist.new_group(backend="sparsecomm")
        tensor = torch.sparse_coo_tensor([[dist.get_rank()]], [1.0], (2,))
        try:
            dist.all_reduce(tensor, group=group)
            outcomes.append(str(tensor.to_dense().tolist()))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == "[1.0, 1.0]"
    return log.texts, outcomes[1]


def test_the_backend_falls_back_too() -> None:
    (warnings, text), (none, other) = run_ranks(2, _backend)
    assert (len(warnings), none) == (1, [])
    assert text == other
    assert text.startswith("transport ucx cannot be used: rank 1: libucp cannot be opened (")


# ---- ends of processes

OPERATIONS = 50
# One whose process is killed is noticed long before.
DEADLINES = {signal.SIGKILL: LONG, signal.SIGSTOP: 2 * PATIENCE}


def _survive(
    number: signal.Signals, victims: list[int], lasts: list[int], transport: str
) -> list[tuple[float, str, int]]:
    """For each lost rank: how long the failing operation took, what it said, and who went on."""
    rank = dist.get_rank()
    generator = random.Random(f"{victims} {lasts} {rank}")
    left = list(range(dist.get_world_size()))
    group: dist.ProcessGroup | None = None
    outcomes = []
    for victim, last in zip(victims, lasts, strict=True):
        deadline = timedelta(seconds=DEADLINES[number])
        communicator = _C.Communicator(connect(group, LONG_TIME, transport), deadline)
        for step in range(OPERATIONS + 1):  # the signal may come amid the one after
            if rank == victim and step == last:
                end_soon(number, generator)
            start = time.monotonic()
            try:
                exchange_ones(communicator, EVERYWHERE[step % len(EVERYWHERE)], 10_000)
            except RuntimeError as error:
                took, text = time.monotonic() - start, str(error)
                break
            if rank == victim:
                time.sleep(0.005)
        else:
            raise AssertionError("nothing was raised")
        del communicator
        left.remove(victim)
        group = dist.new_group(left, use_local_synchronization=True)
        assert group is not None
        again = Sum(connect(group, LONG_TIME, transport))
        for _ in range(5):
            again.run()
        outcomes.append((took, text, again.communicator.size))
    return outcomes


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        pytest.param("ucx", {}, marks=needs_ucx),
        pytest.param("ucx", {"UCX_TLS": "tcp"}, marks=needs_ucx),
        ("c10d", {}),
    ],
    ids=["ucx", "ucx, tcp", "c10d"],
)
def test_survivors_name_the_ranks_they_lose_and_go_on(
    transport: str,
    settings: dict[str, str],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    generator = random.Random(f"{transport} {number} {settings}")
    size = 3
    victims = generator.sample(range(size), 2)
    lasts = generator.choices(range(OPERATIONS), k=2)
    outcomes = run_ranks(
        size, _survive, number, victims, lasts, transport, may_die=tuple(victims), timeout=100
    )
    left = list(range(size))
    (outcome,) = (outcomes[rank] for rank in left if rank not in victims)
    for (took, text, remaining), victim in zip(outcome, victims, strict=True):
        # A communicator numbers its ranks from 0.
        assert text.startswith(f"rank {left.index(victim)} "), text
        assert took < LONG / 2, text
        left.remove(victim)
        assert remaining == len(left)


# ---- messages that go wrong

CULPRIT = 1
FAULTS = _C.FaultKind.__members__


def _messages_of_two_steps(algorithm: str) -> int:
    """That the culprit sends."""
    communicator = _C.Communicator(connect(None, LONG_TIME, "c10d"), LONG_TIME)
    for _ in range(2):
        exchange_ones(communicator, algorithm, 1000)
    messages = torch.tensor(communicator.counters()["messages"])
    dist.broadcast(messages, CULPRIT)
    return int(messages)


def _fail(name: str) -> list[tuple[str, str, bool]]:
    """Of each algorithm: what an exchange said, and whether nothing was lost in it."""
    # What a truncated message lacks is what the memory held, and if that is the same, nothing is
    # wrong. Where an earlier communicator received it there sizes and gradients are others, but the
    # first message of all says the same, and so do both of a round of agreement or commit.
    numel = 1001
    said = []
    for index, algorithm in enumerate(OVER_C10D):
        message = random.Random(f"{name} {algorithm}").randrange(_messages_of_two_steps(algorithm))
        if name == "truncate":
            message = max(2, message - message % 2)
        transport = connect(None, LONG_TIME, "c10d")
        if dist.get_rank() == CULPRIT:
            transport = transport.with_fault(FAULTS[name], message)
        # One that never comes is noticed by the deadline, any other long before.
        deadline = timedelta(seconds=2 * PATIENCE) if name == "delay" else LONG_TIME
        communicator = _C.Communicator(transport, deadline)
        exchange = _C.Exchange(communicator, numel, torch.float32, make_options(algorithm, 0.1))
        text, conserved = "", False
        # Fewer messages than in the first step of an exchange go into its later ones.
        for step in range(6):
            # No half of a message is all zeros, which what a truncated one lacks may be as well.
            seed = 6 * index + step
            gradient = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
            before = exchange.residual + gradient
            try:
                exchange.run(gradient)
            except RuntimeError as error:
                text, conserved = str(error), torch.equal(exchange.residual + gradient, before)
                break
        said.append((algorithm, text, conserved))
        del exchange, communicator
        dist.barrier()
    return said


# Over inproc, UCX and MPI the tests in C++ do so.
@pytest.mark.parametrize("name", FAULTS)
def test_survivors_of_a_fault_name_the_rank_and_lose_nothing(name: str) -> None:
    outcomes = run_ranks(3, _fail, name, timeout=150)
    for rank in {0, 1, 2} - {CULPRIT}:
        assert [algorithm for algorithm, _, _ in outcomes[rank]] == OVER_C10D
        for algorithm, text, conserved in outcomes[rank]:
            assert text.startswith(f"rank {CULPRIT} "), (algorithm, text)
            assert conserved, (algorithm, text)


# ---- what belongs to the process


def _ring(transport: str) -> None:
    """As tests/cpp/rings.h, for transports that only Python makes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    made = connect(None, LONG_TIME, transport)
    partners = [(rank + 2**i) % size for i in range((size - 1).bit_length())]
    number = 2**32 - 8
    # A peer that does not take its ring does not hold up others'.
    if rank == 0 and size > 2:
        made.ring(1, number)
        time.sleep(0.1)
        made.ring(2, number)
    elif rank == 2:
        assert made.idle(number - 1, LONG_TIME) == _C.Woken.rung
    dist.barrier()
    for turn in range(16):
        if rank != turn % size:
            assert made.idle(number, LONG_TIME) == _C.Woken.rung
        number = (number + 1) % 2**32
        for peer in partners:
            made.ring(peer, number)
        dist.barrier()
    assert made.idle(number, timedelta(seconds=0.1)) == _C.Woken.late
    made.wake()
    assert made.idle(number, LONG_TIME) == _C.Woken.woken
    threading.Timer(0.1, made.wake).start()
    assert made.idle(number, LONG_TIME) == _C.Woken.woken
    # These come while the transports end.
    for peer in partners:
        made.ring(peer, number)
    dist.barrier()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size", [2, 5])
def test_a_ring_wakes_all_ranks(transport: str, size: int) -> None:
    run_ranks(size, _ring, transport)


def _fork() -> tuple[list[int], str]:
    total = Sum(connect(None, LONG_TIME, "ucx"))
    total.run()
    reader, writer = os.pipe()
    statuses = []
    for way in ("_exit", "exit"):
        child = os.fork()
        if child == 0:
            try:
                total.run()
            except RuntimeError as error:
                os.write(writer, f"{error}\n".encode())
            if way == "_exit":
                os._exit(3)
            # With what a process does at its end, UCX's own part included.
            del total
            ctypes.CDLL(None).exit(4)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        total.run()
    os.close(writer)
    with os.fdopen(reader) as pipe:
        return statuses, pipe.read()


@needs_ucx
def test_a_fork_is_told_and_its_parent_goes_on() -> None:
    for statuses, said in run_ranks(2, _fork):
        first, second = said.splitlines()
        assert "is a fork of it; make communicators in the process that uses them" in first
        assert "is a fork of it" in second
        assert statuses[0] == 3
        assert statuses[1] == 4


def _several() -> list[str]:
    chosen = []
    for _ in range(3):
        totals = [Sum(connect(None, LONG_TIME, name)) for name in ("ucx", "c10d", "ucx")]
        for _ in range(5):
            for total in totals:
                total.run()
        chosen = [total.communicator.transport for total in totals]
    return chosen


@needs_ucx
@pytest.mark.parametrize("size", [1, 2])
def test_several_at_once_and_one_after_the_other(size: int) -> None:
    assert run_ranks(size, _several) == [["ucx", "c10d/gloo", "ucx"]] * size


@needs_ucx
def test_signal_handlers_are_left_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import ctypes, faulthandler, sys, threading
            from datetime import timedelta
            from pathlib import Path
            import torch.distributed as dist
            from sparsecomm import _C
            from sparsecomm.transports import connect_options

            def caught():
                lines = Path("/proc/self/status").read_text().splitlines()
                return [line for line in lines if line.startswith("SigCgt")]

            threading.Thread(target=int).start()  # glibc has a handler for threads
            before = caught()
            options = connect_options("ucx", timedelta(seconds=10))
            transport = _C.connect(0, 1, dist.HashStore(), None, None, options)
            assert transport.name == "ucx"
            assert caught() == before, (before, caught())
            del transport
            assert caught() == before, (before, caught())
            faulthandler.enable()
            transport = _C.connect(0, 1, dist.HashStore(), None, None, options)
            print("connected", flush=True)
            ctypes.string_at(0)
            """
        )
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "connected\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.startswith("Fatal Python error: Segmentation fault")


@needs_ucx
@pytest.mark.parametrize("asked_for", [False, True])
def test_the_c_library_and_the_environment_are_left_alone(tmp_path: Path, asked_for: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import ctypes
            from datetime import timedelta
            import torch.distributed as dist
            from sparsecomm import _C
            from sparsecomm.transports import connect_options

            library = ctypes.CDLL(None)
            library.getenv.restype = ctypes.c_char_p

            def code(name):
                function = getattr(library, name)
                return ctypes.string_at(ctypes.cast(function, ctypes.c_void_p).value, 8)

            def state():
                names = ("mmap", "munmap", "brk", "madvise")
                return [code(name) for name in names], library.getenv(b"UCX_MEM_EVENTS")

            before = state()
            options = connect_options("ucx", timedelta(seconds=10))
            transport = _C.connect(0, 1, dist.HashStore(), None, None, options)
            assert transport.name == "ucx"
            assert state()[1] == before[1]
            print("untouched" if state()[0] == before[0] else "rewritten")
            """
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != "UCX_MEM_EVENTS"}
    if asked_for:
        environment["UCX_MEM_EVENTS"] = "y"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == ("rewritten\n" if asked_for else "untouched\n"), done.stderr


# ---- a queue that a killed process holds up


def _wait_for_a_rank_that_is_late(waiting: int) -> str:
    communicator = sparsecomm.Communicator.from_process_group(transport="ucx", timeout=LONG_TIME)
    tensor = torch.eye(4).to_sparse()
    sparsecomm.allreduce(tensor, communicator=communicator)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() != waiting:
        store.wait(["done"], LONG_TIME)
    text = ""
    try:
        sparsecomm.allreduce(tensor, communicator=communicator)
    except RuntimeError as error:
        text = str(error)
    store.set("done", "")
    return text


@needs_ucx
@pytest.mark.parametrize("waiting", [0, 2])
def test_a_rank_that_waits_for_another_notices_who_was_killed(waiting: int) -> None:
    texts = run_ranks(3, _wait_for_a_rank_that_is_late, waiting, may_die=(1,))
    for rank in (0, 2):
        assert texts[rank].startswith("rank 1 left"), texts

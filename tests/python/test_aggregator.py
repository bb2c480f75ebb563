"""The program sparsecomm-aggregator, as an operator starts it."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aggregators
import pytest

COMMAND = Path(sys.executable).with_name("sparsecomm-aggregator")
# magic, version, workers, worker, length of an introduction to UCX, job, token
GREETING = struct.Struct("<IHHHH4xQQQ")
# magic, version, lengths of a text and of an introduction, token
ANSWER = struct.Struct("<IHHH6xQ")
MAGIC = 0x494E4153


@contextmanager
def aggregator(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    with aggregators.aggregator(*arguments, program=COMMAND, log=subprocess.PIPE) as (process, at):
        host, port = at.rsplit(":", 1)
        yield process, (host, int(port))


def greet(address: tuple[str, int], worker: int, workers: int) -> socket.socket:
    connection = socket.create_connection(address, timeout=30)
    connection.sendall(GREETING.pack(MAGIC, 1, workers, worker, 0, 12, 34, 0))
    answer = ANSWER.unpack(connection.recv(ANSWER.size, socket.MSG_WAITALL))
    assert answer == (MAGIC, 1, 0, 0, 0)
    return connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(number: signal.Signals) -> None:
    with (
        aggregator("--memory", "1MiB") as (process, address),
        greet(address, 0, 2),
        greet(address, 1, 2) as other,
    ):
        process.send_signal(number)
        assert process.wait(timeout=30) == 0
        assert other.recv(1) == b""


def test_a_connection_that_ends_is_logged() -> None:
    with aggregator() as (process, address):
        greet(address, 0, 1).close()
        assert process.stderr is not None
        assert "connection from 127.0.0.1:" in process.stderr.readline()


def test_the_address_may_be_taken_at_once_after_a_kill() -> None:
    with aggregator() as (process, address):
        connection = greet(address, 0, 1)
        process.kill()
        process.wait(timeout=30)
    at = f"{address[0]}:{address[1]}"
    with connection, aggregators.aggregator(program=COMMAND, listen=at) as (_, again):
        assert again == at
        greet(address, 0, 1).close()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "--listen"),
        (["--listen", "7000"], "7000"),
        (["--listen", ":0", "--memory", "much"], "much"),
        (["--listen", ":0", "--speed", "9"], "--speed"),
        (["--listen", "no-such-host.invalid:7000"], "no-such-host.invalid"),
        (["--listen", ":0", "--connections", "2000000"], "2000000"),
        (["--listen", ":0", "--transport", "udp"], "udp"),
        (["--listen", ":0", "--transport", "ucx", "--ucx-library", "/no/such.so"], "/no/such.so"),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], named: str) -> None:
    done = subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert named in done.stderr


def test_help_names_every_argument() -> None:
    done = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for argument in (
        "--listen",
        "--memory",
        "--limit",
        "--connections",
        "--transport",
        "--ucx-library",
    ):
        assert argument in done.stdout

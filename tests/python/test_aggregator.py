"""The program sparsecomm-aggregator, as an operator starts it."""

from __future__ import annotations

import hmac
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
# magic, version, lengths of a text, of an introduction and of a challenge, token
ANSWER = struct.Struct("<IHHHH4xQ")
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
    assert answer == (MAGIC, 1, 0, 0, 0, 0)
    return connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(number: signal.Signals) -> None:
    with (
        aggregator("--memory", "1MiB", "--drain", "0.2") as (process, address),
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
        assert any("connection from 127.0.0.1:" in process.stderr.readline() for _ in range(4))


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
        "--check",
        "--config",
        "--connections",
        "--control",
        "--drain",
        "--http",
        "--idle",
        "--job-memory",
        "--limit",
        "--listen",
        "--log-file",
        "--log-format",
        "--log-level",
        "--memory",
        "--tokens",
        "--transport",
        "--ucx-library",
    ):
        assert f"  {argument}" in done.stdout


def challenged(address: tuple[str, int], token: str) -> str:
    """Shows a token, by what RFC 2104 says of it; returns why that is refused, or nothing."""
    greeting = GREETING.pack(MAGIC, 1, 1, 0, 0, 12, 34, 0)
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(greeting)
        answer = ANSWER.unpack(connection.recv(ANSWER.size, socket.MSG_WAITALL))
        assert answer == (MAGIC, 1, 0, 0, 32, 0)
        challenge = connection.recv(32, socket.MSG_WAITALL)
        message = b"sparsecomm aggregator, worker" + challenge + greeting
        connection.sendall(hmac.new(token.encode(), message, "sha256").digest())
        _, _, text_bytes, _, _, _ = ANSWER.unpack(connection.recv(ANSWER.size, socket.MSG_WAITALL))
        return connection.recv(text_bytes, socket.MSG_WAITALL).decode() if text_bytes else ""


def test_tokens_are_those_of_a_file_that_may_change(tmp_path: Path) -> None:
    one, two = "1" * 32, "correct-horse-battery"
    file = tmp_path / "tokens"
    file.write_text(f"# of teams\n\nteam-one {one}\nteam-two\t{two}\n")
    with aggregator("--tokens", str(file)) as (_, address):
        assert challenged(address, one) == ""
        assert challenged(address, two) == ""
        assert "none that this aggregator knows" in challenged(address, "x" * 32)
        file.write_text(f"team-three {'3' * 16}\n")
        assert "none that this aggregator knows" in challenged(address, one)
        assert challenged(address, "3" * 16) == ""
        file.write_text("nonsense")  # the former tokens stay
        assert challenged(address, "3" * 16) == ""
        file.unlink()
        assert challenged(address, "3" * 16) == ""


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("", "there is no token in it"),
        ("alone\n", "line 1: must be a name, blanks and a token"),
        ("# fine\nteam token with more words\n", "line 2: must be a name"),
        ("team short\n", "has 5 characters, must have 16 or more"),
        (f"a {'1' * 16}\na {'2' * 16}\n", "line 2: another token of a"),
        (f"a {'1' * 16}\nb {'1' * 16}\n", "the token of b is another's too"),
        (f"{'n' * 65} {'1' * 16}\n", "the name has 65 characters"),
    ],
)
def test_bad_files_of_tokens_are_named_at_once(
    tmp_path: Path, text: str | None, problem: str
) -> None:
    file = tmp_path / "tokens"
    if text is not None:
        file.write_text(text)
    command = [COMMAND, "--listen", "127.0.0.1:0", "--tokens", file]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert run.returncode == 2
    assert f"--tokens {file}" in run.stderr
    assert problem in run.stderr

"""The program sparsecomm-aggregator, as many as a test wants, on ports that are free."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from sparsecomm.cli.load import PROGRAM


@contextmanager
def aggregator(
    *arguments: str,
    program: Path = PROGRAM,
    listen: str = "127.0.0.1:0",
    log: int | IO[str] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process and its address. ``log``: where its log goes; ``None``: nowhere."""
    process = subprocess.Popen(
        [program, "--listen", listen, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if log is None else log,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening at 127.0.0.1:"), line
        yield process, line.removeprefix("listening at ").strip()
    finally:
        process.kill()
        process.communicate(timeout=30)


@contextmanager
def aggregators(count: int) -> Iterator[tuple[str, ...]]:
    """Yields the addresses."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(aggregator())[1] for _ in range(count))

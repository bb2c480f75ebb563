"""``sparsecomm bench aggregator``: jobs at once on aggregators, and what each of them gets."""

from __future__ import annotations

import argparse
import contextlib
import re
import statistics
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import sparsecomm
from sparsecomm import _C
from sparsecomm.cli.bench import (
    UsageError,
    at_least_1,
    check_folder,
    numel,
    positive,
    write_json,
)
from sparsecomm.cli.ina import zero as zero_share
from sparsecomm.transports import AUTO, aggregator_addresses

PROGRAM = Path(sparsecomm.__file__).with_name("sparsecomm-aggregator")
MEMORY = "1GiB"  # of the aggregator that is started here
SAMPLE = 0.1  # s, between two looks at it
METRIC = re.compile(r"^sparsecomm_aggregator_memory_bytes (\S+)$", re.MULTILINE)

DESCRIPTION = """\
Measures aggregators under several jobs at once, whose workers are threads of this process and
reduce arrays of float32 as often as they can: whether jobs get equal shares, and what memory they
take. Without --aggregators it starts one on this machine, which then shares its processors.
"""

EPILOG = """\
columns:
  reductions  of all jobs, per second
  job         per second, of the job with the fewest, of the median, and of the one with the most
  spread      the difference of fewest and most, in the mean's
  input       bytes of all workers' arrays per second
  admitted    bytes that the aggregator has admitted, the most at once
  resident    bytes of its process, the most at once

examples:
  sparsecomm bench aggregator --jobs 2,8,32
  sparsecomm bench aggregator --aggregators 10.0.0.7:7000 --jobs 8 --workers 4 --zero 0.75
"""


@dataclass(frozen=True)
class Row:
    jobs: int
    workers: int
    numel: int
    zero: float
    reductions_per_second: float
    job_least: float
    job_median: float
    job_most: float
    spread: float
    input_bytes_per_second: float
    admitted_bytes: int | None  # of an aggregator that was started here
    resident_bytes: int | None


@dataclass
class Peak:
    """The most that an aggregator of this machine has taken."""

    admitted: int = 0
    resident: int = 0


def add_load(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "aggregator",
        help="aggregators under several jobs at once",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--aggregators",
        metavar="LIST",
        help="addresses HOST:PORT, separated by commas (one that is started here)",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help="with the token, where they ask for one"
    )
    parser.add_argument(
        "--jobs", type=counts, default=(2, 8, 32), metavar="LIST", help="at once (2,8,32)"
    )
    parser.add_argument("--workers", type=at_least_1, default=4, help="of each job (4)")
    parser.add_argument("--numel", type=numel, default=1 << 18, help="elements of an array (256Ki)")
    parser.add_argument(
        "--zero",
        type=zero_shares,
        default=(0.5,),
        metavar="LIST",
        help="shares of zero blocks (0.5)",
    )
    parser.add_argument(
        "--seconds", type=positive, default=5.0, help="in which reductions begin (5)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there, too")
    parser.set_defaults(run=run_load, parser=parser)


def counts(text: str) -> tuple[int, ...]:
    return tuple(at_least_1(part) for part in text.split(","))


def zero_shares(text: str) -> tuple[float, ...]:
    return tuple(zero_share(part) for part in text.split(","))


def run_load(options: argparse.Namespace) -> int:
    check_folder(options.json)
    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        process: subprocess.Popen[str] | None = None
        http = ""
        if options.aggregators is None:
            process, address, http = stack.enter_context(own_aggregator())
            given: tuple[str, ...] = (address,)
        else:
            given = tuple(options.aggregators.split(","))
        try:
            addresses = aggregator_addresses(given, AUTO, token_file=options.token_file)
        except ValueError as error:
            raise UsageError(str(error)) from error
        for zero in options.zero:
            for jobs in options.jobs:
                try:
                    row = measure(options, addresses, jobs, zero, process, http)
                except (RuntimeError, ValueError) as error:
                    print(f"sparsecomm bench aggregator: {error}", file=sys.stderr)
                    return 1
                rows.append(row)
                print(line_of(row) if len(rows) > 1 else f"{HEADER}\n{line_of(row)}", flush=True)
    if options.json is not None:
        write_json(options.json, [asdict(row) for row in rows])
    return 0


@contextlib.contextmanager
def own_aggregator() -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Yields the process, its address and that of its metrics."""
    at = "127.0.0.1:0"
    command = [str(PROGRAM), "--listen", at, "--http", at, "--memory", MEMORY]
    command += ["--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address, http = (process.stdout.readline().split()[-1] for _ in range(2))
            yield process, address, http
        finally:
            process.kill()


@contextlib.contextmanager
def watch(process: subprocess.Popen[str] | None, http: str) -> Iterator[Peak]:
    """Looks at the aggregator now and then, until it is left."""
    peak = Peak()
    over = threading.Event()

    def look() -> None:
        assert process is not None
        while not over.wait(SAMPLE):
            try:
                with urllib.request.urlopen(f"http://{http}/metrics", timeout=SAMPLE) as response:
                    found = METRIC.search(response.read().decode())
            except OSError:
                continue  # it is busy
            assert found is not None
            peak.admitted = max(peak.admitted, int(found[1]))
            status = Path(f"/proc/{process.pid}/status").read_text()
            resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
            peak.resident = max(peak.resident, int(resident.split()[1]) << 10)

    watcher = threading.Thread(target=look)
    if process is not None:
        watcher.start()
    try:
        yield peak
    finally:
        over.set()
        if process is not None:
            watcher.join()


def measure(
    options: argparse.Namespace,
    addresses: _C.AggregatorAddresses,
    jobs: int,
    zero: float,
    process: subprocess.Popen[str] | None,
    http: str,
) -> Row:
    with watch(process, http) as peak:
        loads = _C.load_aggregators(
            addresses,
            jobs=jobs,
            workers=options.workers,
            elements=options.numel,
            zero=zero,
            time=timedelta(seconds=options.seconds),
        )
    rates = [reductions / seconds for _, reductions, seconds in loads]
    return Row(
        jobs=jobs,
        workers=options.workers,
        numel=options.numel,
        zero=zero,
        reductions_per_second=sum(rates),
        job_least=min(rates),
        job_median=statistics.median(rates),
        job_most=max(rates),
        spread=(max(rates) - min(rates)) / statistics.mean(rates),
        input_bytes_per_second=sum(rates) * options.workers * options.numel * 4,
        admitted_bytes=peak.admitted if process else None,
        resident_bytes=peak.resident if process else None,
    )


HEADER = (
    "jobs workers   zero  reductions    job (1/s)                     spread   input    "
    "admitted  resident\n"
    "                (%)       (1/s)    least    median      most      (%)  (MB/s)       "
    "(MB)      (MB)"
)


def line_of(row: Row) -> str:
    def megabytes(count: int | None) -> str:
        return "-" if count is None else f"{count / 1e6:.1f}"

    return (
        f"{row.jobs:4} {row.workers:7} {row.zero:6.0%} {row.reductions_per_second:11.1f} "
        f"{row.job_least:8.2f} {row.job_median:9.2f} {row.job_most:9.2f} {row.spread:8.1%} "
        f"{row.input_bytes_per_second / 1e6:7.0f} {megabytes(row.admitted_bytes):>10} "
        f"{megabytes(row.resident_bytes):>9}"
    )

"""``sparsecomm bench``: arguments in, a table and JSON out."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from sparsecomm.build import build_info
from sparsecomm.cli import ping_pong
from sparsecomm.cli.gradients import Pattern
from sparsecomm.cli.measure import (
    DTYPES,
    GLOO_DENSE,
    PLANNED,
    Row,
    Settings,
    is_sparse,
    measure,
)
from sparsecomm.cli.ranks import run_on_ranks, world_size_of_launcher
from sparsecomm.transports import AUTO, names
from sparsecomm.units import parse_count

MAX_NUMEL = 2**32 - 2

T = TypeVar("T")

DESCRIPTION = """\
Measures allreduces of a gradient, averaged over the ranks. Several algorithms run interleaved: in
every iteration each has its turn, in an order drawn anew, so that what disturbs one disturbs all.
Those that are much quicker than the slowest have several turns.

A sparse algorithm's time is the whole: selecting from gradient and residual, exchanging, and
writing the result. auto lets a plan choose; it is run until the plan has settled before the first
iteration, and its row also names what was chosen in the end.

Before each turn, outside of its time, the gradient is filled anew and the ranks meet at a barrier.
gloo_dense is torch.distributed's own allreduce.
"""

EPILOG = """\
first lines:
  ranks, transport, pattern   what was measured, over which transport, on which gradients
  density, k                  share of the entries that each rank selects, and how many they are
  index codec, value codec    how indices and values are encoded; smallest: per message
  seed                        of the gradients
  iterations, warm-up         iterations that were measured, and those before them, which were not

columns:
  size, count, type  the gradient: bytes, elements, element type
  algorithm          auto:NAME: the plan ended with NAME
  turns              in an iteration; times are over all of them
  time min, median, max   time of a turn on the slowest rank: least, median, largest
  algbw              size / median time, as if every byte had travelled
  busbw              algbw * 2(P-1)/P, what a dense allreduce would need of each link at that time
  sent, received     wire bytes per turn of the rank with the most, headers and agreement
                     included: counted by the transport, for gloo_dense computed as 2(P-1)/P * size
  msgs               messages sent per turn by the rank with the most; not known of gloo
  model              bytes received by the cost formula, an upper bound with 32-bit indices
  nnz                entries of the result
  select, exchange, apply   parts of the time, means over the ranks
  alone              the exchange of a selection that is at hand, with --exchange-alone
  -                  not known, or not measured

last lines: the quickest by its median, and how many times as quick as a dense allreduce it is
(gloo_dense, or the quickest dense one). That is of the exchange, not of a training step, in which
DDP hides part of a dense exchange: sparsecomm plan --step-time.

patterns (entries are normal with deviation 0.01, but for the large ones, density * numel of them,
which are log-normal with median 1):
  uniform            large entries anywhere, on each rank elsewhere
  shared:F           anywhere, a share F of them at the same places on all ranks
  clustered[:F]      in 16 runs without gaps, a share F (0) of the runs the same on all ranks

examples:
  sparsecomm bench allreduce --ranks 4 --numel 14728266 --density 0.01
  torchrun --nproc-per-node 4 -m sparsecomm.cli bench allreduce --algorithm oktopk --dtype bf16
"""


class UsageError(ValueError):
    """Arguments that do not go together."""


def add_allreduce(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "allreduce",
        help="sum of a gradient over all ranks",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_allreduce, parser=parser)
    algorithms = algorithm_names()
    add = parser.add_argument
    add(
        "--algorithm",
        type=partial(chosen, known=algorithms),
        default=(GLOO_DENSE, "topk_a", "oktopk"),
        metavar="NAME,...",
        help=f"one or several of {', '.join(algorithms)} (gloo_dense,topk_a,oktopk)",
    )
    add(
        "--numel",
        type=partial(several, one=numel),
        default=(1 << 20,),
        metavar="N,...",
        help="elements (1048576)",
    )
    add(
        "--density",
        type=partial(several, one=share),
        default=(0.01,),
        metavar="D,...",
        help="share selected (0.01)",
    )
    add("--dtype", choices=DTYPES, default="f32", help="of the elements (f32)")
    add("--iters", type=at_least_1, default=20, metavar="N", help="iterations measured (20)")
    add("--warmup", type=at_least_0, default=5, metavar="N", help="iterations before them (5)")
    add(
        "--transport",
        choices=names(),
        default=AUTO,
        help="what moves the bytes; auto: the first of them that works on all ranks (auto)",
    )
    add(
        "--seconds",
        type=positive,
        metavar="S",
        help="begin no further iteration after so long; one is measured in any case (no limit)",
    )
    add(
        "--together",
        type=at_least_1,
        metavar="N",
        help="the most algorithms to hold in memory, and to measure in turn, at a time, not "
        "counting gloo_dense, which is measured again with each batch (all)",
    )
    add(
        "--exchange-alone",
        action="store_true",
        help="also measure each exchange of a selection that is at hand (f32 sums)",
    )
    add(
        "--pattern",
        type=pattern,
        default="uniform",
        metavar="P",
        help="uniform, shared:F or clustered[:F], see below (uniform)",
    )
    add(
        "--value-codec",
        choices=build_info()["value_codecs"],
        default="raw",
        help="how values travel in the algorithms that can round them (raw)",
    )
    add(
        "--index-codec",
        choices=("smallest", *build_info()["index_codecs"]),
        default="smallest",
        help="how indices travel; smallest picks one per message (smallest)",
    )
    add("--seed", type=at_least_0, default=1, metavar="N", help="of the gradients (1)")
    add(
        "--ranks",
        type=at_least_1,
        metavar="P",
        help="ranks to start on this machine (2); under torchrun the ranks are torchrun's",
    )
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE, as a JSON list")


TRANSPORT_DESCRIPTION = """\
Measures messages there and back between two ranks through every transport that can be used here,
each beside the bare engine below it: torch.distributed's send and recv, libucp and ucx_perftest.
They run block by block in turn, so that what disturbs one disturbs all. MPI and the transport over
it follow, in two ranks that mpiexec starts, where there is one. Then an allreduce of 16 non-zeros
through each transport of torch's ranks.
"""


TRANSPORT_EPILOG = """\
columns:
  engine             a transport, or a bare engine that one stands on; those follow it
  N B                one-way time of messages of N bytes: the median of the blocks' medians, and in
                     brackets the least and the largest of these
  N MiB              bytes of such a message over its one-way time
  to bare            a transport's time over that of the quickest bare engine below it, one ratio
                     per size, from the smallest: 1.00 costs nothing, 2.00 doubles the time
  -                  a bare engine, or none below this transport

last lines: an allreduce of a few non-zeros through each transport, in which latency is all.
"""


def add_transport(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "transport",
        help="latency and bandwidth of each transport",
        description=TRANSPORT_DESCRIPTION,
        epilog=TRANSPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_transport, parser=parser)
    add = parser.add_argument
    add("--rounds", type=at_least_10, default=1000, metavar="N", help="a block's (1000)")
    add("--blocks", type=at_least_1, default=5, metavar="N", help="of each engine (5)")
    add("--json", type=Path, metavar="FILE", help="also write the figures to FILE, as JSON")


def run_transport(options: argparse.Namespace) -> int:
    if world_size_of_launcher() not in (None, 2):
        raise UsageError(f"the launcher has started {world_size_of_launcher()} ranks; it takes 2")
    check_folder(options.json)
    return run_on_ranks(partial(report_transport, options.rounds, options.blocks, options.json), 2)


def report_transport(rounds: int, blocks: int, file: Path | None) -> None:
    result = ping_pong.measure(rounds, blocks)
    if dist.get_rank() != 0:
        return
    print(ping_pong.text(result), flush=True)
    if file is not None:
        write_json(file, result)


def check_folder(file: Path | None) -> None:
    if file is not None and not file.absolute().parent.is_dir():
        raise UsageError(f"--json {file}: there is no folder {file.parent}")


def algorithm_names() -> list[str]:
    return [GLOO_DENSE, *build_info()["algorithms"], PLANNED]


def chosen(text: str, known: Sequence[str], noun: str = "algorithm") -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(
                f"{noun} {name!r} is unknown; there are {', '.join(known)}"
            )
    if len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names one {noun} twice")
    return names


def several(text: str, one: Callable[[str], T]) -> tuple[T, ...]:
    return tuple(one(part) for part in text.split(","))


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share above 0 and up to 1")
    return value


def whole(text: str, least: int, most: int | None = None) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least or (most is not None and value > most):
        limits = f"of {least} or more" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {limits}")
    return value


def at_least_0(text: str) -> int:
    return whole(text, 0)


def at_least_1(text: str) -> int:
    return whole(text, 1)


def at_least_10(text: str) -> int:
    return whole(text, 10)


def numel(text: str) -> int:
    try:
        value = parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if not 1 <= value <= MAX_NUMEL:
        raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to {MAX_NUMEL}")
    return value


def pattern(text: str) -> Pattern:
    try:
        return Pattern.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_allreduce(options: argparse.Namespace) -> int:
    launched = world_size_of_launcher()
    if launched is not None and options.ranks not in (None, launched):
        raise UsageError(
            f"--ranks {options.ranks}, but the launcher has started {launched}; omit --ranks"
        )
    check_folder(options.json)
    settings = [
        Settings(
            algorithms=algorithms,
            numel=numel,
            density=density,
            dtype=options.dtype,
            pattern=options.pattern,
            index_codec=options.index_codec,
            value_codec=options.value_codec,
            transport=options.transport,
            iters=options.iters,
            warmup=options.warmup,
            seconds=options.seconds,
            seed=options.seed,
            exchange_alone=options.exchange_alone,
            batch=batch,
        )
        for numel in options.numel
        for density in options.density
        for batch, algorithms in enumerate(batches(options.algorithm, options.together))
    ]
    return run_on_ranks(partial(report, settings, options.json), options.ranks or 2)


def batches(algorithms: Sequence[str], together: int | None) -> list[tuple[str, ...]]:
    """The algorithms in groups of ``together``, the baseline in each where it was asked for."""
    baseline = [GLOO_DENSE] if GLOO_DENSE in algorithms else []
    others = [name for name in algorithms if name != GLOO_DENSE]
    if together is None or len(others) <= together:
        return [tuple(algorithms)]
    return [
        (*baseline, *others[first : first + together]) for first in range(0, len(others), together)
    ]


def report(settings: Sequence[Settings], file: Path | None) -> None:
    """Measures, and prints and writes what came out on rank 0."""
    every: list[Row] = []
    for each in settings:
        rows = measure(each)
        every += rows
        if dist.get_rank() == 0:
            print(table(each, rows), flush=True)
    if file is not None and dist.get_rank() == 0:
        write_json(file, [asdict(row) for row in every])


def write_json(file: Path, content: Any) -> None:
    """Writes the whole file or leaves it as it was."""
    partial_file = file.with_name(f"{file.name}.partial")
    partial_file.write_text(json.dumps(content, indent=2) + "\n")
    partial_file.replace(file)


def columns_of(settings: Settings, rows: Sequence[Row]) -> list[tuple[str, str, list[str]]]:
    """The name, the unit and the cells of each column."""
    ranks = rows[0].world_size
    return [
        ("size", "(B)", [str(settings.numel * settings.itemsize) for _ in rows]),
        ("count", "", [str(settings.numel) for _ in rows]),
        ("type", "", [settings.dtype for _ in rows]),
        ("algorithm", "", [named(row) for row in rows]),
        ("turns", "", [str(row.turns) for row in rows]),
        ("time min", "(us)", [f"{row.time_us.min:.1f}" for row in rows]),
        ("median", "(us)", [f"{row.time_us.median:.1f}" for row in rows]),
        ("max", "(us)", [f"{row.time_us.max:.1f}" for row in rows]),
        ("algbw", "(GB/s)", [f"{bandwidth(settings, row):.3f}" for row in rows]),
        (
            "busbw",
            "(GB/s)",
            [f"{bandwidth(settings, row) * 2 * (ranks - 1) / ranks:.3f}" for row in rows],
        ),
        ("sent", "(B)", [f"{max(row.sent_bytes):.0f}" for row in rows]),
        ("received", "(B)", [f"{max(row.received_bytes):.0f}" for row in rows]),
        ("msgs", "", [f"{max(row.messages):g}" if row.messages else "-" for row in rows]),
        ("model", "(B)", [f"{row.model_bytes:.0f}" for row in rows]),
        ("nnz", "", [f"{row.result_nnz:.0f}" for row in rows]),
        ("select", "(us)", [optional(row.select_us) for row in rows]),
        ("exchange", "(us)", [optional(row.exchange_us) for row in rows]),
        ("apply", "(us)", [optional(row.apply_us) for row in rows]),
        (
            "alone",
            "(us)",
            [
                "-" if row.exchange_alone_us is None else f"{row.exchange_alone_us.median:.1f}"
                for row in rows
            ],
        ),
    ]


def table(settings: Settings, rows: Sequence[Row]) -> str:
    """The rows in nccl-tests' manner, and what they come to."""
    ranks = rows[0].world_size
    counted = [row.transport for row in rows if row.algorithm != GLOO_DENSE]
    transport = counted[0] if counted else "none of ours"
    lines = [
        f"# allreduce: {ranks} {'rank' if ranks == 1 else 'ranks'}, transport "
        f"{transport}, pattern {settings.pattern.name}, density "
        f"{settings.density:g} (k = {settings.k}), index codec {settings.index_codec}, "
        f"value codec {settings.value_codec}, "
        f"seed {settings.seed}",
        f"# {rows[0].iters} iterations after {settings.warmup} of warm-up, interleaved; results "
        "are the same bits on every rank",
        "# sparsecomm bench allreduce --help explains every word",
    ]
    computed = ", ".join(named(row) for row in rows if row.messages is None)
    if computed:
        lines.append(f"# {computed}: bytes are computed as 2(P-1)/P * size, all others are counted")
    cells = [[name, unit, *values] for name, unit, values in columns_of(settings, rows)]
    widths = [max(map(len, column)) for column in cells]
    for index, line in enumerate(zip(*cells, strict=True)):
        lead = "# " if index < 2 else "  "
        padded = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append((lead + "  ".join(padded)).rstrip())
    lines += [f"# {line}" for line in conclusion(rows).splitlines()]
    return "\n".join(lines)


def conclusion(rows: Sequence[Row]) -> str:
    """Names the quickest by its median, and compares it with a dense and a sparse allreduce."""
    ordered = sorted(rows, key=lambda row: row.time_us.median)
    quickest = ordered[0]
    sparse = [row for row in ordered if is_sparse(row.chosen or row.algorithm)]
    dense = [row for row in ordered if row not in sparse and row.algorithm != PLANNED]
    dense.sort(key=lambda row: row.algorithm != GLOO_DENSE)
    text = f"quickest: {named(quickest)}, {quickest.time_us.median:.1f} us"
    if not dense:
        text += f"; to compare it with a dense allreduce, add {GLOO_DENSE} to --algorithm"
    elif quickest is not dense[0]:
        median = dense[0].time_us.median
        ratio = median / quickest.time_us.median
        text += f", {ratio:.2f} times as quick as {dense[0].algorithm}, {median:.1f} us"
    if quickest not in sparse and sparse:
        ratio = sparse[0].time_us.median / quickest.time_us.median
        text += f"; {named(sparse[0])} takes {ratio:.2f} times as long"
    elif not sparse:
        text += "; to compare it with a sparse allreduce, add oktopk to --algorithm"
    return (
        f"{text}\nof the exchange, selection and residual included; of a training step DDP hides "
        "part of a dense exchange: sparsecomm plan --step-time"
    )


def named(row: Row) -> str:
    return row.algorithm if row.chosen is None else f"{row.algorithm}:{row.chosen}"


def bandwidth(settings: Settings, row: Row) -> float:
    return settings.numel * settings.itemsize / row.time_us.median / 1e3


def optional(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"

"""``sparsecomm plan``: what each algorithm would take on a link given by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any, TypeVar

from sparsecomm.build import build_info
from sparsecomm.cli.bench import UsageError, at_least_1, numel, share
from sparsecomm.cli.measure import DTYPES
from sparsecomm.planning import Link, explain
from sparsecomm.units import parse_bandwidth, parse_seconds

T = TypeVar("T")

DESCRIPTION = """\
Predicts how long a step takes with each algorithm: selecting, exchanging, writing the result. The
link is given by hand; the rates of the kernels are measured here, so run it on a machine like those
of the cluster. Nothing is exchanged.
"""

EPILOG = """\
first line:
  entries      of the gradient
  density      share of them that each rank selects
  ranks        as given
  union        entries that at least one rank selects: between those of one rank and of all together
  link         bandwidth, of each rank, and latency, until a message has come, as given
  overhead     of each message beside that

first table, of the exchange:
  algorithm    in brackets: not chosen by auto
  step         the whole exchange, the sum of select to apply; the rows are in its order
  dense/step   step of the row dense over this row's: how many times as quick
  select       the check for NaN, the threshold and the selection
  latency      waiting for messages
  transfer     the bytes on the link
  compute      encoding, decoding and summing
  apply        writing the result
  received     bytes, by one rank
  messages     sent by one rank
  codecs       of the indices and values that a rank sends, the smallest; dense: all values are sent

second table, of whole training steps, with --step-time:
  method       ddp: plain DDP, its allreduce taken to be a ring; else an algorithm as a hook runs it
  whole step   step time + select + exchange - hidden; the rows are in its order
  ddp/step     whole step of the row ddp over this row's: how many times as quick
  step time    as given
  select       as above; 0 if the check for NaN is part of the exchange, or there is none
  exchange     everything else that the method adds, the bytes' time and the processor's
  hidden       the part of the exchange during which the backward pass goes on

The backward pass is taken for two thirds of the step time. Buckets become complete evenly over it;
an exchange starts when its bucket is complete and the previous exchange has ended. So the last
bucket is not hidden. ddp and dense_overlap exchange buckets, every other method the whole gradient
when the pass has ended.

example:
  sparsecomm plan --numel 14.7M --density 0.01 --ranks 8 --bandwidth 10gbit --step-time 150ms
"""


def add_plan(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "plan",
        help="predict what each algorithm takes on a link",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_plan, parser=parser)
    add = parser.add_argument
    add("--numel", type=numel, required=True, metavar="N", help="entries, such as 14.7M")
    add("--density", type=share, default=0.01, metavar="D", help="share selected (0.01)")
    add("--ranks", type=at_least_1, required=True, metavar="P", help="ranks")
    add(
        "--aggregators",
        type=at_least_1,
        default=0,
        metavar="A",
        help="that the ranks reach over links as good as theirs (none)",
    )
    add(
        "--bandwidth",
        type=reading(parse_bandwidth),
        required=True,
        metavar="B",
        help="of each rank's link, such as 25gbit",
    )
    add(
        "--latency",
        type=reading(parse_seconds),
        default=20e-6,
        metavar="T",
        help="until a message has come (20us)",
    )
    add(
        "--overhead",
        type=reading(parse_seconds),
        default=2e-6,
        metavar="T",
        help="of each message beside that (2us)",
    )
    add(
        "--union",
        type=reading(float),
        metavar="U",
        help="entries of the union of all selections over those of one, from 1 to P (as of random "
        "positions)",
    )
    codecs = build_info()
    add("--index-codec", choices=("smallest", *codecs["index_codecs"]), default="smallest")
    add(
        "--value-codec",
        choices=codecs["value_codecs"],
        default="raw",
        help="of the algorithms that round (raw)",
    )
    add("--dtype", choices=DTYPES, default="f32", help="of the gradient (f32)")
    add(
        "--momentum",
        action="store_true",
        help="the exchange applies the optimizer's momentum, as after sparsecomm.prepare",
    )
    add(
        "--step-time",
        type=reading(seconds_or_time),
        metavar="T",
        help="of a training step without any exchange, such as 150ms or 0.15: also predict whole "
        "steps, and what plain DDP hides behind the backward pass",
    )
    add(
        "--bucket-cap-mb",
        type=at_least_1,
        metavar="MB",
        help="DDP's argument of that name, with --step-time (25, after a first bucket of 1)",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def reading(parse: Callable[[str], T]) -> Callable[[str], T]:
    """An argument's type whose errors say what was wrong."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


def seconds_or_time(text: str) -> float:
    """Reads seconds, with a unit or without."""
    try:
        return float(text)
    except ValueError:
        return parse_seconds(text)


def run_plan(options: argparse.Namespace) -> int:
    try:
        explanation = explain(
            options.numel,
            options.density,
            link=Link(options.latency, options.overhead, options.bandwidth),
            ranks=options.ranks,
            aggregators=options.aggregators,
            union=options.union,
            dtype=DTYPES[options.dtype],
            momentum=options.momentum,
            index_codec=options.index_codec,
            value_codec=options.value_codec,
            step_seconds=options.step_time,
            bucket_cap_mb=options.bucket_cap_mb,
        )
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.json:
        print(json.dumps(explanation.to_dict(), indent=2))
    else:
        print(f"(sparsecomm plan --help explains every word)\n{explanation}")
    return 0

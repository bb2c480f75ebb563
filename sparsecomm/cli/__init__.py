"""The command ``sparsecomm``: what is installed here, whether it works, and how fast it is."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from sparsecomm.build import __version__, build_info
from sparsecomm.cli import aggregator, bench, codecs, doctor, ina, kernels, load, plan, timeline


class Parser(argparse.ArgumentParser):
    """Complains on one rank: under torchrun all are given the same arguments."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)
        super().error(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 after a failure, 2 for bad arguments."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    chosen: Parser = options.parser
    run: Callable[[argparse.Namespace], int] | None = options.run
    if run is None:
        chosen.print_help(sys.stderr)
        return 2
    try:
        return run(options)
    except bench.UsageError as error:
        chosen.error(str(error))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="sparsecomm",
        description="Sparse gradient exchange for data-parallel training with PyTorch.",
    )
    parser.add_argument("--version", action="version", version=f"sparsecomm {__version__}")
    parser.set_defaults(run=None, parser=parser)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    benchmarks = commands.add_parser(
        "bench",
        help="measure collectives, aggregators, transports, the wire format or the kernels",
        description="Measures collectives, allreduces through aggregators or transports between "
        "the ranks of torchrun, or between ranks that it starts on this machine, or the codecs of "
        "the wire format, or the kernels.",
    )
    benchmarks.set_defaults(run=None, parser=benchmarks)
    subjects = benchmarks.add_subparsers(title="subjects", metavar="SUBJECT")
    bench.add_allreduce(subjects)
    bench.add_transport(subjects)
    ina.add_ina(subjects)
    load.add_load(subjects)
    codecs.add_codecs(subjects)
    kernels.add_kernels(subjects)

    plan.add_plan(commands)

    doctor.add_doctor(commands)

    aggregator.add_aggregator(commands)

    timeline.add_timeline(commands)

    info = commands.add_parser(
        "info",
        help="print what this installation consists of",
        description="Prints the versions and the compiled parts of this installation.",
    )
    info.add_argument("--json", action="store_true", help="print JSON instead of a table")
    info.set_defaults(run=print_info, parser=info)
    return parser


def print_info(options: argparse.Namespace) -> int:
    info = build_info()
    if options.json:
        print(json.dumps(info, indent=2))
        return 0
    width = max(map(len, info))
    for name, value in info.items():
        if isinstance(value, (list, tuple)):
            value = ", ".join(map(str, value))
        elif isinstance(value, dict):
            value = "; ".join(f"{key}: {text}" for key, text in value.items())
        elif isinstance(value, bool):
            value = "compiled" if value else "not compiled"
        print(f"{name:{width}}  {value}")
    return 0

"""Command-line options whose mistakes are reported once, whatever the number of ranks."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import NoReturn

from common.launcher import LAUNCHERS, is_first_rank


class Parser(argparse.ArgumentParser):
    """Complains on one rank: the others were given the same arguments."""

    def error(self, message: str) -> NoReturn:
        if not is_first_rank():
            sys.exit(2)
        super().error(message)


def add_run_options(parser: argparse.ArgumentParser, epochs: str, output: str) -> None:
    """Those of every example; what an epoch passes over, and the default folder, for the help."""
    add = parser.add_argument
    add("--launcher", choices=LAUNCHERS, default="torchrun", help="what has started the ranks")
    add("--epochs", type=positive, default=5, help=f"passes over the {epochs}")
    add("--output", type=Path, default=None, help=f"folder of the results ({output})")
    add("--checkpoint-every", type=natural, default=0, metavar="EPOCHS", help="0: never")
    add("--resume", action="store_true", help="go on from the checkpoint in the output folder")


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share above 0 and up to 1")
    return value


def shares(text: str) -> list[float]:
    return [share(part) for part in text.split(",") if part]


def natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def positive_real(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value

"""Command-line options whose mistakes are reported once, whatever the number of ranks."""

from __future__ import annotations

import argparse
import math
import sys
from typing import NoReturn

from common.launcher import is_first_rank


class Parser(argparse.ArgumentParser):
    """Complains on one rank: the others were given the same arguments."""

    def error(self, message: str) -> NoReturn:
        if not is_first_rank():
            sys.exit(2)
        super().error(message)


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share above 0 and up to 1")
    return value


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

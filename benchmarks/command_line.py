"""What the command lines of the benchmarks have in common."""

from __future__ import annotations

import argparse


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser whose help begins with the first line of a program's docstring.

    Args:
        doc: the program's ``__doc__``.
    """
    assert doc is not None
    return argparse.ArgumentParser(
        description=doc.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

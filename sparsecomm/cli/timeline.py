"""``sparsecomm timeline``: makes one timeline of those of all ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from sparsecomm.tracing import merge

DESCRIPTION = """\
Makes one timeline of those that ranks have recorded by sparsecomm.timeline() or with the variable
SPARSECOMM_TIMELINE, for https://ui.perfetto.dev. Clocks of hosts are compared by the rounds that
ranks have ended together.
"""


def add_timeline(commands: Any) -> None:
    parser = commands.add_parser(
        "timeline",
        help="work on what ranks have recorded",
        description="Works on timelines: what sparsecomm's operations did, and when.",
    )
    parser.set_defaults(run=None, parser=parser)
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND")
    merging = verbs.add_parser(
        "merge",
        help="make one timeline of those of all ranks",
        description=DESCRIPTION,
        epilog="example:\n  sparsecomm timeline merge run.rank*.json --output run.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    merging.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of one rank each")
    merging.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="FILE",
        help="to write; compressed if it ends with .gz",
    )
    merging.set_defaults(run=run_merge, parser=merging)


def run_merge(options: argparse.Namespace) -> int:
    try:
        apart = merge(options.files, options.output)
    except (OSError, ValueError) as error:
        print(f"sparsecomm timeline merge: {error}", file=sys.stderr)
        return 1
    if apart:
        print(
            f"ranks {', '.join(map(str, apart))} share no round with the lowest rank: their times "
            "are by their hosts' clocks",
            file=sys.stderr,
        )
    print(f"{options.output}: {len(options.files)} ranks")
    return 0

"""Writes the table of algorithms in docs/algorithms.md from the table in the code.

--check only compares: exit status 1, and what to do, where they differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from sparsecomm import _C

PAGE = Path(__file__).resolve().parents[1] / "docs" / "algorithms.md"
BEGIN, END = "<!-- algorithms: written by `make docs` -->\n", "<!-- end of algorithms -->\n"
RANKS = 16


def result(row: dict[str, object]) -> str:
    if not row["sparse"]:
        return "every entry"
    return "the k largest" if row["top_k_result"] else "the union"


def table() -> str:
    lines = [
        f"| name | what travels | messages, P = {RANKS} | words received | result | source |",
        "|---|---|---|---|---|---|",
    ]
    for row in _C.algorithms():
        messages, _ = _C.cost(row["name"], ranks=RANKS, extent=1 << 20, k=1 << 14, value_bytes=4)
        cells = [f"`{row['name']}`", row["description"], f"{messages:.0f}", row["words"]]
        lines.append(f"| {' | '.join([*cells, result(row), row['source']])} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{PAGE} has no lines {BEGIN.strip()} and {END.strip()} around its table")
    wanted = before + BEGIN + table() + END + after
    if wanted == page:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"the table in {PAGE} is not that of the code; run make docs", file=sys.stderr)
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""English prose and Python code, from the standard library that is installed: is it prose?

Documents are the paragraphs of docstrings (label 1) and the bodies of functions (label -1). Their
words and pairs of neighbouring words are hashed to features, with a sign from another bit of the
hash (Weinberger et al. 2009), and each document is scaled to length 1. Punctuation is left out.
"""

from __future__ import annotations

import ast
import math
import random
import re
import zlib
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path

from common.prose import documented, modules, paragraphs

FEATURES = 1 << 20
FEWEST_WORDS = 6

_WORD = re.compile(r"[a-z]+")


def write(path: Path, features: int, limit: int | None = None) -> None:
    """Writes the documents in svmlight's format, in an order mixed once and for all.

    Args:
        path: the file, which appears when it is complete.
        features: the columns that words are hashed to.
        limit: the most documents.
    """
    vectors = ((label, hashed(text, features)) for label, text in documents())
    lines = [
        f"{label:+d} {vector}\n"
        for label, vector in islice((pair for pair in vectors if pair[1] is not None), limit)
    ]
    random.Random(0).shuffle(lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(lines))
    partial.replace(path)


def documents() -> Iterator[tuple[int, str]]:
    """Labels and texts."""
    for _, source, tree in modules():
        lines = source.splitlines()
        for node, docstring in documented(tree):
            if docstring is not None:
                for paragraph in paragraphs(docstring):
                    yield 1, paragraph
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if docstring is not None else node.body
                if body:
                    yield -1, "\n".join(lines[body[0].lineno - 1 : node.end_lineno])


def hashed(text: str, features: int) -> str | None:
    """The text's features as svmlight has them; None if it has too few words."""
    words = _WORD.findall(text.lower())
    if len(words) < FEWEST_WORDS:
        return None
    counts: dict[int, int] = {}
    for token in (*words, *map(" ".join, pairwise(words))):
        number = zlib.crc32(token.encode())
        column = number % features
        counts[column] = counts.get(column, 0) + (1 if number >> 31 else -1)
    length = math.sqrt(sum(count * count for count in counts.values()))
    if length == 0:
        return None
    entries = sorted(counts.items())
    return " ".join(f"{column}:{count / length:.6g}" for column, count in entries if count)

"""Documents to train on: prose of this Python installation, or those of a folder.

They come as paragraphs, each with the place where its document begins. Of a folder one line is held
at a time.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, count
from pathlib import Path
from pydoc_data.topics import topics
from typing import NoReturn

from common.errors import DataError
from common.prose import LIBRARY, documented, modules, paragraphs

PROSE = "prose"
FOLDER = "text:"
LONGEST_LINE = 1 << 24  # bytes; what has a longer one is no text
LONGEST_PARAGRAPH = 1 << 16  # characters; longer ones go in parts

# In prose of the library, not of its examples, grammars and tables.
FEWEST_WORDS = 6
FEWEST_LETTERS = 0.85  # of the characters, blanks among them

# The place where a document begins, and one of its paragraphs.
Paragraph = tuple[str, str]

_WIKI = re.compile(r"wiki_\d+")
_OPENING = re.compile(r'<doc id="[^"]*" (?:revid="[^"]*" )?url=".*" title=".*">')
_Lines = Iterator[tuple[int, str]]


def add_data_option(parser: argparse.ArgumentParser) -> None:
    """Adds --data, which :func:`read` takes."""
    what = f"{PROSE} of Python's library, or {FOLDER}FOLDER"
    parser.add_argument("--data", type=_source, default=PROSE, help=what)


def _source(text: str) -> str:
    if text != PROSE and not (text.startswith(FOLDER) and text != FOLDER):
        raise argparse.ArgumentTypeError(f"{text!r} is neither {PROSE} nor {FOLDER}FOLDER")
    return text


def read(spec: str) -> Iterator[Paragraph]:
    """The paragraphs of `prose` or `text:FOLDER`, document after document.

    Every file below the folder that is not hidden is a document, or holds extracts of Wikipedia as
    WikiExtractor writes them, with `<doc ...>` and `</doc>` around each or as JSON.

    Raises:
        DataError: the folder has no files, or one cannot be read, is not UTF-8, or is malformed.
    """
    if spec == PROSE:
        return iter(prose())
    return chain.from_iterable(map(_read_file, files(spec)))


def fingerprint(spec: str) -> str:
    """A digest of what the data are, by the names, sizes and times of files."""
    if spec == PROSE:
        described = [sys.version]
    else:
        described = []
        for path in files(spec):
            try:
                stat = path.stat()
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from None
            described.append(f"{path} {stat.st_size} {stat.st_mtime_ns}")
    return hashlib.sha256("\n".join(described).encode("utf-8", "surrogateescape")).hexdigest()


# The Python installation


@cache
def prose() -> list[Paragraph]:
    """What pydoc tells on each topic, the docstrings of each module, and the licence.

    A paragraph that is there several times is left out but for the first.
    """
    places: dict[str, str] = {}
    for place, text in _library():
        for paragraph in paragraphs(text):
            line = " ".join(paragraph.split())
            if is_prose(line):
                places.setdefault(line, place)
    return [(place, line) for line, place in places.items()]


def _library() -> Iterator[tuple[str, str]]:
    yield from topics.items()
    for path, _, tree in modules():
        for _, docstring in documented(tree):
            yield str(path), docstring or ""
    licence = LIBRARY / "LICENSE.txt"
    if licence.exists():  # distributions keep it elsewhere
        yield str(licence), licence.read_text(encoding="utf-8")


def is_prose(text: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in text)
    enough = len(text.split()) >= FEWEST_WORDS and letters >= FEWEST_LETTERS * len(text)
    return enough and ">>>" not in text and "::=" not in text


# A folder


def files(spec: str) -> Iterator[Path]:
    """The files of `text:FOLDER`, in the order of their names."""
    folder = spec.removeprefix(FOLDER)

    def refuse(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename}: {error.strerror}") from None

    empty = True
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(name for name in names if not name.startswith(".")):
            empty = False
            yield Path(parent, name)
    if empty:
        raise DataError(f"{folder}: a folder without files; put one document into each")


def _read_file(path: Path) -> Iterator[Paragraph]:
    lines = _lines(path)
    first = next(lines, None)
    if first is None:
        return
    parse: Callable[[Path, _Lines], Iterator[Paragraph]] = _parse_text
    if _OPENING.match(first[1]):
        parse = _parse_extracts
    elif _WIKI.fullmatch(path.name):
        if not first[1].startswith("{"):
            raise DataError(f'{path}:1: begins neither with <doc id="..."> nor with a JSON object')
        parse = _parse_json
    yield from parse(path, chain([first], lines))


def _lines(path: Path) -> _Lines:
    """Lines that are not blank without the blanks around them, and "" for others; numbered."""
    try:
        with path.open("rb") as file:
            for number in count(1):
                line = file.readline(LONGEST_LINE)
                if not line:
                    return
                if len(line) == LONGEST_LINE:
                    raise DataError(f"{path}:{number}: longer than {LONGEST_LINE} bytes: no text")
                try:
                    yield number, line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}; "
                        "convert or decompress the file, or take it out of the folder"
                    ) from None
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from None


def _parse_text(path: Path, lines: _Lines) -> Iterator[Paragraph]:
    """One document, whose paragraphs end with blank lines."""
    gathered: list[str] = []
    size = 0
    for _, line in lines:
        gathered.append(line)
        size += len(line)
        if not line or size > LONGEST_PARAGRAPH:
            yield str(path), " ".join(gathered)
            gathered, size = [], 0
    yield str(path), " ".join(gathered)


def _parse_extracts(path: Path, lines: _Lines) -> Iterator[Paragraph]:
    """Documents of a line `<doc id="" url="" title="">`, the title, paragraphs, and `</doc>`."""
    opened = 0  # in which line
    for number, line in lines:
        if _OPENING.fullmatch(line):
            if opened:
                raise DataError(f"{path}:{opened}: <doc> is still open at the next, line {number}")
            opened = number
        elif line == "</doc>":
            if not opened:
                raise DataError(f"{path}:{number}: </doc> without <doc> before it")
            opened = 0
        elif line and not opened:
            raise DataError(f"{path}:{number}: {line[:40]!r} is in no <doc>")
        elif number > opened + 1:
            yield f"{path}:{opened}", html.unescape(line)
    if opened:
        raise DataError(f"{path}:{opened}: <doc> is not closed: is the file cut off?")


def _parse_json(path: Path, lines: _Lines) -> Iterator[Paragraph]:
    """A document a line, an object whose "text" has a paragraph a line."""
    for number, line in lines:
        if not line:
            continue
        try:
            document = json.loads(line)
            json.dumps(document, ensure_ascii=False).encode()  # no half of a surrogate pair
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: not JSON: {error}") from None
        text = document.get("text") if isinstance(document, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{path}:{number}: expected an object with a "text" that is a string')
        for paragraph in text.splitlines():
            yield f"{path}:{number}", html.unescape(paragraph)

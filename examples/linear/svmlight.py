"""Examples streamed from a file in the format of libsvm and svmlight.

A line holds a label and the entries of a sparse vector, `+1 3:0.5 17:-2 # comment`, with indices
that ascend. Each rank reads its share of the bytes, line by line, and holds a few batches of it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common.errors import DataError
from torch import Tensor

LONGEST_LINE = 1 << 24  # bytes; what has a longer one is another kind of file
LARGEST_INDEX = (1 << 32) - 4  # what a sparse exchange takes
LARGEST_VALUE = 1e15  # so that sums of squares fit into float32
HELD_OUT = 10  # every tenth example of a share is kept from training

_NUMBER = rb"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_LINE = re.compile(rb"[ \t]*(" + _NUMBER + rb")((?:[ \t]+\d+:" + _NUMBER + rb")*)\s*")
_ENTRY = re.compile(rb"\d+:" + _NUMBER)


@dataclass(frozen=True)
class Rows:
    """Some examples: sparse vectors one after another, and labels of -1 and 1."""

    lengths: Tensor  # int64, entries of each example
    columns: Tensor  # int64, ascending within an example
    values: Tensor  # float32
    labels: Tensor  # float32

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def rows(self) -> Tensor:
        """The example of each entry."""
        return torch.repeat_interleave(self.lengths)

    def take(self, chosen: Tensor) -> Rows:
        """The examples at `chosen`, in its order."""
        lengths = self.lengths[chosen]
        starts = (self.lengths.cumsum(0) - self.lengths)[chosen]
        entries = ranges(starts, lengths)
        return Rows(lengths, self.columns[entries], self.values[entries], self.labels[chosen])


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """starts[0], starts[0] + 1, ... for lengths[0] numbers, then from starts[1], and so on."""
    ends = lengths.cumsum(0)
    offsets = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return offsets + torch.arange(offsets.numel())


class Share:
    """A rank's part of a file: the lines that begin in the rank-th of as many equal parts.

    Raises:
        DataError: the file is missing, empty or cannot be read.
    """

    def __init__(self, path: Path, rank: int, ranks: int) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, os.SEEK_END)
                if self.size:
                    file.seek(-1, os.SEEK_END)
                    last = file.read(1)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}") from None
        if self.size == 0:
            raise DataError(f"{path}: the file is empty")
        if last != b"\n":
            raise DataError(
                f"{path}: cut off: its last line has no end; if it is whole, append a newline"
            )
        self.start = self.size * rank // ranks
        self.end = self.size * (rank + 1) // ranks

    def blocks(self, examples: int, held_out: bool) -> Iterator[Rows]:
        """The examples for training, or those held out, at most so many at a time.

        Raises:
            DataError: a line is malformed, or the file has changed or cannot be read.
        """
        lines: list[tuple[int, bytes]] = []
        for number, (offset, line) in enumerate(self._lines()):
            if (number % HELD_OUT == HELD_OUT - 1) == held_out:
                lines.append((offset, line))
            if len(lines) == examples:
                yield self._parse(lines)
                lines = []
        if lines:
            yield self._parse(lines)

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        """Where each line that is not blank begins, and the line without its comment."""
        try:
            with self.path.open("rb") as file:
                position = self.start
                if position:  # the line before it may reach into this share
                    file.seek(position - 1)
                    position += len(self._line(file.readline(LONGEST_LINE), position)) - 1
                while position < self.end:
                    line = self._line(file.readline(LONGEST_LINE), position)
                    content = line.partition(b"#")[0]
                    if not content.isspace() and content:
                        yield position, content
                    position += len(line)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror or error}") from None

    def _line(self, line: bytes, position: int) -> bytes:
        if line.endswith(b"\n"):
            return line
        if len(line) == LONGEST_LINE:
            reason = f"longer than {LONGEST_LINE} bytes: is this a text file?"
        else:
            reason = f"the file has become shorter than {self.size} bytes"
        raise self._error(position, reason)

    def _parse(self, lines: list[tuple[int, bytes]]) -> Rows:
        labels, parts = [], []
        for offset, line in lines:
            match = _LINE.fullmatch(line)
            if match is None:
                raise self._error(offset, _what_is_wrong(line))
            labels.append(float(match[1]))
            parts.append(match[2])
        lengths = np.array([part.count(b":") for part in parts], dtype=np.int64)
        text = b" ".join(parts).replace(b":", b" ")
        numbers = np.fromstring(text, dtype=np.float64, sep=" ") if lengths.any() else np.empty(0)
        columns, values = numbers[0::2], numbers[1::2]
        self._check(lines, np.array(labels), lengths, columns, values)
        return Rows(
            torch.from_numpy(lengths),
            torch.from_numpy(columns.astype(np.int64)),
            torch.from_numpy(values.astype(np.float32)),
            torch.tensor([1.0 if label > 0 else -1.0 for label in labels]),
        )

    def _check(
        self,
        lines: list[tuple[int, bytes]],
        labels: np.ndarray[tuple[int], np.dtype[np.float64]],
        lengths: np.ndarray[tuple[int], np.dtype[np.int64]],
        columns: np.ndarray[tuple[int], np.dtype[np.float64]],
        values: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> None:
        rows = np.repeat(np.arange(len(lengths)), lengths)

        def refuse(row: int, reason: str) -> None:
            raise self._error(lines[row][0], reason)

        for row in np.flatnonzero(~np.isin(labels, (-1, 0, 1)))[:1]:
            refuse(row, f"the label is {labels[row]:g}, expected 1, or for the other class -1 or 0")
        for entry in np.flatnonzero(columns > LARGEST_INDEX)[:1]:
            refuse(rows[entry], f"index {columns[entry]:.0f} is above {LARGEST_INDEX}")
        for entry in np.flatnonzero(np.abs(values) > LARGEST_VALUE)[:1]:
            refuse(
                rows[entry], f"{columns[entry]:.0f}:{values[entry]:g} is beyond {LARGEST_VALUE:g}"
            )
        falls = (columns[1:] <= columns[:-1]) & (rows[1:] == rows[:-1])
        for entry in np.flatnonzero(falls)[:1]:
            refuse(
                rows[entry],
                f"index {columns[entry + 1]:.0f} follows {columns[entry]:.0f}: they must ascend",
            )

    def _error(self, offset: int, reason: str) -> DataError:
        """The error with the line's number, for which the file is read up to there."""
        number, left = 1, offset
        with self.path.open("rb") as file:
            while left > 0 and (part := file.read(min(left, 1 << 20))):
                number, left = number + part.count(b"\n"), left - len(part)
        return DataError(f"{self.path}:{number}: {reason}")


def _what_is_wrong(line: bytes) -> str:
    label, *entries = line.split()
    if re.fullmatch(_NUMBER, label) is None:
        return f"{_shown(label)} is not a label"
    for entry in entries:
        if _ENTRY.fullmatch(entry) is None:
            return f"{_shown(entry)} is not index:value with a finite decimal number"
    return "malformed"


def _shown(token: bytes) -> str:
    return repr(token[:40].decode("latin1"))

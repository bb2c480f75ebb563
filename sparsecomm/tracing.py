"""Timelines: what sparsecomm's operations did on each rank, and when, for Perfetto to show."""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import logging
import os
import statistics
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

import torch.distributed as dist

from sparsecomm import _C

VARIABLE = "SPARSECOMM_TIMELINE"
_LOG = logging.getLogger("sparsecomm")
# Ranks' clocks, which drift by some millionths, are compared once for each such time, in
# nanoseconds.
_WINDOW = 10 * 10**9


class Timeline:
    """A recording on this rank; :func:`timeline` makes it."""

    def __init__(self, path: str | Path) -> None:
        self._given = Path(path).absolute()
        if self._given.suffix == ".gz":
            raise ValueError(
                f"{path}: a recording is not compressed; give a name that ends with .json, and "
                "have `sparsecomm timeline merge` compress"
            )
        self._path: Path | None = None

    @property
    def path(self) -> Path | None:
        """The file of this rank, ``None`` as long as none is written."""
        return self._path

    def __enter__(self) -> Timeline:
        _process.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _process.leave(self)

    def _start(self, file: _C.TimelineFile, rank: int) -> None:
        name = self._given.name.removesuffix(".json") + f".rank{rank}.json"
        path = self._given.with_name(name)
        file.start(str(path), rank)
        self._path = path
        _LOG.info("rank %d writes its timeline to %s", rank, path)


def timeline(path: str | Path) -> Timeline:
    """Records what sparsecomm's operations do in a ``with`` block, in this process.

    Each rank writes a file of its own: ``timeline("run.json")`` on rank 3 writes
    ``run.rank3.json``, while the recording goes on. The files are in Chrome's Trace Event Format,
    which https://ui.perfetto.dev opens; ``sparsecomm timeline merge`` makes one of those of all
    ranks. Every communicator of the process is in it, with a row for each name, group of parameters
    and the like, and one for the rounds in which ranks agree on what runs: docs/observing.md says
    what the slices are. Where ``torch.distributed`` is not initialised yet, the file is made when
    the first ranks are connected.

    ``SPARSECOMM_TIMELINE=run.json`` records a whole program; ``with`` blocks in it record nothing,
    and warn. A file grows by about 1 KB for each group of parameters and step. What goes wrong with
    it once the block has been entered is logged, and ends no training.

    Raises:
        ValueError: the name ends with ``.gz``.
        RuntimeError: entered, another timeline is being recorded, or the file cannot be written.
    """
    return Timeline(path)


class _Process:
    """The recordings of this process, of which one goes on at a time."""

    def __init__(self) -> None:
        self.file = _C.TimelineFile()
        self._lock = threading.RLock()
        self._active: Timeline | None = None
        self._followed = False  # the variable
        self._whole: Timeline | None = None  # that it asks for
        self._numbers: dict[tuple[int, ...], int] = {}  # of communicators, by their ranks

    def enter(self, wanted: Timeline) -> None:
        with self._lock:
            active = self._active
            if active is not None and active is self._whole:
                _LOG.warning(
                    "%s is not written: %s asks for a timeline of the whole program, in %s",
                    *(wanted._given, VARIABLE, active.path),
                )
                return
            if active is not None:
                raise RuntimeError(
                    f"a timeline is being recorded to {active.path or active._given}; end it "
                    "before another one begins"
                )
            if dist.is_available() and dist.is_initialized():
                wanted._start(self.file, dist.get_rank())
            self._active = wanted

    def leave(self, wanted: Timeline) -> None:
        with self._lock:
            if self._active is not wanted:
                return
            try:
                self.file.stop()
            except RuntimeError as error:
                _LOG.warning("%s", error)
            self._active = None
            if wanted.path is None:
                _LOG.warning("no timeline was written to %s: nothing was exchanged", wanted._given)

    def _follow(self, wanted: str) -> None:
        if self._active is not None:
            _LOG.warning(
                "%s=%s records nothing: another timeline is being recorded to %s",
                *(VARIABLE, wanted, self._active.path or self._active._given),
            )
            return
        try:
            self._whole = self._active = Timeline(wanted)
        except ValueError as error:
            _LOG.warning("no timeline is recorded: %s", error)
            return
        atexit.register(self.leave, self._whole)

    def connects(self, ranks: Sequence[int], rank: int, wanted: str) -> int:
        """Starts what waits for a rank to be known, or what the variable, if it is set, asks for.

        Returns the number of the communicator that is made among those of its ranks.
        """
        with self._lock:
            if wanted and not self._followed:
                self._followed = True
                self._follow(wanted)
            active = self._active
            if active is not None and active.path is None:
                try:
                    active._start(self.file, ranks[rank])
                except (RuntimeError, ValueError) as error:
                    # The other ranks are connecting: they would wait for this one.
                    _LOG.warning("no timeline is recorded: %s", error)
                    self._active = None
            members = tuple(ranks)
            self._numbers[members] = self._numbers.get(members, -1) + 1
            return self._numbers[members]


_process = _Process()
_of_parents: list[_Process] = []  # which are left alone


def _forget_parent() -> None:
    global _process
    _of_parents.append(_process)
    _process = _Process()


os.register_at_fork(after_in_child=_forget_parent)


def recorded(
    title: str, ranks: Sequence[int], rank: int, variables: Mapping[str, str]
) -> _C.TimelineOptions:
    """Returns where a communicator is to record what it does.

    Every member calls it, in the same order.

    Args:
        title: of the communicator.
        ranks: of its members among all processes, in its own order.
        rank: of this process in that order.
        variables: of the environment, as ``sparsecomm.transports.settings`` has them.
    """
    number = _process.connects(ranks, rank, variables.get(VARIABLE, ""))
    return _C.TimelineOptions(_process.file, title, list(ranks), number)


# What ranks of a communicator know it by: its members, and its number among those with the same.
_Group = tuple[tuple[int, ...], int]


@dataclass
class _Recording:
    path: Path
    rank: int = -1
    began: int = 0  # nanoseconds since 1970
    communicators: dict[int, _Group] = field(default_factory=dict)  # by process
    # When a round ended, in nanoseconds since the recording began, by process and number.
    rounds: dict[int, dict[int, int]] = field(default_factory=dict)

    def groups(self) -> Iterator[tuple[_Group, dict[int, int]]]:
        for process, group in self.communicators.items():
            yield group, self.rounds.get(process, {})


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """Yields a recording's events; the last line may be missing, or half of it."""
    with path.open(encoding="utf-8") as lines:
        if lines.readline().strip() != "[":
            raise ValueError(f"{path} is no timeline of sparsecomm: give what it has recorded")
        pending: str | None = None
        for line in lines:
            if pending is not None:
                yield _event(path, pending)
            pending = line.strip().removesuffix(",")
            if pending == "]":
                return
        if pending:
            with contextlib.suppress(ValueError):
                yield _event(path, pending)


def _event(path: Path, line: str) -> dict[str, Any]:
    try:
        event = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(event, dict) or not {"ph", "pid", "tid", "name", "args"} <= event.keys():
        raise ValueError(f"{path} is no timeline of sparsecomm: {line[:80]}")
    return event


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)


def _read(path: Path) -> _Recording:
    try:
        return _summary(path)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no timeline of sparsecomm, or of another release: {error!r}"
        ) from error


def _summary(path: Path) -> _Recording:
    recording = _Recording(path)
    for event in _events(path):
        arguments, process = event["args"], event["pid"]
        if event["name"] == "sparsecomm_recording":
            recording.rank = arguments["rank"]
            recording.began = arguments["unix_ns"]
        elif event["name"] == "sparsecomm_communicator":
            group = tuple(arguments["ranks"]), arguments["number"]
            recording.communicators[process] = group
        elif event["ph"] == "X" and event["tid"] == 0:
            ends = recording.rounds.setdefault(process, {})
            ends[arguments["number"]] = _nanoseconds(event["ts"]) + _nanoseconds(event["dur"])
    if recording.rank < 0:
        raise ValueError(f"{path} does not say which rank recorded it")
    return recording


class _Clock:
    """Turns a recording's times into the reference's, both in nanoseconds since they began."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._times = [time for time, _ in points]
        self._offsets = [offset for _, offset in points]

    @classmethod
    def comparing(cls, pairs: Iterable[tuple[int, int]]) -> _Clock:
        """Takes moments that are the same on both, a rank's time and the reference's."""
        windows: dict[int, list[tuple[int, int]]] = {}
        for own, reference in pairs:
            windows.setdefault(own // _WINDOW, []).append((own, reference - own))
        points: list[tuple[int, float]] = []
        for _, inside in sorted(windows.items()):
            time = statistics.median_low([own for own, _ in inside])
            # Of two that are close, a late round would make the clock run backwards.
            if not points or time - points[-1][0] > _WINDOW // 2:
                points.append((time, statistics.median([offset for _, offset in inside])))
        return cls(points)

    def __call__(self, time: int) -> int:
        after = bisect_right(self._times, time)
        if after in (0, len(self._times)):
            return round(time + self._offsets[min(after, len(self._times) - 1)])
        before = after - 1
        share = (time - self._times[before]) / (self._times[after] - self._times[before])
        offset = self._offsets[before] + share * (self._offsets[after] - self._offsets[before])
        return round(time + offset)


def _common_rounds(one: _Recording, other: _Recording) -> list[tuple[int, int]]:
    others = dict(other.groups())
    return [
        (end, others[group][number])
        for group, ends in one.groups()
        if group in others
        for number, end in ends.items()
        if number in others[group]
    ]


def _clocks(recordings: Sequence[_Recording]) -> tuple[list[_Clock], list[int]]:
    """Returns each recording's clock, and the ranks that share no round with the first one.

    Ranks end a round at the same time, but for what a message takes. A rank that shares none with
    the first may share some with one that does.
    """
    first = recordings[0]
    clocks: dict[int, _Clock] = {0: _Clock([(0, 0)])}
    reached = [0]
    for known in reached:
        for i, recording in enumerate(recordings):
            if i in clocks:
                continue
            pairs = _common_rounds(recording, recordings[known])
            if pairs:
                clocks[i] = _Clock.comparing((own, clocks[known](end)) for own, end in pairs)
                reached.append(i)
    apart = [i for i in range(len(recordings)) if i not in clocks]
    for i in apart:
        clocks[i] = _Clock([(0, recordings[i].began - first.began)])
    return [clocks[i] for i in range(len(recordings))], [recordings[i].rank for i in apart]


def merge(paths: Sequence[Path], output: Path) -> list[int]:
    """Makes one timeline of those of several ranks, on the clock of the lowest rank.

    Clocks are compared by the rounds that ranks have ended together.

    Args:
        paths: what ranks have recorded, of one run.
        output: the file to write; compressed if its name ends with ``.gz``.

    Returns:
        Ranks that share no round with the lowest rank, whose clocks are taken as they are.

    Raises:
        OSError: a file cannot be read or written.
        ValueError: a file is no timeline, two are of the same rank, or ``output`` is one of them.
    """
    if not paths:
        raise ValueError("no timelines were given")
    if output.resolve() in {path.resolve() for path in paths}:
        raise ValueError(f"{output} is to be read; write to another file")
    recordings = sorted((_read(path) for path in paths), key=lambda recording: recording.rank)
    for one, other in pairwise(recordings):
        if one.rank == other.rank:
            raise ValueError(
                f"{one.path} and {other.path} are both of rank {one.rank}; give one run's files"
            )
    clocks, apart = _clocks(recordings)
    # Of the first recording: viewers drop what is before 0.
    shift = -min(clock(0) for clock in clocks)
    with (
        gzip.open(output, "wt", encoding="utf-8")
        if output.suffix == ".gz"
        else output.open("w", encoding="utf-8")
    ) as opened:
        opened.write("[\n")
        _write(recordings, clocks, shift, opened)
        opened.write('{"ph":"M","pid":0,"tid":0,"name":"end","args":{}}\n]\n')
    return apart


def _write(
    recordings: Sequence[_Recording], clocks: Sequence[_Clock], shift: int, output: TextIO
) -> None:
    processes = 0
    for recording, clock in zip(recordings, clocks, strict=True):
        numbers: dict[int, int] = {}
        for event in _events(recording.path):
            if event["pid"] == 0:  # of the recording itself
                continue
            if event["pid"] not in numbers:
                processes += 1
                numbers[event["pid"]] = processes
            event["pid"] = numbers[event["pid"]]
            if event["ph"] == "X":
                begin = _nanoseconds(event["ts"])
                end = shift + clock(begin + _nanoseconds(event["dur"]))
                begin = shift + clock(begin)
                event["ts"], event["dur"] = begin / 1000, (end - begin) / 1000
            output.write(json.dumps(event, separators=(",", ":")) + ",\n")

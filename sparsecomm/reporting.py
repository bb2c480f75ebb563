"""What states have to say: a table, a summary at exit, scalars for TensorBoard."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from sparsecomm import _C
from sparsecomm.figures import FIGURES, together
from sparsecomm.hooks import CompressionState, described
from sparsecomm.units import format_seconds

_COLUMNS: tuple[str, ...] = (
    "group",
    "entries",
    "algorithm",
    "density",
    "threshold",
    "age",
    "sent",
    "received",
    "messages",
    "agree",
    "select",
    "exchange",
    "apply",
    "exposed",
    "observed",
    "predicted",
)


class ScalarWriter(Protocol):
    """What :func:`write_stats` needs of a ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object: ...
    def add_text(self, tag: str, text_string: str, global_step: int) -> object: ...


def report(*states: CompressionState) -> str:
    """Returns the statistics of the states: means of all steps, the last step, and its groups.

    Args:
        states: one or several; without any there is nothing to tell, and the text is empty.

    Raises:
        TypeError: an argument is no state.
        ValueError: an exchange is in progress.
    """
    for state in states:
        _check(state)
    return "\n\n".join(_text(type(state).__name__, state._native) for state in states)


def report_at_exit(*states: CompressionState, file: TextIO | None = None) -> None:
    """Prints :func:`report` on rank 0 when the program ends.

    A state that nobody holds any longer is reported on at once, since nothing more will come of it.
    Where an error left an exchange in progress, that is what the report says.

    Args:
        states: one or several, on every rank; the others print nothing.
        file: where to; standard error if ``None``.

    Raises:
        TypeError: an argument is no state.
    """
    for state in states:
        _check(state)
    for state in states:
        weakref.finalize(state, _print, type(state).__name__, state._native, file)


def write_stats(
    writer: ScalarWriter, state: CompressionState, step: int | None = None, tag: str = "sparsecomm"
) -> None:
    """Writes the figures of the last step to TensorBoard, of each group and of all together.

    Scalars ``TAG/FIGURE`` and ``TAG/GROUP/FIGURE``, figures by their names in
    :meth:`sparsecomm.hooks.CompressionState.stats`, and the algorithm of each group as text. Those
    that are ``None`` are left out. Of all groups together densities are of all their entries, times
    and traffic are sums, and ``exposed_seconds`` is the largest, which is the step's.

    Args:
        writer: a ``torch.utils.tensorboard.SummaryWriter``, or what has its ``add_scalar`` and
            ``add_text``. As a rule one rank has one; each rank's figures are its own.
        state: of this rank, between steps.
        step: the global step to write; the state's own count if ``None``.
        tag: what the names begin with.

    Raises:
        TypeError: ``state`` is no state.
        ValueError: an exchange is in progress.
    """
    _check(state)
    stats = state.stats()
    groups: list[dict[str, Any]] = stats["groups"]
    if not groups:
        return
    if step is None:
        step = stats["steps"]
    for name, value in stats["last_step"].items():
        writer.add_scalar(f"{tag}/{name}", value, step)
    for group in groups:
        place = f"{tag}/{re.sub(r'[^-/.0-9A-Za-z_]', '_', group['name'])}"
        for name in FIGURES:
            if group[name] is not None:
                writer.add_scalar(f"{place}/{name}", group[name], step)
        writer.add_text(f"{place}/algorithm", group["algorithm"], step)


def _check(state: object) -> None:
    if not isinstance(state, CompressionState):
        remedy = "; give states one by one" if isinstance(state, (list, tuple)) else ""
        raise TypeError(f"a state of sparsecomm's hooks is needed, not {described(state)}{remedy}")


def _print(title: str, native: _C.HookState, file: TextIO | None) -> None:
    if native.rank != 0:
        return
    try:
        text = _text(title, native)
    except ValueError as error:
        text = f"{title}: {error}"
    print(text, file=sys.stderr if file is None else file, flush=True)


def _text(title: str, native: _C.HookState) -> str:
    stats = native.stats()
    steps = stats["steps"]
    if not stats["groups"] or steps == 0:
        return f"{title}: no step yet"
    lines = [
        f"{title}, rank {native.rank}: {steps} steps",
        f"  mean of all steps: {_traffic(stats, steps)}",
        f"  last step:         {_traffic(together(stats['groups']), 1)}",
        f"  {format_seconds(stats['select_seconds'] / steps)} to select, "
        f"{format_seconds(stats['exchange_seconds'] / steps)} to exchange, "
        f"{format_seconds(stats['apply_seconds'] / steps)} to apply, "
        f"{format_seconds(stats['agree_seconds'] / steps)} waiting for others; "
        f"{format_seconds(stats['exposed_seconds'] / steps)} exposed a step",
        *_grouping(stats["grouping"]),
        "  last step, by group:",
    ]
    rows = [_COLUMNS, *(_row(group) for group in stats["groups"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _grouping(grouping: Mapping[str, Any] | None) -> list[str]:
    if grouping is None:
        return []
    names = {"model": "one group", "buckets": "buckets"}
    parts = [
        f"{format_seconds(seconds)} a step with {name}"
        for key, name in names.items()
        if (seconds := grouping[f"{key}_seconds"]) is not None
    ]
    verb = "chosen" if grouping["decided"] else "being tried"
    measured = f": {', '.join(parts)}, from its first bucket on" if parts else ""
    return [f"  groups: {names[grouping['groups']]}, {verb}{measured}"]


def _traffic(figures: Mapping[str, float], steps: int) -> str:
    return (
        f"density {figures['realised_density']:.3%} selected, {figures['result_density']:.3%} of "
        f"the results; {_bytes(figures['sent_bytes'] / steps)} sent, "
        f"{_bytes(figures['received_bytes'] / steps)} received, "
        f"{figures['messages'] / steps:.1f} messages"
    )


def _row(group: Mapping[str, Any]) -> tuple[str, ...]:
    threshold, age, predicted = (
        group[name] for name in ("threshold", "threshold_age", "predicted_seconds")
    )
    return (
        group["name"],
        str(group["numel"]),
        group["algorithm"] if group["finite"] else "(not finite)",
        f"{group['realised_density']:.3%}",
        "" if threshold is None else f"{threshold:.3g}",
        "" if age is None else str(age),
        _bytes(group["sent_bytes"]),
        _bytes(group["received_bytes"]),
        str(group["messages"]),
        *(
            format_seconds(group[f"{name}_seconds"])
            for name in ("agree", "select", "exchange", "apply", "exposed", "observed")
        ),
        "" if predicted is None else format_seconds(predicted),
    )


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"

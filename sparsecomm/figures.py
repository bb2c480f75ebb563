"""The figures of a step that are numbers, and those of all groups of parameters together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FIGURES = (
    "realised_density",
    "result_density",
    "threshold",
    "threshold_age",
    "sent_bytes",
    "received_bytes",
    "messages",
    "agree_seconds",
    "select_seconds",
    "exchange_seconds",
    "apply_seconds",
    "exposed_seconds",
    "observed_seconds",
    "predicted_seconds",
)


def together(groups: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the figures of the groups' last steps together; without groups none.

    Densities are of the entries of all groups. Times and traffic are sums, but for
    ``exposed_seconds``, the largest: groups are exchanged one after another. Thresholds, and
    figures that are ``None`` for some group, are left out.
    """
    if not groups:
        return {}
    numel = sum(group["numel"] for group in groups)
    total: dict[str, float] = {}
    for name in FIGURES:
        values = [group[name] for group in groups]
        if name.startswith("threshold") or any(value is None for value in values):
            continue
        if name == "exposed_seconds":
            total[name] = max(values)
        elif name.endswith("density"):
            parts = (group[name] * group["numel"] for group in groups)
            total[name] = sum(parts) / max(1, numel)
        else:
            total[name] = sum(values)
    return total

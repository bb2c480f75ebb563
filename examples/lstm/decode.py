"""From log probabilities per frame to text, and how much of the text is wrong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

Floats = np.ndarray[Any, np.dtype[np.floating[Any]]]

BLANK = 0


def greedy(log_probabilities: Tensor) -> list[int]:
    """The most probable character of each frame, repetitions merged and blanks left out.

    Args:
        log_probabilities: (frames, characters).
    """
    best = log_probabilities.argmax(dim=-1).tolist()
    return [character for character, _ in groupby(best) if character != BLANK]


def beam(log_probabilities: Tensor, width: int) -> list[int]:
    """The most probable text that prefix beam search finds, all its alignments counted.

    Hannun et al. 2014, "First-pass large vocabulary continuous speech recognition using
    bi-directional recurrent DNNs", algorithm 1, without a language model. Where `width` exceeds
    the number of prefixes, that is the most probable text of all.

    Args:
        log_probabilities: (frames, characters).
        width: how many prefixes are kept from frame to frame.
    """
    prefixes: list[tuple[int, ...]] = [()]
    # Log probabilities of each prefix's alignments, by whether they end in a blank or not.
    blank: Floats = np.zeros(1)
    other: Floats = np.full(1, -np.inf)
    for frame in log_probabilities.double().numpy():
        last = np.array([prefix[-1] if prefix else BLANK for prefix in prefixes])
        total = np.logaddexp(blank, other)
        grown = total[:, None] + frame
        # A character that repeats the last one is another only after a blank.
        grown[np.arange(len(prefixes)), last] = blank + frame[last]
        grown[:, BLANK] = -np.inf
        blank, other = total + frame[BLANK], other + frame[last]
        rows = {prefix: row for row, prefix in enumerate(prefixes)}
        for row, prefix in enumerate(prefixes):
            parent = rows.get(prefix[:-1]) if prefix else None
            if parent is not None:  # the same text, once kept and once grown from its parent
                other[row] = np.logaddexp(other[row], grown[parent, prefix[-1]])
                grown[parent, prefix[-1]] = -np.inf
        prefixes, blank, other = _best(prefixes, blank, other, grown, width)
    return list(prefixes[int(np.logaddexp(blank, other).argmax())])


def _best(
    prefixes: list[tuple[int, ...]], blank: Floats, other: Floats, grown: Floats, width: int
) -> tuple[list[tuple[int, ...]], Floats, Floats]:
    """The most probable `width` among the prefixes as they are and grown by a character."""
    scores = np.concatenate([np.logaddexp(blank, other), grown.ravel()])
    order = np.argsort(-scores, kind="stable")[:width]
    chosen = order[np.isfinite(scores[order])]
    kept, added = chosen[chosen < len(prefixes)], chosen[chosen >= len(prefixes)]
    rows, characters = np.divmod(added - len(prefixes), grown.shape[1])
    longer = [
        (*prefixes[row], character)
        for row, character in zip(rows.tolist(), characters.tolist(), strict=True)
    ]
    return (
        [prefixes[row] for row in kept.tolist()] + longer,
        np.concatenate([blank[kept], np.full(len(longer), -np.inf)]),
        np.concatenate([other[kept], scores[added]]),
    )


def edits(reference: Sequence[str], hypothesis: Sequence[str]) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and substitutions."""
    previous = list(range(len(hypothesis) + 1))
    for row, wanted in enumerate(reference, 1):
        current = [row]
        for column, found in enumerate(hypothesis, 1):
            substituted = previous[column - 1] + (wanted != found)
            current.append(min(substituted, previous[column] + 1, current[-1] + 1))
        previous = current
    return previous[-1]

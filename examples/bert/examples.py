"""The examples of BERT's two tasks (Devlin et al. 2019, section 3.1), drawn from a corpus.

They are drawn anew in every epoch: where a chunk is split, what follows, and what is masked.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bert.corpus import LENGTH, ROOM, Corpus
from bert.vocabulary import CLS, MASK, PAD, SEP, SPECIAL

MASKED = 0.15  # of the tokens; of these
REPLACED = 0.8  # by [MASK], and
RANDOM = 0.1  # by any token

Tokens = NDArray[np.uint16]


def draw_segments(
    corpus: Corpus, chunk: int, random: np.random.Generator
) -> tuple[Tokens, Tokens, bool]:
    """Two segments with at most `ROOM` tokens, and whether the second is from elsewhere.

    The first has the sentences of the chunk up to one of them. The second has the others in half of
    the cases, and in the other half sentences of another document.
    """
    first, last = int(corpus.chunks[chunk]), int(corpus.chunks[chunk + 1])
    middle = int(random.integers(first + 1, last))
    one, two = corpus.span(first, middle), corpus.span(middle, last)
    elsewhere = bool(random.random() < 0.5)
    if elsewhere:
        two = draw_elsewhere(corpus, chunk, ROOM - len(one), random)
    # The longer one is cut, at both ends, as what has been chosen for its length would be.
    shorter = ROOM // 2
    kept_one = min(len(one), max(ROOM - len(two), ROOM - shorter))
    kept_two = min(len(two), max(ROOM - len(one), shorter))
    return cut(one, kept_one, random), cut(two, kept_two, random), elsewhere


def draw_elsewhere(corpus: Corpus, chunk: int, tokens: int, random: np.random.Generator) -> Tokens:
    """Sentences of another document: such that there are so many tokens, or all to its end."""
    begin, end = corpus.document_of(chunk)
    other = int(random.integers(len(corpus) - (end - begin)))
    other += end - begin if other >= begin else 0
    first = int(random.integers(corpus.chunks[other], corpus.chunks[other + 1]))
    end_of_document = int(corpus.chunks[corpus.document_of(other)[1]])
    # A sentence has a token at least.
    ends = corpus.sentences[first + 1 : min(first + tokens, end_of_document) + 1]
    enough = int(np.searchsorted(ends, corpus.sentences[first] + tokens))
    return corpus.span(first, min(first + 1 + enough, first + len(ends)))


def cut(segment: Tokens, length: int, random: np.random.Generator) -> Tokens:
    """So many tokens of a segment; for each that goes, a coin decides from which end."""
    start = random.binomial(len(segment) - length, 0.5)
    return segment[start : start + length]


def make_batch(
    corpus: Corpus, draws: Iterable[tuple[int, np.random.Generator]], vocabulary: int
) -> tuple[Tensor, ...]:
    """Sequences `[CLS] one [SEP] two [SEP]` with masked tokens.

    Args:
        corpus: what they are drawn from.
        draws: a chunk for each of B sequences, and what decides at random there.
        vocabulary: how many tokens it has, of which any may stand in for a masked one.

    Returns:
        The arguments of :class:`bert.model.Bert`, and then its answers: the tokens that were
        masked, int64, (M), and whether the second segment is from elsewhere, int64, (B).
    """
    tokens, segments, padding, masked, labels, answers = [], [], [], [], [], []
    for row, (chunk, random) in enumerate(draws):
        one, two, elsewhere = draw_segments(corpus, chunk, random)
        sequence = np.full(LENGTH, PAD, np.int64)
        separators = [0, len(one) + 1, len(one) + len(two) + 2]
        content = np.delete(np.arange(separators[-1]), separators[:-1])
        sequence[separators] = CLS, SEP, SEP
        sequence[content] = np.concatenate([one, two])

        chosen = random.choice(content, max(1, round(MASKED * len(content))), replace=False)
        labels.append(sequence[chosen])
        masked.append(row * LENGTH + chosen)
        fate = random.random(len(chosen))
        sequence[chosen[fate < REPLACED]] = MASK
        replaced = chosen[fate >= 1 - RANDOM]
        sequence[replaced] = random.integers(len(SPECIAL), vocabulary, len(replaced))

        place = np.arange(LENGTH)
        tokens.append(sequence)
        segments.append((place > separators[1]) & (place <= separators[2]))
        padding.append(place > separators[2])
        answers.append(elsewhere)
    return (
        torch.from_numpy(np.stack(tokens)),
        torch.from_numpy(np.stack(segments).astype(np.int64)),
        torch.from_numpy(np.stack(padding)),
        torch.from_numpy(np.concatenate(masked)),
        torch.from_numpy(np.concatenate(labels)),
        torch.tensor(answers, dtype=torch.int64),
    )

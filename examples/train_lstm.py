#!/usr/bin/env python3
"""Trains a speech recogniser of LSTMs by CTC, exchanging dense or sparse gradients.

    torchrun --nproc-per-node 2 examples/train_lstm.py --hook ddp
    torchrun --nproc-per-node 2 examples/train_lstm.py --hook oktopk --recipe recommended
    torchrun --nproc-per-node 8 examples/train_lstm.py --size base --data an4:FOLDER --epochs 160
    python examples/report.py runs/lstm-*

The recipe is Ok-Topk's for its LSTM on AN4 (Li and Hoefler 2022, section 5): SGD with momentum, a
learning rate of 1e-3, divided by 1.01 after each epoch, gradients clipped to a norm of 400. What
counts is the word error rate of the test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from common import training
from common.errors import DataError
from common.options import natural, positive
from common.order import steps_per_epoch
from common.seeds import mix_seed
from common.task import Batch, Task
from lstm import decode
from lstm.data import (
    BINS,
    CHARACTERS,
    SPEED_CHANGE,
    Utterance,
    at_any_speed,
    collate,
    epoch_batches,
    load,
    text_of,
)
from lstm.model import SIZES, Size, SpeechModel
from torch import Tensor, nn
from torch.nn import functional

MOMENTUM = 0.9
CLIP_NORM = 400.0
EVALUATION_BATCH = 32
# What keeps the quality of dense training at a density of 2 %.
RECOMMENDED = {"density_warmup": [0.25, 0.0625, 0.04], "momentum_correction": True}


def main(arguments: Sequence[str] | None = None) -> int:
    return training.run("train_lstm", parse_options(arguments), SpeechTask)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = training.make_parser(
        "Train a speech recogniser of LSTMs with dense or sparse gradient exchange.", "lstm"
    )
    parser.set_defaults(lr=None, epochs=20, batch=8)
    add = parser.add_argument
    add("--size", choices=SIZES, default="small", help="base: Ok-Topk's, of 27,569,568 parameters")
    add("--data", default="spoken", help="spoken, or an4:FOLDER (with etc and wav)")
    add("--limit", type=positive, default=None, help="use only so many utterances of each part")
    add(
        "--beam",
        type=natural,
        default=0,
        metavar="WIDTH",
        help="also decode the test by prefix beam search; 0: greedily only",
    )
    options = training.parse(parser, arguments, RECOMMENDED)
    if options.lr is None:
        options.lr = SIZES[options.size].learning_rate
    return options


class SpeechTask(Task):
    """Recognition of spoken letters, digits and words by CTC; SGD with momentum."""

    name = "LSTM"
    unit = "utterance"
    quality = "word_error_rate"
    higher_is_better = False
    clip_norm = CLIP_NORM

    def __init__(self, options: argparse.Namespace) -> None:
        self.size = SIZES[options.size]
        corpus = load(options.data, options.limit)
        self.train, self.test, self.data = corpus.train, corpus.test, corpus.name
        check_lengths(self.train, self.size)
        self.lengths = [utterance.frames() for utterance in self.train]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.batch, self.lr, self.seed = options.batch, options.lr, options.seed
        self.beam = options.beam
        self.model = SpeechModel(self.size, BINS, CHARACTERS)
        self.steps_per_epoch = steps_per_epoch(len(self.train), self.batch, self.ranks)

    def optimizer(self) -> torch.optim.SGD:
        return torch.optim.SGD(self.model.parameters(), self.lr, momentum=MOMENTUM)

    def learning_rate(self, step: int) -> float:
        epoch = step // self.steps_per_epoch
        return float(self.lr / self.size.annealing**epoch)

    def batches(self, epoch: int) -> Iterator[Batch]:
        # Speeds, like the order, start anew from the seed in every epoch.
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, self.rank + 1))
        for indices in epoch_batches(
            self.lengths, self.batch, self.rank, self.ranks, self.seed, epoch
        ):
            yield collate(at_any_speed([self.train[index] for index in indices], generator))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """CTC's negative log likelihood of an utterance, mean over the batch."""
        spectrograms, frames, labels, counts = batch
        log_probabilities, frames = model(spectrograms, frames)
        total = functional.ctc_loss(
            log_probabilities.transpose(0, 1), labels, frames, counts, reduction="sum"
        )
        return total / len(counts)

    def evaluate(self) -> Tensor:
        """Edits of words and of characters, greedily and by beam search, and their numbers."""
        sums = torch.zeros(6, dtype=torch.float64)
        own = sorted(self.test[self.rank :: self.ranks], key=Utterance.frames)
        for start in range(0, len(own), EVALUATION_BATCH):
            utterances = own[start : start + EVALUATION_BATCH]
            spectrograms, frames, *_ = self.to_device(collate(utterances))
            log_probabilities, frames = self.model(spectrograms, frames)
            for utterance, rows, count in zip(
                utterances, log_probabilities.cpu(), frames.tolist(), strict=True
            ):
                sums += self.errors(utterance.text, rows[:count])
        return sums

    def errors(self, reference: str, log_probabilities: Tensor) -> Tensor:
        """What one utterance adds to the sums."""
        found = [text_of(decode.greedy(log_probabilities))]
        if self.beam:
            found.append(text_of(decode.beam(log_probabilities, self.beam)))
        edits = [
            count
            for text in found
            for count in (
                decode.edits(reference.split(), text.split()),
                decode.edits(reference, text),
            )
        ]
        edits += [0] * (4 - len(edits))
        return torch.tensor([len(reference.split()), len(reference), *edits], dtype=torch.float64)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        words, characters, *edits = sums.tolist()
        rates = {
            "word_error_rate": edits[0] / words,
            "character_error_rate": edits[1] / characters,
        }
        if self.beam:
            rates["beam_word_error_rate"] = edits[2] / words
            rates["beam_character_error_rate"] = edits[3] / characters
        return rates


def check_lengths(utterances: list[Utterance], size: Size) -> None:
    """CTC needs a frame for each character, and one more between two that are the same.

    That is so for the fastest that the utterances are played.

    Raises:
        DataError: the model makes fewer frames of an utterance.
    """
    for utterance in utterances:
        text, frames = utterance.text, size.frames(utterance.frames(1 + SPEED_CHANGE))
        needed = len(text) + sum(one == other for one, other in pairwise(text))
        if frames < needed:
            raise DataError(
                f"{utterance.source}: {frames} frames of the model are too few for CTC to align "
                f"{text!r} with: it needs {needed}"
            )


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Trains BERT on masked tokens and next sentences, data-parallel, with dense or sparse exchange.

    torchrun --nproc-per-node 2 examples/train_bert.py --hook ddp
    torchrun --nproc-per-node 2 examples/train_bert.py --hook oktopk --recipe recommended
    torchrun --nproc-per-node 8 examples/train_bert.py --size base --data text:FOLDER
    python examples/report.py runs/bert-*

The default data are English prose from Python's standard library, and the default size fits them.
A folder has a document per file, or what WikiExtractor makes of a Wikipedia. Each run leaves
summary.json, TensorBoard events and, if asked for, checkpoints in its output folder, which is
runs/bert-HOOK.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from bert.corpus import LARGEST_VOCABULARY, Corpus, prepare, read_vocabulary
from bert.examples import make_batch
from bert.model import SIZES, Bert
from common import training
from common.documents import add_data_option
from common.errors import DataError
from common.options import positive
from common.order import epoch_batches, steps_per_epoch
from common.seeds import mix_seed
from common.task import Batch, Task, decay_matrices
from torch import Tensor, nn
from torch.nn import functional

# Of Ok-Topk's experiments (Li and Hoefler 2022, section 5), as are 0.01 of the entries.
BETAS = (0.9, 0.999)
WEIGHT_DECAY = 0.01
WARMUP = 0.1  # of the steps

LONGEST_PREPARATION = timedelta(days=7)
# Closer to the loss of dense training, here, than --first-moment comes to it.
RECOMMENDED = {"density_warmup": [0.25, 0.0625, 0.04]}


def main(arguments: Sequence[str] | None = None) -> int:
    return training.run("train_bert", parse_options(arguments), Pretraining)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = training.make_parser(
        "Train BERT on masked tokens and next sentences with dense or sparse gradient exchange.",
        "bert",
    )
    parser.set_defaults(epochs=10, batch=8, lr=None, density=0.01)
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="of the model")
    add_data_option(parser)
    add("--vocabulary", type=positive, default=None, help="tokens (4096, of base 30522)")
    add("--limit", type=positive, default=None, help="use only so many documents")
    add("--cache", default="runs/bert-data", help="folder of the data's tokens, for all ranks")
    options = training.parse(parser, arguments, RECOMMENDED)
    size = SIZES[options.size]
    if options.lr is None:
        options.lr = size.learning_rate
    if options.vocabulary is None:
        options.vocabulary = size.vocabulary
    if options.vocabulary > LARGEST_VOCABULARY:
        parser.error(f"--vocabulary {options.vocabulary} is above {LARGEST_VOCABULARY}")
    return options


class Pretraining(Task):
    """Masked tokens and next sentences by BERT; AdamW."""

    name = "BERT"
    unit = "sequence"
    quality = "test_loss"
    higher_is_better = False

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        folder = prepare_on_first_rank(options)
        self.train, self.test = Corpus(folder / "train"), Corpus(folder / "test")
        self.tokens = len(read_vocabulary(folder))
        self.data = folder.name
        self.batch, self.lr, self.seed = options.batch, options.lr, options.seed
        self.model = Bert(SIZES[options.size], options.vocabulary)
        self.steps_per_epoch = steps_per_epoch(len(self.train), self.batch, self.ranks)
        self.steps = options.epochs * self.steps_per_epoch

    def optimizer(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(decay_matrices(self.model, WEIGHT_DECAY), self.lr, BETAS)

    def learning_rate(self, step: int) -> float:
        return learning_rate(step, self.steps, self.lr)

    def batches(self, epoch: int) -> Iterator[Batch]:
        random = np.random.default_rng(mix_seed(self.seed, epoch, self.rank + 1))
        for chunks in epoch_batches(
            len(self.train), self.batch, self.rank, self.ranks, self.seed, epoch
        ):
            draws = ((chunk, random) for chunk in chunks.tolist())
            yield make_batch(self.train, draws, self.tokens)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        *inputs, labels, elsewhere = batch
        scores, follows = model(*inputs)
        masked = functional.cross_entropy(scores, labels)
        return masked + functional.cross_entropy(follows, elsewhere)

    def evaluate(self) -> Tensor:
        """Of tokens, then of sequences: the sum of losses, how many are right, and how many."""
        sums = torch.zeros(2, 3, dtype=torch.float64)
        share_of_rank = range(self.rank, len(self.test), self.ranks)
        for first in range(0, len(share_of_rank), self.batch):
            # A chunk is masked the same in every evaluation, whichever rank does it.
            draws = [
                (chunk, np.random.default_rng(chunk))
                for chunk in share_of_rank[first : first + self.batch]
            ]
            *inputs, labels, elsewhere = self.to_device(make_batch(self.test, draws, self.tokens))
            for part, answers, right in zip(
                sums, self.model(*inputs), (labels, elsewhere), strict=True
            ):
                part[0] += functional.cross_entropy(answers, right, reduction="sum").item()
                part[1] += (answers.argmax(1) == right).sum().item()
                part[2] += len(right)
        return sums.flatten()

    def metrics(self, sums: Tensor) -> dict[str, float]:
        masked_loss, masked, tokens, _, following, sequences = sums.tolist()
        return {
            "test_loss": masked_loss / tokens,
            "masked_accuracy": masked / tokens,
            "next_sentence_accuracy": following / sequences,
        }


def prepare_on_first_rank(options: argparse.Namespace) -> Path:
    """The folder of the data's tokens. Collective: rank 0 makes them, however long that takes."""
    result: list[Path | DataError | None] = [None]
    group = dist.new_group(backend="gloo", timeout=LONGEST_PREPARATION)
    if dist.get_rank() == 0:
        try:
            cache = Path(options.cache)
            result[0] = prepare(options.data, options.vocabulary, cache, options.limit)
        except DataError as error:
            result[0] = error
    dist.broadcast_object_list(result, src=0, group=group)
    dist.destroy_process_group(group)
    if not isinstance(result[0], Path):
        assert result[0] is not None
        raise result[0]
    return result[0]


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Rises linearly over a tenth of the steps, then falls linearly to zero."""
    warmup = max(1, round(WARMUP * steps))
    return peak * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))


if __name__ == "__main__":
    sys.exit(main())

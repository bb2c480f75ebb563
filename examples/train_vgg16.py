#!/usr/bin/env python3
"""Trains VGG16 on 32x32 images, data-parallel, exchanging dense or sparse gradients.

    torchrun --nproc-per-node 2 examples/train_vgg16.py --hook ddp
    torchrun --nproc-per-node 2 examples/train_vgg16.py --hook oktopk --density 0.02
    torchrun --nproc-per-node 2 examples/train_vgg16.py --hook oktopk --recipe recommended
    python examples/report.py runs/vgg16-*

or, where an MPI launches programs,

    mpiexec -n 4 python examples/train_vgg16.py --launcher mpi

Each run leaves summary.json, TensorBoard events and, if asked for, checkpoints in its output
folder, runs/vgg16-HOOK. Without a launcher it trains on a single rank.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from common import training
from common.options import positive, positive_real
from common.order import epoch_batches, steps_per_epoch
from common.seeds import mix_seed
from common.task import Batch, Task
from torch import Tensor, nn
from torch.nn import functional
from vgg16.data import load
from vgg16.model import VGG16

MOMENTUM = 0.9
WEIGHT_DECAY = 1e-4
EVALUATION_BATCH = 64
# What keeps the accuracy of dense training at a density of 1 to 2 %.
RECOMMENDED = {"density_warmup": [0.25, 0.0625, 0.04], "momentum_correction": True, "lr": 0.02}


def main(arguments: Sequence[str] | None = None) -> int:
    return training.run("train_vgg16", parse_options(arguments), ImageTask)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = training.make_parser(
        "Train VGG16 on 32x32 images with dense or sparse gradient exchange.", "vgg16"
    )
    add = parser.add_argument
    add("--data", default="digits", help="digits, or cifar10:FOLDER (python version)")
    add("--limit", type=positive, default=None, help="use only so many images, for a quick try")
    add(
        "--lr-warmup",
        type=positive_real,
        default=1.0,
        metavar="EPOCHS",
        help="over which the learning rate rises to its peak; less in a short run",
    )
    return training.parse(parser, arguments, RECOMMENDED)


class ImageTask(Task):
    """Classification of images by VGG16; SGD with momentum."""

    name = "VGG16"
    unit = "image"
    quality = "test_accuracy"

    def __init__(self, options: argparse.Namespace) -> None:
        self.images = load(options.data)
        if options.limit is not None:
            self.images = self.images.limited(options.limit)
        self.data = self.images.name
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.batch, self.epochs = options.batch, options.epochs
        self.lr, self.lr_warmup = options.lr, options.lr_warmup
        self.seed = options.seed
        self.model = VGG16()
        self.steps_per_epoch = steps_per_epoch(len(self.images.train), self.batch, self.ranks)

    def optimizer(self) -> torch.optim.SGD:
        return torch.optim.SGD(
            self.model.parameters(), self.lr, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
        )

    def learning_rate(self, step: int) -> float:
        per_epoch = self.steps_per_epoch
        warmup = round(self.lr_warmup * per_epoch)
        return learning_rate(step, warmup, self.epochs * per_epoch, self.lr)

    def batches(self, epoch: int) -> Iterator[Batch]:
        train = self.images.train
        # Augmentation, like the order, starts anew from the seed in every epoch.
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch, self.rank + 1))
        for indices in epoch_batches(
            len(train), self.batch, self.rank, self.ranks, self.seed, epoch
        ):
            yield train.take(indices, generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self) -> Tensor:
        """How many images of this rank's share the model classifies correctly."""
        test = self.images.test
        correct = 0
        share_of_rank = torch.arange(self.rank, len(test), self.ranks)
        for indices in torch.split(share_of_rank, EVALUATION_BATCH):
            images, labels = self.to_device(test.take(indices, None))
            correct += int((self.model(images).argmax(dim=1) == labels).sum().item())
        return torch.tensor([correct], dtype=torch.float64)

    def metrics(self, sums: Tensor) -> dict[str, float]:
        return {"test_accuracy": sums[0].item() / len(self.images.test)}


def learning_rate(step: int, warmup: int, steps: int, peak: float) -> float:
    """Rises linearly over the first ``warmup`` steps, then falls along a cosine to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


if __name__ == "__main__":
    sys.exit(main())

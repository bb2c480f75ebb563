"""What the examples for other trainers train: a small network on scikit-learn's 1,797 digits."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import TensorDataset

BATCH = 32  # of a rank
LR = 0.1


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """For training and for testing: 8x8 images in [0, 1], flattened, and their labels."""
    images, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    everything = TensorDataset(images.float() / 16, labels)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(0))
    parts = [TensorDataset(*everything[part]) for part in (order[:1437], order[1437:])]
    return parts[0], parts[1]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def accuracy(model: nn.Module) -> float:
    """Share of the test images that are recognised."""
    images, labels = datasets()[1].tensors
    with torch.no_grad():
        share: float = (model(images).argmax(1) == labels).float().mean().item()
    return share

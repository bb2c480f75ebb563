#!/usr/bin/env python3
"""Hugging Face accelerate with a sparse exchange of gradients.

    torchrun --nproc-per-node 2 examples/accelerate_digits.py --cpu
    accelerate launch --num_processes 2 examples/accelerate_digits.py

The line that matters is ``sparsecomm.prepare``, after accelerate's own. The second command needs
two GPUs: on CPUs ``accelerate launch`` starts several processes by way of MPI alone.
"""

from __future__ import annotations

import argparse

import digits
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import sparsecomm


def train(epochs: int, density: float | None, cpu: bool = False) -> nn.Module:
    """Trains, with a sparse exchange, or with DDP's own if ``density`` is ``None``."""
    accelerator = Accelerator(cpu=cpu)
    model = digits.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=digits.LR, momentum=0.9)
    loader = DataLoader(digits.datasets()[0], batch_size=digits.BATCH, drop_last=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = None
    if density is not None and isinstance(model, DistributedDataParallel):
        state = sparsecomm.prepare(model, optimizer, density, total_steps=epochs * len(loader))
    elif density is not None:
        accelerator.print("one process without DDP: dense training, nothing is exchanged")
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(functional.cross_entropy(model(images), labels))
            optimizer.step()
    if state is not None:
        accelerator.print(f"sent {state.stats()['realised_density']:.1%} of the gradients")
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def main() -> None:
    parser = argparse.ArgumentParser(description="accelerate with a sparse exchange of gradients")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.02, help="0: DDP's own exchange")
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    options = parser.parse_args()
    model = train(options.epochs, options.density or None, options.cpu)
    accelerator = Accelerator(cpu=options.cpu)
    accelerator.print(f"{digits.accuracy(model.cpu()):.1%} of the test images are recognised")
    accelerator.end_training()


if __name__ == "__main__":
    main()

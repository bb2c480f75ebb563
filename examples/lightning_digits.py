#!/usr/bin/env python3
"""PyTorch Lightning with a sparse exchange of gradients.

    python examples/lightning_digits.py --ranks 2

The exchange is a callback, an ordinary argument of the Trainer; its checkpoints hold the residuals
of all ranks, and can be loaded by any number of ranks. On GPUs, without that, there is

    strategy=DDPStrategy(ddp_comm_state=state, ddp_comm_hook=sparsecomm.oktopk_hook)

which Lightning leaves alone on CPUs.
"""

from __future__ import annotations

import argparse
from typing import Any

import digits
import pytorch_lightning as lightning
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import sparsecomm


class SparseGradients(lightning.Callback):
    """Prepares the model and its optimizer; of use with the strategy ``ddp``."""

    state: sparsecomm.CompressionState

    def __init__(self, density: float) -> None:
        self.density = density
        self.loaded: dict[str, Any] | None = None

    def on_fit_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        model, [optimizer] = trainer.strategy.model, trainer.optimizers
        assert isinstance(model, DistributedDataParallel)
        self.state = sparsecomm.prepare(model, optimizer, self.density)
        if self.loaded is not None:
            self.state.load_state_dict(self.loaded)

    def on_save_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Called on every rank; one of them saves what all have."""
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, self.state.state_dict())
        checkpoint["residuals"] = {key: entry for part in everyone for key, entry in part.items()}

    def on_load_checkpoint(
        self,
        trainer: lightning.Trainer,
        pl_module: lightning.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        """Called before the model is in DistributedDataParallel."""
        self.loaded = checkpoint["residuals"]


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = digits.make_model()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        images, labels = batch
        return functional.cross_entropy(self.network(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=digits.LR, momentum=0.9)

    def train_dataloader(self) -> DataLoader[tuple[torch.Tensor, ...]]:
        return DataLoader(digits.datasets()[0], batch_size=digits.BATCH, drop_last=True)


def train(
    epochs: int,
    density: float | None,
    ranks: int,
    checkpoint: str | None = None,
    save: str | None = None,
    **options: Any,
) -> nn.Module:
    """Trains, with a sparse exchange, or with DDP's own if ``density`` is ``None``."""
    callbacks: list[lightning.Callback] = []
    if density is not None:
        callbacks.append(SparseGradients(density))
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy=DDPStrategy(process_group_backend="gloo"),
        devices=ranks,
        max_epochs=epochs,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        **options,
    )
    model = Digits()
    trainer.fit(model, ckpt_path=checkpoint)
    if save is not None:
        trainer.save_checkpoint(save)
    return model.network


def main() -> None:
    parser = argparse.ArgumentParser(description="Lightning with a sparse exchange of gradients")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--density", type=float, default=0.02, help="0: DDP's own exchange")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--save", help="a file for a checkpoint at the end")
    parser.add_argument("--resume", help="such a file to go on from, by any number of ranks")
    options = parser.parse_args()
    density = options.density or None
    model = train(options.epochs, density, options.ranks, options.resume, options.save)
    if dist.get_rank() == 0:
        print(f"{digits.accuracy(model):.1%} of the test images are recognised")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a training program is about: a model, its data, and how both become a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

# Whatever a task's loss takes; the tensors go to the model's device together.
Batch = tuple[Tensor, ...]


class Task(ABC):
    """A model with its data on one rank, for :class:`common.training.Training`.

    It is made when the process group is there and torch's generator has the seed, so that all ranks
    initialise the same model.

    Attributes:
        name: of the model, for people.
        data: what the data are called; a resumed run must have the same.
        unit: what is counted in the progress bar, such as "image".
        batch: units of a rank and step.
        model: on the CPU at first.
        steps_per_epoch: the same on every rank.
        quality: name of the one metric that says how good the model is.
        higher_is_better: of that metric.
        clip_norm: gradients are clipped to this norm, that of all parameters. `None`: not.
    """

    name: str
    data: str
    unit: str
    batch: int
    model: nn.Module
    steps_per_epoch: int
    quality: str
    higher_is_better: bool = True
    clip_norm: float | None = None

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """A new optimizer of the model's parameters, with the momentum of dense training."""

    @abstractmethod
    def learning_rate(self, step: int) -> float:
        """That of a step, counted from 0 over all epochs."""

    @abstractmethod
    def batches(self, epoch: int) -> Iterator[Batch]:
        """`steps_per_epoch` batches of this rank, the same whenever the epoch is begun."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss of a batch on the model's device; the model may be wrapped in DDP."""

    @abstractmethod
    def evaluate(self) -> Tensor:
        """Sums over this rank's share of the test data, as float64; without gradients."""

    @abstractmethod
    def metrics(self, sums: Tensor) -> dict[str, float]:
        """The metrics, `quality` among them, from the sums of all ranks."""

    def to_device(self, batch: Batch) -> Batch:
        """The batch on the model's device."""
        device = next(self.model.parameters()).device
        return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def decay_matrices(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """An optimizer's groups: weights of two dimensions and more decay, biases and norms do not."""
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]

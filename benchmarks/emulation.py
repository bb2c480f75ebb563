"""A model whose forward and backward passes take a given time without using a core.

So ranks that share cores compute as if each had a machine of its own, and what a step takes beyond
that time is due to the exchange of its gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vgg16.model import PARAMETERS as VGG16_NUMEL
from vgg16.model import VGG16

from sparsecomm.overlap import BACKWARD_SHARE

LAYERS = 16  # of a model that is not VGG16
SPREAD = 1.0  # of the logarithm of the entries' scales
SHIFTS = 4  # a gradient's noise is longer than the gradient by a part in this many


def shapes_of(numel: int) -> list[tuple[int, ...]]:
    """Shapes of parameters with ``numel`` entries in all, in the order of the forward pass.

    Those of VGG16 if it has as many, else square matrices of one size, and a vector of the rest.
    """
    if numel == VGG16_NUMEL:
        with torch.device("meta"):
            return [tuple(parameter.shape) for parameter in VGG16().parameters()]
    side = math.isqrt(numel // LAYERS)
    if side == 0:
        raise ValueError(f"{numel} parameters are fewer than the {LAYERS} of the smallest model")
    rest = numel - LAYERS * side * side
    return [*[(side, side)] * LAYERS, *([(rest,)] if rest else [])]


class Gradients:
    """Gradients of one rank: random, heavy-tailed, and different in every step.

    An entry is noise of this rank and step times a scale that the entry has on all ranks and in all
    steps. Scales are log-normal: as in a real model, the same few parameters tend to have large
    gradients everywhere.
    """

    def __init__(self, numel: int, rank: int) -> None:
        common = torch.Generator().manual_seed(1)
        own = torch.Generator().manual_seed(2 + rank)
        self._scales = torch.empty(numel).log_normal_(0, SPREAD, generator=common)
        self._noise = torch.randn(numel + numel // SHIFTS + 1, generator=own)
        self._step = torch.Generator().manual_seed(1)
        self.current = torch.empty(numel)

    def advance(self) -> None:
        """Writes the gradient of the next step into ``current``."""
        numel = len(self.current)
        first = int(torch.randint(len(self._noise) - numel + 1, (), generator=self._step))
        torch.mul(self._scales, self._noise[first : first + numel], out=self.current)


class Clock:
    """Sleeps until the time asked for has passed since :meth:`reset`.

    The work of autograd, and DDP's copies of gradients into buckets, are part of that time: they
    are part of the computing of a step that is measured in training, too.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.asked = 0.0
        self.passed = 0.0  # at the end of the last sleep
        self._start = time.perf_counter()

    def compute(self, seconds: float) -> None:
        self.asked += seconds
        left = self.asked - (time.perf_counter() - self._start)
        if left > 0:
            time.sleep(left)
        self.passed = time.perf_counter() - self._start


class EmulatedModel(nn.Module):
    """Parameters that are used one after another, each for a share of ``seconds``.

    A third of the time is the forward pass. The backward pass goes through the parameters in
    reverse, takes time in proportion to their entries, and hands over each one's part of
    ``gradients.current`` when its time has passed.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], gradients: Gradients, seconds: float
    ) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.clock = Clock()
        self.gradients: list[Tensor] = []
        self.seconds: list[float] = []
        first = 0
        numel = len(gradients.current)
        for layer in self.layers:
            part = gradients.current[first : first + layer.numel()]
            self.gradients.append(part.view(layer.shape))
            self.seconds.append(seconds * layer.numel() / numel)
            first += layer.numel()

    def forward(self, signal: Tensor) -> Tensor:
        self.clock.reset()
        for index, layer in enumerate(self.layers):
            signal = _Layer.apply(signal, layer, self, index)  # type: ignore[no-untyped-call]
        return signal


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, signal: Tensor, layer: Tensor, model: EmulatedModel, index: int
    ) -> Tensor:
        ctx.model, ctx.index = model, index
        model.clock.compute((1 - BACKWARD_SHARE) * model.seconds[index])
        return signal.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor | None, ...]:
        model, index = ctx.model, ctx.index
        model.clock.compute(BACKWARD_SHARE * model.seconds[index])
        # A new view each time, which becomes the parameter's .grad without a copy.
        return gradient[0], model.gradients[index].detach(), None, None

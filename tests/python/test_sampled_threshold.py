"""The sampled threshold on real gradients."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from vgg16.data import load
from vgg16.model import VGG16

from sparsecomm import functional

STRIDE = 127  # the hooks'
STEPS = 5
PHASES = 200
DENSITIES = (0.001, 0.01, 0.02)


def gradients_of_vgg16() -> Iterator[Tensor]:
    """Of the first steps of a training, one after another."""
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    train = load("digits").train
    model = VGG16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    for _ in range(STEPS):
        images, labels = train.take(
            torch.randint(len(train), (16,), generator=generator), generator
        )
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()  # type: ignore[no-untyped-call]
        gradients = [parameter.grad for parameter in model.parameters()]
        yield torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
        optimizer.step()


def test_counts_are_within_a_tenth_of_k_in_98_of_100_samples() -> None:
    """Of gradients with what earlier steps left behind."""
    deviations: dict[float, list[float]] = {density: [] for density in DENSITIES}
    residual: Tensor | None = None
    for step, gradient in enumerate(gradients_of_vgg16()):
        residual = gradient.clone() if residual is None else residual + gradient
        magnitudes, _ = residual.abs().sort()
        numel = len(magnitudes)
        for density, of_density in deviations.items():
            k = int(density * numel)
            for phase in range(PHASES):
                threshold = functional.threshold_sampled(
                    residual, k, stride=STRIDE, phase=1000 * step + phase
                ).magnitude
                count = numel - int(torch.searchsorted(magnitudes, threshold, right=True))
                of_density.append(count / k - 1)
        residual[residual.abs() >= magnitudes[-numel // 50]] = 0
    for density, of_density in deviations.items():
        share = sum(abs(deviation) <= 0.1 for deviation in of_density) / len(of_density)
        spread = statistics.pstdev(of_density)
        print(
            f"density {density}: {share:.3f} of counts within 10%, standard deviation {spread:.4f}"
        )
        assert share >= 0.98
        assert spread > 0.01, "an exact threshold is no sample"

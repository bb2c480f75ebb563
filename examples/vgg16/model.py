"""VGG16 for 32x32 images: 13 convolutions with batch norm and one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PARAMETERS = 14_728_266

# The width of each 3x3 convolution; None is a 2x2 max pooling.
LAYERS: tuple[int | None, ...] = (
    *(64, 64, None),
    *(128, 128, None),
    *(256, 256, 256, None),
    *(512, 512, 512, None),
    *(512, 512, 512, None),
)


class VGG16(nn.Module):
    """Maps images of shape (B, 3, 32, 32) to class scores of shape (B, classes)."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in LAYERS:
            if width is None:
                layers.append(nn.MaxPool2d(2))
                continue
            convolution = nn.Conv2d(channels, width, kernel_size=3, padding=1)
            # With torch's default initialisation the signal fades over 13 layers and a short
            # run stays near chance, dense or not.
            nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
            assert convolution.bias is not None
            nn.init.zeros_(convolution.bias)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            channels = width
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(channels, classes)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.classifier(torch.flatten(self.features(images), 1))
        return scores

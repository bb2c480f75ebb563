"""A speech recogniser in the style of DeepSpeech: convolutions, LSTMs, a lookahead convolution.

The layers are those of Deep Speech 2 (Amodei et al. 2016, section 3): two convolutions over the
spectrogram, recurrent layers with batch norm over each sequence between them (3.2), and a row
convolution that looks ahead (3.6). With five LSTMs of 800 in one direction, 161 frequency bins
and 29 characters they have 27,569,568 parameters, as Ok-Topk's LSTM (Li and Hoefler 2022, Table
2), whose recipe the example follows; the layers themselves are not listed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pad_packed_sequence,
)

PARAMETERS = 27_569_568  # of the size "base", for 161 bins and 29 characters

# Of batch norm's running statistics: those of ten batches of a few utterances differ too much.
STATISTICS_MOMENTUM = 0.05

CEILING = 20.0  # of the clipped rectifiers (Amodei et al. 2016, section 3.1)


Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True)
class Convolution:
    """A convolution's extent, each pair over (frequency, time); no time is lost at the borders."""

    kernel: tuple[int, int]
    stride: tuple[int, int]

    @property
    def padding(self) -> tuple[int, int]:
        return self.kernel[0] // 2, self.kernel[1] // 2

    def outputs(self, inputs: Count, axis: int) -> Count:
        """How many outputs there are for so many inputs along axis 0 (frequency) or 1 (time)."""
        border = 2 * self.padding[axis] - self.kernel[axis]
        return (inputs + border) // self.stride[axis] + 1


@dataclass(frozen=True)
class Size:
    channels: int  # of each convolution
    convolutions: tuple[Convolution, ...]
    lstms: int
    hidden: int  # units of each LSTM
    taps: int  # of the lookahead convolution, the present frame among them
    learning_rate: float
    annealing: float  # the learning rate is divided by it after each epoch

    def frames(self, frames: Count) -> Count:
        """How many frames the model makes of so many frames of a spectrogram."""
        for convolution in self.convolutions:
            frames = convolution.outputs(frames, 1)
        return frames


SIZES = {
    "small": Size(
        channels=8,
        convolutions=(Convolution((21, 11), (4, 2)), Convolution((11, 5), (2, 1))),
        lstms=2,
        hidden=192,
        taps=11,
        learning_rate=6e-3,
        annealing=1.08,  # as much over 20 epochs as 1.01 over Ok-Topk's 160
    ),
    "base": Size(
        channels=32,
        convolutions=(Convolution((41, 11), (2, 2)), Convolution((21, 11), (2, 1))),
        lstms=5,
        hidden=800,
        taps=21,
        learning_rate=1e-3,
        annealing=1.01,
    ),
}


class SpeechModel(nn.Module):
    """Maps spectrograms to the log probabilities of characters, one distribution per frame.

    Nothing of an utterance depends on how far its batch is padded: outputs beyond an utterance's
    end are zero between the layers, and batch norm sees the frames that utterances have.
    """

    def __init__(self, size: Size, bins: int, characters: int) -> None:
        super().__init__()
        self.size = size
        self.convolutions = nn.ModuleList()
        self.convolution_norms = nn.ModuleList()
        channels, height = 1, bins
        for shape in size.convolutions:
            self.convolutions.append(
                nn.Conv2d(channels, size.channels, shape.kernel, shape.stride, shape.padding)
            )
            self.convolution_norms.append(batch_norm(size.channels))
            channels, height = size.channels, shape.outputs(height, 0)
        width = channels * height
        self.lstms = nn.ModuleList(
            nn.LSTM(size.hidden if layer else width, size.hidden) for layer in range(size.lstms)
        )
        self.lstm_norms = nn.ModuleList(
            batch_norm(size.hidden) for _ in range(size.lstms - 1)
        )  # before each LSTM but the first
        self.lookahead = nn.Conv1d(
            size.hidden, size.hidden, size.taps, groups=size.hidden, bias=False
        )
        self.norm = batch_norm(size.hidden)
        self.linear = nn.Linear(size.hidden, characters, bias=False)

    def forward(self, spectrograms: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Recognises a batch.

        Args:
            spectrograms: (B, bins, T), zero beyond each utterance's frames.
            frames: (B), of each utterance; at least 1, at most T.

        Returns:
            Log probabilities (B, T', characters), zero beyond each utterance's end, and how many
            frames of T' each has (B).
        """
        outputs, frames = self._convolve(spectrograms, frames)
        lengths = frames.cpu()  # as torch wants them
        packed = pack_padded_sequence(outputs, lengths, batch_first=True, enforce_sorted=False)
        for layer, lstm in enumerate(self.lstms):
            if layer:
                packed = PackedSequence(self.lstm_norms[layer - 1](packed.data), *packed[1:])
            packed, _ = lstm(packed)
        outputs, _ = pad_packed_sequence(packed, batch_first=True)
        ahead = functional.pad(outputs.transpose(1, 2), (0, self.size.taps - 1))
        outputs = functional.hardtanh(self.lookahead(ahead), 0, CEILING).transpose(1, 2)
        inside = mask(frames, outputs.shape[1], outputs.device)
        scores = self.linear(self.norm(outputs[inside]))
        return spread(functional.log_softmax(scores, dim=-1), inside), frames

    def _convolve(self, spectrograms: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, T', channels * bins') of spectrograms, and the utterances' frames."""
        outputs = spectrograms.unsqueeze(1)
        for convolution, norm, shape in zip(
            self.convolutions, self.convolution_norms, self.size.convolutions, strict=True
        ):
            outputs = convolution(outputs).permute(0, 3, 1, 2)  # (B, T', channels, bins')
            frames = shape.outputs(frames, 1)
            inside = mask(frames, outputs.shape[1], outputs.device)
            clipped = functional.hardtanh(norm(outputs[inside]), 0, CEILING)
            outputs = spread(clipped, inside).permute(0, 2, 3, 1)
        return outputs.flatten(1, 2).transpose(1, 2), frames


def batch_norm(channels: int) -> nn.BatchNorm1d:
    return nn.BatchNorm1d(channels, momentum=STATISTICS_MOMENTUM)


def mask(frames: Tensor, longest: int, device: torch.device) -> Tensor:
    """Which of `longest` frames lie within each utterance, bool, (B, longest)."""
    return torch.arange(longest, device=device) < frames.to(device).unsqueeze(1)


def spread(values: Tensor, inside: Tensor) -> Tensor:
    """The rows of `values` where `inside` is true, in order, and zeros elsewhere."""
    padded = values.new_zeros(*inside.shape, *values.shape[1:])
    padded[inside] = values
    return padded

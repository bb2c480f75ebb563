"""BERT (Devlin et al. 2019) with both of its pre-training heads, at sizes of Turc et al. (2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

POSITIONS = 512
DEVIATION = 0.02  # of the weights at the start, in a normal distribution cut at twice that
EPSILON = 1e-12  # of layer norm


@dataclass(frozen=True)
class Size:
    """A model, the vocabulary it is made for, and what suits its training."""

    width: int  # of hidden states; the feed-forward layers have four times as much
    layers: int
    heads: int
    vocabulary: int
    dropout: float
    learning_rate: float  # at its peak


# The small ones are for the default data: 300,000 tokens make no larger vocabulary, and no small
# model learns them by heart. Base is that of the papers.
SIZES = {
    "tiny": Size(128, 2, 2, vocabulary=4096, dropout=0.0, learning_rate=2e-3),
    "mini": Size(256, 4, 4, vocabulary=4096, dropout=0.0, learning_rate=1e-3),
    "base": Size(768, 12, 12, vocabulary=30_522, dropout=0.1, learning_rate=2e-4),
}


class Bert(nn.Module):
    """Tells the tokens at masked positions, and whether the second segment follows the first.

    The output layer has weights of its own instead of those of the word embeddings.
    """

    def __init__(self, size: Size, vocabulary: int) -> None:
        super().__init__()
        width = size.width
        self.words = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(POSITIONS, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.dropout = nn.Dropout(size.dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                size.heads,
                4 * width,
                size.dropout,
                functional.gelu,
                layer_norm_eps=EPSILON,
                batch_first=True,
            )
            for _ in range(size.layers)
        )
        self.pooler = nn.Linear(width, width)
        self.next_sentence = nn.Linear(width, 2)
        self.transform = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, eps=EPSILON)
        )
        self.decoder = nn.Linear(width, vocabulary)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.trunc_normal_(parameter, 0, DEVIATION, -2 * DEVIATION, 2 * DEVIATION)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(
        self, tokens: Tensor, segments: Tensor, padding: Tensor, masked: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of the vocabulary at each masked position, and of both answers per sequence.

        Args:
            tokens: int64, (B, L), L up to 512.
            segments: int64, (B, L), 0 or 1.
            padding: bool, (B, L), where a sequence has ended.
            masked: int64, (M), positions in the B * L tokens. Only there are scores computed.

        Returns:
            (M, vocabulary) and (B, 2); of the latter the second is that another segment follows.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.words(tokens) + self.positions(places) + self.segments(segments)
        hidden = self.dropout(self.norm(hidden))
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=padding)
        scores: Tensor = self.decoder(self.transform(hidden.flatten(0, 1)[masked]))
        follows: Tensor = self.next_sentence(torch.tanh(self.pooler(hidden[:, 0])))
        return scores, follows

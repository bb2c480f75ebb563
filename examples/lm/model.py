"""A decoder of bytes, with layer norm before each part of a layer as in GPT-2."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

BYTES = 256  # what there is to predict
DEVIATION = 0.02  # of the weights of embeddings at the start


@dataclass(frozen=True)
class Size:
    """A model, how many bytes it looks back on, and what suits its training."""

    width: int  # of hidden states; the feed-forward layers have four times as much
    layers: int
    heads: int
    context: int
    learning_rate: float  # of AdamW with dense gradients, at its peak


# The first is for the default data and two cores; base is as large as the smallest GPT-2.
SIZES = {
    "tiny": Size(128, 3, 4, context=64, learning_rate=3e-3),
    "mini": Size(256, 6, 8, context=256, learning_rate=1e-3),
    "base": Size(768, 12, 12, context=1024, learning_rate=6e-4),
}


class Decoder(nn.Module):
    """Predicts each byte from those before it."""

    mask: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width,
                size.heads,
                4 * size.width,
                dropout=0.0,
                activation="gelu",
                batch_first=True,
                norm_first=True,
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES)
        for embedding in (self.bytes, self.positions):
            nn.init.normal_(embedding.weight, std=DEVIATION)
        mask = nn.Transformer.generate_square_subsequent_mask(size.context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the byte after each.

        Args:
            text: int64, (B, L), L up to the size's context.

        Returns:
            (B, L, 256).
        """
        length = text.shape[1]
        hidden = self.bytes(text) + self.positions.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=self.mask[:length, :length], is_causal=True)
        scores: Tensor = self.head(self.norm(hidden))
        return scores

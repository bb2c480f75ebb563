"""Documents as bytes, one after the other, to train on and to test with."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter

import torch
from common.documents import read
from common.errors import DataError
from torch import Tensor

HELD_OUT = 10  # every tenth document is for the test
BETWEEN_PARAGRAPHS = b"\n\n"
BETWEEN_DOCUMENTS = b"\0"


@dataclass(frozen=True)
class Text:
    """Bytes to predict, each after `context` others at most.

    Attributes:
        data: uint8, (N).
        context: bytes of an example's input.
    """

    data: Tensor
    context: int

    def __len__(self) -> int:
        """How many examples there are, wherever the first begins."""
        return max(0, len(self.data) // self.context - 1)

    def take(self, indices: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and the bytes that follow each, int64, (B, context) both.

        Args:
            indices: int64, (B), of examples.
            start: where the first example begins, below `context`.
        """
        places = start + indices[:, None] * self.context + torch.arange(self.context + 1)
        text = self.data[places].long()
        return text[:, :-1], text[:, 1:]


def read_text(spec: str, context: int, limit: int | None) -> tuple[Text, Text]:
    """Reads the text to train on, and the text that is held out, into memory.

    Args:
        spec: as :func:`common.documents.read` takes it.
        context: of an example, in bytes.
        limit: of documents, for a quick try.

    Raises:
        DataError: as that function, or there is too little.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    documents = groupby(read(spec), key=itemgetter(0))
    for number, (_, paragraphs) in enumerate(islice(documents, limit)):
        text = BETWEEN_PARAGRAPHS.join(paragraph.strip().encode() for _, paragraph in paragraphs)
        parts[number % HELD_OUT == HELD_OUT - 1].append(text)
    texts = [bytearray(BETWEEN_DOCUMENTS.join(part)) for part in parts]
    if min(map(len, texts)) < 2 * context:
        raise DataError(
            f"{spec}: {len(texts[0])} bytes to train on and {len(texts[1])} to test with, and "
            f"{2 * context} of each are needed; every {HELD_OUT}th document is for the test"
        )
    train, test = (Text(torch.frombuffer(text, dtype=torch.uint8), context) for text in texts)
    return train, test

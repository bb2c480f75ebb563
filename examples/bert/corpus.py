"""Documents as tokens on the disk.

They are written once, some thousand sentences at a time, with two bytes per token and eight more
per sentence, and mapped into memory from then on. So memory needs hold the order of an epoch alone,
eight bytes per sequence.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from common.documents import fingerprint, read
from common.errors import DataError
from numpy.typing import NDArray

from bert.vocabulary import make_tokenizer, make_vocabulary

FORMAT = 1  # of the files; where it was another one, they are made anew

LENGTH = 128  # tokens of a sequence
ROOM = LENGTH - 3  # of these for its segments: the others are [CLS] and twice [SEP]
LARGEST_VOCABULARY = 1 << 16  # in two bytes

HELD_OUT = 10  # every tenth document is for the test, and fewer where these were more than
MOST_HELD_OUT = 1000
VOCABULARY_TEXT = 1 << 28  # characters that the vocabulary is made from, about
BATCH_TEXT = 1 << 20  # characters that are turned into tokens at a time, about

# From the outermost to the innermost, and how each is written.
FILES: dict[str, Any] = {
    "documents": np.int64,
    "chunks": np.int64,
    "sentences": np.int64,
    "tokens": np.uint16,
}

# After a full stop, and quotes that may follow it, where a sentence could begin.
_BETWEEN_SENTENCES = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]]))\s+(?=[\"'(\[]?[A-Z0-9])")


def prepare(spec: str, vocabulary: int, folder: Path, limit: int | None = None) -> Path:
    """The folder with vocabulary and tokens, which are made if they are not there.

    Args:
        spec: `prose` or `text:FOLDER`.
        vocabulary: the most tokens that the vocabulary may have.
        folder: where those of all data are kept.
        limit: the most documents.

    Raises:
        DataError: the data cannot be used, or the folder cannot be written.
    """
    settings = [FORMAT, LENGTH, spec, fingerprint(spec), vocabulary, limit]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    final = folder / f"{spec.partition(':')[0]}-{vocabulary}-{digest[:12]}"
    if final.is_dir():
        return final
    print(f"making tokens of {spec} in {final}", flush=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{final.name}.", dir=folder) as own:
            made = Path(own) / "made"
            made.mkdir()
            survey = Survey.of(spec, limit)
            tokens = make_vocabulary(survey.texts_for_vocabulary, vocabulary)
            content = "".join(f"{token}\n" for token in tokens)
            (made / "vocabulary.txt").write_text(content, encoding="utf-8")
            write_tokens(survey, make_tokenizer(tokens), made)
            try:
                made.rename(final)
            except OSError:
                if not final.is_dir():  # by another run, meanwhile
                    raise
    except OSError as error:
        raise DataError(f"{final}: {error.strerror or error}") from None
    return final


def read_vocabulary(folder: Path) -> list[str]:
    """The tokens in the order of their numbers."""
    path = folder / "vocabulary.txt"
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; do all ranks share the folder?") from None


@dataclass(frozen=True)
class Survey:
    """How much there is. All of it has been read, and is well-formed."""

    spec: str
    limit: int | None
    documents: int
    characters: int

    @staticmethod
    def of(spec: str, limit: int | None) -> Survey:
        documents = characters = 0
        for document, paragraph in _numbered(spec, limit):
            documents = document + 1
            characters += len(paragraph)
        return Survey(spec, limit, documents, characters)

    def paragraphs(self) -> Iterator[tuple[int, str]]:
        """Each after the number of its document."""
        return _numbered(self.spec, self.limit)

    def is_held_out(self, document: int) -> bool:
        every = max(HELD_OUT, -(-self.documents // MOST_HELD_OUT))
        return document % every == every - 1

    def texts_for_vocabulary(self) -> Iterator[str]:
        """Paragraphs of documents to train on, evenly from all of the data."""
        every = max(1, -(-self.characters // VOCABULARY_TEXT))
        for document, paragraph in self.paragraphs():
            if document % every == 0 and not self.is_held_out(document):
                yield paragraph


def _numbered(spec: str, limit: int | None) -> Iterator[tuple[int, str]]:
    documents = groupby(read(spec), key=itemgetter(0))
    for number, (_, document) in enumerate(islice(documents, limit)):
        for _, paragraph in document:
            yield number, paragraph


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph, told by punctuation alone."""
    return [part for part in map(str.strip, _BETWEEN_SENTENCES.split(paragraph)) if part]


def write_tokens(survey: Survey, tokenizer: Any, folder: Path) -> None:
    """Writes the documents to train on into the folder `train`, and those held out into `test`."""
    with ExitStack() as stack:
        train, test = (stack.enter_context(Writer(folder / name)) for name in ("train", "test"))
        for batch in _batches(survey.paragraphs()):
            encodings = tokenizer.encode_batch([text for _, text in batch])
            for (document, _), encoding in zip(batch, encodings, strict=True):
                (test if survey.is_held_out(document) else train).add(document, encoding.ids)
    for part, writer in (("to train on", train), ("to test with", test)):
        if writer.documents < 2:
            raise DataError(
                f"{survey.spec}: too few documents of several sentences: of {survey.documents} "
                f"there are {writer.documents} {part}, and two are needed; every "
                f"{HELD_OUT}th is for the test"
            )


def _batches(paragraphs: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Sentences after the numbers of their documents, as many as make `BATCH_TEXT`."""
    batch: list[tuple[int, str]] = []
    size = 0
    for document, paragraph in paragraphs:
        batch += [(document, sentence) for sentence in sentences(paragraph)]
        size += len(paragraph)
        if size > BATCH_TEXT:
            yield batch
            batch, size = [], 0
    yield batch


class Writer:
    """Writes the documents of a split: they have chunks, these sentences, and these tokens.

    Each file but the last says where its elements begin in the next one, and at last where that
    ends. A chunk has the sentences that fill a sequence, at least two, since long ones are cut: so
    there are two segments to make. A single one that is left at a document's end is dropped.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._files = {name: (folder / name).open("wb") for name in FILES}
        self._counts = dict.fromkeys(FILES, 0)
        self._document: int | None = None
        self._begun = False  # the document has a chunk
        self._chunk: list[list[int]] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_chunk()
        for name, inner in pairwise(FILES):
            self._write(name, [self._counts[inner]])
        for file in self._files.values():
            file.close()

    @property
    def documents(self) -> int:
        """How many have been written, and the file's last entry when that is there."""
        return self._counts["documents"] - 1

    def add(self, document: int, tokens: list[int]) -> None:
        """Adds a sentence to its document, the last one or a new one."""
        if document != self._document:
            self._end_chunk()
            self._document, self._begun = document, False
        for start in range(0, len(tokens), ROOM // 2):
            self._chunk.append(tokens[start : start + ROOM // 2])
            if sum(map(len, self._chunk)) >= ROOM:
                self._end_chunk()

    def _end_chunk(self) -> None:
        if len(self._chunk) > 1:
            if not self._begun:
                self._write("documents", [self._counts["chunks"]])
                self._begun = True
            self._write("chunks", [self._counts["sentences"]])
            for sentence in self._chunk:
                self._write("sentences", [self._counts["tokens"]])
                self._write("tokens", sentence)
        self._chunk = []

    def _write(self, name: str, values: list[int]) -> None:
        self._files[name].write(np.array(values, FILES[name]).tobytes())
        self._counts[name] += len(values)


class Corpus:
    """The documents of a split, as :class:`Writer` has left them in a folder.

    Raises:
        DataError: a file is missing or cut off.
    """

    documents: NDArray[np.int64]
    chunks: NDArray[np.int64]
    sentences: NDArray[np.int64]
    tokens: NDArray[np.uint16]

    def __init__(self, folder: Path) -> None:
        for name, kind in FILES.items():
            try:
                setattr(self, name, np.memmap(folder / name, kind, mode="r"))
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{folder / name}: {error}; remove {folder.parent} to have it made anew, and "
                    "let all ranks share it"
                ) from None
        for name, inner in pairwise(FILES):
            end = len(getattr(self, inner)) - (inner != "tokens")
            if getattr(self, name)[-1] != end:
                raise DataError(
                    f"{folder / inner}: cut off; remove {folder.parent} to have it made anew"
                )

    def __len__(self) -> int:
        """The number of chunks."""
        return len(self.chunks) - 1

    def span(self, first: int, last: int) -> NDArray[np.uint16]:
        """The tokens of sentences, without the last."""
        return self.tokens[self.sentences[first] : self.sentences[last]]

    def document_of(self, chunk: int) -> tuple[int, int]:
        """The first chunk of its document, and the first of the next."""
        after = int(np.searchsorted(self.documents, chunk, "right"))
        return int(self.documents[after - 1]), int(self.documents[after])

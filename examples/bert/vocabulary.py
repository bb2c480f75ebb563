"""A vocabulary of WordPiece, trained on the text that is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from common.errors import DataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")  # the vocabulary begins with them
PAD, UNKNOWN, CLS, SEP, MASK = range(len(SPECIAL))
LARGEST_ALPHABET = 1000  # of the characters; others are unknown


def make_vocabulary(texts: Callable[[], Iterable[str]], size: int) -> list[str]:
    """The tokens of lower-case text without accents, `size` at most; ## is before a word's others.

    The same texts, which are gone through twice, give the same vocabulary.

    Raises:
        DataError: the characters do not fit into it.
    """
    tokenizer = make_tokenizer([])
    counts: Counter[str] = Counter()
    for text in texts():
        counts.update(tokenizer.normalizer.normalize_str(text))
    letters = [letter for letter in counts if not letter.isspace()]
    alphabet = sorted(letters, key=lambda letter: (-counts[letter], letter))[:LARGEST_ALPHABET]
    # The trainer decides by their numbers between pairs that are as frequent, and would number the
    # characters inside words differently in each process.
    first = [*SPECIAL, *(f"##{letter}" for letter in alphabet)]
    if size < len(first) + len(alphabet):
        raise DataError(
            f"{len(alphabet)} different characters need a vocabulary of at least "
            f"{len(first) + len(alphabet)}, not {size}"
        )
    trainer = _package().trainers.WordPieceTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=first,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    numbers: dict[str, int] = tokenizer.get_vocab()
    return sorted(numbers, key=numbers.__getitem__)


def make_tokenizer(vocabulary: list[str]) -> Any:
    """BERT's tokenizer, to which text that looks like a special token is text."""
    package = _package()
    numbers = {token: number for number, token in enumerate(vocabulary)}
    tokenizer = package.Tokenizer(package.models.WordPiece(numbers, unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = package.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = package.pre_tokenizers.BertPreTokenizer()
    return tokenizer


def _package() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(f"text needs tokenizers: {error}; pip install tokenizers") from None
    return tokenizers

"""The BERT example: its model, documents, vocabulary and examples, and a run that was resumed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_bert
from bert import corpus, examples, vocabulary
from bert.corpus import LENGTH, ROOM, Corpus, Survey, Writer
from bert.model import SIZES, Bert
from bert.vocabulary import CLS, MASK, SEP, SPECIAL
from common import documents
from common.errors import DataError
from common.training import Training
from curves import assert_same_curves
from ranks import run_ranks

# The model


def test_the_model_has_the_parameters_of_the_literature() -> None:
    with torch.device("meta"):
        base = Bert(SIZES["base"], 30_522)
    assert sum(parameter.numel() for parameter in base.parameters()) == 133_547_324


def test_padding_changes_nothing() -> None:
    torch.manual_seed(1)
    model = Bert(SIZES["tiny"], 100).eval()
    assert model.decoder.weight.std().item() == pytest.approx(0.0176, rel=0.02)  # cut at 2 of 0.02
    tokens = torch.randint(100, (3, 16))
    padding = torch.zeros(3, 16, dtype=torch.bool)
    padding[1, 10:] = True
    segments, masked = (torch.arange(16) > 7).long().expand(3, 16), torch.tensor([1, 5, 20, 40])
    scores, follows = model(tokens, segments, padding, masked)
    assert scores.shape == (4, 100)
    assert follows.shape == (3, 2)
    other = tokens.clone()
    other[1, 10:] = 0
    torch.testing.assert_close(model(other, segments, padding, masked), (scores, follows))
    other[1, 9] = (other[1, 9] + 1) % 100
    assert not torch.equal(model(other, segments, padding, masked)[0][2], scores[2])


# Documents

EXTRACT = (
    '<doc id="7" url="https://en.wikipedia.org/wiki?curid=7" title="{0}">\n{0}\n\n{1}\n\n</doc>\n'
)


def read_folder(folder: Path) -> list[tuple[str, str]]:
    return [
        (place.removeprefix(f"{folder}/"), text)
        for place, text in documents.read(f"text:{folder}")
        if text.strip()
    ]


def test_extracts_and_files_of_a_folder_are_read(tmp_path: Path) -> None:
    (tmp_path / "AA").mkdir()
    extracts = EXTRACT.format("One", "First.\nA &lt; B.") + EXTRACT.format("Two", "Third.")
    (tmp_path / "AA" / "wiki_00").write_text(extracts)
    entries = [{"title": "x", "text": "First.\nA &lt; B."}, {"text": "Fourth."}]
    (tmp_path / "AA" / "wiki_01").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (tmp_path / "b.txt").write_text("\ufeffHard\nwrapped.\n\n\n{Next}\n", encoding="utf-8")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    assert read_folder(tmp_path) == [
        *[("b.txt", "Hard wrapped. "), ("b.txt", "{Next}")],
        *[("AA/wiki_00:1", "First."), ("AA/wiki_00:1", "A < B."), ("AA/wiki_00:8", "Third.")],
        *[("AA/wiki_01:1", "First."), ("AA/wiki_01:1", "A < B."), ("AA/wiki_01:2", "Fourth.")],
    ]


GOOD = EXTRACT.format("Title", "Text.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-8], ":1: <doc> is not closed: is the file cut off?"),
        (GOOD + GOOD[:-8] + GOOD, ":7: <doc> is still open at the next, line 11"),
        (GOOD + "lost\n", ":7: 'lost' is in no <doc>"),
        (GOOD + "</doc>\n", ":7: </doc> without <doc> before it"),
        ('{"text": "a"}\n{"text": "b', ":2: not JSON: Unterminated string"),
        ('{"text": "\\ud800"}', ":1: not JSON: 'utf-8' codec can't encode"),
        ('{"text": "a"}\n\n{"title": "b"}', ':3: expected an object with a "text"'),
        ('{"text": 3}', ':1: expected an object with a "text" that is a string'),
        ("Text.", ':1: begins neither with <doc id="..."> nor'),
        (b'{"text": ""}\n\xe9t\xe9', ":2: not UTF-8: invalid continuation byte at byte 1"),
        (b"x" * (1 << 24), ":1: longer than 16777216 bytes"),
        (None, ": a folder without files"),
    ],
)
def test_malformed_documents(tmp_path: Path, content: str | bytes | None, message: str) -> None:
    path = tmp_path / "wiki_00"
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as error:
        read_folder(tmp_path)
    assert str(error.value).startswith(f"{path if content else tmp_path}{message}")


def test_a_folder_or_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere: No such file"):
        corpus.prepare(f"text:{tmp_path / 'nowhere'}", 100, tmp_path)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"link: No such file"):
        corpus.prepare(f"text:{tmp_path}", 100, tmp_path)


def test_sentences() -> None:
    text = 'It is 3.5 m. "Is it?" Yes (it is.) And so on, e.g. this... or that'
    expected = ["It is 3.5 m.", '"Is it?"', "Yes (it is.)", "And so on, e.g. this... or that"]
    assert corpus.sentences(text) == expected
    assert corpus.sentences(" ") == []


# Tokens


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("tokenizers")
    return tmp_path_factory.mktemp("cache")


def test_tokens_are_those_of_the_documents(cache: Path, tmp_path: Path) -> None:
    for number in range(30):
        text = f"This is document {number}. It was  naïvely made! {'Über ' * number}Nothing else."
        (tmp_path / f"{number:02}.txt").write_text(text, encoding="utf-8")
    spec = f"text:{tmp_path}"
    folder = corpus.prepare(spec, 150, cache)
    tokens = corpus.read_vocabulary(folder)
    assert len(tokens) <= 150
    assert tuple(tokens[: len(SPECIAL)]) == SPECIAL

    def text_of(split: str, document: int) -> str:
        part = Corpus(folder / split)
        first, end = part.chunks[part.documents[document : document + 2]]
        words = " ".join(tokens[token] for token in part.span(first, end))
        return words.replace(" ##", "")

    assert text_of("train", 1) == "this is document 1 . it was naively made ! uber nothing else ."
    assert text_of("train", 9).startswith("this is document 10 . it")
    # The vocabulary is that of what is trained on, which has no 9.
    assert text_of("test", 2).startswith("this is document [UNK] . it")
    assert [len(Corpus(folder / split).documents) - 1 for split in ("train", "test")] == [27, 3]

    survey = Survey.of(spec, None)
    for _ in range(3):
        assert vocabulary.make_vocabulary(survey.texts_for_vocabulary, 150) == tokens
    assert corpus.prepare(spec, 150, cache) == folder
    (tmp_path / "30.txt").write_text("One more. And more.")
    assert corpus.prepare(spec, 150, cache) != folder

    with pytest.raises(DataError, match=r"different characters need a vocabulary of at least"):
        corpus.prepare(spec, 30, cache)
    with pytest.raises(DataError, match=r"too few documents .* of 19 there are 1 to test with"):
        corpus.prepare(spec, 150, cache, limit=19)
    (folder / "test" / "tokens").write_bytes(b"12")
    with pytest.raises(DataError, match=r"tokens: cut off; remove"):
        Corpus(folder / "test")
    (folder / "test" / "tokens").unlink()
    with pytest.raises(DataError, match=r"tokens: .* let all ranks share it"):
        Corpus(folder / "test")


@pytest.mark.slow
def test_the_library_has_enough_prose() -> None:
    found = documents.prose()
    assert sum(len(text.split()) for _, text in found) > 100_000
    assert len({text for _, text in found}) == len(found)


# Examples

DOCUMENTS = 30


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Its tokens are the numbers of their places, after the special ones."""
    random = np.random.default_rng(3)
    folder = tmp_path_factory.mktemp("numbered") / "split"
    number = len(SPECIAL)
    with Writer(folder) as writer:
        for document in range(DOCUMENTS):
            for length in random.integers(1, 200, random.integers(2, 30)):
                writer.add(document, list(range(number, number + length)))
                number += length
    return Corpus(folder)


def test_chunks_fill_a_sequence_with_sentences(numbered: Corpus) -> None:
    assert len(numbered.documents) == DOCUMENTS + 1
    ends = set(numbered.documents.tolist())
    for begin, end in pairwise(numbered.chunks[numbered.documents].tolist()):
        assert (np.diff(numbered.span(begin, end)) == 1).all()
    for chunk, (first, last) in enumerate(pairwise(numbered.chunks.tolist())):
        length = len(numbered.span(first, last))
        assert last - first >= 2
        assert len(numbered.span(first, last - 1)) < ROOM
        assert length >= ROOM or chunk + 1 in ends


def test_segments_follow_or_are_from_another_document(numbered: Corpus) -> None:
    random = np.random.default_rng(4)
    lengths: dict[bool, list[int]] = {True: [], False: []}
    for chunk in np.tile(np.arange(len(numbered)), 5).tolist():
        one, two, elsewhere = examples.draw_segments(numbered, chunk, random)
        assert len(one) > 0
        assert len(two) > 0
        assert len(one) + len(two) <= ROOM
        for segment in (one, two):
            assert (np.diff(segment) == 1).all()
        begin, end = (numbered.chunks[c] for c in numbered.document_of(chunk))
        own = numbered.span(begin, end)
        assert own[0] <= one[0] <= one[-1] <= own[-1]
        assert (own[0] <= two[0] <= own[-1]) == (own[0] <= two[-1] <= own[-1]) == (not elsewhere)
        if not elsewhere:
            assert one[-1] < two[0]
            # Nothing but what was cut, from ends of either, lies between them.
            assert two[0] - one[-1] == 1 or len(one) + len(two) == ROOM
        lengths[elsewhere].append(len(one) + len(two))
    share = len(lengths[True]) / sum(map(len, lengths.values()))
    assert share == pytest.approx(0.5, abs=0.05)
    # Neither tells itself by its length.
    full = [np.mean(np.array(lengths[elsewhere]) == ROOM) for elsewhere in (True, False)]
    assert full[0] == pytest.approx(full[1], abs=0.15)


def test_masks_are_as_in_the_paper(numbered: Corpus) -> None:
    random = np.random.default_rng(5)
    size = int(numbered.tokens.max()) + 1
    draws = [(chunk, random) for chunk in range(len(numbered))] * 3
    tokens, segments, padding, masked, labels, elsewhere = examples.make_batch(
        numbered, draws, size
    )
    assert tokens.shape == segments.shape == padding.shape == (len(draws), LENGTH)
    assert len(elsewhere) == len(draws)
    assert len(set(masked.tolist())) == len(masked) == len(labels)
    assert (tokens[:, 0] == CLS).all()
    assert ((tokens == SEP).sum(1) == 2).all()
    lengths = (~padding).sum(1)
    assert (tokens[torch.arange(len(draws)), lengths - 1] == SEP).all()
    assert (tokens[padding] == 0).all()
    assert (segments.sum(1) + ((segments == 0) & ~padding).sum(1) == lengths).all()

    whole = tokens.flatten().clone()
    found = whole[masked]
    whole[masked] = labels
    assert labels.min() >= len(SPECIAL)
    ascending = whole.view_as(tokens)
    inside = (ascending[:, 1:] >= len(SPECIAL)) & (ascending[:, :-1] >= len(SPECIAL))
    assert (ascending.diff(dim=1)[inside] == 1).all()  # the labels are what was there
    assert len(masked) / (lengths - 3).sum() == pytest.approx(0.15, abs=0.005)
    assert (found == MASK).float().mean().item() == pytest.approx(0.8, abs=0.03)
    assert (found == labels).float().mean().item() == pytest.approx(0.1, abs=0.02)
    assert found[found != MASK].min() >= len(SPECIAL)


# Whole runs


@pytest.fixture(scope="module")
def prose(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options for a few documents of simple sentences."""
    folder = tmp_path_factory.mktemp("prose")
    random = np.random.default_rng(6)
    for number in range(40):
        animals = random.choice(["cat", "dog", "bird", "fish"], (24, 2)).tolist()
        text = " ".join(f"The {one} of house {number % 7} sees the {two}." for one, two in animals)
        (folder / f"{number:02}").write_text(text)
    data = ["--data", f"text:{folder}", "--vocabulary", "100", "--cache", str(cache)]
    return [*data, "--batch", "4", "--device", "cpu", "--backend", "gloo"]


def train(output: Path, runs: dict[str, list[str]]) -> None:
    SIZES["tiny"] = replace(SIZES["tiny"], dropout=0.02)  # whose draws are resumed, too
    for name, options in runs.items():
        arguments = ["--output", str(output / name), *options]
        Training(train_bert.parse_options(arguments), train_bert.Pretraining).run()


def summary_of(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def test_a_resumed_run_learns_the_same(prose: list[str], tmp_path: Path) -> None:
    sparse = ["--density", "0.05", "--recipe", "recommended", "--momentum-correction"]
    options = [*prose, "--hook", "oktopk", *sparse, "--epochs", "3"]
    parts = [*options, "--checkpoint-every", "1"]
    run_ranks(2, train, tmp_path, {"whole": options, "parts": [*parts, "--steps", "21"]})
    stopped = summary_of(tmp_path / "parts")
    assert not stopped["complete"]
    run_ranks(2, train, tmp_path, {"parts": [*parts, "--resume"]})
    whole, resumed = (summary_of(tmp_path / name) for name in ("whole", "parts"))
    assert whole["complete"]
    assert whole["momentum_correction"]
    assert_same_curves(resumed["curves"], whole["curves"])
    assert resumed["parameters_sha256"] == whole["parameters_sha256"]
    # Animals and houses are what is hard to tell, and at first everything is.
    losses = whole["curves"]["test_loss"]
    assert losses[-1] < 0.8 * losses[0]
    assert whole["masked_accuracy"] > 0.4
    assert whole["sent_bytes_per_iteration"] < 4 * whole["parameters"] / 2


def evaluate_and_fail(options: list[str]) -> tuple[list[float], str]:
    torch.manual_seed(1)
    task = train_bert.Pretraining(train_bert.parse_options(options))
    decays = [
        (group["weight_decay"], {parameter.dim() for parameter in group["params"]})
        for group in task.optimizer().param_groups
    ]
    assert decays == [(0.01, {2}), (0.0, {1})]  # none of biases and norms
    task.model.eval()
    sums = task.evaluate()
    dist.all_reduce(sums)
    nowhere = train_bert.parse_options(["--data", "text:nowhere"])
    with pytest.raises(DataError) as error:
        train_bert.Pretraining(nowhere)
    return sums.tolist(), str(error.value)


def test_evaluation_and_errors_are_those_of_any_rank(prose: list[str]) -> None:
    [(alone, _)] = run_ranks(1, evaluate_and_fail, prose)
    for sums, error in run_ranks(2, evaluate_and_fail, prose):
        assert sums == pytest.approx(alone, rel=1e-4)
        assert error == "nowhere: No such file or directory"
    assert alone[5] == 8  # four documents with two chunks


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [train_bert.learning_rate(step, 100, 0.5) for step in range(100)]
    assert rates[:10] == pytest.approx([0.05 * step for step in range(1, 11)])
    assert rates[55] == pytest.approx(0.25)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.01
    assert train_bert.learning_rate(0, 1, 0.5) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "huge"], "--size: invalid choice: 'huge'"),
        (["--vocabulary", "65537"], "--vocabulary 65537 is above 65536"),
        (["--data", "wikipedia"], "--data: 'wikipedia' is neither prose nor text:FOLDER"),
        (["--data", "text:"], "--data: 'text:' is neither"),
    ],
)
def test_bad_options(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        train_bert.main(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err

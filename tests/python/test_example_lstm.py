"""The LSTM example: its model, utterances, decoding, and a run that goes on from a checkpoint."""

from __future__ import annotations

import itertools
import json
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_lstm
from common import training
from common.errors import DataError
from common.order import steps_per_epoch
from curves import assert_same_curves
from lstm import data, decode
from lstm.model import PARAMETERS, SIZES, SpeechModel
from ranks import run_ranks

pytest.importorskip("soundfile", reason="soundfile reads the utterances")


# The model


def test_the_base_size_is_that_of_the_paper() -> None:
    with torch.device("meta"):
        model = SpeechModel(SIZES["base"], data.BINS, data.CHARACTERS)
    assert PARAMETERS == 27_569_568
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS


def small_model() -> SpeechModel:
    torch.manual_seed(1)
    return SpeechModel(SIZES["small"], data.BINS, data.CHARACTERS)


def padded(frames: list[int], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    spectra = torch.randn(len(frames), data.BINS, longest)
    for spectrum, count in zip(spectra, frames, strict=True):
        spectrum[:, count:] = 0
    return spectra, torch.tensor(frames)


def test_an_utterance_does_not_depend_on_its_neighbours() -> None:
    model = small_model()
    model(*padded([70, 60], 70))  # statistics of batch norm that are not the initial ones
    model.eval()
    spectra, frames = padded([90, 41, 120, 1], 130)
    together, counts = model(spectra, frames)
    assert counts.tolist() == [45, 21, 60, 1]
    for row, (count, own) in enumerate(zip(frames.tolist(), counts.tolist(), strict=True)):
        alone, _ = model(spectra[row : row + 1, :, :count], frames[row : row + 1])
        torch.testing.assert_close(together[row, :own], alone[0], rtol=1e-4, atol=1e-5)
        assert together[row, :own].exp().sum(-1).allclose(torch.tensor(1.0))
        assert not together[row, own:].any()


def test_padding_changes_nothing_of_training() -> None:
    spectra, frames = padded([90, 41, 60], 90)
    models = [small_model(), small_model()]
    for model, extra in zip(models, (0, 40), strict=True):
        outputs, _ = model(functional.pad(spectra, (0, extra)), frames)
        torch.autograd.backward((outputs * outputs).sum())
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-3)


# Decoding


def collapsed(path: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(label for label, _ in itertools.groupby(path) if label != decode.BLANK)


def test_beam_search_finds_the_most_probable_text_of_all() -> None:
    generator = torch.Generator().manual_seed(2)
    beaten = 0
    for _ in range(30):
        scores = 1.5 * torch.randn(5, 4, generator=generator)
        frames = scores.log_softmax(-1)
        texts: dict[tuple[int, ...], float] = {}
        for path in itertools.product(range(4), repeat=5):
            probability = sum(frames[i, label].item() for i, label in enumerate(path))
            text = collapsed(path)
            texts[text] = np.logaddexp(texts.get(text, -np.inf), probability)
        best = max(texts, key=lambda text: texts[text])
        assert tuple(decode.beam(frames, 1000)) == best
        single = decode.greedy(frames)
        assert tuple(single) == collapsed(tuple(frames.argmax(-1).tolist()))
        beaten += tuple(single) != best
    assert beaten > 3
    assert decode.beam(torch.empty(0, 4), 3) == []


@pytest.mark.parametrize(
    ("reference", "hypothesis", "expected"),
    [
        ("", "", 0),
        ("ABC", "", 3),
        ("", "AB", 2),
        ("KITTEN", "SITTING", 3),
        ("FLAW", "LAWN", 2),
        ("ABAB", "BABA", 2),
    ],
)
def test_edits(reference: str, hypothesis: str, expected: int) -> None:
    assert decode.edits(reference, hypothesis) == expected
    assert decode.edits(list(hypothesis), list(reference)) == expected


def test_error_rates_count_words_and_characters() -> None:
    task = object.__new__(train_lstm.SpeechTask)
    task.beam = 4
    sums = torch.zeros(6, dtype=torch.float64)
    for reference, found in (("A B C", "A D C"), ("GO", "GO GO")):
        labels = [1 + data.ALPHABET.index(character) for character in found]
        frames = functional.one_hot(torch.tensor(labels), data.CHARACTERS).double()
        sums += task.errors(reference, (frames + 1e-3).log())
    expected = {"word_error_rate": 2 / 4, "character_error_rate": 4 / 7}
    assert task.metrics(sums) == {
        **expected,
        **{f"beam_{name}": value for name, value in expected.items()},
    }


# Utterances


def test_the_utterances_of_the_repository() -> None:
    corpus = data.load("spoken")
    assert (len(corpus.train), len(corpus.test)) == (1500, 200)
    assert sum(file.stat().st_size for file in data.SPOKEN.iterdir()) < 6e6
    rows = {
        part: [line.split("\t")[1] for line in data.read_lines(data.SPOKEN / f"{part}.tsv")[1:]]
        for part in ("train", "test")
    }
    variants = {part: {voice.split("+")[1] for voice in rows[part]} for part in rows}
    assert not variants["train"] & variants["test"]
    seen, heard = (
        {word for u in part for word in u.text.split()} for part in (corpus.train, corpus.test)
    )
    assert heard | set("ABCDEFGHIJKLMNOPQRSTUVWXYZ") <= seen
    train_lstm.check_lengths(corpus.train, SIZES["base"])
    few = data.load("spoken", 3)
    assert [u.text for u in few.train] == [u.text for u in corpus.train[:3]]
    # The packets of a stream that is read to its end are decoded no differently.
    assert all(
        torch.equal(one.samples, other.samples)
        for one, other in zip(few.train, corpus.train, strict=False)
    )


def test_a_spectrogram_shows_a_tone() -> None:
    seconds = torch.arange(data.RATE) / data.RATE
    tone = (8000 * torch.sin(2 * torch.pi * 1000 * seconds)).to(torch.int16)
    spectrum = data.spectrogram(tone)
    utterance = data.Utterance(tone, "A", "")
    assert spectrum.shape == (utterance.frames(), data.BINS) == (101, 161)
    assert (spectrum[2:-2].argmax(-1) == 20).all()  # of 50 Hz each
    assert spectrum.mean().item() == pytest.approx(0, abs=1e-5)
    assert spectrum.std().item() == pytest.approx(1, abs=1e-5)
    faster = utterance.at_speed(1.1)
    spectrum = data.spectrogram(faster.samples)
    assert len(spectrum) == faster.frames() == utterance.frames(1.1) == 91
    assert (spectrum[2:-2].argmax(-1) == 22).all()
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 3, 4)]
    first, again, other = (data.at_any_speed([utterance] * 50, g) for g in generators)
    counts = [[u.frames() for u in utterances] for utterances in (first, again, other)]
    assert counts[0] == counts[1] != counts[2]
    assert min(counts[0]) < 95 < 107 < max(counts[0])


def test_a_batch_is_what_ctc_takes() -> None:
    samples = torch.randint(-99, 99, (900,), dtype=torch.int16)
    batch = [data.Utterance(samples[:n], text, "") for n, text in ((900, "A B"), (500, "'Z"))]
    spectrograms, frames, labels, counts = data.collate(batch)
    assert spectrograms.shape == (2, data.BINS, 6)
    assert frames.tolist() == [6, 4]
    assert not spectrograms[1, :, 4:].any()
    assert counts.tolist() == [3, 2]
    assert data.text_of(labels.tolist()) == "A B'Z"
    assert labels.tolist() == [2, 28, 3, 1, 27]


@pytest.mark.parametrize(("count", "batch", "ranks"), [(100, 8, 2), (10, 4, 3), (2, 4, 3)])
def test_an_epoch_has_every_utterance_in_full_batches(count: int, batch: int, ranks: int) -> None:
    torch.manual_seed(1)
    lengths = torch.randint(50, 300, (count,)).tolist()
    for epoch in (0, 1):
        seen = [
            list(data.epoch_batches(lengths, batch, rank, ranks, 1, epoch)) for rank in range(ranks)
        ]
        steps = steps_per_epoch(count, batch, ranks)
        assert [[len(indices) for indices in batches] for batches in seen] == [
            [batch] * steps
        ] * ranks
        shown = np.bincount(np.array(seen).ravel(), minlength=count)
        assert len(shown) == count
        assert shown.min() >= 1
        repeated = [lengths[i] for i in np.flatnonzero(shown > shown.min())]
        assert sum(repeated) >= len(repeated) * np.mean(lengths)
        assert shown.max() - shown.min() <= 1
        assert seen == [
            list(data.epoch_batches(lengths, batch, rank, ranks, 1, epoch)) for rank in range(ranks)
        ]
    if count == 100:
        first = [list(data.epoch_batches(lengths, 8, 0, 1, 1, epoch)) for epoch in (0, 1)]
        middle = [[np.mean([lengths[i] for i in group]) for group in epoch] for epoch in first]
        assert middle[0] == sorted(middle[0]) != middle[1]
        groups = [[lengths[i] for i in group] for group in first[1]]
        assert np.median([max(group) / min(group) for group in groups]) < 1.5
        assert first[0] != list(data.epoch_batches(lengths, 8, 0, 1, 2, 0))
        third = data.epoch_batches(lengths, 8, 0, 1, 1, 2)
        assert {frozenset(group) for group in third} != {frozenset(group) for group in first[1]}


# AN4

TEXTS = {"train": ["ENTER FOUR", "G M E F", "YES"], "test": ["O'CLOCK", "ERASE"]}


def speech(seed: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Smooth, as speech is to a byte order."""
    noise = np.random.default_rng(seed).normal(0, 3000, 4000)
    return np.convolve(noise, np.ones(8) / 3, "same").astype(np.int16)


def write_wav(path: Path, samples: np.ndarray[Any, Any], rate: int = data.RATE) -> None:
    with wave.open(str(path.with_suffix(".wav")), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


def write_sph(path: Path, samples: np.ndarray[Any, Any]) -> None:
    head = (
        f"NIST_1A\n   1024\nchannel_count -i 1\nsample_count -i {len(samples)}\n"
        f"sample_rate -i {data.RATE}\nsample_n_bytes -i 2\nsample_byte_format -s2 10\n"
        "sample_sig_bits -i 16\nend_head\n"
    )
    content = head.encode().ljust(1024) + samples.astype(">i2").tobytes()
    path.with_suffix(".sph").write_bytes(content)


def write_raw(order: str) -> Callable[[Path, np.ndarray[Any, Any]], None]:
    def write(path: Path, samples: np.ndarray[Any, Any]) -> None:
        path.with_suffix(".raw").write_bytes(samples.astype(order).tobytes())

    return write


WRITERS = {"wav": write_wav, "sph": write_sph, "big": write_raw(">i2"), "little": write_raw("<i2")}


def write_an4(
    folder: Path, write: Callable[[Path, np.ndarray[Any, Any]], None] = write_wav
) -> None:
    (folder / "etc").mkdir(parents=True)
    for part, texts in TEXTS.items():
        (folder / "wav" / part / "fbbh").mkdir(parents=True)
        names = [f"an{part}{number}-fbbh-b" for number in range(len(texts))]
        for seed, name in enumerate(names):
            write(folder / "wav" / part / "fbbh" / name, speech(seed))
        files = "".join(f"{part}/fbbh/{name}\n" for name in names)
        (folder / "etc" / f"an4_{part}.fileids").write_text(files)
        lines = [f"<s> {text} </s> ({name})\n" for text, name in zip(texts, names, strict=True)]
        if part == "test":
            lines = [line.replace("<s> ", "").replace(" </s>", "") for line in lines]
        (folder / "etc" / f"an4_{part}.transcription").write_text("".join(lines))


@pytest.mark.parametrize("writer", WRITERS)
def test_an4_comes_back_as_written(tmp_path: Path, writer: str) -> None:
    write_an4(tmp_path / "an4", WRITERS[writer])
    corpus = data.load(f"an4:{tmp_path / 'an4'}")
    assert corpus.name == "an4"
    for utterances, texts in ((corpus.train, TEXTS["train"]), (corpus.test, TEXTS["test"])):
        assert [utterance.text for utterance in utterances] == texts
        for seed, utterance in enumerate(utterances):
            assert utterance.samples.numpy().tolist() == speech(seed).tolist()
    assert len(data.load(f"an4:{tmp_path / 'an4'}", 1).train) == 1


FILES, TRANSCRIPTS = "etc/an4_train.fileids", "etc/an4_train.transcription"
SECOND = "wav/train/fbbh/antrain1-fbbh-b.wav"


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / file
        content = path.read_text()
        assert old in content
        path.write_text(content.replace(old, new), errors="surrogateescape")

    return damage


def cut(file: str, count: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / file
        path.write_bytes(path.read_bytes()[:count])

    return damage


def sound(samples: Any, rate: int = data.RATE) -> Callable[[Path], None]:
    return lambda folder: write_wav(folder / SECOND, np.array(samples), rate)


MALFORMED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no list": (lambda folder: (folder / FILES).unlink(), f"{FILES}: No such file"),
    "an empty list": (cut(FILES, 0), f"{FILES}: the file is empty"),
    "no transcripts": (lambda folder: (folder / TRANSCRIPTS).unlink(), f"{TRANSCRIPTS}: No such"),
    "binary": (
        replaced(TRANSCRIPTS, "G M E F", "\udcff"),
        f"{TRANSCRIPTS}: not a text: ",
    ),
    "no name": (
        replaced(TRANSCRIPTS, " (antrain1-fbbh-b)", ""),
        f"{TRANSCRIPTS}:2: '<s> G M E F </s>' is not <s> WORDS </s> (FILE)",
    ),
    "twice": (
        replaced(TRANSCRIPTS, "antrain1", "antrain0"),
        f"{TRANSCRIPTS}:2: a second transcript of antrain0-fbbh-b",
    ),
    "no words": (replaced(TRANSCRIPTS, "G M E F", ""), f"{TRANSCRIPTS}:2: no words"),
    "a digit": (replaced(TRANSCRIPTS, "G M", "G 4"), f"{TRANSCRIPTS}:2: '4' in 'G 4 E F' is none"),
    "no transcript": (
        replaced(FILES, "antrain1", "antrain7"),
        f"{FILES}:2: 'antrain7-fbbh-b' has no transcript left in ",
    ),
    "listed twice": (
        replaced(FILES, "antrain2", "antrain1"),
        f"{FILES}:3: 'antrain1-fbbh-b' has no transcript left in ",
    ),
    "not listed": (
        replaced(FILES, "train/fbbh/antrain1-fbbh-b\n", ""),
        f"{TRANSCRIPTS}:2: antrain1-fbbh-b is not in ",
    ),
    "no audio": (lambda folder: (folder / SECOND).unlink(), f"{FILES}:2: FOLDER/wav/train/fbbh/"),
    "no bytes": (cut(SECOND, 0), f"{FILES}:2: FOLDER/{SECOND}: not readable: "),
    "only a head": (cut(SECOND, 44), f"{FILES}:2: FOLDER/{SECOND}: 0 of 4000 samples: cut off"),
    "cut off": (cut(SECOND, 4044), f"{FILES}:2: FOLDER/{SECOND}: 2000 of 4000 samples: cut off"),
    "no samples": (sound([]), f"{FILES}:2: 0 samples are no speech"),
    "silence": (sound([0] * 4000), f"{FILES}:2: the audio is silent"),
    "8 kHz": (sound([1] * 4000, 8000), f"{FILES}:2: FOLDER/{SECOND}: 1 channels at 8000 Hz"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_an4(tmp_path: Path, name: str) -> None:
    write_an4(tmp_path)
    damage, message = MALFORMED[name]
    damage(tmp_path)
    with pytest.raises(DataError) as error:
        data.load(f"an4:{tmp_path}")
    expected = message.replace("FOLDER", str(tmp_path))
    assert str(error.value).startswith(f"{tmp_path}/{expected}")


def test_other_audio_that_is_cut_off(tmp_path: Path) -> None:
    for part in ("train", "test"):
        for suffix in ("ogg", "tsv"):
            content = (data.SPOKEN / f"{part}.{suffix}").read_bytes()
            (tmp_path / f"{part}.{suffix}").write_bytes(content)
    table = tmp_path / "test.tsv"
    lines = table.read_text().splitlines()
    for number, line, message in (
        (2, "x" + lines[2], "test.tsv:3: 'x"),
        (2, lines[2] + "?", "test.tsv:3: '?' in "),
        (2, "1", "test.tsv:3: no words"),
        (2, "99999999" + lines[2], "test.ogg: "),
    ):
        table.write_text("\n".join([*lines[:number], line, *lines[number + 1 :]]))
        with pytest.raises(DataError, match=message.replace("?", r"\?")):
            data.read_spoken(tmp_path, "test", None)
    table.write_text("\n".join(lines))
    cut("test.ogg", 300_000)(tmp_path)
    with pytest.raises(DataError, match=r"test\.ogg: "):
        data.read_spoken(tmp_path, "test", None)

    for write, suffix in ((write_sph, ".sph"), (write_raw(">i2"), ".raw")):
        folder = tmp_path / suffix
        write_an4(folder, write)
        path = (folder / SECOND).with_suffix(suffix)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(DataError, match=rf"fileids:2: .*{suffix}: .*(cut off|not whole)"):
            data.load(f"an4:{folder}")


def test_too_little_audio_for_its_text() -> None:
    samples = torch.ones(18 * data.HOP, dtype=torch.int16)  # 17 frames, of which the model makes 9
    for text, fits in (("ABCDEFGHI", True), ("ABCDEFGHIJ", False), ("ABCDEFGHH", False)):
        utterances = [data.Utterance(samples, text, "list:3")]
        if fits:
            train_lstm.check_lengths(utterances, SIZES["small"])
        else:
            with pytest.raises(DataError, match=r"list:3: 9 frames .* it needs 10"):
                train_lstm.check_lengths(utterances, SIZES["small"])


# Whole runs

QUICK = [
    *("--limit", "32", "--batch", "4", "--epochs", "2", "--device", "cpu", "--beam", "4"),
    *("--recipe", "recommended", "--checkpoint-every", "1"),
]


def train_each(output: Path, runs: list[tuple[str, list[str]]]) -> None:
    for name, options in runs:
        arguments = train_lstm.parse_options([*QUICK, *options, "--output", str(output / name)])
        training.Training(arguments, train_lstm.SpeechTask).run()


def test_a_run_goes_on_to_the_same_model(tmp_path: Path) -> None:
    runs = [("whole", []), ("parts", ["--steps", "6"]), ("parts", ["--resume"])]
    run_ranks(2, train_each, tmp_path, runs, timeout=100)
    whole, resumed = (
        json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "parts")
    )
    assert whole["parameters_sha256"] == resumed["parameters_sha256"]
    assert_same_curves(whole["curves"], resumed["curves"])
    assert whole["complete"]
    assert whole["steps"] == 8
    losses = whole["curves"]["loss"]
    assert losses[-1] < 0.9 * losses[0]
    names = ("word_error_rate", "character_error_rate")
    assert all(0 < whole[prefix + name] < 5 for prefix in ("", "beam_") for name in names)


@pytest.mark.parametrize("spec", ["", "an4", "an4:", "spoken:here", "timit"])
def test_unknown_data_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match="expected spoken or an4:FOLDER"):
        data.load(spec)


def test_a_run_that_diverges_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    small = ["--limit", "8", "--batch", "4", "--epochs", "1", "--hook", "ddp", "--beam", "2"]
    assert train_lstm.main([*small, "--lr", "1e30", "--output", str(tmp_path)]) == 2
    assert "the loss is nan: try a lower --lr" in capsys.readouterr().err

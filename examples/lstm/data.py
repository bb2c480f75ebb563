"""Utterances for the LSTM example: those in the repository, or AN4 from a folder.

The default set, in the folder `spoken`, has letters, digits and words such as AN4's, which a
synthesiser spoke (scripts/spoken_utterances.py). AN4 (Acero and Stern 1990) is the corpus of
Ok-Topk's LSTM. Both are held as 16-bit samples; spectrograms are made when a batch is taken.
"""

from __future__ import annotations

import csv
import re
import wave
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common.errors import DataError
from common.order import steps_per_epoch
from common.seeds import mix_seed
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

SPOKEN = Path(__file__).parent / "spoken"

RATE = 16_000  # samples per second
WINDOW = 320  # samples, 20 ms
HOP = 160  # samples, 10 ms
BINS = WINDOW // 2 + 1

ALPHABET = "'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
CHARACTERS = 1 + len(ALPHABET)  # 0 is the blank of CTC

# Batches are of utterances of similar length; that is taken to be up to so much longer.
LENGTH_NOISE = 0.2
# Utterances to train on are played at a speed of 0.9 to 1.1, which moves pitch and formants too, so
# that there seem to be more speakers (Ko et al. 2015, "Audio augmentation for speech recognition").
SPEED_CHANGE = 0.1

TRANSCRIPT = re.compile(r"(?:<s>)?(?P<text>.*?)(?:</s>)?\s*\((?P<name>[^()\s]+)\)")
SUFFIXES = (".sph", ".wav", ".flac", ".raw")


@dataclass(frozen=True)
class Utterance:
    samples: Tensor  # int16, or float32 on the same scale
    text: str  # words of ALPHABET with one space between them
    source: str  # file and line, for messages

    def frames(self, speed: float = 1) -> int:
        """Of its spectrogram, when it is played at that speed."""
        return 1 + int(len(self.samples) / speed) // HOP

    def at_speed(self, speed: float) -> Utterance:
        signal = self.samples.to(torch.float32).view(1, 1, -1)
        played = functional.interpolate(signal, size=int(len(self.samples) / speed), mode="linear")
        return replace(self, samples=played.flatten())

    @property
    def labels(self) -> list[int]:
        """The text as the model's outputs."""
        return [1 + ALPHABET.index(character) for character in self.text]


def text_of(labels: list[int]) -> str:
    return "".join(ALPHABET[label - 1] for label in labels)


@dataclass(frozen=True)
class Corpus:
    name: str
    train: list[Utterance]
    test: list[Utterance]


def load(spec: str, limit: int | None = None) -> Corpus:
    """Loads `spoken` or `an4:FOLDER`, or only the first `limit` utterances of each part.

    Raises:
        DataError: a file is missing, malformed or cut off.
    """
    kind, _, folder = spec.partition(":")
    if spec == "spoken":
        parts = [read_spoken(SPOKEN, part, limit) for part in ("train", "test")]
    elif kind == "an4" and folder:
        parts = [read_an4(Path(folder), part, limit) for part in ("train", "test")]
    else:
        raise DataError(f"unknown data {spec!r}: expected spoken or an4:FOLDER")
    return Corpus(kind, *parts)


# Batches


def epoch_batches(
    lengths: list[int], batch: int, rank: int, ranks: int, seed: int, epoch: int
) -> Iterator[list[int]]:
    """This rank's batches of indices, in an order that depends on seed and epoch only.

    The utterances of a step are of similar length, and the first epoch goes from short to long
    (Amodei et al. 2016, section 3.2). Every batch is full: the longest ones are repeated.
    """
    generator = torch.Generator().manual_seed(mix_seed(seed, epoch))
    noise = 1 + LENGTH_NOISE * torch.rand(len(lengths), generator=generator)
    order = (torch.tensor(lengths) * noise).argsort()
    steps = steps_per_epoch(len(lengths), batch, ranks)
    repeats, more = divmod(steps * batch * ranks, len(lengths))
    counts = torch.full_like(order, repeats)
    counts[len(lengths) - more :] += 1
    groups = order.repeat_interleave(counts).view(steps, batch * ranks)
    if epoch:
        groups = groups[torch.randperm(steps, generator=generator)]
    for group in groups:
        yield group[rank::ranks].tolist()


def at_any_speed(utterances: list[Utterance], generator: torch.Generator) -> list[Utterance]:
    speeds = 1 + SPEED_CHANGE * (2 * torch.rand(len(utterances), generator=generator) - 1)
    return [u.at_speed(speed) for u, speed in zip(utterances, speeds.tolist(), strict=True)]


def collate(utterances: list[Utterance]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A batch for the model and CTC.

    Returns:
        Spectrograms (B, BINS, T), zero beyond an utterance's end; their frames (B); the labels
        of all one after the other; how many each has (B).
    """
    spectra = [spectrogram(utterance.samples) for utterance in utterances]
    labels = [utterance.labels for utterance in utterances]
    return (
        pad_sequence(spectra, batch_first=True).transpose(1, 2),
        torch.tensor([len(spectrum) for spectrum in spectra]),
        torch.tensor([label for text in labels for label in text]),
        torch.tensor([len(text) for text in labels]),
    )


def spectrogram(samples: Tensor) -> Tensor:
    """Log magnitudes (frames, BINS) in Hann windows, of mean 0 and deviation 1 over the utterance.

    A magnitude counts from the 16-bit step on: what is below it, as silence, is near 0.
    """
    spectrum = torch.stft(
        samples.to(torch.float32),
        WINDOW,
        HOP,
        window=hann_window(),
        pad_mode="constant",
        return_complex=True,
    )
    magnitudes = spectrum.abs().log1p()
    deviation, mean = torch.std_mean(magnitudes)
    return ((magnitudes - mean) / deviation).T


@cache
def hann_window() -> Tensor:
    return torch.hann_window(WINDOW)


# Files


def read_spoken(folder: Path, part: str, limit: int | None) -> list[Utterance]:
    """PART.ogg, one utterance after the other, as PART.tsv says how many samples each has."""
    audio, table = folder / f"{part}.ogg", folder / f"{part}.tsv"
    rows: list[tuple[int, str, str]] = []
    for line, row in enumerate(csv.DictReader(read_lines(table), delimiter="\t"), 2):
        source = f"{table}:{line}"
        count, text = row.get("samples") or "", row.get("text") or ""
        if not count.isdecimal():
            raise DataError(f"{source}: {count!r} is not a number of samples")
        rows.append((int(count), checked_text(text, source), source))
    rows = rows[:limit]
    total = sum(count for count, _, _ in rows)
    samples = read_audio(audio, table.name, total)
    if len(samples) < total:
        raise DataError(f"{audio}: {len(samples)} samples, {table.name} needs {total}")
    parts = torch.split(samples, [count for count, _, _ in rows])
    return [
        checked(Utterance(part, text, source))
        for part, (_, text, source) in zip(parts, rows, strict=True)
    ]


def read_an4(folder: Path, part: str, limit: int | None) -> list[Utterance]:
    """The utterances of etc/an4_PART.fileids, with their transcripts, from the folder wav."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files, transcripts = (
        folder / "etc" / f"an4_{part}.{kind}" for kind in ("fileids", "transcription")
    )
    texts: dict[str, tuple[str, str]] = {}
    for line, content in enumerate(read_lines(transcripts), 1):
        source = f"{transcripts}:{line}"
        match = TRANSCRIPT.fullmatch(content.strip())
        if match is None:
            raise DataError(f"{source}: {content!r} is not <s> WORDS </s> (FILE)")
        if match["name"] in texts:
            raise DataError(f"{source}: a second transcript of {match['name']}")
        texts[match["name"]] = checked_text(match["text"].strip(), source), source
    found: list[tuple[Path, str, str]] = []
    for line, content in enumerate(read_lines(files), 1):
        name = Path(content.strip()).name
        if name not in texts:
            raise DataError(f"{files}:{line}: {name!r} has no transcript left in {transcripts}")
        found.append((folder / "wav" / content.strip(), texts.pop(name)[0], f"{files}:{line}"))
    for name, (_, source) in texts.items():
        raise DataError(f"{source}: {name} is not in {files}")
    return [
        checked(Utterance(read_recording(path, source), text, source))
        for path, text, source in found[:limit]
    ]


def read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not a text: {error}") from error
    if not lines:
        raise DataError(f"{path}: the file is empty")
    return lines


def read_recording(path: Path, source: str) -> Tensor:
    """The samples of a recording whose path has no suffix yet, as AN4 lists it."""
    files = [path.with_name(path.name + suffix) for suffix in SUFFIXES]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise DataError(f"{source}: {path} is there with none of {', '.join(SUFFIXES)}")
    if file.suffix == ".raw":
        return read_raw(file, source)
    samples = read_audio(file, source)
    expected = declared_samples(file, source)
    if expected is not None and len(samples) != expected:
        raise DataError(f"{source}: {file}: {len(samples)} of {expected} samples: cut off")
    return samples


def read_raw(path: Path, source: str) -> Tensor:
    """Samples of 16 bits without a header.

    AN4 was given out in both byte orders. In the wrong one speech is noise: the right one is that
    in which neighbouring samples are closer to each other.
    """
    content = path.read_bytes()
    if len(content) % 2:
        raise DataError(f"{source}: {path}: {len(content)} bytes are not whole 16-bit samples")
    orders = [np.frombuffer(content, order).astype(np.int16) for order in (">i2", "<i2")]
    return torch.from_numpy(min(orders, key=lambda o: np.abs(np.diff(o.astype(np.int32))).sum()))


def declared_samples(path: Path, source: str) -> int | None:
    """How many samples the head of a file says it has, where readers would take fewer."""
    if path.suffix == ".sph":  # NIST SPHERE: lines of text in the first 1,024 bytes or more
        with path.open("rb") as file:
            match = re.search(rb"^sample_count -i (\d+)", file.read(4096), re.MULTILINE)
        if match is None:
            raise DataError(f"{source}: {path}: no sample_count in its head")
        return int(match[1])
    if path.suffix == ".wav":
        try:
            with wave.open(str(path)) as sound:
                return int(sound.getnframes())
        except (wave.Error, EOFError) as error:
            raise DataError(f"{source}: {path}: not a PCM wav file: {error}") from error
    return None


def read_audio(path: Path, source: str, count: int = -1) -> Tensor:
    """The first `count` samples, int16, of a file of one channel at 16 kHz."""
    soundfile = import_soundfile()
    try:
        with soundfile.SoundFile(path) as file:
            if (file.samplerate, file.channels) != (RATE, 1):
                raise DataError(
                    f"{source}: {path}: {file.channels} channels at {file.samplerate} Hz, "
                    f"expected 1 at {RATE}: convert it, such as with sox"
                )
            return torch.from_numpy(file.read(count, dtype="int16"))
    except (soundfile.SoundFileError, OSError) as error:
        raise DataError(f"{source}: {path}: not readable: {error}") from error


def import_soundfile() -> Any:
    try:
        import soundfile  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError("audio is read by soundfile: pip install soundfile") from error
    return soundfile


def checked_text(text: str, source: str) -> str:
    words = " ".join(text.upper().split())
    strange = next((character for character in words if character not in ALPHABET), None)
    if strange is not None:
        raise DataError(f"{source}: {strange!r} in {text!r} is none of A to Z, ' and space")
    if not words:
        raise DataError(f"{source}: no words")
    return words


def checked(utterance: Utterance) -> Utterance:
    if len(utterance.samples) < WINDOW:
        raise DataError(f"{utterance.source}: {len(utterance.samples)} samples are no speech")
    if not utterance.samples.any():
        raise DataError(f"{utterance.source}: the audio is silent")
    return utterance

"""Makes the spoken letters, digits and words that examples/train_lstm.py trains on by default.

    python scripts/spoken_utterances.py examples/lstm/spoken

It needs espeak-ng (a package of the system; 1.51 made what is in the repository), scipy and
soundfile. The sentences are drawn here: nothing is taken from a corpus. Sentences, voices, speeds
and pitches come from the seed; training and test share no variant of a voice.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import soundfile  # type: ignore[import-untyped]
from scipy.io import wavfile  # type: ignore[import-untyped]
from scipy.signal import resample_poly  # type: ignore[import-untyped]

Samples = np.ndarray[Any, np.dtype[np.float64]]

RATE = 16_000  # Hz
OPUS_COMPRESSION = 0.97  # soundfile's scale: about 13 kbit/s
MARGIN = int(0.05 * RATE)  # of silence on both sides

ACCENTS = ("en-us", "en-us", "en-us-nyc", "en-gb", "en-gb-x-rp", "en-gb-scotland", "en-029")
VARIANTS = {  # of the voice: vocal tract, roughness, intonation
    "train": (
        "m1 m2 m3 m5 m6 m7 f1 f2 f4 f5 klatt klatt3 klatt4 adam Alex Alicia Andrea Andy "
        "antonio aunty belinda benjamin boris caleb david Denis Diogo ed edward edward2 Gene "
        "grandma grandpa gustave Henrique Hugo iven iven2 Jacky john kaukovalta Lee linda "
        "marcelo Marco Mario max Michael michel miguel Mike norbert pablo paul pedro quincy "
        "rob robert sandro shelby steph steph2 steph3 victor zac"
    ),
    "test": "m4 m8 f3 klatt2 anika Annie Nguyen travis",
}

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = ("ZERO", "ONE", "TWO", "THREE", "FOUR", "FIVE", "SIX", "SEVEN", "EIGHT", "NINE")
TEENS = (
    *("TEN", "ELEVEN", "TWELVE", "THIRTEEN", "FOURTEEN", "FIFTEEN"),
    *("SIXTEEN", "SEVENTEEN", "EIGHTEEN", "NINETEEN"),
)
TENS = ("TWENTY", "THIRTY", "FORTY", "FIFTY", "SIXTY", "SEVENTY", "EIGHTY", "NINETY")
MONTHS = (
    *("JANUARY", "FEBRUARY", "MARCH", "APRIL", "MAY", "JUNE"),
    *("JULY", "AUGUST", "SEPTEMBER", "OCTOBER", "NOVEMBER", "DECEMBER"),
)
COMMANDS = ("ENTER", "ERASE", "REPEAT", "START", "STOP", "HELP", "YES", "NO", "GO", "NEXT", "CLEAR")


@dataclass(frozen=True)
class Utterance:
    text: str
    accent: str
    variant: str
    words_per_minute: int
    pitch: int  # of 0 to 99

    @property
    def voice(self) -> str:
        return f"{self.accent}+{self.variant}"


def letters(generator: random.Random) -> list[str]:
    return generator.choices(LETTERS, k=generator.randint(2, 6))


def digits(generator: random.Random) -> list[str]:
    return generator.choices(DIGITS, k=generator.randint(2, 6))


def number(generator: random.Random) -> list[str]:
    """From 10 to 99."""
    if generator.random() < 0.3:
        return [generator.choice(TEENS)]
    units = [generator.choice(DIGITS[1:])] if generator.random() < 0.8 else []
    return [generator.choice(TENS), *units]


def address(generator: random.Random) -> list[str]:
    return [generator.choice(DIGITS[1:]), *number(generator)]


def date(generator: random.Random) -> list[str]:
    return [generator.choice(MONTHS), *number(generator), *number(generator)]


def command(generator: random.Random) -> list[str]:
    word = [generator.choice(COMMANDS)]
    if word[0] not in ("ENTER", "ERASE", "REPEAT") or generator.random() < 0.2:
        return word
    return word + generator.choice((letters, digits, number))(generator)[:4]


KINDS: dict[Callable[[random.Random], list[str]], int] = {
    letters: 40,
    digits: 20,
    address: 8,
    date: 12,
    command: 20,
}


def draw(part: str, generator: random.Random) -> Utterance:
    kind = generator.choices(list(KINDS), weights=list(KINDS.values()))[0]
    return Utterance(
        text=" ".join(kind(generator)),
        accent=generator.choice(ACCENTS),
        variant=generator.choice(VARIANTS[part].split()),
        words_per_minute=generator.randint(130, 200),
        pitch=generator.randint(25, 75),
    )


def speak(utterance: Utterance) -> Samples:
    """The utterance's samples at 16 kHz, between -1 and 1, in half of that at most."""
    # The letter, where espeak would read an article, in its own phonemes.
    words = ["[[eI]]" if word == "A" else word for word in utterance.text.split()]
    with tempfile.NamedTemporaryFile(suffix=".wav") as file:
        command = ["espeak-ng", "-v", utterance.voice, "-w", file.name]
        command += ["-s", str(utterance.words_per_minute), "-p", str(utterance.pitch)]
        # Capitals would be spelled where they could be an abbreviation.
        spoken = " ".join(word if len(word) == 1 or "[" in word else word.lower() for word in words)
        subprocess.run([*command, spoken], check=True, timeout=60)
        rate, samples = wavfile.read(file.name)
    divisor = int(np.gcd(RATE, rate))
    wave = resample_poly(samples / 32768, RATE // divisor, rate // divisor)
    loud = np.flatnonzero(np.abs(wave) > 0.01 * np.abs(wave).max())
    wave = np.pad(wave[loud[0] : loud[-1] + 1], MARGIN)
    louder: Samples = wave * (0.5 / np.abs(wave).max())
    return louder


def write(folder: Path, part: str, utterances: list[Utterance]) -> None:
    """Writes PART.ogg, all utterances one after the other, and PART.tsv, a line for each."""
    with ThreadPoolExecutor() as pool:
        waves = list(pool.map(speak, utterances))
    soundfile.write(
        folder / f"{part}.ogg",
        np.concatenate(waves),
        RATE,
        format="OGG",
        subtype="OPUS",
        compression_level=OPUS_COMPRESSION,
    )
    with (folder / f"{part}.tsv").open("w") as file:
        print("samples", "voice", "words_per_minute", "pitch", "text", sep="\t", file=file)
        for wave, utterance in zip(waves, utterances, strict=True):
            row = (utterance.voice, utterance.words_per_minute, utterance.pitch, utterance.text)
            print(len(wave), *row, sep="\t", file=file)
    seconds = sum(map(len, waves)) / RATE
    size = (folder / f"{part}.ogg").stat().st_size
    print(f"{part}: {len(waves)} utterances, {seconds:.0f} s, {size / 1e6:.2f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--train", type=int, default=1500, help="utterances to train on")
    parser.add_argument("--test", type=int, default=200, help="utterances of the test")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for part in VARIANTS:
        generator = random.Random(f"{options.seed} {part}")
        count = getattr(options, part)
        write(options.folder, part, [draw(part, generator) for _ in range(count)])
    return 0


if __name__ == "__main__":
    sys.exit(main())

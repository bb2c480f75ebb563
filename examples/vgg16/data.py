"""Images for the VGG16 example: scikit-learn's digits, or CIFAR-10 from a folder.

Both are held as uint8 tensors of shape (N, 3, 32, 32); a batch is normalised, and augmented
where that helps, when it is taken.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, ClassVar, NoReturn

import numpy as np
import torch
from common.errors import DataError
from torch import Tensor
from torch.nn import functional

CLASSES = 10
SIDE = 32
PIXELS = 3 * SIDE * SIDE

DIGITS_TEST_IMAGES = 360  # a fifth of the 1,797 images
DIGITS_SPLIT_SEED = 0  # the split stays the same whatever seed trains on it

CIFAR10_TRAIN_FILES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10_TEST_FILE = "test_batch"
CIFAR10_IMAGES_PER_FILE = 10_000
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_DEVIATION = (0.2470, 0.2435, 0.2616)


@dataclass(frozen=True)
class Images:
    """Images (uint8, N x 3 x 32 x 32) with their labels (int64, N)."""

    pixels: Tensor
    labels: Tensor
    mean: Tensor
    deviation: Tensor
    augment: bool = False

    def __len__(self) -> int:
        return self.labels.numel()

    def first(self, count: int) -> Images:
        return replace(self, pixels=self.pixels[:count], labels=self.labels[:count])

    def take(self, indices: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """The normalised images at `indices` and their labels.

        With a generator, a set that asks for augmentation is cropped and flipped at random.
        """
        pixels = self.pixels[indices]
        if self.augment and generator is not None:
            pixels = crop_and_flip(pixels, generator)
        scaled = pixels.to(torch.float32).div_(255)
        scaled.sub_(self.mean.view(1, 3, 1, 1)).div_(self.deviation.view(1, 3, 1, 1))
        return scaled, self.labels[indices]


@dataclass(frozen=True)
class Dataset:
    name: str
    train: Images
    test: Images

    def limited(self, count: int) -> Dataset:
        """The same data cut to `count` training and `count` test images."""
        return replace(self, train=self.train.first(count), test=self.test.first(count))


def load(spec: str) -> Dataset:
    """Loads `digits` or `cifar10:FOLDER`."""
    kind, _, folder = spec.partition(":")
    if spec == "digits":
        return load_digits()
    if kind == "cifar10" and folder:
        return load_cifar10(Path(folder))
    raise DataError(f"unknown data {spec!r}: expected digits or cifar10:FOLDER")


def crop_and_flip(pixels: Tensor, generator: torch.Generator, margin: int = 4) -> Tensor:
    """Shifts each image by up to `margin` pixels over a zero border; mirrors half of them."""
    count = pixels.shape[0]
    border = functional.pad(pixels, (margin,) * 4)
    top = torch.randint(0, 2 * margin + 1, (count, 1), generator=generator)
    left = torch.randint(0, 2 * margin + 1, (count, 1), generator=generator)
    mirror = torch.randint(0, 2, (count, 1), generator=generator, dtype=torch.bool)
    span = torch.arange(SIDE).expand(count, SIDE)
    rows = span + top
    columns = torch.where(mirror, SIDE - 1 - span, span) + left
    image = torch.arange(count).view(count, 1, 1, 1)
    channel = torch.arange(3).view(1, 3, 1, 1)
    return border[image, channel, rows.view(count, 1, SIDE, 1), columns.view(count, 1, 1, SIDE)]


def load_digits() -> Dataset:
    """scikit-learn's 1,797 handwritten digits, scaled from 8x8 to 32x32, in three channels."""
    try:
        from sklearn.datasets import load_digits as read  # type: ignore[import-untyped]
        from sklearn.model_selection import (  # type: ignore[import-untyped]
            train_test_split,
        )
    except ImportError as error:
        raise DataError("the digits come with scikit-learn: pip install scikit-learn") from error
    grey, labels = read(return_X_y=True)
    train, test = train_test_split(
        np.arange(len(labels)),
        test_size=DIGITS_TEST_IMAGES,
        random_state=DIGITS_SPLIT_SEED,
        stratify=labels,
    )
    small = torch.from_numpy(grey).to(torch.float32).view(-1, 1, 8, 8) / 16  # levels 0..16
    scaled = functional.interpolate(small, size=(SIDE, SIDE), mode="bilinear")
    pixels = scaled.mul(255).round().to(torch.uint8).repeat(1, 3, 1, 1)
    targets = torch.from_numpy(labels).to(torch.int64)
    seen = pixels[torch.from_numpy(train)].to(torch.float32) / 255
    mean, deviation = seen.mean().expand(3), seen.std().expand(3)

    def part(chosen: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Images:
        indices = torch.from_numpy(chosen)
        return Images(pixels[indices], targets[indices], mean, deviation)

    return Dataset("digits", part(train), part(test))


def load_cifar10(folder: Path, images_per_file: int = CIFAR10_IMAGES_PER_FILE) -> Dataset:
    """CIFAR-10 in its python version: the files data_batch_1 to 5 and test_batch in a folder."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files = [folder / name for name in (*CIFAR10_TRAIN_FILES, CIFAR10_TEST_FILE)]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise DataError(f"{folder}: not a CIFAR-10 folder (python version), lacks {missing}")
    parts = [read_cifar10_file(path, images_per_file) for path in files]
    mean, deviation = torch.tensor(CIFAR10_MEAN), torch.tensor(CIFAR10_DEVIATION)
    pixels = torch.cat([part[0] for part in parts[:-1]])
    labels = torch.cat([part[1] for part in parts[:-1]])
    return Dataset(
        "cifar10",
        Images(pixels, labels, mean, deviation, augment=True),
        Images(*parts[-1], mean, deviation),
    )


def read_cifar10_file(path: Path, images: int = CIFAR10_IMAGES_PER_FILE) -> tuple[Tensor, Tensor]:
    """The pixels and labels of one file; nothing the file names is ever imported or called."""

    def refuse(reason: str) -> NoReturn:
        raise DataError(f"{path}: {reason}")

    size = path.stat().st_size
    if size < images * PIXELS:
        refuse(f"truncated: {size} bytes, {images} images need more than {images * PIXELS}")
    if size > 2 * images * PIXELS + 65_536:
        refuse(f"{size} bytes are too many for {images} images")
    try:
        with path.open("rb") as file:
            content = _ArrayUnpickler(file).load()
    except Exception as error:  # whatever a malformed pickle makes the unpickler raise
        refuse(f"not a readable CIFAR-10 file, truncated or damaged: {error}")

    if not isinstance(content, dict):
        refuse(f"holds a {type(content).__name__}, not a dictionary")
    entries = {k.decode("latin1") if isinstance(k, bytes) else k: v for k, v in content.items()}
    for key in ("data", "labels"):
        if key not in entries:
            refuse(f"lacks the key {key!r}, has {sorted(map(str, entries))}")

    array, labels = entries["data"], entries["labels"]
    if not isinstance(array, _Array):
        refuse(f"'data' is a {type(array).__name__}, not a numpy array")
    if array.dtype not in ("u1", "uint8", "|u1") or array.shape != (images, PIXELS):
        refuse(f"'data' is {array.dtype} {array.shape}, expected uint8 {(images, PIXELS)}")
    if array.fortran or len(array.content) != images * PIXELS:
        refuse(f"'data' has {len(array.content)} bytes, expected {images * PIXELS} in C order")
    if not isinstance(labels, list) or len(labels) != images:
        count = len(labels) if isinstance(labels, list) else "no list of"
        refuse(f"'labels' has {count} entries, expected {images}")
    for position, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < CLASSES:
            refuse(f"label {position} is {label!r}, expected a class from 0 to {CLASSES - 1}")

    pixels = torch.from_numpy(np.frombuffer(array.content, np.uint8).copy())
    return pixels.view(images, 3, SIDE, SIDE), torch.tensor(labels, dtype=torch.int64)


class _Dtype:
    """Stands for a numpy dtype inside a pickle: its code, and nothing it does."""

    def __init__(self, code: object, *_: object) -> None:
        self.code = code.decode("latin1") if isinstance(code, bytes) else str(code)

    def __setstate__(self, state: object) -> None:
        pass  # byte order and alignment: single bytes have none


class _Array:
    """Stands for a numpy array inside a pickle: shape, dtype and bytes as they were written."""

    dtype = ""
    shape: tuple[object, ...] = ()
    fortran = False
    content = b""

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise pickle.UnpicklingError("an array's state has five parts")
        self._fill(content=state[4], dtype=state[2], shape=state[1], fortran=bool(state[3]))

    def _fill(self, content: object, dtype: object, shape: object, fortran: bool) -> None:
        if not isinstance(content, bytes | bytearray) or not isinstance(dtype, _Dtype):
            raise pickle.UnpicklingError("an array of something else than plain numbers")
        if not isinstance(shape, tuple):
            raise pickle.UnpicklingError("an array without a shape")
        self.content, self.dtype = bytes(content), dtype.code
        self.shape, self.fortran = shape, fortran


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _from_buffer(content: object, dtype: object, shape: object, order: object) -> _Array:
    array = _Array()
    array._fill(content, dtype, shape, fortran=order != "C")
    return array


def _encode(text: object, encoding: object = "latin1") -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("bytes in an encoding other than latin1")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    return b""


class _ArrayUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, strings and numpy arrays, and refuses all else.

    A pickle may name any function for the reader to call. The few names by which numpy writes
    an array lead to the stand-ins above, so that not even numpy runs on unchecked content.
    """

    _ADMITTED: ClassVar[dict[tuple[str, str], object]] = {
        ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
        ("numpy.core.numeric", "_frombuffer"): _from_buffer,
        ("numpy._core.numeric", "_frombuffer"): _from_buffer,
        ("numpy", "ndarray"): "ndarray",  # only ever an argument of _reconstruct
        ("numpy", "dtype"): _Dtype,
        ("_codecs", "encode"): _encode,  # this and the next: bytes as written for Python 2
        ("__builtin__", "bytes"): _empty_bytes,
    }

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> object:
        try:
            return self._ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, refused") from None

"""The images of the VGG16 example: what is loaded, in which order, and what is refused."""

from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

from common.order import epoch_batches, steps_per_epoch
from vgg16 import data

IMAGES = 20  # per file of a CIFAR-10 folder made here

Pixels = np.ndarray[Any, np.dtype[np.uint8]]


# Digits


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.load("digits")


def test_digits_have_the_shape_of_vgg_images(digits: data.Dataset) -> None:
    for images, count in ((digits.train, 1437), (digits.test, 360)):
        assert len(images) == count
        assert images.pixels.shape == (count, 3, 32, 32)
        assert images.pixels.dtype == torch.uint8
        assert images.labels.dtype == torch.int64
        assert torch.equal(images.pixels[:, 0], images.pixels[:, 2])


def test_digits_are_split_evenly_over_the_classes(digits: data.Dataset) -> None:
    counts = torch.bincount(digits.test.labels, minlength=10)
    assert counts.tolist() == pytest.approx([36] * 10, abs=2)


def test_digits_are_split_the_same_way_every_time(digits: data.Dataset) -> None:
    again = data.load_digits()
    assert torch.equal(again.train.pixels, digits.train.pixels)
    assert torch.equal(again.test.labels, digits.test.labels)


def test_digits_are_normalised_when_taken(digits: data.Dataset) -> None:
    taken, labels = digits.train.take(torch.arange(len(digits.train)), None)
    assert taken.mean().item() == pytest.approx(0, abs=1e-4)
    assert taken.std().item() == pytest.approx(1, abs=1e-3)
    assert torch.equal(labels, digits.train.labels)


def test_limited_data_keep_the_first_images(digits: data.Dataset) -> None:
    few = digits.limited(7)
    assert len(few.train) == len(few.test) == 7
    assert torch.equal(few.train.pixels, digits.train.pixels[:7])


@pytest.mark.parametrize("spec", ["", "mnist", "cifar10", "cifar10:", "digits:here"])
def test_unknown_data_are_refused(spec: str) -> None:
    with pytest.raises(data.DataError, match="expected digits or cifar10:FOLDER"):
        data.load(spec)


# Order and augmentation


@pytest.mark.parametrize(("images", "batch", "ranks"), [(1437, 16, 2), (10, 4, 3), (2, 4, 3)])
def test_an_epoch_shows_every_image_in_full_batches(images: int, batch: int, ranks: int) -> None:
    seen = [list(epoch_batches(images, batch, rank, ranks, 1, 0)) for rank in range(ranks)]
    steps = steps_per_epoch(images, batch, ranks)
    assert [len(batches) for batches in seen] == [steps] * ranks
    assert all(len(indices) == batch for batches in seen for indices in batches)
    shown = torch.bincount(torch.cat([torch.cat(batches) for batches in seen]), minlength=images)
    assert len(shown) == images
    assert shown.min() >= 1
    assert shown.max() - shown.min() <= 1


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return torch.cat(list(epoch_batches(64, 4, 0, 1, seed, epoch))).tolist()

    torch.manual_seed(3)
    first = order(1, 0)
    torch.manual_seed(4)
    assert order(1, 0) == first
    assert order(1, 1) != first
    assert order(2, 0) != first


def test_crop_and_flip_shifts_and_mirrors() -> None:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randint(1, 256, (40, 3, 32, 32), generator=generator, dtype=torch.uint8)
    changed = data.crop_and_flip(pixels, generator)
    assert changed.shape == pixels.shape
    ways = set()
    for image, result in zip(pixels, changed, strict=True):
        border = torch.nn.functional.pad(image, (4,) * 4)
        found = [
            (top, left, mirror)
            for top in range(9)
            for left in range(9)
            for mirror in (False, True)
            for window in [border[:, top : top + 32, left : left + 32]]
            if torch.equal(window.flip(2) if mirror else window, result)
        ]
        assert len(found) == 1
        ways.add(found[0])
    assert len(ways) > 20


def test_augmentation_repeats_with_its_generator(tmp_path: Path) -> None:
    write_folder(tmp_path)
    dataset = data.load_cifar10(tmp_path, IMAGES)
    indices = torch.arange(IMAGES)

    def taken(images: data.Images, seed: int | None) -> torch.Tensor:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return images.take(indices, generator)[0]

    assert torch.equal(taken(dataset.train, 1), taken(dataset.train, 1))
    assert not torch.equal(taken(dataset.train, 1), taken(dataset.train, None))
    assert torch.equal(taken(dataset.test, 1), taken(dataset.test, None))


# CIFAR-10


def sample(seed: int) -> tuple[Pixels, list[int]]:
    generator = np.random.default_rng(seed)
    pixels = generator.integers(0, 256, (IMAGES, data.PIXELS), dtype=np.uint8)
    return pixels, generator.integers(0, 10, IMAGES).tolist()


def python3_pickle(pixels: Pixels, labels: list[int], protocol: int) -> bytes:
    names = [b"image.png"] * len(labels)
    content = {b"batch_label": b"", b"labels": labels, b"data": pixels, b"filenames": names}
    return pickle.dumps(content, protocol)


def python2_pickle(pixels: Pixels, labels: list[int]) -> bytes:
    """The same as Python 2 wrote it, and as the published files are."""
    raw = pixels.tobytes()
    return b"".join(
        [
            b"\x80\x02}(U\x04data",
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R",
            b"(K\x01" + b"".join(b"J" + struct.pack("<i", n) for n in pixels.shape) + b"\x86",
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R",
            b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb",
            b"\x89T" + struct.pack("<i", len(raw)) + raw + b"tb",
            b"U\x06labels](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e",
            b"u.",
        ]
    )


def write_folder(folder: Path) -> None:
    for seed, name in enumerate((*data.CIFAR10_TRAIN_FILES, data.CIFAR10_TEST_FILE)):
        (folder / name).write_bytes(python3_pickle(*sample(seed), protocol=2))


WRITERS: dict[str, Callable[[Pixels, list[int]], bytes]] = {
    "python2": python2_pickle,
    **{
        f"protocol{protocol}": lambda pixels, labels, protocol=protocol: python3_pickle(  # type: ignore[misc]
            pixels, labels, protocol
        )
        for protocol in (2, 3, 4, 5)
    },
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_cifar10_file_comes_back_as_written(tmp_path: Path, writer: str) -> None:
    pixels, labels = sample(7)
    path = tmp_path / "data_batch_1"
    path.write_bytes(WRITERS[writer](pixels, labels))
    read, classes = data.read_cifar10_file(path, IMAGES)
    assert read.shape == (IMAGES, 3, 32, 32)
    assert read.numpy().tobytes() == pixels.tobytes()
    assert classes.tolist() == labels


def test_a_cifar10_folder_comes_back_as_written(tmp_path: Path) -> None:
    write_folder(tmp_path)
    dataset = data.load_cifar10(tmp_path, IMAGES)
    assert dataset.train.augment
    assert not dataset.test.augment
    every = [sample(seed) for seed in range(6)]
    train = b"".join(pixels.tobytes() for pixels, _ in every[:5])
    assert dataset.train.pixels.numpy().tobytes() == train
    assert dataset.train.labels.tolist() == [label for _, labels in every[:5] for label in labels]
    assert dataset.test.pixels.numpy().tobytes() == every[5][0].tobytes()
    assert dataset.test.labels.tolist() == every[5][1]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="nowhere: no such folder"):
        data.load(f"cifar10:{tmp_path / 'nowhere'}")


def test_missing_files_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "data_batch_4").unlink()
    with pytest.raises(data.DataError, match=r"lacks \['data_batch_4'\]"):
        data.load_cifar10(tmp_path, IMAGES)


def test_a_published_file_has_10000_images(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(data.DataError, match=r"truncated: .* 10000 images need more than 30720000"):
        data.load(f"cifar10:{tmp_path}")


class Call:
    """Pickles into the request to call a function."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.request = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.request


PIXELS, LABELS = sample(0)
FILLER = b" " * (IMAGES * data.PIXELS)  # makes a file large enough to be looked into

MALFORMED: dict[str, tuple[object, str]] = {
    "not a dictionary": ([FILLER], "holds a list, not a dictionary"),
    "no data": ({b"labels": LABELS, b"x": FILLER}, "lacks the key 'data'"),
    "no labels": ({b"data": PIXELS}, "lacks the key 'labels'"),
    "data not an array": ({b"data": FILLER, b"labels": LABELS}, "not a numpy array"),
    "wrong dtype": ({b"data": PIXELS.view(np.int8), b"labels": LABELS}, "expected uint8"),
    "wrong shape": ({b"data": PIXELS.reshape(-1), b"labels": LABELS}, "expected uint8"),
    "columns first": (
        {b"data": np.asfortranarray(PIXELS), b"labels": LABELS},
        "expected .* in C order",
    ),
    "objects": (
        {b"data": np.array([FILLER], dtype=object), b"labels": LABELS},
        "something else than plain numbers",
    ),
    "too few labels": ({b"data": PIXELS, b"labels": LABELS[1:]}, "19 entries, expected 20"),
    "labels not a list": ({b"data": PIXELS, b"labels": 3}, "no list of entries"),
    "label too large": ({b"data": PIXELS, b"labels": [*LABELS[1:], 10]}, "label 19 is 10"),
    "label not a number": ({b"data": PIXELS, b"labels": [*LABELS[1:], True]}, "label 19 is True"),
    "a call": (Call(print, FILLER), "asks for .*print, refused"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused(tmp_path: Path, name: str) -> None:
    content, message = MALFORMED[name]
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps(content, protocol=4))
    with pytest.raises(data.DataError, match=f"test_batch: .*{message}"):
        data.read_cifar10_file(path, IMAGES)


@pytest.mark.parametrize("lost", [1, 200, IMAGES * data.PIXELS])
def test_a_truncated_file_is_refused(tmp_path: Path, lost: int) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(python2_pickle(PIXELS, LABELS)[:-lost])
    with pytest.raises(data.DataError, match=r"test_batch: .*truncated"):
        data.read_cifar10_file(path, IMAGES)


def test_a_file_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    path.write_bytes(python2_pickle(PIXELS, LABELS) + 4 * FILLER)
    with pytest.raises(data.DataError, match="bytes are too many for 20 images"):
        data.read_cifar10_file(path, IMAGES)


def test_noise_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "test_batch"
    whole = python2_pickle(PIXELS, LABELS)
    for seed in range(200):
        generator = np.random.default_rng(seed)
        damaged = bytearray(whole)
        for position in generator.integers(0, 200, 3):  # in the head, where the structure is
            damaged[position] = generator.integers(0, 256)
        path.write_bytes(damaged)
        try:
            read, _ = data.read_cifar10_file(path, IMAGES)
        except data.DataError:
            continue
        assert read.shape == (IMAGES, 3, 32, 32), f"seed {seed}"


@pytest.mark.parametrize("nested", [False, True])
def test_a_file_cannot_run_commands(tmp_path: Path, nested: bool) -> None:
    trace = tmp_path / "trace"
    attack: object = Call(os.system, f"touch {trace}")
    if nested:
        attack = {b"data": PIXELS, b"labels": LABELS, b"filenames": [attack]}
    path = tmp_path / "test_batch"
    path.write_bytes(pickle.dumps([attack, FILLER] if not nested else attack, protocol=2))
    with pytest.raises(data.DataError, match=r"asks for posix\.system, refused"):
        data.read_cifar10_file(path, IMAGES)
    assert not trace.exists()

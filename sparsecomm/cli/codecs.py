"""``sparsecomm bench codecs``: how small and how fast the wire format is, on one thread."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsecomm import _C
from sparsecomm.build import build_info
from sparsecomm.cli.bench import at_least_0, at_least_1, check_folder, write_json

DENSITIES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
SETS = ("random", "clustered")
HOT_ROW = 4608  # consecutive positions: the widest filters of VGG16
HOT_SHARE = 10  # one row in so many holds everything
FRAME = "frame"
HEADER = 40  # bytes of a frame

DESCRIPTION = """\
Measures the index codecs and the value codecs on one thread of this machine, without a network.
"""

EPILOG = f"""\
indices:
  set          random: anywhere; clustered: in one of {HOT_SHARE} rows of {HOT_ROW} positions, as in
               a layer of which few filters learn
  codec        {FRAME}: a whole frame with f32 values, in the smallest codec; its bits are those of
               the indices
  bits         per index, out of entropy = log2(e / density) for random positions; ratio of the two
  encode_mega  million indices per second, likewise decode_mega

values (normal):
  bits         per value, scales included
  round_gbps   10^9 bytes of values per second: rounding, copying them first; encoding; decoding
"""


@dataclass(frozen=True)
class IndexRow:
    set: str
    density: float
    codec: str
    indices: int
    bits: float
    entropy: float
    ratio: float
    encode_mega: float
    decode_mega: float


@dataclass(frozen=True)
class ValueRow:
    codec: str
    type: str
    values: int
    bits: float
    round_gbps: float
    encode_gbps: float
    decode_gbps: float


def add_codecs(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "codecs",
        help="the wire format's size and speed",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_codecs, parser=parser)
    add = parser.add_argument
    add("--count", type=at_least_1, default=1 << 17, metavar="N", help="per set (131072)")
    add("--iters", type=at_least_1, default=20, metavar="N", help="calls; the least counts (20)")
    add("--seed", type=at_least_0, default=1, metavar="N", help="of sets and values (1)")
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE, as JSON")


def run_codecs(options: argparse.Namespace) -> int:
    check_folder(options.json)
    index_rows = [
        row
        for name in SETS
        for density in DENSITIES
        for row in measure_indices(name, density, options.count, options.iters, options.seed)
    ]
    value_rows = [
        row
        for dtype in (torch.float32, torch.float64)
        for row in measure_values(dtype, options.count, options.iters, options.seed)
    ]
    print(f"# {options.count} indices or values, least of {options.iters} calls, one thread")
    print(table(index_rows))
    print()
    print(table(value_rows))
    if options.json is not None:
        content = {
            "indices": [asdict(row) for row in index_rows],
            "values": [asdict(row) for row in value_rows],
        }
        write_json(options.json, content)
    return 0


def make_set(name: str, density: float, count: int, seed: int) -> tuple[torch.Tensor, int]:
    """Returns `count` sorted positions and the extent that they come from."""
    generator = np.random.default_rng([seed, SETS.index(name), round(1e6 * density)])
    share = 1 if name == "random" else HOT_SHARE
    places = np.cumsum(generator.geometric(min(1.0, density * share), count)) - 1
    if share == 1:
        return torch.from_numpy(places.astype(np.uint32)), int(places[-1]) + 1
    rows, offsets = np.divmod(places, HOT_ROW)
    every = share * (int(rows[-1]) + 1)
    hot = np.sort(generator.choice(every, int(rows[-1]) + 1, replace=False))
    return torch.from_numpy((hot[rows] * HOT_ROW + offsets).astype(np.uint32)), every * HOT_ROW


def least_seconds(call: Callable[[], object], calls: int) -> float:
    """Of one call: what disturbs it only ever adds."""
    best = math.inf
    for _ in range(calls):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def measure_indices(
    name: str, density: float, count: int, iters: int, seed: int
) -> Iterator[IndexRow]:
    """One row per codec, and one of a whole frame. A bitmap that no frame would take has none."""
    indices, extent = make_set(name, density, count, seed)
    entropy = math.log2(math.e * extent / count)

    def row(
        codec: str, size: int, encode: Callable[[], object], decode: Callable[[], object]
    ) -> IndexRow:
        bits = 8 * size / count
        return IndexRow(
            set=name,
            density=count / extent,
            codec=codec,
            indices=count,
            bits=bits,
            entropy=entropy,
            ratio=bits / entropy,
            encode_mega=count / least_seconds(encode, iters) / 1e6,
            decode_mega=count / least_seconds(decode, iters) / 1e6,
        )

    out = torch.empty(5 * count + 64, dtype=torch.uint8)
    decoded = torch.empty_like(indices)
    for codec in build_info()["index_codecs"]:
        size = _C.encode_indices(codec, indices, 0, extent, out)
        if size is None:
            continue
        yield row(
            codec,
            size,
            partial(_C.encode_indices, codec, indices, 0, extent, out),
            partial(_C.decode_indices, codec, out[:size], 0, extent, decoded),
        )
        if not torch.equal(decoded.view(torch.int32), indices.view(torch.int32)):
            raise RuntimeError(f"{codec} changed the {name} indices of density {density}")

    values = torch.ones(count)
    out = torch.empty(9 * count + 128, dtype=torch.uint8)
    encode = partial(_C.encode_frame, indices, values, extent, "smallest", "raw", False, out)
    size = encode()
    decoder = _C.FrameDecoder()
    yield row(FRAME, size - HEADER - 4 * count, encode, partial(decoder.decode, out[:size], extent))


def measure_values(dtype: torch.dtype, count: int, iters: int, seed: int) -> Iterator[ValueRow]:
    values = torch.from_numpy(np.random.default_rng(seed).standard_normal(count)).to(dtype)
    size = count * dtype.itemsize
    out = torch.empty(size + 64, dtype=torch.uint8)
    decoded = torch.empty_like(values)
    for codec in build_info()["value_codecs"]:
        rounded = values.clone()
        _C.round_values(codec, rounded, seed, 0, 0)
        length = _C.encode_values(codec, rounded, out)

        def copy_and_round(codec: str = codec) -> None:
            decoded.copy_(values)
            _C.round_values(codec, decoded, seed, 0, 0)

        rounding = least_seconds(copy_and_round, iters)
        encoding = least_seconds(partial(_C.encode_values, codec, rounded, out), iters)
        decoding = least_seconds(partial(_C.decode_values, codec, out[:length], decoded), iters)
        if not torch.equal(decoded, rounded):
            raise RuntimeError(f"{codec} changed values of {dtype} that were rounded")
        yield ValueRow(
            codec=codec,
            type=str(dtype).removeprefix("torch."),
            values=count,
            bits=8 * length / count,
            round_gbps=size / rounding / 1e9,
            encode_gbps=size / encoding / 1e9,
            decode_gbps=size / decoding / 1e9,
        )


def table(rows: Sequence[IndexRow] | Sequence[ValueRow]) -> str:
    """The fields of the rows as columns."""
    names = [field.name for field in fields(rows[0])]
    lines = [names, *([shown(getattr(row, name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""``sparsecomm bench kernels``: the loops over memory beside torch's and numpy's."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsecomm import _C
from sparsecomm.cli.bench import at_least_0, at_least_1, check_folder, write_json
from sparsecomm.cli.kernel_inputs import (
    STREAMS,
    Memory,
    count_of,
    make_streams,
    threshold_of,
)

KERNELS = {
    torch.float32: _C.KernelsF32,
    torch.float64: _C.KernelsF64,
    torch.float16: _C.KernelsF16,
    torch.bfloat16: _C.KernelsBF16,
}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KERNELS}
BUCKET = 512  # of which SparCML takes the largest few, and of a QSGD scale
BLOCK_BYTES = 1024
WINDOW = 16  # blocks of a round of in-network aggregation
STRIDE = 127  # of a sampled threshold
QSGD_BITS = (2, 4, 8)

DESCRIPTION = """\
Measures the kernels of one instruction set on this machine, in turn with passes over the same
memory by torch and numpy.
"""

EPILOG = f"""\
columns:
  target       the instruction set; torch or numpy of a baseline
  time         of a call, in us; before each, unmeasured, its input is put back and other memory is
               read, so that what ran before matters less
  GB/s         bytes that the kernel must read and write, over the median time
  ratio        the baseline's median time over the kernel's: above 1 the kernel is quicker;
               on a second number of threads, the same kernel's on the first

kernels:
  select       entries above a known threshold, packed
  fused        error feedback: residual + gradient, selected and packed, the rest kept, the gradient
               zeroed
  sampled      the threshold of a strided sample (stride {STRIDE}) of gradient + residual
  exact_top_k  exactly the k largest, ties by the lowest index
  bucket_top_k the same of each {BUCKET} entries
  qsgd*        values rounded at random to 2, 4 or 8 bits, packed (GB/s of values)
  qsgd*_add    those unpacked and added to values (GB/s of values)
  block_scan   the blocks of {BLOCK_BYTES} bytes that hold a bit, listed and copied
  walk_10      a tenth of the blocks, those that hold a bit, copied to the same {WINDOW} slots, as a
               worker of in-network aggregation scans
  walk_100     the same where all blocks do
  walk_keep    the same where all blocks do, each to a slot of its own
  combine      blocks added to the same {WINDOW} partial results, as an aggregator does (GB/s of
               blocks)
  sum          {STREAMS} sorted streams of density * numel pairs each, added up (float32)
  intersection what two of them share

baselines, on as many threads (numpy, memcpy: one):
  read         torch.sum                      copy     Tensor.copy_
  triad        torch.add(a, b, alpha, out)    topk     torch.topk(x.abs())
  read_10      torch.sum of what walk_10 scans
  through      memcpy to what walk_100 copies to
  copy_keep    Tensor.copy_ to what walk_keep copies to
  argpartition numpy.argpartition of -|x|     nonzero  torch.nonzero(x.abs() > threshold)
  coalesce     torch's sum of sparse tensors
  intersect1d  numpy.intersect1d of indices, and where they are
"""


@dataclass(frozen=True)
class Spread:
    """Microseconds of a call."""

    min: float
    median: float
    max: float


@dataclass(frozen=True)
class Row:
    kernel: str
    target: str
    dtype: str
    numel: int
    density: float
    threads: int
    time_us: Spread
    gigabytes_per_second: float
    baseline: str | None
    ratio: float | None


@dataclass
class Case:
    """A call to measure."""

    name: str
    bytes: int  # that it must move
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    baselines: tuple[str, ...] = ()  # names of other cases; none: it is one
    target: str = "torch"
    threaded: bool = False  # takes as many threads as it is given
    threads: int = 1
    seconds: list[float] = field(default_factory=list)

    def measure(self, others: torch.Tensor) -> None:
        torch.set_num_threads(self.threads)
        self.prepare()
        others.sum()
        start = time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - start)


def add_kernels(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "kernels",
        help="selection and compression beside plain passes over memory",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_kernels, parser=parser)
    targets = _C.kernel_targets()
    add = parser.add_argument
    add("--numel", type=at_least_1, default=1 << 24, metavar="N", help="elements (2^24)")
    add("--density", type=share, default=0.01, metavar="D", help="share selected (0.01)")
    add("--dtype", choices=DTYPES, default="float32", help="of the gradient (float32)")
    add("--target", choices=targets, default=targets[-1], help=f"the kernels ({targets[-1]})")
    add(
        "--threads",
        type=at_least_1,
        default=[1],
        nargs="+",
        metavar="N",
        help="of kernels and torch (1); several: the kernels on each, beside the first",
    )
    add("--iters", type=at_least_1, default=15, metavar="N", help="calls of each, in turn (15)")
    add("--seed", type=at_least_0, default=1, metavar="N", help="of the gradient (1)")
    add("--json", type=Path, metavar="FILE", help="also write the rows to FILE, as JSON")


def share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share in (0, 1]")
    return value


def run_kernels(options: argparse.Namespace) -> int:
    check_folder(options.json)
    before = torch.get_num_threads()
    try:
        rows = measure(
            options.numel,
            options.density,
            DTYPES[options.dtype],
            options.target,
            options.threads,
            options.iters,
            options.seed,
        )
    finally:
        torch.set_num_threads(before)
    print(
        f"# {options.numel} {options.dtype}, density {options.density:g}, {options.iters} calls of "
        "each in turn"
    )
    print(table(rows))
    if options.json is not None:
        write_json(options.json, [asdict(row) for row in rows])
    return 0


def measure(
    numel: int,
    density: float,
    dtype: torch.dtype,
    target: str,
    threads: Sequence[int],
    iters: int,
    seed: int,
) -> list[Row]:
    """One row for each kernel and baseline, and one for each baseline itself.

    Those are on the first number of threads. On every other one, the kernels that take threads have
    a row each, whose baseline is the kernel itself on the first.
    """
    memory = Memory(numel, dtype, BLOCK_BYTES // dtype.itemsize, WINDOW, seed)
    cases = [
        *baselines(memory, density, seed),
        *kernels(memory, density, target, threads[0], seed),
    ]
    for case in cases:
        case.threads = threads[0]
    named = {case.name: case for case in cases}
    for count in threads[1:]:
        for case in kernels(memory, density, target, count, seed):
            if case.threaded:
                cases.append(replace(case, baselines=(case.name,), threads=count))
    for iteration in range(iters + 1):
        for case in cases:
            case.measure(memory.others)
            if iteration == 0:
                case.seconds.clear()
    return [
        row_of(case, named.get(baseline or ""), dtype, numel, density)
        for case in cases
        for baseline in (case.baselines or (None,))
    ]


def row_of(
    case: Case,
    baseline: Case | None,
    dtype: torch.dtype,
    numel: int,
    density: float,
) -> Row:
    median = statistics.median(case.seconds)
    return Row(
        kernel=case.name,
        target=case.target,
        dtype=str(dtype).removeprefix("torch."),
        numel=numel,
        density=density,
        threads=case.threads,
        time_us=Spread(1e6 * min(case.seconds), 1e6 * median, 1e6 * max(case.seconds)),
        gigabytes_per_second=case.bytes / median / 1e9,
        baseline=None if baseline is None else baseline.name,
        ratio=None if baseline is None else statistics.median(baseline.seconds) / median,
    )


def baselines(memory: Memory, density: float, seed: int) -> list[Case]:
    x, z = memory.x, memory.gradient
    y = memory.residual if memory.residual.dtype == x.dtype else torch.zeros_like(x)
    numel, dtype = x.numel(), x.dtype
    k = count_of(numel, density)
    magnitude = threshold_of(x, k)
    magnitudes = x.abs().float().numpy()
    size = numel * dtype.itemsize
    buckets = x[: numel // BUCKET * BUCKET].view(-1, BUCKET)
    each = min(BUCKET, count_of(BUCKET, density))
    streams = [
        torch.sparse_coo_tensor(
            indices.to(torch.int64)[None],
            values,
            (numel,),
            is_coalesced=True,
            check_invariants=False,
        )
        for indices, values in make_streams(numel, k, seed)
    ]
    first, second = (stream.indices()[0].numpy() for stream in streams[:2])

    def add_up() -> torch.Tensor:
        total = streams[0]
        for stream in streams[1:]:
            total = total + stream
        return total.coalesce()

    return [
        Case("read", size, lambda: torch.sum(x)),
        Case("copy", 2 * size, lambda: z.copy_(x)),
        Case("read_10", size, lambda: torch.sum(memory.tenth)),
        Case("through", size, lambda: KERNELS[dtype].copy_through(x, memory.slots)),
        Case("copy_keep", 2 * size, lambda: memory.copied[:numel].copy_(x)),
        Case("triad", 3 * size, lambda: torch.add(x, y, alpha=3, out=z)),
        Case("topk", size, lambda: x.abs().topk(k, sorted=False)),
        Case("topk_of_buckets", size, lambda: buckets.abs().topk(each, sorted=False)),
        Case("nonzero", size, lambda: torch.nonzero(x.abs() > magnitude)),
        Case(
            "argpartition",
            4 * numel,
            lambda: np.argpartition(-magnitudes, k - 1)[:k],
            target="numpy",
        ),
        Case(
            "intersect1d",
            8 * (len(first) + len(second)),
            lambda: np.intersect1d(first, second, assume_unique=True, return_indices=True),
            target="numpy",
        ),
        Case("coalesce", 8 * sum(len(stream.values()) for stream in streams), add_up),
    ]


def kernels(memory: Memory, density: float, target: str, threads: int, seed: int) -> list[Case]:
    x, gradient, residual = memory.x, memory.gradient, memory.residual
    numel, dtype, wide = x.numel(), x.dtype, residual.dtype
    own = KERNELS[dtype](target, threads)
    k = count_of(numel, density)
    each = min(BUCKET, count_of(BUCKET, density))
    room = max(2 * k, -(-numel // BUCKET) * each)
    indices = torch.empty(room, dtype=torch.uint32)
    values = torch.empty(room, dtype=wide)
    in_buckets = numel // BUCKET * each + min(numel % BUCKET, each)
    magnitude = threshold_of(x, k)
    size = numel * dtype.itemsize
    kept = numel * wide.itemsize
    blocks = -(-size // BLOCK_BYTES)
    in_block = BLOCK_BYTES // dtype.itemsize
    bitmap = torch.empty(-(-blocks // 64), dtype=torch.uint64)
    numbers = torch.empty(blocks, dtype=torch.uint32)
    copied = memory.copied
    sparse = torch.where(  # one block in a hundred holds something
        torch.arange(numel) // in_block % 100 == 0, x, 0
    ).to(dtype)
    numbers_of_slots = torch.empty(WINDOW, dtype=torch.uint32)
    sums = torch.zeros(WINDOW * in_block, dtype=wide)
    streams = make_streams(numel, k, seed)
    total = _C.SparseSum()
    intersection = _C.SparseIntersection(target)
    exact, exact_sum = x.to(wide), torch.empty(numel, dtype=wide)
    codes = {
        bits: torch.empty(numel * bits // 8 + 8 * numel // BUCKET + 64, dtype=torch.uint8)
        for bits in QSGD_BITS
    }

    return [
        Case(
            "select",
            size,
            lambda: own.select(x, magnitude, indices, values),
            baselines=("read", "nonzero"),
            target=target,
            threaded=True,
        ),
        Case(
            "fused",
            2 * (size + kept),
            lambda: own.fused_error_feedback(gradient, residual, magnitude, indices, values),
            memory.refill,
            baselines=("triad", "copy"),
            target=target,
            threaded=True,
        ),
        Case(
            "sampled",
            (size + kept) // STRIDE,
            lambda: own.sampled_threshold(x, residual, k, STRIDE, 0),
            residual.zero_,
            baselines=("fused",),
            target=target,
            threaded=True,
        ),
        Case(
            "exact_top_k",
            size,
            lambda: own.exact_top_k(x, k, indices, values),
            baselines=("read", "topk", "argpartition"),
            target=target,
            threaded=True,
        ),
        Case(
            "bucket_top_k",
            size,
            lambda: own.top_k_per_bucket(
                x, BUCKET, each, indices[:in_buckets], values[:in_buckets]
            ),
            baselines=("read", "topk_of_buckets"),
            target=target,
            threaded=True,
        ),
        Case(
            "block_scan",
            size,
            lambda: own.block_scan(sparse, BLOCK_BYTES, bitmap, numbers, copied),
            baselines=("read",),
            target=target,
            threaded=True,
        ),
        Case(
            "walk_10",
            size,
            lambda: own.copy_nonzero_blocks(
                memory.tenth, BLOCK_BYTES, numbers_of_slots, memory.slots
            ),
            baselines=("read_10",),
            target=target,
        ),
        Case(
            "walk_100",
            size,
            lambda: own.copy_nonzero_blocks(x, BLOCK_BYTES, numbers_of_slots, memory.slots),
            baselines=("through", "read"),
            target=target,
        ),
        Case(
            "walk_keep",
            2 * size,
            lambda: own.copy_nonzero_blocks(x, BLOCK_BYTES, numbers, copied),
            baselines=("copy_keep",),
            target=target,
        ),
        Case(
            "combine",
            size,
            lambda: own.combine_blocks(sums, x, BLOCK_BYTES),
            sums.zero_,
            baselines=("read",),
            target="best",
        ),
        *(
            Case(
                f"qsgd{bits}",
                kept,
                partial(own.qsgd_quantize, exact, bits, BUCKET, seed, codes[bits]),
                baselines=("read", "copy"),
                target=target,
            )
            for bits in QSGD_BITS
        ),
        *(
            Case(
                f"qsgd{bits}_add",
                kept,
                partial(own.qsgd_add, codes[bits], bits, BUCKET, exact_sum),
                exact_sum.zero_,
                baselines=("read", "copy"),
                target=target,
            )
            for bits in QSGD_BITS
        ),
        Case(
            "sum",
            8 * sum(len(one) for one, _ in streams),
            lambda: total.sum(numel, streams),
            baselines=("coalesce",),
            target="best",
        ),
        Case(
            "intersection",
            8 * sum(len(one) for one, _ in streams[:2]),
            lambda: intersection.run(streams[0], streams[1]),
            baselines=("intersect1d",),
            target=target,
        ),
    ]


def table(rows: Sequence[Row]) -> str:
    lines = [["kernel", "target", "threads", "min", "median", "max", "GB/s", "baseline", "ratio"]]
    for row in rows:
        spread = row.time_us
        lines.append(
            [
                row.kernel,
                row.target,
                str(row.threads),
                *(f"{value:.1f}" for value in (spread.min, spread.median, spread.max)),
                f"{row.gigabytes_per_second:.2f}",
                row.baseline or "-",
                "-" if row.ratio is None else f"{row.ratio:.3f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )

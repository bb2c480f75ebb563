"""``sparsecomm bench ina``: allreduces through aggregators, beside torch's own."""

from __future__ import annotations

import argparse
import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sparsecomm import _C
from sparsecomm.cli.bench import (
    UsageError,
    at_least_0,
    at_least_1,
    check_folder,
    chosen,
    numel,
    several,
    whole,
    write_json,
)
from sparsecomm.cli.measure import DTYPES, GLOO_DENSE, Spread, drawn_order, exchange_options
from sparsecomm.cli.ranks import TIMEOUT, address_of_this_host, run_on_ranks, world_size_of_launcher
from sparsecomm.transports import aggregator_addresses, connect

SHARED = "shared"
SUPPORTS = ("identical", "independent")
MEMORY_BYTES = 4 << 30  # of an aggregator; 900 workers with the largest blocks
MOST_AGGREGATORS = 64
# Aggregators wait for as long as workers measure a setting; of a host that falls silent meanwhile,
# they learn from the launcher.
PATIENCE = timedelta(days=1)
# How many workers' elements of up to 8 add up exactly.
MOST_WORKERS = {"f16": 256, "bf16": 32}
LOG = logging.getLogger(__name__)

DESCRIPTION = """\
Measures allreduces (sums) of arrays in which some blocks are zero: through aggregators, and torch's
own. The last ranks are the aggregators; with --aggregators shared there is one beside each worker.
Algorithms run interleaved: in every iteration each has its turn, in an order drawn anew. Before
each turn, outside of its time, the array is filled anew and the workers meet at a barrier. Messages
to aggregators go over TCP.
"""

EPILOG = """\
algorithms:
  gloo_dense  torch.distributed's own allreduce, without aggregators
  ina         sparsecomm's: workers vote for the next blocks that are not zero
  ina_dense   every block, zeros included, through the same engine
  omnireduce  OmniReduce's policy in the same engine: next pointers, 16 columns of blocks fused into
              a message; a worker without a block of the round sends its pointers alone

columns:
  algorithm          one of the above
  zero, supports     share of the blocks that are zero on a worker; which: the same on all workers,
                     or drawn by each
  time min, median, max   time of a turn on the slowest worker: least, median, largest
  sent, received     bytes per turn of the worker with the most, headers, votes and what workers
                     agree on included: counted; for gloo_dense 2(n-1)/n * size
  up, down           bytes per turn that the aggregator with the most receives and sends: counted
  exact              every result equals the sum that torch.distributed computes

last lines: how many times as quick ina is as each of the others.

examples:
  sparsecomm bench ina --ranks 4 --aggregators 2 --numel 8388608 --zero 0,0.75
  torchrun --nnodes 8 --nproc-per-node 1 ... -m sparsecomm.cli bench ina --aggregators 4
"""


@dataclass(frozen=True)
class Setting:
    """What is measured; the same on every rank."""

    algorithms: tuple[str, ...]
    numel: int
    dtype: str
    block_bytes: int
    zero: float
    supports: str
    warmup: int
    iters: int
    seed: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def block_numel(self) -> int:
        return self.block_bytes // self.itemsize


@dataclass
class Record:
    """One algorithm's figures: times in microseconds, bytes per turn."""

    algorithm: str
    workers: int
    aggregators: int
    shared: bool
    transport: str  # of the messages to aggregators, or of gloo
    worker_transport: str | None  # by which workers agree; not known of gloo
    numel: int
    dtype: str
    block_bytes: int
    zero_fraction: float
    supports: str
    warmup: int
    iters: int
    time_us: Spread  # each turn that of the slowest worker
    sent_bytes: list[float]  # one per worker, and so on
    received_bytes: list[float]
    aggregator_sent_bytes: list[float]  # one per aggregator, and so on
    aggregator_received_bytes: list[float]
    bytes_source: str
    exact: bool


def add_ina(parsers: argparse._SubParsersAction[Any]) -> None:
    parser = parsers.add_parser(
        "ina",
        help="sum of an array through aggregators",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_ina, parser=parser)
    algorithms = (GLOO_DENSE, *_C.aggregation_policies())
    add = parser.add_argument
    add(
        "--aggregators",
        type=aggregators,
        default=1,
        metavar="A",
        help="how many of the ranks aggregate, the last ones; shared: one beside each worker (1)",
    )
    add(
        "--algorithm",
        type=partial(chosen, known=algorithms),
        default=algorithms,
        metavar="NAME,...",
        help=f"one or several of {', '.join(algorithms)} (all)",
    )
    add(
        "--numel",
        type=partial(several, one=numel),
        default=(1 << 20,),
        metavar="N,...",
        help="elements (1048576)",
    )
    add("--dtype", choices=DTYPES, default="f32", help="of the elements (f32)")
    add("--block-bytes", type=block_bytes, default=1024, metavar="B", help="of a block (1024)")
    add(
        "--zero",
        type=partial(several, one=zero),
        default=(0.0, 0.75),
        metavar="Z,...",
        help="share of the blocks that are zero (0,0.75)",
    )
    add(
        "--supports",
        type=partial(chosen, known=SUPPORTS, noun="kind of supports"),
        default=SUPPORTS,
        metavar="NAME,...",
        help="whether the blocks that are not zero are identical on all workers, or independent; "
        "without zero blocks that makes no difference, and the first is measured (both)",
    )
    add("--iters", type=at_least_1, default=20, metavar="N", help="iterations measured (20)")
    add("--warmup", type=at_least_0, default=5, metavar="N", help="iterations before them (5)")
    add("--seed", type=at_least_0, default=1, metavar="N", help="of the arrays (1)")
    add(
        "--ranks",
        type=at_least_1,
        metavar="P",
        help="ranks to start on this machine, aggregators included (2 workers and their "
        "aggregators); under torchrun the ranks are torchrun's",
    )
    add("--json", type=Path, metavar="FILE", help="also write the records to FILE, as a JSON list")


def aggregators(text: str) -> int | str:
    return SHARED if text == SHARED else whole(text, 1, MOST_AGGREGATORS)


def block_bytes(text: str) -> int:
    value = whole(text, 64, 1 << 16)
    if value & (value - 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not a power of two")
    return value


def zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return value


def run_ina(options: argparse.Namespace) -> int:
    check_folder(options.json)
    launched = world_size_of_launcher()
    if launched is not None and options.ranks not in (None, launched):
        raise UsageError(
            f"--ranks {options.ranks}, but the launcher has started {launched}; omit --ranks"
        )
    own = 0 if options.aggregators == SHARED else options.aggregators
    ranks = launched or options.ranks or 2 + own
    workers = ranks - own
    if workers < 2:
        raise UsageError(
            f"{ranks} ranks, of which {own} are to aggregate, leave {max(workers, 0)} workers, and "
            f"it takes 2: start {own + 2} or more"
        )
    if own == 0 and workers > MOST_AGGREGATORS:
        raise UsageError(
            f"{workers} workers would share their hosts with as many aggregators, of which there "
            f"may be {MOST_AGGREGATORS}: give --aggregators a number"
        )
    if workers > MOST_WORKERS.get(options.dtype, workers):
        raise UsageError(
            f"sums of {workers} workers are not exact in {options.dtype}, but those of "
            f"{MOST_WORKERS[options.dtype]} are: use --dtype f32"
        )
    settings = [
        Setting(
            algorithms=options.algorithm,
            numel=numel,
            dtype=options.dtype,
            block_bytes=options.block_bytes,
            zero=share,
            supports=supports,
            warmup=options.warmup,
            iters=options.iters,
            seed=options.seed,
        )
        for numel, share in itertools.product(options.numel, options.zero)
        for supports in (options.supports if share > 0 else options.supports[:1])
    ]
    return run_on_ranks(partial(report, settings, workers, options.json), ranks)


def report(settings: Sequence[Setting], workers: int, file: Path | None) -> None:
    """Measures, and prints and writes what came out on rank 0."""
    every: list[Record] = []
    with Cluster(workers, settings[0].algorithms) as cluster:
        for setting in settings:
            records = cluster.measure(setting)
            every += records
            if dist.get_rank() == 0:
                print(table(setting, records), flush=True)
    if file is not None and dist.get_rank() == 0:
        write_json(file, [asdict(record) for record in every])
    wrong = [
        f"{each.algorithm} ({each.numel} {each.dtype}, {each.zero_fraction:g} zero, "
        f"{each.supports})"
        for each in every
        if not each.exact
    ]
    if wrong:
        raise RuntimeError(f"results differ from the sum by torch.distributed: {', '.join(wrong)}")


class Cluster:
    """This rank's part: a worker, an aggregator, or both.

    Each policy has aggregators of its own, so that one run alternates between policies.
    """

    def __init__(self, workers: int, algorithms: Sequence[str]) -> None:
        self.rank, ranks = dist.get_rank(), dist.get_world_size()
        self.workers = workers
        self.shared = workers == ranks
        self.everyone = dist.new_group(timeout=PATIENCE)
        self.group = dist.new_group(list(range(workers)), timeout=TIMEOUT)
        self.policies = [name for name in algorithms if name != GLOO_DENSE]
        self.serving: dict[str, _C.ServingAggregator] = {}
        self.communicators: dict[str, _C.Communicator] = {}
        with ExitStack() as stack:
            self._start(stack)
            self._close = stack.pop_all()

    def _start(self, stack: ExitStack) -> None:
        for policy in self.policies if self.shared or self.rank >= self.workers else ():
            self.serving[policy] = _C.ServingAggregator(
                listen=f"{address_of_this_host()}:0",
                memory=MEMORY_BYTES,
                policy=policy,
                log=LOG.info,
            )
            stack.callback(self.serving[policy].stop)
        addresses = self._gather({policy: each.address for policy, each in self.serving.items()})
        require_reachable([each for own in addresses for each in own.values()])
        for policy in self.policies if self.rank < self.workers else ():
            given = aggregator_addresses(
                tuple(each[policy] for each in addresses if each), transport="tcp"
            )
            self.communicators[policy] = _C.Communicator(
                connect(self.group, TIMEOUT), TIMEOUT, aggregators=_C.under_policy(given, policy)
            )
            stack.callback(self.communicators[policy].close)
            # Joins the aggregators.
            _C.Exchange(
                self.communicators[policy], 1, torch.float32, exchange_options("ina", 1.0)
            ).run(torch.zeros(1))

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self._close.close()

    def _gather(self, own: Any) -> list[Any]:
        """What every rank gives, in the order of ranks, once all are here."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own, group=self.everyone)
        return every

    def _aggregated(self) -> list[dict[str, tuple[int, int]]]:
        """Bytes that each aggregator has sent and received, by policy, once all ranks are here."""
        dist.barrier(self.everyone)
        own = {name: (each.sent_bytes, each.received_bytes) for name, each in self.serving.items()}
        return [each for each in self._gather(own) if each]

    def measure(self, setting: Setting) -> list[Record]:
        """Measures on every rank; all return the same records.

        Raises:
            RuntimeError: an exchange failed, or aggregators were lost in one.
        """
        before = self._aggregated()
        own = self._turns(setting) if self.rank < self.workers else {}
        after = self._aggregated()
        every = self._gather(own)[: self.workers]
        turns = setting.warmup + setting.iters
        records = []
        for algorithm in setting.algorithms:
            measured = [each[algorithm] for each in every]
            slowest = [max(turn) * 1e6 for turn in zip(*(m.seconds for m in measured), strict=True)]
            counted = algorithm != GLOO_DENSE
            size = setting.numel * setting.itemsize
            computed = [2 * (self.workers - 1) / self.workers * size] * self.workers
            up_and_down = [
                [(now[algorithm][i] - then[algorithm][i]) / turns for i in range(2)]
                for then, now in zip(before, after, strict=True)
                if counted
            ]
            records.append(
                Record(
                    algorithm=algorithm,
                    workers=self.workers,
                    aggregators=len(after) if counted else 0,
                    shared=self.shared,
                    transport="tcp" if counted else "torch gloo",
                    worker_transport=measured[0].transport,
                    numel=setting.numel,
                    dtype=setting.dtype,
                    block_bytes=setting.block_bytes,
                    zero_fraction=setting.zero,
                    supports=setting.supports,
                    warmup=setting.warmup,
                    iters=setting.iters,
                    time_us=Spread.of([round(each, 1) for each in slowest]),
                    sent_bytes=[m.sent / setting.iters for m in measured] if counted else computed,
                    received_bytes=[m.received / setting.iters for m in measured]
                    if counted
                    else computed,
                    aggregator_sent_bytes=[sent for sent, _ in up_and_down],
                    aggregator_received_bytes=[received for _, received in up_and_down],
                    bytes_source="counted" if counted else "computed: 2 (n-1)/n * numel * itemsize",
                    exact=all(m.exact for m in measured),
                )
            )
        return records

    def _turns(self, setting: Setting) -> dict[str, Turns]:
        given = make_array(setting, self.rank)
        expected = given.clone()
        dist.all_reduce(expected, group=self.group)
        exchanges = {
            policy: _C.Exchange(
                communicator,
                setting.numel,
                DTYPES[setting.dtype],
                exchange_options("ina", 1.0, block_bytes=setting.block_bytes, average=False),
            )
            for policy, communicator in self.communicators.items()
            if policy in setting.algorithms
        }
        found = {name: Turns([], self._transport(name)) for name in setting.algorithms}
        array = torch.empty_like(given)
        draw = f"{setting.seed} {setting.numel} {setting.zero} {setting.supports}"
        for iteration in range(setting.warmup + setting.iters):
            for _, algorithm in drawn_order({}, setting.algorithms, draw, iteration):
                array.copy_(given)
                turns = found[algorithm]
                sent, received = self._counted(algorithm)
                dist.barrier(self.group)
                start = time.perf_counter()
                if algorithm == GLOO_DENSE:
                    dist.all_reduce(array, group=self.group)
                else:
                    exchanges[algorithm].run(array)
                seconds = time.perf_counter() - start
                turns.exact = turns.exact and torch.equal(array, expected)
                if iteration < setting.warmup:
                    continue
                turns.seconds.append(seconds)
                sent_now, received_now = self._counted(algorithm)
                turns.sent += sent_now - sent
                turns.received += received_now - received
        for policy, communicator in self.communicators.items():
            if lost := communicator.lost_aggregators():
                raise RuntimeError(f"{policy} was measured without its aggregators: {lost}")
        return found

    def _transport(self, algorithm: str) -> str | None:
        return None if algorithm == GLOO_DENSE else self.communicators[algorithm].transport

    def _counted(self, algorithm: str) -> tuple[int, int]:
        if algorithm == GLOO_DENSE:
            return 0, 0
        counters = self.communicators[algorithm].counters()
        return counters["sent_bytes"], counters["received_bytes"]


def require_reachable(addresses: Sequence[str]) -> None:
    """Raises RuntimeError if some addresses, but not all, are of one host alone."""
    local = [each for each in addresses if each.startswith(("127.", "[::1]"))]
    if local and len(local) < len(addresses):
        raise RuntimeError(
            f"an aggregator listens at {local[0]}, where other hosts do not reach it: give "
            "MASTER_ADDR as the address that rank 0's host has on their network, not as its name"
        )


@dataclass
class Turns:
    """One algorithm's on one worker."""

    seconds: list[float]
    transport: str | None
    sent: int = 0  # bytes of all turns
    received: int = 0
    exact: bool = True


def make_array(setting: Setting, rank: int) -> torch.Tensor:
    """Returns a worker's array: whole numbers of -8 to 8, none zero but in the zero blocks.

    Sums of them are exact in f32 and in f16; in bf16 for up to 32 workers.
    """
    generator = torch.Generator().manual_seed(setting.seed * 1009 + rank)
    values = torch.randint(1, 9, (setting.numel,), generator=generator, dtype=torch.int8)
    signs = torch.randint(0, 2, (setting.numel,), generator=generator, dtype=torch.int8) * 2 - 1
    array = (values * signs).to(DTYPES[setting.dtype])
    blocks = -(-setting.numel // setting.block_numel)
    if setting.supports == "identical":
        generator.manual_seed(setting.seed)
    zeros = torch.randperm(blocks, generator=generator)[: round(setting.zero * blocks)]
    whole_blocks = setting.numel // setting.block_numel
    array[: whole_blocks * setting.block_numel].view(whole_blocks, setting.block_numel)[
        zeros[zeros < whole_blocks]
    ] = 0
    if whole_blocks in zeros:
        array[whole_blocks * setting.block_numel :] = 0
    return array


def columns_of(records: Sequence[Record]) -> list[tuple[str, str, list[str]]]:
    """The name, the unit and the cells of each column."""
    return [
        ("algorithm", "", [r.algorithm for r in records]),
        ("zero", "", [f"{r.zero_fraction:g}" for r in records]),
        ("supports", "", [r.supports for r in records]),
        ("time min", "(us)", [f"{r.time_us.min:.1f}" for r in records]),
        ("median", "(us)", [f"{r.time_us.median:.1f}" for r in records]),
        ("max", "(us)", [f"{r.time_us.max:.1f}" for r in records]),
        ("sent", "(B)", [f"{max(r.sent_bytes):.0f}" for r in records]),
        ("received", "(B)", [f"{max(r.received_bytes):.0f}" for r in records]),
        ("up", "(B)", [most(r.aggregator_received_bytes) for r in records]),
        ("down", "(B)", [most(r.aggregator_sent_bytes) for r in records]),
        ("exact", "", ["yes" if r.exact else "NO" for r in records]),
    ]


def table(setting: Setting, records: Sequence[Record]) -> str:
    """The records in nccl-tests' manner, and what they come to."""
    first = records[0]
    through = [record for record in records if record.aggregators]
    where = "beside the workers" if first.shared else "in ranks of their own"
    count = f"{through[0].aggregators} aggregators {where}" if through else "no aggregators"
    lines = [
        f"# ina: {first.workers} workers, {count}; {setting.numel} {setting.dtype}, blocks of "
        f"{setting.block_bytes} bytes, seed {setting.seed}",
        f"# {setting.iters} iterations after {setting.warmup} of warm-up, interleaved",
        "# sparsecomm bench ina --help explains every word",
    ]
    cells = [[name, unit, *values] for name, unit, values in columns_of(records)]
    widths = [max(map(len, column)) for column in cells]
    for index, line in enumerate(zip(*cells, strict=True)):
        lead = "# " if index < 2 else "  "
        padded = (cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        lines.append((lead + "  ".join(padded)).rstrip())
    return "\n".join([*lines, *conclusion(records)])


def most(values: Sequence[float]) -> str:
    return f"{max(values):.0f}" if values else "-"


def conclusion(records: Sequence[Record]) -> list[str]:
    medians = {record.algorithm: record.time_us.median for record in records}
    ours = medians.get("ina")
    if ours is None:
        return []
    return [
        f"# ina takes {ours:.1f} us, {median / ours:.2f} times as quick as {name}"
        for name, median in medians.items()
        if name != "ina"
    ]

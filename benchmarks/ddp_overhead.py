#!/usr/bin/env python3
"""Measures what communication hooks cost per training iteration, and what they save.

    python benchmarks/ddp_overhead.py
    torchrun --nproc-per-node 2 benchmarks/ddp_overhead.py

Trains one VGG16 per hook, all in one run: an iteration of each in turn, beginning with another one
every round. An iteration is forward, backward with the exchange, and the SGD step on the example's
model, with images of noise; its time is that of the slowest rank. The link is no limit here: see
step.py for steps between hosts.

PowerSGD gets a single bucket, the others DDP's default: it starts each bucket's second allreduce
when the first has ended, and over gloo the order of those of several buckets differs between ranks.
"""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from command_line import make_parser
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from turns import of_slowest_rank, ratio

import sparsecomm
from sparsecomm.cli.bench import at_least_1, share, write_json
from sparsecomm.cli.measure import Spread
from sparsecomm.cli.ranks import run_on_ranks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from vgg16.model import VGG16

PLAIN = "plain_ddp"
POWERSGD_START = 2  # steps that PowerSGD leaves dense
WHOLE_MODEL_MB = 64  # the gradient has 59


Install = Callable[[DistributedDataParallel, float], object]


@dataclass(frozen=True)
class Settings:
    hooks: tuple[str, ...]
    iters: int
    warmup: int
    batch: int
    density: float
    file: Path | None


@dataclass
class Row:
    hook: str
    world_size: int
    batch: int
    density: float | None
    iters: int
    warmup: int
    seconds: Spread  # per iteration
    ratio_to_plain: Spread  # of the same round
    iterations: list[float]


def ours(state: Callable[[float], sparsecomm.CompressionState]) -> Install:
    return lambda ddp, density: sparsecomm.register_comm_hook(ddp, state(density))


def oktopk_python(ddp: DistributedDataParallel, density: float) -> None:
    ddp.register_comm_hook(sparsecomm.OkTopkState(density=density), sparsecomm.oktopk_hook)


def powersgd(rank: int) -> Install:
    def install(ddp: DistributedDataParallel, _: float) -> None:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START
        )
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    return install


# DDP inspects these annotations, so this module does without postponed ones.
def bf16_on_cpu(
    state: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """PyTorch's hook, under a name for which DDP does not insist on NCCL: gloo can do it too."""
    return default_hooks.bf16_compress_hook(state, bucket)


def bf16(ddp: DistributedDataParallel, _: float) -> None:
    ddp.register_comm_hook(ddp.process_group, bf16_on_cpu)


SPARSE: dict[str, Install] = {
    "auto": ours(sparsecomm.AutoState),
    "oktopk": ours(sparsecomm.OkTopkState),
    "oktopk_python": oktopk_python,
    "topk": ours(sparsecomm.TopkState),
    "quantized_topk": ours(sparsecomm.QuantizedTopkState),
    "gaussian_k": ours(sparsecomm.GaussianKState),
    "gtopk": ours(sparsecomm.GTopkState),
    "topk_dsa": ours(sparsecomm.TopkDsaState),
    "block_topk": ours(sparsecomm.BlockTopkState),
}
DENSE: dict[str, Install] = {
    PLAIN: lambda ddp, density: None,
    "dense_overlap": ours(lambda _: sparsecomm.DenseOverlapState()),
    "bf16_compress": bf16,
    "powersgd_1": powersgd(1),
    "powersgd_4": powersgd(4),
}
HOOKS = SPARSE | DENSE


class Training:
    """One model with its hook and its optimizer."""

    def __init__(self, hook: str, settings: Settings) -> None:
        torch.manual_seed(1)
        cap = WHOLE_MODEL_MB if hook.startswith("powersgd") else None
        self.ddp = DistributedDataParallel(VGG16(), bucket_cap_mb=cap)
        HOOKS[hook](self.ddp, settings.density)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01, momentum=0.9)

    def iterate(self, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Returns this rank's seconds."""
        dist.barrier()
        start = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(functional.cross_entropy(self.ddp(images), labels))
        self.optimizer.step()
        return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--ranks", type=at_least_1, default=2, help="ranks to start; torchrun brings its own")
    add("--hooks", nargs="+", choices=HOOKS, default=[*HOOKS], help="what to measure")
    add("--iters", type=at_least_1, default=15, help="iterations measured of each hook")
    add("--warmup", type=at_least_1, default=4, help="iterations before them")
    add("--batch", type=at_least_1, default=16, help="images per rank")
    add("--density", type=share, default=0.01, help="of the sparse hooks")
    add("--json", type=Path, help="file that the figures also go to")
    options = parser.parse_args(arguments)
    if options.warmup <= POWERSGD_START:
        parser.error(f"--warmup {options.warmup}: PowerSGD starts after {POWERSGD_START} steps")
    hooks = (PLAIN, *(hook for hook in options.hooks if hook != PLAIN))
    settings = Settings(
        hooks,
        options.iters,
        options.warmup,
        options.batch,
        options.density,
        options.json,
    )
    return run_on_ranks(partial(measure, settings), options.ranks)


def measure(settings: Settings) -> None:
    trainings = {hook: Training(hook, settings) for hook in settings.hooks}
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    seconds: dict[str, list[float]] = {hook: [] for hook in settings.hooks}
    order = list(settings.hooks)
    for iteration in range(settings.warmup + settings.iters):
        images = torch.randn(settings.batch, 3, 32, 32, generator=generator)
        labels = torch.randint(10, (settings.batch,), generator=generator)
        for hook in order:
            elapsed = trainings[hook].iterate(images, labels)
            if iteration >= settings.warmup:
                seconds[hook].append(elapsed)
        order = order[1:] + order[:1]
    seconds = of_slowest_rank(seconds)
    if dist.get_rank() == 0:
        rows = make_rows(settings, seconds)
        print(table(rows), flush=True)
        if settings.file is not None:
            write_json(settings.file, [asdict(row) for row in rows])


def make_rows(settings: Settings, seconds: dict[str, list[float]]) -> list[Row]:
    return [
        Row(
            hook=hook,
            world_size=dist.get_world_size(),
            batch=settings.batch,
            density=settings.density if hook in SPARSE else None,
            iters=settings.iters,
            warmup=settings.warmup,
            seconds=Spread.of(own),
            ratio_to_plain=ratio(own, seconds[PLAIN]),
            iterations=own,
        )
        for hook, own in seconds.items()
    ]


def table(rows: Sequence[Row]) -> str:
    first = rows[0]
    lines = [
        f"# VGG16 under DDP, {first.world_size} ranks x {first.batch} images, "
        f"{first.iters} iterations after {first.warmup} of "
        "warm-up, interleaved",
        f"# {'':16}  {'seconds per iteration':^23}  {'ratio to plain_ddp, by round':^28}",
        f"# {'hook':16}  {'min':>7} {'median':>7} {'max':>7}  {'min':>9} {'median':>9} {'max':>8}",
    ]
    for row in rows:
        own, ratio = row.seconds, row.ratio_to_plain
        lines.append(
            f"  {row.hook:16}  {own.min:7.4f} {own.median:7.4f} {own.max:7.4f}  "
            f"{ratio.min:9.3f} {ratio.median:9.3f} {ratio.max:8.3f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

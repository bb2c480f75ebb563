"""Times and profiles training steps of a transformer on GPUs: torchrun --nproc-per-node 2 FILE.

Two ranks may share a GPU. Plain DDP, over gloo, and the hooks take a step each in turn; afterwards
the profiler counts what a step launches and how often the processor waits for the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm

HOOKS = {
    "plain_ddp": None,
    "topk": sparsecomm.TopkState,
    "oktopk": sparsecomm.OkTopkState,
}


class Training:
    def __init__(self, hook: str, width: int, layers: int, density: float) -> None:
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True)
        self.ddp = DistributedDataParallel(nn.TransformerEncoder(layer, layers).cuda())
        self.parameters = list(self.ddp.parameters())
        if (state := HOOKS[hook]) is not None:
            sparsecomm.register_comm_hook(self.ddp, state(density=density))
        self.inputs = torch.randn(8, 64, width, device="cuda")

    def step(self) -> float:
        """Returns this rank's time in milliseconds."""
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for parameter in self.parameters:
            parameter.grad = None
        torch.autograd.backward(self.ddp(self.inputs).square().mean())
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - start)

    def calls(self) -> Counter[str]:
        """Counts a step's calls of the CUDA runtime, by name, and the kernels that run."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.step()
        events = profile.events()
        assert events is not None
        counts = Counter(event.name for event in events if event.name.startswith("cuda"))
        counts["kernels"] = sum(event.device_type.name == "CUDA" for event in events)
        return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    trainings = {
        hook: Training(hook, options.width, options.layers, options.density) for hook in HOOKS
    }
    times: dict[str, list[float]] = {hook: [] for hook in HOOKS}
    for number in range(5 + options.steps):
        for hook, training in trainings.items():
            taken = torch.tensor(training.step())
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if number >= 5:
                times[hook].append(taken.item())
    rows: list[dict[str, Any]] = []
    for hook, training in trainings.items():
        parameters = training.parameters
        rows.append(
            {
                "hook": hook,
                "device": torch.cuda.get_device_name(),
                "ranks": dist.get_world_size(),
                "parameters": len(parameters),
                "numel": sum(parameter.numel() for parameter in parameters),
                "density": options.density,
                "step_ms": {
                    "min": min(times[hook]),
                    "median": statistics.median(times[hook]),
                    "max": max(times[hook]),
                },
                "calls": dict(training.calls()),
            }
        )
    if dist.get_rank() == 0:
        for row in rows:
            print(f"{row['hook']:12} {row['step_ms']['median']:8.2f} ms  {row['calls']}")
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

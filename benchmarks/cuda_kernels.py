"""Times the CUDA kernels and operators beside a copy and torch.topk, on the same buffers."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sparsecomm import _C, functional
from sparsecomm.build import CUDA_LIBRARY


def time_us(run: Callable[[], object], prepare: Callable[[], object], rounds: int) -> list[float]:
    """The device's time of each of ``rounds`` runs, in microseconds, after one that warms up.

    The device sleeps before each run, so that what is launched waits in its queue: the time holds
    no time of the processor, unless the run itself waits for the device.
    """
    run()
    times = []
    for _ in range(rounds):
        prepare()
        begin, end = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            for _ in range(2)
        )
        torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]  # half a millisecond
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return times


def measure(numel: int, density: float, rounds: int) -> list[dict[str, Any]]:
    gradient = torch.randn(numel, device="cuda")
    copy, residual = torch.empty_like(gradient), torch.zeros_like(gradient)
    magnitudes = gradient.abs()
    k = _C.entries_at(density, numel)
    limit = min(numel, 4 * k + 1024)
    alone = _C.CudaSelection(str(CUDA_LIBRARY), gradient, gradient[:0], limit)
    fused = _C.CudaSelection(str(CUDA_LIBRARY), copy, residual, limit)
    alone.exact_threshold(k)
    alone.select()
    if alone.count() != k:
        sys.exit(f"exact top-k selected {alone.count()} of {numel} entries instead of {k}")
    threshold = float(alone.values[:k].abs().min())

    def select() -> None:
        alone.begin(threshold)
        alone.select()

    def top_k() -> None:
        alone.exact_threshold(k)
        alone.select()

    def refill() -> None:
        copy.copy_(gradient)
        residual.zero_()

    def feedback() -> None:
        fused.begin(threshold)
        fused.fused_error_feedback()

    # What runs, bytes per entry, and the baseline that it is compared with. torch.topk twice: all
    # that it takes to get what exact_top_k gives, and the least it can be asked for, of magnitudes
    # that are there already.
    kernels: dict[str, tuple[Callable[[], object], int, str]] = {
        "copy": (lambda: copy.copy_(gradient), 8, "copy"),
        "abs+torch.topk": (lambda: torch.topk(gradient.abs(), k), 4, "torch.topk"),
        "torch.topk": (lambda: torch.topk(magnitudes, k, sorted=False), 4, "torch.topk"),
        "select": (select, 4, "copy"),
        "exact_top_k": (top_k, 4, "torch.topk"),
        "fused_error_feedback": (feedback, 16, "copy"),
        # The operators, which wait for the device and make memory for their results.
        "op threshold_exact": (lambda: functional.threshold_exact(gradient, k), 4, "torch.topk"),
        "op threshold_sampled": (lambda: functional.threshold_sampled(gradient, k), 4, "copy"),
        "op threshold_gaussian": (lambda: functional.threshold_gaussian(gradient, k), 4, "copy"),
        "op select": (lambda: functional.select(gradient, threshold, limit=limit), 4, "copy"),
        "op top_k": (lambda: functional.top_k(gradient, k), 4, "torch.topk"),
        "op top_k by bucket": (lambda: functional.top_k(gradient, 5, bucket=512), 4, "copy"),
        "op qsgd_quantize": (lambda: functional.qsgd_quantize(gradient, 4, seed=1), 4, "copy"),
        "op block_scan": (lambda: functional.block_scan(gradient, 64), 4, "copy"),
    }
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(3):  # alternating
        for name, (run, _, _) in kernels.items():
            times[name] += time_us(run, refill if run is feedback else lambda: None, rounds)
    median = {name: statistics.median(values) for name, values in times.items()}
    rows = []
    for name, (_, width, baseline) in kernels.items():
        bandwidth = width * numel / median[name] / 1000
        # Of a copy, its bandwidth; of torch.topk, its time.
        ratio = (
            bandwidth / (8 * numel / median["copy"] / 1000)
            if baseline == "copy"
            else median["torch.topk"] / median[name]
        )
        rows.append(
            {
                "kernel": name,
                "target": torch.cuda.get_device_name(),
                "dtype": "f32",
                "numel": numel,
                "density": density,
                "threads": 0,
                "time_us": {
                    "min": min(times[name]),
                    "median": median[name],
                    "max": max(times[name]),
                },
                "gigabytes_per_second": bandwidth,
                "baseline": baseline,
                "ratio": ratio,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=2**28)
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this torch has no CUDA, or no device: there is nothing to measure")
    if problem := _C.cuda_problem(str(CUDA_LIBRARY)):
        sys.exit(problem)
    rows = measure(options.numel, options.density, options.rounds)
    for row in rows:
        print(
            f"{row['kernel']:22} {row['time_us']['median']:12.1f} us "
            f"{row['gigabytes_per_second']:9.1f} GB/s {row['ratio']:7.2f} x {row['baseline']}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()

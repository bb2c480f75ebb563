"""What the benches of kernels pass over."""

from __future__ import annotations

import mmap

import numpy as np
import torch

from sparsecomm import _C

STREAMS = 8  # that are summed
HUGE_PAGE = 2 << 20  # bytes


class Memory:
    """What kernels and baselines pass over, 1-D; the residual as the hooks keep it."""

    def __init__(self, numel: int, dtype: torch.dtype, block: int, window: int, seed: int) -> None:
        self.x = make_gradient(numel, dtype, seed)
        self.gradient = torch.empty_like(self.x)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.residual = in_huge_pages(numel, wide)
        self.others = torch.ones(4 * numel, dtype=wide)
        self.tenth = make_blocks(self.x, block, 0.1, seed)
        self.copied = torch.empty(-(-numel // block) * block, dtype=dtype)
        self.slots = torch.empty(window * block, dtype=dtype)

    def refill(self) -> None:
        self.gradient.copy_(self.x)
        self.residual.zero_()


def in_huge_pages(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros, in huge pages where the system has them."""
    memory = mmap.mmap(-1, numel * dtype.itemsize + HUGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    offset = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % HUGE_PAGE
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)


def make_gradient(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def count_of(numel: int, density: float) -> int:
    return _C.entries_at(density, numel)


def threshold_of(x: torch.Tensor, k: int) -> float:
    """The magnitude that k entries exceed, but for ties."""
    return float(x.abs().float().topk(min(k + 1, x.numel())).values[-1])


def make_streams(numel: int, k: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed + 1)
    streams = []
    for _ in range(STREAMS):
        places = torch.randint(numel, (k,), generator=generator)
        indices = torch.from_numpy(np.unique(places.numpy()))
        streams.append((indices.to(torch.uint32), torch.randn(len(indices), generator=generator)))
    return streams


def make_blocks(x: torch.Tensor, block: int, density: float, seed: int) -> torch.Tensor:
    """x with zeros in all blocks but a share of them, which is drawn at random."""
    generator = torch.Generator().manual_seed(seed + 2)
    kept = torch.rand(-(-x.numel() // block), generator=generator) < density
    return torch.where(kept.repeat_interleave(block)[: x.numel()], x, 0).to(x.dtype)

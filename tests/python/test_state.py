"""Checkpoints of states, by torch.save and distributed, also for other numbers of ranks."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import checkpoint_of, flat, gathered, make_ddp, make_model, train
from ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import CompressionState, OkTopkState, ThresholdSchedule
from sparsecomm.checkpoint import ReshardingLoadPlanner
from sparsecomm.rank_entries import entry_of, merge

# Reused thresholds of every fifth step and shares of every third: a run that stops after 7 steps
# has both in use.
SCHEDULE = ThresholdSchedule(between="reused", period=5, partition_period=3)


# ---- as many ranks as before


def check_resumed_runs_are_bit_identical(folder: Path) -> None:
    for options in ({}, {"momentum": 0.9}, {"first_moment": 0.9}):
        ddp, optimizer, state = start(options)
        train(ddp, optimizer, range(7))
        file = io.BytesIO()
        torch.save([ddp.state_dict(), optimizer.state_dict(), state.state_dict()], file)
        assert isinstance(state, Stateful)
        path = folder / f"resume-{len(options) and next(iter(options))}"
        dcp.save({"compression": state}, checkpoint_id=path)
        train(ddp, optimizer, range(7, 13))
        for distributed in (False, True):
            file.seek(0)
            model, optimizer_state, compression = torch.load(file, weights_only=True)
            resumed, resumed_optimizer, resumed_state = start(options)
            resumed.load_state_dict(model)
            resumed_optimizer.load_state_dict(optimizer_state)
            if distributed:
                planner = ReshardingLoadPlanner() if options else None
                dcp.load({"compression": resumed_state}, checkpoint_id=path, planner=planner)
            else:
                resumed_state.load_state_dict(compression)
            train(resumed, resumed_optimizer, range(7, 13))
            assert torch.equal(flat(resumed.parameters()), flat(ddp.parameters())), options
            expect_same(checkpoint_of(resumed_state), checkpoint_of(state))


def start(
    options: dict[str, Any],
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, CompressionState]:
    ddp = make_ddp(make_model())
    state = OkTopkState(density=0.05, schedule=SCHEDULE, **options)
    sparsecomm.register_comm_hook(ddp, state)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9), state


def expect_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    for key in one:
        if key in ("residuals", "moments"):
            assert one[key].keys() == other[key].keys()
            for name, tensor in one[key].items():
                assert torch.equal(tensor, other[key][name]), name
        else:
            assert one[key] == other[key], key


def check_before_the_first_step(folder: Path) -> None:
    """A state that has not seen a step can be saved, and loaded."""
    _, _, state = start({"first_moment": 0.9})
    fresh = checkpoint_of(state)
    biases = {name for name in fresh["residuals"] if "bias" in name}
    assert fresh["residuals"].keys() - biases == fresh["moments"].keys()
    dcp.save({"compression": state}, checkpoint_id=folder / "fresh")
    runs = []
    for load in (False, True):
        ddp, optimizer, other = start({"first_moment": 0.9})
        if load:
            dcp.load({"compression": other}, checkpoint_id=folder / "fresh")
        train(ddp, optimizer, range(3))
        runs.append(flat(ddp.parameters()))
    assert torch.equal(*runs)

    nameless = OkTopkState(density=0.05)
    nameless.load_state_dict(nameless.state_dict())
    ddp = make_ddp(make_model())
    ddp.register_comm_hook(nameless, sparsecomm.oktopk_hook)
    train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(2))
    dcp.save({"compression": nameless}, checkpoint_id=folder / "nameless")
    with pytest.raises(ValueError, match=r"no residual of .*\.weight.*named_parameters"):
        dcp.load({"compression": OkTopkState()}, checkpoint_id=folder / "nameless")


def check_names_of_a_hook_in_python() -> None:
    """What is kept of a parameter stays its own, however DDP's buckets hold them."""

    def start(
        load: dict[str, Any] | None, density: float, **options: Any
    ) -> tuple[DistributedDataParallel, CompressionState]:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
        for parameter in model.parameters():
            nn.init.eye_(parameter)
        ddp = DistributedDataParallel(model, **options)
        state = sparsecomm.TopkState(density, select="exact")
        if load is not None:
            state.load_state_dict(load)
            state.density = density
        ddp.register_comm_hook(state, sparsecomm.topk_hook)
        return ddp, state

    ddp, state = start(None, 0.1)
    ddp(torch.arange(4.0)[None]).mul(torch.arange(1.0, 5.0)).sum().backward()
    saved = state.state_dict()
    [entry] = saved.values()
    kept = [entry["residuals"][f"{layer}.weight"] for layer in range(3)]
    assert kept[0].any()
    # As a state without names saved them: numbered as the first buckets had them.
    numbers = {name: f"parameter.{i}" for i, name in enumerate(entry["groups"][0]["parameters"])}
    numbered = copy.deepcopy(saved)
    [other] = numbered.values()
    other["residuals"] = {numbers[name]: kept for name, kept in entry["residuals"].items()}
    other["groups"][0]["parameters"] = [*numbers.values()]

    for load, options in [
        (saved, {}),
        (saved, {"bucket_cap_mb": 0.0001, "find_unused_parameters": True}),
        (numbered, {}),
    ]:
        ddp, state = start(load, 1.0, **options)
        (0 * ddp(torch.ones(1, 4))).sum().backward()  # delivers what is kept
        for parameter, residual in zip(ddp.parameters(), kept, strict=True):
            assert parameter.grad is not None
            assert torch.equal(parameter.grad.reshape(-1), residual), options
        [held] = load.values()
        assert checkpoint_of(state)["residuals"].keys() == held["residuals"].keys()

    # A rank without data is brought zeros, which are in no bucket of its model.
    ddp, state = start(None, 0.1)
    with ddp.join():
        for _ in range(0 if dist.get_rank() == 0 else 2):
            ddp.zero_grad()
            ddp(torch.ones(1, 4)).sum().backward()
    assert checkpoint_of(state)["residuals"].keys() == entry["residuals"].keys()


def check_what_was_loaded_may_change(folder: Path) -> None:
    """Also before the first step, and what a file holds that is mapped into memory."""
    ddp, optimizer, state = start({"first_moment": 0.9})
    train(ddp, optimizer, range(3))
    saved = checkpoint_of(state)
    file = folder / f"mapped-{dist.get_rank()}.pt"
    torch.save(state.state_dict(), file)
    _, _, other = start({"first_moment": 0.9})
    loaded = torch.load(file, weights_only=True, mmap=True)
    other.load_state_dict(loaded)
    for kept in ("residuals", "moments"):
        for tensor in loaded[f"rank_{dist.get_rank()}_of_3"][kept].values():
            tensor.zero_()
    expect_same(checkpoint_of(other), saved)
    del loaded
    file.write_bytes(b"")
    expect_same(checkpoint_of(other), saved)


# ---- another number of ranks


class Given(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 50))
        self.other = nn.Parameter(torch.zeros(30, 10))
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        products = [(p * x).sum() for p, x in zip(self.parameters(), inputs, strict=True)]
        return torch.stack(products).sum()


class Run:
    """Trains, and keeps account of what goes in and comes out, in units of the average."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ddp = DistributedDataParallel(Given(), process_group=group)
        self.state = OkTopkState(density=0.05, schedule=SCHEDULE)
        sparsecomm.register_comm_hook(self.ddp, self.state)
        self.balance = torch.zeros(2320, dtype=torch.float64)

    def train(self, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            # Multiples of 72, so that all that is divided by 2 and by 3 here stays exact.
            inputs = [
                72.0 * torch.randint(-9, 10, p.shape, generator=generator)
                for p in self.ddp.parameters()
            ]
            self.ddp.zero_grad()
            self.ddp(inputs).backward()
            result = flat([p.grad for p in self.ddp.parameters() if p.grad is not None])
            self.balance += self.average(flat(inputs)) - result.double()

    def pending(self) -> torch.Tensor:
        residuals = checkpoint_of(self.state)["residuals"]
        return self.average(flat(residuals[n] for n, _ in self.ddp.module.named_parameters()))

    def average(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.double()
        dist.all_reduce(total, group=self.group)
        return total / self.group.size()


def save(folder: Path, group: dist.ProcessGroup) -> None:
    run = Run(group)
    run.train(range(7))
    assert run.pending().any()
    assert torch.equal(run.pending(), run.balance)
    [saved] = [g for g in checkpoint_of(run.state)["groups"] if "weight" in g["parameters"]]
    assert saved["local_threshold"] > 0
    assert saved["boundaries"]
    torch.save(run.state.state_dict(), folder / f"{group.rank()}.pt")
    torch.save(run.balance, folder / "balance.pt")
    dcp.save({"run": run.state}, checkpoint_id=folder / "dcp", process_group=group)


def go_on(folder: Path, former: int, group: dist.ProcessGroup) -> None:
    """Contract 1 over a change of the number of ranks."""
    parts = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(former)]
    together = {key: entry for part in parts for key, entry in part.items()}
    loaded = []
    for distributed in (False, True):
        run = Run(group)
        run.balance = torch.load(folder / "balance.pt")
        if distributed:
            where = {"checkpoint_id": folder / "dcp", "process_group": group}
            with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
                dcp.load({"run": run.state}, **where)
            dcp.load({"run": run.state}, planner=ReshardingLoadPlanner(), **where)
        else:
            with pytest.raises(ValueError, match=r"nor all ranks of another number"):
                run.state.load_state_dict(parts[0])
            run.state.load_state_dict(together)
        loaded.append(checkpoint_of(run.state))
        assert torch.equal(run.pending(), run.balance)
        run.train(range(7, 12))
        assert torch.equal(run.pending(), run.balance)
        assert {group["step"] for group in checkpoint_of(run.state)["groups"]} == {12}
        assert run.state.stats()["steps"] == 5
    expect_same(*loaded)
    # What is sums of the ranks, as some optimizers have it, has to stay the same sum.
    summing = OkTopkState(density=0.05)
    summing._process_group, summing._average = group, False
    summing.load_state_dict(together)
    for name, residual in checkpoint_of(summing)["residuals"].items():
        total = residual * group.size()
        assert torch.equal(total, sum(e["residuals"][name] for e in together.values())), name


def check_other_numbers_of_ranks(folder: Path) -> None:
    rank = dist.get_rank()
    three = dist.new_group()
    two = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(3)][rank]
    for name in ("two", "three"):
        (folder / name).mkdir(exist_ok=True)
    if rank < 2:
        save(folder / "two", two)
    save(folder / "three", three)
    dist.barrier()
    go_on(folder / "two", 2, three)
    if rank < 2:
        go_on(folder / "three", 3, two)
    if rank == 0:
        go_on(folder / "two", 2, alone)
    dist.barrier()


def check_several_groups_in_one_checkpoint(folder: Path) -> None:
    """Each has its residuals back, also with another number of ranks."""

    def begin(groups: list[list[int]]) -> Run:
        made = [dist.new_group(ranks) for ranks in groups]
        [mine] = [g for g, ranks in zip(made, groups, strict=True) if dist.get_rank() in ranks]
        return Run(mine)

    run = begin([[0, 2], [1]])
    run.train(range(7))
    of_groups = gathered(run.pending())
    assert not torch.equal(of_groups[0], of_groups[1])
    where: dict[str, Any] = {"checkpoint_id": folder / "groups"}
    dcp.save({"run": run.state}, **where)
    for groups, planner in (([[0, 2], [1]], None), ([[0], [1, 2]], ReshardingLoadPlanner())):
        other = begin(groups)
        dcp.load({"run": other.state}, planner=planner, **where)
        assert torch.equal(other.pending(), of_groups[dist.get_process_group_ranks(other.group)[0]])
        if planner is None:
            expect_same(checkpoint_of(other.state), checkpoint_of(run.state))
    world = begin([[0, 1, 2]])
    with pytest.raises(CheckpointException, match="Missing key in checkpoint state_dict"):
        dcp.load({"run": world.state}, planner=ReshardingLoadPlanner(), **where)

    # As earlier releases named it: one group, of which all is kept.
    if dist.get_rank() != 1:
        old = {f"rank_{run.group.rank()}_of_2": checkpoint_of(run.state)}
        where = {"checkpoint_id": folder / "old", "process_group": run.group}
        dcp.save({"run": old}, **where)
        for distributed in (False, True):
            other = Run(run.group)
            if distributed:
                dcp.load({"run": other.state}, planner=ReshardingLoadPlanner(), **where)
            else:
                other.state.load_state_dict(old)
            expect_same(checkpoint_of(other.state), checkpoint_of(run.state))
    dist.barrier()


def _check(folder: Path) -> None:
    check_resumed_runs_are_bit_identical(folder)
    check_before_the_first_step(folder)
    check_names_of_a_hook_in_python()
    check_what_was_loaded_may_change(folder)
    check_other_numbers_of_ranks(folder)
    check_several_groups_in_one_checkpoint(folder)


def test_checkpoints(tmp_path: Path) -> None:
    run_ranks(3, _check, tmp_path, timeout=110)


# ---- what does not go together


def entry(rank: int) -> dict[str, Any]:
    group = {
        "parameters": ["weight"],
        "step": 7,
        "local_threshold": 1.0 + rank,
        "global_threshold": 2.0,
        "boundaries": [1],
    }
    return {
        "format": 3,
        "density": 0.1,
        "residuals": {"weight": torch.tensor([1.0 + rank, -4.0])},
        "moments": {"weight": torch.tensor([8.0 * rank, 0.0])},
        "groups": (group,),
    }


def test_merging() -> None:
    together = {f"rank_{rank}_of_3": entry(rank) for rank in range(3)}
    assert entry_of(together, 1, 3) is together["rank_1_of_3"]
    merged = entry_of(together, 1, 2)
    assert merged["residuals"]["weight"].tolist() == [2.0, -4.0]
    assert merged["moments"]["weight"].tolist() == [8.0, 0.0]
    [group] = merged["groups"]
    assert (group["step"], group["local_threshold"], group["global_threshold"]) == (7, 0, 0)
    assert group["boundaries"] == []
    # What was merged from is left as it was.
    assert together["rank_0_of_3"]["residuals"]["weight"].tolist() == [1.0, -4.0]
    assert merge([entry(0)])["residuals"]["weight"].tolist() == [1.0, -4.0]


def test_entries_of_several_groups() -> None:
    of_groups = {f"rank_{r}_of_2_from_rank_{g}": entry(2 * g + r) for g in (0, 1) for r in (0, 1)}
    one = {key: value for key, value in of_groups.items() if key.endswith("_from_rank_1")}
    for group in (0, 1):
        part = f"_from_rank_{group}"
        assert entry_of(of_groups, 1, 2, part) is of_groups[f"rank_1_of_2{part}"]
        mean = 1.5 + 2 * group
        assert entry_of(of_groups, 2, 3, part)["residuals"]["weight"].tolist() == [mean, -4.0]
    # The only group there is, whatever it is called.
    for part in ("", "_from_rank_2"):
        assert entry_of(one, 1, 2, part) is one["rank_1_of_2_from_rank_1"]
        assert entry_of(one, 0, 1, part)["residuals"]["weight"].tolist() == [3.5, -4.0]
        for size in (1, 2, 4):
            with pytest.raises(ValueError, match=f"neither rank_0_of_{size}{part}"):
                entry_of(of_groups, 0, size, part)
    # One rank's, if its group has become the world, and not if there is another one.
    [(key, alone), _] = one.items()
    assert entry_of({key: alone}, 0, 2) is alone
    with pytest.raises(ValueError, match="neither rank_0_of_2_from_rank_0"):
        entry_of({key: alone}, 0, 2, "_from_rank_0")
    # Without a group, as earlier releases named all.
    assert entry_of({"rank_0_of_2": alone}, 0, 2, "_from_rank_1") is alone


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("density",), 0.2, r"differ in density: 0\.1, 0\.2"),
        (("groups", 0, "step"), 8, r"were at steps \[7\], \[8\]"),
        (("groups", 0, "parameters"), ["bias"], "steps"),
        (("residuals", "weight"), torch.zeros(3), r"different shapes: \(2,\) and \(3,\)"),
        (("residuals", "bias"), torch.zeros(3), "residuals of different parameters"),
        (("loss_scale",), 1.0, "different kinds of states"),
    ],
)
def test_what_ranks_saved_must_fit(path: tuple[Any, ...], value: Any, message: str) -> None:
    other = copy.deepcopy(entry(1))
    place: Any = other
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match=message):
        entry_of({"rank_0_of_2": entry(0), "rank_1_of_2": other}, 0, 1)


def test_incomplete_sets_of_ranks_are_refused() -> None:
    some = {f"rank_{rank}_of_3": entry(rank) for rank in (0, 2)}
    with pytest.raises(ValueError, match="has rank_0_of_3, rank_2_of_3, and neither rank_0_of_2"):
        entry_of(some, 0, 2)
    with pytest.raises(ValueError, match="has nothing"):
        entry_of({}, 0, 2)
    several = {f"rank_{rank}_of_{size}": entry(rank) for size in (1, 2) for rank in range(size)}
    with pytest.raises(ValueError, match="neither rank_0_of_3"):
        entry_of(several, 0, 3)

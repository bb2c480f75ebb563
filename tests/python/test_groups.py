"""Which parameters are exchanged together, and when."""

from __future__ import annotations

import copy
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import batch, checkpoint_of, flat, gathered, make_ddp, make_model, train
from patience import LONG
from ranks import run_ranks
from test_hooks import fail_in_backward, wrap_again
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import Compression, OkTopkState, TopkState, grouping
from sparsecomm.optim import TopkSGD

# Of make_model(): four layers of 40 x 40, and one of 3 x 40.
LISTS = (("8", "4"), ("0.weight", "2.weight", "6"))
WAYS: list[Any] = [None, "model", 1, 2, 5, "7kB", LISTS, "buckets"]


def weights(*layers: int) -> set[str]:
    return {f"{layer}.weight" for layer in layers}


# The weights of each group, from the second step on; biases are sent whole.
EXPECTED: dict[Any, list[set[str]]] = {
    "model": [weights(0, 2, 4, 6, 8)],
    1: [weights(0, 2, 4, 6, 8)],
    2: [weights(8, 6, 4), weights(2, 0)],
    5: [weights(8), weights(6), weights(4), weights(2), weights(0)],
    "7kB": [weights(8, 6), weights(4), weights(2), weights(0)],
    LISTS: [weights(8, 4), weights(0, 2, 6)],
}
BIASES = {f"{layer}.bias" for layer in (0, 2, 4, 6, 8)}


# ---- numbers


def named(*sizes: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{i}", nn.Parameter(torch.zeros(size, 1))) for i, size in enumerate(sizes)]


def sent_whole(parameter: torch.Tensor) -> bool:
    return parameter.dim() < 2


def test_a_number_of_groups_splits_as_evenly_as_can_be() -> None:
    generator = torch.Generator().manual_seed(3)
    for _ in range(60):
        count = int(torch.randint(1, 9, (1,), generator=generator))
        sizes = torch.randint(1, 30, (count,), generator=generator).tolist()
        parameters = named(*sizes)
        for groups in range(1, count + 1):
            found = [n for _, n in grouping.numbers(groups, parameters, sent_whole)]
            # Consecutive, the last parameters first, and none is empty.
            assert found == sorted(found, reverse=True)
            assert set(found) == set(range(groups))
            largest = max(
                sum(size for size, n in zip(sizes, found, strict=True) if n == number)
                for number in range(groups)
            )
            best = min(
                max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, count)))
                for cuts in itertools.combinations(range(1, count), groups - 1)
            )
            assert largest == best


def test_a_size_is_kept_to() -> None:
    parameters = [*named(10, 20, 30, 5, 5), ("frozen", torch.zeros(9, 1)), *named()]
    parameters.append(("bias", nn.Parameter(torch.zeros(7))))
    found = grouping.numbers("160B", parameters, sent_whole)
    assert [n for _, n in found] == [1, 1, 0, 0, 0, -1]


def test_what_groups_may_be() -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        (0, ValueError, "1 or more"),
        (True, TypeError, "bool"),
        (2.5, TypeError, "float"),
        ("modle", ValueError, '"model".*25MB'),
        ("0MB", ValueError, "fits"),
        ("25MB/s", ValueError, "25MB"),
        ([], ValueError, "model"),
        ([[]], ValueError, r"groups\[0\]"),
        (["a", "b"], TypeError, r"groups\[0\].*str"),
        ([["a"], [3]], TypeError, r"groups\[1\].*int"),
    ]
    for groups, kind, text in bad:
        with pytest.raises(kind, match=text):
            Compression(groups=groups)
    with pytest.raises(ValueError, match="group, model"):
        Compression(density_scope="all")
    with pytest.raises(ValueError, match=r"select='exact'.*threshold"):
        Compression(density_scope="model", select="exact")
    with pytest.raises(ValueError, match="density_scope"):
        Compression(algorithm="dense_ring", density=1, density_scope="model")
    with pytest.raises(ValueError, match="bucket by bucket"):
        Compression(algorithm="dense_ring", density=1, groups=2)
    layer = nn.Linear(2, 3)
    model = nn.Sequential(nn.Linear(4, 2), layer)
    parameters = [*model.named_parameters()]
    missing: list[tuple[Any, str]] = [
        (3, "groups=3.*2 parameters"),
        ("12B", "0.weight.*3.2e-05MB"),
        ([["0"], ["5.weight"]], r"groups\[1\].*'5.weight'"),
        ([["0"], [nn.Linear(2, 2)]], r"groups\[1\].*Linear"),
        ([["0"], ["0.weight", "1"]], r"0.weight.*groups\[0\].*groups\[1\]"),
        ([["0"]], r"leaves out 1.weight"),
    ]
    for groups, text in missing:
        with pytest.raises(ValueError, match=text):
            Compression(groups=groups).group_numbers_of(parameters)
    by_module = Compression(groups=[[layer], ["0"]])
    assert [n for _, n in by_module.group_numbers_of(parameters)] == [1, -1, 0, -1]
    assert grouping.with_names(by_module.groups, parameters) == (("1.weight", "1.bias"), ("0",))


# ---- hooks


def start(
    groups: Any, density: float = 0.1, several_buckets: bool = False, **options: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, OkTopkState]:
    ddp = make_ddp(make_model(), several_buckets)
    state = OkTopkState(density, groups=groups, **options)
    sparsecomm.register_comm_hook(ddp, state)
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), state


def members(state: OkTopkState) -> list[set[str]]:
    return [set(group["parameters"]) for group in checkpoint_of(state)["groups"]]


def check_groups_and_results() -> None:
    plain = make_ddp(make_model())
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), range(4))
    for groups in WAYS:
        for several_buckets in (False, True):
            ddp, optimizer, state = start(groups, 1.0, several_buckets)
            train(ddp, optimizer, range(4))
            # Everything is sent, so it is plain DDP, whatever goes with what.
            torch.testing.assert_close(
                flat(ddp.parameters()), flat(plain.parameters()), rtol=1e-5, atol=1e-6
            )
            found = members(state)
            assert sorted(name for group in found for name in group) == sorted(
                name for name, _ in ddp.module.named_parameters()
            )
            if groups in EXPECTED:
                expected = [*EXPECTED[groups], BIASES]
                assert sorted(map(sorted, found)) == sorted(map(sorted, expected)), groups
            if groups == "buckets":
                # DDP has two or more, and each of them sends biases whole.
                assert len(found) >= 4
            steps = {group["step"] for group in checkpoint_of(state)["groups"]}
            assert steps == {4}, groups
            assert state.stats()["steps"] == 4


def check_conservation(groups: Any, momentum: float = 0.0) -> None:
    """What is added up on all ranks is delivered, or kept, at every step."""
    ddp, optimizer, state = start(groups, 0.05, momentum=momentum, mask_momentum=False)
    local = copy.deepcopy(ddp.module)
    names = [name for name, _ in local.named_parameters()]
    size = dist.get_world_size()
    kept = {name: torch.zeros(p.numel()) for name, p in local.named_parameters()}
    velocity = {name: torch.zeros(p.numel()) for name, p in local.named_parameters()}
    for step in range(5):
        local.load_state_dict(ddp.module.state_dict())
        local.zero_grad()
        local(batch(step)).square().mean().backward()
        optimizer.zero_grad()
        ddp(batch(step)).square().mean().backward()
        after = checkpoint_of(state)["residuals"]
        for name, mine, shared in zip(names, local.parameters(), ddp.parameters(), strict=True):
            assert mine.grad is not None
            assert shared.grad is not None
            velocity[name] = momentum * velocity[name] + mine.grad.reshape(-1)
            brought = kept[name] + velocity[name] - after[name].reshape(-1)
            delivered = torch.stack(gathered(brought)).sum(0) / size
            torch.testing.assert_close(shared.grad.reshape(-1), delivered, rtol=1e-4, atol=1e-6)
            kept[name] = after[name].reshape(-1).clone()
        optimizer.step()
    assert any(residual.any() for residual in kept.values())


def check_conservation_of_all() -> None:
    for groups in WAYS:
        check_conservation(groups)
    for groups in (2, "buckets"):
        check_conservation(groups, momentum=0.5)


def check_overlap_of_buckets() -> None:
    """A bucket is exchanged while the backward pass goes on."""
    model = make_model()
    state = TopkState(0.1, groups="buckets", named_parameters=model.named_parameters())
    ddp = make_ddp(model)
    futures: list[torch.futures.Future[torch.Tensor]] = []

    def hook(own: TopkState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = sparsecomm.topk_hook(own, bucket)
        futures.append(future)
        return future

    # DDP looks at the types themselves.
    hook.__annotations__ = {
        "bucket": dist.GradBucket,
        "return": torch.futures.Future[torch.Tensor],
    }
    ddp.register_comm_hook(state, hook)
    waited: list[int] = []

    def wait(_gradient: torch.Tensor) -> None:
        if step > 1:  # the groups are known, and DDP has its buckets
            futures[0].wait()
            waited.append(len(futures))

    next(ddp.parameters()).register_hook(wait)  # whose gradient comes last
    for step in range(4):
        futures.clear()
        ddp(batch(step)).square().mean().backward()
    assert len(waited) == 2
    assert max(waited) < len(futures)


def check_overlap_of_lists(folder: Path) -> None:
    """A group is exchanged while the backward pass goes on."""
    ddp, _, _ = start([["8"], ["6", "4", "2", "0"]], dense_below=0)
    recording = sparsecomm.timeline(folder / "run.json")
    seen: list[int] = []

    def runs() -> list[str]:
        assert recording.path is not None
        whole = recording.path.read_text().rpartition("\n")[0]
        events = [json.loads(line.rstrip(",")) for line in whole.splitlines() if '"ph"' in line]
        rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
        return [rows[e["tid"]] for e in events if e["name"] == "run"]

    def wait(_gradient: torch.Tensor) -> None:
        if step == 0:
            return
        end = time.monotonic() + LONG
        while runs().count("gradients 0") < step:
            assert time.monotonic() < end, "the first group waits for the others"
            time.sleep(0.05)
        seen.append(runs().count("gradients 1"))

    next(ddp.parameters()).register_hook(wait)  # whose gradient comes last
    for step in range(3):
        if step == 1:
            recording.__enter__()
        ddp.zero_grad()
        ddp(batch(step)).square().mean().backward()
    recording.__exit__(None, None, None)
    assert seen == [0, 1]


def check_checkpoints() -> None:
    ways = [None, "model", 5, LISTS, "buckets"]
    for saved_way in ways:
        ddp, optimizer, state = start(saved_way, momentum=0.5)
        train(ddp, optimizer, range(3))
        saved, model = state.state_dict(), copy.deepcopy(ddp.module.state_dict())
        train(ddp, optimizer, range(3, 5))
        for loaded_way in ways:
            other, its_optimizer, its_state = start(loaded_way, momentum=0.5)
            other.module.load_state_dict(model)
            its_state.load_state_dict(copy.deepcopy(saved))
            loaded = checkpoint_of(its_state)
            for kept in ("residuals", "moments"):
                for name, tensor in saved[next(iter(saved))][kept].items():
                    assert torch.equal(loaded[kept][name], tensor), (saved_way, loaded_way)
            train(other, its_optimizer, range(3, 5))
            assert {group["step"] for group in checkpoint_of(its_state)["groups"]} == {5}
            if loaded_way is not None and loaded_way in EXPECTED:
                expected = [*EXPECTED[loaded_way], BIASES]
                assert sorted(map(sorted, members(its_state))) == sorted(map(sorted, expected))
            if loaded_way == saved_way and saved_way != "buckets":
                # DDP's first step has one bucket, so of "buckets" the groups begin anew.
                assert torch.equal(flat(other.parameters()), flat(ddp.parameters())), saved_way


class Words(nn.Module):
    """A sparse gradient, one parameter that no rank uses, and one that some ranks do not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8, sparse=True)
        self.first = nn.Linear(8, 20)
        self.second = nn.Linear(20, 4)
        self.idle = nn.Linear(3, 5)
        self.own = nn.Linear(20, 4)

    def forward(self, step: int) -> torch.Tensor:
        rows = torch.arange(5) + step + dist.get_rank()
        hidden = torch.tanh(self.first(self.embedding(rows)))
        loss = self.second(hidden).square().mean()
        if dist.get_rank() == 1 or step > 2:
            loss = loss + self.own(hidden).square().mean()
        return loss


def check_unusual_models() -> None:
    for groups in WAYS:
        if groups == 5 or groups is LISTS:
            continue
        torch.manual_seed(0)
        models = [DistributedDataParallel(Words(), find_unused_parameters=True) for _ in "12"]
        models[1].module.load_state_dict(models[0].module.state_dict())
        state = OkTopkState(1.0, groups=groups, dense_below=0)
        sparsecomm.register_comm_hook(models[0], state)
        for step in range(4):
            for ddp in models:
                ddp.zero_grad()
                ddp(step).backward()
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        if parameter.grad is not None:
                            parameter.sub_(0.1 * parameter.grad.to_dense())
        torch.testing.assert_close(flat(models[0].parameters()), flat(models[1].parameters()))


def check_clipping_and_optimizers() -> None:
    for groups in (3, "buckets"):
        ddp, optimizer, state = start(groups, 1.0, clip_norm=0.01)
        train(ddp, optimizer, range(3))
        everyone = gathered(flat(ddp.parameters()))
        assert all(torch.equal(other, everyone[0]) for other in everyone)
        assert state.stats()["steps"] == 3
    for groups in (None, 2, "7kB", LISTS, "buckets", "model"):
        model = make_model()
        optimizer = TopkSGD(model.named_parameters(), lr=0.1, density=1.0, groups=groups)
        plain = make_ddp(make_model())
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        train(plain, reference, range(3))
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step)).square().mean().backward()
            optimizer.step()
        torch.testing.assert_close(
            flat(model.parameters()), flat(plain.parameters()), rtol=1e-5, atol=1e-6
        )
        if groups in EXPECTED:
            [entry] = optimizer.exchange.state_dict().values()
            found = [set(group["parameters"]) for group in entry["groups"]]
            expected = [*EXPECTED[groups], BIASES]
            assert sorted(map(sorted, found)) == sorted(map(sorted, expected)), groups
    ddp = make_ddp(make_model())
    adam = torch.optim.AdamW(ddp.parameters(), lr=0.01)
    prepared = sparsecomm.prepare(ddp, adam, density=0.1, groups=3)
    train(ddp, adam, range(3))
    assert len(checkpoint_of(prepared)["groups"]) == 4


def check_disagreement() -> None:
    rank = dist.get_rank()
    ddp, optimizer, _ = start(2, density_scope=("group", "model")[rank])
    with pytest.raises(RuntimeError, match="density_scope"):
        train(ddp, optimizer, range(1))
    for ways in ((2, 3), ("model", None), (LISTS, LISTS[::-1])):
        with pytest.raises(RuntimeError, match="groups=") as raised:
            start(ways[rank])
        texts: list[Any] = [None, None]
        dist.all_gather_object(texts, str(raised.value))
        assert texts[0] == texts[1]


def check_a_state_without_names() -> None:
    ddp = make_ddp(make_model())
    state = OkTopkState(0.1, groups=2)
    ddp.register_comm_hook(state, sparsecomm.oktopk_hook)
    with pytest.raises(ValueError, match="named_parameters"):
        ddp(batch(0)).square().mean().backward()


def keeps_something(state: OkTopkState) -> bool:
    return any(residual.any() for residual in checkpoint_of(state)["residuals"].values())


def check_a_broken_backward_pass() -> None:
    """Of the step in which groups are formed, and of the one in which they are formed anew."""
    for groups, broken, loads in itertools.product(
        (2, "buckets", "model"), (0, 1, 2), (False, True)
    ):
        model, reference = make_model(), make_model()
        state = OkTopkState(1.0, groups=groups, named_parameters=model.named_parameters())
        ddp = make_ddp(model)  # which makes its buckets anew after the first step
        ddp.register_comm_hook(state, sparsecomm.oktopk_hook)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.0), range(broken))
        saved = state.state_dict()
        fail_in_backward(ddp, state)
        reference(batch(3)).square().mean().backward()
        kept = checkpoint_of(state)["residuals"]
        exchanged = 0
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            if kept[name].any():  # its group had been exchanged
                assert torch.equal(kept[name].reshape(-1), parameter.grad.reshape(-1))
                exchanged += 1
        # In the first step there is one bucket, which never came; then the first of two did.
        assert (exchanged > 0) == (groups != "model" and broken > 0), (groups, broken)
        if loads:
            state.load_state_dict(saved)
            assert not any(
                residual.any() for residual in checkpoint_of(state)["residuals"].values()
            )
        del ddp
        ddp = wrap_again(model, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), [4, 5])
        assert not keeps_something(state)
        everyone = gathered(flat(model.parameters()))
        assert all(torch.equal(other, everyone[0]) for other in everyone)


def check_a_checkpoint_between_groups() -> None:
    """Loaded when a pass has broken off that had begun to form groups anew."""
    for momentum in (0.0, 0.5):
        model = make_model()
        named = [*model.named_parameters()]
        options: dict[str, Any] = {"groups": "buckets", "named_parameters": named}
        state = OkTopkState(0.05, momentum=momentum, **options)
        ddp = make_ddp(model)
        ddp.register_comm_hook(state, sparsecomm.oktopk_hook)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.0), range(1))
        saved, kept = state.state_dict(), checkpoint_of(state)
        fail_in_backward(ddp, state)
        state.load_state_dict(saved)
        loaded = checkpoint_of(state)
        for name, residual in kept["residuals"].items():
            assert torch.equal(loaded["residuals"][name], residual), name
        del ddp
        ddp = wrap_again(model, state)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.0), range(1, 3))
        # As one that has loaded the same and knows nothing else.
        other_model = make_model()
        options["named_parameters"] = other_model.named_parameters()
        other = OkTopkState(0.05, momentum=momentum, **options)
        other.load_state_dict(saved)
        its_ddp = wrap_again(other_model, other)
        train(its_ddp, torch.optim.SGD(other_model.parameters(), lr=0.0), range(1, 3))
        mine, others = checkpoint_of(state), checkpoint_of(other)
        for name, residual in mine["residuals"].items():
            assert torch.equal(others["residuals"][name], residual), name


def check_gradients_that_are_dropped() -> None:
    """By zero_grad(), when some buckets of a group have come."""
    for groups in (2, "model", "7kB", "buckets", None):
        for before in (0, 2):
            model = make_model()
            optimizer = TopkSGD(
                model.named_parameters(), lr=0.0, density=0.1, groups=groups, bucket_cap_mb=0.005
            )
            for step in range(before):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()
            # A part of the model: what its first layers would bring does not come.
            hidden = model[:6](batch(3)).detach()
            model[6:](hidden).square().mean().backward()
            optimizer.zero_grad()
            for step in range(3):
                optimizer.zero_grad()
                model(batch(step)).square().mean().backward()
                optimizer.step()
            assert optimizer.exchange.stats()["steps"] >= 3 + before


def check_parameters_that_come_later() -> None:
    for groups in (2, "buckets", "model"):
        model, more = make_model(), make_model(seed=1)
        optimizer = TopkSGD(
            model.named_parameters(), lr=0.1, density=1.0, groups=groups, bucket_cap_mb=0.005
        )
        plain, plain_more = make_model(), make_model(seed=1)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(5):
            if step == 2:
                optimizer.add_param_group(
                    {"params": [(f"more.{name}", p) for name, p in more.named_parameters()]}
                )
                reference.add_param_group({"params": plain_more.parameters()})
            for first, second, one in ((model, more, optimizer), (plain, plain_more, reference)):
                one.zero_grad()
                loss = first(batch(step)).square().mean()
                if step >= 2:
                    loss = loss + second(batch(step)).square().mean()
                loss.backward()
            for parameter in [*plain.parameters(), *plain_more.parameters()]:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= dist.get_world_size()
            optimizer.step()
            reference.step()
        for mine, theirs in ((model, plain), (more, plain_more)):
            torch.testing.assert_close(
                flat(mine.parameters()), flat(theirs.parameters()), rtol=1e-5, atol=1e-6
            )


def check_unfrozen_parameters() -> None:
    """By DDP made anew with the same state, whose groups are its buckets."""
    model = make_model()
    names = dict(model.named_parameters())
    state = OkTopkState(1.0, groups="buckets", named_parameters=names.items())
    for step, frozen in enumerate(["0.weight", "0.bias", "2.weight", ""]):
        for name, parameter in names.items():
            parameter.requires_grad_(name != frozen)
        ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
        ddp.register_comm_hook(state, sparsecomm.oktopk_hook)
        train(ddp, torch.optim.SGD(model.parameters(), lr=0.1), range(2 * step, 2 * step + 2))
        del ddp
        checkpoint_of(state)
    everyone = gathered(flat(model.parameters()))
    assert all(torch.equal(other, everyone[0]) for other in everyone)


def uneven_batch(step: int) -> torch.Tensor:
    """Whose gradients are small in the first layer, of which half of the inputs are almost 0."""
    data = batch(step)
    data[:, 5:] *= 0.01
    return data


def train_unevenly(
    ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, steps: range
) -> None:
    for step in steps:
        optimizer.zero_grad()
        ddp(uneven_batch(step)).square().mean().backward()
        optimizer.step()


def shares(state: OkTopkState) -> list[dict[str, Any]]:
    """Of the groups of which a share is sent."""
    return [group for group in state.stats()["groups"] if group["algorithm"] == "oktopk"]


def selected_at_last(
    ddp: DistributedDataParallel, state: OkTopkState, steps: int = 30, counted: int = 15
) -> float:
    """Trains, and returns what share of the weights was selected, the mean of the last steps."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02)
    total = 0.0
    for step in range(steps):
        train_unevenly(ddp, optimizer, range(step, step + 1))
        if step >= steps - counted:
            found = shares(state)
            numel = sum(group["numel"] for group in found)
            total += sum(group["realised_density"] * group["numel"] for group in found) / numel
    everyone = gathered(flat(ddp.parameters()))
    assert all(torch.equal(other, everyone[0]) for other in everyone)
    return total / counted


def check_density_of_the_model() -> None:
    """All groups select by the same threshold, and together about what the density says."""
    for scope, momentum in itertools.product(("group", "model"), (0.0, 0.5)):
        ddp, _, state = start(5, 0.05, density_scope=scope, momentum=momentum)
        selected = selected_at_last(ddp, state)
        found = shares(state)
        assert len(found) == 5
        thresholds = [group["threshold"] for group in found]
        spread = max(thresholds) / min(thresholds)
        densities = [group["realised_density"] for group in found]
        if scope == "group":
            assert selected == pytest.approx(0.05, rel=0.05)
            assert spread > 5
        else:
            assert selected == pytest.approx(0.05, rel=0.35)
            assert spread == pytest.approx(1)
            assert max(densities) > 4 * min(densities)
    # Whatever the groups, and with an algorithm of a plan's choice.
    for groups in (2, "buckets", "auto", LISTS):
        ddp, _, state = start(groups, 0.05, density_scope="model")
        assert selected_at_last(ddp, state) == pytest.approx(0.05, rel=0.4), groups
    ddp = make_ddp(make_model())
    auto = sparsecomm.AutoState(0.05, groups=3, density_scope="model")
    sparsecomm.register_comm_hook(ddp, auto)
    train_unevenly(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), range(8))
    everyone = gathered(flat(ddp.parameters()))
    assert all(torch.equal(other, everyone[0]) for other in everyone)


def check_changes_of_the_density() -> None:
    for groups in (3, "buckets"):
        ddp, _, state = start(groups, 0.05, density_scope="model", momentum=0.5)
        assert selected_at_last(ddp, state) == pytest.approx(0.05, rel=0.4)
        state.density = 1.0
        train_unevenly(ddp, torch.optim.SGD(ddp.parameters(), lr=0.02), range(2))
        assert not keeps_something(state)
        assert all(group["realised_density"] == 1 for group in shares(state))
        state.density = 0.2
        assert selected_at_last(ddp, state) == pytest.approx(0.2, rel=0.4)
    # A step with a NaN, one that breaks off, and other ranks.
    model = make_model()
    names = [*model.named_parameters()]
    state = OkTopkState(0.05, groups=3, density_scope="model", named_parameters=names)
    ddp = wrap_again(model, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(6):
        train_unevenly(ddp, optimizer, range(step, step + 1))
        if dist.get_rank() == step % 2:
            ddp(uneven_batch(step)).square().mean().mul(float("nan")).backward()
        else:
            ddp(uneven_batch(step)).square().mean().backward()
        ddp.zero_grad()
    fail_in_backward(ddp, state)
    del ddp
    ddp = wrap_again(model, state)
    train_unevenly(ddp, optimizer, range(3))
    state.reconnect()
    ddp = wrap_again(model, state)
    assert selected_at_last(ddp, state) == pytest.approx(0.05, rel=0.4)


def check_density_of_the_model_in_checkpoints() -> None:
    for saved_at in (1, 2, 3, 4, 6):
        ddp, optimizer, state = start(5, 0.05, density_scope="model")
        train_unevenly(ddp, optimizer, range(saved_at))
        saved, model = state.state_dict(), copy.deepcopy(ddp.module.state_dict())
        train_unevenly(ddp, optimizer, range(saved_at, 12))
        other, its_optimizer, its_state = start(5, 0.05, density_scope="model")
        other.module.load_state_dict(model)
        its_state.load_state_dict(copy.deepcopy(saved))
        train_unevenly(other, its_optimizer, range(saved_at, 12))
        assert torch.equal(flat(other.parameters()), flat(ddp.parameters())), saved_at
        # Into one that shares nothing, and the other way.
        for scope, entry in (("group", saved), ("model", start(5, 0.05)[2].state_dict())):
            other, its_optimizer, its_state = start(5, 0.05, density_scope=scope)
            its_state.load_state_dict(copy.deepcopy(entry))
            train_unevenly(other, its_optimizer, range(saved_at, saved_at + 2))
    entry = checkpoint_of(state)
    share = next(g["density_share"] for g in entry["groups"] if "density_share" in g)
    for bad in (
        (0.0, *share[1:]),
        (float("nan"), *share[1:]),
        share[1:],
        (*share[:4], (1.0, -1.0)),
    ):
        broken = copy.deepcopy(entry)
        for group in broken["groups"]:
            group["density_share"] = bad
        other, its_optimizer, its_state = start(5, 0.05, density_scope="model")
        train_unevenly(other, its_optimizer, range(1))
        with pytest.raises(ValueError, match=r"load|share|count"):
            its_state.load_state_dict({next(iter(state.state_dict())): broken})


CHECKS = {
    "groups and results": check_groups_and_results,
    "conservation": check_conservation_of_all,
    "overlap of buckets": check_overlap_of_buckets,
    "checkpoints": check_checkpoints,
    "unusual models": check_unusual_models,
    "clipping and optimizers": check_clipping_and_optimizers,
    "disagreement": check_disagreement,
    "without names": check_a_state_without_names,
    "a broken backward pass": check_a_broken_backward_pass,
    "a checkpoint between groups": check_a_checkpoint_between_groups,
    "dropped gradients": check_gradients_that_are_dropped,
    "later parameters": check_parameters_that_come_later,
    "unfrozen parameters": check_unfrozen_parameters,
    "density of the model": check_density_of_the_model,
    "changes of the density": check_changes_of_the_density,
    "density of the model in checkpoints": check_density_of_the_model_in_checkpoints,
}


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    run_ranks(2, CHECKS[name], timeout=LONG)


def test_the_groups_of_lists_overlap(tmp_path: Path) -> None:
    run_ranks(2, check_overlap_of_lists, tmp_path)


def test_on_three_ranks() -> None:
    run_ranks(3, check_conservation_of_all, timeout=LONG)


def timed(folder: Path) -> None:
    ddp, optimizer, _ = start(2)
    train(ddp, optimizer, range(2))
    with sparsecomm.timeline(folder / "run.json"):
        train(ddp, optimizer, range(2, 4))


def test_each_group_has_a_row_in_the_timeline(tmp_path: Path) -> None:
    run_ranks(2, timed, tmp_path)
    events = json.loads((tmp_path / "run.rank0.json").read_text())
    rows = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"gradients 0", "gradients 1", "gradients 2"} <= rows

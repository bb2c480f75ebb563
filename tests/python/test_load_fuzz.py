"""State dicts that no state has saved: load_state_dict takes or refuses them as a whole."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import checkpoint_of, make_ddp, make_model, train
from ranks import run_ranks

import sparsecomm

Path = tuple[Any, ...]
DELETED = object()

TENSORS: dict[str, torch.Tensor] = {
    "of another type": torch.ones(40, dtype=torch.int64),
    "complex": torch.ones(1640, dtype=torch.complex64),
    "empty": torch.ones(0),
    "of another shape": torch.ones(7, 3),
    "sparse": torch.eye(40).to_sparse(),
    "without memory": torch.ones(1640, device="meta"),
    "with memory that was freed": torch.ones(1640),
    "not finite": torch.full((1640,), float("nan")),
    "a view": torch.ones(3280)[::2],
    "a number": torch.tensor(1.0),
}
TENSORS["with memory that was freed"].untyped_storage().resize_(0)
VALUES = st.one_of(
    st.sampled_from([DELETED, None, True, "", "oktopk", [], {}, (), [[]], {"step": 1}]),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, -(2**63), 10**30]),
    st.sampled_from([0.5, -1.0, float("nan"), float("inf"), 1e308, 5e-324]),
    st.lists(st.sampled_from([0, 1, -1, 1640, 2**32 - 1, 2**32, "0.weight", None]), max_size=4),
    st.sampled_from(list(TENSORS)).map(TENSORS.__getitem__),
)


def paths(tree: Any, here: Path = ()) -> Iterator[Path]:
    """To all that a state dict holds, what holds it before it."""
    items: Iterator[Any] = iter(())
    if isinstance(tree, dict):
        items = iter(tree.items())
    elif isinstance(tree, (list, tuple)):
        items = iter(enumerate(tree))
    for key, value in items:
        yield (*here, key)
        yield from paths(value, (*here, key))


def changed(tree: Any, path: Path, value: Any) -> Any:
    """A copy with something else at the path."""
    key, *rest = path
    result = list(tree) if isinstance(tree, tuple) else copy.copy(tree)
    if rest:
        result[key] = changed(tree[key], tuple(rest), value)
    elif value is DELETED:
        del result[key]
    else:
        result[key] = value
    return tuple(result) if isinstance(tree, tuple) else result


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def check_loads(kind: str) -> None:
    makers = {
        "oktopk": sparsecomm.OkTopkState,
        "momentum": lambda density: sparsecomm.TopkState(density, momentum=0.9),
        "auto": sparsecomm.AutoState,
    }
    ddp = make_ddp(make_model())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    state = makers[kind](0.1)
    sparsecomm.register_comm_hook(ddp, state)
    train(ddp, optimizer, range(3))
    saved = state.state_dict()

    @given(st.data())
    @settings(
        max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    def attempt(data: st.DataObject) -> None:
        state.load_state_dict(saved)
        before = checkpoint_of(state)
        broken: Any = saved
        for _ in range(data.draw(st.integers(1, 2))):
            if places := list(paths(broken)):
                broken = changed(broken, data.draw(st.sampled_from(places)), data.draw(VALUES))
        try:
            state.load_state_dict(broken)
        except ValueError:
            assert same(checkpoint_of(state), before)
        else:
            state.state_dict()

    attempt()
    state.load_state_dict(saved)
    train(ddp, optimizer, range(3, 5))


@pytest.mark.parametrize("kind", ["oktopk", "momentum", "auto"])
def test_what_no_state_has_saved_is_taken_or_refused_as_a_whole(kind: str) -> None:
    run_ranks(1, check_loads, kind, timeout=100)

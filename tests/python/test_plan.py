"""sparsecomm.explain, `sparsecomm plan`, AutoState, and the regret of auto."""

from __future__ import annotations

import copy
import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import checkpoint_of
from ranks import run_ranks
from torch.nn.parallel import DistributedDataParallel

import sparsecomm
from sparsecomm import _C
from sparsecomm.cli import kernels, main
from sparsecomm.units import format_seconds, parse_bandwidth, parse_count, parse_seconds

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import regret

PARTS = ("select", "latency", "transfer", "compute", "apply")


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_count, "14.7M", 14_700_000),
        (parse_count, "14728266", 14_728_266),
        (parse_count, "1.5B", 1_500_000_000),
        (parse_bandwidth, "25gbit", 25e9),
        (parse_bandwidth, "100 Mbit/s", 1e8),
        (parse_bandwidth, "10Gbps", 1e10),
        (parse_seconds, "20us", 20e-6),
        (parse_seconds, "1.5 ms", 1.5e-3),
    ],
)
def test_units_are_read(parse: Any, text: str, value: float) -> None:
    assert parse(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_count, "many"),
        (parse_count, "-3"),
        (parse_count, "1.2.3M"),
        (parse_bandwidth, "25"),
        (parse_bandwidth, "0gbit"),
        (parse_bandwidth, "gbit"),
        (parse_bandwidth, "10GBps"),
        (parse_seconds, "20"),
        (parse_seconds, "inf s"),
    ],
)
def test_what_is_no_number_with_a_unit_is_quoted(parse: Any, text: str) -> None:
    with pytest.raises(ValueError, match=repr(text)):
        parse(text)


def test_seconds_are_shown_in_the_unit_that_suits() -> None:
    assert [format_seconds(x) for x in (1.5, 0.0203, 2e-5, 3e-9)] == [
        "1.5 s",
        "20.3 ms",
        "20 us",
        "3 ns",
    ]


def test_explain_ranks_every_algorithm_by_the_sum_of_its_parts() -> None:
    plan = sparsecomm.explain(
        14_728_266, 0.01, link=sparsecomm.Link.parse("1gbit", "20us"), ranks=8
    )
    assert {row.algorithm for row in plan.ranking} == {row["name"] for row in _C.algorithms()}
    times = [row.seconds for row in plan.ranking]
    assert times == sorted(times)
    for row in plan.ranking:
        assert row.seconds == pytest.approx(sum(getattr(row, part) for part in PARTS))
        # Up the tree, and down again; and all ranks' bytes over the link of one aggregator.
        ways = {"gtopk": 2, "ina": 8, "ina_sparse": 8}.get(row.algorithm, 1)
        assert row.transfer == pytest.approx(ways * row.received_bytes * 8e-9, rel=1e-3)
    assert plan.best.algorithm != "dense"
    dense = next(row for row in plan.ranking if row.algorithm == "dense")
    # 2N(P-1)/P words of 4 bytes at 125 MB/s.
    assert dense.transfer == pytest.approx(2 * 14_728_266 * 7 / 8 * 4 / 125e6, rel=0.01)
    assert f"auto begins with {plan.best.algorithm}" in str(plan)
    assert json.loads(json.dumps(plan.to_dict()))["ranks"] == 8


def test_a_momentum_takes_time_in_every_step_and_sends_nothing() -> None:
    link = sparsecomm.Link.parse("1gbit")
    given: dict[str, Any] = {"link": link, "ranks": 4, "step_seconds": 0.05}
    plain = sparsecomm.explain(1 << 20, 0.02, **given)
    given["rates"] = plain.figures | {"momentum": 1e-9}
    found = sparsecomm.explain(1 << 20, 0.02, momentum=True, **given)
    for row in plain.ranking:
        other = next(each for each in found.ranking if each.algorithm == row.algorithm)
        assert other.select > row.select + 0.9e-9 * (1 << 20)
        assert other.apply > row.apply or row.index_codec == "dense"
        assert (other.transfer, other.messages) == (row.transfer, row.messages)
    for step in plain.steps:
        other_step = next(each for each in found.steps if each.method == step.method)
        overlaps = step.method in ("ddp", "dense_overlap")
        assert (other_step.seconds == step.seconds) == overlaps, step.method


@pytest.mark.parametrize("ranks", [1, 2, 3, 64])
def test_plan_and_bench_count_the_same_messages_and_bytes(ranks: int) -> None:
    numel = 1 << 20
    plan = sparsecomm.explain(numel, 0.01, link=sparsecomm.Link.parse("1gbit"), ranks=ranks)
    dense = {row["name"] for row in _C.algorithms() if not row["sparse"]}
    shown = {row.algorithm: (row.messages, row.received_bytes) for row in plan.ranking}
    k = _C.entries_at(0.01, numel)
    assert {name: shown[name] for name in dense} == {
        name: _C.cost(name, ranks, numel, k, 4) for name in dense
    }
    # Of the sparse ones bench shows bounds.
    for name in shown.keys() - dense:
        most = _C.cost(name, ranks, numel, k, 4)
        assert all(one <= bound for one, bound in zip(shown[name], most, strict=True)), name


@pytest.mark.parametrize(("density", "numel", "k"), [(0.5, 5, 3), (0.5, 7, 4), (0.1, 25, 3)])
def test_a_density_means_the_same_number_of_entries_everywhere(
    density: float, numel: int, k: int
) -> None:
    assert _C.entries_at(density, numel) == k
    assert kernels.count_of(numel, density) == k
    link = sparsecomm.Link.parse("1gbit")
    plan = sparsecomm.explain(numel, density, link=link, ranks=2, union=1)
    assert plan.union == k


def test_the_ranking_shows_the_smallest_codec_and_the_value_codec_asked_for() -> None:
    link = sparsecomm.Link.parse("1gbit")

    def row(name: str, density: float, **options: Any) -> Any:
        plan = sparsecomm.explain(1 << 20, density, link=link, ranks=4, **options)
        found = next(row for row in plan.ranking if row.algorithm == name)
        assert f"{found.index_codec}, {found.value_codec}" in str(plan)
        return found

    codecs = [row("topk_a", density).index_codec for density in (0.01, 0.6, 0.98)]
    assert codecs == ["delta", "bitmap", "dense"]
    assert row("dense", 0.01).index_codec == "dense"
    assert row("topk_a", 0.01, index_codec="raw32").index_codec == "raw32"
    exact, rounded = row("topk_a", 0.01), row("topk_a", 0.01, value_codec="f16")
    assert (exact.value_codec, rounded.value_codec) == ("raw", "f16")
    k = round(0.01 * (1 << 20))
    assert exact.received_bytes - rounded.received_bytes == pytest.approx(3 * 2 * k, rel=0.01)
    assert row("gtopk", 0.01, value_codec="f16").value_codec == "raw"


def test_a_smaller_union_makes_what_gathers_unions_quicker() -> None:
    link = sparsecomm.Link.parse("100mbit")

    def transfer(union: float) -> float:
        plan = sparsecomm.explain(1 << 22, 0.01, link=link, ranks=8, union=union)
        return next(
            row.transfer for row in plan.ranking if row.algorithm == "ssar_recursive_double"
        )

    assert transfer(1) < transfer(3) < transfer(7)


def test_links_are_compared_with_the_rates_of_one_measurement() -> None:
    slow, quick = (sparsecomm.Link.parse(link) for link in ("1gbit", "10gbit"))
    former = sparsecomm.explain(1 << 20, 0.01, link=slow, ranks=4)
    latter = sparsecomm.explain(1 << 20, 0.01, link=quick, ranks=4, rates=former.figures)
    changed = {name for name, value in latter.figures.items() if value != former.figures[name]}
    assert changed == {"byte"}
    with pytest.raises(ValueError, match="lack 'check'"):
        sparsecomm.explain(1 << 20, 0.01, link=quick, ranks=4, rates={})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ranks": 4}, "link and ranks go together"),
        ({"rates": {}, "link": None, "ranks": None}, "rates are for a given link"),
        ({"link": sparsecomm.Link.parse("1gbit")}, "link and ranks go together"),
        ({"density": 0.0}, "density"),
        ({"density": 1.5}, "density"),
        ({"dtype": torch.int32}, "dtype"),
        ({"numel": 0}, "numel"),
        ({"numel": 1 << 32}, "numel"),
        ({"union": 0.5}, "union"),
        ({"union": 9.0}, "union"),
        ({"index_codec": "zip"}, "zip"),
    ],
)
def test_explain_names_what_is_wrong(arguments: dict[str, Any], text: str) -> None:
    given: dict[str, Any] = {"numel": 1000, "density": 0.01}
    if "ranks" not in arguments and "link" not in arguments:
        given |= {"link": sparsecomm.Link.parse("1gbit"), "ranks": 4}
    given |= arguments
    with pytest.raises(ValueError, match=text):
        sparsecomm.explain(given.pop("numel"), given.pop("density"), **given)


def test_plan_answers_what_one_would_gain(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--numel", "14.7M", "--density", "0.01", "--ranks", "64"]
    arguments += ["--bandwidth", "25gbit", "--latency", "20us"]
    assert main(arguments) == 0
    table = capsys.readouterr().out
    assert "25 Gbit/s" in table
    assert "64 ranks" in table
    assert main([*arguments, "--union", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["numel"] == 14_700_000
    assert plan["union"] == 8 * 147_000
    assert {row["algorithm"] for row in plan["ranking"]} == {r["name"] for r in _C.algorithms()}


def test_plan_counts_on_aggregators_that_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for count in (0, 1, 4):
        arguments = ["plan", "--numel", "10M", "--ranks", "8", "--bandwidth", "10gbit", "--json"]
        assert main([*arguments, *(["--aggregators", str(count)] if count else [])]) == 0
        ranking = json.loads(capsys.readouterr().out)["ranking"]
        [found[count]] = [row for row in ranking if row["algorithm"] == "ina"]
    assert [row["candidate"] for row in found.values()] == [False, True, True]
    assert found[0]["transfer"] == found[1]["transfer"]
    assert found[1]["transfer"] == pytest.approx(4 * found[4]["transfer"], rel=0.01)


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [
        ("--bandwidth", "fast", "'fast' is not a bandwidth"),
        ("--latency", "20", "'20' is not a time"),
        ("--numel", "5B", "'5B' is not from 1"),
        ("--ranks", "0", "whole number"),
        ("--aggregators", "0", "whole number"),
        ("--union", "100", "union=100.0 is not from 1 to the number of ranks, 4"),
    ],
)
def test_plan_rejects_bad_arguments(
    option: str, value: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--numel": "1M", "--ranks": "4", "--bandwidth": "1gbit", option: value}
    with pytest.raises(SystemExit) as status:
        main(["plan", *(word for pair in given.items() for word in pair)])
    assert status.value.code == 2
    assert text in capsys.readouterr().err


def _explain() -> tuple[str, dict[str, float]]:
    plan = sparsecomm.explain(1 << 20, 0.01)
    assert plan.ranks == dist.get_world_size()
    return plan.best.algorithm, plan.figures


def test_explain_measures_what_all_ranks_agree_on() -> None:
    results = run_ranks(3, _explain)
    assert results[1:] == results[:-1]
    best, figures = results[0]
    assert best in {row["name"] for row in _C.algorithms()}
    assert figures["byte"] > 0
    assert figures["round"] + figures["message"] > 0
    assert all(value >= 0 for value in figures.values())


def _step(model: DistributedDataParallel, width: int = 300) -> None:
    model.zero_grad()
    model(torch.randn(8, width)).square().mean().backward()


def _make(width: int = 300, out: int = 40) -> tuple[DistributedDataParallel, sparsecomm.AutoState]:
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(width, out))
    state = sparsecomm.AutoState(density=0.05)
    sparsecomm.register_comm_hook(model, state)
    torch.manual_seed(dist.get_rank())
    return model, state


def _train() -> tuple[list[str], bytes, list[float]]:
    model, state = _make()
    assert state.algorithms == []
    for _ in range(6):
        _step(model)
    gradient = model.module.weight.grad
    assert gradient is not None
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    return state.algorithms, file.getvalue(), gradient.flatten().tolist()


def _plan_of(checkpoint: dict[str, Any]) -> dict[str, Any]:
    [plan] = [group["plan"] for group in checkpoint["groups"] if "plan" in group]
    return plan  # type: ignore[no-any-return]


def _resume(saved: list[bytes]) -> dict[str, float]:
    model, state = _make()
    checkpoint = torch.load(io.BytesIO(saved[dist.get_rank()]), weights_only=True)
    state.load_state_dict(checkpoint)
    [mine] = checkpoint.values()
    assert _plan_of(checkpoint_of(state)) == _plan_of(mine)
    _step(model)
    figures: dict[str, float] = _plan_of(checkpoint_of(state))["figures"]
    # One of a version that did not know these.
    _, other = _make()
    for name in ("noise", "observations_before"):
        del _plan_of(mine)[name]
    other.load_state_dict(checkpoint)
    assert _plan_of(checkpoint_of(other))["noise"] > 0
    return figures


def test_ddp_follows_a_plan_that_its_checkpoint_holds() -> None:
    results = run_ranks(2, _train)
    assert results[0][0] == results[1][0]
    assert results[0][2] == results[1][2]
    state = torch.load(io.BytesIO(results[0][1]), weights_only=True)
    [group] = [group for group in state["rank_0_of_2"]["groups"] if "plan" in group]
    # The bias goes by itself, densely.
    assert sorted(results[0][0]) == sorted([group["plan"]["algorithm"], "dense_rabenseifner"])
    # Not measured anew.
    figures = run_ranks(2, _resume, [result[1] for result in results])
    assert figures == [group["plan"]["figures"]] * 2


# The state_dicts of two ranks after eight steps of _make(30, 4), as a release with eleven figures
# saved them.
SAVED = Path(__file__).with_name("saved") / "auto_state.pt"


def _load_saved() -> None:
    saved = torch.load(SAVED, weights_only=True)
    mine = saved[f"rank_{dist.get_rank()}_of_2"]
    model, state = _make(30, 4)

    def with_figures(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        changed = copy.deepcopy(saved)
        for entry in changed.values():
            change(_plan_of(entry)["figures"])
        return changed  # type: ignore[no-any-return]

    # What a momentum and aggregators take was not measured then.
    expected = copy.deepcopy(mine)
    figures = _plan_of(expected)["figures"]
    assert len(figures) == 11
    figures |= {"momentum": 0.0, "aggregator_round": 0.0, "aggregator_byte": 0.0}
    state.load_state_dict(saved)
    assert checkpoint_of(state)["groups"] == expected["groups"]
    for name, residual in mine["residuals"].items():
        assert torch.equal(checkpoint_of(state)["residuals"][name], residual)
    # Of a release that did not know one of them either.
    for name in _plan_of(mine)["figures"]:
        state.load_state_dict(with_figures(lambda named, name=name: named.pop(name)))
        assert _plan_of(checkpoint_of(state))["figures"] == figures | {name: 0.0}
        _step(model, 30)
    for name, value in {"bite": 1e-9, "byte": -1.0, "merge": math.nan, "round": math.inf}.items():
        before = _plan_of(checkpoint_of(state))
        changed = with_figures(lambda named, new={name: value}: named.update(new))
        with pytest.raises(ValueError, match=f"figure '{name}'"):
            state.load_state_dict(changed)
        assert _plan_of(checkpoint_of(state)) == before


def test_a_saved_plan_loads_where_it_lacks_a_figure_and_no_other_is_made_up() -> None:
    run_ranks(2, _load_saved)


def test_python_hook_of_auto() -> None:
    assert run_ranks(2, _python_hook) == [True, True]


def _python_hook() -> bool:
    model = DistributedDataParallel(torch.nn.Linear(30, 4))
    state = sparsecomm.AutoState(density=0.1)
    model.register_comm_hook(state, sparsecomm.auto_hook)
    for _ in range(3):
        model(torch.randn(8, 30)).square().mean().backward()
    return len(state.algorithms) == 2


def _default_hook() -> tuple[str, int, bool]:
    model = DistributedDataParallel(torch.nn.Linear(300, 40))
    state = sparsecomm.register_comm_hook(model)
    for _ in range(3):
        _step(model)
    named = sparsecomm.OkTopkState()
    other = DistributedDataParallel(torch.nn.Linear(30, 4))
    kept = sparsecomm.register_comm_hook(other, named) is named
    assert isinstance(state, sparsecomm.AutoState)
    return type(state).__name__, len(state.algorithms), kept


def test_a_hook_without_a_state_plans() -> None:
    assert run_ranks(2, _default_hook) == [("AutoState", 2, True)] * 2


def test_simulated_regret_is_small_and_repeats() -> None:
    cases = regret.simulate(20, 300, 7, regret.Errors())
    assert cases == regret.simulate(20, 300, 7, regret.Errors())
    summary = regret.summarise(cases)
    assert summary["median_against_best"] < 1.05
    assert all(case.against_best >= 1 - 1e-9 for case in cases)


def test_a_planner_that_knows_all_has_no_regret_but_for_trials() -> None:
    exact = regret.Errors(machine=0, figures=0, model=0, noise=0, outliers=0)
    summary = regret.summarise(regret.simulate(20, 1000, 7, exact))
    assert summary["largest_against_best"] < 1.03


def test_measured_regret_compares_within_a_batch() -> None:
    def row(algorithm: str, batch: int, median: float, selected: float = 1.0) -> dict[str, Any]:
        return {
            "algorithm": algorithm,
            "k": 1,
            "selected": None if algorithm == "gloo_dense" else [selected, 1.0],
            "batch": batch,
            "numel": 10,
            "density": 0.1,
            "chosen": "oktopk",
            "time_us": {"median": median},
        }

    rows = [
        row("gloo_dense", 0, 100),
        row("oktopk", 0, 20),
        row("gaussian_k", 0, 15, selected=0.8),  # which is less work
        row("gloo_dense", 1, 200),  # everything took twice as long in the second batch
        row("auto", 1, 44),
        row("dense", 1, 160),
    ]
    (case,) = regret.measured([{"hosts": 2, "rate": "1gbit", "rows": rows}])
    assert case.best == "oktopk"
    assert case.against_best == pytest.approx(1.1)
    assert case.against_dense == pytest.approx(0.22 / 0.8)
    assert case.choice_against_best == 1
    assert regret.summarise([case])["of_the_grid"] == 0


def test_regret_says_how_much_of_the_grid_it_has() -> None:
    case = regret.Case(
        source="measured",
        set_up={"ranks": 4, "numel": 1 << 20, "density": 0.01, "link": "1gbit"},
        best="oktopk",
        chosen="topk_a",
        against_best=1.1,
        against_dense=0.5,
        choice_against_best=1.02,
    )
    summary = regret.summarise([case])
    assert "1 set-ups, 1 of the 108 of the lab's grid" in regret.sentence(summary)
    table = regret.as_markdown("make it", [case], {"measured": summary})
    assert "auto/dense | choice/best |" in table
    assert "| 1.100 | 0.500 | 1.020 |" in table

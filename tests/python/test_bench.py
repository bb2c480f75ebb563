"""The command line: what it accepts, and that its figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from patience import LONG
from ranks import run_ranks

import sparsecomm
from sparsecomm import _C
from sparsecomm.cli import bench, main, measure
from sparsecomm.cli.gradients import Pattern, large_places, make_gradient
from sparsecomm.cli.measure import Settings, drawn_order, turns_of
from sparsecomm.cli.ping_pong import find_mpiexec

SETTINGS = Settings(
    algorithms=("gloo_dense", "oktopk", "topk_a"),
    numel=2000,
    density=0.05,
    dtype="f32",
    pattern=Pattern.parse("uniform"),
    index_codec="smallest",
    value_codec="raw",
    transport="auto",
    iters=2,
    warmup=1,
    seconds=None,
    seed=1,
    exchange_alone=True,
)


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sparsecomm.cli", *arguments], capture_output=True, text=True
    )


def test_importing_the_package_leaves_the_command_line_out() -> None:
    code = "import sys, sparsecomm; sys.exit('sparsecomm.cli' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"]])
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 0
    assert "usage: sparsecomm" in capsys.readouterr().out


def test_help_of_allreduce_names_every_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "allreduce", "--help"])
    text = capsys.readouterr().out
    for name in ("gloo_dense", *sparsecomm.build_info()["algorithms"]):
        assert name in text


def explained(capsys: pytest.CaptureFixture[str], *command: str) -> set[str]:
    """The words that begin a line, or a list of such words, below a heading of the help."""
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    names = [line.strip().split("  ")[0] for line in lines]
    return {name.strip() for group in names for name in group.split(",")}


def test_help_explains_every_column_of_allreduce(capsys: pytest.CaptureFixture[str]) -> None:
    spread = measure.Spread(1, 2, 3)
    missing: dict[str, Any] = dict.fromkeys(field.name for field in fields(measure.Row))
    row = measure.Row(
        **missing
        | {
            "algorithm": "gloo_dense",
            "time_us": spread,
            "sent_bytes": [1.0],
            "received_bytes": [1.0],
            "model_bytes": 1.0,
            "result_nnz": 1.0,
            "world_size": 2,
        }
    )
    header = bench.columns_of(SETTINGS, [row])
    assert {name for name, *_ in header} <= explained(capsys, "bench", "allreduce")


def test_help_explains_every_column_of_transport(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"engine", "N B", "N MiB", "to bare"} <= explained(capsys, "bench", "transport")


@pytest.mark.parametrize(
    ("medians", "operands"),
    [
        ({"gloo_dense": 100.0, "oktopk": 25.0}, ["oktopk", "25.0 us", "4.00", "gloo_dense"]),
        ({"gloo_dense": 25.0, "oktopk": 100.0}, ["gloo_dense", "25.0 us", "4.00", "oktopk"]),
        (
            {"dense_ring": 300.0, "dense": 150.0, "oktopk": 100.0, "topk_a": 120.0},
            ["oktopk", "100.0 us", "1.50", "dense"],
        ),
        ({"oktopk": 100.0, "topk_a": 120.0}, ["oktopk", "100.0 us", "gloo_dense"]),
        ({"gloo_dense": 100.0}, ["gloo_dense", "100.0 us", "oktopk"]),
    ],
)
def test_the_last_lines_name_the_quickest_and_its_ratio_to_dense(
    medians: dict[str, float], operands: list[str]
) -> None:
    rows: Any = [
        SimpleNamespace(algorithm=name, chosen=None, time_us=measure.Spread(0, median, 0))
        for name, median in medians.items()
    ]
    text = bench.conclusion(rows)
    assert text.startswith(f"quickest: {operands[0]}, {operands[1]}"), text
    assert all(operand in text for operand in operands), text
    assert "--step-time" in text  # that it is not a training step


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    info = sparsecomm.build_info()
    assert main(["info", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == info
    assert main(["info"]) == 0
    text = capsys.readouterr().out
    assert [line.split()[0] for line in text.splitlines()] == list(info)
    assert ", ".join(info["algorithms"]) in text


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_an_unfinished_command_prints_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert "usage: sparsecomm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--algorithm", "oktop"], "algorithm 'oktop' is unknown; there are gloo_dense, dense"),
        (["--algorithm", "oktopk,oktopk"], "names one algorithm twice"),
        (["--algorithm", ""], "algorithm '' is unknown"),
        (["--transport", "mpi"], "invalid choice: 'mpi' (choose from"),
        (["--transport", "inproc"], "invalid choice: 'inproc' (choose from"),
        (["--dtype", "f8"], "invalid choice: 'f8'"),
        (["--density", "0"], "'0' is not a share above 0 and up to 1"),
        (["--density", "nan"], "'nan' is not a share above 0 and up to 1"),
        (["--density", "1%"], "'1%' is not a share above 0 and up to 1"),
        (["--numel", "0"], "'0' is not from 1 to 4294967294"),
        (["--numel", "4294967295"], "is not from 1 to 4294967294"),
        (["--iters", "0"], "'0' is not a whole number of 1 or more"),
        (["--warmup", "-1"], "'-1' is not a whole number of 0 or more"),
        (["--seconds", "0"], "'0' is not a number of seconds above 0"),
        (["--numel", "10,"], "'' is not a number such as 14728266 or 14.7M"),
        (["--together", "0"], "'0' is not a whole number of 1 or more"),
        (["--ranks", "two"], "'two' is not a whole number of 1 or more"),
        (["--pattern", "striped"], "'striped' is none of uniform, clustered, clustered:F"),
        (["--pattern", "uniform:0.5"], "'uniform:0.5' is none of"),
        (["--pattern", "shared"], "shared needs the share"),
        (["--pattern", "shared:1.5"], "'1.5' in 'shared:1.5' is not a share from 0 to 1"),
        (["--pattern", "clustered:"], "'' in 'clustered:' is not a share from 0 to 1"),
        (["--json", "/nonexistent/rows.json"], "there is no folder /nonexistent"),
    ],
)
def test_bad_arguments(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["bench", "allreduce", *arguments])
    assert status.value.code == 2
    assert complaint in capsys.readouterr().err


def test_ranks_must_be_those_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(SystemExit) as status:
        main(["bench", "allreduce", "--ranks", "2"])
    assert status.value.code == 2
    assert "--ranks 2, but the launcher has started 4" in capsys.readouterr().err


def test_bad_arguments_are_told_by_one_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as status:
        main(["bench", "allreduce", "--density", "2"])
    assert status.value.code == 2
    assert capsys.readouterr().err == ""


PATTERNS = ["uniform", "shared:0.3", "shared:1", "clustered", "clustered:0.5", "clustered:1"]


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize(("numel", "k"), [(1, 1), (17, 17), (100, 1), (1000, 37), (100_000, 1000)])
def test_places_of_large_entries(name: str, numel: int, k: int) -> None:
    pattern = Pattern.parse(name)
    every = [
        large_places(pattern, numel, k, np.random.default_rng(rank), np.random.default_rng(100))
        for rank in (1, 2)
    ]
    for places in every:
        assert len(np.unique(places)) == len(places) <= k
        assert places.min() >= 0
        assert places.max() < numel
        if k < numel:
            assert len(places) == k
    if numel < 10_000:
        return
    common = len(np.intersect1d(every[0], every[1])) / k
    assert pattern.shared <= common <= pattern.shared + 0.2
    runs = 1 + np.count_nonzero(np.diff(np.sort(every[0])) > 1)
    assert runs <= 16 if pattern.clustered else runs > 900


def test_gradients_repeat() -> None:
    pattern = Pattern.parse("shared:0.5")
    first = make_gradient(pattern, 1000, 10, torch.bfloat16, 1, 0, 0)
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, make_gradient(pattern, 1000, 10, torch.bfloat16, 1, 0, 0))
    for other in ((2, 0, 0), (1, 1, 0), (1, 0, 1)):
        assert not torch.equal(first, make_gradient(pattern, 1000, 10, torch.bfloat16, *other))


def check_row(row: dict[str, Any], ranks: int, numel: int, itemsize: int) -> None:
    assert row["world_size"] == ranks
    assert row["numel"] == numel
    times = row["time_us"]
    assert 0 < times["min"] <= times["median"] <= times["max"]
    for name in ("sent_bytes", "received_bytes"):
        assert len(row[name]) == ranks
    assert sum(row["sent_bytes"]) == pytest.approx(sum(row["received_bytes"]))
    if row["algorithm"] == "gloo_dense":
        assert row["messages"] is None
        assert row["sent_bytes"] == [2 * (ranks - 1) / ranks * numel * itemsize] * ranks
        assert row["select_us"] is None
        return
    assert row["transport"] == sparsecomm.build_info()["transport"]
    assert len(row["messages"]) == ranks
    parts = row["select_us"], row["exchange_us"], row["apply_us"]
    assert min(parts) >= 0
    # Each is at most the slowest rank's time in its own iteration.
    assert max(parts) <= times["max"]
    assert max(row["messages"]) <= row["model_messages"]
    assert max(row["received_bytes"]) <= row["model_bytes"]


def test_allreduce(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    own = [row["name"] for row in _C.algorithms() if row["needs"] == "nothing"]
    algorithms = ["gloo_dense", *own]
    result = run_cli(
        *("bench", "allreduce", "--ranks", "2", "--numel", "10k", "--iters", "3"),
        *("--density", "0.05", "--algorithm", ",".join(algorithms), "--json", str(file)),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())
    assert [row["algorithm"] for row in rows] == algorithms
    for row in rows:
        check_row(row, 2, 10_000, 4)
        assert row["k"] == 500
        assert row["iters"] == 3
        assert len(row["turns_us"]) == 3 * row["turns"]
    nnz = {row["algorithm"]: row["result_nnz"] for row in rows}
    assert nnz["dense"] == nnz["gloo_dense"] == 10_000
    assert nnz["oktopk"] <= 500 < nnz["topk_a"] < 2000
    quickest = min(rows, key=lambda row: row["time_us"]["median"])
    assert f"{quickest['algorithm']}, {quickest['time_us']['median']:.1f} us" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [line[3] for line in lines] == algorithms
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("ranks", "dtype", "pattern"),
    [
        pytest.param(1, "f32", "uniform", marks=pytest.mark.slow),
        (3, "bf16", "clustered:0.5"),
    ],
)
def test_allreduce_elsewhere(tmp_path: Path, ranks: int, dtype: str, pattern: str) -> None:
    file = tmp_path / "rows.json"
    result = run_cli(
        *("bench", "allreduce", "--ranks", str(ranks), "--numel", "4099", "--iters", "2"),
        *("--dtype", dtype, "--pattern", pattern, "--index-codec", "raw32", "--json", str(file)),
    )
    assert result.returncode == 0, result.stderr
    for row in json.loads(file.read_text()):
        check_row(row, ranks, 4099, {"f32": 4, "bf16": 2}[dtype])


def test_batches_of_several_sizes_within_a_time(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    result = run_cli(
        *("bench", "allreduce", "--numel", "5000,300", "--density", "0.02,0.5", "--together", "1"),
        *("--seconds", "0.000001", "--iters", "50", "--exchange-alone", "--json", str(file)),
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads(file.read_text())
    batch = [("gloo_dense", 0), ("topk_a", 0), ("gloo_dense", 1), ("oktopk", 1)]
    assert [(row["numel"], row["density"], row["algorithm"], row["batch"]) for row in rows] == [
        (numel, density, *each)
        for numel in (5000, 300)
        for density in (0.02, 0.5)
        for each in batch
    ]
    for row in rows:
        assert row["iters"] == 1
        assert len(row["turns_us"]) == row["turns"]
        assert (row["exchange_alone_us"] is None) == (row["algorithm"] == "gloo_dense")


def test_the_order_of_an_iteration_is_drawn() -> None:
    names = ["dense", "oktopk", "topk_a", "gtopk"]
    turns = {"dense": 1, "oktopk": 3, "topk_a": 3, "gtopk": 3}
    orders = [drawn_order(turns, names, "seed", iteration) for iteration in range(50)]
    for order in orders:
        assert sorted(order) == sorted(
            (turn, name) for name in names for turn in range(turns[name])
        )
        assert [turn for turn, _ in order] == [0] * 4 + [1] * 3 + [2] * 3
    assert orders == [drawn_order(turns, names, "seed", iteration) for iteration in range(50)]
    assert orders != [drawn_order(turns, names, "other", iteration) for iteration in range(50)]
    assert {order[0][1] for order in orders} == {*names}
    assert {order[-1][1] for order in orders} == {"oktopk", "topk_a", "gtopk"}
    assert sorted(drawn_order({}, names, "seed", 0)) == sorted((0, name) for name in names)


def test_the_quick_have_turns_for_as_long_as_the_slowest_takes() -> None:
    assert turns_of({"dense": 1.0, "oktopk": 0.1, "topk_a": 0.12}) == {
        "dense": 1,
        "oktopk": 4,
        "topk_a": 4,
    }
    assert turns_of({"dense": 1.0, "ring": 0.6, "oktopk": 0.001}) == {
        "dense": 1,
        "ring": 1,
        "oktopk": 8,
    }
    # Those that are alike have as many, wherever they lie.
    assert turns_of({"dense": 1.0, "oktopk": 0.124, "topk_a": 0.126}) == {
        "dense": 1,
        "oktopk": 4,
        "topk_a": 4,
    }
    assert turns_of({"dense": 1.0, "oktopk": 0.51}) == {"dense": 1, "oktopk": 1}
    quick = {str(number): 0.1 for number in range(15)}
    assert set(turns_of({"dense": 1.0, **quick}).values()) == {1}
    assert turns_of({"dense": 0.0, "oktopk": 0.0}) == {"dense": 1, "oktopk": 1}
    assert turns_of({"dense": 0.0}) == {"dense": 1}


def _measure_turns() -> list[tuple[str, int, int, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            measure, "turns_of", lambda seconds: {**dict.fromkeys(seconds, 1), "oktopk": 3}
        )
        rows = measure.measure(SETTINGS)
    for row in rows:
        assert row.time_us.min == min(row.turns_us)
        assert row.time_us.max == max(row.turns_us)
    return [(row.algorithm, row.iters, row.turns, len(row.turns_us)) for row in rows]


def test_rows_of_several_turns() -> None:
    rows = [("gloo_dense", 2, 1, 2), ("oktopk", 2, 3, 6), ("topk_a", 2, 1, 2)]
    assert run_ranks(2, _measure_turns) == [rows] * 2


def test_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "sparsecomm.cli", "bench", "allreduce"),
            *("--algorithm", "oktopk", "--numel", "1000", "--iters", "2", "--json", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    (row,) = json.loads(file.read_text())
    assert row["world_size"] == 2


def test_a_rank_that_fails_ends_the_run_with_its_message(tmp_path: Path) -> None:
    script = tmp_path / "fail.py"
    script.write_text(
        "import sys, time\n"
        "import torch.distributed as dist\n"
        "from sparsecomm.cli.ranks import run_on_ranks\n"
        "def body() -> None:\n"
        "    if dist.get_rank() == 1:\n"
        "        raise RuntimeError('no more')\n"
        "    time.sleep(10_000)\n"
        "if __name__ == '__main__':\n"
        "    sys.exit(run_on_ranks(body, 2))\n"
    )
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=LONG)
    assert result.returncode == 1
    assert "rank 1: RuntimeError: no more" in result.stderr
    assert "Traceback" not in result.stderr


def test_transports_are_measured_beside_their_engines(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = run_cli("bench", "transport", "--rounds", "40", "--blocks", "1", "--json", str(file))
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    usable = set(sparsecomm.build_info()["transports"]) - {"inproc"}
    if find_mpiexec() is None:
        usable -= {"mpi"}
    rows = result["ping_pong"]
    assert {row["transport"] for row in rows} == usable
    for name in usable:
        own = [row for row in rows if row["name"] == name]
        assert [row["bytes"] for row in own] == [8, 1024, 16384, 4 << 20]
        for row in own:
            bare = [
                other["one_way_us"]
                for other in rows
                if other["transport"] == name and other["name"] != name
                if other["bytes"] == row["bytes"]
            ]
            assert row["ratio"] == pytest.approx(row["one_way_us"] / min(bare))
            assert row["gigabytes_per_second"] == pytest.approx(
                row["bytes"] / row["one_way_us"] / 1e3
            )
            assert f"{row['one_way_us']:.2f}" in done.stdout or row["bytes"] == 4 << 20
    assert {row["transport"] for row in result["allreduce"]} == usable - {"mpi"}
    assert all(row["time_us"] > 0 for row in result["allreduce"])


def test_a_transport_takes_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as status:
        main(["bench", "transport"])
    assert status.value.code == 2

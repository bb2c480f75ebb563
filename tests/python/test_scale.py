"""The simulated ranks of benchmarks/scale: 64 of them, every algorithm, against its formula."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from sparsecomm import _C

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "scale"))

import coordination
import scale
import scale_ina

ALGORITHMS = [row["name"] for row in _C.algorithms() if row["needs"] == "nothing"]

# Any of them may have to compile the program, or wait until another process has.
pytestmark = pytest.mark.timeout(300)
needs_simgrid = pytest.mark.skipif(shutil.which("smpicxx") is None, reason="no SimGrid")


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, int], scale.Row]:
    program = scale.build()
    found = [
        row
        for ranks in (16, 64)
        for row in scale.simulate(program, ranks, 10, 1 << 17, 0.04, steps=1)
        if isinstance(row, scale.Row)
    ]
    return {(row.algorithm, row.ranks): row for row in found}


@needs_simgrid
def test_64_ranks_run_every_algorithm_within_its_formula(
    rows: dict[tuple[str, int], scale.Row],
) -> None:
    assert sorted(rows) == sorted((name, ranks) for name in ALGORITHMS for ranks in (16, 64))
    for row in rows.values():
        assert 0 < row.words_mean <= row.words_max <= row.formula_words, row
        assert row.words_mean == pytest.approx(
            row.entry_words + row.header_words + row.figure_words, rel=1e-6
        )
        # A frame and its 10 words of header in each message, or several.
        assert row.header_words >= 10 * row.messages_mean, row
        assert 0 < row.messages_mean <= row.messages_max <= row.formula_messages, row
        # Not faster than the link: 4 bytes at 10 Gbit/s take 3.2 ns.
        assert row.seconds > 3.2e-9 * row.words_max, row


@needs_simgrid
def test_words_of_oktopk_do_not_grow_with_the_ranks_and_those_of_topk_a_do(
    rows: dict[tuple[str, int], scale.Row],
) -> None:
    def growth(algorithm: str, words: str) -> float:
        few, many = (getattr(rows[algorithm, ranks], words) for ranks in (16, 64))
        return float(many / few)

    # (P-1)/P grows by 1.05.
    assert growth("oktopk", "entry_words") < 1.06
    assert growth("topk_a", "entry_words") > 4
    # A histogram per rank instead of its sum would be 4.2 times as many; counts are two words each.
    assert growth("oktopk", "figure_words") < 2
    # With the headers of four times as many messages.
    assert growth("oktopk", "words_mean") < 1.2


@needs_simgrid
def test_ranks_receive_the_union_of_their_blocks_from_aggregators() -> None:
    found = {
        algorithm: scale_ina.simulate(scale.build(), algorithm, 4, 10, 1 << 17, 0.1)
        for algorithm in ("ina", "topk_a")
    }
    ina, k = found["ina"], found["ina"]["k"]
    assert k % scale_ina.BLOCK_NUMEL == 0
    assert k < ina["entry_words"] < 4 * k
    assert found["topk_a"]["entry_words"] == 2 * 3 * k
    assert ina["words_mean"] == pytest.approx(
        ina["entry_words"] + ina["header_words"] + ina["figure_words"], rel=1e-6
    )
    assert ina["words_max"] <= ina["formula_words"]
    assert ina["seconds"] > 3.2e-9 * ina["words_max"]
    for row in found.values():
        assert f"{1e3 * row['seconds']:.3f} ({row['words_mean']:,.0f})" in scale_ina.markdown([row])


@needs_simgrid
def test_ranks_agree_on_many_groups_in_the_time_of_a_small_allreduce(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    given = ["--ranks", "16", "60", "--groups", "1", "40", "--steps", "2", "--json", str(file)]
    assert coordination.main(given) == 0
    rows = {(row["kind"], row["ranks"], row["groups"]): row for row in json.loads(file.read_text())}
    for ranks, rounds in ((16, 4), (60, 6)):
        for groups, size in ((1, 40 + 24), (40, 40 + 32)):
            named = rows["by_name", ranks, groups]
            compared = rows["by_comparison", ranks, groups]
            assert (named["messages"], named["bytes"]) == (rounds, rounds * size)
            assert size <= 64 + groups / 4
            assert compared["messages"] == groups * rounds
            assert named["seconds"] < 1.3 * rows["allreduce", ranks, 1]["seconds"]
            assert groups == 1 or named["seconds"] < compared["seconds"] / 5
            assert f"| {ranks} | {groups} | " in file.with_suffix(".md").read_text()


@needs_simgrid
def test_what_does_not_fit_into_memory_has_its_formulas_alone() -> None:
    left_out = scale.simulate(scale.build(), 4, 10, 1 << 17, 0.04, steps=1, memory=1e3)
    assert [setup.algorithm for setup in left_out] == ALGORITHMS
    for setup in left_out:
        assert not isinstance(setup, scale.Row)
        assert setup.memory_bytes > 1e3
        assert setup.formula_words > 0
        assert setup.formula_messages > 0


@needs_simgrid
def test_a_faster_network_takes_less_time(rows: dict[tuple[str, int], scale.Row]) -> None:
    for row in scale.simulate(scale.build(), 16, 100, 1 << 17, 0.04, steps=1):
        assert isinstance(row, scale.Row)
        slow = rows[row.algorithm, 16]
        assert row.seconds < slow.seconds
        assert row.words_mean == slow.words_mean
        assert row.messages_mean == slow.messages_mean


def test_the_network_has_room_for_the_ranks() -> None:
    for ranks, hosts in ((1, 1), (2, 4), (4, 4), (5, 9), (1024, 1024), (1025, 1089)):
        assert f'radical="0-{hosts - 1}"' in scale.platform(ranks, 10), ranks


def test_the_results_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(
        program: Path,
        ranks: int,
        gbit: float,
        numel: int,
        density: float,
        steps: int,
        memory: float,
        jobs: int,
    ) -> list[scale.Setup]:
        assert (steps, memory, jobs) == (1, 7e9, 3)
        setup = ("oktopk", ranks, gbit, numel, int(density * numel), 5e9, 12, 11)
        if ranks == 64:
            return [scale.Setup(*setup)]
        return [scale.Row(*setup, 1 / gbit, 10, 9, 6, 2, 1, 4, 3)]

    monkeypatch.setattr(scale, "build", lambda: Path("scale_ranks"))
    monkeypatch.setattr(scale, "simulate", simulate)
    file = tmp_path / "new" / "scale.json"
    assert (
        scale.main(["--json", str(file), "--numel", "1000", "--memory", "7e9", "--jobs", "3"]) == 0
    )
    rows = json.loads(file.read_text())
    assert [(row["gbit"], row["ranks"]) for row in rows] == [
        (gbit, ranks) for gbit in (10, 100) for ranks in (4, 16, 64, 256)
    ]
    text = file.with_suffix(".md").read_text()
    assert "| `oktopk` | 256 | 100.000 | 6 | 2 | 1 | 9 | 10 | 12 | 4.0 | 11 |" in text
    assert "| `oktopk` | 64 | left out: 5 GB |  |  |  |  |  | 12 |  | 11 |" in text
    assert "| `oktopk` | 6k(P-1)/P |" in text
    assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_simulator_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert scale.main([]) == 1
    assert "apt-get install libsimgrid-dev" in capsys.readouterr().err

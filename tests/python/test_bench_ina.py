"""``sparsecomm bench ina``: what it accepts, and that its figures add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench import explained, run_cli

from sparsecomm import _C
from sparsecomm.cli import ina, main

POLICIES = _C.aggregation_policies()


def setting(**changed: Any) -> ina.Setting:
    given: dict[str, Any] = {
        "algorithms": ("gloo_dense", "ina"),
        "numel": 10_000,
        "dtype": "f32",
        "block_bytes": 256,
        "zero": 0.75,
        "supports": "independent",
        "warmup": 1,
        "iters": 2,
        "seed": 1,
    }
    return ina.Setting(**given | changed)


def test_help_explains_every_column_and_names_every_algorithm(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = explained(capsys, "bench", "ina")
    assert {name for name, *_ in ina.columns_of([])} <= words
    assert {"gloo_dense", *POLICIES} <= words


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--aggregators", "0"], "'0' is not a whole number from 1 to 64"),
        (["--aggregators", "65"], "'65' is not a whole number from 1 to 64"),
        (["--aggregators", "some"], "'some' is not a whole number from 1 to 64"),
        (["--aggregators", "2", "--ranks", "2"], "2 ranks, of which 2 are to aggregate, leave 0"),
        (["--ranks", "2"], "leave 1 workers, and it takes 2: start 3 or more"),
        (["--aggregators", "shared", "--ranks", "65"], "give --aggregators a number"),
        (["--ranks", "34", "--dtype", "bf16"], "33 workers are not exact in bf16"),
        (["--algorithm", "oktopk"], "algorithm 'oktopk' is unknown; there are gloo_dense, ina"),
        (["--block-bytes", "1000"], "'1000' is not a power of two"),
        (["--block-bytes", "32"], "'32' is not a whole number from 64 to 65536"),
        (["--zero", "1.5"], "'1.5' is not a share from 0 to 1"),
        (["--zero", "nan"], "'nan' is not a share from 0 to 1"),
        (["--supports", "alike"], "kind of supports 'alike' is unknown; there are ident"),
        (["--json", "/nonexistent/records.json"], "there is no folder /nonexistent"),
    ],
)
def test_bad_arguments(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as status:
        main(["bench", "ina", *arguments])
    assert status.value.code == 2
    assert complaint in capsys.readouterr().err


def test_addresses_are_of_the_loopback_interface_on_all_hosts_or_on_none() -> None:
    ina.require_reachable(["127.0.0.1:7000", "127.0.1.1:7001"])
    ina.require_reachable(["10.77.0.1:7000", "10.77.0.2:7001"])
    with pytest.raises(RuntimeError, match=r"127\.0\.1\.1:7000.*MASTER_ADDR"):
        ina.require_reachable(["10.77.0.1:7000", "127.0.1.1:7000"])


@pytest.mark.parametrize("supports", ina.SUPPORTS)
@pytest.mark.parametrize("zero", [0.0, 0.75, 1.0])
@pytest.mark.parametrize("numel", [64 * 64, 64 * 64 + 5, 3])
def test_arrays(numel: int, zero: float, supports: str) -> None:
    given = setting(numel=numel, zero=zero, supports=supports)
    arrays = [ina.make_array(given, rank) for rank in range(2)]
    blocks = [[bool(block.any()) for block in array.split(64)] for array in arrays]
    for array, filled in zip(arrays, blocks, strict=True):
        assert filled.count(False) == round(zero * len(filled))
        assert array.count_nonzero() == sum(
            len(block) for block, has in zip(array.split(64), filled, strict=True) if has
        )
    assert (blocks[0] == blocks[1]) == (supports == "identical" or zero in (0, 1) or numel == 3)
    assert not any(filled) or not torch.equal(*arrays)


def union_blocks(given: ina.Setting, workers: int) -> tuple[list[int], int]:
    """How many blocks are not zero on each worker, and on any."""
    filled = [
        torch.tensor([bool(block.any()) for block in array.split(given.block_numel)])
        for array in (ina.make_array(given, rank) for rank in range(workers))
    ]
    return [int(each.sum()) for each in filled], int(torch.stack(filled).any(0).sum())


@pytest.mark.parametrize("shared", [False, True])
def test_figures(tmp_path: Path, shared: bool) -> None:
    workers, aggregators = 3, 3 if shared else 2
    file = tmp_path / "records.json"
    result = run_cli(
        *("bench", "ina", "--ranks", str(workers if shared else workers + aggregators)),
        *("--aggregators", "shared" if shared else str(aggregators), "--numel", "50k"),
        *("--block-bytes", "256", "--zero", "0,0.75", "--warmup", "1", "--iters", "3"),
        *("--json", str(file)),
    )
    assert result.returncode == 0, result.stderr
    records = json.loads(file.read_text())
    assert [(r["algorithm"], r["zero_fraction"], r["supports"]) for r in records] == [
        (algorithm, *case)
        for case in ((0, "identical"), (0.75, "identical"), (0.75, "independent"))
        for algorithm in ("gloo_dense", *POLICIES)
    ]
    size = 4 * 50_000
    between: dict[tuple[float, str], set[float]] = {}  # bytes from worker to worker
    for record in records:
        assert record["exact"] is True
        assert record["workers"] == workers
        times = record["time_us"]
        assert 0 < times["min"] <= times["median"] <= times["max"]
        sent, received = record["sent_bytes"], record["received_bytes"]
        assert len(sent) == len(received) == workers
        up, down = record["aggregator_received_bytes"], record["aggregator_sent_bytes"]
        if record["algorithm"] == "gloo_dense":
            assert sent == received == [2 * (workers - 1) / workers * size] * workers
            assert (up, down, record["aggregators"]) == ([], [], 0)
            continue
        assert len(up) == len(down) == record["aggregators"] == aggregators
        case = record["zero_fraction"], record["supports"]
        between.setdefault(case, set()).add(sum(sent) - sum(up))
        assert sum(sent) - sum(up) == sum(received) - sum(down)
        given = setting(numel=50_000, zero=case[0], supports=case[1])
        own, union = union_blocks(given, workers)
        if record["algorithm"] == "ina_dense":
            own, union = [-(-size // 256)] * workers, -(-size // 256)
        # Blocks, and besides a number or header for some of them.
        assert 256 * sum(own) < sum(up) < (256 + 4 * 3) * sum(own) + 4096 * aggregators
        assert 256 * union * workers < sum(down) < (256 + 4 * 3) * union * workers + 4096 * workers
    assert [len(each) for each in between.values()] == [1, 1, 1]
    lines = [line.split() for line in result.stdout.splitlines() if not line.startswith("#")]
    assert [line[0] for line in lines] == [record["algorithm"] for record in records]
    assert {line[-1] for line in lines} == {"yes"}
    medians = {r["algorithm"]: r["time_us"]["median"] for r in records[-len(POLICIES) - 1 :]}
    ratio = medians["omnireduce"] / medians["ina"]
    assert f"{ratio:.2f} times as quick as omnireduce" in result.stdout


def test_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "records.json"
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "3", "-m", "sparsecomm.cli", "bench", "ina"),
            *("--aggregators", "1", "--algorithm", "ina", "--dtype", "bf16", "--numel", "1000"),
            *("--zero", "0.5", "--iters", "2", "--json", str(file)),
        ],
        check=True,
        capture_output=True,
    )
    records = json.loads(file.read_text())
    assert [record["workers"] for record in records] == [2, 2]
    assert all(record["exact"] for record in records)

"""The table of recipes: its runs, what counts as dense training's result, and the page."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import recipes
import train_lm
from rank_runs import ROOT, Run
from recipes import DENSE, PREPARED, RECIPES, WAYS, Record

RECORD = Record(
    task="lm",
    model="decoder of bytes",
    method=DENSE,
    lr=0.003,
    seed=1,
    density=1.0,
    ranks=2,
    parameters=1000,
    steps=100,
    quality="test_loss",
    higher_is_better=False,
    value=2.0,
    sent_bytes=4000.0,
    mean_sent_bytes=4000.0,
)


def runs_of(method: str, lr: float, values: list[float]) -> list[Record]:
    own = replace(RECORD, method=method, lr=lr)
    if method != DENSE:
        own = replace(own, density=0.02, sent_bytes=100.0, mean_sent_bytes=400.0)
    return [replace(own, seed=seed, value=value) for seed, value in enumerate(values, 1)]


def test_every_recipe_is_run_with_every_seed(tmp_path: Path) -> None:
    found = [run for recipe in RECIPES.values() for run in recipes.plan(recipe, (1, 2), tmp_path)]
    assert len({run.folder for *_, run in found}) == len(found)
    for recipe in RECIPES.values():
        own = [(method, seed) for of, method, seed, _ in found if of is recipe]
        for seed in (1, 2):
            assert own.count((PREPARED, seed)) == 1
            assert own.count((DENSE, seed)) == (len(recipe.tried) if seed == 1 else 1)
    others = [method for _, method, _, _ in found if method not in (DENSE, PREPARED)]
    assert sorted({*others}) == sorted(way.name for way in WAYS)
    for recipe, method, seed, run in found:
        program = Path(run.command[0])
        assert (ROOT / program).is_file()
        options = vars(__import__(program.stem).parse_options(run.command[1:]))
        assert options["seed"] == seed
        assert options["epochs"] == recipe.epochs
        assert options["lr"] in (recipe.lr, *recipe.tried)
        assert options["hook"] == (method if method in (DENSE, PREPARED) else "oktopk")
        assert method == DENSE or options["density"] == recipe.density


@pytest.mark.parametrize("seeds", [["1"], ["2", "3"]])
def test_every_run_becomes_a_record(
    seeds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Run] = []

    def make_all(runs: list[Run]) -> list[Run]:
        made.extend(runs)
        for run in runs:
            options = vars(train_lm.parse_options(run.command[1:]))
            found = asdict(RECORD) | {"task": RECORD.model, RECORD.quality: 1 + options["lr"]}
            found |= {name: options[name] for name in ("lr", "epochs", "density")}
            found["world_size"] = RECORD.ranks
            found["sent_bytes_per_iteration"] = RECORD.mean_sent_bytes
            found["curves"] = {"cumulative_sent_bytes": [2e5, 4e5]}
            run.folder.mkdir(parents=True)
            (run.folder / "summary.json").write_text(json.dumps(found))
        return []

    records: list[Record] = []
    section = recipes.section
    monkeypatch.setattr(recipes, "make_all", make_all)
    monkeypatch.setattr(recipes, "section", lambda rows: records.extend(rows) or section(rows))
    arguments = ["--tasks", "lm", "--seeds", *seeds, "--folder", str(tmp_path)]
    assert recipes.main(arguments) == 0
    assert len(records) == len(made) == 2 * len(seeds) + 1 + len(WAYS)
    assert len({run.folder for run in made}) == len(made)
    assert sorted({record.seed for record in records}) == [int(seed) for seed in seeds]


def test_dense_training_has_its_best_learning_rate() -> None:
    records = [
        *runs_of(DENSE, 0.003, [2.00, 2.04, 2.02]),
        *runs_of(DENSE, 0.006, [2.02]),
        *runs_of(PREPARED, 0.006, [2.01, 2.05, 2.03]),
    ]
    recipe = replace(RECIPES["lm"], dense_lr=0.003, tried=(0.003, 0.006))
    row = recipes.compare(recipe, records)
    assert row[2:4] == ["2 %", "0.006"]
    assert row[4].endswith("2.0300 (2.0100 to 2.0500)")
    assert row[5] == "2.0200 (2.0000 to 2.0400), 0.003 of 0.003 or 0.006"
    assert row[6] == "1/40.0 (1/10.0)"
    error = (2 * 0.02**2 / 3) ** 0.5
    assert row[7] == f"+0.0100 worse, standard error {error:.4f}: as good"
    with pytest.raises(ValueError, match=r"2 at 0\.003.*dense_lr, 0\.006"):
        recipes.compare(replace(recipe, dense_lr=0.006), records)


@pytest.mark.parametrize(
    ("worse", "most", "outcome"),
    [
        (0.029, 0.03, "as good"),
        (0.031, 0.03, "not as good"),
        (0.032, None, "as good"),  # two standard errors are 0.0327
        (0.034, None, "not as good"),
        (-1.0, None, "as good"),
    ],
)
def test_as_good_is_as_the_recipe_has_it(worse: float, most: float | None, outcome: str) -> None:
    values = [2.00, 2.04, 2.02]
    records = runs_of(DENSE, 0.003, values)
    records += runs_of(PREPARED, 0.006, [value + worse for value in values])
    recipe = replace(RECIPES["lm"], tried=(0.003,), most_worse=most)
    assert recipes.compare(recipe, records)[7].endswith(f": {outcome}")


def test_one_seed_decides_nothing() -> None:
    records = runs_of(DENSE, 0.003, [2.0]) + runs_of(PREPARED, 0.006, [2.1])
    recipe = replace(RECIPES["lm"], tried=(0.003,))
    assert recipes.compare(recipe, records)[7] == "+0.1000 worse, one seed"


def test_ways_for_adam_have_the_recipes_learning_rate() -> None:
    records = runs_of(DENSE, 0.003, [2.0, 9.0]) + runs_of(DENSE, 0.006, [2.1])
    records += runs_of(PREPARED, 0.006, [2.2, 9.0])
    for number, way in enumerate(WAYS):
        records += runs_of(way.name, 0.006, [3.0 + number])
    lines = recipes.ways(records, RECIPES["lm"]).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[2:4]] for line in lines if "| 0.00" in line]
    ways = [["0.006", f"{3 + number}.000"] for number in range(len(WAYS))]
    assert cells == [["0.003", "2.000"], ["0.006", "2.100"], *ways, ["0.006", "2.200"]]


def test_the_page_has_what_was_measured() -> None:
    assert recipes.section(recipes.read()) in recipes.PAGE.read_text()


def test_only_its_section_of_the_page_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Results\n\nText.\n\n## VGG16\n\nA table.\n")
    recipes.replace_section(page, f"{recipes.HEADING}\n\nOne.")
    recipes.replace_section(page, f"{recipes.HEADING}\n\nTwo.")
    assert page.read_text() == (
        f"# Results\n\nText.\n\n## VGG16\n\nA table.\n\n{recipes.HEADING}\n\nTwo.\n"
    )
    page.write_text(f"Text.\n\n{recipes.HEADING}\n\nOne.\n\n## VGG16\n\nA table.\n")
    recipes.replace_section(page, f"{recipes.HEADING}\n\nTwo.")
    assert page.read_text() == f"Text.\n\n{recipes.HEADING}\n\nTwo.\n\n## VGG16\n\nA table.\n"

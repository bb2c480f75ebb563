"""What a user's editor sees: types, docstrings, signatures."""

from __future__ import annotations

import ast
import inspect
import shutil
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sparsecomm
from sparsecomm import checkpoint, fsdp, functional, optim

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")


def public() -> Iterator[tuple[str, Any]]:
    """Every public name, and the methods and properties of a class."""
    for module in (sparsecomm, checkpoint, fsdp, functional, optim):
        for name in module.__all__:
            thing = getattr(module, name)
            yield f"{module.__name__}.{name}", thing
            for attribute, value in vars(thing).items() if inspect.isclass(thing) else ():
                if not attribute.startswith("_") and is_method(value):
                    yield f"{module.__name__}.{name}.{attribute}", value


def is_method(value: object) -> bool:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    return isinstance(value, property) or inspect.isfunction(value)


@pytest.mark.parametrize(("name", "thing"), list(public()))
def test_help_says_something(name: str, thing: Any) -> None:
    if name == "sparsecomm.__version__":
        return
    text = inspect.getdoc(thing)
    assert text, f"{name} has no docstring"
    first = text.splitlines()[0]
    generated = inspect.isclass(thing) and first.startswith(f"{thing.__name__}(")
    assert not generated, f"{name} has the docstring that its decorator made"
    assert first.endswith((".", ":")), f"{name}: the first line is not a sentence: {first!r}"
    if inspect.isclass(thing):
        for field in getattr(thing, "_fields", getattr(thing, "__dataclass_fields__", ())):
            assert f"    {field}: " in text, f"{name} does not say what {field} is"


@pytest.mark.timeout(400)  # without a cache mypy reads torch too
def test_a_typed_program_passes_mypy(tmp_path: Path) -> None:
    """As a user has it: sparsecomm installed, where mypy heeds it for its py.typed alone."""
    venv.create(tmp_path / "venv", with_pip=False)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    folders = [ROOT, *map(Path, site.getsitepackages())]
    (packages / "installed.pth").write_text("".join(f"{folder}\n" for folder in folders))
    shutil.copy(PROGRAM, tmp_path)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", PROGRAM.name),
            *("--python-executable", str(tmp_path / "venv" / "bin" / "python")),
            *("--cache-dir", str(ROOT / ".mypy_cache")),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_typed_program_uses_every_public_name() -> None:
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(ast.parse(PROGRAM.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    for short, module in (
        ("sparsecomm", sparsecomm),
        ("checkpoint", checkpoint),
        ("fsdp", fsdp),
        ("optim", optim),
        ("sf", functional),
    ):
        names = set(module.__all__) - {"checkpoint", "fsdp", "functional", "optim"}
        missing = sorted(names - {name for owner, name in used if owner == short})
        assert not missing, f"{PROGRAM.name} does not use {', '.join(missing)}"

"""The text that every Python installation carries: sources of the standard library."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}

LIBRARY = Path(sysconfig.get_paths()["stdlib"])

_Parent = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules() -> Iterator[tuple[Path, str, ast.Module]]:
    """File, source and tree of each module, in the order of their files' names."""
    for path in sources(LIBRARY):
        try:
            source = path.read_text(encoding="utf-8")
            yield path, source, ast.parse(source)
        except (SyntaxError, ValueError):  # there to test tools with
            continue


def sources(folder: Path) -> Iterator[Path]:
    """The Python files below a folder, in the order of their names."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name not in FOLDERS_LEFT_OUT:
            yield from sources(path)
        elif path.suffix == ".py":
            yield path


def documented(tree: ast.Module) -> Iterator[tuple[ast.AST, str | None]]:
    """What may have a docstring, with the one it has."""
    for node in ast.walk(tree):
        if isinstance(node, _Parent):
            yield node, ast.get_docstring(node)


def paragraphs(text: str) -> list[str]:
    """The parts between blank lines."""
    return re.split(r"\n\s*\n", text)

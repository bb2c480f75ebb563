"""What mkdocs.yml leaves to a program: pages from outside docs/, and the roles in docstrings."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from griffe import Extension, Object
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
# By the page's address: where it comes from.
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "regret.md": "benchmarks/results/regret.md",
}
ADDRESSES = {source: address for address, source in OUTSIDE.items()}
LINK = re.compile(r"(?<=\]\()([^)#\s]+\.(?:md|svg))")
ROLE = re.compile(r":(?:class|func|meth):`~?([\w.]+)`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for address, source in OUTSIDE.items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages."""
    address = page.file.src_uri
    source = Path(OUTSIDE.get(address, f"docs/{address}"))

    def link(match: re.Match[str]) -> str:
        target = os.path.relpath((ROOT / source.parent / match[1]).resolve(), ROOT)
        to = ADDRESSES.get(target, target.removeprefix("docs/"))
        return os.path.relpath(to, Path(address).parent)

    return LINK.sub(link, markdown)


class Roles(Extension):
    """Makes ``:class:`X` `` of a docstring, which help() shows as it is, a link to X's entry."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        scopes = [scope for scope in (obj, obj.parent, obj.module) if scope is not None]

        def link(match: re.Match[str]) -> str:
            name = match[1]
            first = name.split(".")[0]
            holders = [scope.path for scope in scopes if first in scope.members]
            path = name if first == "sparsecomm" else f"{[*holders, 'sparsecomm'][0]}.{name}"
            return f"[`{name.split('.')[-1]}`][{path}]"

        obj.docstring.value = ROLE.sub(link, obj.docstring.value)

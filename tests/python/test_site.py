"""The documentation site builds without a warning and has an entry for every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest

import sparsecomm
from sparsecomm import checkpoint, fsdp, functional, optim

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    find_spec("mkdocs") is None, reason='mkdocs is not installed: pip install "sparsecomm[docs]"'
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    *_, packed = (site / "objects.inv").read_bytes().split(b"\n", 4)
    entries = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines()}
    public = {f"sparsecomm.{name}" for name in sparsecomm.__all__} - {
        "sparsecomm.__version__",
        "sparsecomm.checkpoint",
        "sparsecomm.fsdp",
        "sparsecomm.functional",
        "sparsecomm.optim",
    }
    for module in (checkpoint, fsdp, functional, optim):
        public |= {f"{module.__name__}.{name}" for name in module.__all__}
    missing = sorted(public - entries)
    assert not missing, f"docs/reference/ has no entry for {', '.join(missing)}"


def test_it_is_whole(site: Path) -> None:
    """Roles have become links, every page is there, and nothing is fetched from elsewhere."""
    pages = list(site.rglob("*.html"))
    sources = list((ROOT / "docs").rglob("*.md"))
    assert len(pages) >= len(sources)
    for page in pages:
        text = page.read_text()
        assert not re.search(r":(class|func|meth):", text), f"{page.name}: a role is not a link"
        fetched = re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]+)"', text)
        assert not fetched, f"{page.name} fetches {fetched}"

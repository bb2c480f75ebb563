"""The sources keep their layers: csrc/FOLDER includes only itself and the folders before it.

The rules that this test reads out of the sources:

- A header of another folder, or of one's own, is included as "folder/name.h". FOLDERS is the order.
- csrc/torch is the only folder that includes torch (libtorch, ATen, c10, pybind11, Python), always
  in angle brackets. It includes its own headers by plain name, "process_group.h", so that none is
  mistaken for one of torch's.
- Third-party headers are included only by the folders that THIRD_PARTY names.
- No file reads the environment: it is read once, in Python, and handed down as options.
- No file is longer than 500 lines.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "base",
    "wire",
    "kernels",
    "sparse",
    "compress",
    "transport",
    "ina",
    "daemon",
    "collectives",
    "engine",
    "benchmark",
    "torch",
)
TORCH = {"torch", "ATen", "c10", "pybind11", "caffe2", "Python.h"}
# First part of the path -> the folders that may include it.
THIRD_PARTY = {
    "hwy": {"kernels", "wire"},
    "cub": {"kernels"},
    "cuda_runtime.h": {"kernels"},
    "mpi.h": {"transport"},
    "mbedtls": {"daemon"},
    "event2": {"daemon"},
    "nlohmann": {"daemon"},
    "spdlog": {"daemon"},
    "toml++": {"daemon"},
    "ucp": {"transport"},
    "ucs": {"transport"},
} | {name: {"torch"} for name in TORCH}
SUFFIXES = {".h", ".hpp", ".cc", ".cpp", ".cu", ".cuh", ".inc"}
LINES = 500

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
ENVIRONMENT = re.compile(r"\b(?:secure_)?getenv\b|\benviron\b")


def included_problem(folder: str, own: set[str], quote: str, target: str) -> str | None:
    """What is wrong with `target` included by a file of `folder`, whose files are `own`."""
    first = target.split("/")[0]
    if quote == '"' and first in FOLDERS and "/" in target and first != "torch":
        if FOLDERS.index(first) > FOLDERS.index(folder):
            return f'csrc/{folder} stands below csrc/{first} and must not include "{target}"'
        return None
    if first in THIRD_PARTY:
        if folder not in THIRD_PARTY[first]:
            return f"only {', '.join(sorted(THIRD_PARTY[first]))} may include {target}"
        if quote == '"' and first in TORCH:
            return f"include torch's headers as <{target}>, and csrc/torch's own by plain name"
        return None
    if quote == "<":
        if first in FOLDERS and "/" in target:
            return f'include our own headers as "{target}"'
        return None
    if folder == "torch" and target in own:
        return None
    return f'"{target}" names no folder of csrc'


def problems(csrc: Path) -> list[str]:
    """Every breach of the rules under `csrc`, as lines "file: what is wrong"."""
    found = []
    for path in sorted(p for p in csrc.rglob("*") if p.suffix in SUFFIXES):
        name = path.relative_to(csrc)
        folder = name.parts[0]
        if folder not in FOLDERS:
            found.append(f"{name}: not in one of the folders {', '.join(FOLDERS)}")
            continue
        text = path.read_text(encoding="utf-8")
        code = COMMENT.sub("", text)
        own = {p.name for p in path.parent.iterdir()}
        for quote, target in INCLUDE.findall(code):
            if problem := included_problem(folder, own, quote, target):
                found.append(f"{name}: {problem}")
        if ENVIRONMENT.search(code):
            found.append(f"{name}: reads the environment; take an option instead")
        if (lines := text.count("\n")) > LINES:
            found.append(f"{name}: {lines} lines, more than {LINES}")
    return found


def test_sources_keep_their_layers() -> None:
    assert any((ROOT / "csrc").rglob("*.h"))
    assert problems(ROOT / "csrc") == []


# Each pair: a file with its text, and a part of the complaint that it must draw; None for none.
CASES = {
    "upward": ("wire/frame.h", '#include "kernels/kernels.h"\n', "stands below csrc/kernels"),
    "upward, indented": ("base/x.cc", '  #  include "engine/e.h"\n', "stands below csrc/engine"),
    "upward, from a subfolder": ("kernels/cuda/k.cu", '#include "sparse/s.h"\n', "stands below"),
    "downward": ("engine/e.cc", '#include "base/error.h"\n', None),
    "own folder": ("wire/frame.cc", '#include "wire/frame.h"\n', None),
    "core includes torch": ("engine/e.cc", "#include <torch/torch.h>\n", "only torch may"),
    "core includes ATen": ("kernels/k.cc", "#include <ATen/ATen.h>\n", "only torch may"),
    "core includes c10": ("base/b.h", "#include <c10/util/Half.h>\n", "only torch may"),
    "core includes pybind11": ("daemon/d.cc", "#include <pybind11/pybind11.h>\n", "only torch may"),
    "core includes Python": ("base/b.h", "#include <Python.h>\n", "only torch may"),
    "core includes csrc/torch": ("engine/e.cc", '#include "torch/ops.h"\n', "only torch may"),
    "torch includes torch": ("torch/ops.cc", "#include <torch/library.h>\n", None),
    "torch in quotation marks": (
        "torch/ops.cc",
        '#include "torch/library.h"\n',
        "<torch/library.h>",
    ),
    "torch's own by plain name": ("torch/ops.cc", '#include "ops.cc"\n', None),
    "torch's own that is not there": ("torch/ops.cc", '#include "gone.h"\n', "names no folder"),
    "core by plain name": ("wire/frame.cc", '#include "frame.cc"\n', "names no folder"),
    "ours in angle brackets": ("wire/frame.cc", "#include <base/error.h>\n", '"base/error.h"'),
    "relative": ("wire/frame.cc", '#include "../engine/e.h"\n', "names no folder"),
    "standard library": ("wire/frame.cc", "#include <vector>\n#include <sys/stat.h>\n", None),
    "SIMD in its place": ("kernels/simd.cc", '#include "hwy/highway.h"\n', None),
    "SIMD elsewhere": ("sparse/simd.cc", "#include <hwy/highway.h>\n", "only kernels, wire may"),
    "a folder of no rank": ("util/x.h", "\n", "not in one of the folders"),
    "environment": ("base/b.cc", 'auto x = std::getenv("X");\n', "environment"),
    "environment, in torch": ("torch/b.cc", 'auto x = secure_getenv("X");\n', "environment"),
    "commented out": ("base/b.cc", '// getenv\n/*\n#include "engine/e.h"\n*/\n', None),
    "500 lines": ("base/b.cc", "\n" * 500, None),
    "501 lines": ("base/b.cc", "\n" * 501, "501 lines"),
}


@pytest.mark.parametrize(("name", "text", "complaint"), CASES.values(), ids=CASES.keys())
def test_the_test_finds(tmp_path: Path, name: str, text: str, complaint: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    found = problems(tmp_path)
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert found[0].startswith(f"{name}: ")
        assert complaint in found[0]


def test_every_order_of_two_folders(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        lines = [f'#include "{other}/x.h"\n' for other in FOLDERS if other != "torch"]
        (tmp_path / folder / "x.cc").write_text("".join(lines))
    core = len(FOLDERS) - 1
    assert len(problems(tmp_path)) == core * (core - 1) // 2

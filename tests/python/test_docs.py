"""Every snippet of the README and the docs does what it says. One with a title is only shown."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from patience import LONG, PATIENCE
from ranks import run_ranks

from sparsecomm import _C
from sparsecomm.cli.ping_pong import find_mpiexec

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def snippets(language: str) -> list[str]:
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [text for page in PAGES for text in pattern.findall(page.read_text())]


def commands() -> list[Any]:
    lines = [line for text in snippets("sh") for line in text.splitlines()]
    found = [line.partition("  #")[0].strip() for line in lines if line.strip()]
    # Each of these starts six programs that import torch.
    return [
        pytest.param(line, marks=pytest.mark.slow if "torchrun" in line else ()) for line in found
    ]


def run(command: list[str], cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=1.5 * LONG,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("number", range(len(snippets("python"))))
def test_python_snippet(number: int, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    text = snippets("python")[number]
    script.write_text(text)
    if "from accelerate" in text:
        pytest.importorskip("accelerate")
    if "mpi4py" in text:
        mpiexec = find_mpiexec() or pytest.skip("no mpi4py or no mpiexec")
        run([mpiexec, "-n", "2", sys.executable, str(script)], tmp_path)
        return
    run_ranks(2, run_as_torchrun, str(script), tmp_path, timeout=1.5 * LONG / PATIENCE)


def test_the_main_program_resumes_bit_by_bit(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorials" / "ddp.md").read_text()
    text = page.split("```python\n")[1].split("```")[0]
    loop = "in range(first, STEPS):"
    assert text.count(loop) == 1
    found = []
    for name, stops in (("whole", ()), ("resumed", (27, 43))):  # after 20 and 40 were saved
        folder = tmp_path / name
        folder.mkdir()
        script = folder / "train.py"
        for stop in (*stops, None):
            end = "STEPS" if stop is None else str(stop)
            script.write_text(text.replace(loop, f"in range(first, {end}):"))
            run_ranks(2, run_as_torchrun, str(script), folder, timeout=LONG / PATIENCE)
        saved = torch.load(folder / "training.pt", weights_only=True)
        assert saved["step"] == 60
        found.append(saved["model"])
    whole, resumed = found
    for name, parameter in whole.items():
        assert torch.equal(parameter, resumed[name]), name


def run_as_torchrun(script: str, folder: Path) -> None:
    """Runs a script as torchrun would, in a rank of run_ranks(), which has imported torch."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    assert isinstance(store, dist.TCPStore)
    os.environ.update(
        MASTER_ADDR=store.host,
        MASTER_PORT=str(store.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
    )
    dist.destroy_process_group()
    os.chdir(folder)
    runpy.run_path(script, run_name="__main__")


def test_what_is_shown_and_not_run() -> None:
    pattern = re.compile(r"^```python (.+)$", re.MULTILINE)
    titles = [title for page in PAGES for title in pattern.findall(page.read_text())]
    assert titles == ['title="A crash of gloo"']


@pytest.mark.parametrize("command", commands())
def test_command(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    if words[0] == "make":
        if shutil.which("make") is None:
            pytest.skip("needs make")
        run(["make", "--dry-run", *words[1:]], ROOT)  # .ci/run runs them in earnest
    elif words == ["sparsecomm", "doctor"]:
        pass  # test_doctor.py runs it
    elif words[0] == "sparsecomm":
        run([sys.executable, "-m", "sparsecomm.cli", *words[1:]], tmp_path)
    elif "torchrun" in words:
        run_on_two_hosts(words, tmp_path)
    elif words[0] == "mpiexec":
        assert words[-2:] == ["--launcher", "mpi"]  # test_example_launchers.py runs it
    elif words[0] == "pip":
        assert words[1:3] == ["install", "--no-build-isolation"]  # test_install.py and make run it
    else:
        assert words[:3] == ["cmake", "-S", "csrc"], f"no test knows how to run: {command}"


def run_on_two_hosts(words: list[str], tmp_path: Path) -> None:
    """The multi-node command, both nodes on this host, for a few steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    arguments = words[words.index("torchrun") + 1 :]
    short = ["--epochs", "1", "--steps", "2", "--limit", "64", "--batch", "2"]
    nodes = []
    for rank in ("0", "1"):
        own = list(arguments)
        own[own.index("--node-rank") + 1] = rank
        own[own.index("--master-addr") + 1] = "127.0.0.1"
        own[own.index("--master-port") + 1] = port
        script = next(word for word in own if word.endswith(".py"))
        own[own.index(script)] = str(ROOT / script)
        nodes.append(
            subprocess.Popen(
                [*TORCHRUN, *own, *short, "--output", str(tmp_path / "run")],
                cwd=tmp_path,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        for node in nodes:
            output, _ = node.communicate(timeout=1.5 * LONG)
            assert node.returncode == 0, output
    finally:
        for node in nodes:
            node.kill()
    assert (tmp_path / "run" / "summary.json").exists()


def test_algorithms_are_those_of_the_code() -> None:
    run([sys.executable, str(ROOT / "scripts" / "docs_table.py"), "--check"], ROOT)
    page = (ROOT / "docs" / "algorithms.md").read_text()
    for row in _C.algorithms():
        name = row["name"] if row["sparse"] else "dense"
        assert f"\n## {name}\n" in page, f"docs/algorithms.md has no section on {name}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"

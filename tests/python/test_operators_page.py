"""docs/aggregators.md does what it says, and so do the files of deploy/ that it names."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import aggregators
import pytest
from patience import LONG

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
PAGE = (ROOT / "docs" / "aggregators.md").read_text()
COMMAND = Path(sys.executable).with_name("sparsecomm-aggregator")
PREFIX = "sparsecomm_aggregator_"
TOKEN = f"team-one {'1' * 32}\n"

# The ports of the page, each of which becomes one that is free, and why it is there.
PORTS = {
    "7000": "ranks, the first aggregator",
    "7001": "ranks, the second",
    "9000": "HTTP, the first",
    "9001": "HTTP, the second",
}


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def section(heading: str) -> str:
    return PAGE.split(f"\n{heading}\n")[1].split("\n#")[0]


def free_ports(count: int) -> list[str]:
    """Of those that the system does not give to connections meanwhile."""
    found: list[str] = []
    for port in random.sample(range(20_000, 32_000), 12_000):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                found.append(str(port))
        if len(found) == count:
            break
    return found


def run_page(folder: Path) -> str:
    """Runs the page's bash fences in one shell; returns what they print."""
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    parts = [f"echo '--- part {i}'\n{text}" for i, text in enumerate(fences("bash"), 1)]
    script = re.sub(rf"\b({'|'.join(PORTS)})\b", lambda port: ports[port[0]], "\n".join(parts))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPARSECOMM_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["OMP_NUM_THREADS"] = "1"
    output = folder / "output"
    with output.open("w") as file:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        status = shell.wait(timeout=4 * LONG)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        end_group(shell)
    text = output.read_text()
    assert status == 0, text
    for port, free in ports.items():
        text = text.replace(free, port)
    return text


def end_group(shell: subprocess.Popen[bytes]) -> None:
    """Ends what a failed page has left: torchrun first, which ends its ranks."""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            shell.poll()
            os.killpg(shell.pid, 0)
            time.sleep(0.1)
        os.killpg(shell.pid, signal.SIGKILL)


@pytest.mark.timeout(300)
@pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("openssl") is None, reason="no curl, no openssl"
)
def test_the_page_runs(tmp_path: Path) -> None:
    text = run_page(tmp_path)
    folder = tmp_path / "aggregators"
    assert text.count("listening at 127.0.0.1:7000\n") == 2
    assert text.count("http at 127.0.0.1:9001\n") == 1
    assert text.count("lost aggregators: {}\n") == 1
    operations = re.findall(rf"^{PREFIX}operations_total (\d+)$", text, re.MULTILINE)
    assert int(operations[-1]) > 0, text
    training = (folder / "train.log").read_text()
    assert training.count("its work goes to the one that is left") >= 1, training
    assert training.count("the ranks reduce without aggregators") >= 1, training
    for name in ("one.log", "two.log"):
        lines = [json.loads(line) for line in (folder / name).read_text().splitlines()]
        assert lines
        assert all("message" in line for line in lines)
    assert (folder / "tokens").stat().st_mode & 0o077 == 0


def test_what_does_not_run_here_names_what_there_is() -> None:
    """Of the console fences, which need Docker, Kubernetes, root or another machine."""
    folders = [path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "build"]
    path = re.compile(rf"(?<![\w./-])(?:{'|'.join(map(re.escape, folders))})/[\w./-]+")
    makefile = (ROOT / "Makefile").read_text()
    text = "\n".join(fences("console"))
    named = set(path.findall(text)) | set(re.findall(r"`(deploy/[\w.-]+)`", PAGE))
    assert {path.name for path in DEPLOY.iterdir()} == {Path(name).name for name in named}
    for name in named:
        assert (ROOT / name).is_file(), name
    targets = re.findall(r"^make ([\w-]+)", text, re.MULTILINE)
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for built in re.findall(r"build/(\w+)/sparsecomm-aggregator", text):
        assert f"-B build/{built}" in makefile
    languages = set(re.findall(r"^```(\w+)", PAGE, re.MULTILINE))
    assert languages == {"bash", "console", "yaml"}


def test_metrics_are_those_of_the_program(tmp_path: Path) -> None:
    with aggregators.aggregator("--http", "127.0.0.1:0", program=COMMAND) as (process, _):
        assert process.stdout is not None
        at = process.stdout.readline().removeprefix("http at ").strip()
        with urllib.request.urlopen(f"http://{at}/metrics", timeout=LONG) as answer:
            served = answer.read().decode()
    kinds = dict(re.findall(rf"^# TYPE {PREFIX}(\w+) (\w+)$", served, re.MULTILINE))
    described = {}
    for cells in re.findall(r"^\| (`.*`) \| (\w+) \|", section("### Metrics"), re.MULTILINE):
        for name in re.findall(r"`(\w+)(?:\{\w+\})?`", cells[0]):
            described[name] = cells[1]
    assert described == kinds
    for label, value in set(re.findall(r'\b(reason|cause)="(\w+)"', served)):
        assert f"`{value}`" in section("### Metrics"), f"{label} {value}"
    for name in re.findall(rf"{PREFIX}(\w+)", PAGE):
        assert any(name in (known, f"{known}_bucket") for known in kinds), name


def strings(folder: Path, pattern: str) -> str:
    """Sources, with strings that stand side by side as one."""
    text = "\n".join(path.read_text() for path in sorted(folder.rglob(pattern)))
    return re.sub(r'"\s*\n?\s*"', "", text)


def test_errors_are_those_of_the_sources() -> None:
    sources = strings(ROOT / "csrc", "*.cc") + strings(ROOT / "csrc", "*.h")
    system = {os.strerror(number) for number in range(1, 134)}
    rows = re.findall(
        r"^\| ((?:`[^`]*`(?:, )?)+) \|", section("## When something fails"), re.MULTILINE
    )
    assert rows
    for text in re.findall(r"`([^`]+)`", "\n".join(rows)):
        for piece in re.split(r"\.\.\.|: |\bN\b|\d+", text):
            words = piece.strip(" ;")
            assert words in sources or words in system, f"{text}: no source says {words!r}"


def check_settings(text: str, folder: Path, tokens: str = TOKEN) -> str:
    """What the program says of settings whose files are in a folder; "" if they are right."""
    (folder / "tokens").write_text(tokens)
    text = re.sub(r'(?m)^tokens = ".*"$', f'tokens = "{folder / "tokens"}"', text)
    text = re.sub(r'(?m)^control = ".*"$', f'control = "{folder / "control"}"', text)
    file = folder / "aggregator.toml"
    file.write_text(text)
    command = [COMMAND, "--config", file, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == (2 if done.stderr else 0)
    return done.stderr


def test_the_example_of_settings_has_them_all(tmp_path: Path) -> None:
    text = (DEPLOY / "aggregator.toml").read_text()
    usage = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, timeout=LONG)
    arguments = set(re.findall(r"^  --([a-z-]+)", usage.stdout, re.MULTILINE))
    assert set(re.findall(r"^(?:# )?([a-z-]+) = ", text, re.MULTILINE)) == arguments - {
        "config",
        "check",
        "help",
    }
    assert check_settings(text, tmp_path) == ""
    wrong = check_settings(text.replace("\nidle = ", "\nidel = "), tmp_path)
    assert "idel" in wrong
    assert "aggregator.toml" in wrong


def unit() -> str:
    return (DEPLOY / "sparsecomm-aggregator.service").read_text()


def seconds_to_drain(settings: str) -> int:
    found = re.search(r"^drain = (\d+)$", settings, re.MULTILINE)
    assert found is not None
    return int(found[1])


def test_the_unit_gives_jobs_the_time_to_leave() -> None:
    found = re.search(r"^TimeoutStopSec=(\d+)$", unit(), re.MULTILINE)
    assert found is not None
    assert int(found[1]) > seconds_to_drain((DEPLOY / "aggregator.toml").read_text())


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_the_unit_is_valid_and_tight(tmp_path: Path) -> None:
    file = tmp_path / "sparsecomm-aggregator.service"
    program = "/usr/local/bin/sparsecomm-aggregator"
    assert unit().count(f"={program}") == 1
    file.write_text(unit().replace(f"={program}", f"={COMMAND}"))
    for arguments in (["verify", "--man=no"], ["security", "--offline=true", "--threshold=20"]):
        command = ["systemd-analyze", *arguments, file]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
        assert done.returncode == 0, done.stdout + done.stderr
        if arguments[0] == "verify":
            assert done.stderr == ""


def test_the_image_copies_what_there_is() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(\S+) \S+$", text, re.MULTILINE)
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
    assert [line for line in ignored if not line.startswith("#")] == [
        "*",
        *(f"!{name}" for name in sorted(copied)),
    ]
    usage = subprocess.run([COMMAND, "--help"], capture_output=True, text=True, timeout=LONG)
    for argument in re.findall(r'"(--[a-z-]+)"', "\n".join(text.splitlines()[-2:])):
        assert f"  {argument} " in usage.stdout


def resources() -> dict[str, Any]:
    yaml = pytest.importorskip("yaml")
    found = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    kinds = {resource["kind"]: resource for resource in found}
    assert len(kinds) == len(found)
    return kinds


def test_kubernetes_resources_fit_together(tmp_path: Path) -> None:
    kinds = resources()
    name = "sparsecomm-aggregator"
    assert {resource["metadata"]["name"] for resource in kinds.values()} == {name}
    stateful = kinds["StatefulSet"]["spec"]
    pod = stateful["template"]["spec"]
    [container] = pod["containers"]
    labels = stateful["template"]["metadata"]["labels"]
    assert stateful["serviceName"] == name
    assert stateful["selector"]["matchLabels"] == labels
    assert kinds["Service"]["spec"]["selector"] == labels
    assert kinds["Service"]["spec"]["clusterIP"] == "None"
    assert kinds["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels

    addresses = ",".join(f"{name}-{i}.{name}:7000" for i in range(stateful["replicas"]))
    assert addresses in (DEPLOY / "kubernetes.yaml").read_text()
    assert addresses in PAGE

    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for port in kinds["Service"]["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]
    for probe, path in (("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")):
        command = container[probe]["exec"]["command"]
        assert command[0] == "curl"
        assert command[-1] == f"http://localhost{path}"
        assert container[probe]["timeoutSeconds"] > 1  # /healthz waits for so long
    annotations = stateful["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(ports["http"])

    settings = kinds["ConfigMap"]["data"]["aggregator.toml"]
    assert f'listen = "0.0.0.0:{ports["blocks"]}"' in settings
    assert f'http = "0.0.0.0:{ports["http"]}"' in settings
    assert pod["terminationGracePeriodSeconds"] > seconds_to_drain(settings)
    assert check_settings(settings, tmp_path) == ""
    placeholder = kinds["Secret"]["stringData"]["tokens"]
    assert "must have 16 or more" in check_settings(settings, tmp_path, placeholder)

    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert f"{mounts['settings']}/aggregator.toml" in container["args"]
    assert f'tokens = "{mounts["tokens"]}/tokens"' in settings
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    assert f'"--control", "{mounts["control"]}/control"' in dockerfile
    context = pod["securityContext"]
    assert f"USER {context['runAsUser']}:{context['runAsGroup']}" in dockerfile


def test_yaml_of_the_page_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    texts = [yaml.safe_load(text) for text in fences("yaml")]
    assert [list(text) for text in texts] == [["scrape_configs"], ["groups"], ["env"]]
    variables = [variable["name"] for variable in texts[2]["env"]]
    assert all(name in "\n".join(fences("bash")) for name in variables)

"""Several hosts on one machine: a network namespace each, joined by a switch over limited links."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from sparsecomm.cli.ranks import run_on_ranks, world_size_of_launcher

INTERFACE = "eth0"  # of every host
NETWORK = "10.77.0"
MAX_HOSTS = 200
BURST_SECONDS = 0.002  # what a link may send at once after a pause
QUEUE_SECONDS = 0.05  # what a switch port holds before it drops
GRACE_SECONDS = 10.0  # from asking a process to end to killing it
PORT = 29500  # free: a namespace has all ports to itself
# The hosts share a kernel, so without being told UCX would go through shared memory. Handshakes are
# left out, as between hosts without RDMA, whatever devices this machine has.
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "UCX_TLS": "tcp",
    "UCX_RNDV_THRESH": "inf",
    "OMP_NUM_THREADS": "1",
}
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class HostsError(RuntimeError):
    """The hosts cannot be made, or a command on them failed."""


def missing() -> str | None:
    """What this machine lacks to make hosts, ``None`` if nothing."""
    if os.geteuid() != 0:
        return "needs root: it makes network namespaces"
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool, path=_path()) is None]
    if lacking:
        return f"needs {' and '.join(lacking)}: install iproute2 (apt-get install iproute2)"
    if shutil.which("unshare", path=_path()) is None:
        return "needs unshare: install util-linux"
    # Root of a container may still not be allowed to.
    probe = f"sparsecomm-{os.getpid()}-probe"
    try:
        _call("ip", "netns", "add", probe)
    except HostsError as error:
        return f"network namespaces cannot be made here: {error}"
    _call("ip", "netns", "del", probe)
    return None


class Hosts:
    """A context in which the hosts exist; whatever way it is left, nothing of them stays.

    Host i is called ``host{i}``, from 1 on, has the address ``10.77.0.{i}`` on ``eth0``, knows the
    others by name, and shares files and cores with this machine. Each is joined to a switch by a
    link that carries ``rate`` in each direction: a token bucket at either end. The namespaces'
    names hold the process id, and the root namespace is left as it is, so that several instances
    may exist at a time.

    Args:
        count: number of hosts.
        rate: of a link as tc writes it, such as ``1gbit`` or ``100mbit``; ``None`` for no limit.

    Raises:
        ValueError: a count or rate that cannot be.
    """

    _numbers = itertools.count()

    def __init__(self, count: int, rate: str | None) -> None:
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"{count} hosts cannot be made: from 1 to {MAX_HOSTS} can")
        self.bits_per_second = None if rate is None else parse_rate(rate)
        self.names = [f"host{number}" for number in range(1, count + 1)]
        self.addresses = [f"{NETWORK}.{number}" for number in range(1, count + 1)]
        prefix = f"sparsecomm-{os.getpid()}-{next(self._numbers)}"
        self._switch = f"{prefix}-switch"
        self._namespaces = [f"{prefix}-{name}" for name in self.names]
        self._cleanup = ExitStack()

    def __enter__(self) -> Hosts:
        with ExitStack() as cleanup:
            cleanup.enter_context(_signals_raise())
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="sparsecomm-"))
            self._host_table = Path(folder) / "hosts"
            # torch looks up who has connected, as IPv4 or mapped into IPv6.
            lines = [
                f"{prefix}{address} {name}\n"
                for name, address in zip(self.names, self.addresses, strict=True)
                for prefix in ("", "::ffff:")
            ]
            self._host_table.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(lines))
            for namespace in (self._switch, *self._namespaces):
                _call("ip", "netns", "add", namespace)
                cleanup.callback(_remove, namespace)
            _call("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
            _call("ip", "-n", self._switch, "link", "set", "switch", "up")
            for index in range(len(self.names)):
                self._plug_in(index)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def set_link(self, index: int, *, up: bool) -> None:
        """Takes a host's link down at the switch, or up again; the host sees its carrier go."""
        state = "up" if up else "down"
        _call("ip", "-n", self._switch, "link", "set", _port(index), state)

    def set_rate(self, index: int, rate: str) -> None:
        """Makes a host's link as fast as that in each direction; it had a rate before."""
        self._limit(index, parse_rate(rate), "change")

    def _plug_in(self, index: int) -> None:
        namespace, address, port = self._namespaces[index], self.addresses[index], _port(index)
        switch = ("ip", "-n", self._switch, "link")
        _call(*switch, "add", port, "type", "veth", "peer", "name", INTERFACE, "netns", namespace)
        _call(*switch, "set", port, "master", "switch", "up")
        _call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE)
        for interface in ("lo", INTERFACE):
            _call("ip", "-n", namespace, "link", "set", interface, "up")
        if self.bits_per_second is not None:
            self._limit(index, self.bits_per_second, "add")

    def _limit(self, index: int, bits_per_second: float, how: str) -> None:
        bytes_per_second = bits_per_second / 8
        burst = max(65536, int(bytes_per_second * BURST_SECONDS))
        limit = burst + int(bytes_per_second * QUEUE_SECONDS)
        bucket = ("tbf", "rate", f"{bits_per_second:.0f}bit", "burst", str(burst))
        for end, interface in (
            (self._namespaces[index], INTERFACE),
            (self._switch, _port(index)),
        ):
            _call(
                *("tc", "-n", end, "qdisc", how, "dev", interface, "root"),
                *(*bucket, "limit", str(limit)),
            )

    def run(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        folder: Path | None = None,
    ) -> None:
        """Runs one command per host at the same time, in ``folder``, to the end.

        Raises:
            HostsError: one of them failed; the others were ended then.
        """
        processes: list[subprocess.Popen[bytes]] = []
        failed: list[str] = []
        try:
            for index, command in enumerate(commands):
                processes.append(self._start(index, command, environments[index], folder))
            while not failed and any(process.poll() is None for process in processes):
                time.sleep(0.02)
                failed = [
                    f"{name} (status {process.returncode})"
                    for name, process in zip(self.names, processes, strict=False)
                    if process.poll()
                ]
        finally:
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
            _end_all(self._namespaces)
            for process in processes:
                process.wait()
        if failed:
            raise HostsError(f"{' '.join(commands[0][:3])} ... failed on {', '.join(failed)}")

    def run_ranks(self, command: Sequence[str]) -> None:
        """Runs one command on every host, as the ranks of one process group: see run()."""
        self.run([command] * len(self.names), self.rank_environments())

    def rank_environments(self, **more: str) -> list[dict[str, str]]:
        """Returns each host's variables, and ``more``, as of a rank of one process group."""
        return [
            {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.names)),
                "MASTER_ADDR": self.addresses[0],
                "MASTER_PORT": str(PORT),
                **ENVIRONMENT,
                **more,
            }
            for rank in range(len(self.names))
        ]

    def _start(
        self,
        index: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None,
    ) -> subprocess.Popen[bytes]:
        # `ip netns exec` has a mount namespace of its own: the host table is seen inside only.
        script = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
        return subprocess.Popen(
            [
                *("ip", "netns", "exec", self._namespaces[index], "unshare", "--uts"),
                *("sh", "-c", script, str(self._host_table), self.names[index], *command),
            ],
            env={**os.environ, "PATH": _path(), **environment},
            cwd=folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end them in order
        )


def run_benchmark(
    parser: argparse.ArgumentParser,
    body: Callable[[], None],
    ranks: int,
    link: str | None,
    command: Sequence[str],
) -> int:
    """Calls ``body`` on every rank: a launcher's, this machine's, or with ``link`` on hosts' own.

    Args:
        parser: says why where hosts cannot be made.
        body: of a rank; picklable.
        ranks: how many, unless a launcher has started them.
        link: of each host, as in :class:`Hosts`; ``None``: no hosts.
        command: starts the same benchmark with the same arguments, as a rank on a host.

    Returns:
        The exit status.
    """
    if link is None or world_size_of_launcher() is not None:
        return run_on_ranks(body, ranks)
    if problem := missing():
        parser.error(f"--link {link} {problem}")
    try:
        with Hosts(ranks, link) as hosts:
            hosts.run_ranks(command)
    except (HostsError, ValueError) as error:
        print(f"--link {link}: {error}", file=sys.stderr)
        return 1
    return 0


def _port(index: int) -> str:
    """Of the switch, where a host's link ends."""
    return f"port{index + 1}"


def parse_rate(rate: str) -> float:
    """Bits per second of what tc would call ``1gbit``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    bits = float(match[1]) * UNITS[match[2]] if match else 0.0
    if bits < 1:
        raise ValueError(f"{rate!r} is not a rate such as 1gbit, 100mbit or 500kbit")
    return bits


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Turns requests to end into exceptions, so that what was made is removed."""

    def leave(number: int, frame: FrameType | None) -> None:
        # Once is enough: removing must not be broken off.
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
        raise SystemExit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = [signal.signal(number, leave) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _remove(namespace: str) -> None:
    """Ends what runs in the namespace and deletes it, with its interfaces."""
    _end_all([namespace])
    _call("ip", "netns", "del", namespace)


def _end_all(namespaces: Sequence[str]) -> None:
    """Ends every process in the namespaces: all of them were started here, or by such a process."""
    number = signal.SIGTERM
    grace = GRACE_SECONDS
    while running := [pid for namespace in namespaces for pid in _processes(namespace)]:
        for pid in running:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline and any(map(_processes, namespaces)):
            time.sleep(0.05)
        number, grace = signal.SIGKILL, 1.0


def _processes(namespace: str) -> list[int]:
    """The ids of the processes in the namespace that have not ended."""
    pids = []
    for pid in map(int, _call("ip", "netns", "pids", namespace).split()):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            pids.append(pid)
    return pids


def _call(*command: str) -> str:
    result = subprocess.run(
        command,
        env={**os.environ, "PATH": _path()},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if result.returncode != 0:
        raise HostsError(f"{' '.join(command)}: {result.stderr.strip() or result.returncode}")
    return result.stdout


def _path() -> str:
    """Where programs are; a user's PATH may lack the administrator's folders."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

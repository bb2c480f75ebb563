"""``sparsecomm aggregator ctl``: what a running aggregator does, and how it is told to stop."""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import sys
from typing import Any
from urllib.parse import quote, urlencode

from sparsecomm.cli.bench import positive

TIMEOUT = 10.0  # s, of an answer
LEAST_DIGITS = 4  # that name a job
COLUMNS = {  # of a job, as the aggregator names them
    "id": "job",
    "owner": "owner",
    "connected": "connected",
    "workers": "workers",
    "operations": "operations",
    "refused": "refused",
    "received_bytes": "received (B)",
    "sent_bytes": "sent (B)",
    "memory_bytes": "memory (B)",
    "seconds": "age (s)",
    "idle_seconds": "idle (s)",
}

DESCRIPTION = """\
Asks an aggregator, over the socket of its --control, for what it does, or tells it what to do.
"""


class ControlError(Exception):
    """The aggregator is not there, or says no."""


class ControlConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=TIMEOUT)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        self.sock.connect(self.path)


def add_aggregator(commands: Any) -> None:
    parser = commands.add_parser(
        "aggregator",
        help="watch and operate a running aggregator",
        description="Watches and operates a running sparsecomm-aggregator.",
    )
    parser.set_defaults(run=None, parser=parser)
    subjects = parser.add_subparsers(title="commands", metavar="COMMAND")
    control = subjects.add_parser(
        "ctl",
        help="ask for its jobs, end one, or let it drain",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    control.add_argument(
        "--control", required=True, metavar="PATH", help="of the socket: the aggregator's --control"
    )
    control.set_defaults(run=None, parser=control)
    actions = control.add_subparsers(title="actions", metavar="ACTION")

    jobs = actions.add_parser("jobs", help="list the jobs")
    jobs.add_argument("--json", action="store_true", help="print JSON instead of a table")
    jobs.set_defaults(run=run_action, act=list_jobs, parser=jobs)

    kill = actions.add_parser(
        "kill", help="end a job here; its ranks go on without this aggregator"
    )
    kill.add_argument(
        "job", type=first_digits, metavar="JOB", help="as jobs names it, or its first digits"
    )
    kill.set_defaults(run=run_action, act=kill_job, parser=kill)

    drain = actions.add_parser(
        "drain", help="take no more jobs, and end when those that are here have ended"
    )
    drain.add_argument(
        "--limit",
        type=positive,
        metavar="SECONDS",
        help="end after this long whatever is left (default: the aggregator's --drain)",
    )
    drain.set_defaults(run=run_action, act=drain_aggregator, parser=drain)


def first_digits(text: str) -> str:
    if len(text) < LEAST_DIGITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} has {len(text)} digits, must have {LEAST_DIGITS} or more"
        )
    return text


def ask(path: str, method: str, target: str) -> Any:
    """The aggregator's answer.

    Raises:
        ControlError: it cannot be reached, or refuses.
    """
    connection = ControlConnection(path)
    try:
        connection.request(method, target)
        response = connection.getresponse()
        body = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ControlError(
            f"--control {path}: {error}; start the aggregator with --control {path}, and run this "
            "as the same user"
        ) from error
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise ControlError(f"the aggregator answers {response.status}: {body.strip()}")
    return json.loads(body)


def run_action(options: argparse.Namespace) -> int:
    """What the arguments say; 1 after an error, which is printed."""
    try:
        options.act(options)
    except ControlError as error:
        print(f"sparsecomm aggregator ctl: {error}", file=sys.stderr)
        return 1
    return 0


def list_jobs(options: argparse.Namespace) -> None:
    answer = ask(options.control, "GET", "/jobs")
    if options.json:
        print(json.dumps(answer, indent=2))
        return
    rows = [list(COLUMNS.values())]
    rows += [[text_of(job[name]) for name in COLUMNS] for job in answer["jobs"]]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        )


def text_of(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value) or "-"


def kill_job(options: argparse.Namespace) -> None:
    jobs = [job["id"] for job in ask(options.control, "GET", "/jobs")["jobs"]]
    found = [job for job in jobs if job.startswith(options.job)]
    if len(found) != 1:
        raise ControlError(
            f"{len(found)} jobs begin with {options.job}, must be one of: "
            f"{', '.join(jobs) or 'none'}"
        )
    ask(options.control, "DELETE", f"/jobs/{quote(found[0])}")
    print(f"ended job {found[0]}; its ranks go on without this aggregator")


def drain_aggregator(options: argparse.Namespace) -> None:
    query = "" if options.limit is None else "?" + urlencode({"limit": options.limit})
    answer = ask(options.control, "POST", "/drain" + query)
    print(f"draining: {answer['draining']} jobs, at most {answer['limit_seconds']:g} s")

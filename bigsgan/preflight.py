"""Checks the hosts of a hostfile over ssh before a job starts: `python -m bigsgan.preflight HOSTFILE`.

A host that does not answer, or lacks the environment, would leave the ranks of the others waiting for it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bigsgan.errors import EXIT_BAD_INPUT, UserError, counted, reason
from bigsgan.runtime.paths import read_text

CONNECT_SECONDS, PATIENCE_SECONDS = 10, 45
REMEDY = "fix or remove these hosts; all need ssh without a password, the same paths and the same packages"
_PACKAGES = ("bigsgan", "torch", "deepspeed")
_PROBE = "import json; from bigsgan.preflight import versions; print(json.dumps(versions()))"
_NO_PYTHON, _NO_DIRECTORY, _SSH_FAILED = 127, 64, 255
_LACKING = "ModuleNotFoundError"


class Problem(NamedTuple):
    """A problem with a host."""

    host: str
    found: str
    sure: bool  # whether ranks cannot run there; otherwise it may only be slow, or have another version

    def __str__(self) -> str:
        return f"{self.host} {self.found}"


def check(hostfile: Path) -> list[str]:
    """Check all hosts at once, within a minute, and return their names.

    Raises:
        UserError: Hosts do not answer, or differ from this one; the message names them all.
    """
    hosts = read_hosts(hostfile)
    if problems := look_at(hosts):
        raise UserError(str(hostfile), None, "; ".join(map(str, problems)), REMEDY)
    return hosts


def look_at(hosts: Sequence[str]) -> list[Problem]:
    """Check all hosts at once over ssh, and return the problems of those that differ from this one.

    Raises:
        UserError: There is no ssh here.
    """
    with ThreadPoolExecutor(len(hosts)) as threads:
        return [problem for problem in threads.map(_problem, hosts) if problem]


def read_hosts(hostfile: Path) -> list[str]:
    """Return the names in a DeepSpeed hostfile, which has lines such as ``node1 slots=8``, and comments.

    Raises:
        UserError: The file cannot be read, or a line does not have that form.
    """
    try:
        lines = read_text(hostfile).splitlines()
    except (OSError, ValueError) as error:
        raise UserError(str(hostfile), None, f"cannot be read: {reason(error, hostfile)}", "give a hostfile") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        slots = words[1].partition("slots=")[2] if len(words) == 2 else ""
        if not re.fullmatch("[0-9]{1,9}", slots) or int(slots) == 0 or words[0].startswith("-"):
            raise UserError(f"{hostfile}:{number}", line, "must be a host and its slots", "write `node1 slots=8`")
        if words[0] in hosts:
            raise UserError(f"{hostfile}:{number}", words[0], "must be listed once", "remove the second line")
        hosts.append(words[0])
    if not hosts:
        raise UserError(str(hostfile), None, "contains no hosts", "write a line such as `node1 slots=8` for each")
    return hosts


def _problem(host: str) -> Problem | None:
    python = f"{shlex.quote(sys.executable)} -c {shlex.quote(_PROBE)}"
    path = f"PYTHONPATH={shlex.quote(os.environ.get('PYTHONPATH', ''))}"
    script = f"cd {shlex.quote(os.getcwd())} || exit {_NO_DIRECTORY}; {path} {python}"
    remote = f"sh -c {shlex.quote(script)}"  # the user's own shell there may be any
    command = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", host, remote]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="backslashreplace",
            timeout=PATIENCE_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError:
        raise UserError("ssh", None, "is not installed", "install an ssh client") from None
    except subprocess.TimeoutExpired:
        return Problem(host, f"does not answer within {PATIENCE_SECONDS} s", sure=False)
    said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    known = {
        _SSH_FAILED: f"cannot be reached: {said}",
        _NO_DIRECTORY: f"has no directory {os.getcwd()}",
        _NO_PYTHON: f"has no {sys.executable}",
    }
    if done.returncode in known:
        return Problem(host, known[done.returncode], sure=True)
    if done.returncode and _LACKING in said:
        return Problem(host, f"lacks a package: {said}", sure=True)
    try:
        there = json.loads(done.stdout.strip().splitlines()[-1])
        return _different(host, {name: str(there[name]) for name in _PACKAGES if name in there})
    except (IndexError, ValueError, TypeError):
        return Problem(host, f"cannot be checked (status {done.returncode}): {said}", sure=False)


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that a run needs, found without importing them."""
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _different(host: str, there: Mapping[str, str]) -> Problem | None:
    own = versions()
    if missing := [name for name in own if name not in there]:
        return Problem(host, f"lacks {', '.join(missing)}", sure=True)
    found = [f"{name} {there[name]}, not {own[name]}" for name in own if there[name] != own[name]]
    return Problem(host, f"has {', '.join(found)}", sure=False) if found else None


def main(arguments: Sequence[str]) -> int:
    """Check a hostfile, and return the exit status: 0, or 2 with a message."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        return 0
    try:
        if len(arguments) != 1:
            raise UserError("arguments", " ".join(arguments), "must be one hostfile", "give its path")
        hosts = check(Path(arguments[0]))
    except UserError as error:
        print(f"bigsgan: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    print(f"{counted(len(hosts), 'host')} {'is' if len(hosts) == 1 else 'are'} ready: {', '.join(hosts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

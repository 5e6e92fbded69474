"""Hosts of a hostfile are looked at before a job starts; a stand-in for ssh plays them."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import time

import pytest

from bigsgan import preflight

SSH = f"""#!{sys.executable}
import os, subprocess, sys, time
host, remote = sys.argv[-2:]
if host == "gone":
    print("ssh: Could not resolve hostname gone", file=sys.stderr)
    sys.exit(255)
if host == "forced":
    sys.exit(0)
if host == "latin":
    sys.stderr.buffer.write(b"gr\\xfc\\xdfe\\n")
    sys.exit(1)
if host == "chatty":
    print("12")
    sys.exit(0)
if host == "silent":
    time.sleep(60)
if host == "bare":
    remote = remote.replace({sys.executable!r}, "/no/python")
if host == "empty":
    remote = remote.replace("cd ", "cd /no/", 1)
if host in ("unlike", "partial"):
    print('{{"bigsgan": "0.1.0", "torch": "0.4"' + (', "deepspeed": "0"}}' if host == "unlike" else "}}"))
    sys.exit(0)
if host == "without":
    remote = remote.replace("import json", "import not_there, json")
sys.exit(subprocess.run(["bash", "-c", remote]).returncode)
"""


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """A function that writes a hostfile and checks it: status, and what was said."""
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def write(*names):
        path = tmp_path / "hosts"
        path.write_text("# all of them\n\n" + "".join(f"{name} slots=2  # GPUs\n" for name in names))
        return path

    return write


def test_hosts_like_this_one_are_ready(hosts, capfd):
    assert preflight.main([str(hosts("node1", "node2"))]) == 0
    assert capfd.readouterr() == ("2 hosts are ready: node1, node2\n", "")


@pytest.mark.parametrize(
    "name, told",
    [
        ("gone", "gone cannot be reached: ssh: Could not resolve hostname gone"),
        ("silent", "silent does not answer within 1 s"),
        ("bare", f"bare has no {sys.executable}"),
        ("empty", f"empty has no directory {os.getcwd()}"),
        ("without", "without lacks a package: ModuleNotFoundError: No module named 'not_there'"),
        ("unlike", f"unlike has torch 0.4, not {importlib.metadata.version('torch')}, deepspeed 0, not "),
        ("partial", "partial lacks deepspeed"),
        ("forced", "forced cannot be checked (status 0): no reason given"),
        ("chatty", "chatty cannot be checked (status 0): no reason given"),
        ("latin", "latin cannot be checked (status 1): gr\\xfc\\xdfe"),
    ],
)
def test_another_is_named(hosts, capfd, monkeypatch, name, told):
    path, start = hosts("node1", name), time.monotonic()
    if name == "silent":  # alone, as a busy machine may not answer within a second itself
        monkeypatch.setattr(preflight, "PATIENCE_SECONDS", 1)
        path = hosts(name)
    assert preflight.main([str(path)]) == 2
    assert time.monotonic() - start < 20
    said = capfd.readouterr().err.splitlines()[-1]
    assert said.startswith(f"bigsgan: {path}: {told}")
    assert said.endswith("; all need ssh without a password, the same paths and the same packages")
    assert "node1" not in said


@pytest.mark.parametrize(
    "line, problem",
    [
        ("node1", "must be a host and its slots"),
        (f"node1 slots={'1' * 5000}", "must be a host and its slots"),
        ("node1 slots=٣", "must be a host and its slots"),
        ("-oProxyCommand=x slots=1", "must be a host and its slots"),
        ("node1 slots=1\nnode1 slots=2", "must be listed once, got 'node1'"),
        ("# none", "contains no hosts"),
    ],
)
def test_a_hostfile_that_is_none_is_refused(tmp_path, capsys, line, problem):
    (tmp_path / "hosts").write_text(f"{line}\n")
    assert preflight.main([str(tmp_path / "hosts")]) == 2
    assert problem in capsys.readouterr().err
    assert preflight.main([str(tmp_path / "none")]) == 2
    assert preflight.main([]) == 2


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe", "/dev/zero"])
def test_a_hostfile_without_an_end_is_not_waited_for(tmp_path, capsys, name):
    os.mkfifo(tmp_path / "pipe")
    assert preflight.main([str(tmp_path / name)]) == 2
    assert "cannot be read: a pipe, socket or device, not a regular file; give" in capsys.readouterr().err

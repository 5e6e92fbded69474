"""How tests are shared among workers (pytest-xdist), as ranks are slow to start."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import re
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from bigsgan.runtime.signals import STOPPING

if "BIGSGAN_CACHE" not in os.environ:  # workers inherit the first process's
    os.environ["BIGSGAN_CACHE"] = tempfile.mkdtemp(prefix="bigsgan-tests-")
    atexit.register(shutil.rmtree, os.environ["BIGSGAN_CACHE"], ignore_errors=True)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has jobs in the background ignore it
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for small tensors this is quicker, and the same everywhere
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # where a launcher unsets OMP_NUM_THREADS, threads wait asleep
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # hundreds of processes import the same modules
sys.dont_write_bytecode = False
gc.disable()  # until the tests are collected: a quarter of the time in which torch and others are imported

ON_RANKS = "tests/distributed/"
LAUNCHING = ("test_launchers.py", "test_signals.py")
"""Files among those that start processes of their own instead."""
LONG = ("tests/test_digits.py", "tests/clusters/", "tests/stand_in/")
"""Files of few tests that take minutes, which would leave a worker alone if they came last."""


@pytest.fixture(scope="session", autouse=True)
def unsynced() -> Iterator[None]:
    """Files need not outlast a loss of power; thousands of waits for the disk would be a part of the tests' time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True)
def heard_signals() -> Iterator[None]:
    """Hear signals after each test as before it: a command that ends in this process has its rest ignore them."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Sharing(LoadScopeScheduling):
    """File by file. The first worker begins with those on ranks, so that ranks start in one worker alone.

    Who has no more of its own kind goes on with the other's.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(choose(list(self.workqueue), node is self.nodes[0]), last=False)
        super()._assign_work_unit(node)


def choose(files: list[str], is_first: bool) -> str:
    """The next file of a worker, of those that are left, which begin with the ones of most tests."""
    own = [file for file in files if (ON_RANKS in file and not file.endswith(LAUNCHING)) == is_first] or files
    return next((file for file in own if file.startswith(LONG)), own[0])


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "run one of N shards of the tests, with I from 0"
    parser.addoption("--shard", metavar="I/N", type=shard_of, default=(0, 1), help=help_text)


def shard_of(text: str) -> tuple[int, int]:
    """Read ``I/N``."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if found is None or int(found[1]) >= int(found[2]):
        raise argparse.ArgumentTypeError(f"must be I/N with I from 0 to N - 1, got {text}")
    return int(found[1]), int(found[2])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without tests of `-m smoke`: they import what the extra `test` does not install."""
    if config.option.markexpr != "smoke" or collection_path.suffix != ".py":
        return None
    return "pytest.mark.smoke" not in collection_path.read_text() or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the nightly cells of a slow test out of the slow tier, and all but a shard out of a run of a shard.

    A test's name decides on its shard, so that each has some of every table.
    """
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.own_markers[:] = [mark for mark in item.own_markers if mark.name != "slow"]
    number, num = config.getoption("shard")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % num == number]


def pytest_runtestloop() -> None:
    gc.enable()  # of xdist's first process, which collects nothing


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what torch has made, which each collection would look through
    gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Sharing:
    return Sharing(config, log)


KINKS: list[int] = [0, 0]
"""Updates that tests have compared with the reference, and those of them that met a kink."""
MOST_KINKS = 0.01
"""Share of updates that may meet one. The networks are smooth: more would hide updates that are wrong."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, counts in report.user_properties:
            if name == "updates and kinks":
                KINKS[:] = [sum(pair) for pair in zip(KINKS, counts, strict=True)]


def too_many_kinks() -> bool:
    return KINKS[1] > max(1, MOST_KINKS * KINKS[0])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if too_many_kinks():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if KINKS[0]:
        verdict = ": too many" if too_many_kinks() else ""
        terminalreporter.write_line(f"{KINKS[0]} updates compared with the reference, {KINKS[1]} met a kink{verdict}")

"""How tests are shared among workers (pytest-xdist): file by file, but for those that need ranks, slow to start."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

if "BIGSGAN_CACHE" not in os.environ:  # workers inherit the first process's
    os.environ["BIGSGAN_CACHE"] = tempfile.mkdtemp(prefix="bigsgan-tests-")
    atexit.register(shutil.rmtree, os.environ["BIGSGAN_CACHE"], ignore_errors=True)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin while they wait slow other workers down

ON_RANKS = "tests/distributed/"
LAUNCHING = ("test_launchers.py", "test_signals.py")
"""Files among those that start processes of their own instead."""


class Sharing(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return ON_RANKS if ON_RANKS in file and not file.endswith(LAUNCHING) else file


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what torch has made, which each collection would look through


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Sharing:
    return Sharing(config, log)


KINKS: list[int] = [0, 0]
"""Updates that tests have compared with the reference, and those of them that met a kink."""


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        for name, counts in report.user_properties:
            if name == "updates and kinks":
                KINKS[:] = [sum(pair) for pair in zip(KINKS, counts, strict=True)]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if KINKS[0]:
        terminalreporter.write_line(f"{KINKS[0]} updates compared with the reference, {KINKS[1]} met a kink")


def pytest_unconfigure() -> None:
    gc.unfreeze()

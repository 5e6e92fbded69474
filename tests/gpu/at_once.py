"""Plugin that prints a failure as it arises, as what comes after it may take longer than there is time."""

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        print(f"\n{report.nodeid} failed:\n{report.longreprtext[-6000:]}", flush=True)

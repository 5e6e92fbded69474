"""`bigsgan doctor` by srun, on a real Slurm of two nodes."""

from __future__ import annotations

import json

import pytest

from tests.clusters import laboratory

ONLY = "--only environment --only layouts.collectives"


@pytest.mark.slow
def test_two_nodes_of_slurm(tmp_path):
    """With real checks; then with a limit of open files that a task cannot raise."""
    script = f"""
        export DS_ACCELERATOR=cpu
        srun --nodes 2 --ntasks 2 bigsgan doctor --json {ONLY} > found.json
        limited="ulimit -n 300; exec bigsgan doctor --only environment.files"
        srun --nodes 2 --ntasks 2 bash -c "$limited" > failed.txt || echo "failed $?"
    """
    done = laboratory.run("slurm", script, tmp_path)
    assert "failed 1" in done.stdout
    record = json.loads((tmp_path / "found.json").read_text())
    assert (record["hosts"], record["ranks"], record["failed"]) == (["node1", "node2"], 2, [])
    checks = {check["name"]: check for check in record["checks"]}
    for name in ("paths", "locks", "alike", "files"):
        assert checks[f"environment.{name}"]["status"] == "pass"
    assert [rank["status"] for rank in checks["layouts.collectives"]["ranks"]] == ["pass", "pass"]
    said = (tmp_path / "failed.txt").read_text()
    assert "(and 1 more rank): 300 files may be open at once, 528 are needed" in said
    assert "again, by the same launcher: bigsgan doctor --only environment.files" in said

"""Kernels that updates of a recipe launch, counted without a GPU on the stand-in of CUDA (tests/stand_in).

python -m tests.benchmarks.launches --config launch/recipes/stylegan2_256.yaml batch=8
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.stand_in import build
from tests.tiny import zero

NUM_UPDATES = 6
INSIDE = "LAUNCHES_ON_STAND_IN"
ONE_RANK = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}


class IntegerLaunches(TorchDispatchMode):
    """Counts launches of torch's operations whose results are integers or bool."""

    def __init__(self) -> None:
        super().__init__()
        self.num_integer = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from tests.stand_in import cells  # on the stand-in alone

        before = cells._launches()
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.dtype in (torch.int64, torch.bool):
            self.num_integer += cells._launches() - before
        return result


def count(recipe: Path, stage: int, overrides: list[str]) -> None:
    """Print the launches of each update, on one rank in bf16 and with images that need no disk."""
    from tests.stand_in import cells

    cells._join()
    file = zero(stage, bf16={"enabled": True})
    data = ["data.kind=synthetic", "data.root=null", "data.num_workers=0"]
    run = scenarios.build([*data, *overrides], dict.fromkeys(NETWORKS, file), recipe=recipe)
    for number in range(NUM_UPDATES):
        before = cells._launches()
        with IntegerLaunches() as launches:
            scenarios.update(run, 1)
        num_launches = cells._launches() - before  # Triton's too, which are no operations of torch
        print(f"update {number}: {num_launches} launches, {launches.num_integer} integer", flush=True)
    scenarios.destroy(run)


def main() -> None:
    """Build the stand-in, and count in a process that has it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--stage", type=int, choices=(0, 1, 2, 3), default=0)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    if INSIDE in os.environ:
        count(options.config, options.stage, options.overrides)
        return
    if (obstacle := build.obstacle()) is not None:
        sys.exit(obstacle)
    with tempfile.TemporaryDirectory() as directory:
        stand_in = build.environment(Path(directory), build.build(Path(directory)))
        own = {**ONE_RANK, "LOCAL_SIZE": "1", "STAND_IN_DEVICES": "1", INSIDE: "1"}
        command = [sys.executable, "-m", "tests.benchmarks.launches", *sys.argv[1:]]
        sys.exit(subprocess.run(command, env={**os.environ, **stand_in, **own}).returncode)


if __name__ == "__main__":
    main()

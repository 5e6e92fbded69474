"""How good a run of the digits becomes, by its seed and by how its sums are rounded.

`python -m tests.benchmarks.roundings FILE [KEY=VALUE ...] [--seeds 0 1] [--roundings threads isa]` trains one run after
another, each in a process of its own, and adds a line of JSON to FILE after each. Runs that FILE has are left out, so
that a study may be ended and started again. `--table` prints FILE instead. With `metrics.every_nimg=8192`, a line has
the scores on the way too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.digits_quality import measure

ROOT = Path(__file__).resolve().parents[2]
ROUNDINGS: dict[str, tuple[int, dict[str, str], list[str]]] = {
    "threads": (2, {}, []),  # each has a part of a sum
    "isa": (1, {"ONEDNN_MAX_CPU_ISA": "AVX", "ATEN_CPU_CAPABILITY": "default"}, []),  # without fused multiply-adds
    "deterministic": (1, {}, ["deterministic=true"]),
}
"""Threads, variables of the environment, and overrides."""
SHOWN = {"fid2k": "metrics/fid2k", "precision": "metrics/pr2k_precision", "recall": "metrics/pr2k_recall"}


def train(seed: int, rounding: str, overrides: list[str]) -> dict[str, Any]:
    """Train and measure one run."""
    num_threads, variables, more = ROUNDINGS[rounding]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        command = [sys.executable, "-m", "bigsgan", "train", *overrides, *more]
        began = time.monotonic()
        ran = subprocess.run(
            [*command, f"seed={seed}", f"out={out}"],
            cwd=ROOT,
            env=os.environ | variables | {"OMP_NUM_THREADS": str(num_threads)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            raise SystemExit(ran.stderr[-2000:])
        seconds = time.monotonic() - began
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        measured = [line for line in lines if SHOWN["fid2k"] in line]
        quality = measure(out)
    curve = {name: [round(line[key], 4) for line in measured] for name, key in SHOWN.items()}
    return {name: values[-1] for name, values in curve.items()} | quality | {"curve": curve, "seconds": seconds}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the runs of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(runs: list[dict[str, Any]]) -> None:
    """Print a row for each of the settings."""
    print("| settings | runs | fid2k, median (best to worst) | recall, worst | as asked, worst | spread, worst |")
    print("| --- | ---: | --- | ---: | ---: | ---: |")
    for settings in dict.fromkeys(run["settings"] for run in runs):
        own = [run for run in runs if run["settings"] == settings]
        fids = [run["fid2k"] for run in own]
        median = f"{statistics.median(fids):.1f} ({min(fids):.1f} to {max(fids):.1f})"
        worst = " | ".join(f"{min(run[name] for run in own):.2f}" for name in ("recall", "right", "spread"))
        print(f"| `{settings}` | {len(own)} | {median} | {worst} |")


def main() -> None:
    """Train what the file lacks, or print it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--roundings", nargs="+", choices=ROUNDINGS, default=list(ROUNDINGS))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_intermixed_args()
    if options.table:
        table(read(options.file))
        return
    settings = " ".join(options.overrides)
    for seed in options.seeds:
        for rounding in options.roundings:
            key = {"settings": settings, "seed": seed, "rounding": rounding}
            if not any(key.items() <= run.items() for run in read(options.file)):
                run = key | train(seed, rounding, options.overrides)
                with options.file.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(run, flush=True)


if __name__ == "__main__":
    main()

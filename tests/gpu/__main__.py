"""Everything that one GPU can show, the riskiest first: `python -m tests.gpu`, some 40 minutes.

Each check prints its figures as it goes, and all it says goes into a file of its own below ``--out``. What fails or
takes too long does not end the others. `python -m tests.gpu --list` says what there is. With ``--jobs 4`` four checks
that compare no times share the GPU, on a machine with some 16 cores; the others come before and after them, one by one.

With ``--nccl`` 2 to 4 ranks share the GPU over NCCL itself, which does so from 2.30 on: `python -m tests.gpu --nccl`,
with a later library than torch's before it, where need be, by ``LD_PRELOAD``.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from bigsgan.config import both_engines
from bigsgan.table import aligned
from tests import REPOSITORY

_TESTS = [sys.executable, "-m", "pytest", "-n", "0", "-s", "-m", "not nightly"]
_BENCH = [sys.executable, "-m", "bigsgan", "bench"]
_DOCTOR = [sys.executable, "-m", "bigsgan", "doctor", "--only"]
_SYNTHETIC = ["data.kind=synthetic", "data.root=null"]
_BIGGAN = ["--config", "biggan128_imagenet", *_SYNTHETIC, "batch=64"]
_STYLEGAN2 = ["--config", "stylegan2_256", *_SYNTHETIC, "batch=16"]
_R3GAN = ["--config", "r3gan_imagenet64", *_SYNTHETIC, "batch=16"]
TOKENS = ["data.codec={kind: pixels}", "data.resolution=32", "metrics=null"]  # as many as of latents
_GAT = ["--config", "gat_b_imagenet256", *_SYNTHETIC, *TOKENS, "batch=64"]
_KEPT = both_engines("activation_checkpointing=false")
_TIMES = ["--rounds", "1", "--warmup", "4", "--steps", "4"]
_LAZY_TIMES = ["--rounds", "1", "--warmup", "4", "--steps", "16"]  # R1 once, as published
_SPEEDS = "baseline_tf32,mixed_precision,mixed_precision+compiled,mixed_precision+deterministic"


_NCCL = {
    "TESTS_OVER_NCCL": "1",
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_DEBUG": "WARN",
    "TESTS_TIMEOUT_SECONDS": "60",
}
"""A test that hangs is ended after a minute, and shows where its ranks stand."""


class Check(NamedTuple):
    """One command.

    Attributes:
        name: Of its file.
        proves: What it shows.
        seconds: That it is expected to take; it is ended after twice as long.
        command: The words of it.
        on_one_gpu: Whether the ranks of tests share the GPU.
    """

    name: str
    proves: str
    seconds: int
    command: list[str]
    on_one_gpu: bool = False

    @property
    def alone(self) -> bool:
        """Whether it needs the GPU for itself, as all but tests do: they compare times or memory."""
        return "pytest" not in self.command


def _tests(*words: str) -> list[str]:
    return [*_TESTS, *words]


def _over_nccl(name: str, proves: str, seconds: int, file: str, only: str = "") -> Check:
    words = ["-v", "-p", "tests.gpu.at_once", "--durations=0", file, *(["-k", only] if only else [])]
    return Check(name, proves, seconds, _tests(*words), on_one_gpu=file.startswith("tests/distributed"))


CHECKS = [
    Check("device", "versions, and the speed of products and copies", 40, [sys.executable, "-m", "tests.gpu.device"]),
    Check("nccl", "the default recipe over NCCL with one rank", 60, _tests("tests/gpu/test_gpu.py", "-k", "default")),
    Check(
        "equivalence",
        "two ranks against plain PyTorch at every ZeRO stage, without TF32",
        140,
        _tests("tests/distributed/test_equivalence.py", "-k", "test_matrix and 2-2"),
        on_one_gpu=True,
    ),
    Check(
        "pipelines",
        "networks in 2 and 4 stages against plain PyTorch; messages pass through the host",
        90,
        _tests("tests/distributed/test_pipeline.py", "-k", "test_matrix or differ"),
        on_one_gpu=True,
    ),
    Check(
        "penalties",
        "exact penalties in forward mode, at ZeRO 3 and in pipelines, against a double backward",
        120,
        _tests("tests/distributed/test_forward_mode.py", "-k", "test_matrix or path_length"),
        on_one_gpu=True,
    ),
    Check(
        "ranks of their own",
        "G and D on ranks of their own against plain PyTorch",
        90,
        _tests("tests/distributed/test_split.py", "-k", "test_matrix or games"),
        on_one_gpu=True,
    ),
    Check(
        "transformers",
        "GAT and CAT with all parts of their game against plain PyTorch",
        110,
        _tests("tests/distributed/test_transformers.py"),
        on_one_gpu=True,
    ),
    Check(
        "twice",
        "R1 by a double backward at ZeRO 0 to 2 against plain PyTorch",
        40,
        [*_DOCTOR, "layouts.zero"],
    ),
    Check(
        "forms",
        "each form of each penalty against plain PyTorch",
        40,
        [*_DOCTOR, "layouts.penalties"],
    ),
    Check("gathers", "ZeRO 3 waits for steps, however late they are", 70, _tests("tests/gpu/test_gathers.py")),
    Check("device_skip", "an update waits for nothing; the device skips", 60, _tests("tests/gpu/test_device_skip.py")),
    Check("exact", "every network, differentiated twice, against float64", 70, _tests("tests/gpu/test_exact.py")),
    Check("fused", "StyleGAN2's kernels against torch's operations", 70, _tests("tests/gpu/test_fused.py")),
    Check("digits", "train, kill, resume, sample, evaluate and export", 120, _tests("tests/test_end_to_end.py")),
    Check(
        "deterministic",
        "with deterministic: true a run that other processes resume is the same, bit for bit",
        80,
        _tests("tests/gpu/test_deterministic.py"),
    ),
    Check(
        "state",
        "what two ranks save and resume, bit for bit",
        80,
        _tests("tests/distributed/test_state.py", "-k", "resume"),
        on_one_gpu=True,
    ),
    Check(
        "offload",
        "optimizer and weights on the host against plain PyTorch, and skipped there",
        70,
        _tests("tests/distributed/test_equivalence.py", "tests/distributed/test_state.py", "-k", "offload or host"),
        on_one_gpu=True,
    ),
    Check("biggan", "BigGAN-128 in bf16 and fp16, ZeRO 1 to 3", 240, _tests("tests/gpu/test_gpu.py", "-k", "biggan")),
    Check(
        "memory",
        "BigGAN-128 takes the memory that the planner foretells",
        50,
        [*_DOCTOR, "recipe.updates", *_BIGGAN],
    ),
    Check(
        "variants",
        "cudnn.benchmark, and attention's kernels, at BigGAN-128's shapes",
        40,
        [sys.executable, "-m", "tests.gpu.variants"],
    ),
    Check(
        "kernels",
        "BigGAN-128's Triton kernels beside torch's operations, alone and in an update",
        70,
        [sys.executable, "-m", "tests.gpu.kernels"],
    ),
    Check(
        "speed of BigGAN",
        "eager, compiled and deterministic in bf16, beside plain PyTorch with TF32",
        170,
        [*_BENCH, "train", "--variants", _SPEEDS, *_TIMES, *_BIGGAN],
    ),
    Check(
        "speed of StyleGAN2",
        "with ADA, beside plain PyTorch",
        150,
        [*_BENCH, "train", "--variants", "baseline,zero0", *_LAZY_TIMES, *_STYLEGAN2],
    ),
    Check(
        "speed of R3GAN",
        "with R1 and R2 in every update, beside plain PyTorch",
        120,
        [*_BENCH, "train", "--variants", "baseline,zero0,double_backward", *_TIMES, *_R3GAN],
    ),
    Check(
        "speed of GAT",
        "eager and compiled in bf16, with activations kept, beside plain PyTorch",
        120,
        [*_BENCH, "train", "--variants", "baseline,zero0,compiled", *_TIMES, *_GAT, *_KEPT],
    ),
    Check("graphs", "CUDA graphs train the same", 90, _tests("tests/gpu/test_cuda_graphs.py")),
]
"""In order of risk: what is wrong in one makes those behind it meaningless."""

NCCL_CHECKS = [
    _over_nccl(
        "stages",
        "networks in 2 stages against plain PyTorch",
        90,
        "tests/distributed/test_pipeline.py",
        "test_matrix and 2stages-1replicas",
    ),
    _over_nccl(
        "ranks of their own",
        "G and D on 1 + 1 and 2 + 1 ranks against plain PyTorch",
        90,
        "tests/distributed/test_split.py",
        "test_matrix",
    ),
    _over_nccl(
        "resumed",
        "the first update of a process, and of a resumed run, in each layout, as without waits for the device",
        90,
        "tests/distributed/test_device_waits.py",
    ),
    _over_nccl(
        "product",
        "launch/train.py in each layout learns what one rank learns; ranks that are killed, stop or fail end all",
        200,
        "tests/gpu/test_nccl.py",
    ),
    _over_nccl(
        "ZeRO",
        "two ranks against plain PyTorch at every ZeRO stage",
        90,
        "tests/distributed/test_equivalence.py",
        "test_matrix and 2-2",
    ),
    _over_nccl(
        "four ranks",
        "4 stages, 2 stages of 2 replicas, and networks in other numbers of stages",
        120,
        "tests/distributed/test_pipeline.py",
        "4stages or 2replicas or layouts_may_differ",
    ),
    _over_nccl(
        "overlapped",
        "both networks updated at once, new and resumed",
        90,
        "tests/distributed/test_overlapped.py",
    ),
    _over_nccl(
        "penalties",
        "exact penalties in forward mode, at ZeRO 3, in stages and both",
        120,
        "tests/distributed/test_forward_mode.py",
        "test_matrix or path_length",
    ),
    _over_nccl(
        "state",
        "what two ranks save and resume, bit for bit, and in other layouts",
        120,
        "tests/distributed/test_state.py",
        "resume",
    ),
    _over_nccl(
        "layouts",
        "checkpoints that other layouts continue",
        120,
        "tests/distributed/test_layouts.py",
    ),
]
"""What ``--nccl`` runs, the riskiest first."""


def main(arguments: list[str] | None = None) -> int:
    """Run the checks, and return 1 where one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the checks and stop")
    parser.add_argument("--nccl", action="store_true", help="ranks that share the GPU over NCCL, in place of gloo")
    parser.add_argument("--only", help="names of checks, with commas")
    parser.add_argument("--out", type=Path, default=Path("gpu_checks"), help="directory of what they print")
    parser.add_argument("--jobs", type=_jobs, default=1, help="tests that run at a time (default 1)")
    options = parser.parse_args(arguments)
    checks = NCCL_CHECKS if options.nccl else CHECKS
    chosen = [check for check in checks if not options.only or check.name in options.only.split(",")]
    if options.list or not chosen:
        print("\n".join(aligned([(c.name, c.proves, f"{c.seconds} s") for c in chosen or checks], 2)))
        return 0 if chosen else 2
    if options.nccl:
        os.environ.update(_NCCL)
    options.out.mkdir(parents=True, exist_ok=True)
    shared = [check for check in chosen if options.jobs > 1 and not check.alone]
    first = chosen[: chosen.index(shared[0])] if shared else chosen
    rows = [_row(check, options.out) for check in first]
    with ThreadPoolExecutor(options.jobs) as threads:
        rows += threads.map(lambda check: _row(check, options.out, options.jobs), shared)
    rows += [_row(check, options.out) for check in chosen if check not in (*first, *shared)]
    print("\n".join(aligned(rows, 2)))
    return int(any(result != "passed" for _, result, _ in rows))


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of tests from 1 on, got {text!r}")
    return int(text)


def _row(check: Check, out: Path, jobs: int = 1) -> tuple[str, str, str]:
    """Run one check; return its name, how it went, and how long it took."""
    print(f"== {check.name}: {check.proves}", flush=True)
    start = time.monotonic()
    result = run(check, out / f"{check.name.replace(' ', '_')}.log", jobs)
    return check.name, result, f"{time.monotonic() - start:.0f} s"


def run(check: Check, log: Path, jobs: int = 1) -> str:
    """Run one check, showing what it prints and keeping it in a file; return how it went.

    ``jobs`` checks share the machine: each has its part of the cores, and twice as long.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    environment = {**os.environ, **({"TESTS_ON_GPU": "1"} if check.on_one_gpu else {}), "PYTHONFAULTHANDLER": "1"}
    if jobs > 1:  # threads of one test would wait for those of others
        environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // jobs)))
    prefix = f"{check.name}: " if jobs > 1 else ""
    # What is ended because it takes too long prints the stacks of its threads.
    limit = str(check.seconds * (2 if jobs == 1 else 4))
    bounded = ["timeout", "--signal=ABRT", "--kill-after=10", limit, *check.command]
    with log.open("w", buffering=1) as file:
        file.write(f"$ {' '.join(check.command)}\n")
        command = subprocess.Popen(
            bounded, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert command.stdout is not None
        for line in command.stdout:
            print(f"{prefix}{line}", end="", flush=True)
            file.write(line)
        status = command.wait()
    return {0: "passed", 124: "ran out of time", 137: "ran out of time"}.get(status, f"failed with status {status}")


if __name__ == "__main__":
    sys.exit(main())

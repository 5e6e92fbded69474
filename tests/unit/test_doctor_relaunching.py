"""The command below a fail starts the doctor as it was started."""

from __future__ import annotations

import argparse
import shlex

import pytest

from bigsgan.commands import doctor
from bigsgan.doctor.relaunching import launcher

SLURM = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "1", "WORLD_SIZE": "8", "LOCAL_SIZE": "8"}
ELASTIC = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}
TWO = {**ELASTIC, "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "41234"}
MEETING = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node1:29400 --nproc_per_node 4 --no-python --"
DEEPSPEED = {"WORLD_SIZE": "8", "LOCAL_SIZE": "8", "CROSS_SIZE": "1", "MASTER_ADDR": "node1"}

STARTED = {  # what a rank's environment has, and the words
    "alone": ({}, ""),
    "one task of srun": ({"SLURM_STEP_NUM_TASKS": "1"}, ""),
    "srun": (SLURM, "srun --ntasks 8"),
    "srun on hosts": ({**SLURM, "SLURM_STEP_NUM_NODES": "2"}, "srun --ntasks 8 --nodes 2"),
    "torchrun": (ELASTIC, "torchrun --nproc_per_node 8 --no-python --"),
    "torchrun on hosts": (TWO, f"torchrun {MEETING}"),
    "torchrun by srun": (
        {**TWO, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"},
        f"srun --nodes 2 --ntasks 2 torchrun {MEETING}",
    ),
    "deepspeed": (DEEPSPEED, "deepspeed --num_gpus 8 --no_python"),
    "deepspeed, a GPU each": ({**DEEPSPEED, "LOCAL_SIZE": "1"}, "deepspeed --num_gpus 8 --no_python"),
    "deepspeed on hosts": (
        {**DEEPSPEED, "LOCAL_SIZE": "4", "CROSS_SIZE": "2"},
        "deepspeed --hostfile HOSTFILE --master_addr node1 --no_python",
    ),
    "by hand": ({"WORLD_SIZE": "2", "LOCAL_SIZE": "2"}, "deepspeed --num_gpus 2 --no_python"),
}


@pytest.mark.parametrize("environment, words", STARTED.values(), ids=STARTED)
def test_the_launcher_is_named(environment, words):
    assert shlex.join(launcher(environment)) == words


def test_the_recipe_and_the_run_are_named(monkeypatch):
    for name in {name for environment, _ in STARTED.values() for name in environment}:
        monkeypatch.delenv(name, raising=False)
    options = argparse.Namespace(config="a b.yaml", overrides=["batch=8"], run_directory=None)
    assert shlex.join(doctor._command(options)) == "bigsgan doctor --config 'a b.yaml' batch=8"
    options = argparse.Namespace(config=None, overrides=[], run_directory="runs/x")
    assert shlex.join(doctor._command(options)) == "bigsgan doctor --run runs/x"

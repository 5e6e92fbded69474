"""Pipelines that cannot be, and plans of memory that cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsgan import cli
from bigsgan.config import both_engines
from tests.bad_input import check

pytestmark = pytest.mark.usefixtures("beside_a_recipe")

STAGES = both_engines("pipeline_stages=2")
PIPELINES: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "ZeRO 2": (
        ["engines.discriminator.ds_config=ds_configs/zero2.json"],
        ("engines.discriminator.pipeline_stages", "must be 1 with ZeRO 2, got 2", "use ZeRO 1"),
    ),
    "offload": (
        ["engines.generator.ds_config=offload.json"],
        ("engines.generator.pipeline_stages", "must be 1 with offload, got 2 (in", "a file without offload"),
    ),
    "DeepSpeed's timers": (
        ["engines.generator.ds_config=timers.json"],
        ("{directory}/timers.json: wall_clock_breakdown", "must be false with pipeline_stages", "pipeline_trace.json"),
    ),
    "float32 accumulation at ZeRO 0": (
        ["engines.generator.ds_config=accumulation.json"],
        ("{directory}/accumulation.json: data_types.grad_accum_dtype", "must be bf16 at ZeRO 0", "stage to 1"),
    ),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_what_a_pipeline_cannot_do(name, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    Path("offload.json").write_text('{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}')
    Path("timers.json").write_text('{"wall_clock_breakdown": true}')
    Path("accumulation.json").write_text('{"bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}')
    overrides, (field, *parts) = PIPELINES[name]
    expected = (field.replace("{directory}", str(Path.cwd())), *parts)
    check(capsys, ["train", "--config", "recipe.yaml", "--dry-run", *STAGES, *overrides], *expected)


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_stages_divide_the_ranks(network, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    field = f"engines.{network}.pipeline_stages"
    arguments = ["train", "--config", "recipe.yaml", "--dry-run", "batch=48", f"{field}=2"]
    for world_size in (1, 3):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        ranks = f"must divide the number of ranks ({world_size}), got 2"
        check(capsys, arguments, field, ranks, "start a multiple of 2 ranks")
    for world_size in (2, 6):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        assert cli.main(arguments) == 0
        assert "pipeline_stages: 2" in capsys.readouterr().out


def test_a_penalty_of_a_discriminator_without_stages_may_be_exact(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert cli.main(["train", "--config", "recipe.yaml", "--dry-run", STAGES[0], "objective.r1={weight: 1}"]) == 0


@pytest.mark.parametrize(
    "options, field, problem, remedy",
    [
        (["--gpu-memory", "1e-300"], "--gpu-memory", "must be at least 0.000976562", "give a size in GiB, such as 80"),
        (["--gpu-memory", "inf"], "--gpu-memory", "must be above 0 and below 1e+12 GiB", "give a number such as"),
        (["--gpu-memory", "80", "--gpus", "0"], "--gpus", "must be 1 to 1048576, got 0", "give a number in this range"),
        (["--gpu-memory", "80", "--gpus", "8", "--nodes", "3"], "--nodes", "must divide the number", "give a divisor"),
        (["--gpu-memory", "80", "--pipeline"], "--pipeline", "cannot be combined with --gpu-memory", "give only one"),
        (["--nodes", "2"], "--nodes", "needs --gpu-memory", "add --gpu-memory 80"),
        (["engines.generator.ranks=1"], "--gpus", "must be given with engines.*.ranks", "add --gpus 8"),
        (["--host-memory", "9"], "--host-memory", "needs --gpu-memory", "add --gpu-memory 80"),
    ],
)
def test_memory_that_cannot_be_planned_for(capsys, options, field, problem, remedy):
    check(capsys, ["plan", "--config", "recipe.yaml", *options], field, problem, remedy)

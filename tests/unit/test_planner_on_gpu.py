"""The planner's memory against what torch's allocator held on an H200: docs/reference/benchmarks.md, "On one GPU"."""

from typing import NamedTuple

import pytest

from bigsgan import shipped
from bigsgan.config import both_engines, load_recipe, plan_run
from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict_each

SYNTHETIC = ["data.kind=synthetic", "data.root=null", "metrics=null"]
EVERY = ["objective.r1.every=1", "objective.path_length.every=1"]
NARROW = ["generator.channels=32", "discriminator.channels=64"]


def both_ways(*names):
    return {m: [f"objective.{name}.method={m}" for name in names] for m in ("double_backward", "forward_mode")}


ALONE, STYLED = both_ways("r1"), both_ways("r1", "path_length")
NARROWLY = [
    *SYNTHETIC,
    "batch=32",
    *NARROW,
    "objective.r1={weight: 1}",
    *both_engines("ds_config=ds_configs/zero0.json"),
]


class Measured(NamedTuple):
    """The peak of a run on one rank in updates after the first."""

    recipe: str
    overrides: list[str]
    mebibytes: float


RUNS = {
    "BigGAN-128 in bf16": Measured(
        "biggan128_imagenet", [*SYNTHETIC, "batch=64", *both_engines("ds_config=ds_configs/zero1_bf16.json")], 6_666
    ),
    "BigGAN-128 in fp16": Measured(
        "biggan128_imagenet", [*SYNTHETIC, "batch=64", *both_engines("ds_config=ds_configs/zero1_fp16.json")], 7_594
    ),
    "narrow BigGAN, R1 by a double backward": Measured(
        "biggan128_imagenet", [*NARROWLY, *ALONE["double_backward"]], 14_781
    ),
    "narrow BigGAN, R1 in forward mode": Measured("biggan128_imagenet", [*NARROWLY, *ALONE["forward_mode"]], 12_314),
    "StyleGAN2, R1 and path length by a double backward": Measured(
        "stylegan2_256", [*SYNTHETIC, "batch=16", *EVERY, *STYLED["double_backward"]], 5_587
    ),
    "StyleGAN2, R1 and path length in forward mode": Measured(
        "stylegan2_256", [*SYNTHETIC, "batch=16", *EVERY, *STYLED["forward_mode"]], 5_227
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_a_gpu_held_was_predicted(name):
    recipe, overrides, measured = RUNS[name]
    path = shipped.recipe(recipe)
    plan = plan_run(load_recipe(path, overrides), 1, path.parent, on_gpus=True)
    (prediction,) = predict_each(plan, Traces())
    planned = prediction.updating / 2**20
    print(f"| {name} | {planned:,.0f} | {measured:,} | {planned / measured:.3f} |")
    assert planned == pytest.approx(measured, rel=0.1)

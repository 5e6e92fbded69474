"""Every tiny game in every layout: what each cell overrides, and which of them the product refuses."""

from __future__ import annotations

from typing import Any

from bigsgan.config import NETWORKS, both_engines
from tests.tiny import TINY_GAMES, zero

R1 = "objective.r1={weight: 0.1, every: 2}"
TWICE = "objective.r1={weight: 0.1, every: 2, method: double_backward}"

ADAM = [f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS]
CLIPPED = [*ADAM, *(f"optimizer.{network}.clip_norm=1" for network in NETWORKS)]
PIPELINES = both_engines("pipeline_stages=2")

PRECISIONS: dict[str, Any] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
}
OFFLOADS: dict[str, Any] = {
    "device": {},
    "optimizer": {"offload_optimizer": {"device": "cpu"}},
    "all": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
}
LAYOUTS = {
    f"{stage}-{precision}-{offload}": zero(stage, zero=OFFLOADS[offload], **PRECISIONS[precision])
    for stage in range(4)
    for precision in PRECISIONS
    for offload in OFFLOADS
}
"""DeepSpeed's contents by ``stage-precision-what is on the host``."""

GAMES = {
    "biggan": [R1, *ADAM],
    "biggan_twice": [TWICE, *ADAM],
    **{
        name: [*(line for line in overrides if not line.startswith("optimizer")), *ADAM]
        for name, overrides in TINY_GAMES.items()
    },
}

REFUSED = {
    **{name: "fp16.enabled" for name in LAYOUTS if name.startswith("0-fp16")},
    **{name: "zero_optimization.offload_param.device" for name in LAYOUTS if name[0] in "12" and name.endswith("all")},
    **{
        f"0-{precision}-{offload}": "zero_optimization.offload_optimizer.device"
        for precision in ("fp32", "bf16")
        for offload in ("optimizer", "all")
    },
}
"""Layouts that the product refuses, by the key that it names."""

RUNS = [name for name in LAYOUTS if name not in REFUSED]

IN_CI = ["0-fp32-device", "1-fp16-device", "2-bf16-optimizer", "3-bf16-device", "3-bf16-all"]
"""Layouts in which CI runs every game on one rank, and looks for races on two; it runs every game in pipelines in the
first of them, and a third of the games in the others."""

SHOWN = [name for name in RUNS if name.endswith("bf16-device")]
"""Layouts in which runs also sample, report and save."""

IN_PIPELINES = [name for name in RUNS if name[0] in "01" and name.endswith("device")]
"""Layouts that a network in pipeline stages has."""

NOT_IN_PIPELINES = {
    "biggan_twice": "objective.r1.method",
    "pix2pix_features": "objective.feature_matching",
    "autoencoder": "pipeline.generator_phase",
    "cyclegan": "engines.generator.pipeline_stages",
    "dit": "pipeline.generator_phase",
}
"""Families whose objectives pipelines refuse, by the key that the product names."""

PIPED = [name for name in GAMES if name not in NOT_IN_PIPELINES]


def some(layout: str, games: dict[str, Any]) -> dict[str, Any]:
    """Of games those that CI runs in pipelines in a layout: with the layouts beside it all."""
    return games if layout == IN_CI[0] else dict(list(games.items())[RUNS.index(layout) % 3 :: 3])


def cells(layout: str, *overrides: str) -> dict[str, Any]:
    """Every game in a layout."""
    return {name: ([*lines, *overrides], LAYOUTS[layout]) for name, lines in GAMES.items()}


def cells_in_pipelines(layout: str) -> dict[str, Any]:
    """Every game in a layout, both networks in two stages."""
    return cells(layout, *PIPELINES)

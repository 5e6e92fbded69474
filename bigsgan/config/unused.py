"""Names the keys of a recipe that have no effect beside others, in a layout or without classes, for the user to know.

They stay valid, as one recipe serves several layouts and data sets, and as an override of one key may leave others
without effect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bigsgan.config.metrics import OUTSIDE
from bigsgan.config.run_plan import RunPlan
from bigsgan.config.sections import NETWORKS, Section
from bigsgan.errors import shown

_UNREAD: list[tuple[dict[str, tuple[Any, ...]], list[str]]] = [
    ({"kind": ("sgd",)}, ["betas", "eps"]),
    ({"form": ("exact",)}, ["sigma", "antithetic", "check_every"]),
    ({"weight": (0,)}, ["from_nimg", "ramp_nimg"]),
    ({"target": (None,)}, ["interval"]),
    ({"target": (None,), "final_p": (None,)}, ["ramp_nimg"]),
    ({"block": ("standard", "depthwise_separable", "inverted_residual")}, ["groups"]),
    ({"block": ("standard", "depthwise_separable", "grouped")}, ["expansion"]),
    ({"shared_embedding": (False,)}, ["embedding_size"]),
    ({"architecture": ("pixels",)}, ["depth"]),
    ({"times": (False,)}, ["time_scale"]),
    ({"architecture": ("unet",)}, ["num_blocks"]),
    ({"half_resolutions": (0,)}, ["half_type"]),
    ({"mapping_layers": (0,)}, ["mapping_lr_multiplier"]),
    ({"mbstd_channels": (0,)}, ["mbstd_group"]),
]
"""Values of keys of a section, and the keys beside them that have no effect then, in any section that has both."""


def unused_keys(plan: RunPlan) -> str:
    """Return a line with the keys that differ from their defaults and have no effect; empty if there are none."""
    recipe, found = plan.recipe, defaultdict[str, list[str]](list)
    stages = [plan.placement(network).num_stages for network in NETWORKS]
    without = "without pipeline stages"
    if max(stages) == 1:
        found[without] += recipe.pipeline.changed("pipeline", ["generator_phase", "schedule"])
    elif stages[0] == 1:
        found["without generator stages"] += recipe.pipeline.changed("pipeline", ["generator_phase"])
    if all(recipe.engine(network).accumulation for network in NETWORKS):
        found["with accumulation of both engines"] += recipe.changed("", ["accumulation"])
    for network, engine in plan.engines.items():
        section, optimizer = getattr(recipe, network), getattr(recipe.optimizer, network)
        if engine.placement.num_stages == 1:
            found[without] += engine.section.changed(f"engines.{network}", ["partition"])
        if not recipe.data.condition_width:
            found["without classes"] += section.changed(network, section.of_classes)
        if engine.file.precision != "fp32":
            bf16 = {"bf16", "bf16_stages"} & type(section).model_fields.keys()
            found["without a float32 engine"] += section.changed(network, bf16)
        if getattr(section, "mapping_layers", 1) == 0 and "mapping" in getattr(section, "relu", []):
            found["with mapping_layers=0"].append(f"{network}.relu=[mapping]")
        if optimizer.kind == "rmsprop" and (first := optimizer.betas[0]):
            found["with kind=rmsprop"].append(f"optimizer.{network}.betas.0={first}")
    for name, each in _sections(recipe):
        for values, keys in _UNREAD:
            given = {key: getattr(each, key, ...) for key in values}
            if all(given[key] in values[key] for key in values) and keys[0] in type(each).model_fields:
                texts = [f"{key}={'null' if value is None else shown(value)}" for key, value in given.items()]
                found[f"with {' and '.join(texts)}"] += each.changed(name, keys)
    if metrics := recipe.metrics:
        if all(metric.kind != OUTSIDE for metric in metrics.asked):
            found["without metrics of your own code"] += metrics.changed("metrics", ["num"])
        features, kind, section = metrics.features, recipe.data.kind, "metrics.features"
        if metrics.needs_features:
            found[f"with features {features.resolved(kind)}"] += [f"{section}.{key}" for key in features.unread(kind)]
        else:
            found["without metrics that compare features"] += features.changed(section, type(features).model_fields)
    return "; ".join(f"no effect {when}: {', '.join(keys)}" for when, keys in found.items() if keys)


def _sections(section: Section, name: str = "") -> Iterator[tuple[str, Section]]:
    """Yield the sections inside one, by dotted names."""
    for key in type(section).model_fields:
        if isinstance(each := getattr(section, key), Section):
            own = f"{name}.{key}".strip(".")
            yield own, each
            yield from _sections(each, own)

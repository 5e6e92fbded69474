"""Names the keys of a recipe that have no effect in a layout or without classes, for the user to know.

They stay valid, as one recipe serves several layouts and data sets. What can have no effect in any is refused
(``Section.refuse_changed``).
"""

from __future__ import annotations

from bigsgan.config.run_plan import RunPlan
from bigsgan.config.sections import NETWORKS


def unused_keys(plan: RunPlan) -> str:
    """Return a line with the keys that differ from their defaults and have no effect; empty if there are none."""
    recipe, found = plan.recipe, dict[str, list[str]]()
    stages = [plan.placement(network).num_stages for network in NETWORKS]
    without = "pipeline stages"
    if max(stages) == 1:
        found[without] = recipe.pipeline.changed("pipeline", ["generator_phase", "schedule"])
    elif stages[0] == 1:
        found["generator stages"] = recipe.pipeline.changed("pipeline", ["generator_phase"])
    for network, engine in plan.engines.items():
        section = getattr(recipe, network)
        if engine.placement.num_stages == 1:
            found.setdefault(without, []).extend(engine.section.changed(f"engines.{network}", ["partition"]))
        for what, key in (("half_resolutions", "half_type"), ("mapping_layers", "mapping_lr_multiplier")):
            if getattr(section, what, 1) == 0:
                found.setdefault(what, []).extend(section.changed(network, [key]))
        if not recipe.data.condition_width:
            found.setdefault("classes", []).extend(section.changed(network, section.of_classes))
        if engine.file.precision != "fp32" and section.bf16_key:
            found.setdefault("a float32 engine", []).extend(section.changed(network, [section.bf16_key]))
    return "; ".join(f"no effect without {what}: {', '.join(keys)}" for what, keys in found.items() if keys)

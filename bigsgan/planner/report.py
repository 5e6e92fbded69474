"""Prints the planner's results, as a table and as JSON."""

from __future__ import annotations

import math
import shlex
from typing import Any

from bigsgan.config import NETWORKS
from bigsgan.errors import UserError
from bigsgan.planner.layouts import USABLE, Layout, Resources, Survey
from bigsgan.planner.memory import COMMUNICATOR, Prediction
from bigsgan.table import aligned

GIB = 2**30
_COLUMNS = (
    *("G", "D", "optimizer", "EMA", "buffers", "activations", "gradients", "gathered"),
    *("penalties", "samples", "peak"),
)


def parts(prediction: Prediction) -> dict[str, int]:
    """Bytes on the fullest rank's device, by column.

    ``peak`` is the sum of the columns up to ``gathered``: states that stay, and the fullest moment. ``penalties`` is
    the peak of an update with lazy penalties, 0 if there are none, and ``samples`` that of sampling.
    """
    device = [prediction.states[network].device for network in NETWORKS]
    fullest = prediction.fullest
    penalized = [prediction.stays + peak.total for peak in prediction.penalized.values()]
    values = (
        *(own.get("weights", 0) + own.get("masters", 0) for own in device),
        sum(own.get("optimizer", 0) for own in device),
        0 if "average" in prediction.host else prediction.ema,
        prediction.buffers + sum(own.get("buffers", 0) for own in device),
        fullest.activations,
        fullest.gradients + sum(own.get("gradients", 0) for own in device),
        fullest.gathered,
        max(penalized, default=0),
        prediction.stays + prediction.samples.total,
        prediction.peak,
    )
    return dict(zip(_COLUMNS, values, strict=True))


def table(survey: Survey, resources: Resources) -> str:
    """A table of all layouts, in GiB or MiB of the fullest rank; empty cells are 0."""
    layouts = [*([survey.own] if survey.own else []), *survey.layouts]
    is_small = max((layout.prediction.peak for layout in layouts), default=0) < GIB
    unit, name = (2**20, "MiB") if is_small else (GIB, "GiB")
    rows = [[f"memory of the fullest rank, {name}", "micro-batches", *_COLUMNS, "host of a node", "communicators", ""]]
    for layout in layouts:
        sizes = [f"{size / unit:.2f}" if size else "" for size in parts(layout.prediction).values()]
        host = resources.on_node(layout.prediction)
        shape = f"{layout.accumulation} x {layout.micro_batch}"
        on_host = f"{host / unit:.1f}" if host else ""
        num = layout.prediction.communicators
        connected = f"{num} ({num * COMMUNICATOR / unit:.2f})" if num else "0"
        rows.append([layout.label, shape, *sizes, on_host, connected, "fits" if layout.fits else ""])
    lines = aligned(rows)
    lines += [f"{name}: not possible, {reason}" for name, reason in survey.refused.items()]
    return "\n".join(lines)


def advice(survey: Survey) -> str:
    """The cheapest layout that fits, as overrides to paste."""
    assert survey.best is not None
    overrides = shlex.join(survey.best.overrides) or "the recipe as it stands"
    return f"cheapest that fits: {survey.best.label}\n{overrides}"


def check(survey: Survey, resources: Resources) -> None:
    """Raise an error that says what would be needed if no layout fits.

    Raises:
        UserError: No layout fits.
    """
    if survey.best is not None:
        return
    memory = resources.gpu_memory / GIB
    closest = survey.closest
    if closest is None:
        reasons = "; ".join(dict.fromkeys(survey.refused.values()))
        raise UserError("--gpus", resources.gpus, "has no layout that can be planned", "change the recipe", reasons)
    needed = closest.prediction.peak / USABLE / GIB
    problem = f"must be at least {_rounded_up(needed)} GiB for the smallest layout, {closest.label}"
    remedy = f"give --gpu-memory {_rounded_up(needed)}, more --gpus, or a smaller network"
    if needed <= memory:
        host = resources.on_node(closest.prediction) / USABLE / GIB
        given = float(f"{(resources.host_memory or 0) / GIB:.3g}")
        problem = f"must be at least {_rounded_up(host)} GiB on each node for {closest.label}"
        raise UserError("--host-memory", given, problem, "give more, or use more nodes")
    raise UserError("--gpu-memory", float(f"{memory:.3g}"), problem, remedy)


def _rounded_up(gib: float) -> str:
    """A number rounded up to three digits."""
    step = 10.0 ** (math.floor(math.log10(gib)) - 2)
    return f"{math.ceil(gib / step) * step:.4g}"


def as_json(survey: Survey, resources: Resources) -> dict[str, Any]:
    """A survey as JSON, in bytes."""

    def described(layout: Layout) -> dict[str, Any]:
        prediction = layout.prediction
        return {
            "name": layout.label,
            "overrides": layout.overrides,
            "accumulation": layout.accumulation,
            "micro_batch": layout.micro_batch,
            "fits": layout.fits,
            "device": parts(prediction),
            "host": prediction.host,
            "host_spare": prediction.spare,
            "host_of_a_node": resources.on_node(prediction),
            "communicators": prediction.communicators,
            "communicator_bytes": prediction.communicators * COMMUNICATOR,
            "moments": {name: prediction.stays + peak.total for name, peak in prediction.update.items()},
            "first_update": prediction.stays + prediction.begins if prediction.begins else None,
        }

    return {
        "gpus": resources.gpus,
        "nodes": resources.nodes,
        "gpu_memory": resources.gpu_memory,
        "usable": USABLE,
        "as_it_stands": described(survey.own) if survey.own else None,
        "layouts": [described(layout) for layout in survey.layouts],
        "refused": survey.refused,
        "recommended": survey.best.overrides if survey.best else None,
    }

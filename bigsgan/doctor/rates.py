"""The reference's optimizers, and learning rates and weights along their schedules."""

from __future__ import annotations

import math
from typing import Any

import torch


def make_optimizer(section: Any, network: Any) -> torch.optim.Optimizer:
    """torch's own optimizer for a network."""
    parameters: Any = list(network.parameters()) or [torch.zeros(1)]  # without D nothing learns
    if section.groups or section.weight_decay_on == "matrices":
        everything, decay = section.weight_decay_on == "all", section.weight_decay
        parameters = [
            {"params": [each], "name": name, "weight_decay": decay if everything or each.dim() >= 2 else 0.0}
            for name, each in network.named_parameters()
        ]
    if section.kind == "sgd":
        return torch.optim.SGD(parameters, section.lr, weight_decay=section.weight_decay)
    kind = torch.optim.AdamW if section.kind == "adamw" else torch.optim.Adam
    return kind(parameters, section.lr, tuple(section.betas), section.eps, section.weight_decay)


def own_rate(groups: Any, name: str, nimg: int) -> float:
    """Relative learning rate of a parameter; the names of modules, such as layers.0.*, overlap in no recipe here."""
    own = [group for group in groups if name.startswith(group.parameters.removesuffix("*"))]
    frozen = any(group.frozen_from_nimg is not None and nimg >= group.frozen_from_nimg for group in own)
    return 0.0 if frozen else math.prod(group.lr_multiplier for group in own)


def moved(start: float, end: float, nimg: int, over: int) -> float:
    """Go from start to end over so many images, along a cosine whose angle goes from 0 to 180 degrees."""
    return start + (end - start) * (1 - math.cos(math.radians(180 * min(nimg, over) / over))) / 2

"""The optimizers that a recipe can name, as torch and DeepSpeed have them."""

from __future__ import annotations

import torch

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.sections import Optimizer
from bigsgan.engines.native_ops import build_cpu_adam
from bigsgan.models.network import LayerStack


def build_optimizer(section: Optimizer, stack: LayerStack, file: DeepSpeedFile) -> torch.optim.Optimizer:
    """Make the optimizer of a network's parameters, or of the part of them that this rank has."""
    parameters = list(stack.parameters())
    lr, decay, eps = section.lr, section.weight_decay, section.eps
    beta1, beta2 = section.betas
    if section.kind == "sgd":
        return torch.optim.SGD(parameters, lr, momentum=section.momentum, weight_decay=decay, fused=True)
    if section.kind == "rmsprop":
        return torch.optim.RMSprop(parameters, lr, beta2, eps, decay, section.momentum, foreach=True)
    if file.offload_optimizer != "none" and file.content.get("zero_force_ds_cpu_optimizer", False):
        cpu_adam = build_cpu_adam()
        return cpu_adam(parameters, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, adamw_mode=False)
    return torch.optim.Adam(parameters, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, fused=True)


def num_state_tensors(section: Optimizer) -> int:
    """How many numbers the optimizer keeps for each weight."""
    momentum = section.kind != "adam" and section.momentum > 0
    return {"adam": 2, "rmsprop": 1, "sgd": 0}[section.kind] + momentum

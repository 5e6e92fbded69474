"""The optimizers that a recipe can name, as torch and DeepSpeed have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

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
    kind = AdamWithoutMomentum if _has_no_momentum(section, file) else torch.optim.Adam
    return kind(parameters, lr, betas=(beta1, beta2), eps=eps, weight_decay=decay, fused=True)


def num_state_tensors(section: Optimizer, file: DeepSpeedFile) -> int:
    """How many numbers the optimizer keeps for each weight."""
    if section.kind == "adam":
        return 1 if _has_no_momentum(section, file) else 2
    return (section.kind == "rmsprop") + (section.momentum > 0)


def _has_no_momentum(section: Optimizer, file: DeepSpeedFile) -> bool:
    """Whether Adam's first moment is the gradient; DeepSpeed's own Adam and its swapping to NVMe keep one anyway."""
    is_deepspeeds = file.offload_optimizer != "none" and file.content.get("zero_force_ds_cpu_optimizer", False)
    return section.kind == "adam" and section.betas[0] == 0 and not is_deepspeeds and not file.uses_nvme


class AdamWithoutMomentum(torch.optim.Adam):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) with beta1 = 0, whose first moment is the gradient and is not kept.

    A weight then costs 4 bytes less. The gradients stand in for the moment in torch's fused kernel, which leaves the
    gradient, with weight decay, in them.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update the parameters that have gradients.

        Args:
            closure: Not used; it is in the signature that DeepSpeed and learning rate schedules expect.
        """
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self._started(parameter) for parameter in parameters]
            gradients = [parameter.grad for parameter in parameters]
            adam(
                parameters,
                gradients,
                exp_avgs=gradients,
                exp_avg_sqs=[state["exp_avg_sq"] for state in states],
                max_exp_avg_sqs=[],
                state_steps=[state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=0.0,
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _started(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def fit_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Make the state of another kind of Adam fit: a first moment comes or goes with beta1, and with offload."""
    if isinstance(optimizer, AdamWithoutMomentum):
        return {kind: value for kind, value in state.items() if kind != "exp_avg"}
    keeps = "exp_avg_sq" in state and "betas" in optimizer.param_groups[0]
    if keeps and "exp_avg" not in state:
        return {**state, "exp_avg": torch.zeros_like(state["exp_avg_sq"])}
    return state

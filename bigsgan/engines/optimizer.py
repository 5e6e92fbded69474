"""The optimizers that a recipe can name, by torch and by DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from torch import Tensor
from torch.optim.adam import adam

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.sections import Optimizer
from bigsgan.engines import parameter_groups
from bigsgan.engines.base import Piece, Rates
from bigsgan.engines.deepspeed.native_ops import CPU_ADAM, build_once, needs_cpu_adam
from bigsgan.engines.muon import LR_MULTIPLIER, Muon
from bigsgan.engines.parameter_groups import Groups, grouped, whole_shape
from bigsgan.models.network import LayerStack


def build_optimizer(
    section: Optimizer, stack: LayerStack, file: DeepSpeedFile, at_a_time: int | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of a network's parameters, or of this rank's part of them.

    Args:
        section: The recipe's section about the optimizer.
        stack: The network, or its layers on this rank.
        file: The DeepSpeed file.
        at_a_time: Largest number of elements in a group of parameters; None for no limit.
    """

    def build(groups: Groups) -> torch.optim.Optimizer:
        decoupled = section.kind != "adam"
        if section.is_adam and needs_cpu_adam(file):
            build_once(CPU_ADAM)
            return DeepSpeedCPUAdam(groups, **_adam_options(section), adamw_mode=decoupled)
        if _has_no_momentum(section, file):
            return AdamWithoutMomentum(groups, **_adam_options(section), fused=True, decoupled_weight_decay=decoupled)
        return _build_torchs(section, groups)

    return _build_on_groups(section, stack, build, at_a_time)


def build_torch_optimizer(section: Optimizer, stack: LayerStack) -> torch.optim.Optimizer:
    """Make torch's own optimizer of a network's parameters."""
    return _build_on_groups(section, stack, partial(_build_torchs, section))


def _build_on_groups(
    section: Optimizer,
    stack: LayerStack,
    build: Callable[[Groups], torch.optim.Optimizer],
    at_a_time: int | None = None,
) -> torch.optim.Optimizer:
    """Give ``build`` groups of the parameters; with Muon, of those that are not its matrices."""

    def cut(groups: Groups) -> Groups:
        if at_a_time is None:
            return groups
        return [{**group, "params": part} for group in groups for part in grouped(group["params"], at_a_time)]

    matrices = dict(stack.named_matrices()) if section.kind == "muon" else {}
    others = [(name, parameter) for name, parameter in stack.named_parameters() if name not in matrices]
    rest = build(cut(parameter_groups.divided(section, others)))
    if not matrices:
        return rest
    own = [
        {"weight_decay": section.weight_decay, **group} for group in parameter_groups.divided(section, matrices.items())
    ]
    return Muon(cut(own), rest, section.lr, section.matrices)


def _build_torchs(section: Optimizer, groups: Groups) -> torch.optim.Optimizer:
    lr, decay, eps, beta2 = section.lr, section.weight_decay, section.eps, section.betas[1]
    if section.kind == "sgd":
        return torch.optim.SGD(groups, lr, momentum=section.momentum, weight_decay=decay, fused=True)
    if section.kind == "rmsprop":
        return torch.optim.RMSprop(groups, lr, beta2, eps, decay, section.momentum, foreach=True)
    adam_of_kind = torch.optim.Adam if section.kind == "adam" else torch.optim.AdamW
    return adam_of_kind(groups, **_adam_options(section), fused=True)


def _adam_options(section: Optimizer) -> dict[str, Any]:
    betas = section.betas[0], section.betas[1]
    return {"lr": section.lr, "betas": betas, "eps": section.eps, "weight_decay": section.weight_decay}


def num_state_tensors(section: Optimizer, file: DeepSpeedFile) -> int:
    """Return how many numbers the optimizer keeps for each weight; with Muon one for each in its matrices."""
    if section.has_adam:
        return 1 if _has_no_momentum(section, file) else 2
    return (section.kind == "rmsprop") + (section.momentum > 0)


def num_state_elements(section: Optimizer, file: DeepSpeedFile, numel: int, in_matrices: int) -> int:
    """Return how many numbers the optimizer keeps for ``numel`` weights, of which some are in a stack's matrices."""
    each = num_state_tensors(section, file)
    return numel * each - (in_matrices * (each - 1) if section.kind == "muon" else 0)


def _has_no_momentum(section: Optimizer, file: DeepSpeedFile) -> bool:
    """Whether Adam's first moment is the gradient; DeepSpeed's own Adam and its swapping to NVMe keep one anyway.

    Not with Adam's weight decay, which is added to the gradient and would stay there: DeepSpeed does not always rewrite
    its buffers of gradients. AdamW's decay is not added to the gradient.
    """
    is_gradient = section.has_adam and section.betas[0] == 0 and (section.weight_decay == 0 or section.kind != "adam")
    return is_gradient and not needs_cpu_adam(file) and not file.uses_nvme


class AdamWithoutMomentum(torch.optim.Adam):
    """Adam (Kingma and Ba 2015, arXiv 1412.6980) with beta1 = 0, whose first moment is the gradient and is not kept.

    A weight then costs 4 bytes less. Torch's fused kernel takes the gradients as the first moment. It does not change
    them, except that it adds weight decay that is not decoupled.
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
                decoupled_weight_decay=group["decoupled_weight_decay"],
                eps=group["eps"],
                maximize=False,
                found_inf=getattr(self, "found_inf", None),  # gradient scalers set it, as on torch's own
            )

    def _started(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state


def set_rates(optimizer: Any, rates: Rates) -> None:
    """Set an optimizer's rates; it may be DeepSpeed's around one of torch's."""
    for group in optimizer.param_groups:
        own = rates.factors[group[parameter_groups.NUMBER]] if parameter_groups.NUMBER in group else 1.0
        group["lr"] = rates.lr * own * group.get(LR_MULTIPLIER, 1.0)
        if rates.beta2 is not None and "betas" in group:
            group["betas"] = (group["betas"][0], rates.beta2)


def spread_matrices(
    optimizer: torch.optim.Optimizer,
    network: LayerStack,
    tensors: Sequence[Tensor],
    pieces: Sequence[Sequence[Piece]],
    **place: Any,
) -> None:
    """Tell Muon where the network's matrices lie, see Muon.spread. Every rank of the network's replicas calls this."""
    if isinstance(optimizer, Muon):
        shapes = {name: whole_shape(matrix) for name, matrix in network.named_matrices()}
        optimizer.spread(tensors, pieces, shapes, **place)


def state_of(optimizer: torch.optim.Optimizer, tensor: Tensor, state: dict[str, Any]) -> dict[str, Any]:
    """Return what one of an optimizer's tensors needs of the state that a checkpoint has of it."""
    if isinstance(optimizer, Muon):
        return fit_state(optimizer.rest, optimizer.state_of(tensor, state))
    return fit_state(optimizer, state)


def fit_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """Fit the state of another kind of Adam: the first moment is added or dropped, as beta1 and offload ask."""
    if isinstance(optimizer, AdamWithoutMomentum):
        return {kind: value for kind, value in state.items() if kind != "exp_avg"}
    keeps = "exp_avg_sq" in state and "betas" in optimizer.defaults
    if keeps and "exp_avg" not in state:
        return {**state, "exp_avg": torch.zeros_like(state["exp_avg_sq"])}
    return state

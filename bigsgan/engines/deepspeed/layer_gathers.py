"""ZeRO 3 that gathers a network layer by layer, so that gathers lie outside of compiled layers.

DeepSpeed (0.19.8, zero/parameter_offload.py) gathers and releases in hooks of each module. Its leaf modules, which have
hooks alone, would reduce gradients also where D is differentiated with frozen parameters (stage3.py:1533).
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from torch import Tensor, nn

from bigsgan.models.network import LayerStack


def gather_by_layer(engine: DeepSpeedEngine, network: LayerStack) -> None:
    """Let a layer's hooks gather its modules' parameters too, and remove DeepSpeed's hooks of these modules.

    A layer that predicts a teacher's features keeps them: its modules are called without the layer.
    """
    hooked = set()
    for layer in gathered_layers(network):
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        for parameter in layer.parameters():
            if id(parameter) not in own:
                register_external_parameter(layer, parameter)
        inner = [module for module in layer.modules() if module is not layer]
        hooked |= {id(hooks) for each in inner for hooks in (each._forward_pre_hooks, each._forward_hooks)}
    offload: Any = engine.optimizer.parameter_offload
    for handle in (*offload.forward_hooks, *offload.backward_hooks):
        if id(handle.hooks_dict_ref()) in hooked:
            handle.remove()


def gathered_layers(network: LayerStack) -> list[nn.Module]:
    """List the layers that ZeRO 3 can gather as a whole."""
    return [layer for layer in network.layers.values() if getattr(layer, "teacher", None) is None]


class Hooked(nn.Module):
    """A layer whose hooks run around its compiled forward pass."""

    def __init__(self, layer: nn.Module, forward: Any) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, *carry: Tensor) -> tuple[Tensor, ...]:
        """Call the layer, with the compiled function in place of its own."""
        vars(self.layer)["forward"] = self._forward
        try:
            outputs: tuple[Tensor, ...] = self.layer(*carry)
            return outputs
        finally:
            del vars(self.layer)["forward"]

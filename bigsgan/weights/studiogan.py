"""State dicts of POSTECH-CVLab/PyTorch-StudioGAN: its BigGAN (backbone big_resnet) and its StyleGAN2.

Its BigGAN differs from BigGAN-PyTorch's in names, in batch norm's eps of 1e-4, in G's widths at 64x64, in D's
shortcuts, whose input an in-place ReLU overwrites, and in spectral norm, which is torch's and stores both singular
vectors. Its StyleGAN2 has stylegan2-ada-pytorch's names, except for D's last layer. Where its
shapes do not tell, we assume float32, which there has no clamp (src/models/model.py), and groups of 4 for the minibatch
deviation, though its configuration of CIFAR-10 has 32. ``sources.SOURCES`` lists the errors raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bigsgan.errors import UserError
from bigsgan.weights import biggan_pytorch, stylegan

State = Mapping[str, Tensor]

_EPS = {"norm_eps": 1e-4, "output_norm_eps": 1e-4}
_NO_CLAMP = {"conv_clamp": None}
_ENDS = {
    "linear0": "linear", "linear1": "linear", "embedding": "embed",
    "bn4": "output_layer.0", "conv2d5": "output_layer.2",
}  # fmt: skip
_INNER = {
    "conv2d0": "conv_sc", "conv2d1": "conv1", "conv2d2": "conv2",
    "conv1x1_theta": "theta", "conv1x1_phi": "phi", "conv1x1_g": "g", "conv1x1_attn": "o",
}  # fmt: skip
_LEAVES = {
    "weight_orig": "weight", "weight_u": "u", "weight_v": "v",
    "running_mean": "stored_mean", "running_var": "stored_var", "sigma": "gamma",
}  # fmt: skip
_REFUSED = {
    r".*\.conv2d4\.": "is of a backbone big_resnet_deep",
    r"(linear2|linear_mi|embedding_mi|info_\w+)\.": "is of another conditioning than projection",
    r"synthesis\.(L\d+_|input\.)": "is of a StyleGAN3 generator",
}


def generator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``generator``."""
    return _module(state).generator_section(_checked(state)) | (_NO_CLAMP if _is_stylegan(state) else _EPS)


def discriminator_section(state: State) -> dict[str, Any]:
    """Keys of a recipe's ``discriminator``."""
    own = _NO_CLAMP if _is_stylegan(state) else {"rectified_shortcut": True}
    return _module(state).discriminator_section(_checked(state)) | own


def untold(network: str, section: Mapping[str, Any], state: State) -> tuple[str, ...]:
    """Keys of a ``network``'s section that a state dict does not tell, and BigGAN's activation."""
    if _is_stylegan(state):
        return tuple(key for key in stylegan.untold(network, section, state) if key != "relu")
    return (f"{network[0]}_act_fn=ReLU",)


def data_section(state: State) -> dict[str, int]:
    """Keys of a recipe's ``data`` that follow from either network's shapes."""
    return _module(state).data_section(_checked(state))


def generator_state(state: State) -> dict[str, Tensor]:
    """State dict of our generator."""
    return _module(state).generator_state(_checked(state))


def discriminator_state(state: State) -> dict[str, Tensor]:
    """State dict of our discriminator."""
    return _module(state).discriminator_state(_checked(state))


def _is_stylegan(state: State) -> bool:
    return "synthesis.b4.const" in state or "b4.conv.weight" in state


def _module(state: State) -> Any:
    return stylegan if _is_stylegan(state) else biggan_pytorch


def _checked(state: State) -> dict[str, Tensor]:
    """Rename all entries to those of the project that the network comes from, and refuse unsupported networks."""
    for name in state:
        for beginning, problem in _REFUSED.items():
            if re.match(beginning, name):
                remedy = "give a BigGAN (big_resnet) with projection, or a StyleGAN2 whose D is SPD or unconditional"
                raise UserError("weights", name, f"{problem}, which is not supported", remedy)
    if _is_stylegan(state):
        return {re.sub(r"^linear1\.", "b4.out.", name): tensor for name, tensor in state.items()}
    modules = {name.partition(".")[0] for name in state}
    for end, embedding, remedy in (("linear0", "shared", "g_cond_mtd cBN"), ("linear1", "embedding", "d_cond_mtd PD")):
        if end in modules and embedding not in modules:
            problem = "has no embedding of the classes, without which a BigGAN is not supported"
            raise UserError("weights", f"{end}.*", problem, f"give a network trained with {remedy}")
    return {_renamed(name): tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")}


def _renamed(name: str) -> str:
    """BigGAN-PyTorch's name of an entry such as ``blocks.0.0.bn1.bn.running_mean`` or ``linear0.weight_orig``."""
    *modules, leaf = name.split(".")
    if modules[-1:] == ["bn"]:
        modules.pop()
    if modules == ["bn4"]:
        leaf = {"weight": "gain"}.get(leaf, leaf)
    names = _INNER if modules[:1] == ["blocks"] else _ENDS
    return ".".join([*(names.get(module, module) for module in modules), _LEAVES.get(leaf, leaf)])

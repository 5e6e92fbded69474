"""A network's training passes through torch.compile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch._dynamo import config as dynamo
from torch.utils._triton import has_triton

from bigsgan.errors import UserError
from bigsgan.models.network import LayerStack

_VARIANTS = 16
"""Of one piece of code: by whether state moves, what has gradients, and the number of samples in each phase."""


def compiled(network: LayerStack, unit: str) -> Callable[..., Any]:
    """The network's function, compiled for each number of samples that it meets; the parameters stay the network's.

    Args:
        network: It has one backward pass: nodes that torch.compile makes cannot be differentiated again.
        unit: ``whole``, or ``layers`` for one after the other, whose gradients then arrive one layer after the other.
    """
    num_graphs = _VARIANTS * len(network.layers)  # layers share code, which torch else gives up after 8 graphs of
    dynamo.recompile_limit = max(dynamo.recompile_limit, num_graphs)
    dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, 2 * num_graphs)
    if unit == "whole":
        return torch.compile(network, dynamic=False)
    layers: Callable[..., Any] = network.wrapped(lambda layer: torch.compile(layer, dynamic=False))
    return layers


def check_compiler(network: str, unit: str) -> None:
    """Look for what torch.compile needs on this machine.

    Args:
        network: Which.
        unit: What its recipe wants to compile.

    Raises:
        UserError: It is not there.
    """
    field = f"engines.{network}.compile"
    if get_accelerator().device_name() == "cpu":
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            problem = f"needs a C++ compiler, and there is no {compiler}"
            raise UserError(field, unit, problem, f"install one, name one in CXX, or set {field}=none")
    elif not has_triton():
        raise UserError(field, unit, "needs Triton for this device", f"install it, or set {field}=none")

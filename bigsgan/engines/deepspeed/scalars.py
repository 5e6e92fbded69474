"""Lets DeepSpeed broadcast parameters without dimensions, such as a gain.

It broadcasts parameters as bytes, and torch cannot view a scalar as another type (deepspeed 0.19.8, runtime/engine.py:
_broadcast_model, runtime/zero/partition_parameters.py: _zero_init_param). Meanwhile they are vectors of one element.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from torch import nn


@contextmanager
def broadcasting_scalars() -> Iterator[None]:
    """Within the block, engines and ``zero.Init`` can be made of networks with such parameters."""
    broadcast, convert = DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param

    def broadcast_model(engine: DeepSpeedEngine) -> None:
        scalars = [parameter for parameter in engine.module.parameters() if parameter.dim() == 0]
        for parameter in scalars:
            parameter.data = parameter.data.view(1)
        broadcast(engine)
        for parameter in scalars:
            parameter.data = parameter.data.view(())

    def convert_parameter(self: Init, parameter: nn.Parameter) -> None:
        convert(self, parameter)  # which notes its shape; what is gathered later has it again
        if parameter.dim() == 0:
            parameter.data = parameter.data.view(1)

    DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param = broadcast_model, convert_parameter
    try:
        yield
    finally:
        DeepSpeedEngine._broadcast_model, Init._convert_to_deepspeed_param = broadcast, convert

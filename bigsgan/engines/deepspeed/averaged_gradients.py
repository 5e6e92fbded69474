"""Averages gradients at ZeRO 0 over the replicas, bucket by bucket, during the backward pass.

By itself DeepSpeed (0.19.8, runtime/engine.py) averages them after the backward pass, one collective after the other,
in copies of up to 500 million elements, a size that no file can change. Here a group's gradients are copied into one
tensor as soon as the last one arrives. That tensor travels during the backward pass, and the gradients become views of
it. After the backward pass it may travel on until somebody needs the gradients (engines/zero.py).

tests/distributed/test_deepspeed_collectives.py fails first if a later version changes the private parts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from bigsgan.engines.deepspeed.gradient_groups import GradientGroup, use_here
from bigsgan.engines.deepspeed.reports import collectives
from bigsgan.engines.parameter_groups import grouped


class AveragedGradients:
    """Replaces an engine's own reductions; the engine's method and the parameters' hooks refer to it.

    Attributes:
        overlaps: Whether gradients travel during the backward pass, and after it until ``wait``; else they are only
            sent after it.
    """

    def __init__(self, engine: DeepSpeedEngine, at_a_time: int, overlaps: bool, replayed: bool = False) -> None:
        """Replace the engine's reductions.

        Args:
            engine: An engine at ZeRO 0, with more than one replica.
            at_a_time: Largest number of elements in a group of several parameters.
            overlaps: Whether gradients travel during the backward pass.
            replayed: Whether gradients come from CUDA graphs.
        """
        self._engine, self.overlaps = engine, overlaps
        parameters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        parts, group = grouped(parameters, at_a_time), engine.data_parallel_group
        self._groups = [GradientGroup(part, group, replayed=replayed) for part in parts]
        self._under_way: dict[int, tuple[dist.Work, Tensor]] = {}
        self._hooks = []
        if overlaps and len(self._groups) > 1:  # a single group is complete only at the end
            for i, group in enumerate(self._groups):
                for parameter in group.parameters:
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(partial(self._arrived, i)))
        engine.buffered_allreduce_fallback = self._start_all

    def wait(self) -> None:
        """Wait for the means, and make them the parameters' gradients. Call this before reading gradients."""
        while self._under_way:
            i, (work, mean) = self._under_way.popitem()
            work.wait()
            self._give(self._groups[i], mean)

    def close(self) -> None:
        """Remove the parameters' hooks."""
        for hook in self._hooks:
            hook.remove()

    def _arrived(self, i: int, parameter: Tensor) -> None:
        if self._engine.is_gradient_accumulation_boundary() and self._groups[i].note_arrival(parameter):
            self._start(i)

    def _start_all(self, grads: Any = None, elements_per_buffer: int = 0) -> None:
        """Send the groups not yet sent, with zeros for missing gradients; the arguments are DeepSpeed's."""
        for i in reversed(range(len(self._groups))):  # the later layers' gradients came first
            if i not in self._under_way:
                self._start(i)

    def _start(self, i: int) -> None:
        engine, group = self._engine, self._groups[i]
        gradient = group.take("grad").to(engine.communication_data_type)
        if engine.gradient_average:
            gradient.div_(group.num_ranks)
        work = collectives().all_reduce(gradient, group=group.process_group, async_op=True)
        assert work is not None
        self._under_way[i] = work, gradient

    def _give(self, group: GradientGroup, mean: Tensor) -> None:
        use_here(mean)
        pieces = mean.split([parameter.numel() for parameter in group.parameters])
        for parameter, piece in zip(group.parameters, pieces, strict=True):
            parameter.grad = piece.view(parameter.shape).to(parameter.dtype)

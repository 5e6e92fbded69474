"""Parameters whose gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientGroup:
    """Some parameters, in one flat tensor.

    Attributes:
        parameters: In the order of the flat tensor.
        padding: Elements at its end that belong to none.
        process_group: The ranks.
        num_ranks: How many.
        num_arrived: Gradients that came since the group was reduced.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], process_group: Any, padding: int = 0) -> None:
        self.parameters, self.process_group, self.num_arrived = list(parameters), process_group, 0
        self.num_ranks = dist.get_world_size(process_group)
        self.padding = padding
        self._streams: set[torch.cuda.Stream] = set()

    def note_arrival(self, parameter: Tensor) -> bool:
        """Count a gradient, and the CUDA stream that it was computed on: compiled passes have several.

        Returns:
            Whether it was the last.
        """
        self.num_arrived += 1
        if parameter.is_cuda:
            self._streams.add(torch.cuda.current_stream())
        return self.num_arrived == len(self.parameters)

    def take(self, attribute: str) -> Tensor:
        """The gradients in one line, which the parameters then have no more; zeros where there is none."""
        pieces = []
        for parameter in self.parameters:
            gradient = getattr(parameter, attribute)
            pieces.append(torch.zeros_like(parameter).view(-1) if gradient is None else gradient.reshape(-1))
            setattr(parameter, attribute, None)
        if self._streams:
            self._wait_for_streams(pieces)
        if self.padding:
            pieces.append(pieces[0].new_zeros(self.padding))
        self.num_arrived = 0
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _wait_for_streams(self, pieces: Sequence[Tensor]) -> None:
        current = torch.cuda.current_stream()
        for stream in self._streams - {current}:
            current.wait_stream(stream)
        if self._streams != {current}:
            for piece in pieces:
                piece.record_stream(current)  # its own may hand its memory out again before this one has read it
        self._streams.clear()


def use_here(*tensors: Tensor) -> None:
    """Let tensors be used on the current CUDA stream, which need not be the one on which they were made."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

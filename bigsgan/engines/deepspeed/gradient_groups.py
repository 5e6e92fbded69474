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

    def __init__(
        self, parameters: Sequence[nn.Parameter], process_group: Any, padding: int = 0, replayed: bool = False
    ) -> None:
        """Begin without gradients.

        Args:
            parameters: In order.
            process_group: The ranks.
            padding: See above.
            replayed: Whether gradients come from CUDA graphs, whose memory neither travels nor knows of other streams
                (engines/replays.py).
        """
        self.parameters, self.process_group, self.num_arrived = list(parameters), process_group, 0
        self.num_ranks = dist.get_world_size(process_group)
        self.padding, self._replayed = padding, replayed
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
        others = self._wait_for_streams()
        if others and not self._replayed:
            use_here(*pieces)  # their own may hand their memory out again before this one has read it
        if self.padding:
            pieces.append(pieces[0].new_zeros(self.padding))
        self.num_arrived = 0
        if self._replayed:
            line = torch.cat(pieces)  # a copy of a single one too
            for stream in others:
                stream.wait_stream(torch.cuda.current_stream())  # a graph that it replays next may write there
            return line
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _wait_for_streams(self) -> set[torch.cuda.Stream]:
        """Let the current stream wait for the others that gradients were computed on, and return these."""
        if not self._streams:
            return set()
        current = torch.cuda.current_stream()
        others = self._streams - {current}
        for stream in others:
            current.wait_stream(stream)
        self._streams.clear()
        return others


def use_here(*tensors: Tensor) -> None:
    """Let tensors be used on the current CUDA stream, which need not be the one on which they were made."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

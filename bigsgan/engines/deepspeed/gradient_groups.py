"""Parameters whose gradients travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GradientGroup:
    """Parameters whose gradients are reduced as one flat tensor.

    Attributes:
        parameters: In the order of the flat tensor.
        padding: Elements at its end that belong to no parameter.
        process_group: The ranks that reduce it.
        num_ranks: Number of these ranks.
        num_arrived: Number of gradients that arrived since the group was reduced.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], process_group: Any, padding: int = 0, replayed: bool = False
    ) -> None:
        """Begin without gradients.

        Args:
            parameters: In the order of the flat tensor.
            process_group: The ranks that reduce it.
            padding: Elements at its end that belong to no parameter.
            replayed: Whether gradients come from CUDA graphs. Those are copied before they travel to other ranks or
                other streams use them (engines/replays.py).
        """
        self.parameters, self.process_group, self.num_arrived = list(parameters), process_group, 0
        self.num_ranks = dist.get_world_size(process_group)
        self.padding, self._replayed = padding, replayed
        self._streams: set[torch.cuda.Stream] = set()

    def note_arrival(self, parameter: Tensor) -> bool:
        """Count a gradient, and note the CUDA stream that computed it: compiled passes use several.

        Returns:
            Whether it was the group's last gradient.
        """
        self.num_arrived += 1
        if parameter.is_cuda:
            self._streams.add(torch.cuda.current_stream())
        return self.num_arrived == len(self.parameters)

    def take(self, attribute: str) -> Tensor:
        """Take the gradients from the parameters and return them as one flat tensor; zeros where there is none."""
        pieces = []
        for parameter in self.parameters:
            gradient = getattr(parameter, attribute)
            pieces.append(torch.zeros_like(parameter).view(-1) if gradient is None else gradient.reshape(-1))
            setattr(parameter, attribute, None)
        others = self._wait_for_streams()
        if others and not self._replayed:
            use_here(*pieces)  # else their streams may reuse their memory before the current one has read it
        if self.padding:
            pieces.append(pieces[0].new_zeros(self.padding))
        self.num_arrived = 0
        if self._replayed:
            flat = torch.cat(pieces)  # copies even a single piece
            for stream in others:
                stream.wait_stream(torch.cuda.current_stream())  # its next graph may overwrite the pieces
            return flat
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def _wait_for_streams(self) -> set[torch.cuda.Stream]:
        """Let the current stream wait for the other streams that computed gradients, and return those."""
        if not self._streams:
            return set()
        current = torch.cuda.current_stream()
        others = self._streams - {current}
        for stream in others:
            current.wait_stream(stream)
        self._streams.clear()
        return others


def use_here(*tensors: Tensor) -> None:
    """Let tensors be used on the current CUDA stream, which may differ from the one that made them."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream())

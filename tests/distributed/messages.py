"""Messages between ranks that share a GPU: they pass through the host, as gloo carries none of a device's."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor


class Message:
    """A message under way. What is received reaches the device when it is waited for, as a stream would have it."""

    def __init__(self, work: Any, host: Tensor, into: Tensor | None = None) -> None:
        self._work, self._host, self._into = work, host, into
        self._made_on = torch.cuda.current_stream() if into is not None and into.is_cuda else None

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def wait(self) -> None:
        self._work.wait()
        if self._into is not None:
            if self._made_on is not None:
                torch.cuda.current_stream().wait_stream(self._made_on)
            self._into.copy_(self._host)


def through_host() -> Any:
    """Context in which torch's calls for messages take tensors of a device."""
    sends, receives = dist.isend, dist.irecv

    def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Message:
        host = tensor.cpu()
        return Message(sends(host, dst, group=group, tag=tag), host)

    def irecv(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Message:
        host = tensor.new_empty(tensor.shape, device="cpu")
        return Message(receives(host, src, group=group, tag=tag), host, tensor)

    def send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        isend(tensor, dst, group, tag).wait()

    def recv(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> None:
        irecv(tensor, src, group, tag).wait()

    return mock.patch.multiple(dist, isend=isend, irecv=irecv, send=send, recv=recv)

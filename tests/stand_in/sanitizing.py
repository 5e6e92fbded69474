"""torch's CUDA sanitizer, much quicker: its time goes into stacks that no report shows, views, and idle streams.

Importing it is enough for torch to tell it of every allocation, so this module does so where a rank asks for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

ASKED = {"STAND_IN_SANITIZER": "1"}
"""Variable by which a rank is asked for it."""


class _Stack(list):
    """Where a tensor came from: frames' code and instruction, which become text only in a report."""

    def format(self) -> list[str]:
        lines = [traceback.FrameSummary(code.co_filename, _line(code, at), code.co_name) for code, at in self]
        return traceback.StackSummary.from_list(lines).format()


def _line(code: CodeType, instruction: int) -> int:
    """The number of an instruction's line."""
    begun = [line for start, end, line in code.co_lines() if start <= instruction < end]
    return (begun and begun[0]) or code.co_firstlineno


class _Stacks:
    """Stands for ``traceback.StackSummary`` in the sanitizer."""

    @staticmethod
    def extract(frame: FrameType | None, lookup_lines: bool = False) -> _Stack:
        found = _Stack()
        while frame is not None:
            found.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return found


class _Traceback:
    """Stands for the module ``traceback`` in the sanitizer."""

    StackSummary = _Stacks

    @staticmethod
    def walk_stack(frame: FrameType | None) -> FrameType | None:
        return frame


class _Trees:
    """Stands for torch's ``pytree`` in the sanitizer: operations take and return tensors, others, and lists of them."""

    @classmethod
    def tree_map_(cls, visit: Callable[[torch.Tensor], None], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            visit(value)
        elif isinstance(value, (list, tuple)):
            for each in value:
                cls.tree_map_(visit, each)


def begin_if_asked() -> None:
    """Report from now on; to be called before the first call of CUDA."""
    if not ASKED.items() <= os.environ.items():
        return
    sanitizer = importlib.import_module("torch.cuda._sanitizer")
    sanitizer.traceback, sanitizer.pytree = _Traceback, _Trees
    handler = _handler()
    handler.syncs = _used_streams()
    handler._handle_kernel_launch = _of_accesses(handler._handle_kernel_launch)
    sanitizer.enable_cuda_sanitizer()


def forget() -> None:
    """Wait for all, so that nothing before can race with what follows, and forget it."""
    if "torch.cuda._sanitizer" not in sys.modules:
        return
    torch.cuda.synchronize()
    handler = _handler()
    handler.syncs = _used_streams()
    for info in handler.tensors_accessed.accesses.values():
        info.reads, info.write = [], None


def _handler() -> Any:
    return sys.modules["torch.cuda._sanitizer"].cuda_sanitizer.dispatch.event_handler


def _used_streams() -> Any:
    """The sanitizer's record of streams, without the hundred of torch's pools that nothing uses."""
    base = sys.modules["torch.cuda._sanitizer"].StreamSynchronizations

    class UsedStreams(base):
        def create_stream(self, stream: int) -> None:
            """Wait until it is used."""

        def _ensure_stream_exists(self, stream: int) -> None:
            if stream not in self.current_sync_states:
                super().create_stream(stream)

    return UsedStreams()


def _of_accesses(launch: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Leave out what neither reads nor writes on the device, as views, which would cost a stack."""

    def told(stream: int, read: set[int], written: set[int], *others: Any) -> list[Any]:
        return launch(stream, read, written, *others) if read or written else []

    return told


def report(error: Exception) -> str:
    """The text of what the sanitizer raised; nothing of other errors."""
    return "\n".join(map(str, getattr(error, "errors", ())))


def race(ordered: bool) -> str:
    """The report of a tensor that one stream writes and another reads, ordered or not."""
    forget()
    side = torch.cuda.Stream()
    written = torch.zeros(8, device="cuda")
    if ordered:
        side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            written.add_(1)
    except sys.modules["torch.cuda._sanitizer"].CUDASanitizerErrors as error:
        return report(error)
    return ""

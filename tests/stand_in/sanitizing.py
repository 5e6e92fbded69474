"""torch's CUDA sanitizer, a tenth as slow: most of its time goes into stacks that no report shows, and idle streams.

Importing it is enough for torch to tell it of every allocation, so this module does so where a rank asks for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

import torch

ASKED = {"STAND_IN_SANITIZER": "1"}
"""Variable by which a rank is asked for it."""


class _Stack(list):
    """Where a tensor came from: frames' code and line, which become text only in a report."""

    def format(self) -> list[str]:
        lines = [traceback.FrameSummary(code.co_filename, number, code.co_name) for code, number in self]
        return traceback.StackSummary.from_list(lines).format()


class _Stacks:
    """Stands for ``traceback.StackSummary`` in the sanitizer."""

    @staticmethod
    def extract(frames: Any, lookup_lines: bool = False) -> _Stack:
        return _Stack((frame.f_code, number) for frame, number in frames)


class _Traceback:
    """Stands for the module ``traceback`` in the sanitizer."""

    StackSummary = _Stacks
    walk_stack = staticmethod(traceback.walk_stack)


def begin_if_asked() -> None:
    """Report from now on; to be called before the first call of CUDA."""
    if not ASKED.items() <= os.environ.items():
        return
    sanitizer = importlib.import_module("torch.cuda._sanitizer")
    sanitizer.traceback = _Traceback
    _handler().syncs = _used_streams()
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

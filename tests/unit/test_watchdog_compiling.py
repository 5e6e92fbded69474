"""Compiling may take longer than hang_timeout_seconds, on whichever rank, in whichever update."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bigsgan.engines import compiling
from bigsgan.models.network import LayerStack
from bigsgan.monitor import RankLog
from bigsgan.training.watchdog import Watchdog
from tests.unit.test_watchdog import Board


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (2 * x,)


@pytest.mark.parametrize("where", ["this rank", "another"])
def test_a_rank_that_compiles_keeps_the_run_alive_until_it_has_compiled(tmp_path: Path, where: str):
    ended, compiled, board = threading.Event(), threading.Event(), Board()
    log = RankLog(tmp_path / "rank00000.log", 0, print)
    log.phase = "update 0"

    def is_compiling() -> bool:
        return where == "this rank" and not compiled.is_set()

    def compile_elsewhere() -> None:
        while not compiled.wait(0.05):
            board.add("compiling", 1)

    elsewhere = threading.Thread(target=compile_elsewhere)
    with Watchdog(0, 1, 0.4, log, lambda: board, is_compiling, end=ended.set).watching():
        if where == "another":
            elsewhere.start()
        assert not ended.wait(1.2)
        compiled.set()
        assert ended.wait(10)  # nothing has happened since: it hangs
    if where == "another":
        elsewhere.join()


def test_a_board_that_is_silent_does_not_keep_a_rank_from_compiling(tmp_path: Path):
    class Gone(Board):
        def write(self, key: str, text: str = "") -> None:
            raise RuntimeError("connection reset")

        read = add = write  # type: ignore[assignment]

    ended = threading.Event()
    log = RankLog(tmp_path / "rank00000.log", 0, print)
    with Watchdog(0, 2, 0.2, log, Gone, lambda: True, end=ended.set).watching():
        assert not ended.wait(1)


def test_torch_says_when_it_compiles(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []

    def compile(network: torch.nn.Module, **options: Any) -> Callable[..., Any]:
        def backend(graph: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
            seen.append(compiling.is_compiling())
            return graph.forward

        return original(network, backend=backend, dynamic=False)

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile)
    network = LayerStack([Doubled()])
    fast = compiling.compiled(network, "whole")
    compiling.compiled(network, "whole")
    assert not compiling.is_compiling()
    for num in (4, 5, 5):
        fast(torch.ones(num, 2))
        assert not compiling.is_compiling()
    assert seen == [True, True]  # for each number of samples once
    torch._dynamo.reset()

"""The engine of a network that only other ranks hold, where each network has ranks of its own.

The ranks of each network compute its phases. Beside images and gradients, they only need to know how the other
network's updates ended. All ranks share this at the end of an adversarial update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from bigsgan.config import RunPlan
from bigsgan.engines.base import Engine, Shard
from bigsgan.engines.outcomes import Outcome, Outcomes
from bigsgan.engines.phases import Phase
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm


class AbsentEngine:
    """The Engine protocol for a network that other ranks compute: without layers, shards or tasks.

    Attributes:
        network, replica, division, replays, outcomes, scales_loss, grad_norm, after_update, is_held: See Engine.
    """

    is_held = replays = False
    replica = 0
    grad_norm: Tensor | float | None = None

    def __init__(self, scales_loss: bool, division: list[int] | None) -> None:
        self.network, self.outcomes = LayerStack([]), Outcomes()
        self.scales_loss, self.division = scales_loss, division
        self.after_update: Callable[[], None] = lambda: None
        self._loss_scale: float | Tensor = 1.0

    def learn(self, num_updates: int, news: Tensor) -> None:
        """Count the last updates, given ``news`` from ``share_outcomes``."""
        num_skipped, applied, scale = news.tolist() if news.device.type == "cpu" else news.unbind()
        self.outcomes.follow(num_updates, num_skipped, applied > 0)
        self._loss_scale = scale
        self.after_update()

    @property
    def loss_scale(self) -> float:
        """The factor on losses after the last update."""
        return float(self._loss_scale)

    def scalars(self) -> dict[str, float]:
        """Return nothing: the ranks that hold the network save its numbers."""
        return {}

    def load_scalars(self, values: dict[str, float]) -> None:
        """Restore the numbers of updates."""
        self.outcomes.restore(int(values["num_applied"]), int(values["num_skipped"]))

    def shards(self) -> list[Shard]:
        """Return no shards."""
        return []

    def _refuse(self, *inputs: Any, **options: Any) -> NoReturn:
        """Raise: no task of the network comes to this rank."""
        raise AssertionError(f"the network is on other ranks: {inputs[:1]}")

    expect = receive = forward = backward = step = infer_everywhere = sum_over_replicas = load_optimizer_state = _refuse

    def observe_seam(self, applied: Outcome) -> None:
        """Do nothing: the ranks that hold D adapt its scale."""

    def settle(self) -> None:
        """Do nothing."""

    publish = settle
    destroy = settle  # the executor joins the divided ranks again


def share_outcomes(plan: RunPlan, engines: Mapping[str, Engine], phases: Sequence[Phase]) -> None:
    """Tell the ranks that do not hold a network how its updates in these phases ended. Every rank calls this."""
    for network, engine in engines.items():
        num = sum(phase.step for phase in phases if phase.network == network)
        news = torch.zeros(3, dtype=torch.float64, device=comm.device())
        if engine.is_held:
            outcomes = engine.outcomes
            told = (outcomes.num_skipped_so_far, outcomes.last, engine.loss_scale)
            news = torch.stack([_number(value) for value in told])
        comm.broadcast([news], plan.placement(network).ranks.start)
        if isinstance(engine, AbsentEngine):
            engine.learn(num, news)


def _number(value: float | Tensor) -> Tensor:
    """Put a number on the device, without waiting for it."""
    if isinstance(value, Tensor):
        return value.detach().to(comm.device(), torch.float64).reshape(())
    return torch.full((), float(value), dtype=torch.float64, device=comm.device())

"""How ranks hold a network's frozen parameters: their type, each rank's part, and where it lies."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from bigsgan.config import RunPlan
from bigsgan.config.families.outside import is_outside
from bigsgan.engines.base import DTYPES
from bigsgan.engines.deepspeed_config import zero_settings
from bigsgan.errors import UserError
from bigsgan.models.build import network_on_meta
from bigsgan.models.frozen import Gather, Sharing, convert, frozen_parts, has_frozen, share_out
from bigsgan.models.network import LayerStack
from bigsgan.monitor import NOTICE

_log = logging.getLogger(__name__)

_THRESHOLD = 100_000
"""DeepSpeed's own for the parameters that it shards (0.19.8)."""


class FrozenLayout(NamedTuple):
    """Of the matrices that a network has frozen."""

    num_ranks: int  # that share each, 1 if every rank holds it whole
    on_host: bool
    threshold: int  # those of at most so many numbers stay whole on the device

    @property
    def is_gathered(self) -> bool:
        """Whether they are gathered where code reads them."""
        return self.num_ranks > 1 or self.on_host


def frozen_layout(plan: RunPlan, network: str) -> FrozenLayout:
    """Return how ranks hold them; by default each has a part at ZeRO 3, as of what is trained.

    Compiled code reads them where no hook can gather them, and without ``exact`` a forward pass may change them.
    """
    engine, section = plan.engines[network], getattr(plan.recipe, network)
    asked, threshold = engine.section.frozen, _THRESHOLD
    freezes = section.exact if is_outside(section.family) else section.freezes
    if not freezes or engine.section.compile != "none":
        return FrozenLayout(1, False, threshold)
    if asked.persistence_threshold is not None:
        threshold = asked.persistence_threshold
    elif engine.file.stage == 3:
        threshold = zero_settings(plan, network, 1).param_persistence_threshold
    sharded = engine.file.stage == 3 if asked.sharded is None else asked.sharded
    offload = engine.file.offload_parameters if asked.offload is None else asked.offload
    return FrozenLayout(engine.placement.num_replicas if sharded else 1, offload != "none", threshold)


def check_frozen(plan: RunPlan, network: str) -> None:
    """Refuse settings of a network that has no frozen parameters; the recipe's check knows the package's families.

    Raises:
        UserError: There are such settings.
    """
    given = plan.engines[network].section.frozen.model_dump(exclude_defaults=True)
    if given and not has_frozen(network_on_meta(plan.recipe, network)):
        name, value = next(iter(given.items()))
        problem = f"must be unset, as the {network} has no frozen parameters"
        raise UserError(f"engines.{network}.frozen.{name}", value, problem, "remove it")


def hold_frozen(plan: RunPlan, network: str, layers: LayerStack, rank: int, gather: Gather, device: Any) -> None:
    """Give frozen parameters their type, and let this rank hold its part of them. Replicas have the same before.

    Args:
        plan: The run's.
        network: The network.
        layers: Those that the rank holds.
        rank: Its number among the replicas of these layers.
        gather: Gathers parts of all replicas.
        device: Where tensors are gathered.
    """
    layout, asked = frozen_layout(plan, network), plan.engines[network].section.frozen.precision
    if asked:
        convert(layers, DTYPES[asked])
    if layout.is_gathered:
        regathers = not plan.engines[network].section.activation_checkpointing
        rank = rank if layout.num_ranks > 1 else 0
        share_out(layers, Sharing(rank, layout.num_ranks, gather, device, layout.on_host, layout.threshold, regathers))


def tell_frozen(plan: RunPlan, network: str, layers: LayerStack) -> None:
    """Say if all frozen parameters of these layers stay whole on the device although a recipe asks for something else.

    ``layers`` are those of a rank, so that another stage may hold parts.
    """
    asked, layout = plan.engines[network].section.frozen, frozen_layout(plan, network)
    given = [name for name, on in (("sharded", asked.sharded), ("offload", asked.offload == "cpu")) if on]
    if not layout.is_gathered and asked.persistence_threshold is not None:
        given.append("persistence_threshold")
    if given and has_frozen(layers) and not frozen_parts(layers):
        reason = f"no matrix has more than {layout.threshold:,} numbers" if layout.is_gathered else "each rank has all"
        names = " and ".join(given)
        _log.log(NOTICE, "engines.%s.frozen: no effect of %s on these layers: %s", network, names, reason)

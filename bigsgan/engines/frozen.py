"""How ranks hold a network's frozen parameters: their type, each rank's part, and where it lies."""

from __future__ import annotations

from typing import Any, NamedTuple

from bigsgan.config import RunPlan
from bigsgan.config.families.outside import is_outside
from bigsgan.engines.base import DTYPES
from bigsgan.engines.deepspeed_config import zero_settings
from bigsgan.errors import UserError
from bigsgan.models.build import network_on_meta
from bigsgan.models.frozen import Gather, Sharing, convert, has_frozen, share_out
from bigsgan.models.network import LayerStack


class FrozenLayout(NamedTuple):
    """Of the matrices that a network has frozen."""

    num_ranks: int  # that share each, 1 if every rank holds it whole
    on_host: bool

    @property
    def is_gathered(self) -> bool:
        """Whether they are gathered where code reads them."""
        return self.num_ranks > 1 or self.on_host


def frozen_layout(plan: RunPlan, network: str) -> FrozenLayout:
    """Return how ranks hold them; by default each has a part at ZeRO 3, as of what is trained.

    Compiled code reads them where no hook can gather them, and without ``exact`` a forward pass may change them.
    """
    engine, section = plan.engines[network], getattr(plan.recipe, network)
    asked = engine.section.frozen
    freezes = section.exact if is_outside(section.family) else section.freezes
    if not freezes or engine.section.compile != "none":
        return FrozenLayout(1, False)
    sharded = engine.file.stage == 3 if asked.sharded is None else asked.sharded
    offload = engine.file.offload_parameters if asked.offload is None else asked.offload
    return FrozenLayout(engine.placement.num_replicas if sharded else 1, offload != "none")


def check_frozen(plan: RunPlan, network: str) -> None:
    """Refuse settings of frozen parameters that have no effect.

    Raises:
        UserError: The network has none, or its code reads them where they cannot be gathered.
    """
    engine, section = plan.engines[network].section, getattr(plan.recipe, network)
    field = f"engines.{network}.frozen"
    for name, value in engine.frozen.model_dump(exclude_defaults=True).items():
        if not has_frozen(network_on_meta(plan.recipe, network)):
            problem = f"must be unset, as the {network} has no frozen parameters"
            raise UserError(f"{field}.{name}", value, problem, "remove it")
        gathers = (name == "sharded" and value) or (name == "offload" and value != "none")
        if gathers and engine.compile != "none":
            problem = f"must be unset with engines.{network}.compile={engine.compile}"
            raise UserError(
                f"{field}.{name}", value, problem, "remove one of the two", "compiled code reads them whole"
            )
        if not getattr(section, "exact", True):
            problem = f"must be unset with {network}.exact=false"
            raise UserError(f"{field}.{name}", value, problem, "remove it", "its code may change them")


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
        above = zero_settings(plan, network, 1).param_persistence_threshold
        again = not plan.engines[network].section.activation_checkpointing
        rank = rank if layout.num_ranks > 1 else 0
        share_out(layers, Sharing(rank, layout.num_ranks, gather, device, layout.on_host, above, again))

"""The layouts that a recipe could have on so many ranks, and which of them fits and costs least.

The order of costs, cheapest first: nothing offloaded, one network's optimizer, both, the parameters too; ZeRO 0, 1 and
2, which send weights and gradients once in an update, then pipelines and frozen parameters that ranks share, then ZeRO
3, which gathers weights for every pass, then networks on ranks of their own, some of which wait; without recomputation,
then with it; as many micro-batches as the recipe has, then more and smaller ones; fewer bytes on the host; the lower
ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bigsgan.config import Recipe, RunPlan, both_engines, load_recipe
from bigsgan.config.deepspeed_file import read_deepspeed_file
from bigsgan.config.recipe import parse_saved_recipe
from bigsgan.config.yaml_file import apply_overrides
from bigsgan.engines.pipeline.profile import count
from bigsgan.errors import UserError
from bigsgan.models.build import network_on_meta
from bigsgan.models.frozen import has_frozen
from bigsgan.planner.activations import Traces
from bigsgan.planner.balance import divisors, plan_balanced
from bigsgan.planner.memory import Prediction, predict

USABLE = 0.9
"""Share of the memory that a layout may fill: the CUDA context, libraries and fragmentation take the rest."""


class Kind(NamedTuple):
    """How states are laid out."""

    name: str  # name in the table
    file: str  # DeepSpeed file, with ``{}`` for the precision
    tier: int  # place in the order of costs
    stages: int = 1  # number of pipeline stages
    discriminator_file: str | None = None  # D's DeepSpeed file, if it has another
    divides: bool = False  # whether each network has ranks of its own
    frozen: tuple[tuple[str, object], ...] = ()  # `engines.*.frozen` of networks with frozen parameters


class Resources(NamedTuple):
    """The machine's resources."""

    gpus: int  # number of GPUs in all
    nodes: int  # number of nodes that they are on
    gpu_memory: int  # bytes of each GPU
    host_memory: int | None  # bytes of each node; None to ignore it

    def fits(self, prediction: Prediction) -> bool:
        """Whether a layout's fullest rank has room."""
        host = self.on_node(prediction)
        return prediction.peak <= USABLE * self.gpu_memory and (
            self.host_memory is None or host <= USABLE * self.host_memory
        )

    def on_node(self, prediction: Prediction) -> int:
        """Bytes of host memory that the ranks of a node hold."""
        return prediction.on_host * self.gpus // self.nodes


@dataclass(frozen=True)
class Layout:
    """One way to run a recipe."""

    name: str  # name in the table
    overrides: list[str]  # overrides for this layout, which replace the given ones
    accumulation: int  # micro-batches of a batch
    micro_batch: int  # images in a micro-batch of the generator, on one rank
    recomputes: bool  # whether both networks recompute their activations, and pipelines also G's images
    prediction: Prediction  # memory of the fullest rank
    fits: bool  # whether the resources suffice

    @property
    def label(self) -> str:
        """The name, and whether activations are recomputed."""
        return f"{self.name}, recomputing" if self.recomputes else self.name


@dataclass(frozen=True)
class Survey:
    """All layouts of a recipe."""

    own: Layout | None  # the recipe as it stands, if it can run on so many ranks
    # for each kind, with and without recomputation, the cheapest that fits, else the one that needs least
    layouts: list[Layout]
    refused: dict[str, str] = field(default_factory=dict)  # kinds that are not possible, and why
    best: Layout | None = None  # the cheapest that fits, or the recipe as it stands if only that fits

    @property
    def closest(self) -> Layout | None:
        """The layout that needs least memory."""
        layouts = [*self.layouts, *([self.own] if self.own else [])]
        return min(layouts, key=lambda layout: layout.prediction.peak, default=None)


_SUFFIX = {"fp32": "", "bf16": "_bf16", "fp16": "_fp16"}
_PIPELINE_TIER = 1
_STAGES = (2, 4, 8)
_FULL = 4
"""With more micro-batches than this for each stage, a pipeline's bubble hardly shrinks."""

WITHOUT_STAGES = [
    *(Kind(f"ZeRO {stage}", f"ds_configs/zero{stage}{{}}.json", 0) for stage in (0, 1, 2)),
    Kind("ZeRO 3", "ds_configs/zero3{}.json", _PIPELINE_TIER + 1),
]
_OWN_RANKS = [
    kind._replace(name=f"{kind.name}, ranks of their own", tier=_PIPELINE_TIER + 2, divides=True)
    for kind in WITHOUT_STAGES
]
_MICRO_BATCHES = (1, 2, 4)
"""Multiples of the recipe's number of micro-batches that are tried on ranks of their own."""

_ZERO2, _ZERO2_OFFLOAD = "ds_configs/zero2{}.json", "ds_configs/zero2_offload.json"
_OFFLOADED = [
    Kind("ZeRO 2, D's optimizer on the host", _ZERO2, _PIPELINE_TIER + 3, discriminator_file=_ZERO2_OFFLOAD),
    Kind("ZeRO 2, G's optimizer on the host", _ZERO2_OFFLOAD, _PIPELINE_TIER + 3, discriminator_file=_ZERO2),
    Kind("ZeRO 2, all optimizers on the host", _ZERO2_OFFLOAD, _PIPELINE_TIER + 4),
    Kind("ZeRO 3, all on the host", "ds_configs/zero3_offload.json", _PIPELINE_TIER + 5),
]
_FROZEN = [
    Kind("ZeRO 2, sharing what is frozen", _ZERO2, _PIPELINE_TIER, frozen=(("sharded", True),)),
    Kind("ZeRO 2, what is frozen on the host", _ZERO2, _PIPELINE_TIER + 3, frozen=(("offload", "cpu"),)),
]


class Surveyor:
    """Tries the layouts of one recipe.

    Attributes:
        resources: The machine's resources.
        directory: Directory of the recipe.
        traces: Of its networks, and of its teacher.
    """

    def __init__(self, path: Path, overrides: Sequence[str], resources: Resources) -> None:
        """Read a recipe and apply overrides.

        Raises:
            UserError: The recipe is invalid.
        """
        self._recipe, self.resources, self._given = load_recipe(path, list(overrides)), resources, list(overrides)
        self.directory = path.resolve().parent
        self.traces = Traces()
        self._freezing = [n for n in self._recipe.networks if has_frozen(network_on_meta(self._recipe, n))]

    def survey(self) -> Survey:
        """Try all layouts."""
        own, refused = None, dict[str, str]()
        try:
            own = self.layout("as it stands", [], self._recipe.engine("generator").activation_checkpointing)
        except UserError as error:
            refused["as it stands"] = str(error)
        ranked: list[tuple[tuple[int, ...], Layout]] = []
        accumulations = cache(self._accumulations)
        for kind in self._kinds(refused):
            for recomputes in (False, True):
                try:
                    layout = self._best_of(kind, accumulations(kind), recomputes)
                except UserError as error:
                    refused[kind.name] = str(error)
                    continue
                costs = (kind.tier, recomputes, *self._distance(layout.accumulation))
                ranked.append(((*costs, layout.prediction.on_host, len(ranked)), layout))
        # The recipe as it stands may be of no kind, for example with DeepSpeed files of its own.
        best = own if own is not None and own.fits else None
        if fitting := [item for item in ranked if item[1].fits]:
            _, best = min(fitting, key=lambda item: item[0])
        return Survey(own, [layout for _, layout in ranked], refused, best)

    def _kinds(self, refused: dict[str, str]) -> Iterator[Kind]:
        yield from WITHOUT_STAGES
        yield from _FROZEN if self._freezing else ()
        networks = self._recipe.networks
        most = self._num_layers()
        for stages in _STAGES:
            if stages <= most and self.resources.gpus % stages == 0:
                yield Kind(f"{stages} stages, ZeRO 1", "ds_configs/zero1{}.json", _PIPELINE_TIER, stages)
        if self.resources.gpus > 1 and self._recipe.has_discriminator:
            yield from _OWN_RANKS
        if all(self._precision(network) == "bf16" for network in networks):
            yield from (
                kind for kind in _OFFLOADED if self._recipe.has_discriminator or kind.discriminator_file is None
            )
        else:
            refused["offloading"] = "its DeepSpeed files are in bf16, and the recipe is not"

    def _num_layers(self) -> int:
        """Number of layers with parameters in the network that has fewer of them."""
        one_rank = [f"engines.{n}.ds_config={self._file(WITHOUT_STAGES[1], n)}" for n in self._recipe.networks]
        in_one_stage = both_engines("pipeline_stages=1", "ranks=null")
        plan = self.plan([*one_rank, *in_one_stage], ranks=1)
        layers = [count(self.traces.network(plan, network)) for network in self._recipe.networks]
        return min(sum(layer.numel > 0 for layer in own) for own in layers)

    def _best_of(self, kind: Kind, accumulations: Sequence[int], recomputes: bool) -> Layout:
        """The first layout of a kind that fits, with one of the accumulations, else the one that needs least.

        Raises:
            UserError: The recipe cannot run in such a layout.
        """
        tried = []
        for accumulation in accumulations:
            tried.append(self.layout(kind.name, self.changes(kind, accumulation, recomputes), recomputes))
            if tried[-1].fits:
                return tried[-1]
        return min(tried, key=lambda layout: layout.prediction.peak)

    def _accumulations(self, kind: Kind) -> list[int]:
        """Possible numbers of micro-batches, at least one; the one nearest to the recipe's comes first."""
        batch, own = self._recipe.batch, self._recipe.accumulation
        numbers = [times * own for times in _MICRO_BATCHES] if kind.divides else divisors(batch)
        if kind.stages > 1:
            filling = [n for n in numbers if n % kind.stages == 0 and n <= _FULL * kind.stages]
            numbers = filling or numbers[:1]
        possible, error = [], None
        for number in sorted(numbers, key=self._distance):
            try:
                self.plan(self.changes(kind, number, False))
                possible.append(number)
            except UserError as caught:
                error = error or caught
        if not possible and error is not None:
            raise error
        larger = [n for n in possible if n >= own]
        return larger or possible

    def _distance(self, accumulation: int) -> tuple[int, int]:
        """Place in the order of costs: as many micro-batches as in the recipe, then more, then fewer."""
        own = self._recipe.accumulation
        return (0, accumulation) if accumulation >= own else (1, own - accumulation)

    def changes(self, kind: Kind, accumulation: int, recomputes: bool) -> list[str]:
        """Overrides that give the recipe this layout, without those that would change nothing."""
        changes = [f"accumulation={accumulation}"] if accumulation != self._recipe.accumulation else []
        phase = "recompute" if recomputes else "keep"
        networks = self._recipe.networks
        if kind.stages > 1 and self._recipe.has_discriminator and phase != self._recipe.pipeline.generator_phase:
            changes.append(f"pipeline.generator_phase={phase}")
        for network in networks:
            engine, field = self._recipe.engine(network), f"engines.{network}"
            is_whole = "double_backward" in self._recipe.objective.methods(network).values()
            stages = 1 if is_whole else kind.stages
            wanted = {
                "ds_config": self._file(kind, network),
                "pipeline_stages": stages,
                "activation_checkpointing": recomputes,
                "accumulation": None,
                "ranks": "auto" if kind.divides else None,
            }
            pairs = [(key, getattr(engine, key), value) for key, value in wanted.items()]
            if network in self._freezing:
                pairs += [(f"frozen.{key}", getattr(engine.frozen, key), value) for key, value in kind.frozen]
            changes += [f"{field}.{key}={_text(value)}" for key, own, value in pairs if own != value]
        return changes

    def _file(self, kind: Kind, network: str) -> str:
        file = kind.discriminator_file if network == "discriminator" else None
        return (file or kind.file).format(_SUFFIX[self._precision(network)])

    def _precision(self, network: str) -> str:
        name = self._recipe.engine(network).ds_config
        return read_deepspeed_file(network, name, self.directory, {}).precision

    def recipe(self, changes: Sequence[str]) -> Recipe:
        """The recipe with more overrides."""
        tree = self._recipe.model_dump()
        apply_overrides(tree, list(changes))
        return parse_saved_recipe(tree)

    def plan(self, changes: Sequence[str], ranks: int | None = None) -> RunPlan:
        """Plan the recipe with more overrides.

        Raises:
            UserError: The recipe cannot run with them.
        """
        plan, _ = plan_balanced(self.recipe(changes), ranks or self.resources.gpus, self.directory)
        return replace(plan, ranks_per_host=self.resources.gpus // self.resources.nodes)

    def layout(self, name: str, changes: list[str], recomputes: bool) -> Layout:
        """Predict the memory of the recipe with more overrides."""
        plan = self.plan(changes)
        prediction = predict(plan, self.traces)
        fits = self.resources.fits(prediction)
        size = plan.engines["generator"].micro_batch_size
        changed = {change.partition("=")[0] for change in changes}
        given = [text for text in self._given if text.partition("=")[0] not in changed]
        return Layout(name, [*given, *changes], plan.recipe.accumulation, size, recomputes, prediction, fits)


def _text(value: object) -> str:
    """A value as an override writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

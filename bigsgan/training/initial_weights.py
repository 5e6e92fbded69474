"""Initial weights of a run: from another run, imported, or from exports."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch

from bigsgan import checkpoint
from bigsgan.checkpoint.exported import Exported
from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.families.base import NetworkSection
from bigsgan.config.families.dmd2 import name_in_generator
from bigsgan.config.recipe import parse_saved_recipe
from bigsgan.config.sections import InitFrom
from bigsgan.engines import Engine
from bigsgan.errors import UserError, reason
from bigsgan.models.build import network_on_meta
from bigsgan.monitor import NOTICE
from bigsgan.runtime import comm
from bigsgan.training.ema import ShardedEMA
from bigsgan.training.power import AVERAGE
from bigsgan.training.state import EMAState, load_frozen, load_optimizer, load_shard

_log = logging.getLogger(__name__)


_TEACHER = ".teacher."
"""Part of the parameter names of heads, which predict a teacher's features."""


class Export(NamedTuple):
    """An export of one network."""

    file: Exported
    recipe: Recipe  # recipe of the run that it was exported from


class InitialWeights(NamedTuple):
    """The source of a run's initial weights: a checkpoint, or exports."""

    recipe: Recipe  # recipe of the run that trained them
    checkpoint: checkpoint.Checkpoint | None  # checkpoint of that run; None for exports
    live: bool  # load the generator's live weights and not its EMA
    own: bool = False  # they were imported into this run directory; EMA, images seen and optimizer state are kept
    exports: Mapping[str, Export] = {}  # by network

    @property
    def where(self) -> str:
        """The path of the checkpoint, or those of the exports."""
        if self.checkpoint:
            return str(self.checkpoint.path)
        return " and ".join(str(each.file.path) for each in self.exports.values())

    def has(self, network: str) -> bool:
        """Return whether there are weights of a network."""
        return _entry(network, self) in self.checkpoint.entries if self.checkpoint else network in self.exports

    def recipe_of(self, network: str) -> Recipe:
        """Return the recipe of the run that trained a network."""
        return self.exports[network].recipe if self.exports else self.recipe

    def shapes(self, network: str) -> Mapping[str, torch.Size]:
        """Return the shapes of a network's parameters and buffers."""
        return self.exports[network].file.shapes if self.exports else _shapes(self.recipe, network)

    def field(self, network: str) -> str:
        """Return the key that names them."""
        return f"init_from.{network}" if self.exports else "init_from.run"


def read_exports(init: InitFrom) -> InitialWeights:
    """Read the exports that a recipe names, to the end.

    Raises:
        UserError: One cannot be read, or has another network.
    """
    exports = {}
    for network in NETWORKS:
        if path := getattr(init, network):
            field = f"init_from.{network}"
            file = Exported(field, Path(path), network)
            try:
                exports[network] = Export(file, parse_saved_recipe({**file.told["recipe"], "augmentation": None}))
            except Exception as error:  # a foreign header can cause any error
                problem = f"must have a valid recipe: {reason(error)}"
                raise UserError(field, str(path), problem, "give a file that `bigsgan export` wrote") from None
    return InitialWeights(next(iter(exports.values())).recipe, None, live=True, exports=exports)


def check_initial_weights(recipe: Recipe, initial: InitialWeights) -> None:
    """Refuse a run's networks that differ in more than their classes and heads for a teacher's features.

    Raises:
        UserError: A tensor differs; or a discriminator is to be frozen, and there is none.
    """
    for network in recipe.networks:
        if network == "discriminator" and _copies_backbone(recipe, initial):
            _refuse_other_numbers(network, recipe, initial, of="generator")
            _refuse_other_backbone(recipe, initial)
        elif not initial.has(network):
            if network == "discriminator":
                _refuse_freezing(recipe, initial)
        else:
            there = _shapes(_as_there(recipe, initial.recipe_of(network)), network)
            _refuse_other(network, initial.shapes(network), there, initial.field(network))
            _refuse_other_numbers(network, recipe, initial)
            if getattr(recipe, network).copies_generator:
                _refuse_other_labels(network, recipe, initial)


def load_initial_weights(recipe: Recipe, initial: InitialWeights, engines: Mapping[str, Engine]) -> None:
    """Fill parameters and buffers of both networks, from a checkpoint of any layout or exports. Every rank calls this.

    ``check_initial_weights`` has accepted them.
    If the two runs differ in their number of classes, tensors whose shape depends on it keep their new values. If heads
    for a teacher's features differ in shape, all heads do. ``recipe`` and ``engines`` are those of the new run.
    """
    found = initial.checkpoint
    reader = checkpoint.Reader(found, comm.rank(), comm.world_size()) if found else None
    for network in recipe.networks:
        if network == "discriminator" and _copies_backbone(recipe, initial):
            assert reader is not None, "exports have no backbone"
            reader.refuse_others(_entry("generator", initial), network_on_meta(initial.recipe, "generator"))
            kept = _of_backbone(recipe, initial)
            num = len(_shapes(recipe, network))
            _log.log(NOTICE, "the discriminator begins with %d of %d tensors of the generator", len(kept), num)
            saved = reader.entry(_entry("generator", initial))
            _fill(engines[network], _OfGenerator(saved, recipe.discriminator), kept)
            continue
        entry, other = _entry(network, initial), initial.recipe_of(network) if initial.has(network) else None
        if other is None:
            _log.warning("%s has no %s: it starts from random weights", initial.where, network)
            continue
        theirs, ours = initial.shapes(network), _shapes(recipe, network)
        kept = _kept(theirs, ours) - _of_other_labels(recipe, other, network, ours)
        if left := sorted(ours.keys() - kept):
            text = "%s: %d tensors depend on the classes or a teacher and start from random values, such as %s"
            _log.warning(text, network, len(left), left[0])
        source = reader or initial.exports[network].file
        source.refuse_others(entry, network_on_meta(other, network))
        saved = source.entry(entry)
        _fill(engines[network], saved, kept)
        if not initial.own or checkpoint.STEP not in saved.numbers:
            continue
        if left or not getattr(recipe.optimizer, network).is_adam:
            _log.warning("%s: the imported optimizer state does not fit and starts from zero", network)
        else:
            load_optimizer(saved, engines[network])


def load_imported_ema(recipe: Recipe, initial: InitialWeights, engine: Engine, ema: ShardedEMA) -> None:
    """Load the EMA of imported weights, unless their classes differ. A collective."""
    found = initial.checkpoint
    if not initial.own or found is None or AVERAGE not in found.entries:
        return
    if _shapes(initial.recipe, "generator") != _shapes(recipe, "generator"):
        _log.warning("%s has other classes: the EMA starts as a copy of the generator", found.path)
        return
    EMAState(engine, ema).load(checkpoint.Reader(found, comm.rank(), comm.world_size()).entry(AVERAGE))


class _OfGenerator(checkpoint.SavedValues):
    """A generator's saved values by the names that they have in D."""

    def __init__(self, saved: checkpoint.SavedValues, discriminator: NetworkSection) -> None:
        vars(self).update(vars(saved))
        self._section = discriminator

    def read(self, kind: str, name: str, offset: int, out: torch.Tensor) -> None:
        """Read them as the generator calls them."""
        super().read(kind, name_in_generator(self._section, name), offset, out)


def _copies_backbone(recipe: Recipe, initial: InitialWeights) -> bool:
    ours, theirs = recipe.discriminator, initial.recipe.discriminator
    copies = ours.copies_generator and initial.checkpoint is not None and theirs.family != ours.family
    return copies or (recipe.init_from is not None and recipe.init_from.backbone)


def _of_backbone(recipe: Recipe, initial: InitialWeights) -> set[str]:
    """Return the names of D's tensors whose shapes the other run's generator has by those names."""
    ours, theirs, section = _shapes(recipe, "discriminator"), initial.shapes("generator"), recipe.discriminator
    found = {name for name, shape in ours.items() if theirs.get(name_in_generator(section, name)) == shape}
    return found - _of_other_labels(recipe, initial.recipe, "discriminator", ours)


def _refuse_other_backbone(recipe: Recipe, initial: InitialWeights) -> None:
    """Refuse a generator that D has no layers of, or lacks one where D is to copy it whole."""
    found = _of_backbone(recipe, initial)
    if recipe.discriminator.copies_generator:
        missing = sorted(_shapes(recipe, "discriminator").keys() - found)
        if others := [name for name in missing if ".head." not in name]:
            name = name_in_generator(recipe.discriminator, others[0])
            problem = f"has no generator of the teacher's shapes: {name} is another or missing"
            remedy = "use the generator and data sections of its recipe, with generator.times=true"
            raise UserError("init_from.run", None, problem, remedy)
    elif not found:
        remedy = "give both networks layers of the same widths, such as discriminator.times=true, or remove it"
        raise UserError("init_from.backbone", True, "has no tensor of the generator's shapes in D", remedy)


def _refuse_other_labels(network: str, recipe: Recipe, initial: InitialWeights) -> None:
    """Refuse other labels than those of a frozen part, whose embedding would stay random."""
    ours, theirs = recipe.data, initial.recipe_of(network).data
    for key in ("num_classes", "condition_size"):
        if (needed := getattr(theirs, key)) != getattr(ours, key):
            problem, detail = f"must be {needed}, as in {initial.field(network)}", "its teacher embeds these"
            raise UserError(f"data.{key}", getattr(ours, key), problem, f"set data.{key}={needed}", detail)


def _entry(network: str, initial: InitialWeights) -> str:
    return AVERAGE if network == "generator" and not initial.live else network


def _as_there(recipe: Recipe, other: Recipe) -> Recipe:
    """Return this recipe with the other run's labels: it has to describe the other run's network."""
    keys = ("num_classes", "condition_size", "multi_label", "missing_labels")
    there = recipe.data.model_copy(update={key: getattr(other.data, key) for key in keys})
    return recipe.model_copy(update={"data": there})


def _shapes(recipe: Recipe, network: str) -> dict[str, torch.Size]:
    """Return the shapes of a network's parameters and buffers, without layers before its own, such as augmentation."""
    state = network_on_meta(recipe, network).state_dict()
    return {name: tensor.shape for name, tensor in state.items() if not name.startswith("layers.-")}


def _kept(theirs: Mapping[str, torch.Size], ours: dict[str, torch.Size]) -> set[str]:
    """Return the names in ``ours`` that ``theirs`` fills: all heads for a teacher's features, or none of them."""
    kept = {name for name, shape in ours.items() if theirs.get(name) == shape}
    if any(_TEACHER in name for name in ours.keys() - kept):
        kept = {name for name in kept if _TEACHER not in name}
    return kept


def _of_other_labels(recipe: Recipe, other: Recipe, network: str, shapes: dict[str, torch.Size]) -> set[str]:
    """Return the names of what depends on the labels, if these are others, though a label may have as many numbers.

    ``shapes`` are the network's own.
    """
    ours, theirs = ((each.data.num_classes, each.data.condition_size) for each in (recipe, other))
    if ours == theirs:
        return set()
    size = recipe.data.condition_size
    wider = [size[0], size[1] + 1] if isinstance(size, list) else size + 1
    data = recipe.data.model_copy(update={"condition_size": wider})
    others = _shapes(recipe.model_copy(update={"data": data}), network)
    return {name for name, shape in shapes.items() if others.get(name) != shape}


def _refuse_other(network: str, theirs: Mapping[str, torch.Size], expected: dict[str, torch.Size], field: str) -> None:
    for name in sorted(theirs.keys() | expected.keys()):
        was, wanted = theirs.get(name), expected.get(name)
        if _TEACHER in name:  # heads may be dropped, or begin anew
            continue
        if was != wanted:
            sizes = ", ".join(
                f"{'none' if s is None else tuple(s)} {where}" for s, where in ((wanted, "here"), (was, "there"))
            )
            problem = f"has a different {network}: {name} is {sizes}"
            remedy = f"use the {network} and data sections of its recipe; data.num_classes may differ"
            raise UserError(field, None, problem, remedy)


def _refuse_other_numbers(network: str, recipe: Recipe, initial: InitialWeights, of: str = "") -> None:
    """Refuse keys of other values that shapes do not tell, by which weights of a network would mean something else.

    ``of`` is the other run's network that they are of, if not the same.
    """
    ours, theirs = getattr(recipe, network), getattr(initial.recipe_of(of or network), of or network)
    reads_times = getattr(ours, "times", False) and hasattr(ours, "time_scale")
    for key in ("heads", *(("time_scale",) if reads_times else ())):
        if (needed := getattr(theirs, key, None)) != getattr(ours, key, None):
            problem = f"must be {needed}, as in {initial.field(network)}"
            raise UserError(f"{network}.{key}", getattr(ours, key, None), problem, f"set {network}.{key}={needed}")


def _refuse_freezing(recipe: Recipe, initial: InitialWeights) -> None:
    if recipe.init_from and recipe.init_from.freeze_discriminator:
        number = recipe.init_from.freeze_discriminator
        problem = f"must be 0, as {initial.where} has no discriminator"
        raise UserError("init_from.freeze_discriminator", number, problem, "set it to 0")


@torch.no_grad()
def _fill(engine: Engine, saved: checkpoint.SavedValues, names: set[str]) -> None:
    """Read this rank's shards of the tensors in ``names``, and no others."""
    for shard in engine.shards():
        load_shard(saved, shard._replace(pieces=[piece for piece in shard.pieces if piece.name in names]))
    engine.publish()
    buffers = checkpoint.saved_buffers(engine.network)
    saved.read_into(checkpoint.BUFFER, {name: buffer for name, buffer in buffers.items() if name in names})
    load_frozen(saved, engine, names)


def check_freezing(recipe: Recipe) -> None:
    """Refuse to freeze all layers of the discriminator, or none that learns.

    Raises:
        UserError: It has no further layers than those to freeze, or these do not learn anyway.
    """
    if recipe.init_from is None:
        return
    layers = network_on_meta(recipe, "discriminator").layers
    learning = [int(number) for number, layer in layers.items() if any(True for _ in layer.parameters())]
    most = max(learning, default=0)
    if (num := recipe.init_from.freeze_discriminator) > most:
        problem = f"must be less than {most + 1}, the number of the discriminator's layers"
        raise UserError("init_from.freeze_discriminator", num, problem, f"give {most} or less")
    if num and num <= min(learning):
        some = f" or at least {min(learning) + 1}" if min(learning) < most else ""
        problem = f"must be 0{some}, as the layers before do not learn, and one has to"
        raise UserError("init_from.freeze_discriminator", num, problem, "remove it" + ", or give more" * bool(some))


def freeze_first_layers(engine: Engine, num_layers: int) -> None:
    """Keep the first layers of the discriminator as they are (Mo, Cho and Shin 2020, arXiv 2002.10964).

    Their gradients become 0, and an optimizer that has only seen zeros does not move them.
    """
    for number, layer in engine.network.layers.items():
        if int(number) < num_layers:
            for parameter in layer.parameters():
                parameter.register_hook(torch.zeros_like)

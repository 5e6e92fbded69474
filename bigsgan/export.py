"""`bigsgan export`: a network's consolidated weights, a checkpoint for DeepSpeed, or the generator as a graph."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from bigsgan import checkpoint
from bigsgan.checkpoint.files import first_not_finite
from bigsgan.checkpoint.universal import write_universal
from bigsgan.config import Recipe
from bigsgan.config.families.base import NetworkSection
from bigsgan.config.families.dit import DiTGenerator
from bigsgan.config.families.features import FeaturesNetwork
from bigsgan.config.run_directory import read_saved_recipe, refuse_existing, refuse_output
from bigsgan.data.autoencoders import identity, weights_digest
from bigsgan.engines.base import DTYPES
from bigsgan.errors import UserError, counted, reason
from bigsgan.images.grids import image_grid
from bigsgan.inference import autoencoder_folder, dit_folder, public_weights
from bigsgan.inference.card import model_card
from bigsgan.inference.columns import open_conditions
from bigsgan.inference.folder import GRID_FILE, refuse_folder, write_folder
from bigsgan.inference.graphs import SUFFIXES, has_psi, write_graph
from bigsgan.inference.loading import CODEC, PROGRAM
from bigsgan.inference.mappings import set_guidance
from bigsgan.inference.sheets import Sampler
from bigsgan.inference.trained import TrainedNetwork, best_device, open_trained, set_steps
from bigsgan.models.build import network_on_meta
from bigsgan.runtime import memory
from bigsgan.runtime.atomic import leaving_nothing, replacing
from bigsgan.runtime.extras import require
from bigsgan.training.sampling import (
    FORWARD,
    GRID_ROWS,
    check_batch,
    check_guidance,
    check_truncation,
    column_labels,
    has_standing_statistics,
    smaller_batch,
)

UNIVERSAL = "universal"

_log = logging.getLogger(__name__)


class Options(NamedTuple):
    """What to export."""

    network: str = "generator"  # `generator` or `discriminator`
    live: bool | None = None  # use the live weights instead of the EMA; None means the EMA if there is one
    # relative width of the EMA, which is computed from snapshots; None for the EMA of the checkpoint
    width: float | None = None
    nimg: int | None = None  # checkpoint to use; None for the newest
    # give the generator the standing statistics that `bigsgan sample` uses, so that it makes the same images in
    # evaluation mode; None means yes. Otherwise buffers stay as training left them.
    standing: bool | None = None
    # threshold of the latents of standing statistics, or psi of a generator with styles; None for none
    truncation: float | None = None
    guidance: float | None = None  # factor on the distance of a GAT's w from its mean over the classes; None for 1
    steps: int | None = None  # from noise to an image, by flow matching; None for the recipe's
    batch: int | None = None  # images computed at a time; None for 100
    # `safetensors`, `hub`, `onnx`, `torch-export`, `universal`, `diffusers`, or a project whose names the weights get;
    # None to choose by the output's suffix
    form: str | None = None
    direction: str | None = None  # that of CycleGAN's generator to write; None for that from the first domain
    dtype: str = "fp32"  # type of the parameters that are written: `fp32`, `bf16` or `fp16`

    @property
    def at_once(self) -> int:
        """Images computed at a time."""
        return 100 if self.batch is None else self.batch

    @property
    def stands(self) -> bool:
        """Whether standing statistics are measured."""
        return self.network == "generator" and self.standing is not False


def main(run: Path, out: Path, options: Options) -> None:
    """Write a network of a run; all formats except graphs keep names and shapes of parameters and buffers.

    Raises:
        UserError: The run cannot be opened, the output cannot be written, memory runs out, an option does not fit, a
            package is missing, or torch cannot export the generator.
    """
    form = options.form or {suffix: form for form, suffix in SUFFIXES.items()}.get(out.suffix, "safetensors")
    if options.direction and (form != "pix2pix" or not read_saved_recipe(run).data.joins_domains):
        detail = "other formats have both of CycleGAN's generators"
        raise UserError("--direction", options.direction, "needs CycleGAN, and --format pix2pix", "remove it", detail)
    if form == UNIVERSAL:
        _write_universal(run, out, options)
        return
    _check(options, form, run, out)
    network, standing = options.network, options.stands
    remedy = (
        f"{smaller_batch(options.at_once)}, or none (--no-standing)" if standing else "use a machine with more memory"
    )
    with memory.naming_remedy(f"while the {network} is exported", remedy):
        device = best_device() if standing else torch.device("cpu")
        trained = open_trained(run, network, options.live is True, options.nimg, device, options.width)
        set_steps(trained, options.steps, options.guidance)
        _check_run(trained, options, form)
        header = {
            "network": network,
            "weights": "ema" if network == "generator" and options.live is not True else "live",
            "statistics": "standing" if standing else "as trained",
            **({} if options.width is None else {"ema_width": str(options.width)}),
            "dtype": options.dtype,
            "nimg": str(trained.nimg),
            "recipe": json.dumps(trained.recipe.model_dump()),
            **_codec_of(trained),
            **_program_of(getattr(trained.recipe, network)),
            **({} if options.guidance is None else {"guidance": str(options.guidance)}),
            **({} if options.truncation is None else {"truncation": str(options.truncation)}),
        }
        set_guidance(trained.network, options.guidance)
        if standing:
            needed = has_standing_statistics(trained.recipe)
            conditions = open_conditions(run, trained.recipe.data) if needed else range(1)
            Sampler(trained, 0, options.at_once, conditions).prepare(options.truncation)
        state = _finite_state(trained, network, run)
        text = f"statistics {header['statistics']}, {options.dtype}"
        if form in SUFFIXES:
            difference = write_graph(trained.recipe, trained.network, form, header, out)
            text += f", {form}; its images differ by at most {difference:.1e} from our own"
        elif form == autoencoder_folder.FORM:
            text = _diffusers(trained.recipe).write_folder(trained, state, out)
        elif form in public_weights.FORMS:
            way = options.direction or FORWARD
            num, call = public_weights.write(trained.recipe, network, form, trained.network, state, out, way)
            text = f"statistics {header['statistics']}, {counted(num, 'tensor')} under {form}'s names\nopen: {call}"
        elif form == "hub":
            _write_folder(run, trained, _rounded(trained, state, options.dtype), header, options, out)
        else:
            _write(_rounded(trained, state, options.dtype), header, out)
    about = f"{header['weights']} {network} at {trained.nimg} images seen"
    print(f"{out}: {about}, {_num_parameters(trained) / 1e6:.2f} M parameters, {text}")


def _codec_of(trained: TrainedNetwork) -> dict[str, str]:
    """The header's digest of the decoding autoencoder; empty if there is none or it cannot be read."""
    section = trained.recipe.data.codec
    try:
        return {CODEC: identity(section).weights} if section.is_autoencoder else {}
    except UserError as error:
        _log.warning("the export does not tell which autoencoder decodes it: %s", error)
        return {}


def _program_of(section: NetworkSection) -> dict[str, str]:
    """The header's digest of a network's frozen program; empty if it has none, or its file is not there."""
    if not isinstance(section, FeaturesNetwork) or not Path(section.path).exists():
        return {}
    return {PROGRAM: weights_digest([Path(section.path)], f"{section.network}.path")}


def _write_universal(run: Path, out: Path, options: Options) -> None:
    """Write the live network with its optimizer's state, in the form that DeepSpeed reads."""
    others = {
        "--ema": options.live is False,
        "--ema-width": options.width is not None,
        "--standing": options.standing is True,
        "--truncation": options.truncation is not None,
        "--guidance": options.guidance is not None,
        "--steps": options.steps is not None,
        "--batch": options.batch is not None,
        "--dtype": options.dtype != "fp32",
    }
    for flag in [flag for flag, given in others.items() if given]:
        detail = "it holds the live weights in float32, and the optimizer's state"
        raise UserError(flag, None, f"cannot be combined with --format {UNIVERSAL}", "remove the option", detail)
    refuse_existing(out, "--out")
    recipe = read_saved_recipe(run)
    _check_network(recipe, options.network)
    if getattr(recipe.optimizer, options.network).kind == "muon":
        problem = f"cannot be combined with optimizer.{options.network}.kind=muon"
        remedy, detail = (
            "use --format safetensors, for the weights alone",
            "DeepSpeed reads Adam's state of all weights",
        )
        raise UserError("--format", UNIVERSAL, problem, remedy, detail)
    found = checkpoint.find_intact(run, options.nimg, lambda found: checkpoint.files_with(found, options.network))
    network = network_on_meta(recipe, options.network)
    with memory.naming_remedy(f"while the {options.network} is exported", "use a machine with more memory"):
        metadata = {"nimg": found.nimg, "recipe": recipe.model_dump()}
        try:
            with leaving_nothing(out):
                num_bytes = write_universal(found, options.network, network, out, metadata)
        except OSError as error:
            raise _unwritten(out, error) from None
    about = f"live {options.network} at {found.nimg} images seen"
    print(f"{out}: {about}, {num_bytes / 2**20:.1f} MiB of weights and optimizer state, {UNIVERSAL}")


def _check_network(recipe: Recipe, network: str) -> None:
    if network not in recipe.networks:
        raise UserError("--network", network, "is not in this run, whose generator learns alone", "remove it")


def _check(options: Options, form: str, run: Path, out: Path) -> None:
    """Refuse options that do not fit each other, before the run is opened."""
    if options.network == "discriminator":
        _check_network(read_saved_recipe(run), options.network)
        if options.live is False:
            raise UserError("--ema", None, "needs an EMA, which only the generator has", "use --live")
        if options.standing:
            raise UserError("--standing", None, "needs the generator, which alone has statistics", "remove the option")
        if form != "safetensors" and form not in public_weights.FORMS:
            raise UserError("--format", form, "needs the generator", "use --format safetensors, or --network generator")
    if options.steps is not None and options.network != "generator":
        raise UserError("--steps", None, "needs the generator", "remove the option")
    if options.guidance is not None and options.network != "generator":
        raise UserError("--guidance", None, "needs the generator, which alone has a mapping", "remove the option")
    if options.truncation is not None and not options.stands:
        raise UserError("--truncation", None, "needs standing statistics", "remove the option, or add --standing")
    check_batch(options.at_once)
    if options.batch is not None and not options.stands and form != "hub":
        raise UserError("--batch", options.batch, "needs standing statistics", "remove the option")
    if form == "hub":
        refuse_folder(out)
        return
    if form == autoencoder_folder.FORM:
        given = {"--dtype": options.dtype != "fp32", "--truncation": options.truncation is not None}
        for flag in [flag for flag, each in given.items() if each]:
            raise UserError(flag, None, f"cannot be combined with --format {form}", "remove the option")
        recipe = read_saved_recipe(run)
        _diffusers(recipe).refuse_unfit(recipe, out)
        return
    if form in public_weights.FORMS:
        given = {"--dtype": options.dtype != "fp32", "--guidance": options.guidance is not None}
        for flag in [flag for flag, each in given.items() if each]:
            raise UserError(flag, None, f"cannot be combined with --format {form}", "remove the option")
        public_weights.refuse_unfit(read_saved_recipe(run), options.network, form)
        refuse_output(out, kind=".pth")
        return
    if form in SUFFIXES:
        if options.dtype != "fp32":
            problem, detail = f"must be fp32 with --format {form}", "a graph computes in float32"
            raise UserError("--dtype", options.dtype, problem, "remove the option", detail)
        if out.suffix != SUFFIXES[form]:
            problem = f"must end in {SUFFIXES[form]} with --format {form}"
            raise UserError("--out", str(out), problem, f"give {out.with_suffix(SUFFIXES[form])}")
    elif out.suffix in SUFFIXES.values():
        problem = f"must not end in {out.suffix} with --format {form}"
        raise UserError("--out", str(out), problem, f"give {out.with_suffix('.safetensors')}")
    refuse_output(out, kind=SUFFIXES.get(form, ".safetensors"))
    if form == "onnx":
        require("onnx", "--format", form)


def _diffusers(recipe: Recipe) -> ModuleType:
    """The module that writes a generator's family as a folder of diffusers."""
    return dit_folder if isinstance(recipe.generator, DiTGenerator) else autoencoder_folder


def _check_run(trained: TrainedNetwork, options: Options, form: str) -> None:
    if options.guidance is not None:
        check_guidance(trained.recipe, options.guidance)
        if form in SUFFIXES and not trained.recipe.objective.flow:
            problem, detail = f"must be unset with --format {form}", "no graph of a generator has it"
            raise UserError("--guidance", options.guidance, problem, "remove the option", detail)
    if options.truncation is None:
        return
    check_truncation(trained.recipe, options.truncation)
    if form in (*SUFFIXES, *public_weights.FORMS) and trained.recipe.generator.truncates_w:
        detail = "psi is an input of the graph" if has_psi(trained.recipe) else "no graph of this generator has psi"
        detail = detail if form in SUFFIXES else "psi is an argument of that project's class"
        problem = f"must be unset with --format {form}"
        raise UserError("--truncation", options.truncation, problem, "remove the option", detail)


def _finite_state(trained: TrainedNetwork, network: str, run: Path) -> dict[str, Tensor]:
    state = {name: tensor.cpu().contiguous() for name, tensor in trained.network.state_dict().items()}
    if name := first_not_finite(state):
        problem = f"has a {network} at {trained.nimg} images with non-finite values in {name}"
        raise UserError("--run", str(run), problem, "choose an older checkpoint by --nimg")
    return state


def _rounded(trained: TrainedNetwork, state: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Convert parameters to a type; buffers, which are statistics, filters and noise, stay float32."""
    if dtype == "fp32":
        return state
    rounded = dict(state)
    for name, _ in trained.network.named_parameters():
        rounded[name] = state[name].to(DTYPES[dtype])
    if lost := first_not_finite(rounded):
        problem = f"cannot hold {lost}, which has numbers up to {state[lost].abs().max().item():.3g}"
        raise UserError("--dtype", dtype, problem, "use --dtype bf16")
    return rounded


def _write(state: dict[str, Tensor], header: dict[str, str], out: Path) -> None:
    try:
        with replacing(out) as unfinished:
            save_file(_without_ties(state), unfinished, metadata=header)
    except (OSError, SafetensorError) as error:
        raise _unwritten(out, error) from None


def _without_ties(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy what shares memory with another tensor, as tied weights do, which safetensors refuses to write."""
    found, written = dict[str, Tensor](), set[int]()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in written else tensor
        written.add(place)
    return found


def _unwritten(out: Path, error: Exception) -> UserError:
    return UserError("--out", str(out), f"cannot be written: {reason(error, out)}", "give a writable path")


def _write_folder(
    run: Path, trained: TrainedNetwork, state: dict[str, Tensor], header: dict[str, str], options: Options, out: Path
) -> None:
    grid, recipe = None, trained.recipe
    if not recipe.translates:  # translations would need images of the data set, which may not be published
        conditions = open_conditions(run, recipe.data)
        columns = column_labels(recipe.data, conditions)
        sampler = Sampler(trained, 0, options.at_once, conditions, standing=False)
        sheet = sampler.grid(GRID_ROWS * len(columns), columns, options.truncation)
        grid = image_grid(sheet.images, sheet.columns)
    shown = None if grid is None else GRID_FILE
    card = model_card(run, recipe, trained.nimg, header, _num_parameters(trained), shown)
    write_folder(state, header, card, grid, out)


def _num_parameters(trained: TrainedNetwork) -> int:
    return sum(parameter.numel() for parameter in trained.network.parameters())

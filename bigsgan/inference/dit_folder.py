"""A DiT generator as a folder of diffusers: its ``DiTTransformer2DModel``, a scheduler, maybe an autoencoder."""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bigsgan.config import Recipe
from bigsgan.config.families.dit import DiTGenerator
from bigsgan.config.run_directory import refuse_existing
from bigsgan.data.autoencoders import check_folder, load_folder
from bigsgan.errors import UserError
from bigsgan.inference.trained import TrainedNetwork
from bigsgan.models.dit import NUM_FREQUENCIES
from bigsgan.runtime.atomic import leaving_nothing
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import writing

_PIPELINE = Path(__file__).with_name("flow_pipeline.py")
_EPSILON = 1e-6
_IN_BLOCK = {
    "attention.out": "attn1.to_out.0",
    "perceptron.expand": "ff.net.0.proj",
    "perceptron.contract": "ff.net.2",
    "modulation.linear": "norm1.linear",
}
_TIMES = "norm1.emb.timestep_embedder.linear_"
_FOLDER_OF_CODEC = "diffusers"


def refuse_unfit(recipe: Recipe, out: Path) -> None:
    """Refuse a generator or data that such a folder cannot hold, and a folder that exists.

    Raises:
        UserError: It is so, or diffusers is not installed.
    """
    data = recipe.data
    unfit = {
        "square images": not data.resolution.is_square,
        "classes, or no labels": bool(data.condition_size) or data.multi_label,
        "images of 1 or 3 channels": data.codec.kind == "pixels" and data.image_channels not in (1, 3),
        "data.codec.kind=pixels or diffusers": data.codec.kind not in ("pixels", _FOLDER_OF_CODEC),
    }
    for needed in [needed for needed, misses in unfit.items() if misses]:
        raise UserError("--format", "diffusers", f"needs {needed}", "use --format safetensors")
    require("diffusers", "--format", "diffusers")
    refuse_existing(out, "--out")


def write_folder(trained: TrainedNetwork, state: Mapping[str, Tensor], out: Path) -> str:
    """Write the pipeline; return how to open it.

    Raises:
        UserError: The folder cannot be written, or the data's autoencoder cannot be read.
    """
    recipe, section, codec = trained.recipe, trained.recipe.generator, trained.recipe.data.codec
    assert isinstance(section, DiTGenerator), "the run has been checked"
    library = importlib.import_module("diffusers")
    pipeline = importlib.import_module("bigsgan.inference.flow_pipeline").FlowPipeline
    vae = None
    if codec.kind == _FOLDER_OF_CODEC:
        vae = load_folder(Path(str(codec.path)), "data.codec.path", torch.device("cpu"))
        vae.register_to_config(scaling_factor=check_folder(codec).scale)  # the recipe may have its own
    scheduler = library.FlowMatchEulerDiscreteScheduler(
        shift=section.time_shift, stochastic_sampling=section.sampler == "sde"
    )
    options = {"time_scale": section.time_scale, "steps": section.steps, "guidance": section.guidance}
    prediction = "velocity" if section.times else "sample"
    made = pipeline(_transformer(library, recipe, section, state), scheduler, vae, prediction=prediction, **options)
    with writing(out), leaving_nothing(out):
        made.save_pretrained(out)
        shutil.copyfile(_PIPELINE, out / "pipeline.py")
        index = json.loads((out / "model_index.json").read_text())
        index["_class_name"] = ["pipeline", pipeline.__name__]
        (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
        for path in out.rglob("*.safetensors"):  # safetensors 0.8 lets nobody else read them
            shutil.copymode(out / "model_index.json", path)
    return f"open: diffusers.DiffusionPipeline.from_pretrained({str(out)!r}, trust_remote_code=True)"


def _transformer(library: Any, recipe: Recipe, section: DiTGenerator, state: Mapping[str, Tensor]) -> Any:
    data, num_classes = recipe.data, max(recipe.data.num_classes, 1)
    found = library.DiTTransformer2DModel(
        num_attention_heads=section.heads,
        attention_head_dim=section.width // section.heads,
        in_channels=data.channels,
        num_layers=section.depth,
        sample_size=data.network_size.shorter,
        patch_size=section.patch,
        num_embeds_ada_norm=num_classes,
        norm_eps=_EPSILON,
    )
    found.load_state_dict(_renamed(section, state, num_classes, data.channels), strict=True)
    return found


def _renamed(section: DiTGenerator, state: Mapping[str, Tensor], num_classes: int, channels: int) -> dict[str, Tensor]:
    """The state dict under diffusers' names, in which each block has its own copy of the condition's embedding."""
    own = {name.removeprefix("layers."): tensor for name, tensor in state.items()}
    classes, last = own["0.embedding.weight"], f"{section.depth + 1}"
    null = classes.new_zeros(1, section.width)
    embeddings = {"norm1.emb.class_embedder.embedding_table.weight": torch.cat([classes, null])}
    for theirs, ours, num in (("1", "expand", 2 * NUM_FREQUENCIES), ("2", "contract", section.width)):
        for leaf, shape in (("weight", (section.width, num)), ("bias", (section.width,))):
            value = own[f"0.times.{ours}.{leaf}"] if section.times else torch.zeros(shape)
            embeddings[f"{_TIMES}{theirs}.{leaf}"] = value
    patches = own["0.linear.weight"].view(section.width, channels, section.patch, section.patch)
    found = {"pos_embed.proj.weight": patches, "pos_embed.proj.bias": own["0.linear.bias"]}
    for leaf in ("weight", "bias"):
        found[f"proj_out_1.{leaf}"] = own[f"{last}.modulation.linear.{leaf}"]
        found[f"proj_out_2.{leaf}"] = own[f"{last}.linear.{leaf}"]
    for i in range(section.depth):
        of_block, block = f"transformer_blocks.{i}", f"{1 + i}"
        found |= {f"{of_block}.{name}": tensor for name, tensor in embeddings.items()}
        for leaf in ("weight", "bias"):
            for ours, theirs in _IN_BLOCK.items():
                found[f"{of_block}.{theirs}.{leaf}"] = own[f"{block}.{ours}.{leaf}"]
            for name, part in zip("qkv", own[f"{block}.attention.qkv.{leaf}"].chunk(3), strict=True):
                found[f"{of_block}.attn1.to_{name}.{leaf}"] = part.contiguous()
    return found

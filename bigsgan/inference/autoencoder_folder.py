"""A trained autoencoder as a folder of diffusers, which ``data.codec`` and ``bigsgan import`` read.

Shapes: n images (n, C, H, W) in [-1, 1], Z channels of the latents.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from bigsgan.config import Recipe
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.run_directory import refuse_existing
from bigsgan.data import build_dataset, readable_images
from bigsgan.data.autoencoders import in_chunks
from bigsgan.errors import UserError
from bigsgan.inference.trained import TrainedNetwork
from bigsgan.models.autoencoder import Gaussian
from bigsgan.runtime.atomic import leaving_nothing
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import writing
from bigsgan.weights.diffusers_autoencoder import CLASSES, network

FORM = "diffusers"
_NUM_MEASURED = 1024
"""Images of the data from whose latents the scale is taken."""


def refuse_unfit(recipe: Recipe, out: Path) -> None:
    """Refuse a generator that diffusers does not have, and a folder that exists.

    Raises:
        UserError: It is so, or diffusers is not installed.
    """
    section = recipe.generator
    kinds = " or ".join(CLASSES)
    if not isinstance(section, AutoencoderGenerator):
        problem, remedy = "needs generator.family=autoencoder or dit", "use --format safetensors"
        raise UserError("--format", FORM, problem, remedy, f"the run's is {section.family}")
    unfit = {
        f"generator.bottleneck.kind={kinds}": section.bottleneck.kind not in CLASSES,
        "generator.bottleneck.normalized=false": section.bottleneck.kind == "vq" and section.bottleneck.normalized,
        "generator.encoder_channels=null": section.bottleneck.kind == "kl"
        and section.encoder_channels not in (None, section.latent_channels),
    }
    for needed in [needed for needed, misses in unfit.items() if misses]:
        raise UserError("--format", FORM, f"needs {needed}", "use --format safetensors", "diffusers has no other")
    require("diffusers", "--format", FORM)
    refuse_existing(out, "--out")


def write_folder(trained: TrainedNetwork, state: Mapping[str, Tensor], out: Path) -> str:
    """Write the network; return what it is, in words.

    Latents that are drawn are shifted by their mean and scaled by 1 / their standard deviation (Rombach et al. 2022,
    appendix G), over images of the run's data; they are left as they are where it cannot be read.

    Raises:
        UserError: The folder cannot be written.
    """
    recipe, section = trained.recipe, trained.recipe.generator
    assert isinstance(section, AutoencoderGenerator), "the run has been checked"
    scale, text = dict[str, float](), ""
    if section.bottleneck.kind == "kl":
        try:
            mean, deviation = latent_moments(trained)
            text = f", latents of mean {mean:.3g} and deviation {deviation:.3g}"
        except UserError as error:
            mean, deviation, text = 0.0, 1.0, f" with scaling_factor 1, as its latents were not measured ({error})"
        scale = {"scaling_factor": 1 / deviation, "shift_factor": mean}
    made = network(section, state, recipe.data.channels, recipe.data.resolution.shorter, **scale)
    with writing(out), leaving_nothing(out):
        made.save_pretrained(out)
        for path in out.glob("*.safetensors"):  # safetensors 0.8 lets nobody else read them
            shutil.copymode(out / "config.json", path)
    return f"{type(made).__name__} of {FORM}{text}"


@torch.no_grad()
def latent_moments(trained: TrainedNetwork) -> tuple[float, float]:
    """Return mean and standard deviation of drawn latents, over all numbers of up to 1,024 images of the run's data.

    Raises:
        UserError: The data cannot be read, or has no readable images.
    """
    data = trained.recipe.data
    images = readable_images(build_dataset(data), data, _NUM_MEASURED)
    number = next(i for i, layer in enumerate(trained.network.layers.values()) if isinstance(layer, Gaussian))
    encoder, place = trained.network.part(0, number + 1), trained.device

    def moments(images: Tensor) -> Tensor:
        labels = torch.zeros(len(images), dtype=torch.int64, device=place)
        return encoder.fold(images.to(place), labels, labels)[1].cpu().double()

    mean, log_variance = in_chunks(moments, images, data.resolution.num_pixels).chunk(2, dim=1)
    squares = mean.square().mean() + log_variance.exp().mean()
    return mean.mean().item(), (squares - mean.mean().square()).sqrt().item()

"""Opens an exported network as a plain module, without a run directory or DeepSpeed."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from bigsgan import plugins
from bigsgan.checkpoint.exported import read_export
from bigsgan.config import NETWORKS, Recipe
from bigsgan.config.recipe import parse_saved_recipe
from bigsgan.config.signature import typed
from bigsgan.data.autoencoders import identity
from bigsgan.data.codecs import Codec, build_codec
from bigsgan.data.perceptual import check_program
from bigsgan.engines.base import DTYPES
from bigsgan.errors import UserError
from bigsgan.inference.mappings import set_guidance, set_psi
from bigsgan.models.build import build_network, network_on_meta, null_labels, with_images
from bigsgan.models.precision import compute_in_float32

CODEC = "codec_sha256"
"""Key of a header with the digest of the decoding autoencoder's weights, if the export found the autoencoder."""
PROGRAM = "program_sha256"
"""Key of a header with the digest of the frozen program with which the network begins, if the export found it."""

_WHOLE = (torch.int64, torch.int32)
"""Types of classes that torch's embedding takes."""
_MOST_LETTERS = 1 << 20
"""Longest recipe in a header."""


class ExportedNetwork(nn.Module):
    """A network with the weights of an exported file, in evaluation mode.

    A plain module: its backward is the derivative of its forward, and no forward moves a buffer, even in training mode.

    Attributes:
        recipe: Recipe of the run that it was trained in.
        network: Layers of a generator or a discriminator.
        header: The file's metadata.
    """

    def __init__(self, recipe: Recipe, network: nn.Module, header: dict[str, str]) -> None:
        super().__init__()
        self.recipe, self.network, self.header = recipe, network, header
        self._codecs: dict[tuple[str, torch.device], Codec] = {}

    def forward(self, first: Tensor, labels: Tensor | None = None, *rest: Tensor) -> Tensor:
        """Make images, or judge them.

        Args:
            first: For a generator, latents (N, Z) or input images. For a discriminator, (N, L * C', S, S): images in
                [-1, 1], or the recipe's codec's encoding of them; L is the number of GAT's levels, else 1.
            labels: Classes (N,) int64, or float32: vectors (N, K), or tokens with a mask behind their numbers
                (N, T, W + 1). None for null vectors, for null tokens if the recipe has some, or with one class or none.
            rest: Seeds (N,) int64 of a network that draws noise, or whose steps do (``generator.sampler=sde``), by
                default 0, 1, ..., the same noise for each call; a paired discriminator's inputs; before seeds, the
                latents (N, Z) that a discriminator reads, 0 for real images.

        Returns:
            A generator's images (N, C, H, W), in [-1, 1] except for families that leave them unbounded; with
            ``data.kind=latents``, latents (N, C', S, S) for the autoencoder, times its ``scaling_factor``. A
            discriminator's logits (N, ...), or (N, P + E) with what it returns after P logits.

        Raises:
            ValueError: Latents or labels have another shape, or a class is missing, no whole number or does not exist.
        """
        data = self.recipe.data
        if labels is None:
            if data.num_classes > 1 and not data.has_vectors:
                raise ValueError(f"labels must be 0 to {data.num_classes - 1}, got None")
            if data.conditions_are_tokens and not data.may_be_null:  # attention to no token is NaN
                raise ValueError("labels must be given, as they are tokens, and null ones were not trained")
            labels = null_labels(data, len(first)).to(first.device)
        if not torch.compiler.is_compiling():
            self._check(first, labels)
        if not rest and getattr(self.recipe, self.header["network"]).seeds_samples:
            rest = (torch.arange(len(first), device=first.device),)
        return self.network(first, labels, *rest)

    def _check(self, first: Tensor, labels: Tensor) -> None:
        """Refuse inputs that the network cannot read, which fail without a name deep in a layer, or on a GPU for ever.

        Raises:
            ValueError: Latents have another size, or labels another shape, or a class is no whole number or does not
                exist.
        """
        recipe, data, num = self.recipe, self.recipe.data, len(first)
        reads_latents = self.header["network"] == "generator" and not recipe.translates
        if reads_latents and first.shape != (num, recipe.latent_size):
            raise ValueError(f"latents must be of shape ({num}, {recipe.latent_size}), got {tuple(first.shape)}")
        wanted = (num, *data.condition_shape) if data.has_vectors else (num,)
        if labels.shape != wanted:
            raise ValueError(f"labels must be of shape {wanted}, got {tuple(labels.shape)}")
        if not data.num_classes or data.has_vectors:
            return
        if labels.dtype not in _WHOLE:
            raise ValueError(f"labels must be of type int64, got {str(labels.dtype).removeprefix('torch.')}")
        if num:
            lowest, highest = int(labels.min()), int(labels.max())
            if not 0 <= lowest <= highest < data.num_classes:
                raise ValueError(f"labels must be 0 to {data.num_classes - 1}, got {lowest} to {highest}")

    def decode(self, made: Tensor, path: str | Path | None = None) -> Tensor:
        """Decode a generator's latents to images with the recipe's autoencoder; without one, return ``made``.

        Args:
            made: Output of ``forward``.
            path: Path of the autoencoder; None for the recipe's.

        Returns:
            Images (N, C, H, W) float32, not clipped.

        Raises:
            UserError: The autoencoder cannot be read, or is not the one of the run.
        """
        data = self.recipe.data
        if not data.codec.is_autoencoder:
            return made
        codec = data.codec if path is None else data.codec.model_copy(update={"path": str(path)})
        data, key = data.model_copy(update={"codec": codec}), (str(codec.path), made.device)
        if key not in self._codecs:
            wanted = self.header.get(CODEC)
            if wanted and wanted != identity(codec).weights:
                problem = "is not the autoencoder that the generator was trained with"
                remedy = "give the path of that one"
                raise UserError("path" if path else "data.codec.path", str(codec.path), problem, remedy)
            self._codecs[key] = build_codec(data, made.device)
        return self._codecs[key].decode(made)


@typed
def load(
    path: str | Path, device: torch.device | str | int = "cpu", dtype: str | None = None, families: Collection[str] = ()
) -> ExportedNetwork:
    """Open a safetensors file, or a folder for the Hub, that `bigsgan export` wrote. Nothing in it is executed.

    Args:
        path: The file or the folder.
        device: Where the network computes.
        dtype: Type of its parameters, and so of its computation: ``fp32``, ``bf16`` or ``fp16``. None for float32 on a
            CPU and the file's type elsewhere. Buffers are always float32.
        families: Code from outside (`package.module:function`) that may be imported, if it is what made the network.

    Raises:
        UserError: The file or folder cannot be read, or was not exported by this project; or there is no such type.
        RuntimeError: torch has no such device, or the device has no memory left.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError("dtype", dtype, f"must be one of {', '.join(DTYPES)}", "choose one of these")
    families = [families] if isinstance(families, str) else list(families)
    plugins.give(families)
    for family in families:
        plugins.load("families", family, "families")  # a mistake in it is none of the file
    try:
        header, state = read_export(Path(path))
        recipe, stored = _recipe(header), DTYPES[header.get("dtype", "fp32")]
        state = {name: value for name, value in state.items() if not name.startswith("layers.-")}
        _check_sizes(recipe, header["network"], state)
        network = build_network(recipe, header["network"])
        network.checkpointing = False
        for spectral in network.spectral_layers():
            spectral.orthogonal = 0.0  # belongs to training: its gradient would be added to every backward
        network.load_state_dict(state)
        psi, guidance = (float(header.get(name, 1.0)) for name in ("truncation", "guidance"))
        if not math.isfinite(psi) or not math.isfinite(guidance):
            raise ValueError("its truncation or its guidance is not finite")
        set_psi(network, psi)
        set_guidance(network, guidance)
    except plugins.UntrustedError as error:
        remedy = f"name it yourself, as by bigsgan.load(path, families=[{error.value!r}])"
        raise UserError(error.field, error.value, error.problem, remedy) from None
    except MemoryError:
        raise
    except Exception as error:  # a foreign header can cause any error
        cause = next(iter(str(error).splitlines()), "")
        problem = f"must be an exported network: {type(error).__name__}: {cause}"
        raise UserError(str(path), None, problem, "give a file that `bigsgan export` wrote") from None
    check_program(getattr(recipe, header["network"]), header.get(PROGRAM))
    if header["network"] == "generator":
        network = with_images(recipe, network)
    on_cpu = torch.device(device).type == "cpu"
    if on_cpu or dtype == "fp32":
        compute_in_float32(network)  # all layers compute in the parameters' type
    wanted = DTYPES[dtype] if dtype is not None else torch.float32 if on_cpu else stored
    for parameter in network.parameters():
        parameter.data = parameter.data.to(wanted)
    return ExportedNetwork(recipe, network, header).to(device).eval()


def _recipe(header: Mapping[str, str]) -> Recipe:
    if header["network"] not in NETWORKS or len(header["recipe"]) > _MOST_LETTERS:
        raise ValueError("its header is that of another program")
    tree = dict(json.loads(header["recipe"]))
    tree["augmentation"] = None  # belongs to training
    return parse_saved_recipe(tree)


def _check_sizes(recipe: Recipe, network: str, state: Mapping[str, Tensor]) -> None:
    """Compare with the network that the header describes, before taking memory for a network of any size."""
    wanted = network_on_meta(recipe, network).state_dict()
    if {name: value.shape for name, value in wanted.items()} != {name: value.shape for name, value in state.items()}:
        raise ValueError("its tensors are not those of the network that its header describes")

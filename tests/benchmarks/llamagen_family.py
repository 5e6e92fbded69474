"""Compares ``family: autoencoder`` with LlamaGen's unedited tokenizer: images, codebook loss and gradients.

    python -m tests.benchmarks.llamagen_family PATH

PATH is a checkout of github.com/FoundationVision/LlamaGen (Sun et al. 2024). Both have the public class's weights, but
a codebook amid the latents, and see the same images. Printed are the largest difference of a pixel, the difference of
the losses, and the farthest gradient relative to its norm; the attentions' biases of keys, whose gradient is only
rounding, are left out.
"""

from __future__ import annotations

import importlib
import re
import sys

import torch
import torch.nn.functional as F

from bigsgan.adversarial.terms.latents import CodebookTerm
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.reconstruction import Codebook
from bigsgan.images.size import Size
from bigsgan.models.autoencoder import generator_layers
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics
from bigsgan.weights.diffusers_autoencoder import names

LEVELS, CODES, ENCODED = [1, 1, 2], 64, 32
NAMES = {
    "(down|up)_blocks": "conv_blocks",
    r"mid_block\.resnets\.0": "mid.0",
    r"mid_block\.attentions\.0": "mid.1",
    r"mid_block\.resnets\.1": "mid.2",
    "resnets": "res",
    "attentions": "attn",
    "conv_shortcut": "nin_shortcut",
    r"(down|up)samplers\.0": r"\1sample",
    "conv_norm_out": "norm_out",
    "group_norm": "norm",
    r"to_out\.0": "proj_out",
    r"to_([qkv])\b": r"\1",
}
"""Parts of names in diffusers, and in LlamaGen."""


def renamed(name: str) -> str:
    """LlamaGen's name of a parameter, given that of diffusers."""
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def main(path: str) -> None:
    """Compute both once, forward and backward, and print the differences."""
    sys.path.insert(0, path)
    public = importlib.import_module("tokenizer.tokenizer_image.vq_model")
    torch.manual_seed(0)
    sizes = {"encoder_ch_mult": LEVELS, "decoder_ch_mult": LEVELS, "z_channels": ENCODED}
    model = public.VQModel(public.ModelArgs(codebook_size=CODES, codebook_show_usage=False, **sizes))
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    with torch.no_grad():
        latents = model.quant_conv(model.encoder(images)).permute(0, 2, 3, 1).flatten(0, 2)
        model.quantize.embedding.weight.copy_(F.normalize(latents[:CODES], dim=1) + 0.01 * torch.randn(CODES, 8))
    section = AutoencoderGenerator(
        multipliers=LEVELS,
        attention=[len(LEVELS) - 1],
        latent_channels=8,
        encoder_channels=ENCODED,
        bottleneck={"kind": "vq", "num_codes": CODES},
    )
    network = LayerStack(generator_layers(section, Size.of(32), 3, 0))
    theirs, ours = dict(model.named_parameters()), dict(network.named_parameters())
    table = {name: renamed(other) for name, other in names(section).items()}
    network.load_state_dict({name: theirs[other].data.view(ours[name].shape) for name, other in table.items()})

    made, (of_codes, commitment, *_) = model(images)
    (made.square().mean() + of_codes + commitment).backward()
    again, *outputs = network.fold(images, torch.zeros(len(images)))
    term = CodebookTerm(Codebook(), section, lambda counts: counts)
    read = dict(zip(("encoded", "quantized", "codes"), outputs, strict=True))
    loss = term.loss(read, Statistics(torch.device("cpu")))
    (again.square().mean() + loss).backward()

    print(f"a pixel: {float((made - again).abs().max()):.1e} of {float(made.abs().max()):.2f}")
    print(f"codebook loss: {float((of_codes + commitment - loss).abs()):.1e} of {float(loss):.4f}")
    far = {}
    for name, other in table.items():
        if not other.endswith("k.bias"):
            wanted = theirs[other].grad.view(ours[name].shape)  # type: ignore[union-attr]
            far[other] = float((ours[name].grad - wanted).norm() / wanted.norm())  # type: ignore[operator]
    print(f"gradients: {len(far)} parameters, {len(read['codes'].unique())} codes in use; farthest", end=" ")
    print(max((distance, name) for name, distance in far.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])

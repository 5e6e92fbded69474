"""`python -m tests.records.codebook`: what a public quantizer with averaged codes computes, as a record for tests.

The quantizer is VectorQuantize of the package vector-quantize-pytorch; nothing of it is in this file but the names of
its arguments and buffers. Its counts begin as if all codes had been used alike, and nothing is added to them.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import REPOSITORY

PATH = REPOSITORY / "tests" / "data" / "codebook_averages.safetensors"
UPDATES, IMAGES, CHANNELS, SIDE, CODES, DECAY, COMMITMENT = 4, 3, 3, 4, 6, 0.7, 0.4
NAMES = {False: "euclidean", True: "cosine"}


def quantizer(codes: Tensor, num_latents: int, is_normalized: bool) -> Any:
    """The public module, with these codes (K, Z), for so many latents in an update."""
    module = import_module("vector_quantize_pytorch").VectorQuantize(
        dim=codes.shape[1],
        codebook_size=len(codes),
        decay=DECAY,
        eps=0.0,
        commitment_weight=COMMITMENT,
        threshold_ema_dead_code=0,
        use_cosine_sim=is_normalized,
        rotation_trick=False,
        accept_image_fmap=True,
    )
    own, even = module._codebook, num_latents / len(codes)
    own.embed.copy_(codes)
    own.cluster_size.fill_(even)
    own.embed_avg.copy_(codes * even)
    return module.train()


def computed(latents: Tensor, codes: Tensor, is_normalized: bool) -> dict[str, Tensor]:
    """What it makes of latents (U, N, Z, H, W), and their gradients, where the loss has its outputs' squares too."""
    module, found = quantizer(codes, latents[0].numel() // codes.shape[1], is_normalized), list[list[Tensor]]()
    for each in latents:
        h = each.clone().requires_grad_()
        made, numbers, loss = module(h)
        (made.square().mean() + loss.sum()).backward()
        own = module._codebook
        uses = own.cluster_size[0] * len(codes) / numbers.numel()
        found.append([*(t.detach().clone() for t in (made, numbers, loss.sum(), h.grad, own.embed[0], uses))])
    names = "made", "numbers", "loss", "gradient", "codes", "uses"
    return {name: torch.stack(each) for name, each in zip(names, zip(*found, strict=True), strict=True)}


def main() -> None:
    """Draw latents and codes, and write the record."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(UPDATES, IMAGES, CHANNELS, SIDE, SIDE, generator=generator)
    codes = torch.nn.functional.normalize(torch.randn(CODES, CHANNELS, generator=generator), dim=1)
    tensors = {"latents": latents, "codes": codes}
    for is_normalized, name in NAMES.items():
        tensors |= {f"{name}.{key}": each for key, each in computed(latents, codes, is_normalized).items()}
    version = f"vector-quantize-pytorch {metadata.version('vector-quantize-pytorch')}, torch {torch.__version__}"
    what = f"VectorQuantize, decay {DECAY}, commitment {COMMITMENT}: {UPDATES} updates of float32 latents"
    save_file({key: each.contiguous() for key, each in tensors.items()}, PATH, {"computed": what, "by": version})


if __name__ == "__main__":
    main()

"""`python -m tests.records.gat CLONE`: what github.com/hse1032/GAT computes, as records for the tests of GAT.

CLONE is a directory with the public code, which needs timm and einops. Nothing of it is in this file but the names of
its modules, classes and arguments. All is computed in float64, and all but losses and norms is saved in float32. A
record that exists keeps its weights, inputs and seeds, and only what the public code computes is written anew;
--again draws them all. `update` is of the networks of `patch2` in the same directory.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bigsgan.models import gat, noise
from bigsgan.models.augment_draws import AugmentationDraws
from tests import REPOSITORY
from tests.networks import part
from tests.records import wide

DATA = REPOSITORY / "tests" / "data"
LATENT, EMBEDDING, CLASSES, LEVELS, SAMPLES = 12, 10, 3, 4, 3
NETWORKS = {
    "patch1": {"side": 4, "channels": 1, "width": 8, "heads": 1, "patch": 1, "depth": 8},
    "patch2": {"side": 8, "channels": 3, "width": 12, "heads": 3, "patch": 2, "depth": 4},
    "patch4": {"side": 8, "channels": 1, "width": 8, "heads": 2, "patch": 4, "depth": 4},
    "patch8": {"side": 24, "channels": 1, "width": 64, "heads": 4, "patch": 8, "depth": 4},
}
WIDE = {"patch8": {"G": 1_000, "D": 2_000}}
"""Networks whose weights are drawn from these seeds wherever they are needed."""
NAMES = [*NETWORKS, "update", "teacher"]
RATES = {"D": 2e-3, "G": 3e-3}
GAMMAS = {"r1_gamma": 0.4, "r2_gamma": 0.2}
SEEDS = {
    "real": [5, -7, 2**40], "fake": [9, 12, -(2**50)], "judged_real": [21, 22, 23], "judged_fake": [31, -32, 33],
}  # fmt: skip


def public_code(clone: Path, compiled: bool = False) -> SimpleNamespace:
    """Its classes and loss; its rotary positions are compiled only if asked for."""
    os.environ |= {"XFORMERS_DISABLED": "1"} | ({} if compiled else {"TORCHDYNAMO_DISABLE": "1"})
    sys.path.insert(0, str(clone))
    modules = {name: importlib.import_module(name) for name in ("models.generator", "models.discriminator", "losses")}
    return SimpleNamespace(
        generator=modules["models.generator"].GAT,
        discriminator=modules["models.discriminator"].GATD,
        generators=modules["models.generator"].GAT_models,
        discriminators=modules["models.discriminator"].GATD_models,
        loss=modules["losses"].RpGANLoss,
        teacher_loss=modules["losses"].RpGANPTLoss,
        teacher_module=importlib.import_module("losses.Rp_PT_loss"),
    )


def build(public: SimpleNamespace, section: dict[str, int], **of_discriminator: Any) -> dict[str, nn.Module]:
    common = {
        "input_size": section["side"], "in_channels": section["channels"], "patch_size": section["patch"],
        "hidden_size": section["width"], "num_heads": section["heads"], "depth": section["depth"],
        "num_classes": CLASSES, "z_dims": [0], "qk_norm": True, "fused_attn": True,
    }  # fmt: skip
    networks = {
        "G": public.generator(latent_size=LATENT, **common),
        "D": public.discriminator(**{"cmap_dim": EMBEDDING, **common, **of_discriminator}),
    }
    return {letter: in_float64(network) for letter, network in networks.items()}


def published(public: SimpleNamespace, letter: str, size: str, side: int, num_classes: int) -> nn.Module:
    """G or D at a size of the public code, such as XL/2, for latents of ``side``."""
    build = {"G": public.generators, "D": public.discriminators}[letter][f"GAT-{size}"]
    return build(input_size=side, num_classes=num_classes, z_dims=[0], fused_attn=True, qk_norm=True)


def in_float64(network: nn.Module) -> nn.Module:
    for module in network.double().modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:  # else it is that of the type it computes in
            module.eps = torch.finfo(torch.float32).eps
    return network


@torch.no_grad()
def disturb(network: nn.Module) -> None:
    """Move what begins at 0, 1 or all alike, in numbers that float32 holds."""
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            unlike = "norm" in name or name == "final_layer.0.weight"
            if "embedding_table" in name:
                parameter.normal_()
            elif parameter.dim() == 1:
                parameter.add_((0.1 if unlike else 0.01) * torch.randn_like(parameter))
            parameter.copy_(parameter.float())


def fill(network: nn.Module, state: dict[str, Tensor]) -> None:
    """With recorded weights; tables that a drawn record does not have stay those that the network computes."""
    missing, unexpected = network.load_state_dict(state, strict=False)
    assert not unexpected
    assert all(any(fixed in name for fixed in wide.FIXED) for name in missing), missing


def stacked(levels: Tensor) -> Tensor:
    """(L, N, C, H, W) -> (N, L * C, H, W), as our networks have the images of a sample."""
    return levels.transpose(0, 1).flatten(1, 2)


def of_levels(images: Tensor) -> Tensor:
    """(N, L * C, H, W) -> (L, N, C, H, W)."""
    return images.unflatten(1, (LEVELS, -1)).transpose(0, 1)


def grads_of(network: nn.Module) -> dict[str, Tensor]:
    """Without those of an embedding that is multiplied by 0."""
    named = network.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None and p.grad.any()}


def make(generator: nn.Module, z: Tensor, y: Tensor) -> Tensor:
    nothing = torch.zeros(len(z), generator.in_channels, generator.input_size, generator.input_size, dtype=z.dtype)
    return generator(nothing, y, z, multiscale=True)


def networks_record(public: SimpleNamespace, name: str, given: dict[str, Tensor]) -> tuple[dict[str, Any], str]:
    """Outputs of both networks, the gradients of their sum, of G's in a direction; and the seeds of drawn weights."""
    section, networks, described = NETWORKS[name], build(public, NETWORKS[name]), {}
    shape = SAMPLES, LEVELS * section["channels"], section["side"], section["side"]
    record = {key: given.get(key, torch.randn(shape)) for key in ("images", "direction")}
    record["z"] = given.get("z", torch.randn(SAMPLES, LATENT))
    record["y"] = given.get("y", torch.randint(CLASSES, (SAMPLES,)))
    for letter, network in networks.items():
        if name in WIDE:
            shapes = {key: list(value.shape) for key, value in network.state_dict().items() if "feat_rope" not in key}
            described[letter] = WIDE[name][letter], shapes
            weights = wide.drawn(shapes, WIDE[name][letter])
            fill(network, {key: value for key, value in weights.items() if not key.endswith(wide.FIXED)})
        elif given:
            fill(network, part(given, f"{letter}."))
        else:
            disturb(network)
    z, images = record["z"].double(), record["images"].double().requires_grad_()
    made = stacked(make(networks["G"], z, record["y"]))
    (made * record["direction"]).sum().backward()
    logits = networks["D"](of_levels(images), record["y"]).squeeze(1)
    logits.sum().backward()
    record |= {"made": made, "logits": logits, "slope": images.grad}
    for letter, network in networks.items():
        if name not in WIDE:
            record |= {f"{letter}.{key}": value for key, value in network.state_dict().items()}
        grads = grads_of(network)
        record |= {f"{letter}_grad.{key}": wide.kept(g) if name in WIDE else g for key, g in grads.items()}
    return record, json.dumps(described)


def augmentation(seeds: Tensor, side: int, recolours: bool) -> list[Tensor]:
    """Numbers that our augmentation draws of some samples, in the order in which the public one asks for them."""
    draws = AugmentationDraws(seeds, torch.float64)
    numbers = []
    if recolours:
        numbers += [draws.uniform(f"diff_{of}") for of in ("brightness", "saturation", "contrast")]
        numbers.append(draws.gate("diff_brightness"))
    farthest, length = int(side / 8 + 0.5), int(side / 2 + 0.5)
    shifts, middles = draws.uniform("diff_translation", 2), draws.uniform("diff_cutout", 2)
    numbers += [torch.floor(of * (2 * farthest + 1)).long() - farthest for of in shifts.unbind(1)]
    numbers += [torch.floor(of * (side + 1 - length % 2)).long() for of in middles.unbind(1)]
    return [*numbers, draws.uniform("diff_flip")]


def level_noise(seeds: Tensor, channels: int, side: int) -> list[Tensor]:
    """Noise that our layer draws, from the finest level to the coarsest."""
    drawn = noise.normal(seeds, gat._NOISE_STREAM, (LEVELS, channels, side, side)).double()
    return [*drawn.unbind(1)][::-1]


@contextlib.contextmanager
def drawing(numbers: list[Tensor]) -> Iterator[None]:
    """Within the block, torch's functions of random numbers return these in turn, in the shapes that are asked for."""
    left = iter(numbers)

    def at(shape: Any) -> Tensor:
        return next(left).reshape(tuple(shape))

    with (
        mock.patch.object(torch, "rand", lambda *shape, **_: at(shape)),
        mock.patch.object(torch, "randint", lambda *_, size, **__: at(size)),
        mock.patch.object(torch, "randn_like", lambda x: at(x.shape)),
    ):
        yield
    assert next(left, None) is None, "numbers were left over"


def step(network: nn.Module, loss: Tensor, letter: str) -> dict[str, Tensor]:
    """One update, as the public trainer makes it: the loss, gradients, their norm, and each parameter's change."""
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    loss.mean().backward()
    grads = {name: grad.clone() for name, grad in grads_of(network).items()}
    before = {name: p.detach().clone() for name, p in parameters.items()}
    norm = nn.utils.clip_grad_norm_(parameters.values(), 1.0)
    torch.optim.AdamW(parameters.values(), lr=RATES[letter], betas=(0.0, 0.99), weight_decay=0.0, eps=1e-8).step()
    record = {f"{letter}_loss": loss.detach().mean(), f"{letter}_norm": norm}
    record |= {f"{letter}_grad.{name}": grad for name, grad in grads.items()}
    return record | {f"{letter}_step.{name}": parameters[name].detach() - before[name] for name in grads}


def update_record(public: SimpleNamespace, given: dict[str, Tensor], state: dict[str, Tensor]) -> dict[str, Any]:
    """D's update by finite differences at a step of 0.01, then G's, of the networks of ``patch2`` in ``state``."""
    section = NETWORKS["patch2"]
    channels, side = section["channels"], section["side"]
    record = {"images": given.get("images", torch.rand(SAMPLES, channels, side, side) * 2 - 1)}
    record["z"] = given.get("z", torch.randn(SAMPLES, LATENT))
    record["y"] = given.get("y", torch.randint(CLASSES, (SAMPLES,)))
    record["r1_noise"] = given.get("r1_noise", torch.randn_like(record["images"]))
    record["r2_noise"] = given.get("r2_noise", torch.randn(SAMPLES, LEVELS * channels, side, side))
    seeds = {name: given.get(f"seeds.{name}", torch.tensor(values)) for name, values in SEEDS.items()}
    record |= {f"seeds.{name}": value for name, value in seeds.items()}

    networks = build(public, section)
    for letter, network in networks.items():
        fill(network, part(state, f"{letter}."))
    g, d = (Wrapped(networks[letter]) for letter in "GD")
    loss = public.loss(approximate=True, r1_every=1, r2_every=1, **GAMMAS)
    assert loss.approximated_GP_std == 0.01
    images = record["images"].double()
    inputs = {"x": torch.zeros_like(images), "z": record["z"].double(), "y": record["y"]}

    def numbers(fake: Tensor, real: Tensor, recolours: bool) -> list[Tensor]:
        augmented = [*augmentation(fake, side, recolours), *augmentation(real, side, recolours)]
        return [*augmented, *level_noise(fake, channels, side), *level_noise(real, channels, side)]

    loss.policy = "translation,cutout,flip"
    directions = [record["r1_noise"].double(), *of_levels(record["r2_noise"].double())]
    with drawing([*numbers(seeds["fake"], seeds["real"], recolours=False), *directions]):
        lost, parts, _ = loss.step_disc(g, d, None, images, None, 0, dict(inputs))
    record |= {name: parts[name].detach().mean() for name in ("r1_loss", "r2_loss")}
    record |= step(networks["D"], lost, "D")
    networks["D"].requires_grad_(False)
    loss.policy = "color,translation,cutout,flip"
    with drawing(numbers(seeds["judged_fake"], seeds["judged_real"], recolours=True)):
        lost, _, _ = loss.step_gen(g, d, None, images, None, 0, dict(inputs))
    return record | step(networks["G"], lost, "G")


def teacher_record(public: SimpleNamespace, given: dict[str, Tensor]) -> dict[str, Any]:
    """D's loss with a teacher of 4x4 and of 5x5 patches, without augmentation, noise and penalties."""
    section, seen = {"side": 8, "channels": 2, "width": 16, "heads": 2, "patch": 2, "depth": 4}, 6
    shape = SAMPLES, section["channels"], section["side"], section["side"]
    record = {"images": given.get("images", torch.randn(shape))}
    record["made"] = given.get("made", torch.randn(LEVELS, *shape))
    record["y"] = given.get("y", torch.randint(CLASSES, (SAMPLES,)))
    record["raw"] = given.get("raw", torch.randint(256, (SAMPLES, 3, 16, 16), dtype=torch.uint8))
    prepared = public.teacher_module.preprocess_raw_image(record["raw"].double(), "dinov2")
    record["prepared"] = prepared[:, :, ::16, ::16]
    network = build(public, section, z_dims=[seen], projector_dim=10, cmap_dim=8)["D"]
    if given:
        fill(network, part(given, "D."))
    else:
        disturb(network)
    record |= {f"D.{name}": p for name, p in network.named_parameters() if p.requires_grad}
    loss = public.teacher_loss(r1_every=2, r2_every=2, proj_coeff=0.7)
    loss.apply_gaussian_list_cumulative = lambda levels: (levels, None)
    made, images = record["made"].double(), record["images"].double()
    inputs = {"x": images, "z": images, "y": record["y"]}
    for side in (4, 5):
        features = {
            f"{side}.class": given.get(f"{side}.class", torch.randn(SAMPLES, seen)),
            f"{side}.patches": given.get(f"{side}.patches", torch.randn(SAMPLES, side**2, seen)),
        }
        whole, patches = (value.double() for value in features.values())
        names = {"x_norm_clstoken": whole, "x_norm_patchtokens": patches}
        loss.encode_feature = lambda *_, names=names, **__: [names]
        network.zero_grad()
        with mock.patch.object(public.teacher_module, "aug", lambda images, **_: (images, {})):
            lost, parts, _ = loss.step_disc(lambda **_: made, network, None, images, None, 1, dict(inputs))
        lost.mean().backward()
        record |= features | {f"{side}.loss": lost.mean()}
        record |= {f"{side}.of_class": parts["z_kd_cls"].mean(), f"{side}.of_patches": parts["z_kd_patch"].mean()}
        grads = grads_of(network).items()
        kept = ("proj.", "cls_token", "blocks.3.")
        record |= {f"{side}.grad.{name}": grad.clone() for name, grad in grads if name.startswith(kept)}
    return record


class Wrapped:
    """A network as a trainer wraps it, with the attribute that the public loss may ask for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.module(*arguments, **options)


def changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """The largest change of a tensor, relative to its norm."""
    if not before:
        return "new"
    others = len(before.keys() ^ after.keys())
    apart = {
        name: ((after[name] - value).double().norm() / value.double().norm().clamp(min=1e-30)).item()
        for name, value in before.items()
        if name in after
    }
    worst = max(apart, key=apart.__getitem__)
    return f"at most {apart[worst]:.1e} apart, in {worst}; {others} tensors in one of both only"


def narrowed(value: Tensor) -> Tensor:
    """In float32, unless it is a loss or a norm, or of whole numbers."""
    value = value.detach().contiguous().clone()
    return value.float() if value.is_floating_point() and value.dim() else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clone", type=Path, help="directory with the public code")
    parser.add_argument("names", nargs="*", help=f"of {[*NETWORKS, 'update']}; all unless given")
    parser.add_argument("--out", type=Path, default=DATA, help="where records are written")
    parser.add_argument("--again", action="store_true", help="draw weights, inputs and seeds again")
    options = parser.parse_args()
    public = public_code(options.clone)
    torch.set_num_threads(1)
    for name in options.names or NAMES:
        torch.manual_seed(0)
        file = f"gat_{name}.safetensors"
        before = load_file(DATA / file) if (DATA / file).exists() else {}
        given, metadata = {} if options.again else before, None
        if name == "update":
            record = update_record(public, given, load_file(options.out / "gat_patch2.safetensors"))
        elif name == "teacher":
            record = teacher_record(public, given)
        else:
            record, described = networks_record(public, name, given)
            metadata = {"drawn": described} if name in WIDE else None
        assert all(value.isfinite().all() for value in record.values() if value.is_floating_point())
        saved = {key: narrowed(value) for key, value in record.items()}
        print(f"{name}: {changes(before, saved)}")
        save_file(saved, options.out / file, metadata)


if __name__ == "__main__":
    main()

"""Snapshots as the public training loops of stylegan2-ada-pytorch and stylegan3 save them, of tiny networks."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bigsgan.weights.stylegan_pickle import ForeignNetwork, read_snapshot

FREEZABLE = ("fromrgb", "conv0", "conv1", "skip")
TINY = Path(__file__).resolve().parent / "data" / "stylegan2" / "snapshot.pkl"
GEOMETRY = dict.fromkeys(["xflip", "rotate90", "xint", "scale", "rotate", "aniso", "xfrac"], 1)
BGC = {**GEOMETRY, **dict.fromkeys(["brightness", "contrast", "lumaflip", "hue", "saturation"], 1)}
OPTIONS: dict[str, Any] = {
    "num_gpus": 2,
    "image_snapshot_ticks": 10,
    "network_snapshot_ticks": 20,
    "metrics": ["fid50k_full"],
    "random_seed": 5,
    "training_set_kwargs": {
        "class_name": "training.dataset.ImageFolderDataset", "path": "/data/cats.zip", "use_labels": False,
        "max_size": 5153, "xflip": True, "resolution": 8,
    },
    "data_loader_kwargs": {"pin_memory": True, "num_workers": 3, "prefetch_factor": 2},
    "G_kwargs": {"class_name": "training.networks.Generator", "z_dim": 4, "mapping_kwargs": {"num_layers": 2}},
    "D_kwargs": {"class_name": "training.networks.Discriminator", "epilogue_kwargs": {"mbstd_group_size": 2}},
    "G_opt_kwargs": {"class_name": "torch.optim.Adam", "lr": 0.002, "betas": [0, 0.99], "eps": 1e-08},
    "D_opt_kwargs": {"class_name": "torch.optim.Adam", "lr": 0.003, "betas": [0, 0.98], "eps": 1e-07},
    "loss_kwargs": {"class_name": "training.loss.StyleGAN2Loss", "r1_gamma": 0.4},
    "total_kimg": 12000,
    "batch_size": 8,
    "batch_gpu": 4,
    "ema_kimg": 2.5,
    "ema_rampup": 0.05,
    "ada_target": 0.7,
    "augment_kwargs": {"class_name": "training.augment.AugmentPipe", **BGC},
}  # fmt: skip
"""Of a ``training_options.json``, which leaves out what is a default of the training loop."""


def _reconstruct_persistent_obj(meta: dict[str, Any]) -> Any:
    raise AssertionError("the source in a pickle is never run")


_reconstruct_persistent_obj.__module__ = "torch_utils.persistence"


class _Persistent(nn.Module):
    """Reduced to a call with source text and attributes, as ``torch_utils.persistence`` does."""

    def __init__(self, class_name: str, init_kwargs: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.__dict__["_name"] = class_name
        self._init_args, self._init_kwargs = (), init_kwargs or {}

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in self.__dict__.items() if key != "_name"}
        meta = {"type": "class", "version": 6, "module_src": "raise SystemExit", "class_name": self._name}
        return _reconstruct_persistent_obj, ({**meta, "state": state},), None


def _network(found: ForeignNetwork, change: float = 0.0) -> nn.Module:
    root = _Persistent("Network", json.loads(json.dumps(found.init_kwargs)))
    for name, tensor in found.state.items():
        *path, last = name.split(".")
        module: nn.Module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, _Persistent("Layer"))
            module = module.get_submodule(part)
        if name in found.parameters:
            module.register_parameter(last, nn.Parameter(tensor + change, requires_grad=False))
        else:
            module.register_buffer(last, tensor.clone())
    return root.eval()


def augment_pipe(p: float, multipliers: dict[str, Any]) -> nn.Module:
    pipe = _Persistent("AugmentPipe", multipliers)
    pipe.register_buffer("p", torch.ones([]))
    pipe.register_buffer("Hz_geom", torch.ones(12))
    pipe.register_buffer("Hz_fbank", torch.ones(4, 43))
    pipe.p.copy_(torch.as_tensor(p))
    for name, value in multipliers.items():
        setattr(pipe, name, value)
    return pipe.eval()


def write_snapshot(
    path: Path,
    p: float | None = 0.37,
    multipliers: dict[str, Any] | None = None,
    known: bool = True,
    freeze_layers: int = 0,
) -> dict[str, Tensor]:
    """Write a snapshot, whose EMA differs from its generator; return the EMA.

    Args:
        path: Of the file.
        p: Of the augmentations, or None for a run without.
        multipliers: Of the augmentations.
        known: Whether the settings of the data are there, as they are not in converted pickles.
        freeze_layers: First convolutions of D that Freeze-D keeps: their weights are buffers.
    """
    networks = read_snapshot(TINY).networks
    if freeze_layers:
        d = networks["D"]
        kept = {f"b8.{name}.{leaf}" for name in FREEZABLE[:freeze_layers] for leaf in ("weight", "bias")}
        networks["D"] = d._replace(
            init_kwargs={**d.init_kwargs, "block_kwargs": {"freeze_layers": freeze_layers}},
            parameters=tuple(name for name in d.parameters if name not in kept),
        )
    content = {
        "training_set_kwargs": dict(OPTIONS["training_set_kwargs"]) if known else None,
        "G": _network(networks["G"], 0.125),
        "D": _network(networks["D"]),
        "G_ema": _network(networks["G_ema"]),
        "augment_pipe": None if p is None else augment_pipe(p, BGC if multipliers is None else multipliers),
    }
    home: Any = ModuleType("torch_utils.persistence")
    home._reconstruct_persistent_obj = _reconstruct_persistent_obj
    with mock.patch.dict(sys.modules, {"torch_utils": ModuleType("torch_utils"), home.__name__: home}):
        path.write_bytes(pickle.dumps(content))
    return networks["G_ema"].state


def write_options(directory: Path, **changes: Any) -> None:
    content = {key: value for key, value in {**OPTIONS, **changes}.items() if value is not ...}
    (directory / "training_options.json").write_text(json.dumps(content, indent=2))

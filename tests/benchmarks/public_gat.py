"""An update of GAT by the public trainer and by this one, in turns in one process.

    python -m tests.benchmarks.public_gat CLONE [--size B] [--batch 128] [--rounds 3] \
        [--variants eager,kept,compiled,exact]

CLONE is a directory with the code of github.com/hse1032/GAT, which needs timm and einops. Its networks, its loss and
its compiled rotary positions are used as they are; the lines around them do what its train.py has one process do:
autocast to bfloat16, AdamW, gradients clipped at 1, EMA, without a teacher. Its latents lie on the device, ours come
from files. Both have R1 and R2 by finite differences in every update, of steps of 0.01 there and 0.1 here, which take
the same time, and ours are compared with the exact penalty every 64th time; all float32 products may use TF32, as its
script asks and bigsgan's default does not. ``eager`` recomputes each block, as the public code always does; ``kept``
and ``compiled`` keep all activations. ``compiled`` has no counterpart there, nor has ``exact``, whose penalties
are exact: the public code does not compute these. Data and weights are not the same.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bigsgan.bench.measure import Settings, Visit, start_profiler, visit
from bigsgan.bench.product import build_engine_loop
from bigsgan.config import RunPlan, both_engines, load_recipe, plan_run
from bigsgan.runtime import comm
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.runtime.tf32 import tf32
from tests import REPOSITORY
from tests.records.gat import Wrapped, public_code, published

LATENT = (4, 32, 32)
NUM_CLASSES, NUM_LATENTS = 1_000, 512
KEPT = both_engines("activation_checkpointing=false")
VARIANTS = {
    "eager": [],
    "kept": KEPT,
    "compiled": [*KEPT, *both_engines("compile=whole")],
    "exact": ["objective.r1.form=exact", "objective.r2.form=exact"],
}


class InBfloat16(Wrapped):
    """A network as `accelerate --mixed_precision bf16` prepares it."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        with torch.autocast(comm.device().type, torch.bfloat16):
            return super().__call__(*arguments, **options).float()


class Enlarged(nn.Module):
    """Shows three channels of latents as images."""

    def forward(self, latents: Tensor) -> Tensor:
        return latents[:, :3].repeat_interleave(8, 2).repeat_interleave(8, 3)


class PublicLoop:
    """Callable that makes one update as the public trainer does, to be measured as `bigsgan bench train` measures."""

    waited_seconds = 0.0

    def __init__(self, public: SimpleNamespace, networks: dict[str, nn.Module], batch: int) -> None:
        self._modules = {letter: network.to(comm.device()).train() for letter, network in networks.items()}
        self._wrapped = {letter: InBfloat16(module) for letter, module in self._modules.items()}
        self._average = copy.deepcopy(self._modules["G"]).requires_grad_(False)
        self._optimizers = {
            letter: torch.optim.AdamW(module.parameters(), lr=2e-4, betas=(0.0, 0.99), weight_decay=0.0, eps=1e-8)
            for letter, module in self._modules.items()
        }
        self._loss = public.loss(approximate=True, r1_every=1, r2_every=1, r1_gamma=0.1, r2_gamma=0.1)
        self._latents = torch.randn(batch, *LATENT, device=comm.device())
        self._labels = torch.randint(NUM_CLASSES, (batch,), device=comm.device())
        self._updates = 0

    def __call__(self) -> None:
        """D's step, then G's, on new latents and images of the same classes."""
        given = {"y": self._labels}  # the loss adds z, which G's step has from D's
        self._modules["D"].requires_grad_(True)
        self._step("D", self._loss.step_disc, given)
        self._modules["D"].requires_grad_(False)
        self._modules["G"].requires_grad_(True)
        self._step("G", self._loss.step_gen, given)
        with torch.no_grad():
            for average, weight in zip(self._average.parameters(), self._modules["G"].parameters(), strict=True):
                average.mul_(0.999).add_(weight, alpha=1 - 0.999)
        self._modules["G"].requires_grad_(False)
        self._updates += 1

    def _step(self, letter: str, step: Any, given: dict[str, Tensor]) -> None:
        g, d = self._wrapped["G"], self._wrapped["D"]
        lost, _, _ = step(g, d, None, self._latents, None, self._updates, given)
        lost.mean().backward()
        parameters = [p for p in self._modules[letter].parameters() if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self._optimizers[letter].step()
        self._optimizers[letter].zero_grad(set_to_none=True)

    def means(self) -> dict[str, float]:
        """Nothing, as losses of other data and weights are not compared."""
        return {}

    def idle(self) -> None:
        """Networks take turns."""

    def close(self) -> None:
        """Nothing to release."""


def build_public_loop(public: SimpleNamespace, size: str, batch: int) -> PublicLoop:
    torch.manual_seed(0)
    networks = {letter: published(public, letter, f"{size}/2", LATENT[1], NUM_CLASSES) for letter in "GD"}
    return PublicLoop(public, networks, batch)


def write_latents(root: Path) -> None:
    """As REPA's preprocessing writes them, beside a decoder for the grids of samples."""
    torch.jit.script(Enlarged()).save(str(root / "decoder.pt"))
    rng, labels = np.random.default_rng(0), []
    for i in range(NUM_LATENTS):
        np.save(root / f"{i:04d}.npy", rng.standard_normal(LATENT, np.float32))
        labels.append([f"{i:04d}.npy", i * NUM_CLASSES // NUM_LATENTS])
    labels[-1][1] = NUM_CLASSES - 1
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))


def plan_of(options: argparse.Namespace, root: Path, overrides: list[str]) -> RunPlan:
    codec = f"{{kind: torchscript, path: {root / 'decoder.pt'}}}"
    engines = both_engines("ds_config=ds_configs/zero1.json")
    given = [
        f"data.root={root}",
        f"data.codec={codec}",
        "data.num_workers=4",
        f"batch={options.batch}",
        "accumulation=1",
    ]
    recipes = REPOSITORY / "launch" / "recipes"
    recipe = load_recipe(
        recipes / f"gat_{options.size.lower()}_imagenet256.yaml",
        [*given, *engines, "metrics=null", "hang_timeout_seconds=86400", *overrides],
    )
    return plan_run(recipe, comm.world_size(), recipes)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clone", type=Path, help="directory with the public code")
    parser.add_argument("--size", default="B", choices=["S", "B", "L", "XL"])
    parser.add_argument("--variants", default=",".join(VARIANTS), help="of bigsgan")
    for name, number in (("batch", 128), ("rounds", 3), ("warmup", 4), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=number)
    options = parser.parse_args()
    comm.initialize()
    choose_kernels(deterministic=False)
    public = public_code(options.clone, compiled=True)
    with tempfile.TemporaryDirectory() as root:
        write_latents(Path(root))
        build_public = partial(build_public_loop, public, options.size, options.batch)
        builders = {"public code": build_public}
        for name in options.variants.split(","):
            builders[f"bigsgan, {name}"] = partial(build_engine_loop, plan_of(options, Path(root), VARIANTS[name]))
        builders["public code again"] = build_public

        start_profiler()
        settings = Settings(rounds=1, warmup=options.warmup, steps=options.steps)
        found: dict[str, list[Visit]] = {name: [] for name in builders}
        failed = dict[str, str]()
        for turn in range(options.rounds):
            for name in list(builders)[:: -1 if turn % 2 else 1]:
                if name in failed:
                    continue
                try:
                    found[name] += [seen for seen in [visit(builders[name], partial(tf32, True), settings)] if seen]
                except Exception as error:  # of torch's compiler, say; the others go on
                    failed[name] = str(error).strip().partition("\n")[0] or type(error).__name__
                print(f"round {turn + 1}: {row(name, found, failed, options.batch)}", file=sys.stderr, flush=True)
    on = torch.cuda.get_device_name() if comm.device().type == "cuda" else "a CPU"
    print(f"GAT-{options.size}, batch {options.batch}, torch {torch.__version__}, {on}\n")
    print("| trainer | images/s | time per image | each round | device MiB | busy |")
    print("| --- | ---: | ---: | --- | ---: | ---: |")
    print("\n".join(row(name, found, failed, options.batch) for name in builders))
    comm.leave()


def row(name: str, found: dict[str, list[Visit]], failed: dict[str, str], batch: int) -> str:
    """Of the table; times over those of the first trainer in the same rounds."""
    if name in failed:
        return f"| {name} | {failed[name]} |"
    visits, first = found[name], found["public code"]
    ratios = [own.seconds / others.seconds for own, others in zip(visits, first, strict=False)]
    middle, each = (f"{statistics.median(ratios):.3f}", ", ".join(map("{:.3f}".format, ratios))) if ratios else "--"
    peak = "-" if visits[-1].device_peak is None else f"{visits[-1].device_peak / 2**20:,.0f}"
    speed, busy = (statistics.median(getattr(each, key) for each in visits) for key in ("seconds", "busy"))
    return f"| {name} | {batch / speed:.1f} | {middle} | {each} | {peak} | {busy:.2f} |"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()

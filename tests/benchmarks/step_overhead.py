"""What engines, loop and monitoring cost over a plain PyTorch loop on the same networks, in one run.

    python -m tests.benchmarks.step_overhead [--world-size 2] [--blocks 12] [dotted.key=value ...]

The plain loop backpropagates through D(G(z)) (under DistributedDataParallel on several ranks), draws its latents from
torch, averages G's weights with one foreach call, and reports nothing. The product's side is everything that the
training loop does for an update, with its reports. Blocks of both and of a second copy of the plain loop (the A/A
control) take turns; a ratio is the median over the rounds, with the quartiles beside it.
"""

import argparse
import contextlib
import importlib
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from tests.distributed.pool import RankPool

STEPS_PER_BLOCK = 4


class PlainLoop:
    """A GAN in plain PyTorch, with the layers of the product."""

    def __init__(self, recipe, dataset, world_size, device):
        build, network = (
            importlib.import_module("bigsgan.models.build"),
            importlib.import_module("bigsgan.models.network"),
        )
        layers = importlib.import_module("bigsgan.models.layers")
        self.comm = importlib.import_module("bigsgan.comm")
        self.recipe, self.device, self.moving = recipe, device, layers.moving_state
        self.size = recipe.batch // world_size
        self.g, self.d = build.build_network(recipe, "generator"), build.build_network(recipe, "discriminator")
        for module in (self.g, self.d):
            network.initialize(module, recipe.seed)
            module.to(device)
            for layer in module.modules():
                if world_size > 1 and isinstance(layer, layers.BatchStatistics):
                    layer.average_over_ranks, layer.num_ranks = self.comm.mean_over_ranks, world_size
        self.stateful_g, self.stateful_d = self.g.stateful_layers(), self.d.stateful_layers()
        self.run_g, self.run_d = self.g, self.d
        if world_size > 1:
            ddp = {"broadcast_buffers": False}
            self.run_g = torch.nn.parallel.DistributedDataParallel(self.g, **ddp)
            self.run_d = torch.nn.parallel.DistributedDataParallel(self.d, **ddp)
        sections = recipe.optimizer.generator, recipe.optimizer.discriminator
        self.opt_g, self.opt_d = (
            torch.optim.Adam(module.parameters(), section.lr, tuple(section.betas), section.eps, fused=True)
            for module, section in zip((self.g, self.d), sections, strict=True)
        )
        self.average = [p.detach().clone() for p in self.g.parameters()]
        pairs = [dataset[i] for i in range(min(len(dataset), 2000))]
        self.images, self.labels = torch.stack([p[0] for p in pairs]), torch.tensor([p[1] for p in pairs])

    def latents(self):
        z = torch.randn(self.size, self.recipe.generator.latent_size, device=self.device)
        return z, torch.randint(max(self.recipe.data.num_classes, 1), (self.size,), device=self.device)

    def step(self):
        chosen = torch.randint(len(self.images), (self.size,))
        real = self.images[chosen].to(self.device).float() / 127.5 - 1
        z, c = self.latents()
        with torch.no_grad():
            fake = self.g(z, c)
        with self.moving(self.stateful_d, True):
            labels = torch.cat([self.labels[chosen].to(self.device), c])
            logits_real, logits_fake = self.run_d(torch.cat([real, fake]), labels).chunk(2)
        (F.relu(1 - logits_real).mean() + F.relu(1 + logits_fake).mean()).backward()
        self.opt_d.step()
        self.opt_d.zero_grad(set_to_none=True)
        self.d.requires_grad_(False)
        z, c = self.latents()
        with self.moving(self.stateful_g, True):
            fake = self.run_g(z, c)
        (-self.d(fake, c).mean()).backward()
        self.d.requires_grad_(True)
        self.opt_g.step()
        self.opt_g.zero_grad(set_to_none=True)
        with torch.no_grad():
            torch._foreach_lerp_(self.average, list(self.g.parameters()), 0.01)


class Product:
    """The product's update and reports, as training_loop makes them, with the time of each engine verb."""

    def __init__(self, recipe, plan, world_size):
        monitor, train = importlib.import_module("bigsgan.monitor"), importlib.import_module("bigsgan.train")
        self.loop = importlib.import_module("bigsgan.training.loop")
        self.comm = importlib.import_module("bigsgan.comm")
        out = Path(tempfile.mkdtemp())
        log = monitor.open_rank_log(out / "logs", self.comm.rank(), print)
        self.run, self.recipe = (
            train.build_run(plan, out, importlib.import_module("bigsgan.start").Start(), log),
            recipe,
        )
        self.clock = self.loop._Clock(0)
        self.seconds: dict[str, float] = {}
        for name in ("generator", "discriminator"):
            for verb in ("infer", "train", "forward", "input_grads", "backward"):
                self._time(getattr(self.run.step, name), verb, f"{name}.{verb}")
        self._time(self.run.step._reals, "next_phase", "data")
        self._time(self.run.step._source, "inputs", "latents")
        self._time(self.run.average, "update", "average")

    def _time(self, owner, name, label):
        original = getattr(owner, name)

        def timed(*args, **kwargs):
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.comm.synchronize()
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - start

        setattr(owner, name, timed)

    def step(self):
        run, counters, recipe = self.run, self.run.counters, self.recipe
        schedules = importlib.import_module("bigsgan.training.schedules")
        numbers = schedules.scheduled(recipe, counters.nimg)
        run.step(counters.update, numbers)
        counters.update += 1
        counters.nimg += recipe.batch
        decay = schedules.average_decay(recipe.ema, recipe.batch, counters.nimg)
        if run.step.generator.applied:
            run.average.update(decay)
        if schedules.is_due(recipe.report_nimg, counters.nimg, recipe.batch):
            self.loop._report_metrics(run, numbers, decay, self.clock)


def measure(overrides, blocks, threads):
    """Seconds of each block of each side, and the product's time by phase; runs on every rank."""
    config = importlib.import_module("bigsgan.config")
    comm = importlib.import_module("bigsgan.comm")
    if threads:
        torch.set_num_threads(threads)
    world_size, device = comm.world_size(), comm.device()
    recipe = config.load_recipe(Path("launch/recipes/digits.yaml"), [f"out={tempfile.mkdtemp()}", *overrides])
    plan = config.plan_run(recipe, world_size)
    dataset = importlib.import_module("bigsgan.data").build_dataset(recipe.data)
    sides = {
        "plain": PlainLoop(recipe, dataset, world_size, device),
        "product": Product(recipe, plan, world_size),
        "plain again": PlainLoop(recipe, dataset, world_size, device),
    }
    names, seconds = list(sides), {name: [] for name in sides}
    for block in range(-1, blocks):  # the first round warms up
        for name in names if block % 2 else names[::-1]:
            comm.barrier()
            comm.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS_PER_BLOCK):
                sides[name].step()
            comm.synchronize()
            if block >= 0:
                seconds[name].append((time.perf_counter() - start) / STEPS_PER_BLOCK)
        if block < 0:
            sides["product"].seconds.clear()
    phases = {name: total / (blocks * STEPS_PER_BLOCK) for name, total in sides["product"].seconds.items()}
    with contextlib.suppress(AttributeError):
        sides["product"].run.reporter.close()
    return seconds, phases


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument(
        "--threads", type=int, default=0, help="torch threads of each rank (default: all cores / ranks)"
    )
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    pool = RankPool(options.world_size)
    try:
        results = pool.run(measure, options.overrides, options.blocks, options.threads, timeout=1200)
    finally:
        pool.stop()
    seconds, phases = results[0]
    print(
        f"world size {options.world_size}, {options.blocks} rounds of {STEPS_PER_BLOCK} updates; "
        "seconds an update (median):"
    )
    for name, values in seconds.items():
        print(f"  {name:12s} {statistics.median(values):.4f}")
    for name in ("product", "plain again"):
        ratios = [a / b for a, b in zip(seconds[name], seconds["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(f"  {name} / plain: {middle:.3f} (quartiles {low:.3f} to {high:.3f})")
    print("product by phase, ms an update:")
    for name, value in sorted(phases.items(), key=lambda item: -item[1]):
        print(f"  {name:28s} {1e3 * value:8.2f}")


if __name__ == "__main__":
    main()

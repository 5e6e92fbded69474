"""Kernel launches and bytes of an update of the published recipes, as one rank of eight makes it.

    python -m tests.stand_in.counts [--phases] [--host]

Launches are those that reach the CUDA runtime. Bytes are those of the tensors that torch's operations on the device
are given and return, each once, those changed in place twice: what the memory would carry if no cache held anything.
Views and empty tensors cost nothing; of an expanded tensor, what is stored counts. Two things count that torch's
operations do not show: a convolution's bias is an addition of its own behind cuDNN's kernel, and its gradient a sum;
and kernels for half types turn maps round in which a pixel's channels lie apart. Nothing is computed, so full sizes
take seconds. With ``--phases`` each update is divided into its phases, with the least times that a GPU needs for them;
``--host`` times the host's part, as kernels take no time here.
"""

from __future__ import annotations

import argparse
import importlib
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigsgan.bench.phases import label_phases
from bigsgan.engines import build as engines
from bigsgan.runtime import comm
from bigsgan.runtime.kernels import choose_kernels
from bigsgan.training.loop import Run
from tests.distributed import scenarios
from tests.distributed.pool import RankPool
from tests.gpu.__main__ import TOKENS
from tests.stand_in import build, cells, roofline

RECIPES = Path(__file__).resolve().parents[2] / "launch" / "recipes"
SYNTHETIC = ["data.kind=synthetic", "data.root=null", "data.num_workers=0", "data.num_images=256"]


class Case(NamedTuple):
    """An update to count.

    Attributes:
        recipe: File of the recipe.
        overrides: That make one rank's share of it.
        update: Number of the update, from 0, by which lazy penalties are due.
        launches: The most kernels that it may launch.
        products: The most GB of its convolutions and matrix products.
        rest: The most GB of all other operations.
        precise: Whether the allocator's peak is compared with the planner's.
    """

    recipe: str
    overrides: list[str]
    update: int
    launches: int
    products: float
    rest: float
    precise: bool = False


BIGGAN = ("biggan128_imagenet.yaml", ["batch=256", *SYNTHETIC])
R3GAN = ("r3gan_ffhq256.yaml", ["batch=32", *SYNTHETIC])
STYLEGAN2 = ("stylegan2_256.yaml", ["batch=8", *SYNTHETIC])
GAT = ("gat_b_imagenet256.yaml", ["batch=64", *SYNTHETIC, *TOKENS])
EXACT = ["objective.r1.form=exact", "objective.r2.form=exact"]

CASES = {
    "BigGAN-128, 256 images in bf16": Case(*BIGGAN, 2, launches=3_060, products=149, rest=235),
    "R3GAN-256, 32 images in bf16": Case(*R3GAN, 2, launches=3_260, products=411, rest=494),
    "StyleGAN2-256 with ADA, 8 images": Case(*STYLEGAN2, 2, launches=3_040, products=9, rest=26.2),
    "the same with R1 and path length": Case(*STYLEGAN2, 16, launches=6_350, products=16.9, rest=49.7),
    "GAT-B, 64 images in bf16": Case(*GAT, 2, launches=6_380, products=164, rest=612, precise=True),
    "GAT-B with exact R1 and R2": Case(
        GAT[0], [*GAT[1], *EXACT], 2, launches=13_760, products=293, rest=2_050, precise=True
    ),
}
"""Bounds: a change that lowers a count lowers its bound with it."""

WARM_UP = 2
"""Updates, in which allocators fill and kernels are compiled."""

_PRODUCTS = (
    "convolution",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "mv",
    "addmv",
    "dot",
    "_scaled_dot_product",
)
_FREE = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "is_same_size",
    "_has_same_storage_numel",
    "_efficientzerotensor",
)


class Traffic(TorchDispatchMode):
    """Adds up bytes by operation, and how often each comes, while it is entered."""

    def __init__(self, phases: roofline.Phases | None = None) -> None:
        super().__init__()
        self.phases = phases
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        results = function(*arguments, **keywords)
        name = function.overloadpacket.__name__
        if not function.is_view and name not in _FREE:
            self.add(name, arguments, keywords, results)
            if self.phases is not None:
                self.phases.compute(function, arguments, keywords, results)
        if name == "convolution":
            self.add_convolution([arguments[0], results])
            if arguments[2] is not None:
                self.add("bias of a convolution", results, results)
        if name == "convolution_backward":
            self.add_convolution([*arguments[:2], results[0]])
            if arguments[-1][2]:
                self.add("gradient of a convolution's bias", arguments[0])
        return results

    def add_convolution(self, maps: list[torch.Tensor | None]) -> None:
        halves = [x for x in maps if x is not None and x.element_size() == 2]
        turned = [x for x in halves if not x.is_contiguous(memory_format=torch.channels_last)]
        self.add("turning a convolution's maps round", turned, turned)

    def add(self, name: str, *operands: Any) -> None:
        on_device = [t for t in tree_leaves(operands) if isinstance(t, torch.Tensor) and t.is_cuda]
        self.calls[name] += bool(on_device)
        num_bytes = sum(map(_stored, on_device))
        self.bytes[name] += num_bytes
        if self.phases is not None:
            self.phases.carry(num_bytes)

    def gigabytes(self, of_products: bool) -> float:
        return sum(n for name, n in self.bytes.items() if name.startswith(_PRODUCTS) == of_products) / 1e9


def _stored(tensor: torch.Tensor) -> int:
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return math.prod(sizes) * tensor.element_size() * (tensor.numel() > 0)


@contextmanager
def _triton(traffic: Traffic) -> Iterator[None]:
    """Tell of Triton's kernels, which torch's dispatcher does not see."""
    jit_function = importlib.import_module("triton.runtime.jit").JITFunction
    run = jit_function.run

    def counted(kernel: Any, *arguments: Any, **keywords: Any) -> Any:
        traffic.add(f"Triton's {kernel.__name__}", arguments, keywords)
        return run(kernel, *arguments, **keywords)

    with mock.patch.object(jit_function, "run", counted):
        yield


def count(name: str) -> dict[str, Any]:
    """Launches, GB of products and of the rest, the peak of memory, and operations with most bytes: GB and calls."""
    case = CASES[name]
    run = _warmed_up(case)
    before = cells.launches()
    comm.forget_peak_memory()
    scenarios.update(run, 1)
    launches, peak = cells.launches() - before, comm.peak_memory_bytes()
    run.counters.update -= 1  # the same once more, with torch's operations in view, which launches nothing else
    phases = roofline.Phases(cells.launches)
    label_phases(run, phases.phase)
    with Traffic(phases) as traffic, _triton(traffic):
        scenarios.update(run, 1)
    phases.turn()
    scenarios.destroy(run)
    return {
        "launches": launches,
        "products": traffic.gigabytes(True),
        "rest": traffic.gigabytes(False),
        "peak": peak,
        "phases": roofline.plain(phases.work),
        "most": {each: (n / 1e9, traffic.calls[each]) for each, n in traffic.bytes.most_common(16)},
    }


def host_times(name: str) -> list[float]:
    """The host's milliseconds of an update, ten times."""
    case, found = CASES[name], list[float]()
    run = _warmed_up(case)
    for _ in range(10):
        run.counters.update = case.update
        begin = time.perf_counter()
        scenarios.update(run, 1)
        found.append(1e3 * (time.perf_counter() - begin))
    scenarios.destroy(run)
    return found


def _warmed_up(case: Case) -> Run:
    cells.prepare()
    choose_kernels(False, searches=False)  # else cuDNN would search for those of lazy penalties in what is counted
    with mock.patch.object(engines, "initialize"):  # no number matters
        run = scenarios.build(case.overrides, {}, recipe=RECIPES / case.recipe)
    run.counters.update = case.update - WARM_UP
    scenarios.update(run, WARM_UP)
    return run


def known() -> dict[str, int]:
    """Bytes of operations on 2 x 3 numbers, which a reader can count."""
    x, row = torch.zeros(2, 3, device="cuda"), torch.zeros(3, device="cuda")
    operations = {
        "add": lambda: x + x.clone(),
        "add_": lambda: x.add_(1),
        "expand": lambda: row.expand(2, 3),
        "mul of a row": lambda: x * row.expand(2, 3),
        "view": lambda: x.view(3, 2).T,
    }
    found = {}
    for name, operation in operations.items():
        with Traffic() as traffic:
            operation()
        found[name] = sum(n for each, n in traffic.bytes.items() if each != "clone")
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Print a count beside its bounds."""
    case = CASES[name]
    print(f"{name}, update {case.update}")
    for key, unit in {"launches": "", "products": "GB", "rest": "GB"}.items():
        print(f"  {key:9} {found[key]:10,.1f} {unit:2} of at most {getattr(case, key):,.1f}")
    print(f"  memory    {found['peak'] / 2**20:10,.0f} MiB")
    for operation, (gigabytes, calls) in found["most"].items():
        print(f"    {gigabytes:8.2f} GB in {calls:5} of {operation}")


def main() -> None:
    """Count all cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--phases", action="store_true", help="with the work of each phase")
    parser.add_argument("--host", action="store_true", help="time the host instead")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        pool = RankPool(1, {**build.environment(directory, build.build(directory)), "STAND_IN_DEVICES": "1"})
        for name in CASES:
            if options.host:
                times = pool.run(host_times, name)[0]
                about = f"{median(times):.1f} ms ({min(times):.1f} to {max(times):.1f})"
                print(f"{name}, update {CASES[name].update}: {about}")
                continue
            found = pool.run(count, name)[0]
            show(name, found)
            if options.phases:
                print(roofline.table(found["phases"]))
        pool.stop()


if __name__ == "__main__":
    main()

"""Triton kernels that torch.compile makes for BigGAN-128's update, and how long it takes to write them.

    python -m tests.stand_in.kernels [whole] [layers]

Only written: Triton's own compilation of each, a second or so on the cores of a host, is left out, and so are their
launches. Those that all layers share (bigsgan/models/*_kernels.py) are not among them.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bigsgan.engines import build as engines
from tests.distributed import scenarios
from tests.distributed.pool import RankPool
from tests.stand_in import build, cells
from tests.stand_in.counts import BIGGAN, RECIPES

MOST = {"whole": 380}
"""Kernels that may be written; a change that lowers the number lowers this."""

TIMEOUT = 900


class _Written(NamedTuple):
    """In the place of a compiled kernel."""

    name: str
    calls: Counter[str]

    def run(self, *arguments: Any, **options: Any) -> None:
        self.calls[self.name] += 1


def count(unit: str) -> dict[str, float]:
    """Kernels written in two updates, the seconds that they took, and launches of a third."""
    cells.prepare()
    sources: list[str] = []
    calls: Counter[str] = Counter()

    def write(self: Any, name: str, source: str, *arguments: Any, **options: Any) -> _Written:
        sources.append(source.replace(name, ""))
        return _Written(name, calls)

    compiler = importlib.import_module("torch._inductor.async_compile").AsyncCompile
    overrides = [f"engines.{each}.compile={unit}" for each in ("generator", "discriminator")]
    with mock.patch.object(engines, "initialize"), mock.patch.object(compiler, "triton", write):
        run = scenarios.build([*BIGGAN[1], *overrides], {}, recipe=RECIPES / BIGGAN[0])
        begin = time.perf_counter()
        scenarios.update(run, 2)
        seconds = time.perf_counter() - begin
        calls.clear()
        before = cells.launches()
        scenarios.update(run, 1)
        others = cells.launches() - before
    scenarios.destroy(run)
    written, launched = len(sources), calls.total()
    return {"kernels": written, "different": len(set(sources)), "seconds": seconds, "launches": launched + others}


def main() -> None:
    """Count what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("units", nargs="*", default=["whole"], metavar="whole, layers")
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        pool = RankPool(1, {**build.environment(directory, build.build(directory)), "STAND_IN_DEVICES": "1"})
        for unit in parser.parse_args().units:
            found = pool.run(count, unit, timeout=TIMEOUT)[0]
            print(f"{unit}: " + ", ".join(f"{value:,.0f} {name}" for name, value in found.items()))
        pool.stop()


if __name__ == "__main__":
    main()

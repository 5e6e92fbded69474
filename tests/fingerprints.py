"""`python -m tests.fingerprints`: what runs with a fixed seed end in, by layout and family, bit for bit.

A change that is meant to leave numbers alone prints the same lines as the commit before it.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from tests.distributed import scenarios
from tests.distributed.pool import RankPool
from tests.tiny import TINY_GAMES, both, stages, zero

NUM_UPDATES = 6
BF16 = {"bf16": {"enabled": True}}


EXACT = ["objective.r1={weight: 0.1, every: 2}"]
TWO = ["accumulation=2"]
LAYOUTS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "zero0": ([*TWO, *EXACT], both(0)),
    "zero1_bf16": ([*TWO, *EXACT], both(1, **BF16)),
    "zero2_two_d_steps": ([*TWO, "objective.d_steps=2"], both(2)),
    "zero3": ([*TWO, "objective.r1={weight: 0.1, every: 2, method: double_backward}"], both(3)),
    "zero3_forward_mode": ([*TWO, *EXACT], both(3)),
    "stages_forward_mode": ([*TWO, *EXACT, *stages(2, 2)], both(1)),
    "reused_fakes": ([*TWO, "objective.reuse_fakes=true"], both(2)),
    "stages_joint": ([*TWO, *stages(2, 2)], both(1)),
    "stages_recompute": ([*TWO, *stages(2, 2), "pipeline.generator_phase=recompute"], both(0)),
    "stages_phases": ([*TWO, *stages(2, 2), "pipeline.schedule=phases"], both(1)),
    "stages_and_zero3": ([*TWO, *stages(2, 1)], {"generator": zero(1), "discriminator": zero(3)}),
    "zero3_and_stages": ([*TWO, *stages(1, 2)], {"generator": zero(3), "discriminator": zero(1)}),
}
GAMES = {"biggan": [], **{name: TINY_GAMES[name] for name in ("stylegan2_path_length", "pix2pix", "dcgan_spectral")}}


def fingerprint(states: list[dict[str, Any]]) -> str:
    """Of the merged state of all ranks."""
    found = hashlib.sha256()
    for entry, tensors in sorted(scenarios.merge(states).items()):
        for name, tensor in sorted(tensors.items()):
            found.update(f"{entry}.{name}".encode())
            found.update(np.ascontiguousarray(tensor.numpy()).tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    """Print a line for each layout and family."""
    pool = RankPool(2)
    for layout, (options, ds) in LAYOUTS.items():
        for family, game in GAMES.items():
            states = pool.run(scenarios.train, [*game, *options], ds, NUM_UPDATES)
            print(f"{layout:18} {family:22} {fingerprint(states)}", flush=True)
    pool.stop()


if __name__ == "__main__":
    main()

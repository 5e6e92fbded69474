"""Whether the updates of a pool's ranks are the reference's; see bigsgan/doctor/agreement.py."""

import os
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from bigsgan.config import load_recipe
from bigsgan.doctor import agreement
from bigsgan.doctor.agreement import ROUNDING, SAME
from bigsgan.doctor.arithmetic import ELSEWHERE
from bigsgan.doctor.smooth_activations import smooth
from tests.distributed import scenarios
from tests.distributed.pool import ON_GPU
from tests.tiny import tiny_recipe

__all__ = ["COUNTS", "SAME", "check_updates", "differences"]

COUNTS: Counter[str] = Counter()
"""Updates that were compared, and those that met a kink."""


def allowed():
    """How much of what the doctor allows: the reference is on a CPU, whose sums have another order than a GPU's."""
    return ELSEWHERE if os.environ.get(ON_GPU) == "1" else 1.0


def each_update(overrides, ds, num_updates, recipe=None, is_smooth=True):
    """States before the first and after each update, on every rank."""
    with smooth() if is_smooth else nullcontext():
        run = scenarios.build(overrides, ds, recipe=recipe)
        states = [scenarios.snapshot(run)]
        for _ in range(num_updates):
            scenarios.update(run, 1)
            states.append(scenarios.snapshot(run))
        scenarios.destroy(run)
    return [scenarios.on_host(state) for state in states]


def check_updates(pool, overrides, ds, num_updates, recipe=None):
    """Every update of a pool's ranks is the reference's."""
    for update, shares in enumerate(differences(pool, overrides, ds, num_updates, recipe)):
        COUNTS["updates"] += 1
        nearest, where = min(shares)
        COUNTS["kinks"] += shares[0][0] > allowed() >= nearest
        print(f"update {update}: {nearest:.2f} of what is allowed, {where}, found {len(shares)} times")
        assert nearest <= allowed(), f"update {update} differs, from whichever state: {shares}"


def differences(pool, overrides, ds, num_updates, recipe=None, is_smooth=True):
    """See bigsgan/doctor/agreement.py."""
    by_rank = pool.run(each_update, overrides, ds, num_updates, recipe, is_smooth)
    states = [scenarios.merge([*ranks]) for ranks in zip(*by_rank, strict=True)]
    directory = Path(tempfile.mkdtemp())
    options = [f"out={directory}", *overrides]
    with smooth() if is_smooth else nullcontext():
        own = load_recipe(recipe, options) if recipe else tiny_recipe(directory, *overrides)
        changes = ROUNDING if allowed() == 1 else ROUNDING[::8]  # on a GPU most updates differ by more than on a CPU
        yield from agreement.differences(states, own, changes=changes)

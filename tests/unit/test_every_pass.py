"""`statistics=every_pass`: which passes of an update move running statistics, power iterations and means of styles."""

from __future__ import annotations

import pytest

from bigsgan.config import plan_run
from bigsgan.engines.phases import update_phases
from bigsgan.errors import UserError
from tests.tiny import tiny_recipe

PASSES = ["G makes images", "D trains", "G makes images", "D trains", "G makes images", "D judges", "G pulls back"]


def moving(tmp_path, *overrides):
    """Of each phase of an update with two steps of D, its label, and which of its micro-batches move state."""
    plan = plan_run(tiny_recipe(tmp_path, "objective.d_steps=2", "accumulation=2", *overrides), 1)
    return [(phase.label, [index < phase.num_moving for index in range(phase.num)]) for phase in update_phases(plan)]


def test_state_moves_once_in_a_networks_update(tmp_path):
    first = {1: [True, False], 3: [True, False], 4: [True, False]}
    assert moving(tmp_path) == [(label, first.get(i, [False, False])) for i, label in enumerate(PASSES)]


def test_state_moves_in_every_pass_of_the_public_trainers(tmp_path):
    """G in three times two passes and D too, as BigGAN-PyTorch's loop makes them; the last phase only goes backward."""
    last = len(PASSES) - 1
    expected = [(label, [i != last] * 2) for i, label in enumerate(PASSES)]
    assert moving(tmp_path, "statistics=every_pass") == expected


@pytest.mark.parametrize(
    "overrides, world_size, problem",
    [
        (["objective.reuse_fakes=true"], 1, r"statistics: must be every_update with objective.reuse_fakes=true"),
        (["objective.schedule=overlapped"], 1, r"statistics: must be every_update with objective.schedule=overlapped"),
        (["engines.generator.pipeline_stages=2"], 2, r"statistics: must be every_update with pipeline stages or ranks"),
        (["engines.generator.ranks=1"], 2, r"statistics: must be every_update with pipeline stages or ranks of their"),
    ],
)
def test_passes_in_another_order_are_refused(tmp_path, overrides, world_size, problem):
    with pytest.raises(UserError, match=problem):
        plan_run(tiny_recipe(tmp_path, "statistics=every_pass", *overrides), world_size)

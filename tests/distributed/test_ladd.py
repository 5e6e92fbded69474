"""Heads on the features of a teacher, which stays as it is or learns, agree with the reference in all layouts."""

import pytest
import torch

from bigsgan.doctor.games import FLOW, LADD
from bigsgan.planner.counting import count_work
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_init_from import states
from tests.distributed.test_operations import operations
from tests.distributed.test_planner import COMMON, check
from tests.distributed.test_state import BF16, check_same_run
from tests.tiny import both, stages, tiny_plan, zero

HALVES = "accumulation=2"
OF_TEACHER = "engines.discriminator.frozen."
SMALL_TOO = f"{OF_TEACHER}persistence_threshold=0"
TRAINED = "discriminator.trains_teacher=true"
STEPS = ["generator.steps=3", "objective.reuse_fakes=true"]
LAYOUTS = {
    "one rank, micro-batches": (1, [HALVES], both(0)),
    "one rank, a teacher that learns": (1, [TRAINED, HALVES], both(1)),
    "ZeRO 3": (2, [], both(3)),
    "ZeRO 3, a teacher that learns": (2, [TRAINED, *STEPS], both(3)),
    "ranks of their own": (2, ["engines.generator.ranks=1", HALVES], both(1)),
    "in stages": (2, [*stages(2, 2), HALVES], both(1)),
    "in stages, a teacher that learns": (2, [*stages(2, 2), TRAINED, *STEPS, HALVES], both(1)),
    "the heads in one stage": (2, [*stages(1, 2), "discriminator.judged=[1]", HALVES], both(0)),
    "a penalty": (2, ["objective.r1={weight: 2, form: finite_difference, sigma: 0.1}", HALVES], both(2)),
    "an exact penalty": (2, ["objective.r1={weight: 2, form: exact}", HALVES], both(1)),
    "an exact penalty in stages": (2, [*stages(2, 2), "objective.r1={weight: 2, form: exact}", HALVES], both(1)),
    "a teacher shared at ZeRO 1": (2, [f"{OF_TEACHER}sharded=true", SMALL_TOO], both(1)),
    "a teacher on the host": (2, [f"{OF_TEACHER}offload=cpu", SMALL_TOO, HALVES], both(0)),
    "D recomputed": (2, ["engines.discriminator.activation_checkpointing=true", TRAINED], both(2)),
    "compiled by layer": (1, ["engines.discriminator.compile=layers"], both(1)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_updates(ranks, name):
    world_size, more, ds = LAYOUTS[name]
    check_updates(ranks(world_size), [*LADD, *more], ds, 3)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [TRAINED]], ids=["frozen", "trained"])
def test_the_teacher_begins_as_the_generator_of_another_run(ranks, tmp_path, more):
    """With its EMA; it stays it bit for bit, unless it learns."""
    ds = both(3, **BF16)
    given = [*(each.replace("unset", str(tmp_path)) for each in LADD), *more]
    given = [each.replace("depth: 3, ", "depth: 2, ").replace("[0, 2]", "[0, 1]") for each in given]
    results = ranks(2).run(scenarios.begin_another, FLOW, {"generator": zero(3)}, str(tmp_path), given, ds, 2)
    donor, begun, after = states(results)
    kept = {name: value for name, value in begun["discriminator"].items() if ".head." not in name}
    assert kept.keys() == {name for name in donor["average"] if not name.startswith("layers.3.")}
    for name, value in kept.items():
        assert torch.equal(value.flatten(), donor["average"][name].flatten()), name
        assert torch.equal(after["discriminator"][name].flatten(), value.flatten()) == (not more), name


RESUMED = {
    "ZeRO 3, bf16": (STEPS, both(3, **BF16)),
    "in stages, a teacher that learns": ([*stages(2, 2), TRAINED], both(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_same(ranks, tmp_path, name):
    more, ds = RESUMED[name]
    game = [*LADD, *more, HALVES]
    whole = ranks(2).run(scenarios.uninterrupted, game, ds, 4)
    check_same_run(whole, ranks(2).run(scenarios.resume, game, ds, str(tmp_path), 2, 2), 4)


WIDE = [
    *COMMON,
    "generator={family: dit, latent_size: 3072, depth: 4, width: 256, heads: 4, patch: 4, times: true}",
    "discriminator={family: ladd, depth: 4, width: 256, heads: 4, patch: 4}",
    "objective={d_steps: 2}",
    "init_from.run=unset",
    "batch=32",
]


@pytest.mark.nightly
@pytest.mark.parametrize("stage, more", [(1, []), (3, []), (1, [TRAINED]), (1, [f"{OF_TEACHER}sharded=true"])])
def test_memory_is_that_of_a_plan(ranks, tmp_path, stage, more):
    check(ranks, tmp_path, f"heads on a teacher, ZeRO {stage} {' '.join(more)}", [*WIDE, *more], zero(stage))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], [TRAINED]], ids=["frozen", "trained"])
def test_an_update_computes_what_a_plan_counts(ranks, tmp_path, more):
    game, ds = [*WIDE, *more], both(1)
    (computed,) = ranks(1).run(operations, game, ds)
    counted = count_work(tiny_plan(tmp_path, 1, game, ds))
    assert computed / 32 == pytest.approx(counted["update_flop"], rel=0.05)

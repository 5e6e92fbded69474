"""Distribution matching with a fake score and a teacher agrees with the reference in all layouts."""

import pytest
import torch

from bigsgan.doctor.games import DMD2, FLOW
from bigsgan.planner.counting import count_work
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_init_from import states
from tests.distributed.test_operations import operations
from tests.distributed.test_planner import COMMON, check
from tests.distributed.test_state import BF16, check_same_run
from tests.tiny import both, stages, tiny_plan, zero

HALVES = "accumulation=2"
GENERATOR_FIRST = "objective.schedule=generator_first"
STEPS = ["generator.steps=3", "objective.reuse_fakes=true", "discriminator.first_time=0.4"]
OF_TEACHER = "engines.discriminator.frozen."
OWN_STAGE = "engines.discriminator.partition=uniform"  # four layers, and the four of the teacher
SMALL_TOO = f"{OF_TEACHER}persistence_threshold=0"
REUSED = [GENERATOR_FIRST, "objective.reuse_fakes=true"]
OWN_IMAGES = ["generator.steps=3", "generator.noised=samples", "discriminator.first_time=0.4"]
LAYOUTS = {
    "one rank, micro-batches": (1, [HALVES], both(0)),
    "ZeRO 3": (2, [], both(3)),
    "ranks of their own": (2, ["engines.generator.ranks=1", HALVES], both(1)),
    "both in stages, recomputed": (2, [*stages(2, 2), "pipeline.generator_phase=recompute", HALVES], both(1)),
    "several steps": (1, [*STEPS], both(1)),
    "several steps, ZeRO 3": (2, [*STEPS, GENERATOR_FIRST, "generator.time_shift=5"], both(3)),
    "several steps, ranks of their own": (2, [*STEPS, "engines.generator.ranks=1", HALVES], both(1)),
    "several steps, in stages": (2, [*STEPS, *stages(2, 2), HALVES], both(1)),
    "several steps and a distance": (2, [*STEPS, "engines.generator.ranks=1", "objective.huber={weight: 3}"], both(1)),
    "several steps and distances": (2, [*STEPS, *stages(2, 2), "objective.l1=2", "objective.l2=1", HALVES], both(1)),
    "own images, of steps before": (1, [*OWN_IMAGES, "generator.sampler=sde", HALVES], both(1)),
    "own images, ZeRO 3": (2, [*OWN_IMAGES, "generator.time_shift=5"], both(3)),
    "own images, ranks of their own": (2, [*OWN_IMAGES, "engines.generator.ranks=1", GENERATOR_FIRST, HALVES], both(1)),
    "own images, in stages": (2, [*OWN_IMAGES, *stages(2, 2), "generator.sampler=sde", *REUSED, HALVES], both(1)),
    "own images, of classes of the data": (2, [*OWN_IMAGES, "objective.fake_labels=data", *REUSED], both(2)),
    "a teacher shared at ZeRO 1": (2, [f"{OF_TEACHER}sharded=true", SMALL_TOO], both(1)),
    "a teacher on the host": (2, [f"{OF_TEACHER}offload=cpu", SMALL_TOO, HALVES], both(0)),
    "a teacher shared in stages": (4, [*stages(1, 2), f"{OF_TEACHER}sharded=true", SMALL_TOO], both(1)),
    "a teacher in a stage of its own": (2, [*stages(2, 2), OWN_STAGE, HALVES], both(1)),
    "a teacher in two stages of its own": (4, [*stages(4, 4), OWN_STAGE, HALVES], both(1)),
    "a teacher whole at ZeRO 3": (2, [f"{OF_TEACHER}sharded=false"], both(3)),
    "D recomputed": (2, ["engines.discriminator.activation_checkpointing=true"], both(2)),
    "compiled by layer": (1, ["engines.discriminator.compile=layers"], both(1)),
}
MARKS = {
    "one rank, micro-batches": (),
    "several steps": (),
    "own images, of steps before": (),
    "a teacher shared in stages": pytest.mark.nightly,
    "a teacher in two stages of its own": pytest.mark.nightly,
    "a teacher whole at ZeRO 3": pytest.mark.nightly,
    "D recomputed": pytest.mark.nightly,
    "compiled by layer": pytest.mark.nightly,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, pytest.mark.slow)) for name in LAYOUTS])
def test_updates(ranks, name):
    world_size, more, ds = LAYOUTS[name]
    check_updates(ranks(world_size), [*DMD2, *more], ds, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, content, more",
    [
        (3, BF16, []),
        (1, {}, []),
        (1, {}, [f"{OF_TEACHER}sharded=true", f"{OF_TEACHER}precision=bf16", SMALL_TOO]),
    ],
    ids=["ZeRO 3, bf16", "ZeRO 1", "ZeRO 1, a teacher shared in bf16"],
)
def test_both_scores_begin_as_the_generator_of_another_run_and_go_on(ranks, tmp_path, stage, content, more):
    """With its EMA; the teacher stays it, or what bf16 leaves of it, bit for bit, and a resumed run is the same."""
    ds = both(stage, **content)
    given = [*(each.replace("unset", str(tmp_path)) for each in DMD2), *more]
    results = ranks(2).run(scenarios.begin_another, FLOW, {"generator": zero(stage)}, str(tmp_path), given, ds, 2)
    donor, begun, after = states(results)
    of_teacher = {}
    for name, value in donor["average"].items():
        _, number, rest = name.split(".", maxsplit=2)
        of_teacher[f"layers.{4 + int(number)}.real.{rest}"] = value
    if more:
        of_teacher = {name: value.bfloat16().to(value.dtype) for name, value in of_teacher.items()}
    for name, value in {**donor["average"], **of_teacher}.items():
        if name in begun["discriminator"]:
            assert torch.equal(begun["discriminator"][name].flatten(), value.flatten()), name
            same = torch.equal(after["discriminator"][name].flatten(), value.flatten())
            assert same == (name in of_teacher), name
    assert of_teacher.keys() - begun["discriminator"].keys() <= {"layers.4.real.positions.table"}


ADAM = ["optimizer.generator={kind: adam, lr: 1e-3}", "optimizer.discriminator={kind: adamw, lr: 1e-3, clip_norm: 1}"]
RESUMED = {
    "ZeRO 3": ([], both(3, **BF16)),
    "several steps": ([*STEPS, "engines.generator.ranks=1"], both(1)),
    "own images": ([*OWN_IMAGES, "generator.sampler=sde"], both(2)),
    "a teacher in a stage of its own": ([*stages(2, 2), OWN_STAGE, *ADAM], both(1, **BF16)),
    "the same at ZeRO 0": ([*stages(2, 2), OWN_STAGE, *ADAM], both(0)),
    "the same at ZeRO 0, bf16": ([*stages(2, 2), OWN_STAGE, *ADAM], both(0, **BF16)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_same(ranks, tmp_path, name):
    more, ds = RESUMED[name]
    game = [*DMD2, *more, HALVES]
    whole = ranks(2).run(scenarios.uninterrupted, game, ds, 4)
    check_same_run(whole, ranks(2).run(scenarios.resume, game, ds, str(tmp_path), 2, 2), 4)


WIDE = [
    *COMMON,
    "generator={family: dit, latent_size: 3072, depth: 4, width: 256, heads: 4, patch: 4, times: true}",
    "discriminator={family: dmd2, depth: 4, width: 256, heads: 4, patch: 4}",
    "objective={distribution_matching: {}, d_steps: 2}",
    "init_from.run=unset",
    "batch=32",
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "stage, more",
    [
        (1, []),
        (3, []),
        (1, [f"{OF_TEACHER}sharded=true"]),
        (1, [f"{OF_TEACHER}offload=cpu", f"{OF_TEACHER}precision=bf16"]),
        (1, OWN_IMAGES),
    ],
)
def test_memory_is_that_of_a_plan(ranks, tmp_path, stage, more):
    check(ranks, tmp_path, f"distribution matching, ZeRO {stage} {' '.join(more)}", [*WIDE, *more], zero(stage))


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], OWN_IMAGES], ids=["one step", "own images"])
def test_an_update_computes_what_a_plan_counts(ranks, tmp_path, more):
    game, ds = [*WIDE, *more], both(1)
    (computed,) = ranks(1).run(operations, game, ds)
    counted = count_work(tiny_plan(tmp_path, 1, game, ds))
    assert computed / 32 == pytest.approx(counted["update_flop"], rel=0.05)

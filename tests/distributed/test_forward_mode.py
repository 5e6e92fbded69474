"""Exact penalties without a double backward, in every layout, against the plain double backward."""

from itertools import product
from unittest import mock

import pytest
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.distributed.test_equivalence import FEWER, UPDATES, check, moved
from tests.tiny import FAMILIES, both, stages, zero

FORWARD = "method: forward_mode"
PENALTIES = {
    "r1": [f"objective.r1={{weight: 0.2, {FORWARD}}}"],
    "lazy r1 and r2": [f"objective.r1={{weight: 0.2, every: 2, {FORWARD}}}", "objective.r2={weight: 0.1, every: 2}"],
    "gradient penalty": ["objective.loss=wasserstein", f"objective.gradient_penalty={{weight: 1, {FORWARD}}}"],
}
LAYOUTS = {  # ranks, options, DeepSpeed files
    "zero0": (2, [], both(0)),
    "zero1": (2, [], both(1)),
    "zero2": (2, [], both(2)),
    "zero3": (2, [], both(3)),
    "pipelines": (2, stages(2, 2), both(1)),
    "D in stages": (2, stages(1, 2), both(0)),
    "G in stages": (2, stages(2, 1), both(1)),
    "zero3 and stages": (2, stages(2, 1), {"generator": zero(0), "discriminator": zero(3)}),
    "stages and zero3": (2, stages(1, 2), {"generator": zero(3), "discriminator": zero(0)}),
    "one after the other": (2, [*stages(2, 2), "pipeline.schedule=phases"], both(1)),
    "four stages": (4, stages(4, 4), both(0)),
    "stages and replicas": (4, stages(2, 2), both(1)),
}
QUICK = [("zero3", "lazy r1 and r2", 2), ("pipelines", "gradient penalty", 2), ("zero1", "r1", 1)]


def cells():
    """Every cell; the quick tier takes those in which most parts meet, and the slow one the rest of two layouts."""
    for layout, penalty, accumulation in product(LAYOUTS, PENALTIES, (1, 4)):
        yield pytest.param(layout, penalty, accumulation, marks=pytest.mark.nightly)
    for layout, penalty, accumulation in QUICK:
        yield pytest.param(layout, penalty, accumulation)
    for i, layout in enumerate(LAYOUTS):
        yield pytest.param(layout, [*PENALTIES][i % 3], 2, marks=pytest.mark.slow)


@pytest.mark.parametrize("layout, penalty, accumulation", [*cells()])
def test_matrix(ranks, layout, penalty, accumulation):
    num, options, ds = LAYOUTS[layout]
    check(ranks(num), [*options, *PENALTIES[penalty], f"accumulation={accumulation}"], ds, UPDATES)


STYLES = [o for o in FAMILIES["stylegan2"] if not o.startswith("objective")]
OF_STYLES = {  # path length regularisation, and what else
    "alone": ["objective={loss: non_saturating, path_length: {weight: 0.1, every: 2, decay: 0.5, %s}}"],
    "of half, with r1": [
        "objective={loss: non_saturating, path_length: {weight: 0.1, every: 1, decay: 0.5, batch_shrink: 2, %s}}",
        "objective.r1={weight: 0.1, every: 3}",
    ],
    "of shared images": [
        "objective={loss: non_saturating, reuse_fakes: true, path_length: {weight: 0.1, every: 1, decay: 0.5, %s}}",
        "objective.d_steps=2",
    ],
}
PATHS = [("zero3", "of half, with r1", 1), ("pipelines", "alone", 2)]


OF_G = {
    **LAYOUTS,
    "four stages": (4, stages(4, 2), both(1)),  # this D has three layers
    "recomputed stages": (2, [*stages(2, 2), "pipeline.generator_phase=recompute"], both(1)),
    "recomputed layers": (2, [f"engines.{n}.activation_checkpointing=true" for n in NETWORKS], both(3)),
}


def paths():
    """As ``cells``."""
    for layout, penalty, accumulation in product(OF_G, OF_STYLES, (1, 4)):
        yield pytest.param(layout, penalty, accumulation, marks=pytest.mark.nightly)
    for layout, penalty, accumulation in PATHS:
        yield pytest.param(layout, penalty, accumulation)
    for i, layout in enumerate(OF_G):
        yield pytest.param(layout, [*OF_STYLES][i % 3], 2, marks=pytest.mark.slow)


@pytest.mark.parametrize("layout, penalty, accumulation", [*paths()])
def test_path_length(ranks, layout, penalty, accumulation):
    num, options, ds = OF_G[layout]
    objective = [option % FORWARD if "%s" in option else option for option in OF_STYLES[penalty]]
    check(ranks(num), [*STYLES, *options, *objective, f"accumulation={accumulation}"], ds, FEWER)


ADA = ["augmentation={pipeline: bgc, p: 0.6, target: 0.1, interval: 2, ramp_nimg: 200}"]
GAMES = {
    "batch norm over ranks": FAMILIES["dcgan"],
    "minibatch deviation": FAMILIES["stylegan2"],
    "relativistic": [o for o in FAMILIES["r3gan"] if not o.startswith("objective")] + ["objective.loss=relativistic"],
    "patches of pairs": FAMILIES["pix2pix"],
    "ada": ADA,
    "two steps": ["objective.d_steps=2"],
    "lecam": ["objective.lecam={weight: 0.3, decay: 0.5}"],
}


def in_both():
    """Each game in two layouts, of which CI sees one."""
    for i, game in enumerate(GAMES):
        for j, layout in enumerate(("zero3", "pipelines")):
            yield pytest.param(layout, game, marks=pytest.mark.nightly if (i + j) % 2 else pytest.mark.slow)


@pytest.mark.parametrize("layout, game", [*in_both()])
def test_games(ranks, layout, game):
    num, options, ds = LAYOUTS[layout]
    r1 = [f"objective.r1={{weight: 0.05, every: 3, {FORWARD}}}"]
    check(ranks(num), [*GAMES[game], *options, *r1, "accumulation=2"], ds, FEWER)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero3", "pipelines"])
def test_checkpointing(ranks, layout):
    num, options, ds = LAYOUTS[layout]
    checkpointing = [f"engines.{n}.activation_checkpointing=true" for n in NETWORKS]
    check(ranks(num), [*options, *PENALTIES["r1"], *checkpointing], ds, FEWER)


LOW = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


@pytest.mark.parametrize("low", LOW)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("zero1", marks=pytest.mark.nightly),
        pytest.param("zero3", marks=pytest.mark.slow),
        pytest.param("pipelines", marks=pytest.mark.slow),
    ],
)
def test_half_types_are_as_near_as_with_a_double_backward(ranks, low, layout):
    """Of where float32 goes in six updates."""
    num, options, ds = LAYOUTS[layout]
    ds = {network: content | LOW[low] for network, content in ds.items()}
    penalty = ["objective.r1={weight: 0.2, method: %s}"]
    exact = moved(ranks(2), [penalty[0] % "double_backward"], both(1))
    twice = moved(ranks(2), [penalty[0] % "double_backward"], {n: both(1)[n] | LOW[low] for n in NETWORKS})
    found = moved(ranks(num), [*options, penalty[0] % "forward_mode"], ds)
    errors = [float((each - exact).norm() / exact.norm()) for each in (found, twice)]
    print(f"from float32: forward mode {errors[0]:.1e}, double backward {errors[1]:.1e}")
    assert errors[0] <= 1.5 * errors[1]


def gathered(overrides, ds):
    """The most elements of D's parameters that a rank has whole at a time in a penalised update, as a share."""
    run = scenarios.build(overrides, ds)
    parameters, most = list(run.step.discriminator.network.parameters()), []
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counted(coordinator, module, forward):
        fetch(coordinator, module, forward)
        most.append(sum(p.ds_numel for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE))

    with mock.patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counted):
        scenarios.update(run, 1)
    total = sum(p.ds_numel for p in parameters)
    scenarios.destroy(run)
    return max(most) / total


@pytest.mark.slow
def test_no_rank_holds_d_whole_at_zero_3(ranks):
    small = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    found = {}
    for method in ("double_backward", "forward_mode"):
        penalty = [f"objective.r1={{weight: 0.2, method: {method}}}"]
        found[method] = max(ranks(2).run(gathered, penalty, both(3, zero=small)))
    assert found["double_backward"] == 1
    assert found["forward_mode"] < 0.6, found

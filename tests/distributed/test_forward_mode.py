"""Exact penalties without a double backward, in every layout, against the plain double backward."""

import os
from itertools import product
from unittest import mock

import pytest
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

from bigsgan.config import NETWORKS, both_engines
from tests.distributed import scenarios
from tests.distributed.pool import ON_GPU
from tests.distributed.test_equivalence import UPDATES, check, moved
from tests.tiny import TINY_GAMES, both, stages, zero

FORWARD = "method: forward_mode"
PENALTIES = {
    "r1": [f"objective.r1={{weight: 0.2, {FORWARD}}}"],
    "lazy r1 and r2": [f"objective.r1={{weight: 0.2, every: 2, {FORWARD}}}", "objective.r2={weight: 0.1, every: 2}"],
    "gradient penalty": ["objective.loss=wasserstein", f"objective.gradient_penalty={{weight: 1, {FORWARD}}}"],
}
HOST = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS = {  # ranks, options, DeepSpeed files
    "zero0": (2, [], both(0)),
    "zero1": (2, [], both(1)),
    "zero2": (2, [], both(2)),
    "zero3": (2, [], both(3)),
    "zero2, offload": (2, [], both(2, zero=HOST)),
    "zero3, offload": (2, [], both(3, zero={**HOST, "offload_param": {"device": "cpu"}})),
    "pipelines": (2, stages(2, 2), both(1)),
    "D in stages": (2, stages(1, 2), both(0)),
    "G in stages": (2, stages(2, 1), both(1)),
    "zero3 and stages": (2, stages(2, 1), {"generator": zero(0), "discriminator": zero(3)}),
    "stages and zero3": (2, stages(1, 2), {"generator": zero(3), "discriminator": zero(0)}),
    "one after the other": (2, [*stages(2, 2), "pipeline.schedule=phases"], both(1)),
    "four stages": (4, stages(4, 4), both(0)),
    "D in four stages": (4, stages(2, 4), both(0)),
    "G in four stages": (4, stages(4, 2), both(1)),
    "stages and replicas": (4, stages(2, 2), both(1)),
}
CHOSEN = [("zero3", "lazy r1 and r2", 2), ("pipelines", "gradient penalty", 2)]


def cells(layouts, penalties, chosen, rest=()):
    """Every cell; most parts meet in the chosen ones. The first is quick; the slow tier takes other layouts once.

    ``rest`` has layouts that are nightly alone: most of their parts are in others.
    """
    for cell in product(layouts, penalties, (1, 4)):
        yield pytest.param(*cell, marks=pytest.mark.nightly)
    for i, cell in enumerate(chosen):
        yield pytest.param(*cell, marks=pytest.mark.slow if i else ())
    for i, layout in enumerate(layouts):
        marks = pytest.mark.nightly if layout in rest else pytest.mark.slow
        yield pytest.param(layout, [*penalties][i % 3], 2, marks=marks)


REST = (
    "zero0", "zero1", "zero2", "zero2, offload", "pipelines", "G in stages", "D in four stages", "G in four stages",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layout, penalty, accumulation", [*cells(LAYOUTS, PENALTIES, CHOSEN, REST)])
def test_matrix(ranks, layout, penalty, accumulation):
    num, options, ds = LAYOUTS[layout]
    check(ranks(num), [*options, *PENALTIES[penalty], f"accumulation={accumulation}"], ds, UPDATES)


STYLES = [o for o in TINY_GAMES["stylegan2"] if not o.startswith("objective")]
OF_STYLES = {  # path length regularization, and what else
    "alone": ["objective={loss: non_saturating, path_length: {weight: 0.1, every: 2, decay: 0.5, %s}}"],
    "of half, with r1": [
        "objective={loss: non_saturating, path_length: {weight: 0.1, every: 1, decay: 0.5, batch_shrink: 2, %s}}",
        "objective.r1={weight: 0.1, every: 3}",
    ],
    "of shared images": [
        "objective={loss: non_saturating, reuse_fakes: true, path_length: {weight: 0.1, every: 1, decay: 0.5, %s}}",
        "objective.d_steps=2",
        "objective.fake_labels=data",
    ],
}
PATHS = [("pipelines", "of shared images", 1), ("zero3", "of half, with r1", 1)]
OF_G = {
    **{name: layout for name, layout in LAYOUTS.items() if "four" not in name},
    "G in four stages": LAYOUTS["G in four stages"],  # this D has three layers
    "three stages": (3, stages(3, 3), both(0)),
    "recomputed stages": (2, [*stages(2, 2), "pipeline.generator_phase=recompute"], both(1)),
    "recomputed layers": (2, both_engines("activation_checkpointing=true"), both(3)),
}


OF_G_IN_CI = ("pipelines", "zero2, offload", "stages and zero3", "recomputed stages", "recomputed layers")
REST_OF_G = [layout for layout in OF_G if layout not in OF_G_IN_CI]


@pytest.mark.slow
@pytest.mark.parametrize("layout, penalty, accumulation", [*cells(OF_G, OF_STYLES, PATHS, REST_OF_G)])
def test_path_length(ranks, layout, penalty, accumulation):
    num, options, ds = OF_G[layout]
    objective = [option % FORWARD if "%s" in option else option for option in OF_STYLES[penalty]]
    batch = 16 if accumulation == 4 else 8  # at least two images in each micro-batch of a rank: D compares them
    check(ranks(num), [*STYLES, *options, *objective, f"accumulation={accumulation}", f"batch={batch}"], ds, UPDATES)


def lengths(overrides, ds):
    """The moving average of path lengths after each of three updates."""
    run, found = scenarios.build(overrides, ds), []
    for _ in range(3):
        scenarios.update(run, 1)
        found.append(float(run.entries["path_length"].state()["average"]))
    scenarios.destroy(run)
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("zero3", marks=pytest.mark.slow),
        pytest.param("pipelines", marks=pytest.mark.slow),
        pytest.param("stages and replicas", marks=pytest.mark.nightly),
    ],
)
def test_every_rank_knows_the_average_of_path_lengths(ranks, layout):
    """Those of a pipeline's last stages, too, which see no styles."""
    num, options, ds = OF_G[layout]
    objective = [*STYLES, OF_STYLES["alone"][0]]
    (whole,) = ranks(1).run(lengths, [o.replace("%s", "method: double_backward") for o in objective], both(0))
    found = ranks(num).run(lengths, [*options, *(o.replace("%s", FORWARD) for o in objective)], ds)
    assert found == [found[0]] * num
    assert found[0] == pytest.approx(whole, rel=1e-5)
    assert whole[0] > 0
    assert whole[1] == whole[0] != whole[2]  # every second update moves it


ADA = ["augmentation={pipeline: bgc, p: 0.6, target: 0.1, interval: 2, ramp_nimg: 200}"]
GAMES = {
    "batch norm over ranks": TINY_GAMES["dcgan"],
    "minibatch deviation": TINY_GAMES["stylegan2"],
    "relativistic": [o for o in TINY_GAMES["r3gan"] if not o.startswith("objective")] + ["objective.loss=relativistic"],
    "patches of pairs": TINY_GAMES["pix2pix"],
    "several images a sample": TINY_GAMES["gat"],
    "ada": ADA,
    "two steps": ["objective.d_steps=2"],
    "lecam": ["objective.lecam={weight: 0.3, decay: 0.5}"],
}


def in_both():
    """Each game in two layouts; CI sees half of the games, in one of them."""
    for i, game in enumerate(GAMES):
        for j, layout in enumerate(("zero3", "pipelines")):
            yield pytest.param(layout, game, marks=pytest.mark.slow if i % 4 == 3 * j else pytest.mark.nightly)


@pytest.mark.parametrize("layout, game", [*in_both()])
def test_games(ranks, layout, game):
    num, options, ds = LAYOUTS[layout]
    r1 = [f"objective.r1={{weight: 0.05, every: 3, {FORWARD}}}"]
    check(ranks(num), [*GAMES[game], *options, *r1, "accumulation=2"], ds)


@pytest.mark.skipif(os.environ.get(ON_GPU) == "1", reason="ranks on a GPU differentiate convolutions forward")
def test_a_run_on_cpus_goes_backward_twice_though_planned_for_gpus(ranks):
    (labels,) = ranks(1).run(scenarios.labels_of_phases, ["objective.r1={weight: 1}"], both(1), True)
    assert "D trains" in labels
    assert "D differentiates" not in labels


@pytest.mark.parametrize(
    "layout", [pytest.param("zero3", marks=pytest.mark.slow), pytest.param("pipelines", marks=pytest.mark.nightly)]
)
def test_checkpointing(ranks, layout):
    num, options, ds = LAYOUTS[layout]
    checkpointing = both_engines("activation_checkpointing=true")
    check(ranks(num), [*options, *PENALTIES["r1"], *checkpointing], ds)


LOW = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}


IN_HALF = {
    "r1": ["objective.r1={weight: 0.2, method: %s}"],
    "r1 and r2": ["objective={r1: {weight: 0.2, method: %s}, r2: {weight: 0.1}}"],
    "gradient penalty": ["objective.loss=wasserstein", "objective.gradient_penalty={weight: 1, method: %s}"],
    "path length": [*STYLES, OF_STYLES["of half, with r1"][0].replace("%s", "method: %s")],
}


def in_half():
    """The first three in CI, in two layouts by turns."""
    for i, case in enumerate(
        [
            ("r1", "bf16", 0.2),
            ("r1", "fp16", 0.03),
            ("path length", "fp16", 0.35),
            ("r1 and r2", "bf16", 0.2),
            ("r1 and r2", "fp16", 0.03),
            ("gradient penalty", "bf16", 0.2),
            ("gradient penalty", "fp16", 0.03),
            ("path length", "bf16", 2.8),  # neither way goes where float32 goes
        ]
    ):
        for layout in ("zero1", "zero3", "pipelines", "stages and replicas"):
            in_ci = i < 3 and layout == ("zero3", "pipelines", "zero3")[i]
            yield pytest.param(layout, *case, marks=pytest.mark.slow if in_ci else pytest.mark.nightly)


@pytest.mark.parametrize("layout, penalty, low, most", [*in_half()])
def test_half_types_are_as_near_as_with_a_double_backward(ranks, layout, penalty, low, most):
    """Of where float32 goes in six updates; ``most`` is a third above what both ways had."""
    num, options, ds = LAYOUTS[layout]
    ds = {network: content | LOW[low] for network, content in ds.items()}

    def by(method):
        return [option.replace("%s", method) for option in IN_HALF[penalty]]

    exact = moved(ranks(2), by("double_backward"), both(1))
    twice = moved(ranks(2), by("double_backward"), {n: both(1)[n] | LOW[low] for n in NETWORKS})
    found = moved(ranks(num), [*options, *by("forward_mode")], ds)
    errors = [float((each - exact).norm() / exact.norm()) for each in (found, twice)]
    print(f"from float32: forward mode {errors[0]:.1e}, double backward {errors[1]:.1e}")
    assert errors[0] <= min(most, 1.5 * errors[1])


def gathered(overrides, ds, network):
    """The most elements of a network's parameters that a rank has whole at a time in a penalized update, as a share."""
    run = scenarios.build(overrides, ds)
    parameters, most = list(getattr(run.step, network).network.parameters()), []
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counted(coordinator, module, forward):
        fetch(coordinator, module, forward)
        most.append(sum(p.ds_numel for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE))

    with mock.patch.object(PartitionedParameterCoordinator, "fetch_sub_module", counted):
        scenarios.update(run, 1)
    total = sum(p.ds_numel for p in parameters)
    scenarios.destroy(run)
    return max(most) / total


WHOLE = {
    "discriminator": ["objective.r1={weight: 0.2, method: %s}"],
    "generator": [*STYLES, "objective={loss: non_saturating, path_length: {weight: 0.1, method: %s}}"],
}


@pytest.mark.parametrize(
    "network, checkpointing",
    [
        pytest.param("discriminator", True, marks=pytest.mark.slow),
        pytest.param("generator", False, marks=pytest.mark.slow),
        pytest.param("discriminator", False, marks=pytest.mark.slow),
        pytest.param("generator", True, marks=pytest.mark.nightly),
    ],
)
def test_no_rank_holds_a_network_whole_at_zero_3(ranks, network, checkpointing):
    """Recomputing, a double backward goes layer by layer too."""
    small = {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}
    found = {}
    for method in ("double_backward", "forward_mode"):
        penalty = [option.replace("%s", method) for option in WHOLE[network]]
        penalty.append(f"engines.{network}.activation_checkpointing={str(checkpointing).lower()}")
        found[method] = max(ranks(2).run(gathered, penalty, both(3, zero=small), network))
    assert found["forward_mode"] < 0.6, found
    assert checkpointing or found["double_backward"] == 1

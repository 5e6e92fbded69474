"""Which layout is taken, what it is made of, and what is said where none fits."""

from __future__ import annotations

import json
import resource
import shlex
import subprocess
import sys

import pytest

from bigsgan import shipped
from bigsgan.cli import main
from bigsgan.config import NETWORKS, both_engines, load_recipe
from bigsgan.errors import UserError
from bigsgan.planner import report
from bigsgan.planner.activations import Traces
from bigsgan.planner.balance import plan_balanced
from bigsgan.planner.layouts import USABLE, Resources, Surveyor
from bigsgan.planner.memory import predict

GIB = 2**30
WIDE = [
    "batch=4",
    "generator={family: mlp, latent_size: 10, width: 500, depth: 4}",
    "discriminator={family: mlp, width: 500, depth: 4}",
]
"""Much more in states than in activations."""


def survey(gpus, memory, overrides=(), host=None, nodes=1):
    resources = Resources(gpus, nodes, int(memory), None if host is None else int(host))
    return Surveyor(shipped.recipe("digits"), merged(WIDE, overrides), resources).survey(), resources


def merged(own, overrides):
    """A recipe is given each key once."""
    keys = {text.partition("=")[0] for text in overrides}
    return [*(text for text in own if text.partition("=")[0] not in keys), *overrides]


def by_name(found):
    return {(layout.name, layout.recomputes): layout for layout in found.layouts}


def test_a_recipe_that_fits_stays_as_it_is():
    found, _ = survey(2, GIB)
    assert (found.best.name, found.best.overrides) == ("ZeRO 0", WIDE)
    assert all(layout.fits for layout in found.layouts)


@pytest.mark.slow
def test_the_cheapest_that_fits_is_taken():
    """Where it has only just room, what comes before it in the order of costs has none.

    That is ZeRO 1: where an update has one micro-batch, it has reduced the gradients by the end of it, as ZeRO 2 has.
    """
    roomy, _ = survey(2, GIB)
    layouts = by_name(roomy)
    needed = {name: layout.prediction.peak for (name, recomputes), layout in layouts.items() if not recomputes}
    assert needed["ZeRO 2"] == needed["ZeRO 1"] < needed["ZeRO 0"]
    found, _ = survey(2, needed["ZeRO 1"] / USABLE + 1)
    assert (found.best.name, found.best.recomputes, found.best.accumulation) == ("ZeRO 1", False, 1)
    assert not by_name(found)["ZeRO 0", False].fits


@pytest.mark.slow
def test_overrides_to_paste_give_what_was_predicted():
    own = ["engines.generator.activation_checkpointing=true", "accumulation=2"]
    found, _ = survey(2, GIB, own)
    for layout in found.layouts:
        plan, _ = plan_balanced(load_recipe(shipped.recipe("digits"), layout.overrides), 2)
        assert plan.recipe.accumulation == layout.accumulation >= 2
        assert plan.recipe.engine("generator").activation_checkpointing == layout.recomputes
        assert predict(plan, Traces()).peak == layout.prediction.peak


@pytest.mark.slow
def test_more_micro_batches_are_tried_and_fewer_where_ranks_demand_it():
    found, _ = survey(1, GIB, ["batch=64", "accumulation=2"])
    plain = by_name(found)["ZeRO 0", False]
    assert (plain.accumulation, plain.micro_batch) == (2, 32)
    found, _ = survey(1, 0.6 * plain.prediction.peak / USABLE, ["batch=64", "accumulation=2"])
    assert by_name(found)["ZeRO 0", False].accumulation > 2
    found, _ = survey(4, GIB, ["batch=4", "accumulation=2"])
    assert by_name(found)["ZeRO 0", False].accumulation == 1
    assert "must be a multiple of 8, got 4 (2 micro-batches on 4 ranks" in found.refused["as it stands"]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "double_backward"])
def test_a_discriminator_with_a_double_backward_has_no_stages(method):
    found, _ = survey(2, GIB, [f"objective.r1={{weight: 1, every: 16, method: {method}}}"])
    overrides = by_name(found)["2 stages, ZeRO 1", False].overrides
    assert "engines.generator.pipeline_stages=2" in overrides
    assert ("engines.discriminator.pipeline_stages=2" in overrides) == (method == "auto")
    for layout in found.layouts:
        columns = report.parts(layout.prediction)
        assert (
            columns["penalties"]
            > max(layout.prediction.stays + p.total for p in layout.prediction.update.values()) * 0.9
        )


@pytest.mark.slow
def test_where_nothing_fits_the_closest_says_what_it_needs():
    found, resources = survey(2, 1e6)
    with pytest.raises(UserError, match=r"--gpu-memory: must be at least .* GiB for the smallest layout,") as caught:
        report.check(found, resources)
    assert caught.value.field == "--gpu-memory"
    needed = found.closest.prediction.peak / USABLE
    again, resources = survey(2, needed * 1.01)
    report.check(again, resources)
    assert again.best


@pytest.mark.slow
def test_networks_on_ranks_of_their_own_are_taken_where_they_alone_fit():
    """Two ranks that hold one network each need less than two that hold both."""
    found, _ = survey(2, GIB, ["batch=24"])
    divided = [layout for layout in found.layouts if "ranks of their own" in layout.name]
    assert len(divided) == 8
    least = min(divided, key=lambda layout: layout.prediction.peak)
    assert found.best.name == "ZeRO 0"
    room, _ = survey(2, least.prediction.peak / USABLE + 1, ["batch=24"])
    assert (room.best.name, room.best.overrides) == (least.name, least.overrides)
    plan, _ = plan_balanced(load_recipe(shipped.recipe("digits"), least.overrides), 2)
    assert plan.is_split
    assert predict(plan, Traces()).peak == least.prediction.peak


def test_a_recipe_in_stages_is_surveyed():
    stages = both_engines("pipeline_stages=2")
    found, _ = survey(4, GIB, stages)
    assert found.own.name == "as it stands"
    assert by_name(found)["2 stages, ZeRO 1", False].prediction.stays < by_name(found)["ZeRO 1", False].prediction.stays
    back = both_engines("pipeline_stages=1")
    assert found.best.name == "ZeRO 0"
    assert set(back) <= set(found.best.overrides)


@pytest.mark.slow
def test_more_stages_than_layers_are_not_possible():
    stages = ["engines.generator.pipeline_stages=16", "engines.generator.ds_config=ds_configs/zero1.json"]
    found, _ = survey(16, GIB, [*stages, "batch=64", "accumulation=4"])
    assert "engines.generator.pipeline_stages: must be at most " in found.refused["as it stands"]
    assert found.best is not None


@pytest.mark.slow
def test_where_only_the_recipe_as_it_stands_fits_it_stays():
    """It has G alone on the host, which none of the layouts has."""
    files = {"generator": "zero3_offload", "discriminator": "zero2"}
    mixed = [f"engines.{network}.ds_config=ds_configs/{name}.json" for network, name in files.items()]
    roomy, _ = survey(2, GIB, mixed)
    others = min(layout.prediction.peak for layout in roomy.layouts)
    assert roomy.own.prediction.peak < others
    found, resources = survey(2, roomy.own.prediction.peak / USABLE + 1, mixed)
    report.check(found, resources)
    assert (found.best.name, found.best.overrides) == ("as it stands", merged(WIDE, mixed))
    nothing, _ = survey(2, 1e6, mixed)
    assert nothing.closest.name == "as it stands"


@pytest.mark.slow
def test_json_is_alone_on_standard_output():
    """DeepSpeed prints when it is imported."""
    code = "import sys; from bigsgan.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "plan", "--json"], capture_output=True, timeout=120)
    assert json.loads(done.stdout)["generator"]["parameters"] > 0


@pytest.mark.slow
def test_a_command_that_finds_nothing_ends_with_one_line(capsys):
    assert main(["plan", "--gpus", "2", "--gpu-memory", "1e-3", *WIDE]) == 2
    printed, message = capsys.readouterr()
    assert "fits" not in printed.splitlines()[1]
    (line,) = message.splitlines()
    assert line.startswith("bigsgan: --gpu-memory: must be at least ")


@pytest.mark.slow
def test_offloading_asks_for_memory_of_the_nodes():
    bf16 = both_engines("ds_config=ds_configs/zero1_bf16.json")
    roomy, _ = survey(4, GIB, bf16)
    offloaded = by_name(roomy)["ZeRO 3, all on the host", True]
    others = [layout for layout in roomy.layouts if "host" not in layout.name]
    assert offloaded.prediction.peak < min(layout.prediction.peak for layout in others)
    memory = offloaded.prediction.peak / USABLE + 1
    node = offloaded.prediction.on_host * 4 / 2
    found, resources = survey(4, memory, bf16, host=node / USABLE + 1, nodes=2)
    assert found.best.name == offloaded.name
    found, resources = survey(4, memory, bf16, host=0.9 * node, nodes=2)
    with pytest.raises(UserError, match=r"--host-memory: must be at least .* GiB on each node for ") as caught:
        report.check(found, resources)
    assert caught.value.field == "--host-memory"


@pytest.mark.slow
def test_pinned_blocks_count_as_host_memory():
    """Those in which G's parameters were built hold D's afterwards, as far as D has as many of their size."""
    bf16 = both_engines("ds_config=ds_configs/zero1_bf16.json")
    found, _ = survey(4, GIB, bf16)
    layouts = by_name(found)
    prediction = layouts["ZeRO 3, all on the host", True].prediction
    generator, discriminator = (prediction.states[network] for network in NETWORKS)
    sizes = generator.built.keys() | discriminator.built.keys()
    built = sum(size * max(generator.built[size], discriminator.built[size]) for size in sizes)
    # A layer of 500 x 500 weights has 62,500 of them on each of 4 ranks, 125,000 bytes: G has three and D three.
    assert (generator.built[131_072], discriminator.built[131_072]) == (3, 3)
    assert prediction.spare == generator.spare + discriminator.spare + built
    assert prediction.on_host == sum(prediction.host.values()) + prediction.spare
    assert layouts["ZeRO 3", True].prediction.on_host == 0


@pytest.mark.slow
def test_one_optimizer_on_the_host_comes_before_both():
    """And before everything: of what it takes from the device nothing but its weights stays there."""
    bf16 = both_engines("ds_config=ds_configs/zero1_bf16.json")
    roomy, _ = survey(1, GIB, bf16)
    names = {n: f"ZeRO 2, {n[0].upper()}'s optimizer on the host" for n in NETWORKS}
    peaks = {n: by_name(roomy)[names[n], True].prediction.peak for n in NETWORKS}
    both = by_name(roomy)["ZeRO 2, all optimizers on the host", True].prediction.peak
    neither = by_name(roomy)["ZeRO 2", True].prediction.peak
    assert both < min(peaks.values()) < max(peaks.values()) < neither
    for network, peak in peaks.items():
        found, _ = survey(1, peak / USABLE + 1, bf16, host=GIB)
        assert found.best.prediction.peak <= peak
        assert found.best.name in names.values()
        if found.best.name == names[network]:
            offloaded = [text for text in found.best.overrides if text.endswith("zero2_offload.json")]
            assert offloaded == [f"engines.{network}.ds_config=ds_configs/zero2_offload.json"]


@pytest.mark.slow
def test_the_command_prints_a_table_or_json(capsys):
    arguments = ["plan", "--gpus", "2", "--gpu-memory", "1", *WIDE]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2] == "cheapest that fits: ZeRO 0"
    assert shlex.split(lines[-1]) == WIDE
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recommended"] == WIDE
    for layout in found["layouts"]:
        device = layout["device"]
        parts = {name: size for name, size in device.items() if name not in ("penalties", "samples", "peak")}
        assert sum(parts.values()) == device["peak"]
        assert any(line.startswith(layout["name"]) for line in lines)
        assert layout["communicator_bytes"] == 402_653_184 * layout["communicators"] > 0


GREAT = [(name, gpus) for name in ("biggan_xl_8b", "gat_8b") for gpus in (8, 64, 1024)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, gpus", [GREAT[0], *(pytest.param(*each, marks=pytest.mark.nightly) for each in GREAT[1:])]
)
def test_eight_billion_parameters_are_planned_within_seconds(name, gpus):
    """Within ten times as long as two tiny networks, of which it takes about five."""
    options = ["--gpus", str(gpus), "--nodes", str(gpus // 8), "--gpu-memory", "80", "--json"]
    found, seconds = planned_apart(name, *options)
    assert found["recommended"] is not None
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 2 * GIB
    assert seconds < 10 * planned_apart("digits", "--gpus", "1", "--json")[1]


def planned_apart(name, *options):
    """What `bigsgan plan` prints in a process of its own, and the seconds that it computes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-m", "bigsgan", "plan", "--config", name, *options]
    done = subprocess.run(command, capture_output=True, timeout=500)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


@pytest.mark.slow
def test_frozen_parameters_are_shared_or_go_to_the_host():
    surveyor = Surveyor(shipped.recipe("digits_dmd2"), ["discriminator.width=256"], Resources(2, 1, GIB, None))
    layouts = {layout.label: layout for layout in surveyor.survey().layouts}
    whole = layouts["ZeRO 2"].prediction
    for name, key in {"sharing what is frozen": "sharded=true", "what is frozen on the host": "offload=cpu"}.items():
        found = layouts[f"ZeRO 2, {name}"]
        assert f"engines.discriminator.frozen.{key}" in found.overrides
        assert not any("generator.frozen" in text for text in found.overrides)
        assert found.prediction.peak < whole.peak
    assert layouts["ZeRO 2, what is frozen on the host"].prediction.on_host > whole.on_host
    assert not any("frozen" in name for name in by_name(survey(2, GIB)[0]))

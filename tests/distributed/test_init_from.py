"""Fine-tuning: a run that begins with another's weights, whatever the layout, and keeps D's first layers."""

import pytest
import torch
from safetensors.torch import load_file

from bigsgan import cli
from tests.distributed import scenarios
from tests.distributed.test_state import ADAM
from tests.runs import make_run
from tests.tiny import TINY_GAMES, stages, zero


def states(results):
    """The three states, whole."""
    return [scenarios.merge([rank[i] for rank in results]) for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage, weights",
    [
        (0, "live"),
        pytest.param(3, "ema", marks=pytest.mark.slow),
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in ((0, "ema"), (3, "live"))),
    ],
)
def test_the_weights_are_the_others(ranks, tmp_path, stage, weights):
    ds = {"generator": zero(stage), "discriminator": zero(stage)}
    later = [f"init_from.weights={weights}", "init_from.freeze_discriminator=2"]
    results = ranks(2).run(scenarios.begin_with, ADAM, ds, str(tmp_path), later, 2)
    donor, begun, after = states(results)
    assert begun["discriminator"].keys() == donor["discriminator"].keys()
    source = donor["average" if weights == "ema" else "generator"]
    assert not torch.equal(donor["average"]["layers.0.linear.weight"], donor["generator"]["layers.0.linear.weight"])
    for name, value in source.items():
        assert torch.equal(begun["generator"][name], value), name
        assert torch.equal(begun["average"][name], value), name
    for name, value in donor["discriminator"].items():
        assert torch.equal(begun["discriminator"][name], value), name
        is_frozen = int(name.split(".")[1]) < 2
        if name.endswith("weight"):
            assert torch.equal(after["discriminator"][name], value) == is_frozen, name


@pytest.mark.slow
def test_other_classes_begin_anew(ranks, tmp_path):
    ds = {"generator": zero(1), "discriminator": zero(2)}
    donor, begun, _ = states(ranks(2).run(scenarios.begin_with, ADAM, ds, str(tmp_path), ["data.num_classes=0"], 1))
    name = "layers.0.embedding.weight"
    assert (donor["generator"][name].numel(), begun["generator"][name].numel()) == (60, 6)
    for name, value in donor["average"].items():
        if "embedding" not in name:
            assert torch.equal(begun["generator"][name], value), name


@pytest.mark.slow
def test_a_discriminator_begins_with_the_layers_of_a_generator(ranks, tmp_path):
    """Of another run's EMA: all but the class token and the last map."""
    ds = {"generator": zero(3), "discriminator": zero(1)}
    game = [*TINY_GAMES["dit"], "generator.times=true", "discriminator.times=true"]
    results = ranks(2).run(scenarios.begin_with, game, ds, str(tmp_path), ["init_from.backbone=true"], 1)
    donor, begun, after = states(results)
    new = {"layers.0.token", "layers.3.linear.weight"}
    for name, value in begun["discriminator"].items():
        assert torch.equal(value, donor["average"].get(name, value * 0)) == (name not in new), name
    assert not torch.equal(after["discriminator"]["layers.0.linear.weight"], donor["average"]["layers.0.linear.weight"])


@pytest.mark.slow
def test_in_stages(ranks, tmp_path):
    ds = {"generator": zero(1), "discriminator": zero(1)}
    results = ranks(2).run(scenarios.begin_with, ADAM, ds, str(tmp_path), stages(2, 2), 1)
    donor, begun, _ = states(results)
    for name, value in donor["average"].items():
        assert torch.equal(begun["generator"][name], value), name


@pytest.mark.slow
@pytest.mark.parametrize("own", [[], ["engines.generator.ranks=1"]], ids=["shared", "own"])
@pytest.mark.parametrize("stage", [1, 3])
def test_the_weights_are_those_of_exports(ranks, tmp_path, stage, own):
    run, _ = make_run(tmp_path, *ADAM)
    files = {network: tmp_path / f"{network}.safetensors" for network in ("generator", "discriminator")}
    for network, file in files.items():
        assert cli.main(["export", "--run", str(run), "--network", network, "--live", "--out", str(file)]) == 0
    overrides = [*ADAM, *own, *(f"init_from.{network}={file}" for network, file in files.items())]
    ds = {network: zero(stage) for network in files}
    found = scenarios.merge(ranks(2).run(scenarios.begin_with_exports, overrides, ds, str(tmp_path / "new")))
    for network, file in files.items():
        for name, value in load_file(file).items():
            assert torch.equal(found[network][name].flatten(), value.flatten()), name
            if network == "generator":
                assert torch.equal(found["average"][name].flatten(), value.flatten()), name


def test_another_network_is_refused(ranks, tmp_path):
    ds = {"generator": zero(0), "discriminator": zero(0)}
    with pytest.raises(RuntimeError, match=r"init_from.run: has a different generator: layers\.0\..*; use the"):
        ranks(2).run(scenarios.begin_with, ADAM, ds, str(tmp_path), ["generator.channels=4"], 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, stage, more",
    [
        ("encoder", 1, ["objective.kl=0"]),
        ("encoder", 3, ["objective.kl=0"]),
        ("decoder", 1, ["objective.adversarial.adaptive=null", "engines.generator.frozen.sharded=true"]),
    ],
)
def test_a_part_of_an_autoencoder_keeps_its_weights(ranks, tmp_path, part, stage, more):
    ds, later = {"generator": zero(stage), "discriminator": zero(1)}, [f"generator.frozen={part}", *more]
    results = ranks(2).run(scenarios.begin_with, TINY_GAMES["autoencoder"], ds, str(tmp_path), later, 2)
    donor, begun, after = states(results)
    for name, value in donor["average"].items():
        assert torch.equal(begun["generator"][name].flatten(), value.flatten()), name
        if name.endswith("weight"):
            is_frozen = (int(name.split(".")[1]) < 8) == (part == "encoder")
            assert torch.equal(after["generator"][name].flatten(), value.flatten()) == is_frozen, name

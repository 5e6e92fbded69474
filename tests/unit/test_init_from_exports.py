"""`init_from` with exports: a run begins with the numbers of the files, and says what does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bigsgan import cli
from bigsgan.config import load_recipe, plan_run
from bigsgan.engines.base import Piece, Shard
from bigsgan.errors import UserError
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from bigsgan.training.initial_weights import check_initial_weights, load_initial_weights
from bigsgan.training.start import find_start
from tests.runs import make_run

CUT = 5
PATHS = {"generator": "hub", "discriminator": "d.safetensors"}
FILES = {"generator": "hub/model.safetensors", "discriminator": "d.safetensors"}


class Engine:
    """An engine whose only shard lacks the first elements of each parameter, which another rank would have."""

    def __init__(self, recipe, network):
        self.network = build_network(recipe, network)
        initialize(self.network, initial_seed(recipe, network))
        self.values = {name: p.detach().flatten().clone() for name, p in self.network.named_parameters()}

    def shards(self):
        own, pieces = {name: value[CUT:] for name, value in self.values.items() if value.numel() > CUT}, []
        for name, value in own.items():
            pieces.append(Piece(name, CUT, value.numel(), sum(piece.numel for piece in pieces)))
        self.shard = Shard(torch.cat(list(own.values())), {}, pieces)
        return [self.shard]

    def publish(self):
        for piece in self.shard.pieces:
            self.values[piece.name][CUT:] = self.shard.master[piece.start : piece.start + piece.numel]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with exports of its networks; the generator's has bfloat16 parameters."""
    place = tmp_path_factory.mktemp("exports")
    run, _ = make_run(place, "augmentation={pipeline: b, p: 0.5}")
    for network, more in (
        ("generator", ["--format", "hub", "--dtype", "bf16", "--no-standing"]),
        ("discriminator", []),
    ):
        out = str(place / PATHS[network])
        assert cli.main(["export", "--run", str(run), "--network", network, "--live", "--out", out, *more]) == 0
    return run


@pytest.fixture
def run(made, monkeypatch):
    monkeypatch.chdir(made.parent)
    return made


def begin(run: Path, *overrides: str):
    recipe = load_recipe(run / "config.yaml", ["out=new", *overrides])
    start = find_start(plan_run(recipe, 1), Path("new"), ())
    check_initial_weights(recipe, start.initial)
    engines = {network: Engine(recipe, network) for network in PATHS}
    new = {network: dict(engine.values) for network, engine in engines.items()}
    new = {network: {name: value.clone() for name, value in values.items()} for network, values in new.items()}
    load_initial_weights(recipe, start.initial, engines)
    return start, engines, new


@pytest.mark.parametrize("classes", [10, 0])
def test_a_run_begins_with_the_numbers_of_the_files(run, classes):
    sources = [f"init_from.{network}={path}" for network, path in PATHS.items()]
    start, engines, new = begin(run, *sources, f"data.num_classes={classes}")
    assert (start.found, start.source, start.nimg) == (None, None, 0)
    anew = set()
    for network, engine in engines.items():
        exported = {name: value.float() for name, value in load_file(FILES[network]).items()}
        buffers = dict(engine.network.named_buffers())
        for name, value in exported.items():
            if name not in engine.values and name not in buffers:  # of an augmentation, or of D's classes
                assert name.startswith("layers.-") or classes == 0
                continue
            found = engine.values.get(name, buffers.get(name)).flatten()
            own = new[network].get(name)
            if value.numel() != found.numel():
                anew.add(name)
                assert torch.equal(found, own), name
            elif own is None:
                assert torch.equal(found, value.flatten()), name
            elif value.numel() > CUT:
                assert torch.equal(found[CUT:], value.flatten()[CUT:]), name
                assert torch.equal(found[:CUT], own[:CUT]), name
    assert bool(anew) == (classes == 0)


def test_a_network_without_an_export_stays_new(run, caplog):
    _, engines, new = begin(run, "init_from.discriminator=d.safetensors")
    assert all(torch.equal(value, new["generator"][name]) for name, value in engines["generator"].values.items())
    assert not torch.equal(
        engines["discriminator"].values["layers.0.conv1.weight"], new["discriminator"]["layers.0.conv1.weight"]
    )
    assert "d.safetensors has no generator: it starts from random weights" in caplog.text


def test_the_exports_of_two_runs(run, tmp_path):
    """Their labels may differ from each other's, too."""
    other, _ = make_run(tmp_path, "data.num_classes=0")
    assert cli.main(["export", "--run", str(other), "--network", "discriminator", "--out", "none.safetensors"]) == 0
    _, engines, _ = begin(run, "init_from.generator=hub", "init_from.discriminator=none.safetensors")
    first = load_file("none.safetensors")["layers.0.conv1.weight"].flatten()
    assert torch.equal(engines["discriminator"].values["layers.0.conv1.weight"][CUT:], first[CUT:])


def test_what_is_no_export_of_that_network_is_refused(run):
    state = load_file("d.safetensors")
    first = next(iter(state))
    header = {"network": "discriminator", "recipe": (run / "config.yaml").read_text()}
    save_file({**state, first: state[first] * float("nan")}, "nan.safetensors", metadata={**header, "recipe": "{}"})
    save_file(state, "text.safetensors", metadata={**header, "recipe": json.dumps("x")})
    save_file(state, "foreign.safetensors", metadata={"format": "pt"})
    for words, message in (
        ("init_from.discriminator=foreign.safetensors", "has written: its header is that of another program, got"),
        ("init_from.discriminator=nan.safetensors", f"contains Inf or NaN \\({first} of the discriminator\\)"),
        ("init_from.discriminator=text.safetensors", "must have a valid recipe"),
        ("init_from.discriminator=hub", "'hub' has a generator; give an export of the discriminator"),
        ("init_from.generator=run/config.yaml", "must be what `bigsgan export` has written"),
        ("init_from.generator=run", "must be what `bigsgan export` has written"),
    ):
        with pytest.raises(UserError, match=rf"^{words.partition('=')[0]}: .*{message}"):
            begin(run, words)
    with pytest.raises(UserError, match=r"^init_from.generator: has a different generator: layers\..* here, .* there"):
        begin(run, "init_from.generator=hub", "generator.channels=4")
    with pytest.raises(UserError, match=r"^init_from.freeze_discriminator: must be 0, as hub has no discriminator"):
        begin(run, "init_from.generator=hub", "init_from.freeze_discriminator=1")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{freeze_discriminator: 1}", r"init_from.run: must be given; name a run directory, or give init_from.gen"),
        ("{run: run, generator: hub}", r"init_from.generator: cannot be combined with init_from.run; remove one"),
        ("{generator: hub, nimg: 64}", r"init_from.nimg: must be unset without init_from.run, got 64 \(an export has"),
        ("{generator: hub, weights: live}", r"init_from.weights: must be unset without init_from.run, got 'live'"),
    ],
)
def test_keys_that_do_not_fit_each_other(run, section, message):
    with pytest.raises(UserError, match=f"^{message}"):
        load_recipe(run / "config.yaml", [f"init_from={section}"])

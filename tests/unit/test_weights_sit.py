"""Imports of SiT: what comes out predicts as a network of torch's modules, under the published names, at 1 - t."""

import argparse
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from bigsgan.cli import main
from bigsgan.config import load_recipe, plan_run
from bigsgan.config.families.dit import SIZES
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.errors import UserError
from bigsgan.inference.trained import open_trained
from bigsgan.models.build import network_on_meta
from bigsgan.training.initial_weights import check_initial_weights
from bigsgan.training.start import find_start
from bigsgan.weights import sit
from bigsgan.weights.sources import read_source
from tests import REPOSITORY
from tests.autoencoders import save_autoencoder, write_latents

CPU = torch.device("cpu")
DEPTH, WIDTH, HEADS, PATCH, CHANNELS, SIDE, CLASSES = 2, 16, 2, 2, 4, 8, 5


def waves(places, num):
    """Of each place times 10,000^(-k / num)."""
    angles = np.multiply.outer(places, 10_000.0 ** (-np.arange(num) / num))
    return np.cos(angles), np.sin(angles)


def positions(side, width):
    rows, columns = (axis.ravel() for axis in np.indices((side, side)))
    parts = [part for places in (columns, rows) for part in reversed(waves(places, width // 4))]
    return torch.from_numpy(np.concatenate(parts, axis=1)).float()[None]


def adaptive(width, num):
    return nn.Sequential(nn.SiLU(), nn.Linear(width, num * width))


def normed(x, shift, scale):
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = nn.ModuleDict({"qkv": nn.Linear(WIDTH, 3 * WIDTH), "proj": nn.Linear(WIDTH, WIDTH)})
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(WIDTH, 4 * WIDTH), "fc2": nn.Linear(4 * WIDTH, WIDTH)})
        self.adaLN_modulation = adaptive(WIDTH, 6)

    def forward(self, x, c):
        of_attention, of_mlp = self.adaLN_modulation(c)[:, None].chunk(2, dim=2)
        shift, scale, gate = of_attention.chunk(3, dim=2)
        heads = [
            part.unflatten(2, (HEADS, -1)).transpose(1, 2)
            for part in self.attn["qkv"](normed(x, shift, scale)).chunk(3, 2)
        ]
        x = x + gate * self.attn["proj"](F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        shift, scale, gate = of_mlp.chunk(3, dim=2)
        return x + gate * self.mlp["fc2"](F.gelu(self.mlp["fc1"](normed(x, shift, scale)), approximate="tanh"))


class SiT(nn.Module):
    """Images with noise t x + (1 - t) z (N, C, H, W), times t (N,), labels (N,) -> x - z, in float64."""

    def __init__(self):
        super().__init__()
        self.x_embedder = nn.ModuleDict({"proj": nn.Conv2d(CHANNELS, WIDTH, PATCH, PATCH)})
        self.t_embedder = nn.ModuleDict(
            {"mlp": nn.Sequential(nn.Linear(256, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))}
        )
        self.y_embedder = nn.ModuleDict({"embedding_table": nn.Embedding(CLASSES + 1, WIDTH)})
        self.pos_embed = nn.Parameter(positions(SIDE // PATCH, WIDTH), requires_grad=False)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        last = nn.Linear(WIDTH, PATCH**2 * 2 * CHANNELS)
        self.final_layer = nn.ModuleDict({"linear": last, "adaLN_modulation": adaptive(WIDTH, 2)})

    def forward(self, x, t, y):
        x = self.x_embedder["proj"](x).flatten(2).mT + self.pos_embed
        features = torch.from_numpy(np.concatenate(waves(t.numpy(), 128), axis=1))
        c = self.t_embedder["mlp"](features) + self.y_embedder["embedding_table"](y)
        for block in self.blocks:
            x = block(x, c)
        shift, scale = self.final_layer["adaLN_modulation"](c)[:, None].chunk(2, dim=2)
        x = self.final_layer["linear"](normed(x, shift, scale))
        pixels = x.view(len(x), SIDE // PATCH, SIDE // PATCH, PATCH, PATCH, 2, CHANNELS)[..., 0, :]
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(len(x), CHANNELS, SIDE, SIDE)


@pytest.fixture(autouse=True)
def tiny_size(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", (DEPTH, WIDTH, HEADS))


def drawn(seed=0):
    torch.manual_seed(seed)
    network = SiT()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name != "pos_embed":
                parameter.normal_(std=0.3)
    return network


def imported(tmp_path, content, *more):
    torch.save(content, tmp_path / "sit.pt")
    options = ["--weights", str(tmp_path / "sit.pt"), "--out", str(tmp_path / "run"), *more]
    return main(["import", "--from", "sit", *options])


def estimates(generator, noisy, t, labels):
    with torch.no_grad():
        return generator(noisy.flatten(1).float(), labels, t.float())


def compare(network, generator):
    network = network.double()
    noisy, labels = torch.randn(3, CHANNELS, SIDE, SIDE, dtype=torch.float64), torch.tensor([0, 4, 2])
    for time in (0.0, 0.3, 0.95):
        t = torch.full((3,), time, dtype=torch.float64)
        with torch.no_grad():
            expected = noisy + (1 - time) * network(noisy, t, labels)
        assert_close(estimates(generator, noisy, 1 - t, labels).double(), expected, atol=1e-4, rtol=0)
        with torch.no_grad():
            unguided = noisy + (1 - time) * network(noisy, t, torch.full((3,), CLASSES))
        found = estimates(generator, noisy, 1 - t, torch.zeros(3, CLASSES))
        assert_close(found.double(), unguided, atol=1e-4, rtol=0)
        assert not torch.allclose(unguided, expected, atol=1e-2)


def test_it_estimates_the_same_images(tmp_path, capsys):
    network = drawn()
    assert imported(tmp_path, network.state_dict()) == 0
    compare(network, open_trained(tmp_path / "run", "generator", False, None, CPU).network)
    said = capsys.readouterr().out
    assert "a dit generator" in said
    assert "not 0, as in a DiT, which predicts noise and cannot be told apart" in said
    recipe = read_saved_recipe(tmp_path / "run")
    assert (recipe.generator.times, recipe.generator.time_scale, recipe.generator.steps) == (True, 1.0, 64)
    assert (recipe.discriminator.family, recipe.objective.flow.weight) == ("none", 1.0)
    data = recipe.data
    assert (data.kind, data.resolution.value, data.num_classes) == ("latents", 8 * SIDE, CLASSES)
    assert (data.missing_labels, data.condition_dropout) == ("accept", 0.1)
    assert (data.codec.kind, data.codec.factor, data.codec.channels) == ("diffusers", 8, CHANNELS)


def test_a_checkpoint_of_its_trainer(tmp_path, capsys):
    networks = {"model": drawn(1), "ema": drawn(2)}
    given = {"global_batch_size": 64, "path_type": "Linear", "prediction": "velocity", "cfg_scale": 4.0, "wandb": True}
    content = {name: network.state_dict() for name, network in networks.items()}
    content |= {"opt": {"state": {}, "param_groups": []}, "args": argparse.Namespace(**given)}
    assert imported(tmp_path, content) == 0
    said = capsys.readouterr().out
    for text in ("batch=64", "cfg_scale", "the EMA is kept", f"starts from zero ({sit.WITHOUT_MOMENTS})"):
        assert text in said
    for name, live in (("model", True), ("ema", False)):
        compare(networks[name], open_trained(tmp_path / "run", "generator", live, None, CPU).network)
    other = {**content, "args": argparse.Namespace(**{**given, "prediction": "noise"})}
    torch.save(other, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"trainer's prediction is 'noise' instead of velocity"):
        read_source("sit", tmp_path / "other.pt", None)


def test_what_training_leaves_at_zero_is_not_named():
    state = drawn().state_dict()
    for name in ("weight", "bias"):
        state[f"final_layer.linear.{name}"].unflatten(0, (PATCH**2, 2, CHANNELS))[:, 1] = 0
    assert sit.left_out(state) == ()


def without(name):
    return lambda state: state.pop(name)


def changed(name, change):
    return lambda state: state.update({name: change(state[name])})


WRONG = {
    "blocks.1.attn.qkv.bias is missing": without("blocks.1.attn.qkv.bias"),
    "pos_embed is missing": without("pos_embed"),
    "projectors.0.weight is unknown": lambda state: state.update({"projectors.0.weight": torch.zeros(1)}),
    "pos_embed is not of sines": changed(
        "pos_embed", lambda table: table.view(1, 4, 4, -1).transpose(1, 2).flatten(1, 2)
    ),
    "final_layer.linear.weight does not have 32 rows": changed("final_layer.linear.weight", lambda rows: rows[:12]),
    "cannot be read as a generator of sit": changed("x_embedder.proj.weight", lambda weight: weight.flatten(1)),
    "does not fit": changed("blocks.0.attn.proj.weight", lambda weight: weight[:3]),
    "contains Inf or NaN": changed("t_embedder.mlp.2.bias", lambda bias: bias * torch.nan),
}


@pytest.mark.parametrize("said", WRONG)
def test_other_files_are_refused(tmp_path, capsys, said):
    state = drawn().state_dict()
    WRONG[said](state)
    assert imported(tmp_path, state) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_other_networks_and_options_are_refused(tmp_path, capsys, monkeypatch):
    state = drawn().state_dict()
    assert imported(tmp_path, {"layers.0.weight": torch.zeros(2, 2)}) == 2
    assert "is missing; give a SiT's" in capsys.readouterr().err
    assert imported(tmp_path, state, "--discriminator", str(tmp_path / "sit.pt")) == 2
    assert "--discriminator: is not supported with --from sit" in capsys.readouterr().err
    assert imported(tmp_path, state, "--settings", str(tmp_path / "sit.pt")) == 2
    assert "--settings: is not supported with --from sit" in capsys.readouterr().err
    monkeypatch.delitem(SIZES, "tiny")
    assert imported(tmp_path, state) == 2
    assert "2 blocks of 16 features, which is no published size" in capsys.readouterr().err


def test_the_published_size():
    """SiT-XL/2 has 675 million parameters , with its positions, and the outputs and the class left out."""
    recipe = load_recipe(REPOSITORY / "launch" / "recipes" / "sit_xl_imagenet256.yaml", [])
    found = sum(p.numel() for p in network_on_meta(recipe, "generator").parameters())
    positions, no_class, unused = 16 * 16 * 1152, 1152, 16 * (1152 + 1)
    assert found + positions + no_class + unused == 675_129_632


BLOCKS = f"depth: {DEPTH}, width: {WIDTH}, heads: {HEADS}"
GAME = {
    "discriminator": f"{{family: dit, {BLOCKS}, times: true}}",
    "objective": "{loss: relativistic, reuse_fakes: true, fake_labels: data, transport: {weight: 0.2}}",
    "optimizer": "{generator: {kind: adamw, lr: 1e-12}, discriminator: {kind: adamw, lr: 1e-12}}",
    "init_from.backbone": "true",
    "generator.steps": "1",
}
"""An adversarial flow model that stands still."""


def overrides(tmp_path, **more):
    return [f"{key}={value}" for key, value in {**GAME, "init_from.run": tmp_path / "run", **more}.items()]


def test_a_game_does_not_begin_with_weights_that_would_mean_something_else(tmp_path):
    assert imported(tmp_path, drawn().state_dict()) == 0

    def begin(*more):
        recipe = load_recipe(tmp_path / "run" / "config.yaml", [*overrides(tmp_path, out=tmp_path / "afm"), *more])
        check_initial_weights(recipe, find_start(plan_run(recipe, 1, tmp_path / "run"), tmp_path / "afm", ()).initial)

    begin()
    with pytest.raises(UserError, match=r"generator\.time_scale: must be 1.0, as in init_from.run, got 1000.0"):
        begin("generator.time_scale=1000")
    with pytest.raises(UserError, match=r"generator\.heads: must be 2"):
        begin("generator.heads=1")


@pytest.mark.slow
def test_a_one_step_game_begins_with_it(tmp_path):
    assert imported(tmp_path, drawn().state_dict()) == 0
    write_latents(tmp_path / "data", 8, posterior=False)
    save_autoencoder(tmp_path / "vae")
    more = {"out": tmp_path / "afm", "data.root": tmp_path / "data", "data.codec.path": tmp_path / "vae"}
    more |= {"batch": 4, "total_nimg": 8, "data.num_workers": 0, "engines.generator.activation_checkpointing": "false"}
    config = str(tmp_path / "run" / "config.yaml")
    command = [sys.executable, "launch/train.py", "--config", config, *overrides(tmp_path, **more)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = dict(open_trained(tmp_path / "run", "generator", False, None, CPU).network.named_parameters())
    g, d = (open_trained(tmp_path / "afm", network, True, None, CPU) for network in ("generator", "discriminator"))
    assert g.nimg == 8
    for found, own in ((g, set()), (d, {"layers.0.token", f"layers.{DEPTH + 1}.linear.weight"})):
        named = dict(found.network.named_parameters())
        assert named.keys() - expected.keys() <= own
        for name in named.keys() - own:
            assert_close(named[name], expected[name], atol=1e-6, rtol=0)

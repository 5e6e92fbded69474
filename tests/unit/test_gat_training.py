"""What a checkpoint of GAT's trainer says of its training: arguments, updates and AdamW's moments, taken or told."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bigsgan import checkpoint
from bigsgan.cli import main
from bigsgan.config import load_recipe
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.engines.base import Piece, Shard
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from bigsgan.training.initial_weights import InitialWeights, load_initial_weights
from bigsgan.weights import gat
from bigsgan.weights.stylegan_pickle import ForeignNetwork
from tests.networks import part

DATA = Path(__file__).resolve().parents[1] / "data"
ARGS = {
    "model": "GAT-B/2", "modelD": "GAT-B/2", "num_classes": 1000, "resolution": 256, "batch_size": 64, "seed": 5,
    "learning_rate": 3e-4, "adam_beta1": 0.0, "adam_beta2": 0.95, "adam_epsilon": 1e-7, "adam_weight_decay": 0.02,
    "max_grad_norm": 2.0, "R1_gamma": 0.2, "R2_gamma": 0.1, "R1_every": 2, "R2_every": 2, "mixed_precision": "no",
    "gradient_accumulation_steps": 1, "max_train_steps": 1000, "enc_type": "dinov2-vit-b", "proj_coeff": 0.5,
    "output_dir": "exps", "allow_tf32": True,
}  # fmt: skip
NUM_UPDATES = 2


def trained(state, betas=(0.5, 0.95)):
    """torch's own AdamW over the parameters in their order, after some updates; positions do not train."""
    weights = {name: value for name, value in state.items() if name != "w_avg" and "feat_rope" not in name}
    named = {name: torch.nn.Parameter(value.clone(), name != "pos_embed") for name, value in weights.items()}
    optimizer = torch.optim.AdamW(named.values(), lr=1e-3, betas=betas)
    generator = torch.Generator().manual_seed(len(named))
    for _ in range(NUM_UPDATES):
        for parameter in named.values():
            if parameter.requires_grad:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    moments = {name: optimizer.state[parameter] for name, parameter in named.items() if parameter.requires_grad}
    return optimizer.state_dict(), moments


def teacher_heads(width, hidden=6, features=5):
    """Of a published discriminator: three linear maps between which nothing has weights."""
    sizes = [(0, hidden, width), (2, hidden, hidden), (4, features, hidden)]
    weights = {f"proj.{i}.weight": torch.full((rows, columns), 0.1 * i) for i, rows, columns in sizes}
    return weights | {f"proj.{i}.bias": torch.arange(float(rows)) for i, rows, _ in sizes}


def imported(tmp_path, capsys, *options, heads=True, **changes):
    """Import a checkpoint; return its run, what was said, and the moments that torch had."""
    record = load_file(DATA / "gat_patch2.safetensors")
    g, d = part(record, "G."), part(record, "D.")
    positions = torch.zeros(1, 16, d["blocks.0.attn.proj.weight"].shape[0])
    g = {"w_avg": torch.zeros(3, 8), "feat_rope.freqs_cos": torch.zeros(4), **g}
    d = {"pos_embed": positions, **d, **(teacher_heads(positions.shape[-1]) if heads else {})}
    content = {"generator": g, "ema": g, "discriminator": d, "steps": 9, "args": argparse.Namespace(**ARGS)}
    (content["optG"], g_moments), (content["optD"], d_moments) = trained(g), trained(d)
    torch.save(content | changes, tmp_path / "x.pt")
    arguments = ["--from", "gat", "--weights", str(tmp_path / "x.pt"), "--out", str(tmp_path / "run"), *options]
    assert main(["import", *arguments]) == 0
    return tmp_path / "run", capsys.readouterr().out, {"generator": g_moments, "discriminator": d_moments}


def test_training_resumes_where_it_was(tmp_path, capsys):
    run, said, moments = imported(tmp_path, capsys)
    recipe = read_saved_recipe(run)
    assert (recipe.batch, recipe.seed, recipe.total_nimg, recipe.generator.bf16) == (64, 5, 64_000, False)
    assert recipe.ema.half_life_nimg == round(64 * 692.8009)  # ln 0.5 / ln 0.999
    for network in ("generator", "discriminator"):
        section = getattr(recipe.optimizer, network)
        assert (section.kind, section.lr, section.reference_width, section.betas) == ("adamw", 3e-4, 768, [0.0, 0.95])
        assert (section.eps, section.weight_decay, section.clip_norm) == (1e-7, 0.02, 2.0)
    r1, r2 = recipe.objective.r1, recipe.objective.r2
    assert (r1.weight, r1.every, r1.form, r2.weight, r2.every) == (0.1, 2, "finite_difference", 0.05, 2)
    found = checkpoint.find(run)
    assert found.nimg == 9 * 64
    for network, convert in (("generator", gat.generator_state), ("discriminator", gat.discriminator_state)):
        saved = checkpoint.Reader(found).entry(network)
        assert saved.numbers["optimizer.step"] == NUM_UPDATES
        for kind in ("exp_avg", "exp_avg_sq"):
            for name, expected in convert({n: each[kind] for n, each in moments[network].items()}).items():
                values = torch.empty(expected.numel())
                saved.read(kind, name, 0, values)
                assert torch.equal(values.view(expected.shape), expected), (kind, name)
    assert "576 images seen, as said in the snapshot; the EMA is kept" in said
    for network in moments:
        assert f"Adam of the {network} resumes after 2 updates" in said
    not_taken = said.split("not taken:")[1].split("assumed:")[0]
    assert "enc_type" in not_taken
    assert not any(name in not_taken for name in ("proj_coeff", "resolution"))
    assert "G's means of w by class" in said.split("left out:")[1]
    teacher = recipe.objective.teacher
    assert (teacher.path, teacher.width, teacher.hidden, teacher.weight) == ("data/dinov2_vitb14.pt2", 5, 6, 0.5)


def test_where_the_teacher_is_from_is_told(tmp_path, capsys):
    """Its weight is the checkpoint's and its widths are the heads'; no recipe that ships has one."""
    _, said, _ = imported(tmp_path, capsys)
    settings, assumed = said.split("assumed:")
    assert "objective.teacher.weight=0.5" in settings.split("from launch/recipes")[0]
    assert "objective.teacher" not in settings.split("from launch/recipes")[1]
    words = assumed.split("state:")[0].split()
    assert words[-2:] == ['objective.teacher.path="data/dinov2_vitb14.pt2"', "objective.teacher.resolution=224"]
    assert said.rstrip().endswith("data.root=... objective.teacher.path=...")


def test_without_heads_no_teacher_is_asked_for(tmp_path, capsys):
    run, said, _ = imported(tmp_path, capsys, heads=False)
    assert read_saved_recipe(run).objective.teacher is None
    assert "enc_type proj_coeff" in said
    assert "objective.teacher" not in said


@pytest.mark.parametrize("off", [("R1",), ("R2",)])
def test_a_penalty_that_was_off_stays_off(off, tmp_path, capsys):
    args = argparse.Namespace(**ARGS | {f"{name}_gamma": 0.0 for name in off})
    run, said, _ = imported(tmp_path, capsys, args=args)
    for name, weight in (("r1", 0.1), ("r2", 0.05)):
        found = getattr(read_saved_recipe(run).objective, name)
        assert (found and found.weight) == (None if name.upper() in off else weight)
        assert (f"objective.{name}=null" in said.split("from launch/recipes")[0]) == (name.upper() in off)


class Filled:
    """An engine on one rank that has nothing but its network's parameters, each a shard."""

    def __init__(self, recipe, network):
        self.network = build_network(recipe, network)
        initialize(self.network, initial_seed(recipe, network))
        self.optimizer_states = {}

    def shards(self):
        named = self.network.named_parameters()
        return [Shard(p.detach().view(-1), {}, [Piece(name, 0, p.numel(), 0)]) for name, p in named]

    def publish(self):
        pass

    def load_optimizer_state(self, index, state):
        self.optimizer_states[index] = state


@pytest.mark.parametrize(("teacher", "kept"), [({"width": 5, "hidden": 6}, True), ({"width": 4, "hidden": 6}, False)])
def test_heads_of_another_teacher_begin_anew(teacher, kept, tmp_path, capsys, caplog):
    run, _, _ = imported(tmp_path, capsys)
    recipe, found = read_saved_recipe(run), checkpoint.find(run)
    other = load_recipe(run / "config.yaml", [f"objective.teacher.{key}={value}" for key, value in teacher.items()])
    engines = {network: Filled(other, network) for network in ("generator", "discriminator")}
    new = {name: value.clone() for name, value in engines["discriminator"].network.named_parameters()}
    load_initial_weights(other, InitialWeights(recipe, found, live=True, own=True), engines)
    saved = checkpoint.Reader(found).entry("discriminator")
    heads = 0
    for name, value in engines["discriminator"].network.named_parameters():
        expected = new[name].view(-1)
        if kept or ".teacher." not in name:
            saved.read(checkpoint.MASTER, name, 0, expected := torch.empty(value.numel()))
        heads += ".teacher." in name
        assert torch.equal(value.detach().view(-1), expected), name
    assert heads == 6
    assert ("discriminator: 6 tensors depend on the classes or a teacher" in caplog.text) != kept
    assert bool(engines["discriminator"].optimizer_states) == kept
    assert engines["generator"].optimizer_states


def test_parameters_are_numbered_in_the_order_of_their_names_in_the_file():
    """As torch has it of any module: a module's own parameters, its buffers, and then its children."""
    module = torch.nn.Module()
    module.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    module.pos_embed = torch.nn.Parameter(torch.zeros(1), requires_grad=False)
    module.register_buffer("w_avg", torch.zeros(1))
    module.last = torch.nn.Linear(2, 2)
    buffers = dict(module.named_buffers())
    state = {name: value for name, value in module.state_dict().items() if name == "w_avg" or name not in buffers}
    trained = {name: each for name, each in module.named_parameters() if name != "pos_embed"}
    for number, each in enumerate(trained.values()):
        each.grad = torch.full_like(each, number + 1)
    optimizer = torch.optim.Adam(module.parameters())
    optimizer.step()
    found = gat.moments(optimizer.state_dict(), ForeignNetwork(state)).values["exp_avg"]
    assert {name: each.flatten()[0].item() for name, each in found.items()} == {
        name: pytest.approx(0.1 * (number + 1)) for number, name in enumerate(trained)
    }


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"optD": {"state": {}, "param_groups": []}}, "Adam of the discriminator starts from zero (it does not have"),
        ({"args": None}, "images seen are not known: counted from 0"),
        ({"steps": "9"}, "images seen are not known: counted from 0"),
        ({"args": argparse.Namespace(**ARGS | {"gradient_accumulation_steps": 2})}, "batch_size"),
        ({"args": argparse.Namespace(**ARGS | {"mixed_precision": "fp16"})}, "mixed_precision"),
        ({"args": argparse.Namespace(**ARGS | {"R2_every": 1})}, "R1_gamma R1_every R2_gamma R2_every"),
        ({"args": argparse.Namespace(**ARGS | {"R1_gamma": 0, "R2_every": "2"})}, "not taken: R2_gamma R2_every"),
        ({"args": argparse.Namespace(**ARGS | {"proj_coeff": 0})}, "not taken: proj_coeff enc_type"),
    ],
)
def test_what_is_not_known_is_told(changes, wanted, tmp_path, capsys):
    _, said, _ = imported(tmp_path, capsys, **changes)
    assert wanted in " ".join(said.split())


def test_settings_are_left_if_asked(tmp_path, capsys):
    run, said, _ = imported(tmp_path, capsys, "--settings", "none")
    assert read_saved_recipe(run).batch == 512
    assert "objective.teacher.weight=1.0" in said.split("assumed:")[1]
    assert "576 images seen" in said

"""BigGAN-PyTorch's state_dict.pth: its arguments become settings, its iterations the images seen."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from bigsgan.cli import main
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.inference.trained import open_trained
from bigsgan.weights.biggan_settings import file_beside
from tests.unit.test_importing import DATA, Malicious, part
from tests.unit.test_snapshot_settings import words

CONFIG = {
    "dataset": "I128_hdf5",
    "augment": False,
    "G_activation": nn.ReLU(),
    "D_activation": nn.ReLU(True),
    "seed": 7,
    "G_lr": 1e-4,
    "D_lr": 4e-4,
    "G_B1": 0.0,
    "D_B1": 0.5,
    "G_B2": 0.999,
    "D_B2": 0.99,
    "batch_size": 16,
    "G_batch_size": 0,
    "num_G_accumulations": 4,
    "num_D_steps": 1,
    "num_D_accumulations": 4,
    "num_epochs": 100,
    "ema": True,
    "use_ema": True,
    "ema_decay": 0.9999,
    "ema_start": 20,
    "adam_eps": 1e-6,
    "BN_eps": 1e-5,
    "SN_eps": 1e-6,
    "G_ortho": 2e-4,
    "D_ortho": 0.0,
    "z_var": 1.0,
    "G_fp16": False,
    "D_fp16": False,
    "num_G_SVs": 1,
    "num_D_SVs": 1,
    "num_G_SV_itrs": 1,
    "num_D_SV_itrs": 1,
    "which_train_fn": "GAN",
}


def write(directory, suffix="", itr=1_000, **changes):
    """Write what training saves: networks, and the state of training."""
    record = load_file(DATA / "biggan_pytorch_biggan.safetensors")
    torch.save(part(record, "generator/"), directory / f"G_ema{suffix}.pth")
    torch.save(part(record, "discriminator/"), directory / f"D{suffix}.pth")
    state = {"itr": itr, "epoch": 3, "save_num": 1, "best_IS": np.float64(8.5), "best_FID": np.float32(9)}
    torch.save({**state, "config": {**CONFIG, **changes}}, directory / f"state_dict{suffix}.pth")


def imported(directory, suffix="", *more):
    arguments = ["--weights", str(directory / f"G_ema{suffix}.pth"), "--out", str(directory / "run"), *more]
    status = main(["import", "--from", "biggan-pytorch", *arguments])
    return read_saved_recipe(directory / "run") if status == 0 else status


def test_each_argument_is_the_recipes(tmp_path, capsys):
    write(tmp_path)
    recipe = imported(tmp_path)
    assert (recipe.seed, recipe.batch, recipe.accumulation, recipe.objective.d_steps) == (7, 64, 4, 1)
    g, d = recipe.optimizer.generator, recipe.optimizer.discriminator
    assert (g.lr, g.betas, g.eps, d.lr, d.betas, d.eps) == (1e-4, [0.0, 0.999], 1e-6, 4e-4, [0.5, 0.99], 1e-6)
    assert (recipe.objective.orthogonal.generator, recipe.objective.orthogonal.discriminator) == (1e-4, 0)
    assert not recipe.data.horizontal_flip
    assert 0.5 ** (64 / recipe.ema.half_life_nimg) == pytest.approx(0.9999, abs=1e-8)
    assert recipe.ema.start_nimg == 20 * 64
    assert open_trained(tmp_path / "run", "generator", False, None, torch.device("cpu")).nimg == 64_000
    text = capsys.readouterr().out
    assert "G_nl" not in text  # the activations tell it
    assert "64000 images seen, as said in the snapshot" in text
    assert "optimizer state: none, Adam starts from zero" in text
    assert words(text, "not taken:") == ["num_epochs"]
    assert text.partition("assumed:")[2].partition("state:")[0].split()[-1] == "norm_style=bn"


def test_what_no_recipe_has_is_named(tmp_path, capsys):
    write(tmp_path, "_best0", z_var=0.5, num_G_accumulations=2, augment=True)
    recipe = imported(tmp_path, "_best0")
    assert (recipe.batch, recipe.ema.half_life_nimg, recipe.data.horizontal_flip) == (2048, 14_194_944, True)
    text = capsys.readouterr().out
    assert words(text, "not taken:") == ["z_var", "num_epochs", "augment's", "crops", "batch_size", "G_batch_size"]
    assert "images seen are not known: counted from 0" in text


def test_other_micro_batches_for_g(tmp_path):
    write(tmp_path, G_batch_size=32, num_G_accumulations=2)
    recipe = imported(tmp_path)
    assert (recipe.accumulation_of("generator"), recipe.accumulation_of("discriminator"), recipe.batch) == (2, 4, 64)


@pytest.mark.parametrize("option", ["mybn", "cross_replica"])
def test_a_norm_style_without_effect_is_passed_over(tmp_path, capsys, option):
    """The public layer then calls its own module of batch norm."""
    text = "torch.nn.ReLU(inplace=True)"
    write(tmp_path, norm_style="in", G_nl="inplace_relu", G_activation="relu", D_activation=text, **{option: True})
    assert imported(tmp_path).batch == 64
    assert "assumed:" not in capsys.readouterr().out


def test_bn_eps_is_read_unless_given(tmp_path):
    write(tmp_path, BN_eps=1e-4)
    assert imported(tmp_path).generator.norm_eps == 1e-4
    (tmp_path / "run").rename(tmp_path / "first")
    assert imported(tmp_path, "", "--bn-eps", "0.001").generator.norm_eps == 0.001


@pytest.mark.parametrize(
    "weights, beside",
    [("G.pth", "state_dict.pth"), ("G_ema.pth", "state_dict.pth"), ("G_ema_best0.pth", "state_dict_best0.pth")],
)
def test_the_file_has_the_name_that_training_gives_it(tmp_path, weights, beside):
    assert file_beside(tmp_path / weights) == tmp_path / beside


HOSTILE = {
    "code": (lambda path: {"config": {**CONFIG, "x": Malicious(path)}}, "contains code"),
    "no settings": (lambda path: {"weight": torch.zeros(3)}, "must contain settings of BigGAN-PyTorch"),
    "a batch": (lambda path: {"config": {**CONFIG, "num_D_steps": 0}}, "does not give a valid recipe"),
    "a tensor": (lambda path: {"config": {**CONFIG, "augment": torch.zeros(2)}}, "cannot be read as settings of"),
    "another norm": (lambda path: {"config": {**CONFIG, "norm_style": "in"}}, "has norm_style 'in', which is not"),
    "another activation": (
        lambda path: {"config": {**CONFIG, "D_nl": "leaky_relu"}},
        "has D_nl 'leaky_relu', which is",
    ),
    "a module": (
        lambda path: {"config": {**CONFIG, "G_activation": nn.LeakyReLU()}},
        "has G_activation 'LeakyReLU', wh",
    ),
    "no activation": (
        lambda path: {"config": {**CONFIG, "G_activation": 3}},
        "has G_activation 3, which is not suppor",
    ),
    "an iteration": (lambda path: {"config": CONFIG, "itr": 1 << 39}, "must have seen fewer than"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, capsys, name):
    write(tmp_path)
    make, message = HOSTILE[name]
    torch.save(make(tmp_path / "ran"), tmp_path / "state_dict.pth")
    assert imported(tmp_path) == 2
    found = capsys.readouterr().err
    assert found.count("\n") == 1
    assert message in found
    assert ("--settings none" in found) == (name != "an iteration")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()

"""The text file of pix2pix's options: a line each, with the default behind what differs from it."""

import pytest
import torch

from bigsgan.cli import main
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.images.size import Size
from tests.unit.test_public_pix2pix import UNet
from tests.unit.test_snapshot_settings import words

OPTIONS = {
    "batch_size": (4, 1),
    "beta1": (0.6, 0.5),
    "crop_size": (64, 256),
    "direction": ("BtoA", "AtoB"),
    "epoch_count": (1, 1),
    "gan_mode": ("vanilla", "vanilla"),
    "lambda_L1": (50.0, 100.0),
    "load_size": (72, 286),
    "lr": (0.0001, 0.0002),
    "lr_policy": ("linear", "linear"),
    "max_dataset_size": (float("inf"), float("inf")),
    "model": ("pix2pix", "cycle_gan"),
    "n_epochs": (100, 100),
    "n_epochs_decay": (100, 100),
    "netG": ("unet_64", "x"),
    "no_dropout": (True, False),
    "no_flip": (True, False),
    "preprocess": ("resize_and_crop", "resize_and_crop"),
    "suffix": ("", ""),
}


def write(directory, **changes):
    lines = ["----------------- Options ---------------"]
    for name, (value, default) in {**OPTIONS, **{k: (v, "x") for k, v in changes.items()}}.items():
        comment = "" if value == default else f"\t[default: {default}]"
        lines.append(f"{name:>25}: {value!s:<30}{comment}")
    (directory / "train_opt.txt").write_text("\n".join([*lines, "----------------- End -------------------", ""]))


def imported(directory):
    torch.save(UNet(6, 2, "batch").state_dict(), directory / "latest_net_G.pth")
    arguments = ["--weights", str(directory / "latest_net_G.pth"), "--out", str(directory / "run")]
    status = main(["import", "--from", "pix2pix", *arguments])
    return read_saved_recipe(directory / "run") if status == 0 else status


def test_each_option_is_the_recipes(tmp_path, capsys):
    write(tmp_path)
    recipe = imported(tmp_path)
    assert (recipe.batch, recipe.objective.loss, recipe.objective.l1) == (4, "non_saturating", 50)
    for adam in (recipe.optimizer.generator, recipe.optimizer.discriminator):
        assert (adam.lr, adam.betas) == (1e-4, [0.6, 0.999])
    assert (recipe.data.input_side, recipe.data.horizontal_flip, recipe.data.crop_from) == (
        "right",
        False,
        Size(72, 72),
    )
    assert not recipe.generator.dropout
    left = words(capsys.readouterr().out, "not taken:")
    assert left == ["n_epochs", "n_epochs_decay", "lr_policy", "epoch_count"]


def test_least_squares_are_half_as_strong_here(tmp_path):
    write(tmp_path, gan_mode="lsgan")
    recipe = imported(tmp_path)
    assert (recipe.objective.loss, recipe.objective.l1) == ("least_squares", 25)


def test_what_no_recipe_has_is_named(tmp_path, capsys):
    write(tmp_path, gan_mode="wgangp", preprocess="scale_width")
    recipe = imported(tmp_path)
    assert (recipe.objective.loss, recipe.objective.l1, recipe.data.crop_from) == ("non_saturating", 100, Size(71, 71))
    assert {"gan_mode", "lambda_L1", "preprocess"} <= set(words(capsys.readouterr().out, "not taken:"))


def test_of_cyclegan_dropout_alone_is_taken(tmp_path, capsys):
    write(tmp_path, model="cycle_gan")
    recipe = imported(tmp_path)
    assert (recipe.generator.dropout, recipe.batch, recipe.data.horizontal_flip) == (False, 1, True)
    assert "another" in words(capsys.readouterr().out, "not taken:")


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "must contain settings of pix2pix"),
        ("model: pix2pix\nnetG: unet_64\nno_dropout: False\nlr: fast\n", "has lr 'fast', which must be a number"),
        ("model: pix2pix\nnetG: unet_64\nno_dropout: False\nbatch_size: 0\n", "does not give a valid recipe: batch"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, capsys, content, message):
    (tmp_path / "train_opt.txt").write_text(content)
    assert imported(tmp_path) == 2
    found = capsys.readouterr().err
    assert message in found
    assert found.count("\n") == 1
    assert "--settings none" in found
    assert not (tmp_path / "run").exists()

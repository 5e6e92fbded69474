"""What a snapshot and the file beside it say of the training goes into the recipe of its import, and is said."""

import json
import re
from pathlib import Path

import pytest
import torch

from bigsgan.cli import main
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.inference.trained import open_trained
from bigsgan.weights.stylegan_pickle import read_snapshot
from tests.snapshots import BGC, OPTIONS, TINY, write_options, write_snapshot

NAME = "network-snapshot-000003.pkl"


def imported(directory: Path, *more: str, source: str = "stylegan2-ada"):
    arguments = ["--weights", str(directory / NAME), "--out", str(directory / "run"), *more]
    assert main(["import", "--from", source, *arguments]) == 0
    return read_saved_recipe(directory / "run")


def refusal(capsys, directory: Path, *more: str, source: str = "stylegan2-ada") -> str:
    arguments = ["--weights", str(directory / NAME), "--out", str(directory / "run"), *more]
    assert main(["import", "--from", source, *arguments]) == 2
    assert not (directory / "run").exists()
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "Traceback" not in message
    return message


def words(text: str, beginning: str) -> list[str]:
    """What stands below a line that begins so, up to the next such line."""
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if line[15:].startswith(beginning))
    below = lines[first + 1 :]
    last = next((i for i, line in enumerate(below) if not line.startswith(" " * 17)), len(below))
    return " ".join(below[:last]).split()


# --- the file beside a snapshot ---


def test_each_setting_of_the_file_is_the_recipes(tmp_path):
    write_snapshot(tmp_path / NAME)
    write_options(tmp_path)
    recipe = imported(tmp_path)
    assert (recipe.seed, recipe.batch, recipe.total_nimg) == (5, 8, 12_000_000)
    assert (recipe.report_nimg, recipe.sample_nimg, recipe.checkpoint_nimg) == (4_000, 40_000, 80_000)
    assert recipe.data.horizontal_flip
    r1, path_length = recipe.objective.r1, recipe.objective.path_length
    assert (recipe.objective.loss, r1.weight, r1.every, r1.form) == ("non_saturating", 0.4, 16, "exact")
    assert (path_length.weight, path_length.every, path_length.decay, path_length.batch_shrink) == (2, 4, 0.01, 2)
    assert recipe.generator.style_mixing == 0.9
    g, d = recipe.optimizer.generator, recipe.optimizer.discriminator
    assert (g.kind, g.lr, g.betas, g.eps, g.decay) == ("adam", 0.002, [0.0, 0.99], 1e-8, "constant")
    assert (d.kind, d.lr, d.betas, d.eps) == ("adam", 0.003, [0.0, 0.98], 1e-7)
    assert (recipe.ema.half_life_nimg, recipe.ema.ramp) == (2_500, 0.05)
    ada = recipe.augmentation
    assert (ada.pipeline, ada.target, ada.interval, ada.ramp_nimg) == ("bgc", 0.7, 4, 500_000)
    assert ada.p == pytest.approx(0.37)


def test_it_is_said_where_each_setting_is_from(tmp_path, capsys):
    write_snapshot(tmp_path / NAME)
    write_options(
        tmp_path,
        loss_kwargs={**OPTIONS["loss_kwargs"], "pl_no_weight_grad": True, "blur_init_sigma": 0},
        resume_pkl=None,
    )
    imported(tmp_path)
    text = capsys.readouterr().out
    theirs = words(text, f"from {tmp_path / 'training_options.json'} and the snapshot:")
    assert {"batch=8", "objective.r1.weight=0.4", "optimizer.discriminator.betas=[0.0,0.98]"} <= set(theirs)
    assert {"ema.half_life_nimg=2500", "data.horizontal_flip=true", 'augmentation.pipeline="bgc"'} <= set(theirs)
    ours = words(text, "from launch/recipes/stylegan2_cifar.yaml, the nearest to 8x8 and 0 classes:")
    assert ours == ["accumulation=1", 'objective.loss="non_saturating"']
    left = words(text, "not taken:")
    assert left == [
        "batch_gpu", "data_loader_kwargs", "loss_kwargs.pl_no_weight_grad", "metrics", "num_gpus",
        "training_set_kwargs.max_size", "training_set_kwargs.path",
    ]  # fmt: skip
    assert "3000 images seen, as said in the file's name; the EMA is kept" in text
    assert "optimizer state: none, Adam starts from zero" in text
    assert "augmentation at p 0.37, as in the snapshot" in text


CHANGES = {
    "no R1": ({"loss_kwargs.r1_gamma": 0}, lambda r: r.objective.r1, None),
    "no path length": ({"loss_kwargs.pl_weight": 0}, lambda r: r.objective.path_length, None),
    "each update": ({"D_reg_interval": None}, lambda r: r.objective.r1.every, 1),
    "no ramp": ({"ema_rampup": None}, lambda r: r.ema.ramp, None),
    "no augmentation": ({"augment_kwargs": ...}, lambda r: r.augmentation, None),
    "fixed p": ({"ada_target": None, "augment_p": 0.2}, lambda r: r.augmentation.target, None),
    "neither": ({"ada_target": None}, lambda r: r.augmentation, None),
    "the end": ({"total_kimg": 2}, lambda r: r.total_nimg, 6_000),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_setting(tmp_path, change):
    changes, look, expected = CHANGES[change]
    content = json.loads(json.dumps(OPTIONS))
    for name, value in changes.items():
        *section, key = name.split(".")
        (content[section[0]] if section else content)[key] = value
    write_snapshot(tmp_path / NAME)
    write_options(tmp_path, **content)
    assert look(imported(tmp_path)) == expected


def test_stylegan3_has_defaults_of_its_own(tmp_path):
    write_snapshot(tmp_path / NAME, p=None)
    write_options(tmp_path, ema_rampup=...)
    recipe = imported(tmp_path, source="stylegan3-style2")
    assert (recipe.objective.path_length, recipe.generator.style_mixing, recipe.ema.ramp) == (None, 0, 0.05)


def test_without_a_count_of_images_the_emas_memory_is_whole(tmp_path, capsys):
    write_snapshot(tmp_path / NAME)
    write_options(tmp_path)
    (tmp_path / NAME).rename(tmp_path / "cats.pkl")
    arguments = ["--weights", str(tmp_path / "cats.pkl"), "--out", str(tmp_path / "run")]
    assert main(["import", "--from", "stylegan2-ada", *arguments]) == 0
    recipe = read_saved_recipe(tmp_path / "run")
    assert (recipe.ema.half_life_nimg, recipe.ema.ramp) == (2_500, None)
    text = capsys.readouterr().out
    assert "ema.ramp" in words(text, "not taken:")
    assert "images seen are not known: counted from 0" in text


# --- the snapshot itself ---


def test_a_snapshot_alone_tells_mirroring_and_augmentations(tmp_path, capsys):
    geometry = dict.fromkeys(["xflip", "rotate90", "xint", "scale", "rotate", "aniso", "xfrac"], 1)
    write_snapshot(tmp_path / NAME, 0.25, geometry)
    recipe = imported(tmp_path)
    assert (recipe.data.horizontal_flip, recipe.augmentation.pipeline, recipe.augmentation.p) == (True, "bg", 0.25)
    assert (recipe.augmentation.target, recipe.batch, recipe.objective.r1.weight) == (0.6, 64, 0.01)
    theirs = words(capsys.readouterr().out, "from the snapshot:")
    assert theirs == ["data.horizontal_flip=true", 'augmentation.pipeline="bg"']


def test_a_converted_snapshot_does_not_tell(tmp_path):
    write_snapshot(tmp_path / NAME, None, known=False)
    recipe = imported(tmp_path)
    assert (recipe.augmentation.pipeline, recipe.augmentation.p) == ("bgc", 0)
    assert not recipe.data.horizontal_flip


@pytest.mark.parametrize("multipliers", [{**BGC, "brightness": 0.5}, {**BGC, "rotate_max": 0.25}, {"imgfilter": "x"}])
def test_augmentations_without_a_name_here_are_named(tmp_path, capsys, multipliers):
    write_snapshot(tmp_path / NAME, 0.25, multipliers)
    recipe = imported(tmp_path)
    assert (recipe.augmentation.pipeline, recipe.augmentation.p) == ("bgc", 0.25)
    assert words(capsys.readouterr().out, "not taken:") == ["augment_pipe's", "arguments"]


@pytest.mark.parametrize("p, expected", [(1.25, 1), (-0.5, 0), (float("nan"), 0)])
def test_p_is_a_probability(tmp_path, p, expected):
    write_snapshot(tmp_path / NAME, p)
    assert imported(tmp_path).augmentation.p == expected


def test_the_settings_may_be_refused(tmp_path, capsys):
    write_snapshot(tmp_path / NAME)
    write_options(tmp_path)
    recipe = imported(tmp_path, "--settings", "none")
    assert (recipe.batch, recipe.data.horizontal_flip, recipe.augmentation.target) == (64, False, 0.6)
    assert recipe.augmentation.p == pytest.approx(0.37)
    assert "training_options" not in capsys.readouterr().out


def test_the_settings_may_lie_elsewhere(tmp_path):
    write_snapshot(tmp_path / NAME)
    (tmp_path / "there").mkdir()
    write_options(tmp_path / "there")
    assert imported(tmp_path, "--settings", str(tmp_path / "there" / "training_options.json")).batch == 8


# --- hostile files ---

HOSTILE = {
    "brackets": ("[" * 100_000, "(it is nested too deeply)"),
    "another file": ('{"name": "x"}', "give another file, or --settings none"),
    "another loss": (json.dumps({"loss_kwargs": {"class_name": "os.system"}}), "must contain settings of"),
    "NaN": (json.dumps({**OPTIONS, "ema_kimg": float("nan")}), "NaN is not JSON"),
    "text": (json.dumps({**OPTIONS, "ema_kimg": "x" * 100}), "has ema_kimg 'xxx"),
    "nearly": (json.dumps(OPTIONS).replace("12000", "1e308"), "has total_kimg 1e+308, which must be a number of at"),
    "a huge beta": (json.dumps(OPTIONS).replace("[0, 0.98]", f"[{'9' * 400}, 0]"), "discriminator.betas"),
    "a huge batch": (json.dumps({**OPTIONS, "batch_size": 9**400}), "does not give a valid recipe: batch"),
    "beyond": (json.dumps(OPTIONS).replace("12000", "9" * 400), "total_kimg of many digits, which must be a number of"),
    "an odd rate": (json.dumps({**OPTIONS, "G_opt_kwargs": {**OPTIONS["G_opt_kwargs"], "lr": [1]}}), "generator.lr"),
    "a batch that fits no group": (json.dumps({**OPTIONS, "batch_size": 7}), "must divide the 7 images"),
    "large": (" " * (1 << 21), "larger than 1024 KiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_one_line(tmp_path, capsys, name):
    content, message = HOSTILE[name]
    write_snapshot(tmp_path / NAME)
    path = tmp_path / "training_options.json"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    found = refusal(capsys, tmp_path)
    assert re.match(f"bigsgan: --settings: (must .*, got )?'{path}'", found)
    assert message in found
    assert re.search(r"; (fix or remove|give another file).*--settings none\n$", found)


def test_a_missing_file_is_refused_where_it_was_named(tmp_path, capsys):
    write_snapshot(tmp_path / NAME)
    assert "cannot be read: No such file" in refusal(capsys, tmp_path, "--settings", str(tmp_path / "x.json"))
    assert "cannot be read" in refusal(capsys, tmp_path, "--settings", str(tmp_path))
    assert "names a home directory that does not exist" in refusal(capsys, tmp_path, "--settings", "~nobody-at-all/x")
    message = refusal(capsys, tmp_path, "--settings", str(tmp_path / "x.json"), source="studiogan")
    assert "is not supported with --from studiogan" in message


@pytest.mark.parametrize("weights", ["/", ".", ""])
def test_weights_that_are_a_directory(tmp_path, capsys, weights):
    assert main(["import", "--from", "stylegan2-ada", "--weights", weights, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: --weights: ")


@pytest.mark.parametrize("batch_gpu, group, expected", [(4, 8, 4), (8, ..., 2), (4, None, 4)])
def test_a_group_has_at_most_the_images_of_a_gpu(tmp_path, batch_gpu, group, expected):
    """The public layer takes min(group, N) images; 4 is its default, and None takes all. The pickle's group is of 2."""
    write_snapshot(tmp_path / NAME)
    epilogue = {} if group is ... else {"epilogue_kwargs": {"mbstd_group_size": group}}
    write_options(tmp_path, batch_gpu=batch_gpu, D_kwargs={"class_name": "training.networks.Discriminator", **epilogue})
    assert imported(tmp_path).discriminator.mbstd_group == expected


@pytest.mark.parametrize(
    "freeze_layers, blocks, left",
    [(0, None, ""), (3, None, "freeze_layers for 3 more, a part of a block"), (10, 1, "")],
)
def test_what_freeze_d_keeps_is_kept(tmp_path, capsys, freeze_layers, blocks, left):
    """A block of D, here one layer, has four convolutions, which the original counts one by one."""
    write_snapshot(tmp_path / NAME, freeze_layers=freeze_layers)
    recipe = imported(tmp_path)
    found = recipe.init_from
    assert (found and (found.run, found.freeze_discriminator)) == (blocks and (str(tmp_path / "run"), blocks))
    text = " ".join(capsys.readouterr().out.split())
    assert (f"init_from.freeze_discriminator={blocks}" in text) == (blocks is not None)
    assert left in text
    assert ("freeze_layers" in text) == bool(left)
    ours = open_trained(tmp_path / "run", "discriminator", False, None, torch.device("cpu")).network.state_dict()
    theirs = read_snapshot(TINY).networks["D"].state
    assert torch.equal(ours["layers.0.conv0.weight"], theirs["b8.conv0.weight"])


def test_names_in_a_file_do_not_move_the_cursor(tmp_path, capsys):
    write_snapshot(tmp_path / NAME)
    write_options(tmp_path, **{"\x1b[2J": 1, "y" * 1000: 1}, **{f"z{i}": 1 for i in range(1000)})
    imported(tmp_path)
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "and 948 more" in text
    assert len(text) < 5_000

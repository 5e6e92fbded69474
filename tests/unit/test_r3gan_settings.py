"""R3GAN's training_options.json: each number goes from a base value to a final one, over images of its own."""

import json
import pickle

import pytest
from safetensors.torch import load_file

from bigsgan.cli import main
from bigsgan.config.run_directory import read_saved_recipe
from tests.unit.test_r3gan_pickle import RECORDS, classes, snapshot
from tests.unit.test_snapshot_settings import words

__all__ = ["classes"]


def schedule(base, final, total=3e7, **more):
    return {"base_value": base, "final_value": final, "total_nimg": total, **more}


COLOURS = dict.fromkeys(["brightness", "contrast", "lumaflip", "hue", "saturation"], 0.5)
PIPE = {**dict.fromkeys(["xflip", "rotate90", "xint", "scale", "rotate", "aniso", "xfrac", "cutout"], 1), **COLOURS}
ADAM = {"class_name": "torch.optim.Adam", "betas": [0, 0], "eps": 1e-7}
OPTIONS = {
    "G_kwargs": {"class_name": "training.networks.Generator", "WidthPerStage": [8, 8]},
    "D_kwargs": {"class_name": "training.networks.Discriminator"},
    "G_opt_kwargs": ADAM,
    "D_opt_kwargs": ADAM,
    "loss_kwargs": {"class_name": "training.loss.R3GANLoss"},
    "data_loader_kwargs": {"pin_memory": True, "prefetch_factor": 2, "num_workers": 3},
    "training_set_kwargs": {
        "class_name": "training.dataset.ImageFolderDataset", "path": "/data/x.zip", "use_labels": False,
        "max_size": 70_000, "xflip": False, "resolution": 16, "random_seed": 3,
    },
    "num_gpus": 8, "batch_size": 256, "g_batch_gpu": 8, "d_batch_gpu": 16, "metrics": ["fid50k_full"],
    "total_kimg": 10_000_000, "kimg_per_tick": 4, "image_snapshot_ticks": 200, "network_snapshot_ticks": 200,
    "random_seed": 3, "ema_scheduler": schedule(0, 500_000), "aug_scheduler": schedule(0, 0.3, 2e7),
    "lr_scheduler": schedule(3e-4, 6e-5), "gamma_scheduler": schedule(7, 0.7, 1e7),
    "beta2_scheduler": schedule(0.8, 0.98), "augment_kwargs": {"class_name": "training.augment.AugmentPipe", **PIPE},
}  # fmt: skip


def imported(classes, directory, record="unconditional", **changes):
    path = directory / "network-snapshot-000003200.pkl"
    path.write_bytes(pickle.dumps(snapshot(classes, load_file(RECORDS / f"r3gan_{record}.safetensors"), [], [])))
    content = {key: value for key, value in {**OPTIONS, **changes}.items() if value is not ...}
    (directory / "training_options.json").write_text(json.dumps(content))
    assert main(["import", "--from", "r3gan", "--weights", str(path), "--out", str(directory / "run")]) == 0
    return read_saved_recipe(directory / "run")


def test_each_setting_of_the_file_is_the_recipes(classes, tmp_path, capsys):
    recipe = imported(classes, tmp_path)
    assert (recipe.batch, recipe.seed, recipe.total_nimg) == (256, 3, 10_000_000_000)
    assert (recipe.data.horizontal_flip, recipe.objective.loss) == (False, "relativistic")
    for penalty in (recipe.objective.r1, recipe.objective.r2):
        found = penalty.weight, penalty.final_weight, penalty.decay_nimg, penalty.every, penalty.form
        assert found == (7, 0.7, 10_000_000, 1, "exact")
    for adam in (recipe.optimizer.generator, recipe.optimizer.discriminator):
        assert (adam.lr, adam.final_lr, adam.decay, adam.decay_nimg) == (3e-4, 6e-5, "cosine", 30_000_000)
        assert (adam.betas, adam.final_beta2, adam.eps) == ([0.0, 0.8], 0.98, 1e-7)
    assert (recipe.ema.half_life_nimg, recipe.ema.warmup_nimg, recipe.ema.ramp) == (500_000, 30_000_000, None)
    ada = recipe.augmentation
    assert (ada.pipeline, ada.p, ada.final_p, ada.ramp_nimg, ada.target) == ("r3gan", 0, 0.3, 20_000_000, None)
    assert words(capsys.readouterr().out, "not taken:") == [
        "d_batch_gpu", "data_loader_kwargs", "g_batch_gpu", "metrics", "num_gpus", "training_set_kwargs.max_size",
        "training_set_kwargs.path", "training_set_kwargs.random_seed",
    ]  # fmt: skip


OTHERS = {
    "a warm-up": ({"lr_scheduler": schedule(3e-4, 6e-5, warmup_nimg=9)}, {"lr_scheduler", "beta2_scheduler"}),
    "an EMA at once": ({"ema_scheduler": schedule(5, 500_000)}, {"ema_scheduler"}),
    "a hold": ({"gamma_scheduler": schedule(7, 0.7, hold_base_value_nimg=9)}, {"gamma_scheduler"}),
    "other augmentations": ({"augment_kwargs": {**PIPE, "hue": 1}}, {"augment_kwargs"}),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_no_recipe_has_is_named_and_the_shipped_ones_stays(classes, tmp_path, capsys, other):
    changes, names = OTHERS[other]
    recipe = imported(classes, tmp_path, **changes)
    assert names <= set(words(capsys.readouterr().out, "not taken:"))
    if "lr_scheduler" in names:
        assert (recipe.optimizer.generator.lr, recipe.optimizer.generator.final_beta2) == (2e-4, 0.99)
    if "gamma_scheduler" in names:
        assert recipe.objective.r1.weight == 0.05


@pytest.mark.parametrize("record, expected", [("conditional", ("data", True)), ("unconditional", ("uniform", False))])
def test_fakes_have_the_classes_of_the_reals_if_there_are_any(classes, tmp_path, capsys, record, expected):
    has_classes = record == "conditional"
    data = {**OPTIONS["training_set_kwargs"], "use_labels": has_classes}
    objective = imported(classes, tmp_path, record, training_set_kwargs=data).objective
    assert (objective.fake_labels, objective.reuse_fakes) == expected
    told = words(capsys.readouterr().out, f"from {tmp_path / 'training_options.json'}")
    assert ('objective.fake_labels="data"' in told) == has_classes


def test_a_snapshot_without_optimizers_and_settings_has_the_shipped_ones(classes, tmp_path, capsys):
    content = snapshot(classes, load_file(RECORDS / "r3gan_unconditional.safetensors"), [], [])
    content = {key: value for key, value in content.items() if not key.endswith("opt_state")}
    content["training_set_kwargs"]["xflip"] = False
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(content))
    arguments = ["--weights", str(tmp_path / "x.pkl"), "--out", str(tmp_path / "run")]
    assert main(["import", "--from", "r3gan", *arguments]) == 0
    recipe = read_saved_recipe(tmp_path / "run")
    assert (recipe.data.horizontal_flip, recipe.augmentation.final_p) == (False, 0.55)
    assert words(capsys.readouterr().out, "from the snapshot:") == ["data.horizontal_flip=false"]

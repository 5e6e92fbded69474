"""What a dry run accepts, a start accepts; and both refuse the rest with the same message."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import yaml
from PIL import Image

from bigsgan import cli
from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.training import opening
from tests.bad_runs import contents, train_arguments
from tests.preparing import noise
from tests.tiny import tiny_recipe

FOLDER = "data={kind: folder, root: photos, resolution: 16, image_channels: 1, num_classes: %d, max_corrupt: 0}"

CASES = {
    "data.root": [FOLDER.replace("photos", "nowhere") % 2, "out=new"],
    "data.num_classes": [FOLDER % 3, "out=new"],
    "batch": ["batch=16"],
    "generator.channels": ["generator.channels=8"],
    "init_from.run": ["init_from={run: hub}", "out=new"],
    "init_from.nimg": ["init_from={run: run, nimg: 5}", "out=new"],
    "init_from.run: has a different": ["init_from={run: run}", "generator.channels=8", "out=new"],
    "init_from.generator: must be what `bigsgan export` has": ["init_from={generator: hub}", "out=new"],
    "init_from.freeze_discriminator": ["init_from={run: run, freeze_discriminator: 99}", "out=new"],
    "metrics.reference": ["metrics={names: [fid64], every_nimg: 8, reference: nothing.npz}", "out=new"],
    "objective.loss.use": ["objective.loss={use: 'tests.own_losses:noisy'}", "out=new"],
    "objective.terms.0.use": ["objective.terms=[{use: 'tests.own_losses:noisy'}]", "out=new"],
    "foreign/config.yaml": ["out=foreign"],
    "out: '/proc/run' cannot be written: ": ["out=/proc/run"],
    "out: '/proc/runs/run' cannot be written: ": ["out=/proc/runs/run"],
    "--allow-change": ["--allow-change", "nope"],
}


@pytest.fixture
def place(run):
    """Beside a run: photographs of two classes, what the Hub's client made, and another program's directory."""
    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        noise(0, 16, 16, 1).save(f"photos/{name}/1.png")
    for name in ("hub", "foreign", "floats"):
        Path(name).mkdir()
    for name in "12":
        Image.fromarray(np.zeros((16, 16), np.float32)).save(f"floats/{name}.tif")
    Path("hub/config.json").write_text("{}")
    Path("foreign/config.yaml").write_text("a: 1\n")


@pytest.mark.parametrize("field", CASES)
def test_a_dry_run_refuses_what_a_start_refuses(place, capsys, field):
    arguments = train_arguments(*([] if any("out=" in word for word in CASES[field]) else ["out=run"]), *CASES[field])
    before = set(Path().rglob("*")), contents(Path())
    said = []
    for more in (["--dry-run"], []):
        assert cli.main([*arguments, *more]) == 2
        printed, message = capsys.readouterr()
        assert printed == ""
        said.append([line for line in message.splitlines() if line.startswith("bigsgan: ")])
        assert (set(Path().rglob("*")), contents(Path())) == before
    assert said[0] == said[1]
    assert said[0][0].startswith(f"bigsgan: {field}: " if ": " not in field else f"bigsgan: {field}")


def test_a_dry_run_refuses_images_that_cannot_be_read(place, capsys):
    """A start reads them after it has built engines, by the same function; see test_the_script in test_bad_runs."""
    arguments = train_arguments(FOLDER.replace("photos", "floats") % 0, "out=new", "--dry-run")
    assert cli.main(arguments) == 2
    message = "data.root: 'floats' contains no readable images (of 2 images that were tried, floats/1.tif: floating-p"
    assert message in capsys.readouterr().err
    Path("bands").mkdir()
    tifffile.imwrite("bands/a.tif", np.zeros((9, 9, 5), np.uint16), photometric="minisblack", planarconfig="contig")
    assert cli.main(train_arguments(FOLDER.replace("photos", "bands") % 0, "out=new", "--dry-run")) == 2
    why = "cannot identify image file; unless it is damaged, data.range reads it"
    assert f"(of 1 image that was tried, bands/a.tif: {why})" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["out=run"],
        ["out=run", "batch=16", "--allow-change", "batch"],
        ["out=new", "init_from={run: run}"],
        ["out=new", FOLDER % 2],
    ],
)
def test_a_dry_run_of_what_can_start_prints_the_recipe(place, capsys, words):
    arguments = train_arguments(*words)
    before = set(Path().rglob("*"))
    assert cli.main([*arguments, "--dry-run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["out"] == words[0].removeprefix("out=")
    assert set(Path().rglob("*")) == before


def test_a_dry_run_tells_which_part_of_their_range_images_use(place, caplog):
    for name in ("a", "b"):
        Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(f"photos/{name}/1.png")
    assert cli.main(train_arguments("out=new", FOLDER % 2, "--dry-run")) == 0
    assert "photos: of 2 images, 2 images of more than 8 bits have values from 0 to 4095, and use 6.25 %" in caplog.text


def test_a_dry_run_tells_which_classes_have_no_images(place, caplog):
    """As where labels begin with 1."""
    assert cli.main(train_arguments("out=new", FOLDER % 2, "--dry-run")) == 0
    assert "no images" not in caplog.text
    labels = [[path.relative_to("photos").as_posix(), 2] for path in Path("photos").rglob("*.*")]
    Path("photos/dataset.json").write_text(json.dumps({"labels": labels}))
    assert cli.main(train_arguments("out=new", FOLDER % 3, "--dry-run")) == 0
    assert "photos: 2 classes have no images (0, 1)" in caplog.text


def test_the_data_of_a_recipe_that_ships_is_an_example(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", "r3gan_ffhq64", "--dry-run"]) == 0
    printed, said = capsys.readouterr()
    assert yaml.safe_load(printed)["data"]["root"] == "data/ffhq64"
    assert said == "data.root: 'data/ffhq64' does not exist; data and checkpoints are not checked\n"
    assert cli.main(["train", "--config", "r3gan_ffhq64", "--dry-run", "data.root=photos"]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: data.root: 'photos' does not exist")


@pytest.mark.parametrize("asks", [["--dry-run"], ["--print", "batch"], []])
def test_a_rank_that_does_not_exist_is_refused(place, monkeypatch, capsys, asks):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert cli.main([*train_arguments("out=run"), *asks]) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    assert "RANK: must be less than WORLD_SIZE (1), got 1" in message


def test_a_feature_network_that_one_host_lacks_is_refused_on_all(place, monkeypatch):
    """Before any rank makes the run directory, which others would leave as they are ended."""
    recipe = tiny_recipe(Path(), "metrics={names: [fid64], every_nimg: 8}")
    monkeypatch.setattr(opening, "check_features", lambda *arguments: None)  # this host has it
    missing = UserError("metrics.features", "x", "is missing", "y")
    monkeypatch.setattr(comm, "gather_objects", lambda own: [own, missing])
    with pytest.raises(UserError, match=r"^metrics.features: 'x' is missing; y"):
        opening.check_libraries(recipe)

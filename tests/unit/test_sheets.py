"""What `bigsgan sample` shows: sweeps, interpolations, mixed styles, pairs and single files, from runs made here."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan import sample
from bigsgan.cli import main
from bigsgan.data import build_dataset
from bigsgan.errors import UserError
from bigsgan.images.cosines import from_cosines
from bigsgan.inference.columns import open_conditions
from bigsgan.inference.sheets import Sampler, slerp
from bigsgan.inference.trained import open_trained
from tests import runs
from tests.tiny import TINY_GAMES, tiny_recipe

CPU = torch.device("cpu")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda *overrides: runs.make_run(tmp_path, *overrides)[0]


def sampler(run: Path, seed: int = 0) -> Sampler:
    trained = open_trained(run, "generator", False, None, CPU)
    return Sampler(trained, seed, 100, open_conditions(run, trained.recipe.data))


def cells(path: Path, size: int) -> np.ndarray:
    """(rows, columns, size, size) of a grey sheet."""
    pixels = np.asarray(Image.open(path))[2:, 2:]
    rows, columns = (side // (size + 2) for side in pixels.shape[:2])
    return pixels.reshape(rows, size + 2, columns, size + 2).transpose(0, 2, 1, 3)[:, :, :size, :size]


@pytest.mark.slow
def test_a_sweep_shows_the_same_samples_under_each_truncation(tmp_path):
    run, _ = runs.make_run(tmp_path, deviation=0)
    columns = torch.tensor([3, 1, 4])
    sheet = sampler(run).sweep(columns, [0.3, 1.5])
    assert sheet.columns == 3
    for row, truncation in zip(sheet.images.split(3), [0.3, 1.5], strict=True):
        # Power iterations, which begin converged, move on with each row's standing statistics.
        torch.testing.assert_close(row, sampler(run).grid(3, columns, truncation).images, atol=5e-3, rtol=0)
    assert not torch.equal(*sheet.images.split(3))


@pytest.mark.slow
def test_an_interpolation_goes_from_sample_to_sample(make_run):
    run = make_run()
    sheet = sampler(run).interpolation(torch.tensor([2, 7]), 4, None, morph=False)
    assert (len(sheet.images), sheet.columns) == (8, 4)
    ends = sampler(run).grid(2, torch.tensor([2, 7]), None).images
    torch.testing.assert_close(sheet.images[[0, 4]], ends, atol=1e-5, rtol=0)
    steps = sheet.images[:4]
    assert all(not torch.equal(steps[i], steps[i + 1]) for i in range(3))


@pytest.mark.slow
def test_a_morph_ends_at_the_next_class(make_run):
    run = make_run()
    trained = open_trained(run, "generator", False, None, CPU)
    table = trained.network.layers["0"].embedding.weight
    before = table.clone()
    made = Sampler(trained, 0, 100, range(10))
    half = made.interpolation(torch.tensor([2, 7]), 2, None, morph=True).images[1]
    assert torch.equal(table, before)
    with torch.no_grad():
        table[5] = (table[2] + table[7]) / 2
        latents, _ = made.inputs(0, torch.tensor([2, 7]), None)
        by_hand = made.images((slerp(latents[0], latents[1], 0.5)[None], torch.tensor([5])))[0]
    torch.testing.assert_close(half, by_hand, atol=1e-5, rtol=0)


def test_a_morph_of_vectors_goes_along_a_line(make_run):
    made = sampler(make_run(*TINY_GAMES["stylegan2_architectures"]))
    columns = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, -1.0]])
    half = made.interpolation(columns, 2, None, morph=True).images[1]
    latents, labels, seeds = made.inputs(0, columns, None)
    assert torch.equal(labels, columns)
    by_hand = made.images((slerp(latents[0], latents[1], 0.5)[None], torch.tensor([[0.5, 1.5, 0.5]]), seeds[:1]))[0]
    torch.testing.assert_close(half, by_hand, atol=1e-5, rtol=0)


def test_great_circles():
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])
    torch.testing.assert_close(slerp(a, b, 1 / 3), 3 * torch.tensor([np.cos(np.pi / 6), np.sin(np.pi / 6)]).float())
    torch.testing.assert_close(slerp(a, a, 0.4), a)
    torch.testing.assert_close(slerp(a / 3, b, 0.5), 2 * torch.tensor([1.0, 1.0]) / 2**0.5)
    torch.testing.assert_close(slerp(a, -a, 0.25), a / 2)


@pytest.mark.parametrize("codec", ["pixels", "dct"])
def test_styles_are_mixed_by_row_and_column(make_run, codec):
    run = make_run(*TINY_GAMES["stylegan2"], f"data.codec={{kind: {codec}{', block: 2' * (codec == 'dct')}}}")
    made = sampler(run)
    network = made._trained.network
    num_styles = network.layers["0"].num_ws
    columns = torch.tensor([1, 2, 3])
    sheet = made.mixed_styles(columns, rows=2, crossover=2, truncation=None)
    assert (len(sheet.images), sheet.columns) == (3 * 4, 4)
    table = sheet.images.unflatten(0, (3, 4))
    assert torch.equal(table[0, 0], torch.full_like(table[0, 0], -1))
    with pytest.raises(UserError, match="--mix: must be less than"):
        made.mixed_styles(columns, 2, num_styles, None)
    with torch.no_grad():
        latents, labels, seeds = made.inputs(0, columns[[0, 0, 0, 1, 2]], None)
        styles, _ = network.part(0, 1).fold(latents, labels, seeds)
        mixed = torch.cat([styles[1, :2], styles[4, 2:]])[None]  # second row, third column
        by_hand = network.part(1, len(network.layers))(mixed, seeds[1:2])
        by_hand = (by_hand if codec == "pixels" else from_cosines(by_hand, 2))[0]
    torch.testing.assert_close(table[2, 3], by_hand, atol=1e-5, rtol=0)
    assert not torch.equal(table[1, 1], table[1, 0])


@pytest.mark.slow
def test_an_animation_has_a_frame_for_each_step(make_run, tmp_path):
    run, out = make_run(), tmp_path / "x.gif"
    arguments = ["--run", str(run), "--out", str(out), "--num", "3", "--classes", "1-3", "--interpolate", "5"]
    assert main(["sample", *arguments]) == 0
    image = Image.open(out)
    assert (image.n_frames, image.size) == (5, (3 * 18 + 2, 20))
    for num, classes in (("2", []), ("5", ["--classes", "1-3"])):  # a row for each of --num
        assert main(["sample", *arguments[:4], "--interpolate", "2", "--num", num, *classes]) == 0
        assert Image.open(out).size == (int(num) * 18 + 2, 20)


@pytest.mark.slow
def test_single_files_are_the_grids_images_whatever_the_ranks(make_run, tmp_path):
    run, out = make_run(), tmp_path / "files"
    arguments = ["sample", "--run", str(run), "--num", "7", "--classes", "4,6", "--seed", "5", "--batch", "2"]
    assert main([*arguments, "--out", str(tmp_path / "grid.png")]) == 0
    grid = cells(tmp_path / "grid.png", 16).reshape(-1, 16, 16)
    options = sample.Options(num=7, truncations=[], seed=5, classes=["4", "6"], batch=2, files=True)
    for rank in range(3):
        sample.main(run, out, None, False, options, rank, 3)
    names = [f"class{(4, 6)[i % 2]:03d}_sample{i:06d}.png" for i in range(7)]
    assert sorted(path.name for path in out.iterdir()) == sorted(names)
    for i, name in enumerate(names):
        assert np.abs(np.asarray(Image.open(out / name)).astype(int) - grid[i]).max() <= 1  # rounded in another batch


@pytest.mark.slow
@pytest.mark.parametrize(
    "classes, data",
    [([], {"num_classes": 10}), (["--classes", "4,6"], {"num_classes": 10}), ([], {"missing_labels": "accept"})],
)
def test_an_archive_has_the_single_files_images(make_run, tmp_path, classes, data):
    """Classes take turns; unless asked for, all of them."""
    kind = {"kind": "digits", "resolution": 16, "num_classes": 10, "image_channels": 1}
    run, out, files = make_run(f"data={json.dumps({**kind, **data})}"), tmp_path / "samples.npz", tmp_path / "files"
    arguments = ["sample", "--run", str(run), "--num", "23", "--seed", "5", "--truncation", "0.8", "--batch", "7"]
    assert main([*arguments, *classes, "--out", str(out)]) == 0
    with np.load(out) as found:
        images, labels = found["arr_0"], found["arr_1"]
    assert (images.shape, images.dtype) == ((23, 16, 16, 1), np.uint8)
    labels = labels.argmax(1) if labels.ndim > 1 else labels
    assert labels.tolist() == [(4, 6)[i % 2] if classes else i % 10 for i in range(23)]
    assert main([*arguments, "--classes", "4,6" if classes else "0-9", "--files", "--out", str(files)]) == 0
    for i, label in enumerate(labels):
        (path,) = files.glob(f"*{label:03d}_sample{i:06d}.png")
        assert np.array_equal(np.asarray(Image.open(path)), images[i, :, :, 0])
    assert not list(tmp_path.glob("*.tmp"))


def test_single_files_replace_images_alone(make_run, tmp_path, capsys):
    run, out, name = make_run("data.num_classes=0"), tmp_path / "files", "class000_sample000002"
    arguments = ["sample", "--run", str(run), "--num", "3", "--files", "--out", str(out)]
    out.mkdir()
    (out / f"{name}.png").write_text("mine")
    assert main(arguments) == 2
    assert (out / f"{name}.png").read_text() == "mine"
    assert "--out: must be a new file, or one that is a .png file already, got " in capsys.readouterr().err
    assert len(list(out.iterdir())) == 1
    Image.new("L", (1, 1)).save(out / f"{name}.png")
    assert main(arguments) == 0
    assert Image.open(out / f"{name}.png").size == (16, 16)


def test_pairs_stand_side_by_side(make_run, tmp_path):
    run, out = make_run(*TINY_GAMES["pix2pix"]), tmp_path / "pairs.png"
    assert main(["sample", "--run", str(run), "--num", "4", "--out", str(out)]) == 0
    assert Image.open(out).size == (9 * 66 + 2, 2 * 66 + 2)
    sheet = np.asarray(Image.open(out))
    pair, _ = build_dataset(tiny_recipe(tmp_path, *TINY_GAMES["pix2pix"]).data)[0]
    assert np.array_equal(sheet[2:66, 2:66], pair[:3].permute(1, 2, 0).numpy())
    assert np.array_equal(sheet[2:66, 134:198], pair[3:].permute(1, 2, 0).numpy())


@pytest.mark.parametrize(
    "options, field",
    [
        (["--interpolate", "1"], "--interpolate: must be 2 to 10000 images"),
        (["--morph"], "--morph: needs --interpolate"),
        (["--mix", "-1"], "--mix: must be at least 1 coarse style, got -1"),
        (["--mix", "4"], "--mix: needs a generator with styles"),
        (["--mix", "4", "--interpolate", "3"], "--interpolate: cannot be combined with --mix"),
        (["--files", "--truncation", "0.3,0.5"], "--files: cannot be combined with --truncation"),
        (["--truncation", "0.3,0.5", "--num", "7"], "--num: must be 20 with 2 truncations of 10 columns"),
        (["--truncation", "0.3,0.5", "--num", "4", "--classes", "1-3"], "--num: must be 6 with 2 truncations of 3"),
        (["--interpolate", "4", "--num", "99999999"], "--interpolate: must be at most 0 with images of 16x16"),
        (["--truncation", "0.3,0"], "--truncation: must be at least 0.02, got 0.0"),
    ],
)
def test_options_that_make_no_sense(make_run, tmp_path, capsys, options, field):
    run = make_run()
    assert main(["sample", "--run", str(run), "--out", str(tmp_path / "x.png"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {field}")


@pytest.mark.parametrize("option", [["--interpolate", "4"], ["--mix", "2"], ["--truncation", "0.5"], ["--files"]])
def test_pairs_have_no_latents(make_run, tmp_path, capsys, option):
    run = make_run(*TINY_GAMES["pix2pix"])
    assert main(["sample", "--run", str(run), "--out", str(tmp_path / "x.png"), *option]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {option[0]}: needs a generator from latents")


@pytest.mark.parametrize("option", [["--interpolate", "4"], ["--mix", "2"], ["--truncation", "0.5,0.7"], ["--files"]])
def test_archives_hold_single_samples(make_run, tmp_path, capsys, option):
    assert main(["sample", "--run", str(make_run()), "--out", str(tmp_path / "x.npz"), *option]) == 2
    assert f"x.npz' cannot be combined with {option[0]}" in capsys.readouterr().err

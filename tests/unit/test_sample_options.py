"""`bigsgan sample`: translated directories, noise, truncation cutoff, and batch norm's own statistics."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bigsgan import plugins, sample
from bigsgan.cli import main
from bigsgan.draws import Draws
from bigsgan.inference.trained import open_trained
from bigsgan.models.stylegan2_layers import SynthesisLayer
from bigsgan.training.sampling import generator_inputs
from tests import runs
from tests.tiny import TINY_GAMES

CPU = torch.device("cpu")


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    return lambda *overrides: runs.make_run(tmp_path, *overrides)[0]


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Colour images of several sizes, and what is none."""
    folder, rng = tmp_path / "photographs", np.random.default_rng(0)
    folder.mkdir()
    for name, size in (("b.png", (64, 64)), ("a.bmp", (64, 80)), ("c.png", (64, 64))):
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("no image")
    return folder


def sampled(run: Path, out: Path, *options: str) -> np.ndarray:
    assert main(["sample", "--run", str(run), "--out", str(out), *options]) == 0
    return np.asarray(Image.open(out)).astype(int)


def pixels(images: torch.Tensor) -> np.ndarray:
    """uint8 numbers (n, R, R, C) of images in [-1, 1]."""
    return ((images.clamp(-1, 1) + 1) * 127.5).round().permute(0, 2, 3, 1).numpy().astype(int)


class Shaded(nn.Module):
    """Images -> images of one shade, which is that of their class."""

    def __init__(self, num_classes):
        super().__init__()
        self.shades = nn.Embedding(num_classes, 1)

    def forward(self, images, labels):
        return self.shades(labels)[..., None, None].expand_as(images)


def test_images_of_a_directory_have_the_classes_that_are_given_in_turn(make_run, tmp_path, photographs, capsys):
    plugins.give([f"{__name__}:Shaded"])
    data = "data={kind: synthetic, resolution: 16, image_channels: 3, num_classes: 5, num_images: 64}"
    run = make_run(data, f'generator={{family: "{__name__}:Shaded", reads: images}}', "objective={reuse_fakes: true}")
    arguments = ["sample", "--run", str(run), "--input", str(photographs), "--files", "--out", str(tmp_path / "files")]
    assert main(arguments) == 2
    assert "--input: needs the labels of the images; add --classes, or --conditions" in capsys.readouterr().err
    assert main([*arguments, "--classes", "3,1", "--batch", "2"]) == 0
    shades = open_trained(run, "generator", False, None, CPU).network.state_dict()["layers.0.module.shades.weight"]
    expected = [pixels(shades[[label], :, None, None]).item() for label in (3, 1, 3)]
    for name, shade in zip("abc", expected, strict=True):
        image = np.asarray(Image.open(tmp_path / "files" / f"{name}.png"))
        assert image.shape == (16, 16, 3)
        assert (image == shade).all()


@pytest.mark.parametrize("statistics", ["batch", "running"])
def test_a_directory_is_translated_without_the_runs_data(make_run, tmp_path, photographs, statistics, caplog):
    images = "data={kind: side_by_side, root: /nowhere, resolution: 64, num_classes: 0, image_channels: 3}"
    run = make_run(images, *TINY_GAMES["pix2pix"][1:], f"sample_statistics={statistics}")
    sheet = sampled(run, tmp_path / "sheet.png", "--input", str(photographs))
    assert sheet.shape == (66 + 2, 6 * 66 + 2, 3)
    cut = "--input: of 3 images, 1 of other proportions: cropped to 64x64; --files keeps sizes"
    assert cut in caplog.messages
    files = tmp_path / "files"
    assert main(["sample", "--run", str(run), "--out", str(files), "--input", str(photographs), "--files"]) == 0
    assert sorted(path.name for path in files.iterdir()) == ["a.png", "b.png", "c.png"]
    network = open_trained(run, "generator", False, None, CPU).network.train(statistics == "batch")
    seeds = torch.from_numpy(Draws(0).seeds("sample/seed", (0,), 0, 3))
    for i, name in enumerate(("a.bmp", "b.png", "c.png")):
        source = np.array(Image.open(photographs / name))
        source = source[:, 8:72] if i == 0 else source
        assert np.array_equal(sheet[2:66, 2 + 132 * i : 66 + 132 * i], source)
        image = torch.from_numpy(source).permute(2, 0, 1)[None] / 127.5 - 1
        with torch.no_grad():
            expected = pixels(network(image, torch.zeros(1, dtype=torch.int64), seeds[i : i + 1]))[0]
        assert np.abs(sheet[2:66, 68 + 132 * i : 132 + 132 * i] - expected).max() <= 1
        whole = np.array(Image.open(photographs / name))  # in a file it keeps its size; the U-Net halves 64 six times
        padded = np.pad(whole, ((0, -len(whole) % 64), (0, -whole.shape[1] % 64), (0, 0)), mode="edge")
        image = torch.from_numpy(padded).permute(2, 0, 1)[None] / 127.5 - 1
        with torch.no_grad():
            expected = pixels(network(image, torch.zeros(1, dtype=torch.int64), seeds[i : i + 1]))[0]
        found = np.asarray(Image.open(files / f"{name[0]}.png")).astype(int)
        assert found.shape == whole.shape
        assert np.abs(found - expected[: len(whole), : whole.shape[1]]).max() <= 1


def test_a_sheet_of_translations_has_bounds(make_run, tmp_path, photographs, monkeypatch, capsys):
    """Two images for each of the directory's; files are made batch by batch."""
    monkeypatch.setattr(sample, "MOST_PIXELS", 2 * 2 * 64**2 + 1)
    run = make_run(*TINY_GAMES["pix2pix"])
    arguments = ["sample", "--run", str(run), "--out", str(tmp_path / "x.png"), "--input", str(photographs)]
    assert main(arguments) == 2
    said = "--num: must be at most 2 with images of 64x64, got 3; give a smaller number, or --files"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "x.png").exists()
    assert main([*arguments, "--num", "2"]) == 0
    assert main([*arguments[:3], "--out", str(tmp_path / "files"), *arguments[5:], "--files"]) == 0


def test_running_statistics_of_a_translation(make_run, tmp_path, photographs):
    run = make_run(*TINY_GAMES["pix2pix"], "sample_statistics=batch")
    arguments = ["--input", str(photographs), "--num", "1"]
    own, batch = (sampled(run, tmp_path / "x.png", *arguments, *more) for more in (["--no-standing"], []))
    network = open_trained(run, "generator", False, None, CPU).network.eval()
    image = torch.from_numpy(own[2:66, 2:66]).permute(2, 0, 1)[None] / 127.5 - 1
    seeds = torch.from_numpy(Draws(0).seeds("sample/seed", (0,), 0, 1))
    with torch.no_grad():
        expected = pixels(network(image.float(), torch.zeros(1, dtype=torch.int64), seeds))[0]
    assert np.abs(own[2:66, 68:132] - expected).max() <= 1
    assert np.abs(batch[2:66, 68:132] - expected).max() > 8


@pytest.mark.parametrize("noise", ["const", "none", "random"])
def test_noise_and_psi_of_the_first_styles(make_run, tmp_path, noise):
    run = make_run(*TINY_GAMES["stylegan2"])
    options = ["--num", "2", "--classes", "1,2", "--truncation", "0.4", "--truncation-cutoff", "2", "--noise", noise]
    sheet = sampled(run, tmp_path / "x.png", *options)
    trained = open_trained(run, "generator", False, None, CPU)
    network = trained.network.eval()
    inputs = generator_inputs(trained.recipe, Draws(0), "sample", 0, torch.tensor([1, 2]), None, CPU)
    mapping = network.layers["0"]
    with torch.no_grad():
        styles, seeds = mapping(*inputs)
        # stylegan2-ada-pytorch: the first styles become w_avg + psi * (w - w_avg)
        styles[:, :2] = mapping.w_avg + 0.4 * (styles[:, :2] - mapping.w_avg)
        for layer in network.modules():
            if isinstance(layer, SynthesisLayer):
                layer.noise_mode = noise
        expected = pixels(network.part(1, len(network.layers))(styles, seeds))
    for i in range(2):
        assert np.abs(sheet[2:18, 2 + 18 * i : 18 + 18 * i] - expected[i, :, :, 0]).max() <= 1
    others = {"const": "none", "none": "random", "random": "const"}
    assert np.abs(sampled(run, tmp_path / "y.png", *options[:-1], others[noise]) - sheet).max() > 1


def test_batch_norms_own_statistics(make_run, tmp_path):
    run = make_run()
    own = sampled(run, tmp_path / "own.png", "--num", "2", "--classes", "3,4", "--no-standing")
    trained = open_trained(run, "generator", False, None, CPU)
    inputs = generator_inputs(trained.recipe, Draws(0), "sample", 0, torch.tensor([3, 4]), None, CPU)
    with torch.no_grad():
        expected = pixels(trained.network.eval()(*inputs))
    for i in range(2):
        assert np.abs(own[2:18, 2 + 18 * i : 18 + 18 * i] - expected[i, :, :, 0]).max() <= 1
    assert np.abs(own - sampled(run, tmp_path / "standing.png", "--num", "2", "--classes", "3,4")).max() > 1


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("biggan_deep", ["--classes", "3\n4"], "--classes: must be a list of classes, got '3\\n4'"),
        ("biggan_deep", ["--noise", "const"], "--noise: needs a generator with noise maps"),
        ("biggan_deep", ["--truncation-cutoff", "2"], "--truncation-cutoff: needs a generator with styles"),
        ("biggan_deep", ["--input", "x"], "--input: needs a generator that translates images"),
        ("stylegan2", ["--truncation-cutoff", "2"], "--truncation-cutoff: needs --truncation"),
        ("stylegan2", ["--truncation-cutoff", "0", "--truncation", "1"], "--truncation-cutoff: must be 1 to 6, the"),
        ("stylegan2", ["--truncation-cutoff", "7", "--truncation", "1"], "--truncation-cutoff: must be 1 to 6, the"),
        ("stylegan2", ["--interpolate", "0"], "--interpolate: must be 2 to 10000 images"),
        ("stylegan2", ["--no-standing"], "--no-standing: needs batch norm"),
        ("pix2pix", ["--input", "EMPTY"], "--input: "),
    ],
)
def test_options_that_do_not_fit_are_refused(make_run, tmp_path, capsys, family, options, message):
    run = make_run(*TINY_GAMES[family])
    options = [option.replace("EMPTY", str(run / "checkpoints")) for option in options]
    assert main(["sample", "--run", str(run), "--out", str(tmp_path / "x.png"), *options]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {message}")
    assert not (tmp_path / "x.png").exists()


def test_translations_with_one_name_are_refused(make_run, tmp_path, photographs, capsys):
    run = make_run(*TINY_GAMES["pix2pix"])
    Image.new("RGB", (64, 64)).save(photographs / "b.jpg")
    arguments = ["--input", str(photographs), "--files", "--out", str(tmp_path / "files")]
    assert main(["sample", "--run", str(run), *arguments]) == 2
    assert "has 2 images whose translations would have the same name, b.png" in capsys.readouterr().err
    (photographs / "b.jpg").rename(photographs / "d.jpg")
    (tmp_path / "files").mkdir()
    (tmp_path / "files/d.png").write_text("mine")
    assert main(["sample", "--run", str(run), *arguments]) == 2
    assert "must be a new file, or one that is a .png file already" in capsys.readouterr().err
    (photographs / "b.jpg").write_bytes(b"damaged")
    assert main(["sample", "--run", str(run), *arguments[:2], "--out", str(tmp_path / "x.png")]) == 2
    assert "b.jpg cannot be read" in capsys.readouterr().err.replace("'", "")


@pytest.mark.parametrize("batch", ["1", "7"])
def test_images_of_any_size_are_translated_at_their_own(make_run, tmp_path, batch):
    """A residual network halves twice and mirrors three pixels; equal sizes may be computed together."""
    run, photographs = make_run(*TINY_GAMES["pix2pix_resnet"]), tmp_path / "photographs"
    photographs.mkdir()
    sizes = [(1, 1), (4, 30), (30, 4), (21, 18), (21, 18), (21, 18), (90, 70)]  # width and height
    for i, (width, height) in enumerate(sizes):
        drawn = np.random.default_rng(i).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(drawn).save(photographs / f"{i}.png")
    arguments = ["sample", "--run", str(run), "--input", str(photographs), "--files", "--batch", batch]
    assert main([*arguments, "--out", str(tmp_path / "files")]) == 0
    assert [Image.open(tmp_path / f"files/{i}.png").size for i in range(len(sizes))] == sizes
    network = open_trained(run, "generator", False, None, CPU).network.eval()
    padded = np.pad(np.array(Image.open(photographs / "4.png")), ((0, 2), (0, 3), (0, 0)), mode="edge")
    seeds = torch.from_numpy(Draws(0).seeds("sample/seed", (0,), 4, 1))
    with torch.no_grad():
        made = network(torch.from_numpy(padded).permute(2, 0, 1)[None] / 127.5 - 1, torch.zeros(1).long(), seeds)
    found = np.asarray(Image.open(tmp_path / "files/4.png")).astype(int)
    assert np.abs(found - pixels(made)[0][:18, :21]).max() <= 1


def test_samples_of_another_call_stay_apart(make_run, tmp_path, capsys):
    arguments = ["sample", "--run", str(make_run()), "--files", "--out", str(tmp_path / "files"), "--num"]
    for _ in range(2):
        assert main([*arguments, "3"]) == 0
    assert main([*arguments, "2"]) == 2
    assert "files' contains 1 sample of another call, such as class002_sample000002.png" in capsys.readouterr().err

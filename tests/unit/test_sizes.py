"""Images that are not square: what recipes say of them, how files fit, and networks of any proportions."""

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from bigsgan.cli import main
from bigsgan.config import Recipe
from bigsgan.config.data import Codec, Data
from bigsgan.config.families.base import bottom_of
from bigsgan.config.families.biggan import BigGANDiscriminator
from bigsgan.config.families.dcgan import DCGANGenerator
from bigsgan.config.families.pix2pix import Pix2PixGenerator
from bigsgan.config.families.stylegan2 import StyleGAN2Discriminator
from bigsgan.data import RealImages, Slice, build_dataset, build_training_dataset
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images import reading
from bigsgan.images.reading import image_tensor
from bigsgan.images.size import Fitting, Size
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack
from bigsgan.models.transformer import rotations, sines_of_positions
from tests.networks import filled
from tests.tiny import TINY_GAMES, tiny_recipe


@pytest.mark.parametrize("written, size", [(16, Size(16, 16)), ([24, 16], Size(24, 16)), ([16, 16], Size(16, 16))])
def test_a_recipe_writes_a_size_as_it_reads_it(written, size):
    recipe = Recipe.read("digits_dcgan", f"data.resolution={written}")
    assert recipe.data.resolution == size
    dumped = recipe.model_dump(mode="json")
    assert dumped["data"]["resolution"] == (16 if size.is_square else written)
    assert Recipe.of(dumped) == recipe


WRONG = {
    "[16,16,16]": "must be one number, or a height and a width, got [16, 16, 16]",
    "[16]": "must be one number, or a height and a width, got [16]",
    "[16,0]": "must be greater than 0",
    "[16,x]": "must be an integer",
    "16.5": "must be an integer",
    "[16,100000]": "must be at most 16384",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_size(text):
    with pytest.raises(UserError, match=re.escape(WRONG[text])) as caught:
        Recipe.read("digits_dcgan", f"data.resolution={text}")
    assert caught.value.field == "data.resolution"


# The part that is kept and where it goes, of an image of 40 x 24 pixels (width, height), at 16 x 8 (height, width).
FITS = {
    "crop": ((14, 0, 26, 24), (8, 16), (0, 0)),
    "pad": ((0, 0, 40, 24), (8, 5), (0, 5)),
    "stretch": ((0, 0, 40, 24), (8, 16), (0, 0)),
}


@pytest.mark.parametrize("how", FITS)
def test_what_makes_an_image_fit(how):
    pixels = np.random.default_rng(0).integers(60, 256, (24, 40, 3), dtype=np.uint8)
    box, inside, place = FITS[how]
    canvas = Image.new("RGB", (8, 16))
    canvas.paste(Image.fromarray(pixels).crop(box).resize(inside, Image.Resampling.LANCZOS), place)
    expected = torch.from_numpy(np.array(canvas)).permute(2, 0, 1)
    fitting: Any = Fitting(Size(16, 8), how)
    found = image_tensor(Image.fromarray(pixels), "x", fitting, 3)
    assert torch.equal(found, expected)
    turned = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)  # and told by EXIF to be turned back
    turned.info["exif"] = (lambda exif: (exif.__setitem__(0x0112, 6), exif.tobytes())[1])(Image.Exif())
    assert torch.equal(image_tensor(turned, "x", fitting, 3), expected)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("how", FITS)
def test_of_a_large_image_the_used_part_is_averaged_first(monkeypatch, how, orientation):
    coarse = Image.fromarray(np.random.default_rng(1).integers(60, 200, (6, 8), dtype=np.uint8))
    image = coarse.resize((480, 360), Image.Resampling.BICUBIC)
    image.info["exif"] = (lambda exif: (exif.__setitem__(0x0112, orientation), exif.tobytes())[1])(Image.Exif())
    fitting: Any = Fitting(Size(12, 20), how)
    expected = image_tensor(image.copy(), "x", fitting, 1).float()
    monkeypatch.setattr(reading, "_MANY_PIXELS", 480 * 360 - 1)
    assert reading._reduced(image, fitting).width < image.width
    found = image_tensor(image, "x", fitting, 1).float()
    assert (found - expected).abs().max() <= 3
    assert expected.std() > 15


# Parameters and buffers whose rows, or columns, are the pixels of the smallest map, channel by channel.
FLAT = {
    "biggan": [("generator", "layers.0.linear.", 0)],
    "biggan_deep": [("generator", "layers.0.linear.", 0)],
    "stylegan2": [("discriminator", "layers.2.fc.weight", 1)],
    "stylegan2_architectures": [("discriminator", "layers.2.fc.weight", 1)],
}


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize(
    "family, size",
    [
        ("biggan", Size(16, 24)),
        ("biggan_deep", Size(16, 40)),
        ("dcgan", Size(16, 24)),
        ("dcgan_spectral", Size(40, 24)),
        ("r3gan", Size(16, 28)),
        ("stylegan2", Size(16, 24)),
        ("stylegan2_architectures", Size(28, 16)),
        ("pix2pix_features", Size(32, 48)),
        ("pix2pix_resnet", Size(12, 20)),
        ("autoencoder", Size(16, 20)),
    ],
)
def test_a_network_of_turned_weights_makes_turned_images(tmp_path, family, size, network):
    """With rows and columns exchanged in weights and inputs, they are exchanged in the outputs, and nothing else."""
    game = [
        option for option in TINY_GAMES.get(family, []) if not option.startswith(("data.crop_from", "data.resolution"))
    ]
    wide, high = (_built(tmp_path, game, each, network) for each in (size, Size(size.width, size.height)))
    state, bottom = filled(wide).state_dict(), bottom_of(size)
    flat = [(name, axis) for of, name, axis in FLAT.get(family, []) if of == network]
    high.load_state_dict({name: _turned(name, state, flat, bottom) for name in state})
    inputs = _inputs(tmp_path, game, size, network)
    with torch.no_grad():
        expected = _first(wide.double()(*inputs))
        found = _first(high.double()(*(x.transpose(2, 3) if x.dim() == 4 else x for x in inputs)))
    if expected.dim() == 4:
        assert expected.shape[2:] == tuple(size)
        found = found.transpose(2, 3)
    elif expected.dim() == 2:  # logits of patches, row by row
        expected, found = expected.sort().values, found.sort().values
    assert expected.std() > 0
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def _first(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else outputs[0]


def _built(directory: Any, game: list[str], size: Size, network: str) -> LayerStack:
    stack = build_network(_recipe(directory, game, size), network).eval()
    for module in stack.modules():
        if hasattr(module, "noise_mode"):
            module.noise_mode = "const"
    return stack


def _recipe(directory: Any, game: list[str], size: Size) -> Recipe:
    return tiny_recipe(directory, *game, f"data.resolution={size.text}")


def _turned(name: str, state: dict[str, Tensor], flat: list[tuple[str, int]], bottom: Size) -> Tensor:
    tensor, vector = state[name], name.endswith(".v")  # a singular vector of the columns
    if vector and (weight := state[f"{name[:-1]}weight"]).dim() == 4:
        return tensor.view(weight.shape[1:]).transpose(1, 2).flatten()
    for part, axis in flat:
        if name.startswith(part) and not vector:
            maps = tensor.unflatten(axis, (-1, *bottom))
            return maps.transpose(axis + 1, axis + 2).flatten(axis, axis + 2)
    is_map = tensor.dim() >= 3 or name.endswith("noise_const")
    return tensor.transpose(-1, -2).contiguous() if is_map else tensor


def _inputs(directory: Any, game: list[str], size: Size, network: str) -> tuple[Tensor, ...]:
    recipe, generator = _recipe(directory, game, size), torch.Generator().manual_seed(1)

    def images(channels: int) -> Tensor:
        return torch.randn(4, channels, *size, generator=generator, dtype=torch.float64)

    labels, seeds = torch.arange(4) % max(recipe.data.num_classes, 1), torch.arange(4)
    if network == "discriminator":
        return images(recipe.judged_channels), labels, *([images(recipe.input_channels)] if recipe.data.paired else [])
    first = images(recipe.input_channels) if recipe.translates else None
    if first is None:
        first = torch.randn(4, recipe.latent_size, generator=generator, dtype=torch.float64)
    return first, labels, *([seeds] if recipe.generator.draws else [])


def test_patches_of_a_rectangle_know_their_rows_and_columns():
    """By the formulas, of the patch at row r and column c: angles r f_i and c f_i, with f_i = 10000^(-i / n)."""
    size, num = Size(2, 5), 3
    turned = torch.view_as_complex(rotations((size,), 4 * num, class_tokens=False))
    table = sines_of_positions(size, 4 * num)
    for patch in range(size.num_pixels):
        row, column = divmod(patch, size.width)
        for i in range(num):
            frequency = 10_000 ** (-i / num)
            for place, number in ((row, i), (column, num + i)):
                torch.testing.assert_close(turned[patch, number].angle().item(), _wrapped(place * frequency))
            for place, number in ((column, i), (row, 2 * num + i)):
                sine, cosine = table[patch, number].item(), table[patch, number + num].item()
                assert (sine, cosine) == pytest.approx((np.sin(place * frequency), np.cos(place * frequency)), abs=1e-6)


@pytest.mark.parametrize(
    "section, block",
    [
        (Pix2PixGenerator(), 0),
        (Pix2PixGenerator(architecture="resnet"), 0),
        *itertools.product((DCGANGenerator(), StyleGAN2Discriminator(), BigGANDiscriminator()), (0, 4)),
    ],
)
def test_the_size_that_a_message_names_is_accepted(section, block):
    num_refused, codec = 0, Codec(kind="dct", block=block) if block else Codec()
    for height, width in itertools.product((1, 8, 12, 20, 47, 100, 128, 200, 999, 3000), (5, 16, 51, 96, 130, 3000)):
        size = Size(height, width).times(codec.side_factor)
        try:
            section.check(Data(kind="synthetic", resolution=size, codec=codec))
        except UserError as error:
            num_refused += 1
            nearest = yaml.safe_load(error.remedy.removeprefix("set data.resolution="))
            section.check(Data(kind="synthetic", resolution=nearest, codec=codec))
    assert num_refused > 20


def _wrapped(angle: float) -> float:
    return float((angle + np.pi) % (2 * np.pi) - np.pi)


def _photographs(folder: Path, num: int = 4) -> Path:
    folder.mkdir()
    draws = np.random.default_rng(3)
    for i in range(num):
        height, width = draws.integers(20, 60, 2)
        Image.fromarray(draws.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


@pytest.mark.parametrize(
    "kind, how, said",
    [("zip", "crop", "cropped to"), ("tar", "pad", "padded with black to"), ("folder", "stretch", "stretched to")],
)
def test_prepared_images_are_those_that_training_reads(tmp_path, capsys, kind, how, said):
    source, made = _photographs(tmp_path / "photographs"), tmp_path / ("made.zip" if kind == "zip" else "made")
    options = ["--resolution", "16,24", "--fit", how, "--format", kind, "--workers", "1"]
    assert main(["data", "prepare", str(source), str(made), *options]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{made}: 4 images of no classes, {said} 16x24\n")
    assert "'data.resolution=[16,24]'" in printed
    common: dict[str, Any] = {"resolution": [16, 24], "image_channels": 3, "num_classes": 0}
    straight = build_dataset(Data(kind="folder", root=str(source), fit=how, **common))
    again = build_dataset(Data(kind=kind, root=str(made), **common))
    for i in range(4):
        assert straight[i][0].shape == (3, 16, 24)
        assert torch.equal(straight[i][0], again[i][0])


def test_work_that_fits_images_otherwise_is_another(tmp_path, capsys):
    source, options = _photographs(tmp_path / "x"), ["--resolution", "16", "--format", "tar", "--workers", "1"]
    assert main(["data", "prepare", str(source), str(tmp_path / "y"), *options]) == 0
    assert main(["data", "prepare", str(source), str(tmp_path / "y"), *options, "--fit", "pad"]) == 2
    assert "holds work with fit crop, not pad" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, problem",
    [
        ("16x24", "must be an integer, or a height and a width, got '16x24' (with an x, projects differ"),
        ("16,24,3", "must be an integer, or a height and a width"),
        ("16,0", "must be at least 1, got [16, 0]"),
        ("16,16385", "must be at most 16384, got [16, 16385]"),
    ],
)
def test_options_that_are_no_size(tmp_path, capsys, text, problem):
    arguments = ["data", "prepare", str(_photographs(tmp_path / "x")), str(tmp_path / "y"), "--format", "folder"]
    assert main([*arguments, "--resolution", text]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: --resolution: {problem}")
    assert not (tmp_path / "y").exists()


def test_crops_are_cut_anywhere_in_both_directions(tmp_path):
    """From images of 20 x 40 pixels, whose numbers are their rows and columns."""
    rows, columns = np.mgrid[:20, :40]
    (tmp_path / "x").mkdir()
    Image.fromarray(np.stack([rows, columns, rows], axis=2).astype(np.uint8)).save(tmp_path / "x/0.png")
    data = Data(kind="folder", root=str(tmp_path / "x"), resolution=[16, 24], crop_from=[20, 40], image_channels=3,
        num_classes=0, num_workers=0)  # fmt: skip
    images = RealImages(build_training_dataset(data), data, Draws(1), Slice(64, 1, 0, 1), torch.device("cpu"))
    corners = ((images.next_phase()[0].images[:, :2, 0, 0] + 1) * 127.5).round().int()
    assert set(corners[:, 0].tolist()) == set(range(5))
    assert corners[:, 1].min() <= 2
    assert corners[:, 1].max() in (14, 15, 16)

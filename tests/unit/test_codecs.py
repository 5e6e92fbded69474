"""What networks see of images: transforms against scipy's, latents on disk, and autoencoders that do not fit."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from scipy.fft import dctn
from torch import nn

import bigsgan
from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, autoencoders, build_dataset, build_training_dataset, readable_images
from bigsgan.data.codecs import build_codec
from bigsgan.data.encoders import open_encoder
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.cosines import from_cosines, to_cosines
from bigsgan.images.reading import CorruptImage
from bigsgan.images.size import Size
from tests.autoencoders import latents, save_autoencoder, write_autoencoder, write_latents

CPU = torch.device("cpu")


@pytest.mark.parametrize("block", [2, 4, 8])
def test_cosines_are_scipys_and_lose_nothing(block):
    images = torch.randn(2, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    found = to_cosines(images, block, scale=0.25)
    assert found.shape == (2, 3 * block**2, 16 // block, 24 // block)
    for c, row, column in ((0, 0, 0), (2, 1, 2)):
        pixels = images[1, c, row * block : (row + 1) * block, column * block : (column + 1) * block]
        expected = 0.25 * dctn(pixels.double().numpy(), type=2, norm="ortho").flatten()
        own = found[1, c * block**2 : (c + 1) * block**2, row, column]
        np.testing.assert_allclose(own.numpy(), expected, atol=1e-6)
    torch.testing.assert_close(from_cosines(found, block, scale=0.25), images, rtol=0, atol=1e-5)
    torch.testing.assert_close((found / 0.25).square().sum(), images.square().sum())  # orthonormal


def test_networks_see_cosines_of_mirrored_images():
    """Crops and mirroring come before the codec."""
    plain: dict[str, Any] = {"resolution": 16, "horizontal_flip": True}
    batches = {}
    for codec in ({}, {"codec": {"kind": "dct", "block": 4}}):
        data = Data(**plain, **codec)
        reals = RealImages(build_training_dataset(data), data, Draws(0), Slice(12, 1, 0, 1), CPU)
        (batches[data.codec.kind],) = reals.next_phase()
    assert batches["dct"].images.shape == (12, 16, 4, 4)
    torch.testing.assert_close(from_cosines(batches["dct"].images, 4), batches["pixels"].images, rtol=0, atol=1e-5)
    assert torch.equal(batches["dct"].labels, batches["pixels"].labels)


def test_latents_are_read_shifted_and_scaled(tmp_path):
    numbers, data = write_latents(tmp_path / "data", 6, posterior=False), latents(tmp_path)
    assert (data.channels, *data.network_size) == (4, 8, 8)
    dataset = build_dataset(data)
    assert [dataset[i][1] for i in range(6)] == [0, 1] * 3
    reals = RealImages(dataset, data, Draws(0), Slice(6, 1, 0, 1), CPU)
    (batch,) = reals.next_phase()
    found = sorted(batch.images.flatten(1).tolist())
    np.testing.assert_allclose(found, sorted(((numbers - 0.25) * 0.5).reshape(6, -1).tolist()), atol=1e-6)


def test_posteriors_are_drawn_by_position_alone(tmp_path):
    """Means and deviations come out, whatever the number of ranks, and another epoch draws anew."""
    numbers, data = write_latents(tmp_path / "data", 4, posterior=True), latents(tmp_path)
    dataset, draws = build_dataset(data), Draws(0)
    whole = RealImages(dataset, data, draws, Slice(4, 1, 0, 1), CPU)
    phases = [whole.next_phase()[0] for _ in range(400)]
    parts = [RealImages(dataset, data, draws, Slice(4, 1, rank, 2), CPU).next_phase()[0].images for rank in range(2)]
    assert torch.equal(torch.cat(parts), phases[0].images)
    of_first = [phase.images[phase.labels == 0] for phase in phases]  # files 0 and 2, in either order
    drawn = torch.stack([each[each.mean(dim=(1, 2, 3)).argsort()] for each in of_first]) / 0.5 + 0.25
    means = drawn.mean(dim=0).mean(dim=0)
    expected = torch.from_numpy((numbers[0, :4] + numbers[2, :4]) / 2)
    assert (means - expected).abs().max() < 0.3
    assert not torch.equal(of_first[0], of_first[1])


def header(*shape: int) -> bytes:
    """Of a .npy file without its numbers."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue()


DAMAGES = {
    "another shape": (lambda path: np.save(path, np.zeros((3, 8, 8))), r"it has the shape \(3, 8, 8\), not \(4, 8"),
    "not a number": (lambda path: np.save(path, np.full((4, 8, 8), np.nan)), "it has numbers that are not finite"),
    "cut off": (lambda path: path.write_bytes(path.read_bytes()[:200]), "."),
    "code": (lambda path: np.save(path, np.array([{}], dtype=object), allow_pickle=True), "it holds the type object"),
    "a shape beyond memory": (lambda path: path.write_bytes(header(4, 2**40, 2**20)), "it is cut off"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_latents_count_as_corrupt_images(name, tmp_path):
    write_latents(tmp_path / "data", 3, posterior=False)
    damage, message = DAMAGES[name]
    damage(tmp_path / "data" / "001.npy")
    dataset = build_dataset(latents(tmp_path))
    assert dataset[0][0].shape == (8, 8, 8)
    with pytest.raises(CorruptImage, match=message):
        dataset[1]


def test_latents_that_are_not_listed(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match=r"data.root: .* has no readable dataset.json: No such file"):
        build_dataset(latents(tmp_path))
    write_latents(tmp_path / "data", 3, posterior=False)
    with pytest.raises(UserError, match=r"data\.num_classes: must be 2 with this data, got 1"):
        build_dataset(latents(tmp_path, num_classes=1))
    assert build_dataset(latents(tmp_path, num_classes=7))[2][1] == 0  # a part may lack the last classes
    (tmp_path / "data" / "dataset.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match=r"data.root: .* has no readable dataset.json: it is nested too deeply"):
        build_dataset(latents(tmp_path))
    (tmp_path / "data" / "dataset.json").write_text('{"labels": [["000.npy", -1]]}')
    with pytest.raises(UserError, match=r"data\.root: .* has a class below 0 in its dataset\.json, that of 000\.npy"):
        build_dataset(latents(tmp_path))


def test_latents_without_classes(tmp_path):
    """Other tools write null for no classes: all files are latents, those in folders too."""
    numbers = write_latents(tmp_path / "data", 3, posterior=False)
    (tmp_path / "data" / "00001").mkdir()
    (tmp_path / "data" / "000.npy").rename(tmp_path / "data" / "00001" / "000.npy")
    (tmp_path / "data" / "dataset.json").write_text('{"labels": null}')
    dataset = build_dataset(latents(tmp_path, num_classes=0))
    assert [dataset[i][1] for i in range(len(dataset))] == [0] * 3
    np.testing.assert_array_equal([dataset[i][0][:4].numpy() for i in range(3)], numbers)
    with pytest.raises(UserError, match=r"data\.num_classes: must be 0 .* has 0 classes in dataset.json\); set"):
        build_dataset(latents(tmp_path))


@pytest.mark.parametrize("name", ["../..", "a/../../000.npy", "/etc/passwd"])
def test_listed_latents_lie_in_the_data_set(tmp_path, name):
    write_latents(tmp_path / "data", 3, posterior=False)
    for listed in (name, name.replace("/", "\\")):
        (tmp_path / "data" / "dataset.json").write_text(json.dumps({"labels": [["001.npy", 0], [listed, 1]]}))
        with pytest.raises(UserError, match=rf"^data\.root: .* has {name} in its dataset\.json, which is no name of"):
            build_dataset(latents(tmp_path))


def test_lists_of_numbers_are_no_classes_of_latents(tmp_path):
    write_latents(tmp_path / "data", 3, posterior=False)
    (tmp_path / "data" / "dataset.json").write_text('{"labels": [["001.npy", [0.5, 1]]]}')
    with pytest.raises(UserError, match=r"has lists of numbers as labels in its dataset.json, such as that of 001.npy"):
        build_dataset(latents(tmp_path))
    assert len(build_dataset(latents(tmp_path, num_classes=0))) == 1


BAD = {
    "side": (["data.codec={kind: dct, block: 8}", "data.resolution=20"], "data.resolution: must be a multiple of 8"),
    "encoding": (["data.codec={kind: diffusers, path: x}"], "data.codec.kind: must be pixels or dct, got 'diffusers'"),
    "latents of nothing": (["data={kind: latents, root: x}"], "data.codec.kind: must be diffusers, torchscript or dct"),
    "metrics of latents": (
        [
            "data={kind: latents, root: x, resolution: 128, codec: {kind: diffusers, path: y}}",
            "metrics={names: [fid100], every_nimg: 100}",
        ],
        "metrics.reference: must be given with data.kind=latents (the data has no images); give an .npz file",
    ),
    "mirrored latents": (
        ["data={kind: latents, root: x, horizontal_flip: true, codec: {kind: diffusers, path: y}}"],
        "data.horizontal_flip: must be unset with data.kind=latents, got true",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_codecs_that_do_not_fit(name, tmp_path, capsys):
    options, message = BAD[name]
    assert cli.main(["train", "--config", "launch/recipes/digits.yaml", f"out={tmp_path / 'run'}", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "about, message",
    [
        ({"latent_channels": 16}, "data.codec.channels: must be 16 with this autoencoder, got 4"),
        ({"block_out_channels": [1, 1, 1]}, "data.codec.factor: must be 4 with this autoencoder, got 8"),
        ({"block_out_channels": []}, r"data.codec.path: .*/vae' has block_out_channels \[\] in its config.json; give"),
        ({"shift_factor": [1]}, r"data.codec.path: .* has shift_factor \[1\] in its config.json"),
        ({"latents_mean": [0.5]}, "data.codec.path: .* has latents_mean in its config.json"),
        ({"_class_name": "VQModel"}, "data.codec.path: .* is of the class VQModel, not AutoencoderKL"),
    ],
)
def test_autoencoders_of_another_size(about, message, tmp_path):
    data = latents(tmp_path)
    write_autoencoder(tmp_path / "vae", **about)
    with pytest.raises(UserError, match=message):
        build_codec(data, CPU)


def test_an_autoencoder_that_is_not_there(tmp_path):
    data = latents(tmp_path)
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(UserError, match=r"data.codec.path: .* cannot be read: No such file"):
        build_codec(data, CPU)
    for text, message in (
        ("[1]", "must be a JSON object"),
        ("{}", "no block_out_channels"),
        ("[" * 100_000, "cannot be read: it is nested too deeply"),
    ):
        (tmp_path / "vae" / "config.json").write_text(text)
        with pytest.raises(UserError, match=rf"data\.codec\.path: .* {message}"):
            build_codec(data, CPU)


@pytest.mark.slow
def test_an_autoencoder_decodes(tmp_path):
    numbers, data = write_latents(tmp_path / "data", 3, posterior=False), latents(tmp_path)
    network = save_autoencoder(tmp_path / "vae")  # in the place of the configuration alone
    with torch.no_grad():
        expected = network.decode(torch.from_numpy(numbers)).sample
    found = readable_images(build_dataset(data), data, 3, CPU)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


WEIGHTS = "diffusion_pytorch_model.safetensors"


def fewer(path: Path) -> None:
    save_file(dict(list(load_file(path).items())[:5]), path, metadata={"format": "pt"})


def reshaped(path: Path) -> None:
    save_file({name: torch.zeros(3) for name in load_file(path)}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "damage, message",
    [
        (Path.unlink, "cannot be read: it has no diffusion_pytorch_model.safetensors"),
        (lambda path: path.write_bytes(path.read_bytes()[:500]), "cannot be read: Unable to load weights"),
        (fewer, r"has no weights for \d+ tensors, such as decoder\.conv"),
        (reshaped, "cannot be read: Error.* size mismatch"),
    ],
)
def test_an_autoencoder_whose_weights_are_damaged(damage, message, tmp_path):
    data = latents(tmp_path)
    save_autoencoder(tmp_path / "vae")
    damage(tmp_path / "vae" / WEIGHTS)
    with pytest.raises(UserError, match=rf"data\.codec\.path: .* {message}"):
        build_codec(data, CPU).decode(torch.zeros(1, 4, 8, 8))


def test_the_scale_of_older_autoencoders_is_that_of_diffusers(tmp_path):
    """Their config.json does not have it, as that of sd-vae-ft-mse."""
    write_latents(tmp_path / "data", 2, posterior=False)
    data = latents(tmp_path)
    network = save_autoencoder(tmp_path / "vae")
    about = json.loads((tmp_path / "vae" / "config.json").read_text())
    del about["scaling_factor"]
    (tmp_path / "vae" / "config.json").write_text(json.dumps(about))
    scale = type(network).from_config(type(network).load_config(tmp_path / "vae")).config.scaling_factor
    ones = torch.ones(1, 4, 8, 8)
    torch.testing.assert_close(build_codec(data, CPU).encode(ones), scale * ones)


def test_autoencoders_decode_a_few_images_at_a_time(tmp_path, monkeypatch):
    data, seen = latents(tmp_path), []
    network = save_autoencoder(tmp_path / "vae")
    codec = build_codec(data, CPU)
    monkeypatch.setattr(autoencoders, "_PIXELS_AT_A_TIME", 3 * 64 * 64)
    drawn = torch.randn(7, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    found = codec.decode(drawn)
    decoder = codec._decoder
    codec._decoder = lambda part: seen.append(len(part)) or decoder(part)
    codec.decode(drawn)
    assert seen == [3, 3, 1]
    with torch.no_grad():
        torch.testing.assert_close(found, network.decode(drawn / 0.5).sample, rtol=1e-4, atol=1e-4)


class Doubling(torch.nn.Module):
    """Makes an image of 3 channels, twice as large, of latents of 2 channels."""

    def forward(self, latents):
        images = latents.repeat_interleave(2, 2).repeat_interleave(2, 3)
        return torch.cat([images, images[:, :1]], 1)


class OfTwo(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor):
        return x + y


class Reshaping(nn.Module):
    def forward(self, x: torch.Tensor):
        return x.view(3, 5, 7)


@pytest.mark.parametrize(
    "program, said", [(OfTwo, "forward() is missing value for argument 'y'"), (Reshaping, "RuntimeError: shape '[3, 5")]
)
def test_a_program_that_fails_at_images_is_no_encoder(tmp_path, program, said):
    path = tmp_path / "encoder.pt"
    torch.jit.script(program()).save(str(path))
    with pytest.raises(UserError) as caught:
        open_encoder(f"torchscript:{path},{path}", 3, Size(16, 16), CPU)
    assert str(caught.value).startswith(f"--codec: '{path}' fails at images (1, 3, 16, 16): {said}")


def test_sides_that_blocks_do_not_divide_are_refused_by_the_option():
    said = r"--resolution: must be a multiple of 4, got \[15, 16\]; give --resolution 16$"
    with pytest.raises(UserError, match=said):
        open_encoder("dct:4", 3, Size(15, 16), CPU)


def test_a_program_decodes(tmp_path):
    path = tmp_path / "decoder.pt"
    torch.jit.script(Doubling()).save(str(path))
    codec = {"kind": "torchscript", "path": str(path), "factor": 2, "channels": 2, "scale": 0.25}
    data = latents(tmp_path, codec=codec)
    assert (data.channels, *data.network_size) == (2, 32, 32)
    built, drawn = build_codec(data, CPU), torch.randn(3, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(built.encode(drawn), 0.25 * drawn)
    torch.testing.assert_close(built.decode(drawn), Doubling()(drawn / 0.25))
    with pytest.raises(UserError, match=r"makes images of the shape \(3, 64, 64\), not \(1, 64, 64\)"):
        build_codec(latents(tmp_path, codec=codec, image_channels=1), CPU).decode(drawn)
    torch.jit.script(OfTwo()).save(str(path))
    with pytest.raises(UserError, match=r"^data\.codec\.path: '.*decoder\.pt' fails at latents .* for argument 'y'"):
        build_codec(data, CPU).decode(drawn)
    path.write_bytes(b"no program")
    with pytest.raises(UserError, match=r"data\.codec\.path: must be a TorchScript file, got '.*decoder\.pt'"):
        build_codec(data, CPU).decode(drawn)


@pytest.mark.slow
def test_a_run_in_latent_space(tmp_path):
    """Trains on posteriors, shows decoded images, samples and exports."""
    network, run = save_autoencoder(tmp_path / "vae"), tmp_path / "run"
    write_latents(tmp_path / "data", 40, posterior=True)
    tiny = "family: gat, depth: 4, width: 32, heads: 2"
    codec = f"{{kind: diffusers, path: {tmp_path / 'vae'}}}"
    images = f"root: {tmp_path / 'data'}, resolution: 64, image_channels: 3, num_classes: 2, num_workers: 1"
    options = [
        f"data={{kind: latents, {images}, codec: {codec}}}", f"generator={{{tiny}}}", f"discriminator={{{tiny}}}",
        "objective={loss: relativistic, reuse_fakes: true, fake_labels: data, r1: {weight: 0.1}}",
        "metrics=null", f"out={run}",
        "batch=8", "total_nimg=16", "report_nimg=8", "sample_nimg=16", "checkpoint_nimg=16",
    ]  # fmt: skip
    assert cli.main(["train", "--config", "launch/recipes/digits.yaml", *options]) == 0
    assert {path.name[:11] for path in (run / "samples").iterdir()} == {"samples_rea", "samples_ema", "samples_liv"}
    torch.nn.init.ones_(network.post_quant_conv.bias)
    network.save_pretrained(tmp_path / "vae")
    again = [sys.executable, "launch/train.py", "--config", str(run / "config.yaml"), "total_nimg=24"]
    refused = subprocess.run(again, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "has other weights than the autoencoder that the run began with" in refused.stderr
    network = save_autoencoder(tmp_path / "vae")
    assert cli.main(["sample", "--run", str(run), "--out", str(tmp_path / "x"), "--files", "--num", "3"]) == 0
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "g.safetensors")]) == 0
    inputs = Draws(0).normal("sample", (0,), 0, 3, 64)
    made = bigsgan.load(tmp_path / "g.safetensors")(torch.from_numpy(inputs), torch.tensor([0, 1, 0]))
    with torch.no_grad():
        pictures = network.decode(made / 0.5).sample
    for i, label in enumerate((0, 1, 0)):
        path = tmp_path / "x" / f"class{label:03}_sample{i:06}.png"
        written = np.asarray(Image.open(path)).astype(np.float32)
        expected = ((pictures[i].clamp(-1, 1) + 1) * 127.5).permute(1, 2, 0).numpy()
        assert np.abs(written - expected).max() <= 1

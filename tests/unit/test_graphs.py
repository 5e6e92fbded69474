"""Generators as graphs, run by onnxruntime and by torch in a process without bigsgan, make the images of our own."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import bigsgan
from bigsgan import cli
from bigsgan.errors import UserError
from bigsgan.inference import graphs
from bigsgan.inference.sheets import set_styles
from bigsgan.models.layers import SpectralLayer
from tests.runs import make_run
from tests.tiny import TINY_GAMES

MORE = {
    "biggan": [],
    "biggan_unconditional": ["data.num_classes=0", "engines.generator.activation_checkpointing=true"],
    "biggan_orthogonal": ["objective.orthogonal={generator: 0.3, discriminator: 0.3}"],
    "r3gan_unconditional": [*TINY_GAMES["r3gan"], "data.num_classes=0", "generator.bf16_stages=2"],
    "stylegan2_unconditional": [*TINY_GAMES["stylegan2"], "data.num_classes=0", "generator.half_resolutions=2"],
    "stylegan2_orig": [*TINY_GAMES["stylegan2"], "generator.architecture=orig"],
    "pix2pix_instance": [*TINY_GAMES["pix2pix_resnet"], "generator.norm=instance"],
    "pix2pix_without_norm": [*TINY_GAMES["pix2pix_features"], "generator.norm=none"],
}
OVERRIDES = {**TINY_GAMES, **MORE}
IN_CI = ["dcgan_light", "gat", "mlp", "pix2pix_instance", "r3gan_unconditional", "stylegan2_unconditional"]
"""With all kinds of inputs and most kinds of layers."""
CLOSE = 2e-5
NUM = 5


def export(run: Path, out: Path, *more: str) -> Path:
    assert cli.main(["export", "--run", str(run), "--out", str(out), "--batch", "25", *more]) == 0
    return out


def inputs_and_images(
    opened: bigsgan.inference.loading.ExportedNetwork,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs by the names that the documentation gives them, and images of the network that `bigsgan.load` opened."""
    generator, recipe = torch.Generator().manual_seed(11), opened.recipe
    data = recipe.data
    inputs = {}
    if recipe.translates:
        shape = (NUM, recipe.input_channels, *data.resolution)
        inputs["x"] = torch.rand(shape, generator=generator) * 2 - 1
    else:
        inputs["z"] = torch.randn(NUM, recipe.latent_size, generator=generator)
    if data.has_vectors:
        inputs["y"] = torch.randn(NUM, data.condition_width, generator=generator)
    elif data.num_classes:
        inputs["y"] = (torch.arange(NUM) + 3) % data.num_classes
    ours = list(inputs.values())
    if recipe.generator.truncates_w and not (data.has_vectors and not recipe.generator.has_styles):
        inputs["psi"] = torch.tensor(0.4)
        opened.network.layers["0"].truncation_psi = 0.4
    set_styles(opened.network, "const", None)
    with torch.no_grad():
        return inputs, opened(*ours)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Of a name, a directory with a run, its safetensors file and its two graphs."""

    @functools.cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        run, _ = make_run(directory, *OVERRIDES[name])
        for file in ("x.safetensors", "x.onnx", "x.pt2"):
            export(run, directory / file)
        return directory

    return make


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in IN_CI else pytest.mark.nightly) for n in OVERRIDES]
)
def test_onnx_makes_the_same_images(name, exported):
    runtime = pytest.importorskip("onnxruntime")
    place = exported(name)
    inputs, wanted = inputs_and_images(bigsgan.load(place / "x.safetensors"))
    session = runtime.InferenceSession(place / "x.onnx")
    shapes = {entry.name: entry.shape for entry in session.get_inputs()}
    assert shapes == {name: ["batch", *value.shape[1:]] for name, value in inputs.items() if name != "psi"}
    assert [entry.name for entry in session.get_overridable_initializers()] == ["psi"] * ("psi" in inputs)
    assert {entry.name: entry.shape for entry in session.get_outputs()} == {"images": ["batch", *wanted.shape[1:]]}
    assert json.loads(session.get_modelmeta().custom_metadata_map["recipe"])["batch"] == 8
    for num in (NUM, 1):
        given = {key: value.numpy() if key == "psi" else value[:num].numpy() for key, value in inputs.items()}
        (images,) = session.run(None, given)
        scale = wanted.abs().max().clamp(min=1)
        assert (torch.from_numpy(images) - wanted[:num]).abs().max() < CLOSE * scale
    if "psi" in inputs:
        opened = bigsgan.load(place / "x.safetensors")
        set_styles(opened.network, "const", None)
        first = {key: value for key, value in inputs.items() if key != "psi"}
        (images,) = session.run(None, {key: value.numpy() for key, value in first.items()})
        with torch.no_grad():
            whole = opened(*first.values())
        assert (torch.from_numpy(images) - whole).abs().max() < CLOSE * whole.abs().max().clamp(min=1)
        assert (whole - wanted).abs().max() > 5 * CLOSE
    other = {key: value + 1 if key == "psi" else value.flip(0) for key, value in inputs.items()}
    (images,) = session.run(None, {key: value.contiguous().numpy() for key, value in other.items()})
    assert (torch.from_numpy(images) - wanted).abs().max() > 5 * CLOSE  # an untrained CAT hardly looks at its latents


@pytest.mark.slow
def test_all_axes_of_an_onnx_graph_have_names(exported):
    model = pytest.importorskip("onnx").load(exported("mlp") / "x.onnx")
    values = [*model.graph.input, *model.graph.output, *model.graph.value_info]
    dims = [dim for value in values for dim in value.type.tensor_type.shape.dim]
    assert {dim.dim_param for dim in dims if not dim.HasField("dim_value")} == {"batch"}


ONE_HOT = """
import torch
from torch import nn

class Generator(nn.Module):
    def __init__(self, latent_size, num_classes, image_channels):
        super().__init__()
        self.classes, self.channels = num_classes, image_channels
        self.linear = nn.Linear(latent_size + num_classes, image_channels * 256)

    def forward(self, z, y):
        marks = (y[:, None] == torch.arange(self.classes, device=y.device)).to(z.dtype)
        return self.linear(torch.cat([z, marks], 1)).view(-1, self.channels, 16, 16).tanh()
"""
"""A network that takes a class that does not exist as none."""
OF_CLASSES = {"biggan": [], "stylegan2": TINY_GAMES["stylegan2"], "gat": TINY_GAMES["gat"]}
OF_CLASSES["one-hot"] = ["generator={family: 'marks:Generator', latent_size: 12}"]


@pytest.mark.parametrize("form", ["onnx", "pt2"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in OF_CLASSES])
def test_a_class_that_does_not_exist_makes_no_images(name, form, tmp_path, monkeypatch):
    (tmp_path / "marks.py").write_text(ONE_HOT)
    monkeypatch.syspath_prepend(tmp_path)
    run, _ = make_run(tmp_path, *OF_CLASSES[name])
    file = export(run, tmp_path / f"x.{form}")
    make = {"onnx": graphs._open_onnx, "pt2": graphs._open_program}[form](file)
    recipe = bigsgan.load(export(run, tmp_path / "x.safetensors"), families=["marks:Generator"]).recipe
    z, last = torch.randn(2, recipe.latent_size), recipe.data.num_classes - 1
    psi = {"psi": torch.tensor(0.5)} if graphs.has_psi(recipe) else {}
    assert make({"z": z, "y": torch.tensor([last, 0]), **psi}).isfinite().all()
    for label in (-1, -last - 1, last + 1):
        given = {"z": z, "y": torch.tensor([label, 0]), **psi}
        if name == "one-hot":
            first, second = make(given)
            assert first.isnan().all()
            assert second.isfinite().all()
        else:
            with pytest.raises(Exception, match=r"out of data bounds|out of range|invalid index"):
                make(given)


ALONE = """
import sys
import torch
from safetensors.torch import load_file, save_file
for place in sys.argv[1:]:
    program = torch.export.load(f"{place}/x.pt2")
    inputs = load_file(f"{place}/inputs.safetensors")
    given = [inputs[name] for name in ("z", "x", "y", "psi") if name in inputs]
    made = program.module()(*given)
    one = [value if value.dim() == 0 else value[:1] for value in given]
    save_file({"images": made, "one": program.module()(*one)}, f"{place}/images.safetensors")
assert not [name for name in sys.modules if name.split(".")[0] in ("bigsgan", "deepspeed")]
"""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_CI, id="in CI", marks=pytest.mark.slow),
        pytest.param([name for name in OVERRIDES if name not in IN_CI], id="others", marks=pytest.mark.nightly),
    ],
)
def test_torch_makes_the_same_images_in_a_process_without_bigsgan(names, exported, tmp_path):
    wanted, places = {}, {name: exported(name) for name in names}
    for name, place in places.items():
        inputs, wanted[name] = inputs_and_images(bigsgan.load(place / "x.safetensors"))
        save_file(inputs, place / "inputs.safetensors")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [sys.executable, "-c", ALONE, *map(str, places.values())]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    for name, place in places.items():
        made = load_file(place / "images.safetensors")
        scale = wanted[name].abs().max().clamp(min=1)
        assert (made["images"] - wanted[name]).abs().max() < CLOSE * scale, name
        assert (made["one"] - wanted[name][:1]).abs().max() < CLOSE * scale, name


@pytest.mark.slow
def test_large_weights_lie_beside_an_onnx_file(tmp_path, monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    run, _ = make_run(tmp_path, *TINY_GAMES["mlp"])
    monkeypatch.setattr(graphs, "_LARGEST_ONNX", 0)
    (tmp_path / "place").mkdir()
    file = export(run, tmp_path / "place" / "x.onnx")
    assert sorted(path.name for path in file.parent.iterdir()) == ["x.onnx", "x.onnx.data"]
    inputs, wanted = inputs_and_images(bigsgan.load(export(run, tmp_path / "x.safetensors")))
    (images,) = runtime.InferenceSession(file).run(None, {key: value.numpy() for key, value in inputs.items()})
    assert (torch.from_numpy(images) - wanted).abs().max() < CLOSE


@pytest.mark.slow
def test_a_graph_that_makes_other_images_is_refused(tmp_path, monkeypatch, capsys):
    """Of weights that are not divided by their norms; nothing is left behind."""
    run, _ = make_run(tmp_path)
    monkeypatch.setattr(SpectralLayer, "fold", lambda layer: setattr(layer, "is_folded", True))
    before = sorted(tmp_path.iterdir())
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "x.pt2"), "--batch", "25"]) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    assert message.startswith("bigsgan: --format: 'torch-export' makes images that differ by up to ")
    assert message.endswith(", above 0.001; use --format safetensors or hub\n")
    assert sorted(tmp_path.iterdir()) == before


def test_the_bound_of_images():
    ours = [torch.tensor([0.5, -0.25]), torch.tensor([4.0])]
    assert graphs.check_images([ours[0] + 1e-4, ours[1] - 3e-3], ours, "onnx") == pytest.approx(3e-3, rel=1e-3)
    for wrong in (5e-3, float("nan")):
        with pytest.raises(UserError, match=r"^--format: 'onnx' makes images that differ by up to (0\.005|nan) from"):
            graphs.check_images([ours[0], ours[1] + wrong], ours, "onnx")


@pytest.mark.parametrize("step", ["export", "load"])
def test_what_torch_cannot_export_is_refused(step, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **keywords):
        raise NotImplementedError("no rule\nfor this")

    monkeypatch.setattr(torch.export, step, fail)
    run, _ = make_run(tmp_path, *TINY_GAMES["mlp"])
    before = sorted(tmp_path.iterdir())
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "x.pt2")]) == 2
    assert capsys.readouterr().err == (
        "bigsgan: --format: 'torch-export' cannot hold this generator of family mlp (NotImplementedError: no rule); "
        "use --format safetensors or hub\n"
    )
    assert sorted(tmp_path.iterdir()) == before


def test_psi_is_an_input_of_a_graph(tmp_path, capsys):
    run, _ = make_run(tmp_path, *TINY_GAMES["stylegan2"])
    assert cli.main(["export", "--run", str(run), "--out", str(tmp_path / "x.pt2"), "--truncation", "0.7"]) == 2
    assert capsys.readouterr().err == (
        "bigsgan: --truncation: must be unset with --format torch-export, got 0.7 (psi is an input of the graph); "
        "remove the option\n"
    )

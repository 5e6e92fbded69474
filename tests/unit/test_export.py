"""`bigsgan export` to safetensors and for the Hub: every number of the files, and what opens them."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

import bigsgan
from bigsgan import cli
from bigsgan.checkpoint import saved_buffers, universal
from bigsgan.config import load_recipe
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.export import _write
from bigsgan.images.grids import image_grid
from bigsgan.inference.card import model_card
from bigsgan.inference.trained import open_trained
from bigsgan.runtime.extras import PACKAGES
from bigsgan.training.sampling import generator_inputs, stand_statistics, standing_batches
from tests.runs import make_run
from tests.single_process import save, whole
from tests.tiny import TINY_GAMES, tiny_recipe

CPU = torch.device("cpu")
TRAINED = {"weights": "ema", "dtype": "fp32", "statistics": "as trained"}
"""Of the header of an export without options."""


def export(run: Path, out: Path | str, *more: str) -> Path:
    batch = [] if {"--no-standing", "universal", "discriminator"} & set(more) else ["--batch", "25"]
    assert cli.main(["export", "--run", str(run), "--out", str(out), *batch, *more]) == 0
    return Path(out)


def header_of(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def inputs_of(module: torch.nn.Module, num: int = 4) -> tuple[torch.Tensor, ...]:
    generator, recipe = torch.Generator().manual_seed(7), module.recipe
    if recipe.translates:
        shape = (num, recipe.input_channels, *recipe.data.resolution)
        return (torch.rand(shape, generator=generator) * 2 - 1,)
    data, labels = recipe.data, torch.arange(num)
    if data.has_vectors:
        labels = torch.randn(num, data.condition_width, generator=generator)
    return torch.randn(num, recipe.latent_size, generator=generator), labels


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path)


def test_the_format_follows_from_nothing_but_a_suffix(run):
    """Without standing statistics the file is the EMA, bit for bit."""
    directory, networks = run
    for more in ([], ["--format", "safetensors"]):
        state = load_file(export(directory, "x", "--no-standing", *more))
        wanted = networks["average"].state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    header = header_of(Path("x"))
    assert header == {**TRAINED, "network": "generator", "nimg": "64", "recipe": header["recipe"]}


def test_both_formats_have_standing_statistics(run):
    directory, _ = run
    trained = open_trained(directory, "generator", False, None, CPU)
    stand_statistics(trained.network, trained.infer, standing_batches(trained.recipe, range(10), None, 25, CPU))
    wanted = trained.network.state_dict()
    for out, file in (("x.safetensors", "x.safetensors"), ("folder", "folder/model.safetensors")):
        state = load_file(export(directory, out, *(["--format", "hub"] if out == "folder" else [])) and file)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert header_of(Path("folder/model.safetensors")) == {"format": "pt", **header_of(Path("x.safetensors"))}


def rounded(values: torch.Tensor, dtype: str) -> torch.Tensor:
    """To the nearest number of a type, by numpy and by bits, as float32."""
    array = values.numpy()
    if dtype == "fp16":
        return torch.from_numpy(array.astype(np.float16).astype(np.float32))
    bits = array.view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)  # ties to even
    return torch.from_numpy(nearest.view(np.float32))


@pytest.mark.parametrize("dtype, kind, form", [("bf16", torch.bfloat16, "hub"), ("fp16", torch.float16, "safetensors")])
def test_parameters_are_rounded_and_buffers_stay(dtype, kind, form, run):
    directory, networks = run
    full = load_file(export(directory, "full"))
    out = export(directory, "half", "--dtype", dtype, "--format", form)
    half = load_file(out / "model.safetensors" if form == "hub" else out)
    parameters = dict(networks["average"].named_parameters())
    assert half.keys() == full.keys()
    for name, value in half.items():
        assert value.dtype == (kind if name in parameters else torch.float32)
        assert torch.equal(value.float(), rounded(full[name], dtype) if name in parameters else full[name]), name
    opened = bigsgan.load(out)
    assert opened.header["dtype"] == dtype
    assert {p.dtype for p in opened.parameters()} == {torch.float32}
    assert all(torch.equal(value, half[name].float()) for name, value in opened.network.state_dict().items())


@pytest.mark.parametrize("family", ["biggan", "dcgan", "r3gan", "stylegan2", "pix2pix_resnet", "mlp"])
def test_a_loaded_network_computes_in_the_type_that_is_asked_for(family, tmp_path):
    run, _ = make_run(tmp_path, *TINY_GAMES.get(family, []))
    file = export(run, tmp_path / "x", "--dtype", "bf16", "--no-standing")
    exact = bigsgan.load(file)
    inputs = inputs_of(exact)
    with torch.no_grad():
        images = exact(*inputs)
        half = bigsgan.load(file, dtype="bf16")
        found = half(*inputs)
        assert torch.equal(bigsgan.load(file, dtype="fp32")(*inputs), images)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in half.buffers()} <= {torch.float32}
    assert found.dtype == torch.float32
    assert not torch.equal(found, images)
    assert (found - images).square().mean() < 0.02 * images.square().mean()


def test_a_type_that_cannot_hold_the_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, networks = make_run(tmp_path, *TINY_GAMES["mlp"])
    name = next(iter(networks["average"].state_dict()))
    with torch.no_grad():
        networks["average"].state_dict()[name].view(-1)[0] = 1e5
    assert save(run / "checkpoints", 128, {"average": whole(networks["average"])})
    assert cli.main(["export", "--run", str(run), "--out", "x", "--dtype", "fp16"]) == 2
    message = f"--dtype: 'fp16' cannot hold {name}, which has numbers up to 1e+05; use --dtype bf16"
    assert message in capsys.readouterr().err
    assert not Path("x").exists()
    export(run, "x", "--dtype", "bf16")


def write_records(run: Path) -> None:
    """Evaluations, one of a later checkpoint, later ones of other weights, broken lines, and half a line."""
    common = {"weights": "ema", "features": "digits", "time": "now", "truncation": None}
    lines = [
        {"metric": "fid2k", "fid2k": 30.5, "nimg": 32, **common},
        {"metric": "fid2k", "fid2k": 20.25, "nimg": 64, **common},
        {"metric": "pr2k", "pr2k_precision": 0.5, "pr2k_recall": None, "nimg": 64, **common},
        {"metric": "fid2k", "fid2k": 10.125, "nimg": 128, **common},
        {"metric": "fid2k", "fid2k": 11.5, "nimg": 64, **common, "weights": "live"},
        {"metric": "fid2k", "fid2k": 12.5, "nimg": 64, **common, "ema_width": 0.07},
        {"metric": "fid2k", "fid2k": 13.5, "nimg": 64, **common, "truncation": 0.5},
        {"metric": "fid2k", "fid2k": 14.5, "nimg": 64, **common, "reference": "/home/me/reference.npz"},
        {"metric": "fid2k", "fid2k": 15.5, "nimg": 64, **common, "features": "inception", "features_sha256": "ab"},
        {"metric": 2, "nimg": "x", **common},
        ["metric"],
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"metric": "fid'
    (run / "evaluations.jsonl").write_bytes(b"\xff\xfe\n" + b"[" * 100_000 + b"\n" + text.encode())


def metrics_of(folder: Path) -> list[str]:
    """Rows of the card's table, name and value."""
    table = (folder / "README.md").read_text().partition("## Metrics\n")[2].partition("## Recipe")[0]
    return [" ".join(row.split(" | ")[:2]).strip("| ") for row in table.strip().splitlines()[2:]]


@pytest.mark.parametrize(
    "options, wanted",
    [
        (["--live"], ["fid2k 11.5"]),
        (["--truncation", "0.5"], ["fid2k 13.5"]),
        (["--truncation", "0.6"], []),
        ([], ["fid2k 20.25", "fid2k 14.5", "fid2k 15.5", "pr2k_precision 0.5"]),
    ],
)
def test_a_card_has_the_metrics_of_the_weights_in_the_folder(options, wanted, run):
    directory, _ = run
    write_records(directory)
    assert metrics_of(export(directory, "folder", "--format", "hub", *options)) == wanted


def test_metrics_of_a_width_are_found_by_the_number(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_records(tmp_path)
    card = model_card(tmp_path, recipe, 64, {**TRAINED, "ema_width": "0.07"}, 1000, None)
    (tmp_path / "README.md").write_text(card)
    assert metrics_of(tmp_path) == ["fid2k 12.5"]
    assert "| weights | EMA of width 0.07, fp32 |" in card


def test_a_card_quotes_names_of_classes_with_commas(tmp_path):
    names = """class_names: ['red, white', cat|dog, '12" disc']"""
    recipe = tiny_recipe(tmp_path, f"data={{kind: synthetic, resolution: 16, num_classes: 3, {names}}}")
    card = model_card(tmp_path, recipe, 64, TRAINED, 1000, None)
    assert '| classes | 3: 0 "red, white", 1 cat\\|dog, 2 "12"" disc" |' in card


def test_a_card_has_the_metrics_of_both_directions(tmp_path):
    about = {"metric": "fid2k", "nimg": 64, "weights": "ema", "features": "digits"}
    lines = [{**about, "direction": each, f"fid2k_{each}": float(len(each))} for each in ("b_to_a", "a_to_b")]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["cyclegan"])
    (tmp_path / "README.md").write_text(model_card(tmp_path, recipe, 64, TRAINED, 1000, None))
    assert metrics_of(tmp_path) == ["fid2k_a_to_b 6", "fid2k_b_to_a 6"]


@pytest.mark.smoke
def test_a_folder_for_the_hub(run, capsys):
    directory, _ = run
    write_records(directory)
    folder, file = export(directory, "folder", "--format", "hub"), export(directory, "x.safetensors")
    names = {"README.md", "config.json", "model.safetensors", "samples.png"}
    assert {path.name for path in folder.iterdir()} == names
    config = json.loads((folder / "config.json").read_text())
    opened, plain = bigsgan.load(folder), bigsgan.load(file)
    assert config["recipe"] == json.loads(plain.header["recipe"])
    assert (config["library_name"], config["network"], config["nimg"]) == ("bigsgan", "generator", 64)
    inputs = inputs_of(plain)
    with torch.no_grad():
        assert torch.equal(opened(*inputs), plain(*inputs))
        assert torch.equal(bigsgan.from_pretrained(folder)(*inputs), plain(*inputs))
        labels = torch.arange(100) % 10
        made = opened(*generator_inputs(opened.recipe, Draws(0), "sample", 0, labels, None, CPU))
    shown = np.asarray(Image.open(folder / "samples.png")).astype(int)
    assert np.abs(shown - image_grid(made, 10)[0].numpy().astype(int)).max() <= 1
    _, front, card = (folder / "README.md").read_text().split("---\n", 2)
    tags = {"pipeline_tag": "unconditional-image-generation", "tags": ["gan", "biggan"]}
    assert yaml.safe_load(front) == {"library_name": "bigsgan", **tags}
    for line in (
        "![Samples](samples.png)",
        "| images | 16 x 16, grey |",
        "| training data | `digits` |",
        "| real images seen | 64 |",
        "| fid2k | 20.25 | 64 | digits | the training data |",
        "| fid2k | 14.5 | 64 | digits | `reference.npz` |",
        "| pr2k_precision | 0.5 | 64 | digits | the training data |",
        'G = bigsgan.from_pretrained("FOLDER_OR_REPOSITORY")',
        "images = G(torch.randn(4, 12), torch.tensor([0, 1, 2, 3]) % 10)",
    ):
        assert line in card, line
    assert "fid2k | 10" not in card
    assert "recall" not in card


@pytest.mark.parametrize("family", TINY_GAMES)
def test_the_recipe_of_a_card_is_that_of_the_run(family, tmp_path):
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[family])
    card = model_card(tmp_path / "run", recipe, 8, {**TRAINED, "weights": "live"}, 1000, None)
    (tmp_path / "card.yaml").write_text(card.partition("```yaml\n")[2].partition("```")[0])
    assert load_recipe(tmp_path / "card.yaml", []) == recipe
    assert f"- {recipe.generator.family}\n" in card
    is_open = recipe.generator.family in ("autoencoder", "cat", "dit", "gat", "r3gan", "stylegan2")  # no tanh
    assert ("They are not bounded: clip them to [-1, 1] |" in card) == is_open
    assert is_open or "about [-1, 1]" not in card
    assert f"| values | float32 (n, {recipe.data.image_channels}, height, width)" in card
    assert ", red, green and blue, from -1 for black to 1 for white" in card or recipe.data.image_channels != 3
    assert yaml.safe_load((tmp_path / "card.yaml").read_text())["generator"]["family"] == recipe.generator.family


def test_a_card_of_pairs_shows_no_images_of_the_data_set(tmp_path):
    run, _ = make_run(tmp_path, *TINY_GAMES["pix2pix_resnet"])
    folder = export(run, tmp_path / "folder", "--format", "hub")
    assert not (folder / "samples.png").exists()
    card = (folder / "README.md").read_text()
    assert "samples.png" not in card
    assert "pipeline_tag: image-to-image" in card
    assert "images = G(inputs)  # (n, 3, 16, 16) in [-1, 1] -> (n, 3, 16, 16) in [-1, 1]" in card
    assert bigsgan.load(folder)(*inputs_of(bigsgan.load(folder))).shape == (4, 3, 16, 16)


@pytest.mark.parametrize("form", ["hub", "safetensors"])
def test_guidance_travels_with_the_weights(form, tmp_path):
    run, _ = make_run(tmp_path, *TINY_GAMES["gat"])
    out = tmp_path / "folder" if form == "hub" else tmp_path / "g.safetensors"
    guided = bigsgan.load(export(run, out, "--format", form, "--guidance", "1.8", "--truncation", "0.7"))
    plain = bigsgan.load(export(run, tmp_path / "plain.safetensors"))
    mapping = guided.network.layers["0"]
    assert (mapping.guidance, mapping.truncation_psi, plain.network.layers["0"].guidance) == (1.8, 0.7, 1.0)
    mapping.guidance = mapping.truncation_psi = 1.0
    assert torch.equal(guided(*inputs_of(guided)), plain(*inputs_of(plain)))
    if form == "hub":
        assert json.loads((out / "config.json").read_text())["guidance"] == 1.8
        first, second = (
            (export(tmp_path / "run", tmp_path / name, "--format", "hub", *more) / "samples.png").read_bytes()
            for name, more in (("one", ()), ("two", ("--guidance", "3")))
        )
        assert first != second


@pytest.mark.parametrize(
    "family, options, message",
    [
        ("gat", ["--guidance", "nan"], "--guidance: must be a finite number, got nan; give a number such as 1.5"),
        ("dcgan", ["--guidance", "2"], "--guidance: needs a GAT or CAT with classes, or flow matching"),
        ("gat", ["--guidance", "2", "--format", "onnx"], "--guidance: must be unset with --format onnx, got 2"),
        ("gat", ["--guidance", "2", "--network", "discriminator"], "--guidance: needs the generator"),
    ],
)
def test_guidance_that_no_export_can_have(family, options, message, tmp_path, capsys):
    run, _ = make_run(tmp_path, *TINY_GAMES[family])
    out = tmp_path / ("g.onnx" if "onnx" in options else "out")
    assert cli.main(["export", "--run", str(run), "--out", str(out), *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_what_is_measured_is_guided(tmp_path, capsys):
    """Samples of one guidance are as near to each other as can be, and far from those of another."""
    run, _ = make_run(tmp_path, *TINY_GAMES["gat"])
    samples, arguments = tmp_path / "samples.npz", ["--run", str(run), "--guidance", "4"]
    assert cli.main(["sample", *arguments, "--num", "200", "--out", str(samples)]) == 0
    found = []
    for options in (arguments, arguments[:2]):
        capsys.readouterr()
        asked = [*options, "--metrics", "fid200", "--reference", str(samples), "--json"]
        assert cli.main(["evaluate", *asked]) == 0
        found += json.loads(capsys.readouterr().out)
    assert found[0]["fid200"] < 0.5 * found[1]["fid200"]
    assert (found[0]["guidance"], "guidance" in found[1]) == (4, False)


BROKEN = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "brackets": lambda folder: (folder / "config.json").write_text("[" * 100_000),
    "another type": lambda folder: edit(folder, lambda config: config.update(dtype="int4")),
    "another width": lambda folder: edit(folder, lambda config: config["recipe"]["generator"].update(channels=3)),
    "unknown key": lambda folder: edit(folder, lambda config: config["recipe"].update(auto_map="model.py")),
}


def edit(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.slow
def test_broken_folders(run):
    directory, _ = run
    for name, damage in BROKEN.items():
        folder = export(directory, name.replace(" ", "_"), "--format", "hub", "--no-standing")
        bigsgan.load(folder)
        damage(folder)
        with pytest.raises(UserError, match=r"must be an exported network: .*; give a file that `bigsgan export` wrot"):
            bigsgan.load(folder)


def test_a_card_that_was_edited_is_not_replaced(run, capsys):
    directory, _ = run
    folder = export(directory, "folder", "--format", "hub")
    (folder / "README.md").write_text("license: mine")
    capsys.readouterr()
    assert cli.main(["export", "--run", "run", "--out", "folder", "--format", "hub"]) == 2
    said = "--out: must be a new directory, or one without these files, got 'folder' (it holds model.safetensors, "
    assert said in capsys.readouterr().err
    assert (folder / "README.md").read_text() == "license: mine"


@pytest.mark.parametrize("package", PACKAGES["onnx"])
def test_onnx_without_its_packages(package, run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    for found in PACKAGES["onnx"]:
        if found != package:
            monkeypatch.setitem(sys.modules, found, yaml)  # any module that is there
    assert cli.main(["export", "--run", "run", "--out", "x.onnx"]) == 2
    assert capsys.readouterr().err == (
        f"bigsgan: --format: 'onnx' needs the package {package}, which is not installed; install the extra `onnx` "
        "(`pip install -e '.[onnx]'` in bigsgan's repository)\n"
    )


def test_the_hub_without_its_package(run, monkeypatch):
    """A folder is made and opened without it."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    folder = export(run[0], "folder", "--format", "hub", "--no-standing")
    assert bigsgan.from_pretrained(str(folder)).recipe.data.kind == "digits"
    missing = r"'user/name' needs the package huggingface_hub, which is not installed; install the extra `hub` "
    with pytest.raises(UserError, match=rf"^from_pretrained: {missing}"):
        bigsgan.from_pretrained("user/name")
    with pytest.raises(UserError, match=rf"^push_to_hub: {missing}"):
        bigsgan.push_to_hub(folder, "user/name")
    with pytest.raises(UserError, match=r"^bigsgan.PretrainedNetwork: needs the package huggingface_hub, which is not"):
        _ = bigsgan.PretrainedNetwork


def test_a_checkpoint_for_deepspeed_is_whole_or_absent(run, capsys, monkeypatch):
    saved = []

    def full(value, path):
        saved.append(path)
        if len(saved) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path.write_bytes(b"")

    monkeypatch.setattr(universal, "_save", full)
    arguments = ["export", "--run", str(run[0]), "--out", "cut_off", "--format", "universal"]
    assert cli.main(arguments) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert saved[0].parts[0] == "cut_off"
    assert not os.path.exists("cut_off")


def test_a_checkpoint_for_deepspeed(run, capsys):
    """What an engine makes of it stands in tests/distributed/test_universal.py."""
    directory, _ = run
    out = export(directory, "universal", "--live", "--network", "discriminator", "--format", "universal")
    tag = (out / "latest_universal").read_text()
    network = open_trained(directory, "discriminator", True, None, CPU).network
    for name, parameter in network.named_parameters():
        saved = torch.load(out / tag / "zero" / name / "fp32.pt")["param"]
        assert torch.equal(saved, parameter)
    state = torch.load(out / tag / "mp_rank_00_model_states.pt")
    assert state["nimg"] == int(tag)
    assert {name: value.tolist() for name, value in state["buffers"].items()} == {
        name: value.tolist() for name, value in saved_buffers(network).items()
    }
    capsys.readouterr()
    for flags, text in {
        ("--ema",): "--ema: cannot be combined with --format universal",
        ("--dtype", "bf16"): "--dtype: cannot be combined",
        ("--standing",): "--standing: cannot be combined",
        (): "--out: 'universal' exists already",
    }.items():
        arguments = ["export", "--run", str(directory), "--out", "universal", "--format", "universal", *flags]
        assert cli.main(arguments) == 2
        assert capsys.readouterr().err.startswith(f"bigsgan: {text}")


@pytest.mark.parametrize("network", ["generator", "discriminator"])
def test_a_network_that_muon_trains_has_no_universal_checkpoint(tmp_path, monkeypatch, capsys, network):
    """DeepSpeed would take moments of 0 for those of many updates, and its first steps would be enormous."""
    monkeypatch.chdir(tmp_path)
    game = [text for text in TINY_GAMES["gat"] if not text.startswith("optimizer.")]
    directory, _ = make_run(tmp_path, *game, f"optimizer.{network}={{kind: muon, lr: 1e-3}}")
    arguments = ["export", "--run", str(directory), "--out", "out", "--format", "universal", "--network", network]
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err == (
        f"bigsgan: --format: 'universal' cannot be combined with optimizer.{network}.kind=muon (DeepSpeed reads Adam's "
        "state of all weights); use --format safetensors, for the weights alone\n"
    )
    assert not os.path.exists("out")
    other = "discriminator" if network == "generator" else "generator"
    assert cli.main([*arguments[:-1], other]) == 0


def test_tied_weights_are_written_under_each_of_their_names(tmp_path):
    tied = torch.randn(3, 2)
    _write({"a.weight": tied, "b.weight": tied, "row": tied[1]}, {"kind": "test"}, tmp_path / "g.safetensors")
    found = load_file(tmp_path / "g.safetensors")
    assert torch.equal(found["a.weight"], tied)
    assert torch.equal(found["b.weight"], tied)
    assert torch.equal(found["row"], tied[1])

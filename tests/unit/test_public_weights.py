"""Exports under public names, against what the public classes themselves saved, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from bigsgan import checkpoint, cli
from bigsgan.config.families import FAMILIES
from bigsgan.inference.public_weights import _NAMES, _SOURCES
from bigsgan.weights import biggan_pytorch, gat
from tests import REPOSITORY
from tests.cyclegan import game
from tests.runs import make_run
from tests.tiny import TINY_GAMES
from tests.unit.test_public_pix2pix import ResNet

DATA = REPOSITORY / "tests" / "data"
NETWORKS = ("generator", "discriminator")
COLOURS = "data={kind: synthetic, num_images: 64, image_channels: 3, num_classes: 4, resolution: %d}"
SQUARE = {
    "biggan-pytorch": [COLOURS % 32, "generator.attention=[16]", "discriminator.attention=[]"],
    "stylegan2-ada": TINY_GAMES["stylegan2"],
    "r3gan": [COLOURS % 16, *TINY_GAMES["r3gan"][1:]],
    "gat": [
        *TINY_GAMES["gat"],
        "generator.embedding_size=12",
        *("generator.levels=4", "discriminator.levels=4", "discriminator.depth=4"),
    ],
    "pix2pix": TINY_GAMES["pix2pix"],
}


def recorded() -> dict[str, tuple[str, str, dict[str, Tensor], dict[str, Any]]]:
    """State dicts that the public classes saved: format, network, state, and what their images are."""
    found = {}
    for kind in ("biggan", "biggan_deep"):
        state = load_file(DATA / f"biggan_pytorch_{kind}.safetensors")
        parts = {name: part_of(state, f"{name}/") for name in NETWORKS}
        found |= {f"{kind} {name}": ("biggan-pytorch", name, parts[name], {}) for name in NETWORKS}
    for kind in ("conditional", "unconditional"):
        state = load_file(DATA / f"r3gan_{kind}.safetensors")
        parts = {name: part_of(state, f"{name}.") for name in NETWORKS}
        data = _SOURCES["r3gan"].data_section(parts["generator"])
        found |= {f"r3gan {kind} {name}": ("r3gan", name, parts[name], data) for name in NETWORKS}
    for file in sorted((DATA / "stylegan2").glob("*.safetensors")):
        if state := part_of(load_file(file), "state."):
            found[f"stylegan2 {file.stem}"] = ("stylegan2-ada", file.stem.partition("_")[0], state, {})
    for patch in (1, 2, 4):
        state = load_file(DATA / f"gat_patch{patch}.safetensors")
        told = gat.data_section(part_of(state, "G."))
        data = {"resolution": told["resolution"] // 8, "image_channels": told["codec"]["channels"]}
        data["num_classes"] = told["num_classes"]
        for name in NETWORKS:
            found[f"gat {patch} {name}"] = ("gat", name, part_of(state, f"{name[0].upper()}."), data)
    return found


def part_of(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


RECORDED = recorded()


@pytest.mark.parametrize("name", RECORDED)
def test_the_public_classes_own_names_and_numbers(name):
    """All but what only logs read, the vectors of spectral norm, and GAT's parts that have no place here."""
    form, network, theirs, data = RECORDED[name]
    source = _SOURCES[form]
    found = getattr(source, f"{network}_section")(theirs)
    section = FAMILIES[found["family"]][network == "discriminator"](**found).model_dump()
    ours = getattr(source, f"{network}_state")(theirs)
    back = _NAMES[form].exported(network, section, data or source.data_section(theirs), ours)
    assert {key: value.shape for key, value in back.items()} == {key: value.shape for key, value in theirs.items()}
    for key, value in theirs.items():
        leaf = key.rpartition(".")[2]
        if "freqs" in leaf or leaf == "resample_filter":
            assert_close(back[key], value, rtol=0, atol=1e-7)
        elif leaf not in ("u0", "sv0", "w_avg") and not (form == "gat" and network == "generator" and "x_emb" in key):
            assert torch.equal(back[key], value), key
    again = getattr(source, f"{network}_state")(back)
    assert all(torch.equal(again[key], value) for key, value in ours.items() if not key.endswith((".u", ".v")))


def norm_there(weight: Tensor, u0: Tensor) -> Tensor:
    """What BigGAN-PyTorch divides a weight by in evaluation: one step of power iteration, from u0."""
    matrix = weight.double().flatten(1)
    v = torch.nn.functional.normalize(u0.double() @ matrix)
    u = torch.nn.functional.normalize(v @ matrix.T)
    return (v @ matrix.T @ u.T).squeeze()


@pytest.mark.parametrize("shape", [(24, 3, 3, 3), (6, 40), (40, 6), (2, 30), (1, 30)])
@pytest.mark.parametrize("change", [0.0, 0.02])
def test_the_reference_divides_by_the_same_norm(shape, change):
    """Our vectors are of the weights before the last update."""
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    before = torch.randn(shape, generator=generator)
    matrix, u = before.flatten(1), torch.nn.functional.normalize(torch.randn(shape[0], generator=generator), dim=0)
    for _ in range(3):
        v = torch.nn.functional.normalize(matrix.T @ u, dim=0)
        u = torch.nn.functional.normalize(matrix @ v, dim=0)
    after = before + change * torch.randn(shape, generator=generator)
    ours = torch.dot(u, after.flatten(1) @ v).double()
    u0, logged = biggan_pytorch._first_vector(after, u, v)
    assert u0.shape == (1, shape[0])
    assert_close(logged.squeeze().double(), ours, rtol=1e-6, atol=0)
    bound = 1e-6 if shape[0] > 1 else 2 * change**2  # one row has no other vector
    assert_close(norm_there(after, u0), ours, rtol=max(bound, 1e-6), atol=0)


@pytest.mark.parametrize("form", SQUARE)
def test_an_export_comes_back_bit_for_bit(form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, networks = make_run(tmp_path, *SQUARE[form])
    for network, more in (("generator", ["--no-standing"]), ("discriminator", [])):
        arguments = ["export", "--run", str(run), "--format", form, "--network", network, "--out", f"{network}.pth"]
        assert cli.main([*arguments, *more]) == 0
        assert "\nopen: " in capsys.readouterr().out
    arguments = ["import", "--from", form, "--weights", "generator.pth", "--discriminator", "discriminator.pth"]
    if form in ("biggan-pytorch", "pix2pix"):
        assert cli.main([*arguments, "--out", "back"]) == 0
        found = checkpoint.Reader(checkpoint.find(Path("back")))
        wanted = {"average": networks["average"], "discriminator": networks["discriminator"]}
        for entry, network in wanted.items():
            for name, value in network.named_parameters():
                found.entry(entry).read(checkpoint.MASTER, name, 0, back := torch.empty(value.numel()))
                assert torch.equal(back, value.detach().flatten()), name
    else:
        state = torch.load("generator.pth", weights_only=True)
        back = _SOURCES[form].generator_state(state)
        assert all(torch.equal(back[name], value) for name, value in networks["average"].state_dict().items())


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("form, num_classes", [("stylegan2-ada", 0), ("r3gan", 4)])
def test_vectors_are_inputs_of_a_linear_embedding(form, network, num_classes, tmp_path, capsys):
    """As ``test_weights_stylegan.py`` and ``test_r3gan.py`` compare with what the public classes make of them."""
    data = "{kind: synthetic, num_images: 64, image_channels: 3, resolution: 16, condition_size: 3, num_classes: %d}"
    game = [each for each in SQUARE[form] if not each.startswith("data=")]
    run, networks = make_run(tmp_path, *game, f"data={data % num_classes}")
    out = str(tmp_path / "x.pth")
    arguments = ["--run", str(run), "--format", form, "--network", network, "--out", out]
    assert cli.main(["export", *arguments, *(["--no-standing"] if network == "generator" else [])]) == 0
    assert f"c_dim={num_classes + 3}," in capsys.readouterr().out
    theirs = torch.load(out, weights_only=True)
    ours = networks["average" if network == "generator" else network].state_dict()
    (table,) = [value for name, value in ours.items() if name.endswith(("embedding.weight", "embed.weight"))]
    (found,) = [value for name, value in theirs.items() if name.endswith(("EmbeddingLayer.weight", "embed.weight"))]
    assert found.shape[1] == num_classes + 3
    assert torch.equal(found, table.T if form == "r3gan" else table)
    back = getattr(_SOURCES[form], f"{network}_state")(theirs)
    assert all(torch.equal(back[name], value) for name, value in ours.items())


@pytest.mark.parametrize(
    ("form", "network", "more"),
    [
        ("biggan-pytorch", "generator", ["generator.hierarchical=false", "generator.shared_embedding=false"]),
        ("pix2pix", "discriminator", ["discriminator.architecture=pixels"]),
    ],
)
def test_keys_that_nothing_reads_are_not_compared(form, network, more, tmp_path):
    run, _ = make_run(tmp_path, *SQUARE[form], *more)
    out = str(tmp_path / "x.pth")
    assert cli.main(["export", "--run", str(run), "--format", form, "--network", network, "--live", "--out", out]) == 0


UNPAIRED = game(Path("a"), Path("b"))


@pytest.mark.parametrize("direction, channels", [("a_to_b", (1, 3)), ("b_to_a", (1, 3)), ("b_to_a", (3, 3))])
def test_the_public_class_translates_as_cyclegan_does(direction, channels, tmp_path, capsys):
    """Of domains of different channels, which tell the generators apart."""
    overrides = ["objective.identity=0", f"data.input_channels={channels[0]}", f"data.image_channels={channels[1]}"]
    run, networks = make_run(tmp_path, *UNPAIRED, *overrides)
    out = str(tmp_path / "latest_net_G_A.pth")
    words = ["export", "--run", str(run), "--format", "pix2pix", "--direction", direction, "--out", out]
    assert cli.main(words) == 0
    source, target = channels if direction == "a_to_b" else channels[::-1]
    assert f"open: networks.ResnetGenerator({source}, {target}, 2, " in capsys.readouterr().out
    theirs = ResNet(1, 2, "instance", (source, target)).eval()
    theirs.load_state_dict(torch.load(out, weights_only=True))
    images = torch.randn(2, source, 32, 32, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    (both,) = networks["average"].eval().layers.values()
    ours = (both.to_b if direction == "a_to_b" else both.to_a)(images)
    assert_close(ours, theirs(images), rtol=0, atol=1e-6)
    assert cli.main(["import", "--from", "pix2pix", "--weights", out, "--out", str(tmp_path / "back")]) == 0


REFUSED = {
    "another family": (["r3gan"], [], "--format: 'r3gan' needs generator.family=r3gan (that project's class has no"),
    "grey images": (["biggan-pytorch"], ["data.resolution=32"], "needs data.image_channels=3"),
    "vectors": (["biggan-pytorch"], TINY_GAMES["biggan_light"], "needs labels that are classes"),
    "no square": (["stylegan2-ada"], [*TINY_GAMES["stylegan2"], "data.resolution=[16,32]"], "needs square images of a"),
    "other levels": (["gat"], TINY_GAMES["gat"], "needs generator.levels=4"),
    "no classes": (
        ["biggan-pytorch", "--network", "discriminator"],
        [*SQUARE["biggan-pytorch"], "data.num_classes=0"],
        "needs data.num_classes=1 or more",
    ),
    "another eps": (
        ["biggan-pytorch", "--no-standing"],
        [*SQUARE["biggan-pytorch"], "generator.output_norm_eps=0.01"],
        "needs generator.output_norm_eps=1e-05",
    ),
    "another D": (
        ["biggan-pytorch", "--network", "discriminator"],
        [*SQUARE["biggan-pytorch"], "discriminator.rectified_shortcut=true"],
        "needs discriminator.rectified_shortcut=False",
    ),
    "types": (["r3gan", "--dtype", "bf16"], [], "--dtype: cannot be combined with --format r3gan; remove the option"),
    "CycleGAN's D": (["pix2pix", "--network", "discriminator"], UNPAIRED, "needs the generator of family=cyclegan"),
    "a direction": (["safetensors", "--direction", "b_to_a"], UNPAIRED, "--direction: 'b_to_a' needs CycleGAN, and --"),
    "no CycleGAN": (["pix2pix", "--direction", "b_to_a"], SQUARE["pix2pix"], "--direction: 'b_to_a' needs CycleGAN"),
    "psi": (["stylegan2-ada", "--truncation", "0.7"], TINY_GAMES["stylegan2"], "--truncation: must be unset with"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_public_class_does_not_have_is_refused(case, tmp_path, monkeypatch, capsys):
    (form, *more), overrides, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    run, _ = make_run(tmp_path, *overrides)
    assert cli.main(["export", "--run", str(run), "--format", form, "--out", "x.pth", *more]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("bigsgan: ")]) == 1
    assert message in said[-1]
    assert not Path("x.pth").exists()

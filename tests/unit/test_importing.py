"""Published weights become runs: what `bigsgan import` writes makes the images that the reference made."""

import argparse
import errno
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import bigsgan
from bigsgan.checkpoint import saver
from bigsgan.cli import main
from bigsgan.config import plan_run, run_directory
from bigsgan.config.families.gat import GATDiscriminator
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models.gat import discriminator_layers
from bigsgan.models.network import LayerStack
from bigsgan.models.stylegan2_layers import SynthesisLayer
from bigsgan.weights import gat
from bigsgan.weights.sources import read_source
from tests.networks import part
from tests.snapshots import write_snapshot
from tests.unit.test_public_pix2pix import Patches, ResNet, UNet, filled

DATA = Path(__file__).resolve().parents[1] / "data"


def imported(tmp_path, source, generator, discriminator=None):
    """Import state dicts; return the exported generator, opened, whose numbers are those imported, bit for bit."""
    arguments = ["import", "--from", source, "--weights", str(tmp_path / "g.pth"), "--out", str(tmp_path / "run")]
    torch.save(generator, tmp_path / "g.pth")
    if discriminator is not None:
        save_file(discriminator, tmp_path / "d.safetensors")
        arguments += ["--discriminator", str(tmp_path / "d.safetensors")]
    assert main(arguments) == 0
    network = exported(tmp_path)
    ours = network.network.state_dict()
    for name, tensor in read_source(source, tmp_path / "g.pth", None).states["generator"].items():
        assert torch.equal(ours[name], tensor), name
    return network


def exported(tmp_path):
    file = str(tmp_path / "g.safetensors")
    assert main(["export", "--run", str(tmp_path / "run"), "--out", file, "--no-standing"]) == 0
    return bigsgan.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["biggan", "biggan_deep"])
def test_biggan_pytorch(tmp_path, family):
    record = load_file(DATA / f"biggan_pytorch_{family}.safetensors")
    g = imported(tmp_path, "biggan-pytorch", part(record, "generator/"), part(record, "discriminator/"))
    with torch.no_grad():
        torch.testing.assert_close(g(record["latents"], record["labels"]), record["images"], atol=1e-4, rtol=0)
    file = str(tmp_path / "d.exported.safetensors")
    assert main(["export", "--run", str(tmp_path / "run"), "--network", "discriminator", "--out", file]) == 0
    with torch.no_grad():
        logits = bigsgan.load(file)(record["images"], record["labels"])
    torch.testing.assert_close(logits, record["logits"].flatten(), atol=1e-4, rtol=1e-4)


def test_r3gan(tmp_path):
    record = load_file(DATA / "r3gan_conditional.safetensors")
    g = imported(tmp_path, "r3gan", part(record, "generator."), part(record, "discriminator."))
    with torch.no_grad():
        images = g(record["io.latents"], record["io.labels"])
    torch.testing.assert_close(images, record["io.images"], atol=1e-4, rtol=1e-4)


def test_gat(tmp_path):
    record = load_file(DATA / "gat_patch2.safetensors")
    g = imported(tmp_path, "gat", part(record, "G."), part(record, "D."))
    with torch.no_grad():
        images = g(record["z"], record["y"])
    torch.testing.assert_close(images, record["made"][:, -3:], atol=1e-5, rtol=1e-5)  # of four images the last


def test_a_gat_checkpoint(tmp_path):
    record, run = load_file(DATA / "gat_patch2.safetensors"), tmp_path / "run"
    ema = {name: 2 * value for name, value in part(record, "G.").items()}
    networks = {"generator": part(record, "G."), "discriminator": part(record, "D."), "ema": ema}
    others = {"optG": {"state": {}}, "args": argparse.Namespace(model="GAT-S/2"), "steps": 9}
    torch.save({**networks, **others}, tmp_path / "x.pt")
    assert main(["import", "--from", "gat", "--weights", str(tmp_path / "x.pt"), "--out", str(run)]) == 0
    found = exported(tmp_path).network.state_dict()["layers.1.attention.qkv.weight"]
    assert torch.equal(found, 2 * record["G.blocks.0.attn.qkv.weight"])
    recipe = read_saved_recipe(run)
    assert (recipe.generator.family, recipe.generator.depth, recipe.generator.patch) == ("gat", 4, 2)


def gat_run(tmp_path, weights, discriminator=None):
    """The recipe of an import of GAT's generator."""
    torch.save(weights, tmp_path / "g.pt")
    arguments = ["--from", "gat", "--weights", str(tmp_path / "g.pt"), "--out", str(tmp_path / "run")]
    if discriminator is not None:
        torch.save(discriminator, tmp_path / "d.pt")
        arguments += ["--discriminator", str(tmp_path / "d.pt")]
    assert main(["import", *arguments]) == 0
    return read_saved_recipe(tmp_path / "run")


@pytest.mark.parametrize("whole", [True, False])
def test_a_gat_trains_on_in_the_type_of_its_recipe(tmp_path, whole, capsys):
    """That of gat_b, whose settings an import takes: bf16 products, by which a finite difference's step is chosen."""
    record = load_file(DATA / "gat_patch2.safetensors")
    recipe = gat_run(tmp_path, part(record, "G."), part(record, "D.") if whole else None)
    assert (recipe.generator.bf16, recipe.discriminator.bf16) == (True, True)
    assert plan_run(recipe, 1, tmp_path / "run").objective.r1.sigma == 0.1
    told = capsys.readouterr().out
    assert "generator.bf16=true" in told
    assert "discriminator.bf16=true" in told


def test_a_gat_without_a_discriminator_gets_one_of_its_size(tmp_path):
    recipe = gat_run(tmp_path, part(load_file(DATA / "gat_patch4.safetensors"), "G."))
    g, d = recipe.generator, recipe.discriminator
    assert (d.depth, d.width, d.heads, d.patch) == (g.depth, g.width, g.heads, g.patch)
    assert (d.width, d.patch) != (768, 2)  # of a section that says nothing


@pytest.mark.parametrize("whole", [True, False])
def test_a_gat_of_two_levels(tmp_path, whole):
    record = load_file(DATA / "gat_patch2.safetensors")
    of_two = {n: v for n, v in part(record, "G.").items() if not re.match(r"final_layers\.[23]\.", n)}
    d = part(record, "D.")
    d["x_embedder.proj.weight"] = d["x_embedder.proj.weight"][:, : 2 * 3].clone()
    found = gat_run(tmp_path, of_two, d if whole else None)
    assert (found.generator.levels, found.discriminator.levels) == (2, 2)


def test_a_gats_discriminator_may_have_any_depth(tmp_path):
    """One of three blocks is that of four whose last block adds nothing."""
    record = load_file(DATA / "gat_patch2.safetensors")
    of_four = part(record, "D.")
    of_three = {name: value for name, value in of_four.items() if not name.startswith("blocks.3.")}
    assert gat_run(tmp_path, part(record, "G."), of_three).discriminator.depth == 3
    file = str(tmp_path / "d.exported.safetensors")
    assert main(["export", "--run", str(tmp_path / "run"), "--network", "discriminator", "--out", file]) == 0
    inputs = record["made"], record["y"], torch.arange(len(record["y"]))
    nothing = {name: torch.zeros_like(of_four[name]) for name in ("blocks.3.ls_attn", "blocks.3.ls_mlp")}
    section, data = gat.discriminator_section(of_four), gat.data_section(part(record, "G."))
    network = LayerStack(discriminator_layers(GATDiscriminator(**section), Size.of(data["resolution"] // 8), 3, 3))
    network.load_state_dict(gat.discriminator_state(of_four | nothing))
    with torch.no_grad():
        torch.testing.assert_close(bigsgan.load(file)(*inputs), network.eval()(*inputs), atol=1e-6, rtol=1e-5)


def test_stylegan2(tmp_path):
    record = load_file(DATA / "stylegan2" / "generator_unconditional.safetensors")
    g = imported(tmp_path, "stylegan2-ada", part(record, "state."))
    for layer in g.modules():
        if isinstance(layer, SynthesisLayer):
            layer.noise_mode = "const"
    with torch.no_grad():
        torch.testing.assert_close(g(record["latents"], record["labels"]), record["const"], atol=1e-4, rtol=0)


def test_a_stylegan_pickle(tmp_path):
    run, snapshot = tmp_path / "run", str(DATA / "stylegan2" / "snapshot.pkl")
    assert main(["import", "--from", "stylegan2-ada", "--weights", snapshot, "--out", str(run)]) == 0
    ours, theirs = exported(tmp_path).network.state_dict(), load_file(DATA / "stylegan2" / "snapshot.safetensors")
    assert torch.equal(ours["layers.0.w_avg"], theirs["G_ema.mapping.w_avg"])
    assert torch.equal(ours["layers.1.const"], theirs["G_ema.synthesis.b4.const"])


def test_pix2pix_without_a_discriminator(tmp_path):
    theirs = filled(UNet(6, 2, "batch")).float().eval()
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    g = imported(tmp_path, "pix2pix", theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(g(images), theirs(images), atol=1e-5, rtol=1e-5)
    assert (g.recipe.data.resolution, g.recipe.data.crop_from) == (Size.of(64), Size.of(71))  # 64 * 286 / 256


def test_it_is_said_whether_there_is_an_ema(tmp_path, capsys):
    write_snapshot(tmp_path / "x.pkl")
    torch.save(UNet(5, 2, "batch").state_dict(), tmp_path / "g.pth")
    for source, file, said in (
        ("stylegan2-ada", "x.pkl", "counted from 0; the EMA is kept"),
        ("pix2pix", "g.pth", "counted from 0; of one generator, with which the EMA begins"),
    ):
        arguments = ["--weights", str(tmp_path / file), "--out", str(tmp_path / source)]
        assert main(["import", "--from", source, *arguments]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("state:")]
        assert line.endswith(said)


def assumed(text):
    return " ".join(text.partition("assumed:")[2].partition("state:")[0].split())


def test_a_u_nets_dropout_is_assumed_unless_its_options_are_there(tmp_path, capsys):
    """It moves no number, so that the file of the weights does not tell it."""
    torch.save(UNet(5, 2, "batch").state_dict(), tmp_path / "g.pth")
    torch.save(ResNet(6, 2, "batch").state_dict(), tmp_path / "resnet.pth")
    for file, options, said in (
        ("g.pth", False, "as nothing in the files tells it: generator.dropout=true"),
        ("g.pth", True, ""),
        ("resnet.pth", False, ""),
    ):
        if options:
            (tmp_path / "train_opt.txt").write_text("model: pix2pix\nnetG: unet_32\nno_dropout: True\n")
        run = tmp_path / f"{file}{options}"
        assert main(["import", "--from", "pix2pix", "--weights", str(tmp_path / file), "--out", str(run)]) == 0
        (tmp_path / "train_opt.txt").unlink(missing_ok=True)
        assert assumed(capsys.readouterr().out) == said
        assert read_saved_recipe(run).generator.dropout is (file == "g.pth" and not options)


@pytest.mark.slow
def test_what_a_state_dict_of_biggan_does_not_tell_is_assumed(tmp_path, capsys):
    record = load_file(DATA / "biggan_pytorch_biggan.safetensors")
    state = part(record, "generator/")
    torch.save({name.replace(".stored_", ".bn.stored_"): value for name, value in state.items()}, tmp_path / "my.pth")
    torch.save(state, tmp_path / "g.pth")
    for file, more, said in (
        ("g.pth", [], "as nothing in the files tells it: generator.norm_eps=1e-05 norm_style=bn"),
        ("g.pth", ["--bn-eps", "0.0001"], "as nothing in the files tells it: norm_style=bn"),
        ("my.pth", [], "as nothing in the files tells it: generator.norm_eps=1e-05"),  # with mybn it has no effect
    ):
        arguments = ["--weights", str(tmp_path / file), "--out", str(tmp_path / f"run{len(said)}"), *more]
        assert main(["import", "--from", "biggan-pytorch", *arguments]) == 0
        assert assumed(capsys.readouterr().out) == said


def test_the_types_of_r3gans_stages_are_assumed_for_a_state_dict(tmp_path, capsys):
    record = load_file(DATA / "r3gan_conditional.safetensors")
    imported(tmp_path, "r3gan", part(record, "generator."), part(record, "discriminator."))
    keys = "generator.bf16_stages=0 discriminator.bf16_stages=0"
    said = capsys.readouterr().out
    assert assumed(said) == f"as nothing in the files tells it: {keys}"
    (resume,) = [line for line in said.splitlines() if line.startswith("resume:")]
    assert resume.endswith("config.yaml data.kind=folder data.dataset=null data.root=...")  # not torchvision's


@pytest.mark.parametrize("source, clamp", [("studiogan", "null"), ("stylegan2-ada", "256.0")])
def test_it_is_said_what_nothing_tells(tmp_path, capsys, source, clamp):
    record = load_file(DATA / "stylegan2" / "generator_unconditional.safetensors")
    imported(tmp_path, source, part(record, "state."))
    keys = f"generator.conv_clamp={clamp} generator.half_resolutions=0 generator.mapping_lr_multiplier=0.01"
    keys += " generator.relu=[]" if source == "stylegan2-ada" else ""  # StudioGAN has no other activation
    assert assumed(capsys.readouterr().out) == f"as nothing in the files tells it: {keys} generator.w_avg_beta=0.995"


@pytest.mark.slow
def test_an_imported_run_is_sampled(tmp_path):
    record = load_file(DATA / "biggan_pytorch_biggan.safetensors")
    imported(tmp_path, "biggan-pytorch", part(record, "generator/"))
    sheet, run = str(tmp_path / "sheet.png"), str(tmp_path / "run")
    assert main(["sample", "--run", run, "--num", "6", "--out", sheet]) == 0
    assert Image.open(sheet).size == (3 * 66 + 2, 2 * 66 + 2)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("file", ["g.pth", "d.pth"])
def test_weights_that_are_not_finite_are_refused(tmp_path, capsys, file):
    states = {"g.pth": UNet(5, 2, "batch").state_dict(), "d.pth": Patches(3, 2, "batch").state_dict()}
    states[file]["model.model.0.weight" if file == "g.pth" else "model.0.weight"][1, 0, 0, 0] = float("nan")
    for name, state in states.items():
        torch.save(state, tmp_path / name)
    files = ["--weights", str(tmp_path / "g.pth"), "--discriminator", str(tmp_path / "d.pth")]
    assert main(["import", "--from", "pix2pix", *files, "--out", str(tmp_path / "run")]) == 2
    option, network = ("--weights", "generator") if file == "g.pth" else ("--discriminator", "discriminator")
    said = f"{option}: '{tmp_path / file}' contains Inf or NaN (layers.0.conv.weight of the {network}); give other"
    assert capsys.readouterr().err.startswith(f"bigsgan: {said}")
    assert not (tmp_path / "run").exists()


def test_shapes_are_compared_before_memory_is_taken(tmp_path, capsys):
    """A first weight of this width describes a network of half a terabyte."""
    state = UNet(5, 2, "batch").state_dict()
    torch.save(state | {"model.model.0.weight": torch.zeros(65536, 3, 4, 4)}, tmp_path / "g.pth")
    arguments = ["--weights", str(tmp_path / "g.pth"), "--out", str(tmp_path / "run")]
    assert main(["import", "--from", "pix2pix", *arguments]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: --weights: does not fit the generator's images and classes, or")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("failing", ["saver.save", "write_recipe"])
@pytest.mark.parametrize("there", [False, True], ids=["new", "there"])
def test_an_import_that_fails_leaves_nothing(tmp_path, monkeypatch, capsys, failing, there):
    """A recipe without the weights would train from random ones."""

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(*((saver, "write_tensors") if failing == "saver.save" else (run_directory, "dump_yaml")), fail)
    run = tmp_path / "run"
    if there:
        run.mkdir()
        (run / "notes.txt").write_text("mine")
    torch.save(UNet(5, 2, "batch").state_dict(), tmp_path / "g.pth")
    arguments = ["import", "--from", "pix2pix", "--weights", str(tmp_path / "g.pth"), "--out", str(run)]
    assert main(arguments) == 2
    assert str(run) in capsys.readouterr().err
    assert run.exists() == there
    assert not there or {path.name for path in run.iterdir() if not path.name.startswith("ds_")} == {"notes.txt"}
    monkeypatch.undo()
    assert main(arguments) == 0


def test_weights_of_another_source_are_refused(tmp_path, capsys):
    torch.save({"layer.weight": torch.zeros(3)}, tmp_path / "g.pth")
    for source in ("biggan-pytorch", "stylegan2-ada", "r3gan", "pix2pix"):
        arguments = ["--weights", str(tmp_path / "g.pth"), "--out", str(tmp_path / "run")]
        assert main(["import", "--from", source, *arguments]) == 2
        assert capsys.readouterr().err.startswith("bigsgan: weights:")


def test_a_file_that_was_not_exported_is_no_network(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(UserError, match=r"must be an exported network: KeyError: 'network'"):
        bigsgan.load(tmp_path / "x.safetensors")

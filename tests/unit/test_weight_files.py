"""What files of weights may hold around a state dict, and what is refused in one line."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bigsgan.cli import main
from bigsgan.errors import UserError
from bigsgan.metrics.weight_files import load_weights
from bigsgan.weights.sources import read_source
from tests.unit.test_importing import DATA, Malicious, exported, part
from tests.unit.test_public_biggans import IMAGES, LABELS, LATENTS, Public, studio_discriminator, studio_generator

SOURCES = {
    "biggan-pytorch": ("biggan_pytorch_biggan", "generator/"),
    "r3gan": ("r3gan_conditional", "generator."),
    "stylegan2-ada": ("stylegan2/generator", "state."),
}


def wrapped(state, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("source", SOURCES)
def test_what_was_around_a_network_leaves_its_names(tmp_path, source, prefix):
    file, beginning = SOURCES[source]
    state = part(load_file(DATA / f"{file}.safetensors"), beginning)
    torch.save(state, tmp_path / "plain.pth")
    torch.save({"state_dict": wrapped(state, prefix), "epoch": 3}, tmp_path / "wrapped.pth")
    plain, found = (read_source(source, tmp_path / f"{name}.pth", None) for name in ("plain", "wrapped"))
    assert (found.data, found.sections) == (plain.data, plain.sections)
    for name, tensor in plain.states["generator"].items():
        assert torch.equal(found.states["generator"][name], tensor)


def states_of(function, inputs):
    public = Public(studio=True)
    outputs = function(public, inputs, LABELS)
    return {name: tensor.detach().float() for name, tensor in public.state.items()}, outputs.detach()


def test_studiogans_files(tmp_path):
    """With what its trainer saves beside the networks: an optimizer, NumPy's numbers, batch norm's counters."""
    generator, images = states_of(studio_generator, LATENTS)
    discriminator, _ = states_of(studio_discriminator, IMAGES)
    generator["bn4.num_batches_tracked"] = torch.tensor(7)
    adam = {"state": {0: {"step": 3, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
    beside = {"optimizer": adam, "step": 3, "best_fid": np.float64(9.5), "lecam_emas": {"D_real": 7777}, "aa_p": None}
    torch.save({"state_dict": wrapped(generator, "module.")}, tmp_path / "g.pth")
    torch.save({"state_dict": discriminator, **beside}, tmp_path / "d.pth")
    files = ["--weights", str(tmp_path / "g.pth"), "--discriminator", str(tmp_path / "d.pth")]
    assert main(["import", "--from", "studiogan", *files, "--out", str(tmp_path / "run")]) == 0
    with torch.no_grad():
        torch.testing.assert_close(exported(tmp_path).double()(LATENTS, LABELS), images, atol=1e-5, rtol=1e-5)


def test_studiogans_stylegan2(tmp_path):
    g = part(load_file(DATA / "stylegan2" / "generator.safetensors"), "state.")
    d = part(load_file(DATA / "stylegan2" / "discriminator.safetensors"), "state.")
    theirs = {name.replace("b4.out.", "linear1."): tensor for name, tensor in d.items()}
    assert theirs.keys() != d.keys()
    for name, state in (("g", g), ("d", d), ("studio_d", theirs)):
        torch.save({"state_dict": state}, tmp_path / f"{name}.pth")
    expected = read_source("stylegan2-ada", tmp_path / "g.pth", tmp_path / "d.pth")
    found = read_source("studiogan", tmp_path / "g.pth", tmp_path / "studio_d.pth")
    assert found.data == expected.data
    assert found.sections == {name: {**each, "conv_clamp": None} for name, each in expected.sections.items()}
    for network, state in expected.states.items():
        assert all(torch.equal(found.states[network][name], tensor) for name, tensor in state.items())


REFUSED = {
    "pytorch-pretrained-biggan": {"generator.gen_z.weight_orig": torch.zeros(3), "embeddings.weight": torch.zeros(3)},
    "rosinality/stylegan2-pytorch": {
        "g_ema": {"style.1.weight": torch.zeros(3)},
        "g": {"style.1.weight": torch.zeros(3)},
    },
    "lucidrains/stylegan2-pytorch": {"GAN": {"S.net.0.weight": torch.zeros(3)}, "version": "1.8"},
}


@pytest.mark.parametrize("project", REFUSED)
def test_other_formats_are_refused_by_name(tmp_path, project):
    torch.save(REFUSED[project], tmp_path / "g.pth")
    for source in ("stylegan2-ada", "biggan-pytorch", "studiogan"):
        with pytest.raises(UserError, match=rf"is of {project}.*, which is not supported"):
            read_source(source, tmp_path / "g.pth", None)


@pytest.mark.parametrize(
    "name, problem",
    [
        ("linear2.weight", "is of another conditioning than projection"),
        ("blocks.0.0.conv2d4.weight_orig", "is of a backbone big_resnet_deep"),
        ("linear0.weight_orig", "has no embedding of the classes"),  # of an unconditional G
        ("synthesis.L0_36_512.weight", "is of a StyleGAN3 generator"),
    ],
)
def test_studiogans_other_networks_are_refused_by_name(tmp_path, name, problem):
    torch.save({"state_dict": {name: torch.zeros(3)}}, tmp_path / "g.pth")
    with pytest.raises(UserError, match=problem):
        read_source("studiogan", tmp_path / "g.pth", None)


@pytest.mark.parametrize("how", ["pickle", "zip", "script", "damaged"])
def test_code_in_a_state_dict_is_refused_in_our_words(tmp_path, capsys, how):
    path = tmp_path / "g.pth"
    if how == "pickle":
        path.write_bytes(pickle.dumps({"x": Malicious(tmp_path / "ran")}, protocol=4))
    elif how == "zip":
        torch.save({"x": Malicious(tmp_path / "ran")}, path)
    elif how == "script":
        torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    else:
        torch.save({"x": torch.zeros(9)}, path)
        path.write_bytes(path.read_bytes()[:-60])
    assert main(["import", "--from", "biggan-pytorch", "--weights", str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "weights_only" not in error
    assert ("is damaged" if how == "damaged" else "contains code") in error
    assert not (tmp_path / "ran").exists()
    assert not Path(tmp_path / "run").exists()


class Stored:
    """A storage as the public pickles have them, whose bytes are a pickle of their own."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return torch.storage._load_from_bytes, (pickle.dumps(Malicious(self.path)),)


def test_code_in_a_storage_and_in_features_is_refused_in_our_words(tmp_path, capsys):
    path = tmp_path / "g.pkl"
    path.write_bytes(pickle.dumps({"G_ema": Stored(tmp_path / "ran")}))
    assert main(["import", "--from", "stylegan2-ada", "--weights", str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert (len(error.splitlines()), "weights_only" in error) == (1, False)
    assert "a storage is damaged or contains code" in error
    torch.save({"x": Malicious(tmp_path / "ran")}, path)
    with pytest.raises(UserError, match="it contains code, which is not executed"):
        load_weights(torch.nn.Linear(2, 2), path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_bn_eps_is_given_or_refused(tmp_path, capsys):
    state = part(load_file(DATA / "biggan_pytorch_biggan.safetensors"), "generator/")
    torch.save(state, tmp_path / "g.pth")
    assert read_source("biggan-pytorch", tmp_path / "g.pth", None, 1e-4).sections["generator"]["norm_eps"] == 1e-4
    arguments = ["import", "--weights", str(tmp_path / "g.pth"), "--out", str(tmp_path / "run"), "--bn-eps"]
    for source, value, problem in (
        ("biggan-pytorch", "0", "must be a positive number"),
        ("biggan-pytorch", "inf", "must be a positive number"),
        ("r3gan", "1e-4", "is not supported with --from r3gan"),
    ):
        assert main([*arguments, value, "--from", source]) == 2
        assert problem in capsys.readouterr().err
    assert main([*arguments, "1e-4", "--from", "biggan-pytorch"]) == 0
    assert exported(tmp_path).recipe.generator.norm_eps == 1e-4


@pytest.mark.parametrize("kind", ["cross_replica", "mybn"])
def test_other_batch_norms_of_biggan_pytorch(tmp_path, kind):
    state = part(load_file(DATA / "biggan_pytorch_biggan.safetensors"), "generator/")
    torch.save(state, tmp_path / "plain.pth")
    ends = ("running_mean", "running_var") if kind == "cross_replica" else ("stored_mean", "stored_var")
    renamed = {}
    for name, tensor in state.items():
        for theirs, end in zip(("stored_mean", "stored_var"), ends, strict=True):
            name = name.replace(f".{theirs}", f".bn.{end}")
        renamed[name] = tensor
    counter = "output_layer.0.bn.accumulation_counter"
    torch.save(renamed | ({counter: torch.zeros(1)} if kind == "mybn" else {}), tmp_path / "other.pth")
    plain, other = (read_source("biggan-pytorch", tmp_path / f"{n}.pth", None) for n in ("plain", "other"))
    for name, tensor in plain.states["generator"].items():
        assert torch.equal(other.states["generator"][name], tensor)
    torch.save(renamed | {counter: torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="is not 0: sums of standing statistics have replaced"):
        read_source("biggan-pytorch", tmp_path / "other.pth", None)


IN_ITS_PLACE = {
    "page": (b"\n<!DOCTYPE html><html><body>Sign in</body></html>", "is a web page; download the file itself"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n", "is a pointer of Git LFS, not"),
    "zeros": (bytes(4096), "begins with zeros only, as a download that was cut off; download it again"),
    "text": (b"not a pickle", "cannot be read: it is damaged, or of another format; give a state dict"),
}


@pytest.mark.parametrize("name", IN_ITS_PLACE)
def test_what_a_download_leaves_is_not_called_code(tmp_path, name):
    content, message = IN_ITS_PLACE[name]
    for file in ("x.pth", "x.pkl", "x.safetensors"):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_source("stylegan2-ada", tmp_path / file, None)
        assert "code" not in str(caught.value)
        if name != "text" or file != "x.pkl":
            assert str(caught.value).startswith(f"--weights: '{tmp_path / file}' {message}")
    with pytest.raises(UserError, match="s weights: it is damaged; download the file again"):
        load_weights(torch.nn.Linear(1, 1), tmp_path / "x.pth")


def test_an_export_of_this_package_needs_no_import(tmp_path):
    path = tmp_path / "g.safetensors"
    save_file({"x": torch.zeros(1)}, path, {"network": "generator", "recipe": "{}"})
    with pytest.raises(UserError, match=rf"is an export of bigsgan.*; begin a run with init_from.generator={path}"):
        read_source("stylegan2-ada", path, None)

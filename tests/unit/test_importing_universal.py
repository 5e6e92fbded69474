"""`bigsgan import --from universal`: networks that DeepSpeed trained, read back number by number."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from bigsgan import checkpoint, cli
from bigsgan.checkpoint import saved_buffers
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from tests.runs import make_run
from tests.tiny import tiny_recipe

ADAM = "optimizer.discriminator={kind: adam, lr: 1e-3}"
UNIVERSAL = ["import", "--from", "universal"]


def read(run: Path, entry: str, network: LayerStack, kinds: tuple[str, ...] = ("master",)) -> dict[str, torch.Tensor]:
    """All values of an entry of a run's only checkpoint, by kind and name."""
    found = checkpoint.find(run)
    assert found.nimg == 0
    saved = checkpoint.Reader(found).entry(entry)
    values = {}
    for kind in (*kinds, "buffer"):
        for name, like in (saved_buffers(network) if kind == "buffer" else dict(network.named_parameters())).items():
            flat = torch.full((like.numel(),), torch.nan, dtype=like.dtype)
            saved.read(kind, name, 0, flat)
            values[f"{kind}/{name}"] = flat.view(like.shape)
    values["step"] = torch.tensor(saved.numbers.get(checkpoint.STEP, -1.0))
    return values


def check(found: dict[str, torch.Tensor], network: LayerStack) -> None:
    """Compare parameters and buffers, bit for bit."""
    expected = {f"master/{name}": value for name, value in network.named_parameters()}
    expected |= {f"buffer/{name}": value for name, value in saved_buffers(network).items()}
    assert expected.keys() == {name for name in found if name.startswith(("master/", "buffer/"))}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.fixture
def discriminator(tmp_path, monkeypatch) -> LayerStack:
    monkeypatch.chdir(tmp_path)
    network = build_network(tiny_recipe(tmp_path), "discriminator")
    initialize(network, 3)
    return network


def write(network: LayerStack, tag: Path, *, flat: bool = False, prefix: str = "") -> dict[str, torch.Tensor]:
    """Write what DeepSpeed's ds_to_universal.py does, of ZeRO 3 if flat; return the moments by kind and name."""
    generator, moments = torch.Generator().manual_seed(1), {}
    for name, parameter in network.named_parameters():
        directory = tag / "zero" / f"{prefix}{name}"
        directory.mkdir(parents=True)
        values = {"fp32": parameter.detach().clone()}
        for kind in ("exp_avg", "exp_avg_sq"):
            values[kind] = moments[f"{kind}/{name}"] = torch.rand(parameter.shape, generator=generator)
        for kind, value in values.items():
            torch.save(value.flatten() if flat else {"cat_dim": 0, "param": value}, directory / f"{kind}.pt")
        if not flat:
            torch.save(torch.tensor(5.0), directory / "step.pt")
    state = {"optimizer_state_dict": {"state": {0: {"step": torch.tensor(5.0)}}, "param_groups": [{}]}}
    torch.save(state, tag / "zero" / "optimizer_state.pt")
    shapes = {f"{prefix}{name}": parameter.shape for name, parameter in network.named_parameters()}
    module = {f"{prefix}{name}": value for name, value in network.state_dict().items()}
    model = {"module": module, "param_shapes": [shapes], "epoch": 1}
    name = "zero_pp_rank_0_mp_rank_00_model_states.pt" if flat else "mp_rank_00_model_states.pt"
    torch.save(model, tag / name)
    return moments


@pytest.mark.parametrize("form", ["universal", "hub"])
def test_an_export_comes_back(tmp_path, monkeypatch, capsys, form):
    """Both networks; the recipe is in the files."""
    monkeypatch.chdir(tmp_path)
    run, networks = make_run(tmp_path)
    own = ["--no-standing"] if form != "universal" else []
    forms = {"generator": [form, *own], "discriminator": [form.replace("hub", "safetensors")]}
    paths = {name: f"{name}{'.safetensors' * ('safetensors' in forms[name])}" for name in forms}
    for name, (each, *more) in forms.items():
        arguments = ["export", "--run", str(run), "--format", each, "--live", "--network", name, "--out", paths[name]]
        assert cli.main([*arguments, *more]) == 0
    both = ["--weights", paths["generator"], "--discriminator", paths["discriminator"]]
    source = ["import", "--from", "universal" if form == "universal" else "bigsgan"]
    assert cli.main([*source, *both, "--out", "back", "total_nimg=96"]) == 0
    for entry, name in (("generator",) * 2, ("average", "generator"), ("discriminator",) * 2):
        check(read(Path("back"), entry, networks[name]), networks[name])
    swapped = ["--weights", paths["discriminator"], "--out", "other"]
    assert cli.main([*source, *swapped]) == 2
    assert cli.main([*source, "--weights", str(run / "config.yaml"), "--out", "other"]) == 2
    assert not Path("other").exists()
    recipe = read_saved_recipe(Path("back"))
    assert (recipe.out, recipe.total_nimg) == ("back", 96)
    assert recipe.generator == tiny_recipe(tmp_path).generator
    assert "back: the discriminator has " in capsys.readouterr().out


@pytest.mark.parametrize("flat, prefix", [(False, ""), (True, "module.critic.")], ids=["ZeRO 1 and 2", "ZeRO 3"])
def test_a_discriminator_from_elsewhere_brings_adams_state(tmp_path, discriminator, capsys, flat, prefix):
    moments = write(discriminator, tmp_path / "theirs" / "global_step5", flat=flat, prefix=prefix)
    (tmp_path / "theirs" / "latest_universal").write_text("global_step5")
    assert cli.main([*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run", ADAM]) == 0
    found = read(Path("run"), "discriminator", discriminator, ("master", "exp_avg", "exp_avg_sq"))
    for name, value in moments.items():
        assert torch.equal(found.pop(name), value), name
    assert found.pop("step") == 5
    check(found, discriminator)
    assert checkpoint.find(Path("run")).entries == {"discriminator"}
    assert capsys.readouterr().out.splitlines()[:2] == [
        "run: the generator starts from random weights",
        f"run: the discriminator has {sum(t.numel() for t in discriminator.state_dict().values()):,} imported numbers; "
        "its Adam resumes after 5 updates",
    ]


def test_adams_state_is_of_no_use_to_another_optimizer(tmp_path, discriminator, capsys):
    """As training warns."""
    write(discriminator, tmp_path / "theirs")
    arguments = [*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run"]
    assert cli.main([*arguments, "optimizer.discriminator.kind=rmsprop"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith("its rmsprop starts from zero (the checkpoint's state is Adam's)")


def test_what_is_missing_besides_weights_starts_anew_and_is_said(tmp_path, discriminator, capsys):
    write(discriminator, tmp_path / "theirs")
    for path in (*tmp_path.glob("theirs/zero/*/exp_avg.pt"), tmp_path / "theirs" / "mp_rank_00_model_states.pt"):
        path.unlink()
    assert cli.main([*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run", ADAM]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    first = min(dict(discriminator.named_parameters()), key=list(dict(discriminator.named_parameters())).index)
    assert f"its Adam starts from zero (exp_avg of {first} is missing or of another shape); " in line
    assert line.endswith(f"{len(saved_buffers(discriminator))} buffers such as layers.0.conv1.u start anew")


def damage(name: str, tag: Path) -> None:
    weight = tag / "zero" / "layers.0.conv1.weight"
    if name == "lacks":
        shutil.rmtree(weight)
    elif name == "others":
        shutil.copytree(weight, tag / "zero" / "head.weight")
    elif name == "transposed":  # as flat values are, which do not tell
        value = torch.load(weight / "fp32.pt")["param"]
        torch.save(value.flatten(), weight / "fp32.pt")
        shape = torch.Size(reversed(value.shape))
        torch.save({"param_shapes": [{"layers.0.conv1.weight": shape}]}, tag / "mp_rank_00_model_states.pt")
    elif name == "infinite":
        torch.save({"param": torch.full((8, 1, 3, 3), torch.inf)}, weight / "fp32.pt")
    elif name == "integers":
        torch.save({"param": torch.ones((8, 1, 3, 3), dtype=torch.int64)}, weight / "fp32.pt")
    elif name == "code":
        torch.save(Path("x"), weight / "fp32.pt")
    elif name == "no tensor":
        torch.save({"param": "x"}, weight / "fp32.pt")
    elif name == "not universal":
        (tag / "zero").rename(tag / "zero_")
    elif name == "two tags":
        shutil.copytree(tag / "zero", tag / "a" / "zero")
        (tag / "zero").rename(tag / "b")
        (tag / "b").mkdir(exist_ok=True)
        shutil.copytree(tag / "a" / "zero", tag / "b" / "zero")


GIVE = "give the recipe of that network by --config"
REFUSED = {
    "lacks": f"'theirs' lacks layers.0.conv1.weight of the discriminator; {GIVE}",
    "others": f"'theirs' has head.weight, unlike the discriminator; {GIVE}",
    "transposed": "'theirs' has layers.0.conv1.weight of (3, 3, 1, 8), where the discriminator has (8, 1, 3, 3); "
    f"{GIVE}",
    "infinite": "'theirs' contains Inf or NaN (layers.0.conv1.weight of the discriminator); give an earlier",
    "code": "'theirs/zero/layers.0.conv1.weight/fp32.pt' contains code (pathlib.",
    "integers": "'theirs' has layers.0.conv1.weight of torch.int64, which is no weight; give another checkpoint",
    "no tensor": "'theirs' has no tensor for layers.0.conv1.weight; give another checkpoint",
    "not universal": "must be a universal checkpoint of DeepSpeed, got 'theirs' (it has no directory `zero`); ",
    "two tags": "must be a universal checkpoint of DeepSpeed, got 'theirs' (it has 2 of them and no ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_of_another_network_or_damaged(tmp_path, discriminator, capsys, name):
    write(discriminator, tmp_path / "theirs")
    damage(name, tmp_path / "theirs")
    assert cli.main([*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run"]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: --discriminator: {REFUSED[name]}")
    assert not Path("run").exists()


STORED = torch.zeros(8, 1, 3, 3)
FIRST = "layers.0.conv1.weight"


@pytest.mark.parametrize("num, told", [(75, True), (60, False)], ids=["with shapes", "without shapes"])
def test_flat_values_of_another_length(tmp_path, discriminator, capsys, num, told):
    write(discriminator, tmp_path / "theirs", flat=True)
    torch.save(torch.zeros(num), tmp_path / "theirs" / "zero" / FIRST / "fp32.pt")
    if not told:
        next((tmp_path / "theirs").glob("*_model_states.pt")).unlink()
    assert cli.main([*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run"]) == 2
    problem = f"'theirs' has {num} numbers of {FIRST}, where the discriminator has 72, (8, 1, 3, 3); give the recipe"
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("value", [STORED.to("meta"), STORED.to_sparse()])
def test_tensors_without_their_numbers(tmp_path, discriminator, capsys, value):
    write(discriminator, tmp_path / "theirs")
    torch.save({"param": value}, tmp_path / "theirs" / "zero" / FIRST / "exp_avg.pt")
    arguments = [*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", ADAM, "--out"]
    assert cli.main([*arguments, "run"]) == 0
    assert f"its Adam starts from zero (exp_avg of {FIRST} is missing or of another shape)" in capsys.readouterr().out
    torch.save({"param": value}, tmp_path / "theirs" / "zero" / FIRST / "fp32.pt")
    assert cli.main([*arguments, "other"]) == 2
    assert f"'theirs' has no tensor for {FIRST}; give another checkpoint" in capsys.readouterr().err


def test_what_else_a_trainer_has_added_is_passed_over(tmp_path, discriminator):
    write(discriminator, tmp_path / "theirs", flat=True)
    (path,) = (tmp_path / "theirs").glob("*_model_states.pt")
    more = {"param_shapes": [{FIRST: 5}], "module": {5: 1, (): 2}, "buffers": {None: 1}}
    torch.save(torch.load(path) | more, path)
    assert cli.main([*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run"]) == 0
    assert checkpoint.find(Path("run")).entries == {"discriminator"}


def test_a_run_without_a_generator_has_to_be_trained_before_it_makes_images(tmp_path, discriminator, capsys):
    write(discriminator, tmp_path / "theirs")
    assert cli.main([*UNIVERSAL, "--discriminator", "theirs", "--config", "tiny.yaml", "--out", "run"]) == 0
    assert cli.main(["sample", "--run", "run", "--out", "x.png"]) == 2
    assert "has no average, which this run's recipe needs; train the run first" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--discriminator", "theirs"], "--config: must be given (the checkpoint does not have it, as "),
        (["--config", "tiny.yaml"], "--discriminator: must be given, or --weights; give a network's universal"),
        (["--discriminator", "none", "--config", "tiny.yaml"], "--discriminator: 'none' cannot be read: No such file"),
        (["--weights", "theirs", "--config", "tiny.yaml"], "--weights: 'theirs' lacks layers."),
        (["--discriminator", "theirs", "--settings", "x"], "--settings: is not supported with --from universal"),
        (["--discriminator", "theirs", "--bn-eps", "1"], "--bn-eps: is not supported with --from universal"),
    ],
)
def test_options(tmp_path, discriminator, capsys, arguments, message):
    write(discriminator, tmp_path / "theirs")
    assert cli.main([*UNIVERSAL, "--out", "run", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {message}")


def test_other_sources_have_no_recipe_and_need_weights(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", "--from", "gat", "--out", "run"]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: --weights: must be given; ")
    assert cli.main(["import", "--from", "gat", "--weights", "x.pt", "--out", "run", "--config", "digits"]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: --config: is not supported with --from gat (its files tell")
    assert cli.main(["import", "--from", "gat", "--weights", "x.pt", "--out", "run", "generator.depth=4"]) == 2
    assert capsys.readouterr().err.startswith("bigsgan: generator.depth: is not supported with --from gat (its files")

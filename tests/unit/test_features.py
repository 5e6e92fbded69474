"""Networks that read a frozen program's feature maps: against torch's layers, their files, and what is refused."""

import math
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from bigsgan.cli import main
from bigsgan.config import plan_run
from bigsgan.config.run_directory import compare_recipes, flat, read_saved_recipe
from bigsgan.data.frozen import refuse_moving
from bigsgan.data.perceptual import check_program
from bigsgan.doctor.reference import Reference
from bigsgan.errors import UserError
from bigsgan.inference.graphs import write_graph
from bigsgan.inference.loading import load
from bigsgan.models import noise
from bigsgan.models.build import build_network, network_on_meta
from bigsgan.models.layers import SpectralLayer
from bigsgan.models.network import initialize
from bigsgan.plan import describe_networks
from bigsgan.planner import memory
from bigsgan.planner.activations import Traces
from bigsgan.planner.counting import count_layers, count_work
from bigsgan.training.rank_consistency import checked_frozen
from tests.features import decoded, judged
from tests.perceptual import Detached, TinyFeatures, write_program
from tests.runs import make_run
from tests.tiny import awake, both, stages, tiny_plan, tiny_recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
SHAPES = [(4, 8), (6, 4)]
"""Channels and side of each map."""
FLOP = [2 * 16 * 3 * 4 * 8**2 + 2 * 16 * 4 * 6 * 4**2, *(2 * (c * c * (1 + 3) + c) * side**2 for c, side in SHAPES)]
"""Of the program's convolutions, and of the three of each head."""
HELD = 4 * (16 * 3 * 4 + 4 + 16 * 4 * 6 + 6)


def drawn(*shape):
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(0)) - 1


def discriminator(tmp_path, **more):
    network = build_network(tiny_recipe(tmp_path, *judged(tmp_path, **more)), "discriminator")
    initialize(network, 0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.3 * drawn(*parameter.shape))
        for layer in network.modules():
            if isinstance(layer, SpectralLayer):  # as after many steps of power iteration
                left, _, right = torch.linalg.svd(layer.weight.flatten(1), full_matrices=False)
                layer.u.copy_(left[:, 0]), layer.v.copy_(right[0])
    return network


def by_torch(state, images, kernel, norm):
    """StyleGAN-T's heads of torch's own layers, behind the maps of the program."""
    logits = []
    for number, (h, (channels, _)) in enumerate(zip(TinyFeatures()(images.expand(-1, 3, -1, -1)), SHAPES, strict=True)):
        own = {name: value for name, value in state.items() if name.startswith(f"layers.{number + 1}.")}

        def convolved(x, name, size, out, own=own, channels=channels):
            layer = nn.Conv1d(channels, out, size, padding=size // 2, padding_mode="circular")
            weight, bias = (
                next((v for k, v in own.items() if k.endswith(f"{name}.{e}")), None) for e in ["weight", "bias"]
            )
            scaled = weight / torch.linalg.matrix_norm(weight.flatten(1), 2)
            layer.load_state_dict({"weight": scaled, "bias": torch.zeros(out) if bias is None else bias})
            return layer(x)

        def block(x, name, size, own=own, channels=channels):
            x = convolved(x, f"{name}.conv", size, channels)
            gain, bias = (next(v for k, v in own.items() if k.endswith(f"{name}.norm.{e}")) for e in ("weight", "bias"))
            if norm == "instance":
                return F.leaky_relu(F.instance_norm(x, weight=gain, bias=bias, eps=1e-6), 0.2)
            return F.leaky_relu(F.batch_norm(x, None, None, gain, bias, training=True, eps=1e-6), 0.2)

        x = block(h.flatten(2), "first", 1)
        x = (x + block(x, "second", kernel)) / 2**0.5
        logits.append(convolved(x, "last", 1, 1).flatten(1))
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize(
    "norm, kernel, suffix", [("instance", 9, ".pt"), pytest.param("batch", 3, ".pt2", marks=pytest.mark.slow)]
)
def test_heads_are_those_of_torch(tmp_path, norm, kernel, suffix):
    network, images = discriminator(tmp_path, suffix=suffix, norm=norm, kernel=kernel), drawn(3, 1, 16, 16)
    images.requires_grad_()
    logits = network(images, torch.zeros(3))
    assert logits.shape == (3, 8 * 8 + 4 * 4)
    expected = by_torch(network.state_dict(), images, kernel, norm)
    assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    slopes = [torch.autograd.grad(each.square().sum(), images)[0] for each in (logits, expected)]
    assert slopes[1].abs().mean() > 1e-3  # through the program
    assert_close(*slopes, rtol=1e-3, atol=1e-4)


def test_a_program_is_never_trained(tmp_path):
    """It is in no state, gets no gradient, and stays what it is, bit for bit."""
    network = network_on_meta(recipe := tiny_recipe(tmp_path, *judged(tmp_path)), "discriminator")
    frozen, *heads = network.layers.values()
    assert not frozen.state_dict()
    assert all(dict(head.named_parameters()) for head in heads)
    reference = Reference(recipe)
    before = {name: value.clone() for name, value in reference.d.state_dict().items()}
    reference.update(0)
    program = reference.d.layers["0"].program(torch.device("cpu"))
    assert all(torch.equal(*pair) for pair in zip(program.tensors, TinyFeatures().parameters(), strict=True))
    assert all(tensor.grad is None and not tensor.requires_grad for tensor in program.tensors)
    moved = [name for name, value in reference.d.state_dict().items() if not torch.equal(value, before[name])]
    assert {name.split(".")[1] for name in moved} == {"1", "2"}


def test_a_decoder_is_torchs_transformer(tmp_path):
    """Behind patches with the sines of their places, and a token of its own."""
    network = build_network(recipe := tiny_recipe(tmp_path, *decoded(tmp_path)), "generator")
    with awake():
        initialize(network, 0)
    own, images = dict(network.named_parameters()), drawn(3, 1, 16, 16)
    with torch.no_grad():
        for parameter in own.values():
            parameter.add_(0.2 * drawn(*parameter.shape))
        (h,) = TinyFeatures(num_maps=1)(images.expand(-1, 3, -1, -1))
    x = F.linear(h.flatten(2).mT, own["layers.1.linear.weight"], own["layers.1.linear.bias"])
    waves = [10_000 ** (-k / 4) for k in range(4)]
    places = [[f(p * w) for p in at for f in (math.sin, math.cos) for w in waves] for at in product(range(8), range(8))]
    places = [row[8:] + row[:8] for row in places]  # columns come first
    x = torch.cat([own["layers.1.token"].expand(3, 1, -1), x + torch.tensor(places)], dim=1)
    names = {"self_attn.in_proj_": "attention.qkv.", "self_attn.out_proj.": "attention.out.", "norm1.": "norm1."}
    names |= {"linear1.": "perceptron.expand.", "linear2.": "perceptron.contract.", "norm2.": "norm2."}
    for number in (2, 3):
        options = {"activation": F.gelu, "layer_norm_eps": 1e-6, "batch_first": True, "norm_first": True}
        block = nn.TransformerEncoderLayer(16, 2, 24, 0.0, **options)
        parts = [(f"{a}{e}", f"layers.{number}.{b}{e}") for a, b in names.items() for e in ("weight", "bias")]
        block.load_state_dict({theirs: own[ours] for theirs, ours in parts})
        x = block(x)
    weight, bias, *linear = (value for name, value in own.items() if name.startswith("layers.4."))
    patches = F.linear(F.layer_norm(x[:, 1:], (16,), weight, bias, 1e-6), *linear).view(3, 8, 8, 2, 2)
    expected = patches.transpose(2, 3).reshape(3, 1, 16, 16)
    seeds = torch.arange(3)
    assert_close(network.eval()(images, torch.zeros(3), seeds), expected, rtol=1e-4, atol=1e-4)

    noisy = network.train().layers["0"](images, torch.zeros(3), seeds)[0] - h
    assert_close(noisy, recipe.generator.noise * noise.uniform(seeds, 0, (1, 1, 1)) * noise.normal(seeds, 1, (4, 8, 8)))
    assert 0.05 < noisy.std() < recipe.generator.noise


@pytest.mark.slow
def test_what_a_program_costs(tmp_path):
    """Its operations in D's steps are those of forward passes, as nothing goes backward there."""
    plan = tiny_plan(tmp_path, 1, judged(tmp_path), both(0))
    assert count_layers(plan, "discriminator") == FLOP
    counted = count_work(plan)
    generator = counted["generator"]["forward_flop"]
    heads = 3 * 2 * sum(FLOP[1:]) + 2 * sum(FLOP[1:])
    assert counted["update_flop"] == 3 * generator + heads + 2 * FLOP[0] + 2 * FLOP[0]
    assert "its program" not in describe_networks(plan, counted)
    (near,) = memory.predict_each(plan, Traces())

    away = tiny_plan(tmp_path, 1, [each.replace("d.pt", "away.pt") for each in judged(tmp_path)], both(0))
    counted = count_work(away)
    assert counted["update_flop"] == 3 * generator + heads
    text = (
        f"discriminator: neither operations nor memory of its program are counted, as there is no '{tmp_path}/away.pt'"
    )
    assert describe_networks(away, counted).splitlines()[-1] == text
    (far,) = memory.predict_each(away, Traces())
    assert near.buffers - far.buffers == HELD
    passes = [Traces().passes(each, "discriminator", "judge", 1, 8, (0, 1)) for each in (plan, away)]
    assert passes[0].backward.peak >= passes[1].backward.peak + 8 * 4 * 3 * 16**2  # a gradient in three colours


def refused(tmp_path, field, problem, *overrides):
    with pytest.raises(UserError, match=problem) as caught:
        checked_frozen(tiny_recipe(tmp_path, *overrides), {})
    assert caught.value.field == field
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "keys, field, problem",
    [
        ({"maps": "[[4,8,8]]"}, "maps", r"must be \[\[4, 8, 8\], \[6, 4, 4\]\] with the program '.*d\.pt', got"),
        ({"path": "away.pt"}, "path", r"'away\.pt' cannot be read: No such file"),
        ({"kernel": 4}, "kernel", r"must be odd and at most 16, the pixels of the smallest map, got 4; set .*=3"),
        ({"kernel": 17}, "kernel", r"must be odd and at most 16, .* got 17; set .*=15"),
        ({"maps": "[[4,8]]"}, "maps.0", "must have at least 3"),
    ],
)
def test_maps_that_do_not_fit(tmp_path, keys, field, problem):
    refused(tmp_path, f"discriminator.{field}", problem, *judged(tmp_path, **keys))


@pytest.mark.parametrize(
    "maps, problem",
    [
        ("[[4,8,8],[6,4,4]]", r"maps: must have one map, got \[\[4, 8, 8\], \[6, 4, 4\]\]"),
        ("[[4,8,4]]", "must have a pixel for each patch of images of 16x16, a square, got"),
        ("[[4,32,32]]", "must have a pixel for each patch of images of 16x16, a square, got"),
        ("[[5,8,8]]", r"must be \[\[4, 8, 8\]\] with the program '.*g\.pt', got"),
    ],
)
def test_maps_that_a_decoder_does_not_take(tmp_path, maps, problem):
    refused(tmp_path, "generator.maps", problem, *decoded(tmp_path, maps=maps))


@pytest.mark.parametrize(
    "content, problem",
    [
        (b"no program", "must be a TorchScript file"),
        (torch.jit.script(nn.Linear(3, 3)), r"fails at images \(2, 3, 16, 16\)"),
        (torch.jit.script(Detached()), "has no gradient at its images"),
    ],
    ids=["text", "fails", "no gradient"],
)
def test_files_that_are_no_programs_of_maps(tmp_path, content, problem):
    path = tmp_path / "bad.pt"
    path.write_bytes(content) if isinstance(content, bytes) else content.save(str(path))
    refused(tmp_path, "discriminator.path", problem, *judged(tmp_path, path=path))


@pytest.mark.parametrize(
    "overrides, field, problem",
    [
        (["data.image_channels=2", "data.kind=synthetic"], "data.image_channels", "must be 1 or 3 with discriminator"),
        (
            ["data.kind=unpaired_digits", "data.input_channels=1"],
            "discriminator.family",
            "a family for images of two dom",
        ),
        (["data.codec={kind: dct}"], "data.codec.kind", "must be pixels with discriminator.family=features"),
        (["data.num_classes=10", "generator={latent_size: 12}"], "data.num_classes", "must be 0 with discriminator"),
        (["objective=r1: {weight: 1, method: forward_mode}"], "objective.r1", "must be null with discriminator.family"),
        ([*stages(1, 2), "objective=r1: {weight: 1}"], "objective.r1", "=features in 2 stages"),
        (["engines.discriminator={compile: whole, cuda_graphs: true}"], "engines.discriminator.cuda_graphs", "must be"),
    ],
)
def test_what_does_not_go_with_a_program(tmp_path, overrides, field, problem):
    changed = dict(each.split("=", 1) for each in judged(tmp_path))
    for key, value in (each.split("=", 1) for each in overrides):
        changed[key] = f"{changed[key][:-1]}, {value}}}" if key == "objective" else value
    refused(tmp_path, field, problem, *(f"{key}={value}" for key, value in changed.items()))


def test_a_run_resumes_with_its_own_program_alone(tmp_path):
    """Wherever that is."""
    recipe = tiny_recipe(tmp_path, *judged(tmp_path))
    layout = checked_frozen(recipe, {})
    assert layout.keys() == {"discriminator"}
    shutil.copy(tmp_path / "d.pt", tmp_path / "moved.pt")
    moved = tiny_recipe(tmp_path, *judged(tmp_path, path=tmp_path / "moved.pt"))
    assert checked_frozen(moved, layout) == layout
    saved, given = (flat(each.model_dump(mode="json")) for each in (recipe, moved))
    assert [line.partition(":")[0] for line in compare_recipes(saved, given, "run", [])] == ["discriminator.path"]
    with pytest.raises(UserError, match=r"discriminator\.kernel: must be 3, as in the run"):
        compare_recipes(saved, given | {"discriminator.kernel": 5}, "run", ["discriminator.kernel"])
    other = write_program(tmp_path / "other.pt2")
    with pytest.raises(UserError, match=r"^discriminator\.path: .* is another file than the one that the run began"):
        checked_frozen(tiny_recipe(tmp_path, *judged(tmp_path, path=other)), layout)


def test_what_is_opened_has_its_own_program(tmp_path):
    """Of a run, and of an export, which say which one that is; a file that is away is told where it is read."""
    run, _ = make_run(tmp_path, *decoded(tmp_path))
    recipe = read_saved_recipe(run)
    digest = checked_frozen(recipe, {})["generator"]
    check_program(recipe.generator, digest)
    check_program(recipe.generator, None)
    out = tmp_path / "g.safetensors"
    assert main(["export", "--run", str(run), "--no-standing", "--out", str(out)]) == 0
    load(out)
    write_program(tmp_path / "other.pt2")
    shutil.copy(tmp_path / "other.pt2", recipe.generator.path)
    message = r"^generator\.path: .* is not the program that the network was trained with"
    with pytest.raises(UserError, match=message):
        check_program(recipe.generator, digest)
    with pytest.raises(UserError, match=message):
        load(out)
    Path(recipe.generator.path).unlink()
    check_program(recipe.generator, digest)


def test_a_program_of_constants_is_not_tried_without_numbers():
    refuse_moving([], lambda: [torch.zeros(2, device="meta")], "discriminator.path", "x.pt")
    values = iter([torch.zeros(1), torch.ones(1)])
    with pytest.raises(UserError, match="is not frozen"):
        refuse_moving([], lambda: [next(values)], "discriminator.path", "x.pt")


def test_a_plan_needs_no_program(tmp_path):
    recipe = tiny_recipe(tmp_path, *judged(tmp_path, path="away.pt"), *stages(1, 2), "accumulation=2")
    assert plan_run(recipe, 2).placement("discriminator").num_stages == 2


def test_a_decoder_needs_no_gradient_of_its_program(tmp_path):
    """And no graph holds it."""
    path = tmp_path / "detached.pt"
    torch.jit.script(Detached()).save(str(path))
    recipe = tiny_recipe(tmp_path, *decoded(tmp_path, path=path, maps="[[3,16,16]]"))
    assert checked_frozen(recipe, {}).keys() == {"generator"}
    with pytest.raises(UserError, match=r"--format: 'onnx' cannot hold a generator of family features \(its frozen"):
        write_graph(recipe, build_network(recipe, "generator"), "onnx", {}, tmp_path / "g.onnx")

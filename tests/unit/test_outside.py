"""Networks from outside the package: arguments, construction, and what is refused before a run begins."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bigsgan
from bigsgan import plugins
from bigsgan.cli import main
from bigsgan.config import plan_run
from bigsgan.config.recipe import parse_saved_recipe
from bigsgan.engines import build
from bigsgan.errors import UserError
from bigsgan.models.batch_norm import GlobalBatchNorm, global_batch_norms
from bigsgan.models.build import build_network, network_on_meta
from bigsgan.models.initial import with_memory
from bigsgan.models.layers import moving_state
from bigsgan.models.network import LayerStack, frozen_tensors, initialize
from bigsgan.models.outside_check import check_outside
from bigsgan.models.precision import avoid_fp16_on_a_cpu, compute_in_float32
from bigsgan.planner.counting import count_layers
from tests.outside import LAYERED, WHOLE
from tests.tiny import tiny_recipe


def recipe_with(directory, *overrides, generator="tests.outside:Generator", arguments=None):
    section = {"family": generator, "latent_size": 12, "arguments": arguments or {}}
    return tiny_recipe(directory, *WHOLE[1:], f"generator={json.dumps(section)}", *overrides)


def here(name):
    return f"{__name__}:{name}"


def refused(directory, **changes):
    with pytest.raises(UserError) as caught:
        network_on_meta(recipe_with(directory, **changes), "generator")
    return str(caught.value)


def checked(directory, function, num_ranks=2, *overrides):
    """What the check says of a G."""
    with pytest.raises(UserError) as caught:
        check_outside(recipe_with(directory, *overrides, generator=here(function)), num_ranks)
    return str(caught.value)


def typed(latent_size: int, width: int, scale: float = 1.0, widths: tuple[int, ...] = (1, 2), norm: str | None = None):
    """A function with arguments of many types."""
    return nn.Linear(latent_size, width)


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({}, "generator.arguments.width: must be given (tests.unit.test_outside:typed needs it); add it to the recipe"),
        ({"width": 8, "colour": 8}, f"generator.arguments.colour: unknown key; the arguments of {here('typed')} are"),
        ({"width": "8"}, "generator.arguments.width: must be an integer, got '8'; write an integer such as 64"),
        ({"width": 8, "widths": [1, "2"]}, "generator.arguments.widths: must be an integer, got '2'; write an integer"),
        ({"width": 8, "norm": 3}, "generator.arguments.norm: must be a string, got 3; put the text in quotes"),
        ({"width": 8, "latent_size": 3}, "generator.arguments.latent_size: must be left out, got 3 (it follows from"),
    ],
)
def test_the_signature_is_the_section(tmp_path, arguments, told):
    assert refused(tmp_path, generator=here("typed"), arguments=arguments).startswith(told)


def test_arguments_that_fit(tmp_path):
    fitting = {"width": 8, "scale": 1, "widths": [1, 2], "norm": "batch"}
    recipe = recipe_with(tmp_path, generator=here("typed"), arguments=fitting)
    assert build_network(recipe, "generator").layers["0"].module.weight.shape == (8, 12)


@pytest.mark.parametrize(
    "name, told",
    [
        (here("raising"), f"generator.family: '{here('raising')}' fails as it is constructed: ValueError: not today"),
        (here("number"), "generator.family: must return a torch.nn.Module, or a list of functions that make its lay"),
        (here("built"), "generator.family: must return functions that make layers, but number 0"),
    ],
)
def test_what_cannot_be_called(tmp_path, name, told):
    assert refused(tmp_path, generator=name).startswith(told)


def raising():
    raise ValueError("not today")


def number():
    return 3


def built(latent_size):
    return [nn.Linear(latent_size, 3)]


def test_nothing_is_imported_because_a_file_names_it(tmp_path, monkeypatch):
    """Neither an export's header nor a checkpoint's manifest; a recipe of the user's does."""
    monkeypatch.setattr(plugins, "_given", set())
    tree = json.loads(json.dumps(recipe_with(tmp_path).model_dump()))
    monkeypatch.setattr(plugins, "_given", set())
    saved = parse_saved_recipe(tree)
    with pytest.raises(UserError, match=r"generator\.family: 'tests\.outside:Generator' is code that only a saved"):
        network_on_meta(saved, "generator")
    plugins.give("tests.outside:Generator")
    network_on_meta(saved, "generator")


def test_an_export_is_opened_where_its_family_is_named(tmp_path, monkeypatch):
    recipe = recipe_with(tmp_path)
    network = build_network(recipe, "generator")
    initialize(network, 3)
    path = tmp_path / "g.safetensors"
    save_file(dict(network.state_dict()), path, {"network": "generator", "recipe": json.dumps(recipe.model_dump())})
    monkeypatch.setattr(plugins, "_given", set())
    with pytest.raises(UserError, match=r"families=\['tests\.outside:Generator'\]"):
        bigsgan.load(path)
    opened = bigsgan.load(path, families=["tests.outside:Generator", "tests.outside:Discriminator"])
    z, y = torch.randn(3, 12), torch.tensor([0, 1, 2])
    torch.testing.assert_close(opened(z, y), network.eval()(z, y))
    assert bigsgan.load(path, families="tests.outside:Generator").recipe == recipe
    with pytest.raises(UserError, match=r"^families: 'tests.outside:Genrator' is not in tests.outside, .* Generator\?"):
        bigsgan.load(path, families=["tests.outside:Genrator"])


@pytest.mark.parametrize("network", ["generator", "discriminator"])
@pytest.mark.parametrize("game", [WHOLE, LAYERED])
def test_weights_follow_the_seed_alone(tmp_path, game, network):
    """On the meta device first, as engines build it, with other numbers drawn before, and layer by layer."""
    recipe = tiny_recipe(tmp_path, *game)
    one, other = build_network(recipe, network), network_on_meta(recipe, network)
    initialize(one, 5)
    torch.manual_seed(9)
    for number in reversed(range(len(other.layers))):
        initialize(other.part(number, number + 1).to_empty(device="cpu"), 5)
    values, again = (dict((*x.named_parameters(), *x.named_buffers())) for x in (one, other))
    assert values.keys() == again.keys()
    for name, value in values.items():
        assert torch.equal(value, again[name]), name
    initialize(other, 6)
    assert any(not torch.equal(value, again[name]) for name, value in values.items())


class Torchs(nn.Module):
    """Fills its weights as many public networks do."""

    def __init__(self, latent_size, image_channels, resolution, rate: float = 0.5):
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, rate, 3)]  # impossible on the meta device
        self.linear = nn.Linear(latent_size, image_channels * resolution**2)
        self.gain = nn.Parameter(torch.randn(1))
        self.register_buffer("table", torch.arange(3), persistent=False)
        self.constant, self.turns = torch.full((1,), 0.5), torch.polar(torch.ones(2), torch.arange(2.0))
        self.shape = image_channels, resolution, resolution
        nn.init.trunc_normal_(self.linear.weight, std=0.02)

    def forward(self, z, y):
        return self.gain * self.constant * self.linear(z).unflatten(1, self.shape)


def test_a_constructor_fills_its_own(tmp_path):
    recipe = recipe_with(tmp_path, generator=here("Torchs"))
    network = network_on_meta(recipe, "generator").to_empty(device="cpu")
    initialize(network, 5)
    module = network.layers["0"].module
    assert module.rates == [0, 0.25, 0.5]
    assert module.table.tolist() == [0, 1, 2]
    assert module.constant.tolist() == [0.5]
    assert module.turns.angle().tolist() == [0, 1]
    assert set(module.state_dict()) == {"linear.weight", "linear.bias", "gain"}
    assert 0.01 < module.linear.weight.std() < 0.03
    check_outside(recipe, 2)


class Drops(Torchs):
    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.inner = nn.Sequential(nn.Identity(), nn.Dropout(0.5))

    def forward(self, z, y):
        return super().forward(self.inner(z), y)


class Counts(Torchs):
    def forward(self, z, y):
        self.table += 1
        return super().forward(z, y)


class Tracks(Torchs):
    def forward(self, z, y):
        self.table += (1000 * z).detach().mean().long()
        return super().forward(z, y)


class CountsSamples(Torchs):
    def forward(self, z, y):
        self.table += len(z)
        return super().forward(z, y)


class Throws(Torchs):
    def forward(self, z, y):
        return super().forward(z + float(np.random.rand()), y)


class Meets(Torchs):
    def forward(self, z, y):
        return super().forward(z - z.mean(0), y)


class MeetsWhenTrained(Torchs):
    """Compares samples in training mode."""

    def forward(self, z, y):
        """Images."""
        return super().forward(z - z.mean(0) if self.training else z, y)


class MeetsBehindGate(Torchs):
    """Compares samples, times a gain that begins at 0."""

    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, z, y):
        """Images."""
        return super().forward(z + self.gate * z.mean(0), y)


class CountsCalls(Torchs):
    """Counts its calls, and keeps what it needs from the first."""

    calls, ones = 0, None

    def forward(self, z, y):
        """Images."""
        self.ones = torch.ones_like(z) if self.ones is None or len(self.ones) != len(z) else self.ones
        self.calls += 1
        return super().forward(z * self.ones, y)


class Normalizes(Torchs):
    """Normalizes a parameter in place."""

    def forward(self, z, y):
        """Images."""
        with torch.no_grad():
            self.gain.div_(self.gain.norm())
        return super().forward(z, y)


class Lists(nn.Linear):
    """Keeps a tensor in a list."""

    def __init__(self, latent_size):
        super().__init__(latent_size, latent_size)
        self.gains = [torch.ones(1)]

    def forward(self, z, y):
        """Images."""
        return super().forward(z * self.gains[0])


class Complex(Torchs):
    """Has complex numbers."""

    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.spectrum = nn.Parameter(torch.ones(3, dtype=torch.complex64))


class Infinite(Torchs):
    """Divides by 0."""

    def forward(self, z, y):
        """Images."""
        return super().forward(z, y) / 0


class Empty(Torchs):
    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.scale = nn.Parameter(torch.empty(3))


class Small(Torchs):
    def forward(self, z, y):
        return super().forward(z, y)[..., :8, :8]


@pytest.mark.parametrize(
    "function, found",
    [
        ("Drops", "layers.0.module.inner.1 (Dropout) draws random numbers"),
        ("Throws", "layers.0.module (Throws) draws random numbers"),
        ("Tracks", "layers.0.module.table changes"),
        ("CountsSamples", "layers.0.module.table changes"),
        ("Meets", "the samples of a batch meet in 0 (Meets)"),
        ("MeetsWhenTrained", "the samples of a batch meet in 0 (MeetsWhenTrained)"),
        ("MeetsBehindGate", "the samples of a batch meet in 0 (MeetsBehindGate)"),
        ("CountsCalls", "(layers.0.module.calls changes)"),
    ],
)
def test_what_no_other_layout_can_repeat(tmp_path, function, found):
    told = checked(tmp_path, function)
    assert told.startswith(
        f"generator.family: '{here(function)}' has results that depend on how ranks and micro-batches"
    )
    assert found in told
    assert told.endswith("correct it, or set generator.exact=false")
    assert found in checked(tmp_path, function, 1, "accumulation=2")
    assert found in checked(tmp_path, function, 1, "engines.generator.activation_checkpointing=true")
    check_outside(recipe_with(tmp_path, generator=here(function)), 1)
    check_outside(recipe_with(tmp_path, "generator.exact=false", generator=here(function)), 2)


@pytest.mark.parametrize(
    "override",
    ["accumulation=2", "engines.generator.activation_checkpointing=true", "engines.generator.pipeline_stages=2"],
)
def test_what_moves_alike_on_all_ranks_may_not_be_repeated(tmp_path, override):
    """As the vectors of torch's spectral norm."""
    check_outside(recipe_with(tmp_path, generator=here("Counts")), 2)
    assert "layers.0.module.table changes in each pass" in checked(tmp_path, "Counts", 1, override)
    with pytest.raises(UserError, match="changes in each pass"):
        check_outside(recipe_with(tmp_path, generator=here("Counts")), 1, repeated=["generator"])


@pytest.mark.parametrize(
    "function, told",
    [
        ("Empty", "generator.family: has a parameter or buffer layers.0.module.scale that lacks an initial value"),
        ("Small", "generator.family: must make images [4, 1, 16, 16] of 4 samples"),
        ("bare", "has no parameters to train"),
        ("Normalizes", "changes the parameter layers.0.module.gain of 0 (Normalizes) in its forward pass"),
        ("Lists", "register tensors that it keeps in lists or dictionaries as buffers"),
        ("Complex", "has complex numbers in layers.0.module.spectrum"),
        ("Infinite", "has numbers that are not finite in 0 (Infinite)"),
        (
            "lazy",
            "has a LazyBatchNorm1d, whose sizes torch learns from a first batch (1); give it sizes, as to BatchNorm1d",
        ),
        ("Misses", "cannot compute [4, 12], [4] (KeyError: 'no such'); correct it, or its arguments"),
        ("Ends", "cannot compute [4, 12], [4] (SystemExit: 3)"),
    ],
)
def test_what_cannot_be_trained(tmp_path, function, told):
    assert told in checked(tmp_path, function)


def bare():
    return nn.Identity()


def lazy(latent_size):
    """Leave a size to the first batch."""
    return nn.Sequential(nn.Linear(latent_size, 256), nn.LazyBatchNorm1d())


class Misses(Torchs):
    """Looks up what there is not."""

    def forward(self, z, y):
        """Raise."""
        raise KeyError("no such")


class Ends(Torchs):
    """Exits."""

    def forward(self, z, y):
        """Exit."""
        raise SystemExit(3)


def test_what_is_too_large_to_construct(tmp_path, monkeypatch):
    monkeypatch.setattr("bigsgan.models.outside_check.free_host_bytes", lambda: 1000)
    told = checked(tmp_path, "Torchs")
    assert "is too large to be constructed on this machine (its 1 ranks construct layer 0 with 26." in told
    assert "let the function return a list of functions that make smaller layers" in told


@pytest.mark.parametrize(
    "kind, shape", [(nn.BatchNorm1d, (6, 3)), (nn.BatchNorm1d, (6, 3, 5)), (nn.BatchNorm3d, (6, 3, 2, 2, 2))]
)
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_is_torchs(kind, shape, affine):
    torch.manual_seed(0)
    theirs = kind(3, eps=1e-3, momentum=0.3, affine=affine)
    if affine:
        nn.init.normal_(theirs.weight)
        nn.init.normal_(theirs.bias)
    holder = nn.Sequential(nn.Identity(), kind(3, eps=1e-3, momentum=0.3, affine=affine))
    holder[1].load_state_dict(theirs.state_dict())
    ours = global_batch_norms(holder)[1]
    assert isinstance(ours, GlobalBatchNorm)
    x = torch.randn(shape) * 3 + 1
    with moving_state([ours], True):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_half_precision_computes_in_both_types(tmp_path):
    """A float32 table beside bf16 weights, as many transformers have."""
    network = build_network(tiny_recipe(tmp_path, *WHOLE), "discriminator")
    initialize(network, 5)
    images, labels = torch.rand(4, 1, 16, 16), torch.arange(4)
    expected = network(images, labels)
    for parameter in network.parameters():
        parameter.data = parameter.data.bfloat16()
    found = network(images, labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    found.sum().backward()
    on_meta = network.to("meta")(images.to("meta"), labels.to("meta"))
    assert (on_meta.shape, on_meta.dtype) == (found.shape, torch.float32)


def test_forward_mode_needs_tangents(tmp_path):
    recipe = tiny_recipe(tmp_path, *LAYERED, "objective.r1={weight: 1}")
    check_outside(recipe, 2, forward_mode=["generator"])
    with pytest.raises(UserError, match=r"discriminator\.family: .* has operations that exact penalties in pipeline"):
        check_outside(recipe, 2, forward_mode=["discriminator"])


class ReadingValues(nn.Module):
    def __init__(self, latent_size):
        super().__init__()
        self.linear = nn.Linear(latent_size, 256)

    def forward(self, latents, labels):
        return self.linear(latents / latents.abs().max().item()).view(-1, 1, 16, 16)


def test_a_plan_needs_shapes_alone(tmp_path):
    recipe = recipe_with(tmp_path, generator=here("ReadingValues"))
    check_outside(recipe, 1)
    told = r"generator\.family: 'ReadingValues' cannot be computed from shapes alone.*item\(\) cannot be called on meta"
    with pytest.raises(UserError, match=told):
        count_layers(plan_run(recipe, 1), "generator")


def test_a_plan_recomputes_a_module(tmp_path):
    """torch ends a recomputation by an exception."""
    network = network_on_meta(tiny_recipe(tmp_path, *WHOLE), "discriminator")
    network.checkpointing = True
    network(torch.rand(4, 1, 16, 16, device="meta"), torch.arange(4, device="meta")).sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters())


class Maps(nn.Module):
    """Returns what ``kind`` says."""

    def __init__(self, image_channels, kind: str):
        super().__init__()
        self.layer, self.kind = nn.Conv2d(image_channels, 3, 4, stride=4), kind

    def forward(self, images, labels):
        h = self.layer(images)
        kinds = {"one": [h], "two": ([h[:, :1]], h.mean((2, 3))), "named": {"h": h}, "with labels": (h, labels)}
        return (kinds | {"of the batch": [h, h.mean()]})[self.kind]


@pytest.mark.parametrize("kind, sizes", [("one", (48,)), ("two", (16, 3))])
def test_maps_of_logits_are_joined(tmp_path, kind, sizes):
    section = json.dumps({"family": here("Maps"), "arguments": {"kind": kind}})
    network = build_network(tiny_recipe(tmp_path, f"discriminator={section}"), "discriminator")
    initialize(network, 5)
    images, labels = torch.rand(2, 1, 16, 16), torch.arange(2)
    logits, (layer,) = network(images, labels), network.layers.values()
    h = layer.module.layer(images)
    expected = h.flatten(1) if kind == "one" else torch.cat([h[:, 0].flatten(1), h.mean((2, 3))], dim=1)
    torch.testing.assert_close(logits, expected)
    assert layer.map_sizes == sizes
    torch.testing.assert_close(torch.compile(network, backend="eager", fullgraph=True)(images, labels), expected)


@pytest.mark.parametrize(
    "kind, told",
    [
        ("with labels", "must return one tensor of floats"),
        ("named", "it returns dict, not tensors of the batch"),
        ("of the batch", "it returns list, not tensors of the batch"),
    ],
)
def test_what_are_no_logits(tmp_path, kind, told):
    section = json.dumps({"family": here("Maps"), "arguments": {"kind": kind}})
    with pytest.raises(UserError) as caught:
        check_outside(tiny_recipe(tmp_path, f"discriminator={section}"), 1)
    assert told in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_can_be_compiled_whole(tmp_path, dtype):
    network = build_network(tiny_recipe(tmp_path, *WHOLE), "discriminator")
    initialize(network, 5)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    images, labels = torch.rand(4, 1, 16, 16), torch.arange(4)
    torch.testing.assert_close(compiled(images, labels), network(images, labels))


def stacked(latent_size, image_channels, resolution):
    """A ``LayerStack`` of torch's layers, with batch norm."""
    last = nn.Sequential(
        nn.Linear(8, image_channels * resolution**2), nn.Unflatten(1, (image_channels, resolution, -1))
    )
    return LayerStack([FirstOnly(nn.Linear(latent_size, 8)), nn.BatchNorm1d(8), last])


class FirstOnly(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, labels):
        return self.module(x)


def test_a_stack_of_torchs_layers(tmp_path):
    recipe = recipe_with(tmp_path, generator=here("stacked"))
    check_outside(recipe, 2)
    network = network_on_meta(recipe, "generator").to_empty(device="cpu")
    initialize(network, 5)
    assert isinstance(network.layers["1"].module, GlobalBatchNorm)
    assert network.layers["1"].module.weight.tolist() == [1] * 8
    assert network(torch.randn(4, 12), torch.arange(4)).shape == (4, 1, 16, 16)


class Weighted(Torchs):
    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.norm = nn.BatchNorm1d(latent_size)
        nn.init.constant_(self.norm.weight, 3)


def test_batch_norm_keeps_the_constructors_weights(tmp_path):
    network = network_on_meta(recipe_with(tmp_path, generator=here("Weighted")), "generator").to_empty(device="cpu")
    initialize(network, 5)
    norm = network.layers["0"].module.norm
    assert norm.weight.tolist() == [3] * 12
    assert norm.running_var.tolist() == [1] * 12


class Placed(Torchs):
    """Has an empty parameter, which tells its device."""

    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.place = nn.Parameter(torch.empty(0))


def test_an_empty_parameter_is_a_buffer(tmp_path):
    recipe = recipe_with(tmp_path, generator=here("Placed"))
    network = build_network(recipe, "generator")
    initialize(network, 5)
    assert "layers.0.module.place" in dict(network.named_buffers())
    check_outside(recipe, 2)


class Ties(Torchs):
    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.one, self.other = nn.Linear(latent_size, latent_size), nn.Linear(latent_size, latent_size)
        self.other.weight = self.one.weight

    def forward(self, z, y):
        return super().forward(self.other(self.one(z)), y)


def test_shared_weights_stay_shared(tmp_path):
    recipe = recipe_with(tmp_path, generator=here("Ties"))
    network = with_memory(network_on_meta(recipe, "generator"), "cpu")
    initialize(network, 5)
    module = network.layers["0"].module
    assert module.other.weight is module.one.weight
    assert sum(1 for _ in network.parameters()) == 6
    check_outside(recipe, 2)


class Normed(Torchs):
    """Keeps a weight that follows from two parameters as a plain attribute."""

    def __init__(self, latent_size, image_channels, resolution):
        super().__init__(latent_size, image_channels, resolution)
        self.linear = nn.utils.weight_norm(self.linear)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_torchs_older_weight_norm(tmp_path):
    recipe = recipe_with(tmp_path, generator=here("Normed"))
    network = copy.deepcopy(network_on_meta(recipe, "generator")).to_empty(device="cpu")  # as stages are measured
    initialize(network, 5)
    linear = network.layers["0"].module.linear
    torch.testing.assert_close(linear.weight_g, linear.weight_v.norm(dim=1, keepdim=True))
    assert set(dict(network.named_buffers())) == {f"layers.0.module.{name}" for name in ("table", "constant", "turns")}
    check_outside(recipe, 2)


@pytest.mark.parametrize("game, num", [(WHOLE, 0), ([], 1)])
def test_zero_3_tells_of_spectral_norm_where_there_is_some(tmp_path, caplog, game, num):
    plan = plan_run(tiny_recipe(tmp_path, *game, "engines.generator.ds_config=ds_configs/zero3.json"), 1)
    build._tell_of_spectral_norm(plan, "generator", network_on_meta(plan.recipe, "generator"))
    assert caplog.text.count("spectral norm keeps an unsharded copy") == num


def shares(latent_size, image_channels, resolution):
    """Layers that share a module."""
    shared = nn.Linear(12, 12)
    last = nn.Sequential(
        nn.Linear(12, image_channels * resolution**2), nn.Unflatten(1, (image_channels, resolution, -1))
    )
    return LayerStack([FirstOnly(shared), shared, last])


def test_layers_do_not_share_parameters(tmp_path):
    assert "has a parameter of layers 0 and 1: module.weight; let one layer hold" in checked(tmp_path, "shares")


def test_families_of_installed_packages(tmp_path, monkeypatch, capsys):
    """An entry point's name is a family, and `bigsgan plugins` lists it."""
    package = tmp_path / "somebody-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[bigsgan.families]\nsomebodys = tests.outside:Generator\n")
    monkeypatch.syspath_prepend(tmp_path)
    recipe = recipe_with(tmp_path, generator="somebodys")
    with pytest.raises(UserError, match=r"^generator.family: must be .* 'somebodys' or .*; did you mean somebodys\?"):
        recipe_with(tmp_path, generator="somebody")
    assert network_on_meta(recipe, "generator").layers["0"].module.side == 4
    assert main(["plugins"]) == 0
    assert capsys.readouterr().out.split() == [
        *("name", "kind", "stands", "for", "package", "version"),
        *("somebodys", "families", "tests.outside:Generator", "somebody", "1.0"),
    ]


class Plain(nn.Module):
    """Images of latents by one linear map."""

    def __init__(self, latent_size, resolution, image_channels):
        super().__init__()
        self.inner, self.shape = (
            nn.Linear(latent_size, image_channels * resolution**2),
            (image_channels, *[resolution] * 2),
        )

    def forward(self, latents, labels):
        return self.inner(latents).unflatten(1, self.shape)


NAMESAKES = {"segments": 4, "bf16": True, "half_type": torch.float16, "frozen_program": 7, "teacher": "mine"}


class Namesakes(Plain):
    """Has attributes of its own with names that the package's layers use."""

    def __init__(self, latent_size, resolution, image_channels):
        super().__init__(latent_size, resolution, image_channels)
        vars(self.inner).update(NAMESAKES, is_float32=True, fills_parts=False)

    def initialize(self):
        raise AssertionError("nobody calls it")


def test_attributes_with_names_of_the_package_stay_as_they_are(tmp_path):
    network = build_network(recipe_with(tmp_path, generator=here("Namesakes")), "generator")
    initialize(network, 5)
    network(torch.randn(4, 12), torch.arange(4), segments=2)
    compute_in_float32(network)
    avoid_fp16_on_a_cpu(network, False)
    (layer,) = network.layers.values()
    assert {name: vars(layer.module.inner)[name] for name in NAMESAKES} == NAMESAKES
    assert frozen_tensors(network) == []


class Detached(Plain):
    def forward(self, latents, labels):
        return super().forward(latents, labels).detach()


class OfLabels(nn.Module):
    """A D that does not look at the images."""

    def __init__(self, num_classes):
        super().__init__()
        self.table = nn.Embedding(num_classes, 1)

    def forward(self, images, labels):
        return self.table(labels)


def test_networks_without_gradients_are_refused(tmp_path):
    assert checked(tmp_path, "Detached", 1).startswith(
        f"generator.family: '{here('Detached')}' makes images without a gradient at its parameters"
    )
    recipe = tiny_recipe(tmp_path, f"discriminator={json.dumps({'family': here('OfLabels')})}")
    with pytest.raises(UserError, match="makes logits without a gradient at the images"):
        check_outside(recipe, 1)


class Experts(Plain):
    """Adds a map of its own to even classes, or a gradient of its images."""

    def __init__(self, latent_size, resolution, image_channels, takes_gradients: bool = False):
        super().__init__(latent_size, resolution, image_channels)
        self.expert, self.takes_gradients = nn.Linear(latent_size, latent_size), takes_gradients

    def forward(self, latents, labels):
        if self.takes_gradients:
            with torch.enable_grad():
                moved = latents.detach().requires_grad_()
                (grad,) = torch.autograd.grad(self.expert(moved).square().sum(), moved, create_graph=True)
            return super().forward(latents + grad, labels)
        even = (labels % 2 == 0).nonzero()[:, 0]
        added = latents.index_add(0, even, self.expert(latents[even])) if len(even) else latents
        return super().forward(added, labels)


@pytest.mark.parametrize(
    "takes_gradients, told",
    [
        (False, "cannot call other modules for other samples where ranks gather parameters together"),
        (True, "cannot take gradients in its forward pass where modules gather parameters"),
    ],
)
def test_modules_that_gather_are_called_for_all_samples(tmp_path, takes_gradients, told):
    recipe = recipe_with(tmp_path, generator=here("Experts"), arguments={"takes_gradients": takes_gradients})
    check_outside(recipe, 2)
    with pytest.raises(UserError, match=told):
        check_outside(recipe, 2, gathered=["generator"])
    if takes_gradients:
        with pytest.raises(UserError, match=told):
            check_outside(recipe, 1, hooked=["generator"])
    else:  # one rank has all parameters
        check_outside(recipe, 1, hooked=["generator"])


@pytest.mark.parametrize(
    "kind, told",
    [
        ("sparse", "has an Embedding with sparse gradients"),
        ("compiled", "has a module of torch.compile"),
        ("scripted", "has a module of torch.jit, which takes no hooks"),
    ],
)
def test_parts_that_no_engine_trains(tmp_path, kind, told):
    assert told in refused(tmp_path, generator=here("with_part"), arguments={"kind": kind})


def with_part(latent_size, kind: str):
    made = nn.Sequential(nn.Linear(latent_size, 3))
    parts = {
        "sparse": lambda: nn.Embedding(3, 4, sparse=True),
        "compiled": lambda: torch.compile(made),
        "scripted": lambda: torch.jit.script(made),
    }
    return nn.Sequential(made, parts[kind]())

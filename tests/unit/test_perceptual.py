"""Distances of G's images from targets: values and gradients by hand, the files of networks, and what is refused."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from torch.export import Dim
from torch.testing import assert_close

from bigsgan import plugins
from bigsgan.adversarial.terms import Own, Termed, build_terms, image_gradient
from bigsgan.adversarial.terms.own import check_adaptive_weight
from bigsgan.adversarial.terms.perceptual import PerceptualDistance, build_features
from bigsgan.adversarial.terms.reconstruction import reconstruction_terms
from bigsgan.cli import main
from bigsgan.config.objective import Objective
from bigsgan.doctor.distance import Distance
from bigsgan.errors import UserError
from bigsgan.models.build import network_on_meta
from bigsgan.models.network import LayerStack
from bigsgan.monitor import Statistics
from bigsgan.plan import describe_networks
from bigsgan.planner import memory
from bigsgan.planner.activations import Traces
from bigsgan.planner.counting import count_work, mean_flop
from bigsgan.planner.teaching import trace_program
from bigsgan.training.rank_consistency import checked_frozen
from tests.image_games import ADAPTIVE, NAMES
from tests.perceptual import CONVOLUTIONS, Detached, TinyFeatures, as_torchvision, random_vgg, write_program
from tests.tiny import TINY_GAMES, both, stages, tiny_plan, tiny_recipe

CPU = torch.device("cpu")
GAME = TINY_GAMES["pix2pix_resnet"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


def drawn(*shape, seed=0):
    return 2 * torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) - 1


def distance(tmp_path, path, *more):
    recipe = tiny_recipe(tmp_path, *GAME, f"objective.perceptual={{path: {path}, weight: 0.5}}", *more)
    return PerceptualDistance(recipe.objective.perceptual, build_features(recipe, CPU))


def by_hand(maps, heads):
    """Equation 1 of LPIPS, position by position."""
    total = 0
    for (ours, theirs), head in zip(maps, heads, strict=True):
        lengths = [(x * x).sum(dim=1, keepdim=True) ** 0.5 + 1e-10 for x in (ours, theirs)]
        apart = ours / lengths[0] - theirs / lengths[1]
        total = total + (head * apart * apart).sum() / (len(ours) * ours.shape[2] * ours.shape[3])
    return total


def vgg_maps(vgg, images):
    """In float32, as a rounding could move the kinks of ReLUs and poolings."""
    mean, deviation = (torch.tensor(x).view(3, 1, 1) for x in ([-0.030, -0.088, -0.188], [0.458, 0.448, 0.450]))
    h, maps = (torch.cat([images] * (3 // images.shape[1]), dim=1) - mean) / deviation, []
    for part, convolutions in CONVOLUTIONS.items():
        h = h if part == 1 else F.max_pool2d(h, 2)
        for number, _, _ in convolutions:
            weight, bias = (vgg[f"net.slice{part}.{number}.{name}"] for name in ("weight", "bias"))
            h = F.conv2d(h, weight, bias, padding=1).clamp(min=0)
        maps.append(h)
    return maps


@pytest.fixture(scope="module")
def weights():
    return random_vgg()


@pytest.fixture(scope="module")
def files(tmp_path_factory, weights):
    """Overrides of the same network in the forms of its files, by name."""
    folder, (vgg, heads) = tmp_path_factory.mktemp("vgg"), weights
    torch.save({**vgg, **heads, "scaling_layer.shift": torch.zeros(3)}, folder / "lpips.pth")
    save_file(as_torchvision(vgg), folder / "vgg16.safetensors")
    torch.save(heads, folder / "heads.pth", _use_new_zipfile_serialization=False)
    return {
        "lpips": (folder / "lpips.pth",),
        "torchvision": (folder / "vgg16.safetensors", f"objective.perceptual.heads={folder / 'heads.pth'}"),
    }


@pytest.mark.parametrize("name, channels", [pytest.param("lpips", 3, marks=pytest.mark.slow), ("torchvision", 1)])
def test_vgg_by_hand(tmp_path, weights, files, name, channels):
    vgg, heads = weights
    term = distance(tmp_path, *files[name])
    images, targets = drawn(2, channels, 32, 32).requires_grad_(), drawn(2, channels, 32, 32, seed=1)
    maps = [vgg_maps(vgg, each) for each in (images, targets)]
    expected = by_hand(zip(*maps, strict=True), heads.values())
    (gradient,) = torch.autograd.grad(0.5 * expected, images)
    statistics = Statistics(CPU)
    statistics.declare(*term.statistics)
    found = image_gradient([term], {"images": images, "real_images": targets}, statistics)
    assert statistics.reduce(lambda tensor: tensor)["loss/perceptual"] == pytest.approx(expected.item(), rel=1e-5)
    assert (found - gradient).norm() <= 1e-5 * gradient.norm()
    assert found.dtype == torch.float32


@pytest.mark.slow
def test_torchmetrics_agrees(tmp_path):
    """With the heads that it ships, and VGG-16 of random weights; it adds 1e-8 to squared norms."""
    lpips = pytest.importorskip("torchmetrics.functional.image.lpips")
    network = lpips._LPIPS(pretrained=True, net="vgg", pnet_rand=True, eval_mode=True)
    torch.save(network.state_dict(), tmp_path / "lpips.pth")
    images, targets = drawn(3, 3, 32, 32), drawn(3, 3, 32, 32, seed=1)
    with torch.no_grad():
        expected = network(images, targets).mean()
        assert_close(distance(tmp_path, tmp_path / "lpips.pth").value(images, targets), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
@pytest.mark.parametrize("channels", [1, 3])
def test_programs_by_hand(tmp_path, suffix, channels):
    term = distance(tmp_path, write_program(tmp_path / f"p{suffix}"))
    images, targets = drawn(4, channels, 16, 16).requires_grad_(), drawn(4, channels, 16, 16, seed=1)
    maps = [TinyFeatures()(torch.cat([each] * (3 // channels), dim=1)) for each in (images, targets)]
    expected = by_hand(zip(*maps, strict=True), [1, 1])
    assert_close(term.value(images, targets), expected)
    assert_close(*(torch.autograd.grad(each, images)[0] for each in (term.value(images, targets), expected)))


def test_only_images_get_gradients(tmp_path):
    term = distance(tmp_path, write_program(tmp_path / "p.pt"))
    assert not any(each.requires_grad for each in term._features.tensors)
    assert not term.value(drawn(2, 3, 16, 16), drawn(2, 3, 16, 16, seed=1).requires_grad_()).requires_grad


class Flat(nn.Module):
    """Features that are 0 at some pixels."""

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [images.clamp(min=0)]


def test_gradients_where_features_are_zero(tmp_path):
    torch.jit.script(Flat()).save(str(tmp_path / "flat.pt"))
    images = drawn(2, 3, 16, 16)
    images[:, :, :8] = -1
    images.requires_grad_()
    value = distance(tmp_path, tmp_path / "flat.pt").value(images, drawn(2, 3, 16, 16, seed=1))
    (gradient,) = torch.autograd.grad(value, images)
    assert gradient.isfinite().all()
    assert gradient[:, :, :8].abs().max() == 0 < gradient[:, :, 8:].abs().max()


def test_squares_and_huber_by_hand():
    images, targets = torch.tensor([[0.0, 2.0]]).view(1, 1, 1, 2), torch.tensor([[0.5, -1.0]]).view(1, 1, 1, 2)
    l1, l2, huber = reconstruction_terms(Objective(l1=1.0, l2=3.0, huber={"weight": 2.0, "delta": 0.75}))
    assert [each.name for each in (l1, l2, huber)] == ["l1", "l2", "huber"]
    assert l1.value(images, targets) == (0.5 + 3) / 2
    assert l2.value(images, targets) == (0.25 + 9) / 2
    assert huber.value(images, targets) == (0.5**2 / 2 + 0.75 * (3 - 0.375)) / 2
    assert (l1.factor, l2.factor, huber.factor) == (1, 3, 2)
    assert reconstruction_terms(Objective()) == []


def test_the_reference_has_the_same_distances(tmp_path, files):
    path, *heads = files["torchvision"]
    recipe = tiny_recipe(tmp_path, *GAME, f"objective.perceptual={{path: {path}, weight: 0.5}}", *heads,
                         "objective.l2=3", "objective.huber={weight: 2, delta: 0.4}")  # fmt: skip
    images, targets = drawn(2, 3, 16, 16).requires_grad_(), drawn(2, 3, 16, 16, seed=1)
    terms = [*reconstruction_terms(recipe.objective), distance(tmp_path, path, *heads)]
    assert [term.name for term in terms] == ["l1", "l2", "huber", "perceptual"]
    ours = sum(term.factor * term.value(images, targets) for term in terms)
    theirs = Distance(recipe, CPU)(images, targets)
    assert_close(ours, theirs)
    assert_close(*(torch.autograd.grad(each, images)[0] for each in (ours, theirs)))


class One(nn.Module):
    """One map instead of a tuple."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images


class Vectors(nn.Module):
    """Not a map for each image."""

    def forward(self, images: torch.Tensor) -> list[torch.Tensor]:
        return [images.flatten(1)]


class Last(nn.Module):
    """A layer on the last map."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, maps: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (self.layer(maps[-1]),)


BAD = {
    "missing": (None, "path", "cannot be read: No such file"),
    "text": (b"no network", "path", "must be a state dict of tensors"),
    "a cut archive": (b"PK\x03\x04 no network", "path", "must be a state dict of tensors"),
    "no export": (".pt2", "path", "must be a program of torch.export"),
    "other tensors": ({"weight": torch.zeros(2)}, "path", "must be LPIPS or VGG-16"),
    "one tensor": (torch.zeros(2), "path", "must be a state dict of tensors"),
    "code": (nn.Linear(1, 1), "path", "must be a state dict of tensors"),
    "fails": (torch.jit.script(nn.Linear(3, 3)), "path", r"fails at images \(2, 3, 16, 16\)"),
    "one map": (torch.jit.script(One()), "path", "must make a tuple of feature maps"),
    "vectors": (torch.jit.script(Vectors()), "path", "must make a tuple of feature maps"),
    "no gradient": (torch.jit.script(Detached()), "path", "has no gradient at its images"),
}


def refused(tmp_path, field, problem, *overrides):
    recipe = tiny_recipe(tmp_path, *GAME, *overrides)
    with pytest.raises(UserError, match=problem) as caught:
        build_features(recipe, CPU)
    assert caught.value.field == field
    assert caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit(tmp_path, name, capfd):
    content, key, problem = BAD[name]
    path = tmp_path / ("bad.pt2" if content == ".pt2" else "bad.pt")
    if isinstance(content, torch.jit.ScriptModule):
        content.save(str(path))
    elif isinstance(content, bytes | str):
        path.write_bytes(content if isinstance(content, bytes) else b"no program")
    elif content is not None:
        torch.save(content, path)
    refused(tmp_path, f"objective.perceptual.{key}", problem, f"objective.perceptual={{path: {path}}}")
    assert capfd.readouterr().err == ""  # torch would print a traceback too


def test_vgg_and_heads_need_each_other(tmp_path, weights, files):
    (lpips,), (vgg, heads) = files["lpips"], files["torchvision"]
    path, field = (f"objective.perceptual.{key}" for key in ("path", "heads"))
    refused(tmp_path, field, "must be LPIPS' heads with torchvision's VGG-16", f"{path}={vgg}")
    refused(tmp_path, path, "must be VGG-16: it has LPIPS' heads alone", f"{path}={heads.partition('=')[2]}")
    refused(tmp_path, field, "cannot be read: No such file", f"{path}={vgg}", f"{field}={tmp_path / 'x.pth'}")
    torch.save({"lin0.model.1.weight": torch.zeros(1, 64, 1, 1)}, tmp_path / "alex.pth")
    refused(tmp_path, path, "must be LPIPS or VGG-16, with", f"{path}={vgg}", f"{field}={tmp_path / 'alex.pth'}")
    program = write_program(tmp_path / "p.pt")
    refused(tmp_path, field, "must be null with a program", f"{path}={program}", heads)
    small = GAME[0].replace("resolution: 16", "resolution: 8")
    recipe = tiny_recipe(tmp_path, small, *GAME[1:], f"{path}={lpips}")
    with pytest.raises(UserError, match=r"data\.resolution: must be at least 16 with VGG-16, got 8"):
        build_features(recipe, CPU)


@pytest.mark.parametrize(
    "key, value, told",
    [
        ("l2", "2", "must be 0 with data.kind=digits, got 2.0"),
        ("huber", "{weight: 2}", "must be null with data.kind=digits, got 'weight=2.0'"),
        ("perceptual", "{path: x.pt}", "must be null with data.kind=digits, got 'weight=1.0'"),
    ],
)
def test_distances_need_targets(capsys, key, value, told):
    assert main(["plan", f"objective.{key}={value}", "data={kind: digits, resolution: 16}"]) == 2
    error = capsys.readouterr().err
    assert f"objective.{key}: {told} (only pairs of images have targets); remove it, or set" in error
    assert error.count("\n") == 1


def test_ranks_without_d_s_first_layers_load_nothing(tmp_path):
    recipe = tiny_recipe(tmp_path, *GAME, "objective.perceptual={path: away.pt}")
    network, own = network_on_meta(recipe, "discriminator"), Own.of(recipe, CPU)
    for later in (network.part(1, len(network.layers)), LayerStack([])):
        terms = build_terms(recipe, recipe.objective, Termed.of(later, Statistics(CPU), lambda tensor: tensor), own)
        (term,) = (each for each in terms if each.name == "perceptual")
        assert term.of_images
    with pytest.raises(UserError, match=r"'away\.pt' cannot be read"):
        build_terms(recipe, recipe.objective, Termed.of(network, Statistics(CPU), lambda tensor: tensor), own)


@pytest.mark.parametrize("term", ["l2: 3", "huber: {weight: 3}", "perceptual: {path: x.pt}"])
def test_an_adaptive_weight_has_them_to_weigh_against(tmp_path, term):
    plugins.give([f"tests.image_games:{name}" for name in NAMES])
    game, without = ([each.replace("l1: 3", new) for each in ADAPTIVE] for new in (term, "l1: 0"))
    check_adaptive_weight(tiny_recipe(tmp_path, *game), [])
    with pytest.raises(UserError, match="needs a term of G's images in every update"):
        check_adaptive_weight(tiny_recipe(tmp_path, *without), [])


def test_a_run_resumes_with_its_own_files_alone(tmp_path):
    """Wherever they are."""
    for name, content in (("a", b"1"), ("b", b"2"), ("moved", b"1")):
        (tmp_path / name).write_bytes(content)

    def checked(path, heads, saved):
        heads = "null" if heads is None else tmp_path / heads
        section = f"objective.perceptual={{path: {tmp_path / path}, heads: {heads}}}"
        return checked_frozen(tiny_recipe(tmp_path, *GAME, section), saved)

    layout = checked("a", "b", {})
    assert layout.keys() == {"perceptual", "perceptual.heads"}
    assert checked("moved", "b", layout) == layout
    alone = checked("a", None, {})
    assert alone.keys() == {"perceptual"}
    for *paths, told, saved in (
        ("b", "b", r"path: .* is another file than the one that", layout),
        ("moved", "a", r"heads: .* is another file than the one that", layout),
        ("a", None, "heads: must be given, as when the run began", layout),
        ("a", "b", "heads: must be null, as when the run began", alone),
    ):
        with pytest.raises(UserError, match=rf"^objective\.perceptual\.{told}"):
            checked(*paths, saved)


def test_an_export_in_training_mode_is_refused(tmp_path):
    """Its features are drawn, or its buffers follow the images."""
    for name, layer in (("drop", nn.Dropout()), ("norm", nn.BatchNorm2d(6))):
        program, path = nn.Sequential(TinyFeatures(), Last(layer)).train(), tmp_path / f"{name}.pt2"
        program = torch.export.export(program, (torch.zeros(3, 3, 16, 16),), dynamic_shapes=({0: Dim("n")},))
        torch.export.save(program, path)
        with pytest.raises(UserError, match=r"is not frozen: .*; export it after \.eval\(\)"):
            build_features(tiny_recipe(tmp_path, *GAME, f"objective.perceptual={{path: {path}}}"), CPU)


FLOP = 2 * 16 * 3 * 4 * 8**2 + 2 * 16 * 4 * 6 * 4**2
"""Of both convolutions of the program, for an image of 16x16."""
HELD = 4 * (16 * 3 * 4 + 4 + 16 * 4 * 6 + 6)


def test_what_a_program_costs(tmp_path):
    path = write_program(tmp_path / "p.pt")
    plan = tiny_plan(tmp_path, 1, [*GAME, f"objective.perceptual={{path: {path}}}"], both(0))
    found = trace_program(plan.recipe, "perceptual")
    # Of G's image and of the target, and back to the image.
    assert (found.held, found.flop) == (HELD, 3 * FLOP)
    assert found.peak(8) > 8 * 4 * (2 * 4 * 8**2 + 2 * 6 * 4**2)  # at least maps and unit features of the images
    counted, without = count_work(plan), count_work(tiny_plan(tmp_path, 1, GAME, both(0)))
    assert counted["perceptual_flop"] == 3 * FLOP
    assert mean_flop(counted) - mean_flop(without) == 3 * FLOP
    lines = [" ".join(line.split()) for line in describe_networks(plan, counted).splitlines()]
    assert f"perceptual {3 * FLOP / 1e9:.3f} of its program in an update" in lines
    away = tiny_plan(tmp_path, 1, [*GAME, "objective.perceptual={path: away.pt}"], both(0))
    text = "perceptual: neither operations nor memory of its program are counted, as there is no 'away.pt'"
    assert text in describe_networks(away, count_work(away)).splitlines()


@pytest.mark.slow
def test_a_program_lies_where_images_arrive(tmp_path):
    """On D's first stage, whose ranks hold its tensors, and what the gradient at G's images needs."""
    path, found = write_program(tmp_path / "p.pt", width=256), []
    for more in (["objective.perceptual={path: away.pt}"], [f"objective.perceptual={{path: {path}}}"]):
        plan = tiny_plan(tmp_path, 2, [*GAME, *stages(1, 2), "accumulation=2", *more], both(1))
        found.append(memory.predict_each(plan, Traces()))
    held = 4 * (16 * 3 * 256 + 256 + 16 * 256 * 6 + 6)
    assert [near.buffers - away.buffers for away, near in zip(*found, strict=True)] == [held, 0]
    judging = [[each.update["D judges"].activations for each in one] for one in found]
    # Micro-batches of 4: features, unit features and their squares, of 8x8 pixels.
    assert judging[1][0] > 3 * 4 * 4 * 256 * 8**2 > 2 * judging[0][0]
    assert judging[1][1] == judging[0][1]

"""Passes that carry tangents, against the double backward of the same penalty in float64."""

from functools import partial

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
import torch.nn.functional as functional

from bigsgan.adversarial.terms.losses import LOSSES
from bigsgan.adversarial.terms.path_length import PathLengthPenalty, Probed
from bigsgan.config.objective import PathLength
from bigsgan.models import dual
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.monitor import Statistics
from tests.tiny import TINY_GAMES, awake, tiny_recipe

AUGMENTED = {
    "ada": [*TINY_GAMES["stylegan2"], "augmentation={pipeline: bgcfnc, p: 0.8}"],
    "diffaugment": ["augmentation={kind: diffaugment}"],
}
SETTINGS = {
    "pix2pix_instance": [*TINY_GAMES["pix2pix"], "discriminator.norm=instance"],
    "stylegan2_whole_segments": [*TINY_GAMES["stylegan2"], "discriminator.mbstd_group=null"],
}
GAMES = {"biggan": [], **TINY_GAMES, **AUGMENTED, **SETTINGS}
VARIANTS = (
    "biggan_unshared", "biggan_deep", "stylegan2_architectures", "pix2pix_features", "pix2pix_resnet", "dcgan_light",
)  # fmt: skip
"""Families whose graphs CI leaves to the night, as it traces one of the same layers."""
SEGMENTS, NUM = 2, 4


def labels_of(data, num, draw):
    """Random classes, or vectors in float64."""
    if data.has_vectors:
        return torch.randn(num, data.condition_width, generator=draw, dtype=torch.float64)
    return torch.randint(max(data.num_classes, 1), (num,), generator=draw)


def discriminator(tmp_path, overrides, seed=3):
    """D in float64, with the weights of a seed, and inputs of two segments."""
    recipe = tiny_recipe(tmp_path, *overrides)
    with awake():
        network = build_network(recipe, "discriminator")
        initialize(network, seed)
    network.double().train()
    data, draw, num = recipe.data, torch.Generator().manual_seed(5), SEGMENTS * NUM
    inputs = [torch.randn(num, recipe.judged_channels, *data.network_size, generator=draw)]
    inputs.append(labels_of(data, num, draw))
    if data.paired:
        inputs.append(torch.randn(num, data.input_channels, *data.resolution, generator=draw))
    if recipe.discriminator_reads_seeds:
        inputs.append(torch.arange(num) * 7919 + 5)
    for module in network.modules():
        if hasattr(module, "exact"):
            module.exact = True
        if isinstance(getattr(module, "p", None), torch.Tensor):
            module.p.fill_(recipe.augmentation.p)
    return network, tuple(x.double() if x.is_floating_point() else x for x in inputs)


def by_double_backward(network, inputs, loss, scale=1.0):
    """Gradients of ``loss`` of |gradient of the logits|^2 and the logits, and the gradient at the images."""
    images = inputs[0].clone().requires_grad_(True)
    logits = network(images, *inputs[1:], segments=SEGMENTS)
    (grads,) = torch.autograd.grad(logits.sum() * scale, images, create_graph=True)
    grads = grads / scale
    value = loss(grads.square().sum(dim=(1, 2, 3)), logits)
    return torch.autograd.grad(value, list(network.parameters()), materialize_grads=True), grads.detach()


def by_tangents(network, inputs, direction, loss):
    found = network.fold_dual(dual.begin(inputs, direction), SEGMENTS)
    logits, tangents = dual.end(found)
    value = loss(tangents, logits)
    return torch.autograd.grad(value, list(network.parameters()), materialize_grads=True)


def check(network, found, expected):
    assert len(found) == len(expected) > 0
    largest = max(float(grad.norm()) for grad in expected)
    for (name, _), a, b in zip(network.named_parameters(), found, expected, strict=True):
        assert float((a - b).norm()) <= 1e-10 * max(float(b.norm()), 1e-3 * largest), name


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("game", GAMES)
def test_r1_of_every_family(tmp_path, game, checkpointing):
    network, inputs = discriminator(tmp_path, GAMES[game])
    network.checkpointing = checkpointing
    expected, grads = by_double_backward(
        network, inputs, lambda squares, logits: squares.mean() / 2 + logits.mean() / 3
    )
    num = len(grads)
    found = by_tangents(network, inputs, grads, lambda tangents, logits: tangents.sum() / num + logits.mean() / 3)
    check(network, found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "game", [pytest.param(game, marks=[pytest.mark.nightly] if game in VARIANTS else []) for game in GAMES]
)
def test_every_family_is_one_graph(tmp_path, game):
    """To torch.compile, with tangents and without, where gradients are asked for at the images, too."""
    network, inputs = discriminator(tmp_path, GAMES[game])
    torch.compiler.reset()
    one_graph = partial(torch.compile, dynamic=False, fullgraph=True, backend="eager")
    images = inputs[0].clone().requires_grad_(True)
    torch.testing.assert_close(
        one_graph(network)(images, *inputs[1:], segments=SEGMENTS), network(*inputs, segments=SEGMENTS)
    )
    begun = dual.begin(inputs, torch.randn_like(inputs[0]))
    expected, found = (dual.end(fold(begun, SEGMENTS)) for fold in (network.fold_dual, one_graph(network.fold_dual)))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("game", GAMES)
def test_tangents_are_finite_differences(tmp_path, game):
    network, inputs = discriminator(tmp_path, GAMES[game])
    generator, step = (
        torch.Generator().manual_seed(1),
        1e-6,
    )  # of a direction in which no rectifier bends between the ends
    direction = torch.randn(inputs[0].shape, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        _, found = dual.end(network.fold_dual(dual.begin(inputs, direction), SEGMENTS))
        ends = [network(inputs[0] + sign * step * direction, *inputs[1:], segments=SEGMENTS) for sign in (1, -1)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("game", GAMES)
def test_tangents_move_no_state_and_draw_nothing(tmp_path, game):
    network, inputs = discriminator(tmp_path, GAMES[game])
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}
    drawn = torch.get_rng_state()
    by_tangents(network, inputs, torch.ones_like(inputs[0]), lambda tangents, logits: (tangents + logits).sum())
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, buffer in network.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize(
    "game, loss, alone",
    [
        ("biggan", "non_saturating", True),
        ("biggan", "hinge", False),
        ("stylegan2", "non_saturating", False),
        ("dcgan", "non_saturating", False),
    ],
)
def test_the_slope_of_the_loss_gives_the_gradient_where_images_are_judged_alone(tmp_path, game, loss, alone):
    """Not with hinge beyond its margin, minibatch deviation or batch norm: docs/explanation/penalties.md."""
    network, inputs = discriminator(tmp_path, GAMES[game])
    images = inputs[0].requires_grad_(True)
    logits = network(*inputs, segments=SEGMENTS)
    (exact,) = torch.autograd.grad(logits.sum(), images, retain_graph=True)
    logits = logits + 2 if loss == "hinge" else logits  # as of a D that is sure of real images
    value = LOSSES[loss].discriminator(*logits.chunk(SEGMENTS))
    (slopes,) = torch.autograd.grad(value, logits, retain_graph=True)
    (grads,) = torch.autograd.grad(value, images)
    found, real = grads / slopes.view(-1, 1, 1, 1), slice(NUM)
    far = float((found[real] - exact[real]).norm() / exact[real].norm())
    assert far < 1e-12 if alone else not far < 1e-4, far


@pytest.mark.parametrize("num", [1, 2, 3])
def test_a_dual_survives_its_travel(num):
    carry = (torch.zeros(2), torch.ones(1, dtype=torch.int64), torch.full((3,), 2.0))[:num]
    tangents = tuple(-entry for entry in carry if entry.is_floating_point())
    exponent = torch.zeros(1, dtype=dual.EXPONENT)
    found = dual.from_flat(dual.flat(dual.Dual(carry, tangents, exponent)))
    assert [id(t) for t in dual.flat(found)] == [id(t) for t in (*carry, *tangents, exponent)]
    assert len(found.carry) == num


@pytest.mark.parametrize("largest", [3e-30, 1e-4, 1.0, 7e8, float("nan"), 0.0])
def test_tangents_fit_half_types(largest):
    direction = torch.tensor([[largest, -largest / 3]])
    begun = dual.begin((torch.zeros(1, 2),), direction)
    if largest and largest == largest:
        assert 0.5 <= float(begun.tangents[0].abs().max()) < 1
    _, found = dual.end(begun)
    assert torch.equal(found, direction) or torch.equal(found.isnan(), direction.isnan())


@pytest.mark.parametrize("largest", [1e-4, 7e8])
def test_the_derivative_of_the_end(largest):
    """torch 2.11 takes that of ldexp for 0 where an exponent is negative."""
    begun = dual.begin((torch.zeros(1, 1),), torch.tensor([[largest]]))
    tangent = begun.tangents[0].requires_grad_()
    _, found = dual.end(begun)
    (grad,) = torch.autograd.grad(found.sum(), tangent)
    torch.testing.assert_close(float(grad), largest / float(tangent.detach()))


@pytest.mark.parametrize("weighted", [False, True])
def test_the_norm_and_its_tangent_are_torchs(weighted):
    draw = torch.Generator().manual_seed(0)
    x, tangent, *weights = (
        torch.randn(shape, generator=draw, dtype=torch.float64, requires_grad=True)
        for shape in ((3, 5, 8), (3, 5, 8), *([(8,)] if weighted else []))
    )
    weight = weights[0] if weighted else None

    def derived(norm):
        with forward_mode.dual_level():
            found = forward_mode.unpack_dual(norm(forward_mode.make_dual(x, tangent)))
            total = found.primal.sin().sum() + found.tangent.cos().sum()
            return *found, *torch.autograd.grad(total, [x, tangent, *weights])

    own = derived(lambda given: dual.rms_norm(given, weight, 1e-3))
    torchs = derived(lambda given: functional.rms_norm(given, given.shape[-1:], weight, 1e-3))
    torch.testing.assert_close(own, torchs, rtol=1e-12, atol=1e-12)


def test_no_tangent_without_a_dual_level():
    assert not dual.has_tangent(torch.zeros(1))


@pytest.mark.parametrize("game", ["stylegan2", "stylegan2_architectures"])
def test_tangents_of_images_are_finite_differences(tmp_path, game):
    """Along a direction of the styles, as path length takes them."""
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[game])
    with awake():
        network = build_network(recipe, "generator")
        initialize(network, seed=3)
    network.double().train()
    draw, step = torch.Generator().manual_seed(5), 1e-6
    inputs = torch.randn(NUM, 8, generator=draw).double(), labels_of(recipe.data, NUM, draw), torch.arange(NUM)
    rest = network.part(1, len(network.layers))
    with torch.no_grad():
        styles, *others = network.part(0, 1).fold(*inputs)
        direction = torch.randn(styles.shape, dtype=torch.float64, generator=draw)
        _, found = dual.end(rest.fold_dual(dual.begin((styles, *others), direction)))
        ends = [rest(styles + sign * step * direction, *others) for sign in (1, -1)]
    torch.testing.assert_close(found, (ends[0] - ends[1]) / (2 * step), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("game, shrink", [("stylegan2", 2), ("stylegan2_architectures", 1)])
def test_path_length(tmp_path, game, shrink):
    """Gradient and moving average, of two updates whose second has two micro-batches."""
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[game], "generator.style_mixing=0.9")
    with awake():
        network = build_network(recipe, "generator")
        initialize(network, seed=3)
    network.double().train()
    parameters, draw = list(network.parameters()), torch.Generator().manual_seed(5)
    section, cpu = PathLength(weight=3, every=1, decay=0.5, batch_shrink=shrink), torch.device("cpu")
    twice, forward = (PathLengthPenalty(section, Statistics(cpu), cpu, torch.clone) for _ in range(2))
    for update, micro_batches in enumerate((1, 2)):
        for _ in range(micro_batches):
            seeds = torch.randint(10**6, (NUM,), generator=draw)
            inputs = torch.randn(NUM, 8, generator=draw).double(), labels_of(recipe.data, NUM, draw), seeds
            value = twice.penalty(*twice.forward(network, inputs), inputs)
            expected = torch.autograd.grad(value, parameters, materialize_grads=True)

            ahead, rest = network.part(0, 1), network.part(1, len(network.layers))
            styles, *others = ahead.fold(*forward.taking_part(inputs))
            styles = styles.detach().requires_grad_(True)
            (grads,) = torch.autograd.grad(Probed()(rest(styles, *others), (*others,)), styles)
            direction = forward.direction(grads)
            _, along = dual.end(rest.fold_dual(dual.begin(ahead.fold(*inputs), direction)))
            found = torch.autograd.grad(forward.along(along, inputs), parameters, materialize_grads=True)
            check(network, found, expected)
        for penalty in (twice, forward):
            penalty.finish_update(update, applied=True)
    torch.testing.assert_close(forward.state(), twice.state(), rtol=1e-6, atol=0)

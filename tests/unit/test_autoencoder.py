"""The autoencoder's networks against diffusers', its quantizers and its terms against their definitions."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bigsgan.adversarial.terms.codebook_averages import AveragedCodebook
from bigsgan.adversarial.terms.kmeans import KMeansStart, set_codes
from bigsgan.adversarial.terms.latents import CodebookTerm, divergence
from bigsgan.config import Recipe
from bigsgan.config.families.autoencoder import AutoencoderGenerator
from bigsgan.config.reconstruction import Codebook
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import noise
from bigsgan.models.autoencoder import generator_layers
from bigsgan.models.build import network_on_meta
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.quantizers import FiniteScalarQuantizer, SignQuantizer, VectorQuantizer, nearest
from bigsgan.monitor import Statistics
from bigsgan.weights.diffusers_autoencoder import names
from tests.tiny import TINY_GAMES, tiny_recipe

diffusers = pytest.importorskip("diffusers")

CPU = torch.device("cpu")
SMALL = {"channels": 8, "multipliers": [1, 2, 2], "norm_groups": 4, "attention": [2], "latent_channels": 3}
THEIRS = {
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": [8, 16, 16],
    "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D", "DownEncoderBlock2D", "AttnDownEncoderBlock2D"],
    "up_block_types": ["AttnUpDecoderBlock2D", "UpDecoderBlock2D", "UpDecoderBlock2D"],
    "norm_num_groups": 4,
    "latent_channels": 3,
}


def pair(kind: str, **bottleneck: Any) -> tuple[LayerStack, Any]:
    """Our generator, and diffusers' network with its weights."""
    section = AutoencoderGenerator(**SMALL, bottleneck={"kind": kind, **bottleneck})
    ours = LayerStack(generator_layers(section, Size.of(16), 3, 0))
    initialize(ours, 0)
    theirs = diffusers.AutoencoderKL(**THEIRS) if kind == "kl" else diffusers.VQModel(**THEIRS, num_vq_embeddings=16)
    table, own = names(section), dict(ours.named_parameters())
    assert set(table) == set(own)
    theirs.load_state_dict({other: own[name].data for name, other in table.items()})  # strictly
    return ours, theirs


@pytest.fixture
def images() -> Tensor:
    return torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_a_gaussian_one_is_that_of_stable_diffusion(images):
    ours, theirs = pair("kl")
    made, moments = ours.eval().fold(images, torch.zeros(2), torch.arange(2))
    theirs = theirs.eval()
    distribution = theirs.encode(images).latent_dist
    torch.testing.assert_close(moments, torch.cat([distribution.mean, distribution.logvar], dim=1), rtol=0, atol=1e-5)
    torch.testing.assert_close(made, theirs.decode(distribution.mode()).sample, rtol=0, atol=1e-4)
    torch.testing.assert_close(divergence(moments), distribution.kl().mean(), rtol=1e-5, atol=0)

    drawn = ours.train().fold(images, torch.zeros(2), torch.arange(2))[0]
    assert (drawn - made).abs().mean() > 0.01  # latents are drawn in training, by the seeds alone
    torch.testing.assert_close(drawn, ours.fold(images, torch.zeros(2), torch.arange(2))[0], rtol=0, atol=0)


def test_one_with_a_codebook_is_that_of_vqgan(images):
    ours, theirs = pair("vq", num_codes=16, normalized=False)
    with torch.no_grad():  # codes among the latents, so that several are used
        encoded = ours.fold(images, torch.zeros(2))[1].flatten(0, 1)
        codebook = ours.layers["12"].codebook
        codebook.copy_(encoded[:: len(encoded) // 16][:16] + 0.01)
        theirs.quantize.embedding.weight.copy_(codebook)
    target = torch.zeros_like(images)
    made, *outputs = ours.fold(images, torch.zeros(2))
    section = AutoencoderGenerator(bottleneck={"kind": "vq", "num_codes": 16})
    term = CodebookTerm(Codebook(), section, lambda counts: counts)
    statistics = Statistics(CPU)
    read = dict(zip(("encoded", "quantized", "codes"), outputs, strict=True))
    (F.mse_loss(made, target) + term.loss(read, statistics)).backward()

    latents = theirs.encode(images).latents
    _, loss, (*_, numbers) = theirs.quantize(latents)
    decoded = theirs.decode(latents).sample
    # diffusers weighs the two distances the other way round unless it is told that it is not a legacy network
    distance, moved = F.mse_loss(outputs[1], outputs[0].detach()), 1.25
    torch.testing.assert_close(loss, moved * distance, rtol=1e-5, atol=0)
    theirs.quantize.legacy = False
    (F.mse_loss(decoded, target) + theirs.quantize(latents)[1]).backward()
    torch.testing.assert_close(made, decoded, rtol=0, atol=1e-4)
    assert (numbers == outputs[2].flatten()).all()
    table, grads = names(AutoencoderGenerator(**SMALL, bottleneck={"kind": "vq"})), dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[table[name]].grad, rtol=1e-3, atol=1e-6)

    shares = torch.bincount(numbers, minlength=16) / len(numbers)
    reported = statistics.reduce(lambda sums: sums)
    assert reported["codebook/perplexity"] == pytest.approx(float(torch.distributions.Categorical(shares).perplexity()))
    assert 1 < reported["codebook/perplexity"] < 16
    assert reported["loss/codebook"] == pytest.approx(float(loss.detach()), rel=1e-5)


def test_normalized_codes_are_chosen_by_the_angle():
    section = AutoencoderGenerator(latent_channels=2, bottleneck={"kind": "vq", "num_codes": 2})
    quantizer = VectorQuantizer(section)
    with torch.no_grad():
        quantizer.codebook.copy_(torch.tensor([[9.0, 0.0], [0.1, 0.1]]))
    latents = torch.tensor([[3.0, 2.5], [0.2, 0.05]]).T.reshape(1, 2, 1, 2)
    quantized, encoded, codes, numbers = quantizer(latents)
    assert numbers.tolist() == [[1, 0]]  # the length of the first code would draw both
    half = 0.5**0.5
    torch.testing.assert_close(codes[0], torch.tensor([[half, half], [1.0, 0.0]]))
    torch.testing.assert_close(quantized[0, :, 0].T, codes[0])
    torch.testing.assert_close(encoded.norm(dim=2), torch.ones(1, 2))


def test_finite_levels_and_their_gradient():
    quantizer = FiniteScalarQuantizer([2, 3, 8])
    spread = torch.linspace(-9, 9, 2001).expand(1, 3, 2001).reshape(1, 3, 3, 667).clone().requires_grad_()
    (made,) = quantizer(spread)
    levels = [made[0, channel].unique() for channel in range(3)]
    torch.testing.assert_close(levels[0], torch.tensor([-1.0, 0.0]))
    torch.testing.assert_close(levels[1], torch.tensor([-1.0, 0.0, 1.0]))
    torch.testing.assert_close(levels[2], torch.arange(-4, 4) / 4)
    made.sum().backward()
    # that of the bounded latents, as if nothing was rounded: for 3 levels 1.001 * tanh
    expected = 1.001 * (1 - torch.tanh(spread.detach()[0, 1]).square())
    torch.testing.assert_close(spread.grad[0, 1], expected, rtol=1e-4, atol=1e-6)


def test_signs_and_their_softmax():
    """Of eleven channels: entropies are over all 2,048 codes, and shares over those of nine channels and of two."""
    latents = torch.randn(2, 11, 2, 1, generator=torch.Generator().manual_seed(0))
    made, encoded, _, numbers, entropies, shares = SignQuantizer(3.0)(latents)
    assert torch.equal(made, latents.sign())
    bits = (latents.flatten(2).mT > 0).long()
    assert torch.equal(numbers, sum(bits[..., i] << i for i in range(11)))
    codes = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0])] * 11)
    p = (-(latents.flatten(2).mT[:, :, None] - codes).square().sum(3) / 3).softmax(2)
    torch.testing.assert_close(entropies, torch.distributions.Categorical(p).entropy().mean(1))
    joint = p.mean(1).view(2, 512, 4)
    torch.testing.assert_close(shares, torch.cat([joint.sum(2), joint.sum(1)], dim=1))
    torch.testing.assert_close(encoded, latents.flatten(2).mT)


def averaged(revival: dict[str, float] | None) -> tuple[AveragedCodebook, Tensor]:
    """A term of three codes of two channels, and the codes."""
    section = {"kind": "vq", "num_codes": 3, "normalized": False, "ema": {"decay": 0.75, "revival": revival}}
    codes = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    generator = AutoencoderGenerator(latent_channels=2, bottleneck=section)
    return AveragedCodebook(Codebook(), generator, codes, (lambda x: x, lambda x: x), (0, 1), CPU), codes


@pytest.mark.parametrize("repeats", [1, 2])
def test_codes_follow_averages(repeats):
    """As often as passes are repeated; an update that is skipped leaves all as it was."""
    term, codes = averaged({"below": 0.8, "most": 2})
    drawn, before = torch.Generator().manual_seed(1), codes.clone()
    latents, numbers = torch.randn(4, 2, 2, generator=drawn), torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0]])
    statistics = Statistics(CPU)
    for is_applied in (False, True):
        for part in (slice(0, 1), slice(1, 4)) * repeats:
            read = {"encoded": latents[part], "quantized": before[numbers[part]], "codes": numbers[part]}
            value = term.loss({**read, "seeds": torch.arange(4)[part]}, statistics)
            expected = 0.25 * (latents[part] - before[numbers[part]]).square().mean()
            torch.testing.assert_close(value, expected)
        term.finish_update(0, is_applied)
        assert torch.equal(codes, before) != is_applied
    uses = 0.75 + 0.25 * torch.tensor([6.0, 2.0, 0.0]) * 3 / 8  # the second is 0.9375, the third 0.75
    for k in range(2):
        mean = latents[numbers == k].sum(0) * 3 / 8
        torch.testing.assert_close(codes[k], (0.75 * before[k] + 0.25 * mean) / uses[k])
    torch.testing.assert_close(term.state()["uses"], torch.cat([uses[:2], torch.ones(1)]))
    assert (latents.flatten(0, 1) == codes[2]).all(1).sum() == 1


@pytest.mark.parametrize("averages", [None, {"decay": 0.75, "revival": {"below": 0.9, "most": 2}}])
@pytest.mark.parametrize("normalized", [False, True])
def test_codes_begin_with_the_centres_of_k_means(normalized, averages):
    """Those of scikit-learn from the same latents, in any order of samples, though the update is skipped."""
    cluster, found = pytest.importorskip("sklearn.cluster"), []
    section = {"kind": "vq", "num_codes": 5, "normalized": normalized, "ema": averages, "kmeans_steps": 6}
    generator, drawn = AutoencoderGenerator(latent_channels=3, bottleneck=section), torch.Generator().manual_seed(2)
    latents = torch.randn(40, 6, 3, generator=drawn)
    latents[::2] = 0.2 * latents[::2] + torch.tensor([1.0, 0.0, 0.0])  # near each other: a mean that is longer
    latents = F.normalize(latents, dim=2)
    for order in (torch.arange(40), torch.randperm(40, generator=drawn)):
        codes, statistics = torch.randn(5, 3, generator=drawn), Statistics(CPU)
        terms, begin = [], partial(set_codes, codes)
        if averages:
            terms = [AveragedCodebook(Codebook(), generator, codes, (lambda x: x, lambda x: x), (0, 1), CPU)]
            begin = terms[0].begin_anew
        terms.append(KMeansStart(generator, begin, lambda x: x, (0, 1), CPU))
        for part in order.split(8):
            read = {"encoded": latents[part], "quantized": latents[part], "codes": torch.zeros(8, 6, dtype=torch.int64)}
            losses = [term.loss({**read, "seeds": part}, statistics) for term in terms]
        assert losses[-1] == 0
        for term in terms:
            term.finish_update(0, False)
        found.append(codes)
        keys = torch.stack([noise.uniform(torch.arange(40), 2**32 + i, (6,)).double() for i in range(2)])
        first = latents.flatten(0, 1)[(keys[0] + keys[1] / 2**24).flatten().argsort()[:5]].double()
        if not normalized:
            means = cluster.KMeans(5, init=first.numpy(), n_init=1, max_iter=6, tol=0).fit(latents.view(-1, 3).double())
            first, labels = torch.from_numpy(means.cluster_centers_), None
        for _ in range(6 if normalized else 0):
            labels = (latents.flatten(0, 1).double() @ F.normalize(first, dim=1).T).argmax(dim=1)
            first = torch.stack([latents.flatten(0, 1)[labels == k].double().mean(dim=0) for k in range(5)])
        torch.testing.assert_close(codes.double(), first, rtol=0, atol=1e-6)
        if averages and labels is not None:
            torch.testing.assert_close(terms[0].state()["uses"], torch.bincount(labels, minlength=5) * 5 / 240)
    assert torch.equal(*found)
    before = codes.clone()
    assert [term.is_due(1) for term in terms] == [True] * bool(averages) + [False]
    if averages:
        terms[0].loss({**read, "seeds": part}, statistics)
    for term in terms:
        term.finish_update(1, True)  # averages again
    assert (1e-4 < (codes - before).abs().max() < 2) == bool(averages)


def test_averages_return_to_a_saved_state():
    """As after updates that are rolled back: the same updates give the same codes again, from the first one on."""
    section = {"kind": "vq", "num_codes": 3, "ema": {"revival": {"below": 0.9, "most": 2}}, "kmeans_steps": 2}
    generator, found = AutoencoderGenerator(latent_channels=2, bottleneck=section), []
    drawn = torch.Generator().manual_seed(0)
    latents, codes, statistics = torch.randn(3, 4, 5, 2, generator=drawn), torch.eye(3, 2), Statistics(CPU)
    term = AveragedCodebook(Codebook(), generator, codes, (lambda x: x, lambda x: x), (0, 1), CPU)
    terms = [term, KMeansStart(generator, term.begin_anew, lambda x: x, (0, 1), CPU)]
    saved = [(codes.clone(), term.state()["uses"].clone())]
    for first in (0, 1, 0):  # from where the updates up to the third are made
        codes.copy_(saved[first][0])
        values = {"uses": saved[first][1]}
        term.load(SimpleNamespace(read_into=lambda kind, out, values=values: [out[n].copy_(values[n]) for n in out]))
        for update in range(first, 3):
            numbers = nearest(latents[update].flatten(0, 1), codes).view(4, 5)
            read = {"encoded": latents[update], "quantized": codes[numbers], "codes": numbers}
            for each in terms:
                if each.is_due(update):
                    each.loss({**read, "seeds": torch.arange(4)}, statistics)
                each.finish_update(update, True)
            saved += [(codes.clone(), term.state()["uses"].clone())] * (len(saved) <= update + 1)
        found.append((codes.clone(), term.state()["uses"].clone()))
    assert not torch.equal(saved[1][0], saved[2][0])
    for each in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(each, found[0], strict=True))


def test_a_code_that_is_never_used_stays():
    term, codes = averaged(None)
    before, statistics = codes.clone(), Statistics(CPU)
    for update in range(400):  # its use becomes 0
        read = {"encoded": torch.ones(1, 1, 2), "quantized": before[:1, None], "codes": torch.zeros(1, 1, dtype=int)}
        term.loss(read, statistics)
        term.finish_update(update, True)
    assert torch.equal(codes[1:], before[1:])
    torch.testing.assert_close(codes[0], torch.ones(2))


def test_the_shipped_recipe_has_the_published_sizes():
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKL(
            down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
            block_out_channels=[128, 256, 512, 512],
            layers_per_block=2,
        )  # of sd-vae-ft-mse's config.json
    recipe = Recipe.read("sdvae_f8_imagenet256")
    ours, own = network_on_meta(recipe, "generator"), dict(theirs.named_parameters())
    assert sum(each.numel() for each in ours.parameters()) == 83_653_863
    shapes = {other: own[other].shape for other in names(recipe.generator).values()}
    assert shapes == {names(recipe.generator)[name]: each.shape for name, each in ours.named_parameters()}
    assert shapes.keys() == own.keys()


@pytest.mark.parametrize("kind", ["kl", "vq"])
def test_a_frozen_encoder_has_no_parameters(images, kind):
    sections = [AutoencoderGenerator(**SMALL, bottleneck={"kind": kind}, frozen=part) for part in ("encoder", "none")]
    network, whole = (LayerStack(generator_layers(section, Size.of(16), 3, 0)) for section in sections)
    initialize(network, 0)
    initialize(whole, 0)
    trained = {int(name.split(".")[1]) for name, _ in network.named_parameters()}
    assert min(trained) == 13
    assert max(trained) == len(network.layers) - 1
    ours, theirs = network.state_dict(), whole.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    seeds = [torch.arange(2)] if kind == "kl" else []
    assert torch.equal(network.fold(images, torch.zeros(2), *seeds)[0], whole.fold(images, torch.zeros(2), *seeds)[0])


NO_KL = ["objective.kl=0", "objective.codebook={}"]
KIND = "generator.bottleneck={kind: %s}"
REFUSED = {
    "classes": ([], "data.num_classes", "must be 0 with generator.family=autoencoder"),
    "factor": (["data.resolution=15"], "data.resolution", "must be a multiple of 2"),
    "groups": (["generator.norm_groups=3"], "generator.norm_groups", "must divide the channels"),
    "attention": (["generator.attention=[2]"], "generator.attention", "must be levels from 0 to 1"),
    "levels": ([KIND % "fsq, levels: [8, 8, 8]", NO_KL[0]], "generator.latent_channels", "must be 3, as many as"),
    "unread key": (["generator.bottleneck.num_codes=8"], "generator.bottleneck.num_codes", "must be unset with"),
    "no moments": ([KIND % "none"], "objective.kl", "must be unset with a generator without"),
    "no codebook": (["objective.codebook={}"], "objective.codebook", "must be unset with a generator without"),
    "codes that nothing moves": ([KIND % "vq", NO_KL[0]], "objective.codebook", "must be given with a codebook"),
    "signs that nothing moves": ([KIND % "lfq", NO_KL[0]], "objective.codebook", "must be given with a codebook"),
    "too many signs": (
        [KIND % "lfq", *NO_KL, "generator.latent_channels=21"],
        *("generator.latent_channels", "must be at most 20 with kind=lfq"),
    ),
    "averages of signs": ([KIND % "lfq, ema: {}", *NO_KL], "generator.bottleneck.ema", "must be unset with kind=lfq"),
    "entropy of nothing": (
        [KIND % "vq", NO_KL[0], "objective.codebook={entropy: {}}"],
        *("objective.codebook.entropy", "needs a generator with outputs entropies and shares"),
    ),
    "softmax for nothing": (
        [KIND % "vq, temperature: 0.01", *NO_KL],
        *("generator.bottleneck.temperature", "must be unset without objective.codebook.entropy"),
    ),
    "more codes than latents": (
        [KIND % "vq, ema: {revival: {most: 513}}", *NO_KL],
        *("generator.bottleneck.ema.revival.most", "must be at most 512, the pixels of a batch's latents"),
    ),
    "more means than latents": (
        [KIND % "vq, num_codes: 513, kmeans_steps: 3", *NO_KL],
        *("generator.bottleneck.kmeans_steps", "needs 513 latents, one for each code, and a batch has 512"),
    ),
    "means in place of codes": (
        [KIND % "vq, kmeans_steps: 3, num_codes: 8", *NO_KL, "init_from={run: x}"],
        *("generator.bottleneck.kmeans_steps", "must be 0 with init_from"),
    ),
    "frozen from nothing": (["generator.frozen=encoder", NO_KL[0]], "generator.frozen", "must be none without"),
    "frozen latents": (["generator.frozen=encoder", "init_from={run: x}"], "objective.kl", "must be unset with"),
    "frozen codes that move": (
        ["generator.frozen=decoder", KIND % "vq, ema: {}", *NO_KL, "init_from={run: x}"],
        *("generator.bottleneck.ema", "must be null with generator.frozen=decoder"),
    ),
    "pairs": (["data.kind=synthetic_pairs"], "generator.family", "must be a family for pairs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(tmp_path, name):
    overrides, field, problem = REFUSED[name]
    game = TINY_GAMES["autoencoder"][name == "classes" :]  # the first option is that there are none
    with pytest.raises(UserError) as caught:
        tiny_recipe(tmp_path, *game, *overrides)
    assert caught.value.field == field
    assert problem in str(caught.value)

"""The baseline of `bigsgan bench` plays the same game as the reference of the tests, which shares no line with it."""

import pytest

from bigsgan.bench.plain import build_plain_loop
from bigsgan.doctor.smooth_activations import smooth
from tests import reference
from tests.tiny import TINY_GAMES, awake, tiny_plan, tiny_recipe, zero

UPDATES = 3
GAMES = {
    "accumulation": [
        "accumulation=2",
        "objective.r1={weight: 0.2, every: 2}",
        "objective.orthogonal.discriminator=0.01",
    ],
    "two_d_steps": [
        "objective.d_steps=2",
        "objective.r1={weight: 0.2, form: finite_difference, sigma: 0.5, antithetic: true}",
    ],
    "relativistic": ["objective.loss=relativistic", "objective.gradient_penalty={weight: 0.1}"],
    "lecam": ["objective.lecam={weight: 0.5, decay: 0.5}", "objective.reuse_fakes=true"],
    "augmented": ["augmentation={target: 0.6, ramp_nimg: 100, interval: 1}"],
    "rates": ["optimizer.generator={kind: sgd, lr: 0.01, decay: cosine, decay_nimg: 30}"],
    "pix2pix": TINY_GAMES["pix2pix"],
    "pix2pix_features": TINY_GAMES["pix2pix_features"],
    "stylegan2_path_length": TINY_GAMES["stylegan2_path_length"],
}


def state(loop):
    networks = {"generator": loop._generator.root.network, "discriminator": loop._discriminator.root.network}
    found = {name: dict(network.state_dict()) for name, network in networks.items()}
    names = [name for name, _ in networks["generator"].named_parameters()]
    found["average"] = {**found["generator"], **dict(zip(names, loop._ema, strict=True))}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("game", GAMES)
def test_it_agrees_with_the_reference(game, tmp_path):
    """Networks have no kinks: where a ReLU's input lies near 0, either may round it to another side."""
    plan = tiny_plan(tmp_path, 1, GAMES[game], {"generator": zero(0), "discriminator": zero(0)})
    with smooth():
        expected = reference.run_reference(tiny_recipe(tmp_path, *GAMES[game]), UPDATES)
        with awake():
            loop = build_plain_loop(plan, distributed=False)
        for _ in range(UPDATES):
            loop()
        loop.close()
    distance, where = reference.worst(state(loop), expected)
    assert distance <= 1e-5, where


def test_gradients_are_clipped(tmp_path):
    clipped = ["optimizer.generator={kind: sgd, lr: 1, clip_norm: 0.01}"]
    plan = tiny_plan(tmp_path, 1, clipped, {"generator": zero(0), "discriminator": zero(0)})
    loop = build_plain_loop(plan, distributed=False)
    before = [weight.detach().clone() for weight in loop._weights]
    loop()
    loop.close()
    moved = sum((new.detach() - old).square().sum() for new, old in zip(loop._weights, before, strict=True)) ** 0.5
    assert float(moved) == pytest.approx(0.01, rel=1e-4)  # of plain descent at rate 1, the gradient's norm

"""With Adam, rounding becomes full steps where the true gradient is 0, so gradients and updates are compared apart."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import reference
from tests.distributed import scenarios
from tests.tiny import tiny_recipe, zero

# A discriminator that hardly moves, so that the generator's first gradient is the reference's too.
ADAM = [
    "optimizer.generator={kind: adam, lr: 1e-3, betas: [0.5, 0.9]}",
    "optimizer.discriminator={kind: adam, lr: 1e-9, betas: [0.5, 0.9]}",
]
LR = {"generator": 1e-3, "discriminator": 1e-9}


def whole(parts):
    """name -> flat array from every rank's [(offset, values)]."""
    merged = {}
    for name in {name for part in parts for name in part}:
        pieces = {offset: values for part in parts for offset, values in part.get(name, [])}
        merged[name] = np.concatenate([pieces[offset] for offset in sorted(pieces)])
    return merged


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.nightly), 2])
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 1, 2)), 3])
def test_gradients_and_updates(ranks, stage, accumulation):
    overrides = [f"accumulation={accumulation}", "objective.r1={weight: 0.2}"]
    check_adam(ranks(2), overrides, {"generator": zero(stage), "discriminator": zero(stage)})


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 2))])
def test_a_second_decay_rate_that_moves(ranks, stage):
    # 0.9 to 0.5 over 4 batches of 8 images: a quarter of a half-turn is 45 degrees.
    moves = "{lr: %s, betas: [0.5, 0.9], decay: cosine, final_lr: %s, final_beta2: 0.5, decay_nimg: 32}"
    overrides = [f"optimizer.{network}={moves % (lr, lr)}" for network, lr in LR.items()]
    betas2 = [0.9, 0.9 - 0.2 * (1 - 0.5**0.5), 0.7]
    check_adam(ranks(2), overrides, {"generator": zero(stage), "discriminator": zero(stage)}, betas2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (0, 1))])
def test_weight_decay_that_is_decoupled(ranks, stage):
    overrides = [text.replace("kind: adam", "kind: adamw, weight_decay: 0.3") for text in ADAM]
    check_adam(ranks(2), overrides, {"generator": zero(stage), "discriminator": zero(stage)}, decay=lambda grad: 0.3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (1, 3))])
def test_weight_decay_on_matrices(ranks, stage):
    settings = "kind: adamw, weight_decay: 0.3, weight_decay_on: matrices"
    overrides = [text.replace("kind: adam", settings) for text in ADAM]
    ds = {"generator": zero(stage), "discriminator": zero(stage)}
    check_adam(ranks(2), overrides, ds, decay=lambda grad: 0.3 if grad.dim() > 1 else 0.0)


def begun(overrides, ds):
    """Each network's masters by name, and its optimizer's state, before the first update and after it."""
    run, found = scenarios.build(overrides, ds), []
    for _ in range(2):
        shards = {n: getattr(run.step, n).shards() for n in LR}
        masters = {n: scenarios.named_parts(run, n, [shard.master for shard in shards[n]]) for n in LR}
        steps = {n: [float(shard.optimizer_state.get("step", 0)) for shard in shards[n]] for n in LR}
        found.append((masters, steps))
        scenarios.update(run, 1)
    scenarios.destroy(run)
    return found


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_stepped_before_the_first_update(ranks, stage):
    """In bf16 at ZeRO 0 DeepSpeed makes a step of gradients that are 0: it decays weights, and is counted."""
    overrides = [text.replace("kind: adam", "kind: adamw, weight_decay: 500") for text in ADAM]
    ds = dict.fromkeys(LR, zero(stage, bf16={"enabled": True}))
    ((masters, steps), (_, later)), *_ = ranks(1).run(begun, overrides, ds)
    networks = reference.build_networks(tiny_recipe(Path(tempfile.mkdtemp()), *overrides))
    for network, stack in zip(LR, networks, strict=True):
        assert set(steps[network]) == {0.0}
        assert set(later[network]) == {1.0}
        for name, parameter in stack.named_parameters():
            got = torch.from_numpy(whole([masters[network]])[name])
            assert (got - parameter.detach().flatten()).abs().max() <= 2**-8 * parameter.detach().abs().max(), name


def check_adam(pool, overrides, ds, betas2=(0.9, 0.9, 0.9), decay=lambda grad: 0.0):
    """Compare the first gradients with the reference's, and three updates with Adam's formula, or AdamW's.

    ``decay`` gives a parameter's weight decay from its gradient.
    """
    if not any(text.startswith("optimizer.") for text in overrides):
        overrides = [*ADAM, *overrides]
    by_rank = pool.run(scenarios.adam_updates, overrides, ds, 3)
    recorded = {key: whole([rank[key] for rank in by_rank]) for key in by_rank[0]}
    expected = reference.Reference(tiny_recipe(Path(tempfile.mkdtemp()), *overrides)).update(0)
    for network, grads in (("discriminator", expected.d_grads), ("generator", expected.g_grads)):
        assert recorded[f"{network}.1.grad"].keys() == grads.keys()
        # Relative to the tensor or, where it is below a tenth of that, to the root mean square of all gradients: the
        # gradient of a bias before a batch norm is a sum that cancels to rounding.
        scale = torch.cat([grad.flatten() for grad in grads.values()]).square().mean().sqrt()
        for name, grad in grads.items():
            got = torch.from_numpy(recorded[f"{network}.1.grad"][name])
            error = (got - grad.flatten()).norm() / max(grad.norm(), 0.1 * scale * grad.numel() ** 0.5)
            assert error < 2e-5, (name, error)  # 8e-6, and 1.3e-5 where the reference has one thread

    decays = {name: decay(grad) for grads in (expected.d_grads, expected.g_grads) for name, grad in grads.items()}
    for network, lr in LR.items():
        m, v = {}, {}
        for t, beta2 in enumerate(betas2, start=1):
            grads, before, after = (recorded[f"{network}.{t}.{what}"] for what in ("grad", "before", "after"))
            for name, g in grads.items():
                g = g.astype(np.float64)
                m[name] = 0.5 * m.get(name, 0) + 0.5 * g
                v[name] = beta2 * v.get(name, 0) + (1 - beta2) * g * g
                step = lr * (m[name] / (1 - 0.5**t)) / (np.sqrt(v[name] / (1 - beta2**t)) + 1e-8)
                # Updates of 1e-9 vanish against float32 weights; those of the generator are seen to 7 bits or more.
                error = np.abs(after[name] - ((1 - lr * decays[name]) * before[name] - step)).max()
                assert error <= 1e-7 * np.abs(before[name]).max() + 1e-5 * lr, (network, t, name, error)

"""Adam's state in an R3GAN snapshot is resumed in the directory of its import, at every ZeRO stage."""

import pytest
import torch

from tests.distributed import imported, scenarios
from tests.tiny import zero
from tests.unit.test_optimizer_state import import_of
from tests.unit.test_r3gan_pickle import classes

__all__ = ["classes"]

LR, BETA2, EPS = 1e-3, 0.95, 1e-8
ADAM = f"{{kind: adam, lr: {LR}, betas: [0.0, {BETA2}], eps: {EPS}}}"
OVERRIDES = [
    *("batch=8", "data={kind: synthetic, resolution: 32, image_channels: 3, num_images: 64, num_classes: 4}"),
    *(f"optimizer.generator={ADAM}", f"optimizer.discriminator={ADAM}"),
    "ema={half_life_nimg: 64}",
]


def theirs(content, network):
    """(parameter, its second moment) of all parameters of a network in a snapshot, as our layouts have them."""
    state = content[f"{network}_opt_state"]["state"]
    for i, (name, parameter) in enumerate(content[network].named_parameters()):
        values = parameter.detach(), state[i]["exp_avg_sq"]
        if name.endswith("EmbeddingLayer.weight"):  # a linear map of one-hot vectors there
            values = tuple(value.T.contiguous() for value in values)
        yield tuple(value.flatten() for value in values)


def whole(results, key):
    return scenarios.merge([rank[key] for rank in results])


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 2, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 3))])
def test_adam_is_resumed(ranks, classes, tmp_path, stage):
    content = import_of(classes, tmp_path)
    ds = {"generator": zero(stage), "discriminator": zero(stage)}
    results = ranks(2).run(imported.train_on, str(tmp_path / "run"), ds, OVERRIDES, 1)
    assert (results[0]["nimg"], results[0]["update"]) == (3_000, 375)
    before, after = whole(results, "before"), whole(results, "after")
    moments, later = whole(results, "moments before"), whole(results, "moments after")
    for entry, network, steps in (("generator", "G", 3), ("discriminator", "D", 4)):
        assert all(step == steps for rank in results for step in rank["steps"][entry])
        expected = list(theirs(content, network))
        assert len(moments[entry]) == len(expected)
        moved = 0
        for name, moment in moments[entry].items():
            # The parameter with these values is the same, under another name.
            found = [m for p, m in expected if p.shape == moment.shape and torch.equal(p, before[entry][name])]
            assert len(found) == 1, name
            assert torch.equal(moment, found[0]), name
            # The next update is Adam's, with its own gradient, told from the moments, and the count of updates.
            squares = (later[entry][name] - BETA2 * moment).clamp(min=0) / (1 - BETA2)
            denominator = (later[entry][name] / (1 - BETA2 ** (steps + 1))).sqrt() + EPS
            steps_made = (after[entry][name] - before[entry][name]).abs()
            torch.testing.assert_close(steps_made, LR * squares.sqrt() / denominator, rtol=0.05, atol=2e-6)
            moved += int((steps_made > LR / 100).sum())
        assert moved > 10


@pytest.mark.slow
def test_another_optimizer_and_other_classes_begin_anew(ranks, classes, tmp_path):
    import_of(classes, tmp_path)
    sgd = "optimizer.generator={kind: sgd, lr: 1e-3}"
    overrides = [sgd if text.startswith("optimizer.generator") else text for text in OVERRIDES]
    ds = {"generator": zero(1), "discriminator": zero(1)}
    results = ranks(2).run(imported.train_on, str(tmp_path / "run"), ds, [*overrides, "data.num_classes=3"], 1)
    for rank in results:
        assert rank["moments before"] == {"generator": {}, "discriminator": {}}
        assert rank["steps"] == {"generator": [], "discriminator": []}
        assert rank["moments after"]["discriminator"]

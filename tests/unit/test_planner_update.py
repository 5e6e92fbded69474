"""What a rank holds between the phases of an update, by hand."""

import pytest

from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict_each
from tests.tiny import both, stages, tiny_plan

NUM, N = 8, 3
"""Micro-batches, and samples of each."""
IMAGE = 4 * 16**2
EXACT = "objective.r1={weight: 1, method: forward_mode}"


def of_discriminator(directory, num, *options):
    """Most activations of D's rank, by the phase, of updates of ``num`` micro-batches."""
    split = [f"batch={num * N}", f"accumulation={num}", "engines.generator.ranks=1"]
    plan = tiny_plan(directory, 2, [*split, *options], both(1))
    (found,) = [each for each in predict_each(plan, Traces()) if not each.states["generator"].device]
    return {name: peak.activations for name, peak in found.update.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, readers, num", [([], 2, NUM - 2), ([EXACT], 3, NUM - 2), ([EXACT, "objective.r2={weight: 1}"], 3, 1)]
)
def test_images_that_are_read_again_stay(more, readers, num, tmp_path):
    """All of them, beside which none is on its way; of those that are read once, those to come are on their way.

    Those at which D differentiates, with R2 beside R1, have all been there; the first has gone when the second meets
    gradients of the first. While D judges, gradients take the place of the images: at the third, five are to come.
    """
    once, again = (
        of_discriminator(tmp_path, NUM, *more, f"objective.reuse_fakes={reuse}") for reuse in ("false", "true")
    )
    assert len([name for name in once if "step" not in name]) == readers
    assert once["D judges"] - again["D judges"] == (NUM - 3) * N * IMAGE
    assert again["D trains"] - once["D trains"] == num * N * IMAGE


@pytest.mark.slow
def test_images_that_are_differentiated_at_stay_until_d_has_trained_on_them(tmp_path):
    few, many = (of_discriminator(tmp_path, num, EXACT) for num in (NUM, 2 * NUM))
    # Real images, the gradients at both, and those of G, which are read once, and are there or on their way.
    assert many["D trains"] - few["D trains"] == 4 * NUM * N * IMAGE


@pytest.mark.slow
@pytest.mark.parametrize("g, d", [(2, 1), (1, 2)])
def test_more_micro_batches_than_are_shown_where_one_network_is_in_stages(tmp_path, g, d):
    found = []
    for num in (2, 5):
        options = [f"batch={2 * num * N}", f"accumulation={num}", *stages(g, d)]
        found.append(predict_each(tiny_plan(tmp_path, 2, options, both(1)), Traces()))
    assert [each.update.keys() for each in found[0]] == [each.update.keys() for each in found[1]]

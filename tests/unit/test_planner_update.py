"""What a rank holds between the phases of an update, by hand."""

import pytest

from bigsgan.planner.activations import Traces
from bigsgan.planner.memory import predict_each
from tests.tiny import both, tiny_plan

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
    "more, readers, num",
    [
        ([], 2, NUM - 2),
        ([EXACT], 3, NUM - 2),
        ([EXACT, "objective.r2={weight: 1}"], 3, 1),
    ],
)
def test_images_that_are_read_again_stay(more, readers, num, tmp_path):
    """All of them, beside which none is on its way; of those that are read once, one is there and one on its way.

    Those at which D differentiates, with R2 beside R1, have all been there; the first has gone when the second meets
    gradients of the first. While D judges, gradients take the place of the images.
    """
    once, again = (
        of_discriminator(tmp_path, NUM, *more, f"objective.reuse_fakes={reuse}") for reuse in ("false", "true")
    )
    assert len([name for name in once if "step" not in name]) == readers
    assert again["D judges"] == once["D judges"]
    assert again["D trains"] - once["D trains"] == num * N * IMAGE


@pytest.mark.slow
def test_images_that_are_differentiated_at_stay_until_d_has_trained_on_them(tmp_path):
    few, many = (of_discriminator(tmp_path, num, EXACT) for num in (NUM, 2 * NUM))
    # Real images, and the gradients at both; those of G are read once.
    assert many["D trains"] - few["D trains"] == 3 * NUM * N * IMAGE

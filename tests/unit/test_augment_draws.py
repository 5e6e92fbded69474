"""The random numbers of augmentations: what they were when each was drawn by itself, in far fewer operations."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.config.augmentation import ADA_PIPELINES
from bigsgan.models import noise
from bigsgan.models.augment import AdaptiveAugment
from bigsgan.models.augment_draws import _NAMES, AugmentationDraws
from bigsgan.models.network import initialize

SEEDS = torch.tensor([0, 3, 2**62 + 12345, 2**63 - 1, 77])
FIRST = 0xADA00
# What commit a3dadf7 drew for seeds 3 and 2**62 + 12345, as multiples of 2**-24, which float32 holds exactly.
RECORDED = {
    "flip": [[2429123, 7842875, 13232413], [10486665, 12985649, 5549131]],
    "translation": [[6226067, 4499663, 10676263], [6772457, 207869, 11314913]],
    "diff_cutout": [[15473583, 3393985, 3634229], [4485553, 13736551, 7202653]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (3,), (3, 4, 4)])
def test_each_transformation_draws_from_a_stream_of_its_own(shape, dtype):
    draws = AugmentationDraws(SEEDS, dtype)
    for i, name in enumerate(_NAMES):
        stream = FIRST + 2 * i
        assert torch.equal(draws.uniform(name, *shape), noise.uniform(SEEDS, stream, shape).to(dtype))
        assert torch.equal(draws.normal(name, *shape), noise.normal(SEEDS, stream, shape).to(dtype))
        assert torch.equal(draws.gate(name), noise.uniform(SEEDS, stream + 1, ()))


@pytest.mark.parametrize("name", RECORDED)
def test_a_resumed_run_draws_what_it_drew(name):
    draws = AugmentationDraws(SEEDS[1:3], torch.float32)
    drawn = torch.cat([draws.uniform(name, 2), draws.gate(name)[:, None]], dim=1)
    assert (drawn.double() * 2**24).tolist() == RECORDED[name]


def test_a_sample_draws_the_same_in_any_batch():
    whole, alone = AugmentationDraws(SEEDS, torch.float32), AugmentationDraws(SEEDS[2:3], torch.float32)
    for name in _NAMES:
        assert torch.equal(whole.normal(name, 2)[2:3], alone.normal(name, 2))
        assert torch.equal(whole.uniform(name)[2:3], alone.uniform(name))


class Integers(TorchDispatchMode):
    """Counts operations that compute integers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if torch.is_tensor(result) and result.dtype == torch.int64 and not function.is_view:
            self.found[str(function)] += 1
        return result


def test_a_pipeline_draws_in_few_operations():
    """Each would be a launch on a GPU without Triton; drawn one by one they were 774."""
    layer = AdaptiveAugment(ADA_PIPELINES["bgc"], 0.5)
    initialize(layer, 0)
    images, labels = torch.zeros(5, 3, 8, 8), torch.zeros(5, dtype=torch.int64)
    with Integers() as integers:
        layer(images, labels, SEEDS)
    assert sum(integers.found.values()) <= 90, integers.found

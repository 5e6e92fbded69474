"""Images that are kept for D's next update."""

import logging
from types import SimpleNamespace

import pytest
import torch

from bigsgan.adversarial.stale_images import StaleImages
from bigsgan.data import Slice

SHAPE = (3, 4, 4)


def kept_images(batch=8, d_steps=2, replica=1):
    return StaleImages(Slice(batch, 2, replica, 2), d_steps, SHAPE, torch.device("cpu"))


def saved(images, numbers=None):
    """What a checkpoint gives back of this rank's parts."""
    parts = {(part.kind, part.name, part.offset): part.values.clone() for part in images.parts()}

    def read(kind, name, offset, out):
        out.copy_(parts[kind, name, offset])

    return SimpleNamespace(numbers=images.numbers() if numbers is None else numbers, read=read)


def filled():
    """Images whose channels lie last, as convolutions yield them, and what they are."""
    images, generator, expected = kept_images(), torch.Generator().manual_seed(0), {}
    for key in ((0, 0), (0, 1), (1, 0), (1, 1)):
        value = torch.randn(2, *SHAPE, generator=generator)
        expected[key] = value
        images.keep(*key, value.to(memory_format=torch.channels_last))
    images.finish_update(4)
    return images, expected


def test_they_are_saved_sample_by_sample_in_any_memory_format():
    images, expected = filled()
    per_sample = 3 * 4 * 4
    # Of each micro-batch of 4 samples, the second replica has the last two.
    assert [(part.name, part.offset) for part in images.parts()] == [
        ("0", 2 * per_sample), ("0", 6 * per_sample), ("1", 2 * per_sample), ("1", 6 * per_sample)
    ]  # fmt: skip
    for part, value in zip(images.parts(), expected.values(), strict=True):
        assert torch.equal(part.values, value.flatten())
    resumed = kept_images()
    resumed.load(saved(images))
    assert resumed.update == 5
    for key, value in expected.items():
        assert torch.equal(resumed.get(*key), value)
        assert resumed.get(*key).stride() == images.get(*key).stride()


@pytest.mark.parametrize("changed", [{"batch": 16}, {"d_steps": 3}])
def test_those_of_another_batch_or_other_steps_are_made_anew(changed, caplog):
    caplog.set_level(logging.INFO)
    images, _ = filled()
    resumed = kept_images(**changed)
    resumed.load(saved(images))
    assert resumed.update is None
    assert "made anew" in caplog.text


def test_a_run_that_has_none_yet_saves_none():
    images = kept_images()
    assert (images.numbers(), images.parts()) == ({}, [])
    resumed = kept_images()
    resumed.load(saved(images))
    assert resumed.update is None

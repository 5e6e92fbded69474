"""CycleGAN: every update is the public step, at batch 1 and in other layouts."""

from unittest import mock

import numpy as np
import pytest
from PIL import Image

from bigsgan import checkpoint
from bigsgan.doctor import agreement
from tests.cyclegan import PublicStep, game
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_state import check_same_run
from tests.tiny import both, zero

SLOW = pytest.mark.slow
LAYOUTS = {
    "batch 1": (1, {"batch": 1}, both(0)),
    "two ranks, micro-batches": (2, {"batch": 4, "accumulation": 2}, both(1)),
    "ZeRO 3": (2, {"batch": 2}, both(3)),
    "recomputed": (2, {"batch": 2, "engines.generator.activation_checkpointing": "true"}, both(2)),
    "ranks of their own": (
        2,
        {"batch": 2, "engines.generator.ranks": 1},
        {"generator": zero(2), "discriminator": zero(3)},
    ),
}


@pytest.fixture(scope="module")
def domains(tmp_path_factory):
    """Two folders of five and three images."""
    draws, folders = np.random.default_rng(0), [tmp_path_factory.mktemp(name) for name in ("horses", "zebras")]
    for folder, num in zip(folders, (5, 3), strict=True):
        for i in range(num):
            pixels = np.kron(draws.integers(0, 256, (4, 4, 3)), np.ones((4, 4, 1))).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    return folders


@pytest.mark.parametrize("layout", [n if n == "batch 1" else pytest.param(n, marks=SLOW) for n in LAYOUTS])
def test_updates(ranks, domains, layout):
    """With pools of two images, the third update is the first that may show an old one."""
    world_size, more, ds = LAYOUTS[layout]
    with mock.patch.object(agreement, "Reference", PublicStep):
        check_updates(ranks(world_size), game(*domains, **more), ds, 6)


@pytest.mark.slow
def test_a_resumed_run_is_the_same(ranks, domains, tmp_path):
    """Bit for bit: the images of the pools are saved between steps that fill them and steps that exchange some."""
    overrides = game(*domains, batch=2)
    uninterrupted = ranks(2).run(scenarios.uninterrupted, overrides, both(1), 6)
    parts = ranks(2).run(scenarios.resume, overrides, both(1), str(tmp_path), 3, 3)
    check_same_run(uninterrupted, parts)


def pools(overrides, ds, found):
    """Of a run that resumes, each image of this rank's pools, by its slot and its first element."""
    run = scenarios.build(overrides, ds, found)
    entry = run.entries["image_pool"]
    images = {(part.name, part.offset): part.values.numpy().copy() for part in entry.parts()}
    scenarios.destroy(run)
    return entry.numbers(), images


@pytest.mark.slow
def test_pools_are_found_in_another_layout(ranks, domains, tmp_path):
    """By the sample's index in the batch, whether two ranks or two micro-batches of one share it."""
    ranks(2).run(scenarios.resume, game(*domains, batch=4), both(1), str(tmp_path), 3, 3)
    found = checkpoint.newest(tmp_path)
    (numbers, of_two), (_, second) = ranks(2).run(pools, game(*domains, batch=4), both(1), found)
    ((_, of_one),) = ranks(1).run(pools, game(*domains, batch=4, accumulation=2), both(0), found)
    assert numbers == {"filled": 2, "batch": 4}
    of_two |= second
    assert of_one.keys() == of_two.keys() == {(slot, 2 * i * 6 * 32 * 32) for slot in "01" for i in range(2)}
    assert all(np.array_equal(images, of_two[key]) for key, images in of_one.items())
    assert len({images.tobytes() for images in of_one.values()}) == 4  # all different

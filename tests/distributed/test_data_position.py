"""A run reads each image of an epoch once, also where a resume changes the batch, whatever an update consists of."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from bigsgan import checkpoint
from bigsgan.data.datasets import DigitImages
from bigsgan.draws import Draws
from tests.distributed import scenarios
from tests.tiny import zero

NUM_DIGITS = 1797


def read_on_resume(overrides, ds, directory, batches, num_updates):
    """Global indices that this rank reads, ``num_updates`` with each batch, each resumed from the one before it."""
    read = []

    def noted(dataset, index):
        read.append(int(index))
        return dataset.images[index], dataset.labels[index]

    found, nimg = None, []
    with mock.patch.object(DigitImages, "__getitem__", noted):
        for batch in batches:
            before = len(read)
            run = scenarios.build([*overrides, f"batch={batch}"], ds, found)
            del read[before:]  # what sample grids show
            scenarios.update(run, num_updates)
            scenarios.save(run, Path(directory))
            nimg.append(run.counters.nimg)
            scenarios.destroy(run)
            found = checkpoint.newest(Path(directory))
    return read, nimg


@pytest.mark.slow
@pytest.mark.parametrize(
    "more, d_steps", [([], 1), pytest.param(["objective.d_steps=3", "accumulation=2"], 3, marks=pytest.mark.slow)]
)
def test_another_batch_goes_on_where_the_last_one_ended(ranks, tmp_path, more, d_steps):
    batches, num_updates = [8, 16], 4
    ds = dict.fromkeys(("generator", "discriminator"), zero(0))
    by_rank = ranks(2).run(read_on_resume, more, ds, str(tmp_path), batches, num_updates)
    num = d_steps * num_updates * sum(batches)
    expected = Draws(1).permutation("order", (0,), NUM_DIGITS)[:num]
    assert sorted(index for read, _ in by_rank for index in read) == sorted(expected.tolist())
    assert [nimg for _, nimg in by_rank] == [[32, 96]] * 2
    # Each rank's part of each micro-batch, in order.
    first = np.array(by_rank[0][0])
    assert np.isin(first[: num_updates * d_steps * 4], expected[: num_updates * d_steps * 8]).all()

"""The loader: values, layouts, resume, corrupt images, loading processes."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time

import pytest
import torch

from bigsgan.config.data import Data
from bigsgan.data import RealImages, Slice, build_dataset, build_training_dataset
from bigsgan.data.datasets import ImageDataset, SyntheticImages
from bigsgan.data.loader import Batch, CorruptImages
from bigsgan.data.order import EpochOrder, horizontal_flips, random_crops
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.images.reading import CorruptImage
from bigsgan.images.size import Size

CPU = torch.device("cpu")
DRAWS = Draws(5)


class NumberedImages(ImageDataset):
    """Image i is [[i, 0], [0, 255]] and has class i % 10; some cannot be read."""

    in_memory = False

    def __init__(self, length: int = 50, corrupt: tuple[int, ...] = ()) -> None:
        self.length, self.corrupt = length, corrupt

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.corrupt:
            raise CorruptImage(f"/data/{index}.png", "truncated")
        return torch.tensor([[[index, 0], [0, 255]]], dtype=torch.uint8), index % 10


class Unlabelled(NumberedImages):
    """All images have the label -1."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return super().__getitem__(index)[0], -1


class ThreadCounts(NumberedImages):
    """Every image tells the number of torch's threads in the process that reads it."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((1, 1, 1), torch.get_num_threads(), dtype=torch.uint8), 0


class SlowImages(NumberedImages):
    """An image takes a time to read, and one of them ten times as long as the others of its batch together."""

    def __init__(self, seconds: float, batch: int, slow: int) -> None:
        super().__init__(1000)
        self.seconds, self.batch, self.slow = seconds, batch, slow

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.seconds * (10 * self.batch if index == self.slow else 1))
        return super().__getitem__(index % 256)


class DeadlyImages(NumberedImages):
    """Reading ends the process, as the kernel does when memory runs out."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        os._exit(9)


def data_section(**changes) -> Data:
    files = {"kind": "folder", "root": "/data", "max_corrupt": 2}  # what stands for files in these tests
    kind = {"kind": "synthetic"} if changes.keys() & {"kind", "num_images"} else files
    return Data(**{"resolution": 2, "num_workers": 0, **kind, **changes})


def real_images(
    dataset, data=None, *, batch=12, accumulation=1, rank=0, world_size=1, position=0, skipped=()
) -> RealImages:
    return RealImages(
        dataset, data or data_section(), DRAWS, Slice(batch, accumulation, rank, world_size), CPU,
        start=(position, skipped),
    )  # fmt: skip


def indices_in(images: torch.Tensor) -> list[int]:
    """Undo the scaling of NumberedImages' first pixel: the index of each image."""
    return ((images[:, 0, 0, 0] + 1) * 127.5).round().int().tolist()


def assert_equal(phases, others):
    assert len(phases) == len(others)
    for micro_batches, other in zip(phases, others, strict=True):
        assert [m.images.tolist() for m in micro_batches] == [m.images.tolist() for m in other]
        assert [m.labels.tolist() for m in micro_batches] == [m.labels.tolist() for m in other]


def test_values_range_labels_and_order():
    real = real_images(NumberedImages())
    (micro_batch,) = real.next_phase()
    expected = EpochOrder(DRAWS, 50).indices(range(12))
    assert micro_batch.images.dtype == torch.float32
    assert micro_batch.labels.dtype == torch.int64
    assert micro_batch.labels.tolist() == [index % 10 for index in expected]
    first = torch.from_numpy(expected).float() / 127.5 - 1
    torch.testing.assert_close(micro_batch.images[:, 0, 0, 0], first, rtol=0, atol=1e-6)
    assert (micro_batch.images[:, 0, 0, 1] == -1).all()  # 0 and 255 reach the ends exactly
    assert (micro_batch.images[:, 0, 1, 1] == 1).all()


@pytest.mark.parametrize("accumulation, world_size", [(1, 2), (1, 4), (3, 1), (3, 2)])
@pytest.mark.parametrize("flip", [False, True])
def test_ranks_together_read_what_one_rank_reads(accumulation, world_size, flip):
    data = data_section(horizontal_flip=flip)
    whole = real_images(NumberedImages(), data, accumulation=accumulation)
    parts = [
        real_images(NumberedImages(), data, accumulation=accumulation, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for _ in range(6):  # 72 images: over the end of an epoch of 50
        shares = [part.next_phase() for part in parts]
        for micro_step, expected in enumerate(whole.next_phase()):
            images = torch.cat([share[micro_step].images for share in shares])
            labels = torch.cat([share[micro_step].labels for share in shares])
            assert torch.equal(images, expected.images)
            assert torch.equal(labels, expected.labels)


def test_flips_mirror_the_images_at_their_positions():
    plain = real_images(NumberedImages())
    flipped = real_images(NumberedImages(), data_section(horizontal_flip=True))
    for phase in range(3):
        (before,), (after,) = plain.next_phase(), flipped.next_phase()
        mirrored = horizontal_flips(DRAWS, range(phase * 12, phase * 12 + 12))
        assert 0 < mirrored.sum() < 12
        for index, mirror in enumerate(mirrored):
            columns = [1, 0] if mirror else [0, 1]
            assert torch.equal(after.images[index], before.images[index][:, :, columns])


def test_crops_are_cut_at_their_positions_before_the_flips():
    data = data_section(crop_from=5, num_images=30, image_channels=3)
    dataset = build_training_dataset(data)
    plain, flipped = (real_images(dataset, data.model_copy(update={"horizontal_flip": f})) for f in (False, True))
    for phase in range(3):
        positions = range(phase * 12, phase * 12 + 12)
        indices, offsets = EpochOrder(DRAWS, 30).indices(positions), random_crops(DRAWS, positions, Size.of(3))
        cut = [dataset[int(i)][0][:, y : y + 2, x : x + 2] for i, (y, x) in zip(indices, offsets, strict=True)]
        expected = torch.stack(cut).float() / 127.5 - 1
        torch.testing.assert_close(plain.next_phase()[0].images, expected, rtol=0, atol=1e-6)
        mirrored = torch.from_numpy(horizontal_flips(DRAWS, positions))[:, None, None, None]
        expected = torch.where(mirrored, expected.flip(3), expected)
        torch.testing.assert_close(flipped.next_phase()[0].images, expected, rtol=0, atol=1e-6)


def test_input_and_target_of_a_pair_are_cut_at_one_place():
    data = data_section(kind="synthetic_pairs", num_classes=0, resolution=16, crop_from=24, image_channels=3)
    large, real = build_training_dataset(data), real_images(build_training_dataset(data), data)
    assert large[0][0].shape == (6, 24, 24)
    index, (top, left) = (
        EpochOrder(DRAWS, len(large)).indices(range(1))[0],
        random_crops(DRAWS, range(1), Size.of(8))[0],
    )
    source, target = large[int(index)][0].float().div(127.5).sub(1).split(3)
    got = real.next_phase()[0].images[0]
    for whole, part in ((source, got[:3]), (target, got[3:])):
        torch.testing.assert_close(part, whole[:, top : top + 16, left : left + 16], rtol=0, atol=1e-6)
    assert build_dataset(data)[0][0].shape == (6, 16, 16)


def test_resuming_at_a_phase_equals_going_on():
    data = data_section(horizontal_flip=True)
    running = real_images(NumberedImages(), data, accumulation=2)
    for _ in range(5):
        running.next_phase()
    assert running.position == 60
    resumed = real_images(NumberedImages(), data, accumulation=2, position=60)
    assert resumed.position == 60
    assert_equal([running.next_phase() for _ in range(3)], [resumed.next_phase() for _ in range(3)])


def test_another_batch_begins_where_the_last_one_ended():
    order = EpochOrder(DRAWS, 50).indices(range(100)).tolist()
    running = real_images(NumberedImages(), batch=12)
    read = [i for _ in range(3) for (m,) in [running.next_phase()] for i in indices_in(m.images)]
    resumed = real_images(NumberedImages(), batch=20, accumulation=2, position=running.position, skipped=[(60, 66)])
    read += [i for _ in range(2) for m in resumed.next_phase() for i in indices_in(m.images)]
    assert read == [*order[:56], *order[66:86]]
    assert resumed.position == 86


def test_data_in_memory_is_read_in_this_process():
    before = multiprocessing.active_children()
    data = data_section(num_workers=3, num_images=60)
    real = real_images(SyntheticImages(data), data)
    (micro_batch,) = real.next_phase()
    assert multiprocessing.active_children() == before
    dataset = SyntheticImages(data)
    expected = [dataset[int(i)][0].float() / 127.5 - 1 for i in EpochOrder(DRAWS, 60).indices(range(12))]
    torch.testing.assert_close(micro_batch.images, torch.stack(expected), rtol=0, atol=1e-6)


def test_a_corrupt_image_gives_way_to_the_next_readable_one_and_is_logged_once(caplog):
    real = real_images(NumberedImages(corrupt=(7, 8, 49)), data_section(max_corrupt=3))
    with caplog.at_level(logging.WARNING, logger="bigsgan.data.loader"):
        read = [i for _ in range(25) for (m,) in [real.next_phase()] for i in indices_in(m.images)]  # six epochs
    order = EpochOrder(DRAWS, 50).indices(range(300)).tolist()
    assert read == [{7: 9, 8: 9, 49: 0}.get(index, index) for index in order]
    messages = sorted(record.getMessage() for record in caplog.records)  # once each, though each was met six times
    assert messages == [f"skipped an unreadable image: /data/{index}.png: truncated" for index in (49, 7, 8)]


def test_too_many_corrupt_images_stop_the_run():
    order = EpochOrder(DRAWS, 50).indices(range(24)).tolist()
    corrupt = (order[1], order[5], order[20])  # two in phase 0, the third in phase 1
    assert not {index + 1 for index in corrupt} & set(corrupt)
    real = real_images(NumberedImages(corrupt=corrupt), data_section(max_corrupt=2))
    real.next_phase()
    said = rf"2 is less than .* rank 0 has found, 3 \(the last is /data/{corrupt[2]}\.png: truncated\)"
    with pytest.raises(UserError, match=rf"^data\.max_corrupt: {said}"):
        real.next_phase()


def test_data_that_has_gone_is_named(tmp_path):
    corrupt = CorruptImages(data_section(root=str(tmp_path / "photos"), max_corrupt=10), 10, 0)
    (tmp_path / "photos").mkdir()
    gone = CorruptImages(data_section(root=str(tmp_path / "photos"), max_corrupt=10), 10, 0)
    batch = Batch(*[torch.zeros(0)] * 2, [("photos/a.png", "No such file")], True)
    gone.count(batch)
    (tmp_path / "photos").rmdir()
    with pytest.raises(UserError, match=r"^data.root: '.*photos' does not exist any more; put it back, and resume"):
        gone.count(batch)
    corrupt.count(batch)  # a name that never was a path, as of data from outside


def test_a_data_set_without_a_readable_image_stops_and_does_not_search_for_ever():
    real = real_images(NumberedImages(length=3, corrupt=(0, 1, 2)), data_section(max_corrupt=10))
    with pytest.raises(UserError) as caught:
        real.next_phase()
    assert caught.value.said.startswith(
        "data.max_corrupt: 10 does not help, as data-parallel rank 0 finds no readable image in place of"
    )
    assert caught.value.remedy == "repair or remove the images that the log names"  # raising the number helps nobody


@pytest.mark.parametrize(
    "images, text",
    [
        (NumberedImages, r"must be at least 10, got 4 \(the data has the labels 0 and 9, and classes"),
        (Unlabelled, r"must be 0 with this data, got 4 \(an image has the label -1, and classes count from 0\)"),
    ],
)
def test_labels_outside_the_classes_are_refused_before_they_reach_the_device(images, text):
    real = real_images(images(), data_section(num_classes=4), batch=50)
    with pytest.raises(UserError, match=f"data.num_classes: {text}"):
        real.next_phase()


def test_loading_processes_read_what_this_process_reads(caplog):
    bad = int(EpochOrder(DRAWS, 50).indices(range(40, 41))[0])  # of phase 3, rank 1's: positions 39 to 41 and 45 to 47
    dataset = NumberedImages(corrupt=(bad,))
    data = data_section(num_workers=2, prefetch=2, horizontal_flip=True)
    state, before = torch.get_rng_state(), set(multiprocessing.active_children())
    parallel = real_images(dataset, data, accumulation=2, rank=1, world_size=2, position=36)
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == 2
    alone = real_images(dataset, data_section(horizontal_flip=True), accumulation=2, rank=1, world_size=2, position=36)
    with caplog.at_level(logging.WARNING, logger="bigsgan.data.loader"):
        read = [parallel.next_phase() for _ in range(9)]
        messages = [record.getMessage() for record in caplog.records]
    assert_equal(read, [alone.next_phase() for _ in range(9)])
    assert messages == [f"skipped an unreadable image: /data/{bad}.png: truncated"]
    parallel.close()
    assert not any(worker.is_alive() for worker in workers)
    assert torch.equal(torch.get_rng_state(), state)  # the run's other draws do not notice the loader


def test_loading_processes_have_one_thread_each_and_their_death_is_reported():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        real = real_images(ThreadCounts(), data_section(num_workers=1))
        (micro_batch,) = real.next_phase()
        real.close()
    finally:
        torch.set_num_threads(threads)
    assert ((micro_batch.images + 1) * 127.5).round().unique().tolist() == [1]
    real = real_images(DeadlyImages(), data_section(num_workers=1))
    with pytest.raises(UserError, match=r"data.num_workers: 1 fails: a loading process died \(DataLoader worker \(pid"):
        real.next_phase()
    real.close()


def waits(prefetch, num_workers=2, update=0.1, num_updates=30):
    """Of each update, in updates' times, for batches that take a process 0.6 of that time, once 6 of it."""
    batch = 4
    slow = int(EpochOrder(DRAWS, 1000).indices(range(20 * batch, 20 * batch + 1))[0])  # of the twentieth batch
    dataset = SlowImages(0.6 * update / batch, batch, slow)
    real = real_images(dataset, data_section(num_workers=num_workers, prefetch=prefetch), batch=batch)
    found = []
    for _ in range(num_updates):
        before = real.waited_seconds
        real.next_phase()
        found.append((real.waited_seconds - before) / update)
        time.sleep(update)
    real.close()
    return found[10:]  # what begins a run is not the question


@pytest.mark.slow
def test_a_spike_of_ten_times_the_latency_is_absorbed():
    """With the default of batches read ahead no update waits for it; with fewer one does."""
    assert max(waits(data_section().prefetch)) < 1  # a busy machine lets anything wait a little
    assert max(waits(prefetch=1)) > 2


def test_signals_that_stop_a_run_do_not_end_its_loading_processes():
    """Torchrun and Slurm send them to every process of a rank, which has batches to make yet before it saves."""
    before = set(multiprocessing.active_children())
    real = real_images(NumberedImages(64), data_section(num_workers=2, prefetch=1))
    real.next_phase()
    workers = set(multiprocessing.active_children()) - before
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGUSR1)
    for _ in range(8):  # more than was read ahead
        real.next_phase()
    real.close()
    for worker in workers:
        worker.join(10)
    assert not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("num_images, most", [(50, 10), (9_999, 10), (20_000, 20), (1_281_167, 1_281)])
def test_the_unreadable_images_that_are_skipped_grow_with_the_data_set(num_images, most):
    """Eleven damaged files are nothing among millions; a number that the recipe gives is kept."""
    assert Data().most_corrupt(num_images) == most
    assert data_section(max_corrupt=3).most_corrupt(num_images) == 3
    assert data_section(max_corrupt=0.01).most_corrupt(num_images) == num_images // 100

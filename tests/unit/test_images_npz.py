"""Archives of images: numpy's own reading of them, their bytes, and memory while they are written and read."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from bigsgan.images.npz import mapped_arrays, write_images

SHAPE = (50, 8, 8, 3)


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(0, 256, SHAPE, dtype=np.uint8)


@pytest.mark.parametrize("sizes", [[50], [20, 20, 10], [1] * 50])
def test_numpy_reads_what_is_written(tmp_path, images, sizes):
    labels = np.arange(50) % 7
    ends = np.cumsum(sizes)
    batches = (images[end - size : end] for size, end in zip(sizes, ends, strict=True))
    write_images(tmp_path / "a.npz", SHAPE, batches, labels)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert sorted(found) == ["arr_0", "arr_1"]
        assert np.array_equal(found["arr_0"], images)
        assert np.array_equal(found["arr_1"], labels)
        assert (found["arr_0"].dtype, found["arr_1"].dtype) == (np.uint8, np.int64)
    write_images(tmp_path / "b.npz", SHAPE, iter([images]), labels)
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
    write_images(tmp_path / "c.npz", SHAPE, iter([images]), None)
    with np.load(tmp_path / "c.npz") as found:
        assert list(found) == ["arr_0"]


def test_other_images_than_announced_are_refused(tmp_path, images):
    for batches in ([images[:10]], [images, images[:1]], [images[:, :4]], [images.astype(np.float32)]):
        with pytest.raises(ValueError, match="images"):
            write_images(tmp_path / "a.npz", SHAPE, batches, None)


def test_what_numpy_writes_is_mapped(tmp_path, images):
    arrays = {"arr_0": images, "mu": np.arange(4.0), "sigma": np.asfortranarray(np.arange(16.0).reshape(4, 4))}
    np.savez(tmp_path / "a.npz", **arrays)
    found = mapped_arrays(tmp_path / "a.npz", [*arrays, "arr_1"])
    assert found.keys() == arrays.keys()
    for name, value in arrays.items():
        assert isinstance(found[name], np.memmap)
        assert np.array_equal(found[name], value)


def test_a_few_batches_lie_in_memory(tmp_path):
    """64 MiB of images go through some MiB."""
    num, batch = 64, np.zeros((1, 1024, 1024, 1), np.uint8)
    tracemalloc.start()
    write_images(tmp_path / "a.npz", (num, 1024, 1024, 1), (batch for _ in range(num)), None)
    total = sum(int(image.max()) for image in mapped_arrays(tmp_path / "a.npz", ["arr_0"])["arr_0"])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert total == 0
    assert peak < 8 << 20


def test_other_files_are_refused(tmp_path, images):
    np.savez_compressed(tmp_path / "compressed.npz", images)
    np.savez(tmp_path / "objects.npz", np.array([{}, []], dtype=object))
    np.savez(tmp_path / "cut.npz", images)
    content = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.npz").write_text("nothing")
    np.save(tmp_path / "plain.npy", images)
    for name in ("compressed.npz", "objects.npz", "cut.npz", "text.npz", "plain.npy"):
        with pytest.raises(ValueError):  # noqa: PT011 - whatever zipfile and numpy say
            mapped_arrays(tmp_path / name, ["arr_0"])
    for missing in (tmp_path, tmp_path / "nothing.npz"):
        with pytest.raises(OSError):  # noqa: PT011
            mapped_arrays(missing, ["arr_0"])

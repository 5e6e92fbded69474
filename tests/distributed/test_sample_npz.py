"""Archives and single files of samples have the same bytes from any number of ranks."""

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from bigsgan import sample
from bigsgan.checkpoint import tags
from bigsgan.config.run_directory import write_recipe
from bigsgan.runtime import comm
from tests.distributed import scenarios
from tests.tiny import tiny_recipe, zero

NUM = 45


def trained(overrides, ds, directory):
    run = scenarios.build(overrides, ds)
    for _ in range(2):
        scenarios.save(run, Path(directory))
        scenarios.update(run, 1)
    scenarios.destroy(run)


def behind(directory, complete=tags.complete):
    """Checkpoints but the newest, as a rank sees them that looks before the run saves."""
    return iter(list(complete(directory))[1:])


def sampled(run, out):
    files = not out.endswith(sample.NPZ)
    options = sample.Options(num=NUM, truncations=[], seed=3, classes=None, batch=7, files=files)
    with mock.patch.object(tags, "complete", tags.complete if comm.rank() == 0 else behind):
        sample.main(Path(run), Path(out), None, False, options, comm.rank(), comm.world_size(), comm)


@pytest.fixture
def run(ranks, tmp_path):
    directory = tmp_path / "run"
    ranks(1).run(trained, [], dict.fromkeys(("generator", "discriminator"), zero(0)), str(directory / "checkpoints"))
    write_recipe(tiny_recipe(tmp_path), directory, {})
    return directory


@pytest.mark.slow
def test_any_number_of_ranks_writes_the_same_bytes(ranks, run, tmp_path):
    """Of seven batches, the last smaller: of two ranks, one has none in the last round."""
    written = []
    for num in (1, 2):
        out = tmp_path / f"{num}.npz"
        ranks(num).run(sampled, str(run), str(out))
        written.append(out.read_bytes())
    assert written[0] == written[1]
    with np.load(tmp_path / "2.npz") as found:
        assert found["arr_0"].shape == (NUM, 16, 16, 1)
        assert np.bincount(found["arr_1"]).tolist() == [5] * 5 + [4] * 5
        assert len({image.tobytes() for image in found["arr_0"]}) == NUM


@pytest.mark.slow
def test_under_a_launcher(run, tmp_path):
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    env |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    out = tmp_path / "samples.npz"
    launch = "torchrun --standalone --nproc_per_node 2 --no-python --"
    command = [*launch.split(), "bigsgan", "sample", "--num", "20", "--batch", "4"]
    done = subprocess.run(
        [*command, "--run", run, "--out", out], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("20 images of") == 1
    with np.load(out) as found:
        images, labels = found["arr_0"], found["arr_1"]
    assert labels.tolist() == [*range(10)] * 2
    files = tmp_path / "files"
    done = subprocess.run(
        [*command, "--run", run, "--files", "--out", files], cwd=tmp_path, env=env, capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{files}: ") == 2
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        assert np.array_equal(np.asarray(Image.open(files / f"class{label:03d}_sample{i:06d}.png")), image[:, :, 0])
    command += ["--run", run, "--classes", "77", "--out", out]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode != 0
    assert done.stderr.count("bigsgan: --classes: must be 0 to 9, the classes of the run, got 77") == 1

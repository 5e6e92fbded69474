"""NVMe offload: what is refused, and whose the swap files are."""

import errno
import os
import socket

import pytest

from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.sections import Optimizer
from bigsgan.engines.deepspeed import nvme
from bigsgan.errors import UserError


def file_for(tmp_path, **section):
    section = {"device": "nvme", "nvme_path": str(tmp_path), **section}
    content = {"zero_optimization": {"stage": 3, "offload_optimizer": section}}
    return DeepSpeedFile(tmp_path / "ds.json", content, 3, "bf16", "nvme", "none")


@pytest.mark.parametrize("is_compatible", [True, False])
def test_a_machine_without_the_op_is_refused(tmp_path, monkeypatch, is_compatible):
    monkeypatch.setattr(nvme.AsyncIOBuilder, "is_compatible", lambda self, verbose: is_compatible)
    if is_compatible:
        nvme.check_nvme("generator", file_for(tmp_path))
        return
    with pytest.raises(UserError) as caught:
        nvme.check_nvme("generator", file_for(tmp_path))
    assert str(caught.value).startswith("engines.generator.ds_config: ")
    assert "needs libaio and a C++ compiler" in str(caught.value)
    assert "install libaio-dev" in str(caught.value)
    assert "set the offload device to cpu" in str(caught.value)


@pytest.mark.parametrize(
    "kind, momentum, section, expected",
    [
        ("adam", 0.0, {}, 4),  # weights, gradients, exp_avg, exp_avg_sq
        ("sgd", 0.0, {}, 2),
        ("sgd", 0.9, {}, 3),
        ("rmsprop", 0.0, {}, 3),
        ("rmsprop", 0.9, {}, 4),
        ("adam", 0.0, {"pipeline_read": True}, 8),
        ("adam", 0.0, {"pipeline_read": True, "pipeline_write": True}, 12),
        ("adam", 0.0, {"buffer_count": 7}, 7),
    ],
)
def test_buffers_suffice(tmp_path, kind, momentum, section, expected):
    optimizer = Optimizer(kind=kind, lr=1e-3, momentum=momentum)
    assert nvme.num_swap_buffers(file_for(tmp_path, **section), optimizer) == expected


def test_too_few_buffers_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"offload_optimizer.buffer_count: must be at least 4 with adam, got 3; set"):
        nvme.num_swap_buffers(file_for(tmp_path, buffer_count=3), Optimizer(kind="adam", lr=1e-3))


def test_a_directory_is_one_engines_of_one_rank(tmp_path):
    paths, releases = set(), []
    for network in ("generator", "discriminator"):
        for rank in range(2):
            path, release = nvme.open_swap_directory(file_for(tmp_path), network, rank)
            assert [*path.iterdir()] == []
            paths.add(path)
            releases.append(release)
    assert len(paths) == 4
    holder = rf"is in use by process {os.getpid()} on {socket.gethostname()} since .*; give each run its own directory"
    with pytest.raises(UserError, match=rf"nvme_path: .* {holder}$"):
        nvme.open_swap_directory(file_for(tmp_path), "generator", 1)
    for release in releases:
        release()
    assert not any(path.exists() for path in paths)


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path):
    path = tmp_path / "bigsgan" / "generator" / "rank00000"
    path.mkdir(parents=True)
    (path / "old").touch()
    (tmp_path / "theirs").touch()
    found, release = nvme.open_swap_directory(file_for(tmp_path), "generator", 0)
    assert found == path
    assert [*path.iterdir()] == []
    release()
    assert (tmp_path / "theirs").exists()
    _, release = nvme.open_swap_directory(file_for(tmp_path), "generator", 0)  # the lock is gone too
    release()


def test_a_file_system_that_refuses_direct_writes_is_refused(tmp_path, monkeypatch):
    def write(descriptor, block):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(UserError, match=r"offload_optimizer.nvme_path: must support O_DIRECT writes in blocks of"):
        nvme.open_swap_directory(file_for(tmp_path), "generator", 0)
    monkeypatch.undo()
    _, release = nvme.open_swap_directory(file_for(tmp_path), "generator", 0)  # nothing was left locked
    release()


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"zero_optimization.offload_optimizer.nvme_path: must be a directory"):
        nvme.open_swap_directory(file_for(tmp_path / "none"), "generator", 0)
    assert not (tmp_path / "none").exists()

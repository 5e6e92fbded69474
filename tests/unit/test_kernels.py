"""Kernels: the fastest, or the same in every run."""

from contextlib import nullcontext

import pytest
import torch
from torch._inductor import config as inductor

from bigsgan.engines import compiling
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm
from bigsgan.runtime.kernels import choose_kernels, kernels


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """torch's switches as they were, after the test."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory
    with inductor.patch(deterministic=False) if hasattr(inductor, "deterministic") else nullcontext():
        yield
    torch.use_deterministic_algorithms(False)
    cudnn.deterministic, cudnn.benchmark, torch.utils.deterministic.fill_uninitialized_memory = before


def test_what_has_no_deterministic_kernel_raises():
    choose_kernels(deterministic=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark
    assert not torch.utils.deterministic.fill_uninitialized_memory
    with pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


@pytest.mark.parametrize(
    "device, searches, measures", [("cuda", True, True), ("cpu", True, False), ("cuda", False, False)]
)
def test_cudnn_measures_its_algorithms_on_a_gpu(monkeypatch, device, searches, measures):
    torch.backends.cudnn.benchmark = not measures
    monkeypatch.setattr(comm, "device", lambda: torch.device(device))
    choose_kernels(deterministic=False, searches=searches)
    assert torch.backends.cudnn.benchmark is measures
    assert torch.backends.cudnn.benchmark_limit == 10  # of cuDNN's algorithms, for each shape
    assert not torch.are_deterministic_algorithms_enabled()


def test_switches_are_as_they_were_behind_a_block():
    def switches():
        cudnn = torch.backends.cudnn
        return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark

    choose_kernels(deterministic=False)
    before = switches()
    with kernels(deterministic=True):
        assert switches() == (True, True, False)
    assert switches() == before == (False, False, False)


@pytest.mark.skipif(not hasattr(inductor, "deterministic"), reason="torch has this switch since 2.10")
@pytest.mark.parametrize("deterministic", [True, False])
def test_compiled_networks_follow(deterministic):
    with kernels(deterministic):
        inductor.deterministic = not deterministic
        compiling.passes(LayerStack([torch.nn.Identity()]), "whole")
        assert inductor.deterministic is deterministic

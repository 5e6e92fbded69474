import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.monitor import Statistics

CPU = torch.device("cpu")


def vector_of(statistics: Statistics) -> Tensor:
    """What one rank would put into the sum over ranks."""
    seen = []

    def keep(vector: Tensor) -> Tensor:
        seen.append(vector.clone())
        return vector

    statistics.reduce(keep)
    return seen[0]


def test_means_are_over_all_elements_of_all_steps():
    statistics = Statistics(CPU)
    values = [torch.tensor(3.0), torch.tensor([1.0, 5.0, 6.0]), torch.full((2, 2), -1.0)]
    for value in values:
        statistics.add("logits/real", value)
    statistics.add_host("lr/generator", 1e-4)
    statistics.add_host("lr/generator", 3e-4)
    means = statistics.reduce(lambda vector: vector)
    assert means == {"logits/real": pytest.approx(11 / 8), "lr/generator": pytest.approx(2e-4, rel=1e-12)}


def test_reduce_starts_afresh():
    statistics = Statistics(CPU)
    statistics.add("loss", torch.tensor(100.0))
    statistics.add_host("lr", 100.0)
    statistics.reduce(lambda vector: vector)
    statistics.add("loss", torch.tensor(2.0))
    statistics.add_host("lr", 3.0)
    assert statistics.reduce(lambda vector: vector) == {"loss": 2.0, "lr": 3.0}
    assert statistics.reduce(lambda vector: vector) == {}


def test_two_ranks_give_the_mean_over_both():
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(num, generator=generator) for num in (3, 5, 8, 2)]
    ranks = [Statistics(CPU), Statistics(CPU)]
    for index, part in enumerate(parts):
        ranks[index % 2].add("logits/fake", part)
    ranks[0].add_host("images_per_second", 10.0)
    ranks[1].add_host("images_per_second", 30.0)
    other = vector_of(ranks[1])
    means = ranks[0].reduce(lambda vector: vector + other)
    expected = sum(value for part in parts for value in part.tolist()) / 18
    assert means == {"images_per_second": 20.0, "logits/fake": pytest.approx(expected, rel=1e-12)}


def test_a_rank_without_elements_does_not_move_the_mean():
    full, empty = Statistics(CPU), Statistics(CPU)
    full.add("accuracy/real", torch.tensor([0.0, 1.0]))
    empty.add("accuracy/real", torch.zeros(0))
    other = vector_of(empty)
    assert full.reduce(lambda vector: vector + other) == {"accuracy/real": 0.5}
    empty.add("accuracy/real", torch.zeros(0))
    assert math.isnan(empty.reduce(lambda vector: vector)["accuracy/real"])


def test_bfloat16_values_are_summed_in_float64():
    statistics = Statistics(CPU)
    value = torch.full((1000,), 1.0078125, dtype=torch.bfloat16)  # exact in bfloat16, its sum is not
    for _ in range(10):
        statistics.add("logits/real", value)
    assert statistics.reduce(lambda vector: vector) == {"logits/real": 1.0078125}


def test_a_later_change_of_the_value_in_place_does_not_move_the_mean():
    statistics = Statistics(CPU)
    value = torch.tensor(4.0, dtype=torch.float64)
    statistics.add("loss", value)
    value.fill_(9.0)
    assert statistics.reduce(lambda vector: vector) == {"loss": 4.0}


def test_values_of_inference_mode_and_with_a_graph_mix():
    statistics = Statistics(CPU)
    with torch.inference_mode():
        statistics.add("loss", torch.tensor(1.0))
    weight = torch.tensor(2.0, requires_grad=True)
    statistics.add("loss", weight * 1.0)
    assert not any(total.requires_grad for total in statistics._device_sums.values())
    assert statistics.reduce(lambda vector: vector) == {"loss": 1.5}


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_adding_costs_two_operations_and_reads_nothing_back():
    statistics = Statistics(CPU)
    value = torch.ones(4)
    statistics.add("loss", value)
    with Operations() as operations:
        statistics.add("loss", value)
        statistics.add_host("lr", 1.0)
    # detach is a view: no kernel. torch 2.8 shows it twice.
    assert [name for name in operations.names if name != "detach"] == ["sum", "add"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_adding_on_a_gpu_waits_for_nothing():
    statistics = Statistics(torch.device("cuda"))
    value = torch.ones(4, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            statistics.add("loss", value)
            statistics.add_host("lr", 0.5)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert statistics.reduce(lambda vector: vector) == {"loss": 1.0, "lr": 0.5}

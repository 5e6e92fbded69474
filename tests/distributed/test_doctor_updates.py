"""What the doctor says of a recipe's updates."""

import time
from types import SimpleNamespace
from unittest import mock

import pytest

from bigsgan.bench.measure import Visit
from bigsgan.data import RealImages
from bigsgan.doctor import updates
from bigsgan.doctor.checks import Subject
from tests.tiny import tiny_plan

SPEEDS = {  # share of the time that data takes, that the device computes; of a product's speed; a GPU; what it says
    "data": (0.4, 0.5, 0.3, True, "limited by reading data (40% of the time)"),
    "host": (0.0, 0.5, 0.3, True, "limited by the host, which launches kernels (the GPU computes 50% of the time)"),
    "gpu": (0.01, 0.97, 0.31, True, "limited by the GPU, at 31% of a matrix product's speed"),
    "cpu": (0.01, 0.5, 0.31, False, "limited by the CPU, at 31% of a matrix product's speed"),
    "stages": (0.01, 0.97, None, True, "limited by the GPU"),
}


@pytest.mark.parametrize("waits, busy, share, has_device, said", SPEEDS.values(), ids=SPEEDS)
def test_what_limits_updates(waits, busy, share, has_device, said):
    numbers = {"data_wait_share": waits, "busy_share": busy, "achieved_share": share}
    assert updates.limit(numbers, has_device) == said


def visits(*peaks):
    own = Visit(1.0, 0.0, None, 0.9, None, 0, 0, {}, {})
    return [own._replace(device_peak=peak) for peak in peaks]


@pytest.mark.parametrize("held, status", [(100, "pass"), (92, "pass"), (90, "fail"), (110, "pass"), (112, "fail")])
def test_memory_is_within_a_tenth_of_the_plan(held, status):
    """Of the rank that holds most, 100 bytes being planned: samples, which are not made here, do not count."""
    peak = {total: SimpleNamespace(total=total) for total in (40, 60, 900)}
    planned = SimpleNamespace(stays=40, update={"a": peak[40]}, penalised={"b": peak[60]}, samples=peak[900])
    with mock.patch.object(updates, "predict", return_value=planned):
        found = updates._with_memory(None, visits(held - 50, held), "text", {})
    assert found.status == status
    assert found.numbers["memory_error"] == pytest.approx(100 / held - 1)


def examined(directory, overrides):
    plan = tiny_plan(directory, 1, overrides, {})
    gather = SimpleNamespace(gather=lambda value: [value])
    return updates.updates(Subject(gather, plan=plan))


def slow(directory, overrides):
    """The check where each phase's images come late."""
    original = RealImages.next_phase

    def late(self):
        time.sleep(0.5)
        self.waited_seconds += 0.5
        return original(self)

    with mock.patch.object(RealImages, "next_phase", late):
        return examined(directory, overrides)


@pytest.mark.slow
def test_slow_data_are_found(ranks, tmp_path):
    (found,) = ranks(1).run(examined, tmp_path, [])
    assert found.status == "pass"
    assert found.numbers["images_per_second"] == pytest.approx(8 / found.numbers["seconds_per_update"])
    (found,) = ranks(1).run(slow, tmp_path, [])
    assert "limited by reading data" in found.said
    assert found.numbers["seconds_per_update"] > 0.5


def test_compiled_recipes_are_left_to_the_benchmark(tmp_path):
    found = examined(tmp_path, ["engines.generator.compile=whole"])
    assert found.status == "not applicable"

"""What the doctor says of a recipe's updates."""

import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from bigsgan.bench.measure import Visit
from bigsgan.data import RealImages
from bigsgan.doctor import updates
from bigsgan.doctor.checks import Subject
from bigsgan.engines.zero import ZeroEngine
from bigsgan.planner.memory import Prediction
from bigsgan.planner.update import Peak
from tests.tiny import tiny_plan

MIB = 2**20
SPEEDS = {  # share of the time for data, that ranks wait, of communication, of computing; a GPU; what it says
    "data": (0.4, 0.3, 0.3, 0.5, True, "limited by reading data (40% of the time)"),
    "ranks": (0.01, 0.3, 0.4, 0.97, True, "limited by ranks that wait for each other (30% of the time)"),
    "communication": (0.01, None, 0.3, 0.97, True, "limited by communication (30% of the time)"),
    "communication of CPUs": (0.01, 0.1, 0.3, 0.97, False, "limited by communication (30% of the time)"),
    "host": (0.0, None, 0.1, 0.5, True, "limited by the host, which launches kernels"),
    "gpu": (0.01, 0.1, 0.1, 0.97, True, "limited by the GPU"),
    "cpu": (0.01, None, 0.1, 0.5, False, "limited by the CPU"),
}


@pytest.mark.parametrize("data, waits, talks, busy, has_device, said", SPEEDS.values(), ids=SPEEDS)
def test_what_limits_updates(data, waits, talks, busy, has_device, said):
    numbers = {"data_wait_share": data, "waiting_share": waits, "communication_share": talks, "busy_share": busy}
    assert updates.limit(numbers, has_device) == said


@pytest.mark.parametrize(
    "share, has_device, said",
    [
        (0.31, True, "the GPU is idle 4% of the time, and at 31% of a matrix product's speed"),
        (None, False, "the CPU is idle 4% of the time; operations of stages are not counted"),
    ],
)
def test_idle_time_and_share_of_the_peak_are_told(share, has_device, said):
    assert updates.shares({"idle_share": 0.04, "achieved_share": share}, has_device) == said


def visits(*peaks):
    own = Visit(1.0, 0.0, None, 0.9, None, 0, 0, {}, {})
    return [own._replace(device_peak=peak) for peak in peaks]


@pytest.mark.parametrize(
    "planned, held, status",
    [
        (10_000, 10_000, "pass"),
        (10_000, 9_200, "pass"),
        (10_000, 9_000, "fail"),
        (10_000, 11_100, "pass"),
        (10_000, 11_200, "fail"),
        # Workspaces: a small recipe's are several times what is planned, and nothing explains too little.
        (40, 40 + 4 * 32, "pass"),
        (40, 40 + 512, "pass"),
        (40, 40 + 513, "fail"),
        (40, 36, "fail"),
    ],
)
def test_memory_is_within_a_tenth_of_the_plan_but_for_workspaces(planned, held, status):
    """In MiB, of the rank that holds most: another's samples do not count, as none are made here."""
    stays, peak = planned * MIB * 2 // 5, {part: Peak(part * planned * MIB // 10, 0, 0) for part in (1, 4, 6, 90)}
    plan = Prediction({}, 0, stays, {}, 0, {"a": peak[4]}, {"b": peak[6]}, peak[1])
    samples = replace(plan, penalized={}, samples=peak[90])
    with mock.patch.object(updates, "predict_each", return_value=[plan, samples]):
        found = updates._with_memory(None, visits(held * MIB // 2, held * MIB), "text", {})
    assert found.status == status
    assert found.numbers["memory_error"] == pytest.approx(planned / held - 1)


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


def examined_by_two(directory, overrides):
    plan = tiny_plan(directory, 2, overrides, {})

    def gather(value):
        found = [None] * 2
        dist.all_gather_object(found, value)
        return found

    return updates.updates(Subject(SimpleNamespace(gather=gather), plan=plan))


@pytest.mark.slow
def test_communication_of_cpus_is_measured(ranks, tmp_path):
    found, _ = ranks(2).run(examined_by_two, tmp_path, [])
    quick = found.numbers["communication_share"]
    assert 0 < quick < 1
    assert 0 <= found.numbers["idle_share"] < 1


def asleep(directory, overrides):
    """The check where each pass takes a while, and neither core nor message."""
    compute = {kind: getattr(ZeroEngine, kind) for kind in ("forward", "backward")}

    def slowly(kind):
        return lambda *arguments: (time.sleep(0.03), compute[kind](*arguments))[1]

    with mock.patch.multiple(ZeroEngine, **{kind: slowly(kind) for kind in compute}):
        return examined_by_two(directory, overrides)


@pytest.mark.slow
def test_ranks_of_their_own_wait_for_each_other(ranks, tmp_path):
    """With one micro-batch, G and D hardly compute at once. What they expect meanwhile is no communication."""
    found, _ = ranks(2).run(asleep, tmp_path, ["engines.generator.ranks=1"])
    assert "limited by ranks that wait for each other" in found.said
    assert found.numbers["waiting_share"] > 0.3
    assert found.numbers["communication_share"] < 0.2


def compiled(directory):
    plan = tiny_plan(directory, 1, ["engines.generator.compile=whole"], {})
    subject = Subject(SimpleNamespace(gather=lambda value: [value]), plan=plan)
    return updates.updates(subject), updates.compiled_updates(subject)


@pytest.mark.nightly
def test_updates_of_a_compiled_recipe(ranks, tmp_path):
    left, found = ranks(1).run(compiled, tmp_path)[0]
    assert (left.status, left.said) == (
        "not applicable",
        "the recipe compiles, which takes minutes: see recipe.compiled",
    )
    assert found.status == "pass"
    assert found.numbers["images_per_second"] == pytest.approx(8 / found.numbers["seconds_per_update"])


def test_a_recipe_that_compiles_nothing(tmp_path):
    plan = tiny_plan(tmp_path, 1, [], {})
    assert updates.compiled_updates(Subject(None, plan=plan)).status == "not applicable"

"""The share of the time with a kernel, and what is left after a block of measurements."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
from torch.autograd import DeviceType

from bigsgan.bench import measure
from bigsgan.bench.measure import _profiled_shares
from bigsgan.engines.deepspeed.leftovers import leaving_nothing, release_process_groups


class Ticking:
    """A loop whose update takes 2 s of a clock that is made up."""

    waited_seconds = 0.0

    def __init__(self):
        self.now, self.updates = 0.0, 0

    def __call__(self):
        self.now += 2
        self.updates += 1

    def idle(self):
        return None

    def means(self):
        return {}


def event(name, start, end, device=DeviceType.CUDA):
    return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end))


@pytest.fixture
def loop(monkeypatch):
    """With a profiler that takes 30 s to start, and shows one kernel of 1 s."""
    found = Ticking()

    @contextmanager
    def slow_profile(activities):
        found.now += 30
        yield SimpleNamespace(
            events=lambda: [event("gemm", 5e5, 15e5), event("nccl:all_reduce", 0, 2e6, DeviceType.CPU)]
        )

    monkeypatch.setattr(measure, "profile", slow_profile)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: found.now)
    return found


def test_the_start_of_the_profiler_does_not_count(loop):
    assert _profiled_shares(loop) == (0.5, 0)


def test_communication_counts_where_nothing_computes(loop, monkeypatch):
    """Of 2 s: products from 0.2 to 1.0 s, NCCL from 0.8 to 1.6 s and again from 1.8 s; gloo, on CPUs, for 0.5 s."""
    kernels = [event("gemm", 2e5, 10e5), event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 8e5, 16e5)]
    kernels += [event("ncclKernel_SendRecv", 18e5, 2e6)]
    on_cpus = [event("aten::mm", 0, 2e6, DeviceType.CPU), event("gloo:all_reduce", 1e5, 4e5, DeviceType.CPU)]
    on_cpus += [event("gloo:broadcast", 3e5, 6e5, DeviceType.CPU)]
    for events, look, expected in (
        (kernels, lambda: list(_profiled_shares(loop)), [(1.4 + 0.2) / 2, (0.6 + 0.2) / 2]),
        (on_cpus, lambda: [measure._talk_of_cpus(loop)], [0.25]),
    ):
        profiler = nullcontext(SimpleNamespace(events=lambda events=events: events))
        monkeypatch.setattr(measure, "profile", lambda activities, profiler=profiler: profiler)
        assert look() == pytest.approx(expected)


def test_nothing_is_left_where_a_block_fails():
    linear, depth = torch.nn.functional.linear, len(FWD_MODULE_STACK)

    def fail():
        torch.nn.functional.linear = lambda *inputs: None
        FWD_MODULE_STACK.append("a network")
        raise ValueError("no memory")

    with pytest.raises(ValueError, match="no memory"), leaving_nothing():
        fail()
    assert torch.nn.functional.linear is linear
    assert len(FWD_MODULE_STACK) == depth


def test_groups_end_in_the_order_in_which_they_were_made(monkeypatch):
    groups, ended = [f"group {i}" for i in range(20)], []
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_map=dict.fromkeys(groups)))
    monkeypatch.setattr(dist, "destroy_process_group", ended.append)
    release_process_groups({"group 7"})
    assert ended == [each for each in groups if each != "group 7"]

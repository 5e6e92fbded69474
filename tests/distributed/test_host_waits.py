"""How often the host waits for the device in an update: for a value that it asks a tensor for, or for all work."""

import traceback
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.config import NETWORKS
from bigsgan.engines.deepspeed.prefetching import Prefetching
from tests.distributed import scenarios
from tests.distributed.test_equivalence import STOCK
from tests.tiny import zero

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
HOST = {"offload_optimizer": {"device": "cpu"}}
LAZY_R1 = ["objective.r1={weight: 0.1, every: 2}"]
WARM_UP = 6
"""Updates, of which three have R1: ranks compare what ZeRO 3 recorded for the last time as the second pass begins."""


class Asked(TorchDispatchMode):
    """Counts, by function, what asks tensors for numbers; not the loader, whose tensors are the host's."""

    def __init__(self):
        super().__init__()
        self.by = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.overloadpacket.__name__ == "_local_scalar_dense":
            frames = [f"{f.filename}:{f.name}" for f in traceback.extract_stack() if "/torch/" not in f.filename]
            if not any("bigsgan/data/" in frame for frame in frames):
                self.by[frames[-2].rsplit("/", 1)[-1]] += 1
        return function(*arguments, **(keywords or {}))


class Queue:
    """Stands for a GPU's stream or event, whose work is never done before the host waits for it, which is counted."""

    def __init__(self, counted, name="a stream"):
        self.counted, self.name = counted, name

    def synchronize(self):
        self.counted.by[self.name] += 1

    def query(self):
        return False

    def ignore(self, *others):
        pass

    wait_stream = wait_event = record = ignore


@contextmanager
def asynchronous(counted):
    """Let DeepSpeed take the CPU for a device that the host runs ahead of, with streams; engines are built inside."""

    current = Queue(counted)

    def one(accelerator, device=None):
        return current

    def stream(accelerator, *arguments, **options):
        return Queue(counted)

    def event(accelerator, *arguments, **options):
        return Queue(counted, "an event")

    def synchronize(accelerator, device=None):
        counted.by["the device"] += 1

    def no(accelerator):
        return False

    replaced = dict.fromkeys(("is_synchronized_device", "resolves_data_dependency", "handles_memory_backpressure"), no)
    replaced |= dict.fromkeys(("current_stream", "default_stream"), one) | {"Stream": stream, "Event": event}
    replaced |= {"synchronize": synchronize, "stream": lambda accelerator, stream: nullcontext()}
    recorded = mock.patch.object(torch.Tensor, "record_stream", return_value=None)
    with mock.patch.multiple(type(get_accelerator()), **replaced), recorded:
        yield


def copying(counted):
    """Count tensors that are made of numbers of the host; begun after engines are built, as zero.Init replaces it."""
    make = torch.tensor

    def tensor(*arguments, **options):
        counted.by["a copy from the host"] += "device" in options
        return make(*arguments, **options)

    return mock.patch.object(torch, "tensor", tensor)


def asked(overrides, ds, own_records=True, on_device=False, runs_ahead=False):
    """What was asked for in each of two updates, one with R1 and one without."""
    own = mock.patch.object(Prefetching, "expect", Prefetching.expect if own_records else lambda self, kind: None)
    counted = Asked()
    with own, scenarios.decided(on_device), asynchronous(counted) if on_device or runs_ahead else nullcontext():
        run = scenarios.build(overrides, ds)
        scenarios.update(run, WARM_UP)
        found = []
        for _ in range(2):
            counted.by.clear()
            with counted, copying(counted) if on_device or runs_ahead else nullcontext():
                scenarios.update(run, 1)
            found.append({what: times for what, times in counted.by.items() if times})
        scenarios.destroy(run)
    return found


ONCE = {
    "0": zero(0),
    "1-bf16": zero(1, **BF16),
    "2-fp16": zero(2, **FP16),
    "3-bf16": zero(3, **BF16),
    "2-host": zero(2, zero=HOST),
}


@pytest.mark.slow
@pytest.mark.parametrize("ds", ONCE.values(), ids=ONCE)
def test_an_update_waits_once_for_each_network(ranks, ds):
    """Where the host decides whether there is an update: gradients have to be finite."""
    for found in ranks(2).run(asked, LAZY_R1, dict.fromkeys(NETWORKS, ds))[0]:
        assert sum(found.values()) == len(NETWORKS), found


ADAM = [f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS]
CLIPPED = [f"optimizer.{network}.clip_norm=1" for network in NETWORKS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "ds",
    [
        pytest.param(zero(0), marks=pytest.mark.slow),
        pytest.param(zero(0, **BF16), marks=pytest.mark.slow),
        zero(1),
        pytest.param(zero(2, **BF16), marks=pytest.mark.slow),
    ],
    ids=["0", "0-bf16", "1", "2-bf16"],
)
@pytest.mark.parametrize(
    "more", [[], pytest.param(["accumulation=2"], marks=pytest.mark.nightly)], ids=["", "accumulating"]
)
def test_an_update_waits_for_nothing_where_the_device_decides(ranks, ds, more):
    overrides = [*LAZY_R1, *ADAM, *more, *CLIPPED]
    assert ranks(2).run(asked, overrides, dict.fromkeys(NETWORKS, ds), True, True)[0] == [{}, {}]


@pytest.mark.slow
def test_stage_3_waits_for_gathers_alone(ranks):
    """As it has few of them under way at a time; a double backward gathers all of D."""
    for method, waits in (("double_backward", {"an event", "the device"}), ("forward_mode", {"an event"})):
        r1 = [f"objective.r1={{weight: 0.1, every: 2, method: {method}}}"]
        penalized, other = ranks(2).run(asked, [*r1, *ADAM], dict.fromkeys(NETWORKS, zero(3)), True, True)[0]
        assert set(penalized) == waits
        assert set(other) == {"an event"}


@pytest.mark.slow
def test_an_update_that_overlaps_keeps_the_record_of_each_pass(ranks):
    """Between the forward and the backward passes of its own update, G makes images for D."""
    more = ["objective.schedule=overlapped", "accumulation=2"]
    for counts in ranks(2).run(asked, [*more, *ADAM], dict.fromkeys(NETWORKS, zero(3)), True, True)[0]:
        assert set(counts) == {"an event"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision",
    [{}, pytest.param(BF16, marks=pytest.mark.nightly), pytest.param(FP16, marks=pytest.mark.nightly)],
    ids=["", "bf16", "fp16"],
)
def test_an_optimizer_on_the_host_waits_once_for_gradients_and_once_for_their_norm(ranks, precision):
    """Which are copied as they come. DeepSpeed then asks a tensor on the host."""
    ds = dict.fromkeys(NETWORKS, zero(2, zero=HOST, **precision))
    for found in ranks(2).run(asked, [*LAZY_R1, *ADAM], ds, True, False, True)[0]:
        assert found == {"an event": len(NETWORKS), "utils.py:is_invalid_grad_norm": len(NETWORKS)}


@pytest.mark.slow
def test_with_one_record_stage_3_would_compare_ranks_in_every_update(ranks):
    found = ranks(2).run(asked, [], dict.fromkeys(NETWORKS, zero(3)), False)[0]
    assert all(sum(each.values()) > 50 for each in found), found


@pytest.mark.slow
def test_deepspeed_by_itself_waits_for_reductions_at_zero_3(ranks):
    """After each backward pass, on its stream for them."""
    options, ds = [*ADAM, "accumulation=2"], dict.fromkeys(NETWORKS, zero(3))
    for more, waits in (([], 0), (STOCK, 2 * len(NETWORKS))):
        for found in ranks(2).run(asked, [*options, *more], ds, True, False, True)[0]:
            assert found.get("a stream", 0) == waits


@pytest.mark.slow
@pytest.mark.parametrize(
    "ds, usual, stock",
    [(zero(0, **BF16), 2, 62), (zero(1, zero=HOST), 6, 56)],
    ids=["ZeRO 0, bf16", "ZeRO 1, optimizer on the host"],
)
def test_deepspeed_by_itself_asks_for_every_gradient(ranks, ds, usual, stock):
    """Beside the timer of its throughput and lists of its own. The networks have 32 and 24 tensors, on both ranks."""
    options, ds = [*ADAM, *CLIPPED, "accumulation=2"], dict.fromkeys(NETWORKS, ds)
    for more, expected in (([], usual), (STOCK, stock)):
        for found in ranks(2).run(asked, [*options, *more], ds, True, False, True)[0]:
            assert sum(n for what, n in found.items() if what not in ("the device", "a copy from the host")) == expected

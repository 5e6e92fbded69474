"""How often the host waits for the device in an update: for a value that it asks a tensor for, or for all work."""

import traceback
from collections import Counter
from unittest import mock

import pytest
from deepspeed.accelerator import get_accelerator
from torch.utils._python_dispatch import TorchDispatchMode

from bigsgan.config import NETWORKS
from bigsgan.engines.prefetching import Prefetching
from tests.distributed import scenarios
from tests.tiny import zero

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}}
LAZY_R1 = ["objective.r1={weight: 0.1, every: 2}"]
WARM_UP = 6
"""Updates, of which three have R1: ranks compare what stage 3 recorded for the last time as the second pass begins."""


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


def asked(overrides, ds, own_records=True, on_device=False):
    """What was asked for in each of two updates, one with R1 and one without."""
    own = mock.patch.object(Prefetching, "expect", Prefetching.expect if own_records else lambda self, kind: None)
    with own, scenarios.decided(on_device):
        run = scenarios.build(overrides, ds)
        scenarios.update(run, WARM_UP)
        found = []
        for _ in range(2):
            with (
                Asked() as counted,
                mock.patch.object(get_accelerator(), "synchronize") as synchronize,
                mock.patch.object(get_accelerator(), "resolves_data_dependency", return_value=not on_device),
            ):
                scenarios.update(run, 1)
            found.append(dict(counted.by) | {"synchronize": synchronize.call_count})
        scenarios.destroy(run)
    return found


@pytest.mark.parametrize(
    "ds",
    [zero(0), zero(0, **BF16), zero(1), zero(1, **BF16), zero(2, **FP16), zero(3), zero(3, **BF16)],
    ids=["0", "0-bf16", "1", "1-bf16", "2-fp16", "3", "3-bf16"],
)
def test_an_update_waits_once_for_each_network(ranks, ds):
    """Where the host decides whether there is an update: gradients have to be finite."""
    for found in ranks(2).run(asked, LAZY_R1, dict.fromkeys(NETWORKS, ds))[0]:
        assert sum(found.values()) == len(NETWORKS), found


@pytest.mark.parametrize("ds", [zero(0), zero(0, **BF16), zero(1), zero(2, **BF16)], ids=["0", "0-bf16", "1", "2-bf16"])
@pytest.mark.parametrize("clipped", [False, True], ids=["", "clipped"])
def test_an_update_waits_for_nothing_where_the_device_decides(ranks, ds, clipped):
    overrides = [*LAZY_R1, *(f"optimizer.{network}={{kind: adam, lr: 1e-3}}" for network in NETWORKS)]
    overrides += [f"optimizer.{network}.clip_norm=1" for network in NETWORKS if clipped]
    for found in ranks(2).run(asked, overrides, dict.fromkeys(NETWORKS, ds), True, True)[0]:
        assert sum(found.values()) == 0, found


def test_with_one_record_stage_3_would_compare_ranks_in_every_update(ranks):
    found = ranks(2).run(asked, [], dict.fromkeys(NETWORKS, zero(3)), False)[0]
    assert all(sum(each.values()) > 50 for each in found), found

"""On a GPU that two ranks share: ZeRO 3 gathers what the last step wrote, however late the device writes it."""

import pytest
import torch
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from bigsgan.config import NETWORKS
from tests import reference
from tests.distributed import scenarios
from tests.distributed.pool import ON_GPU, RankPool
from tests.distributed.test_equivalence import FEWER, PENALTIES, SAME, expected
from tests.tiny import zero

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WRITE = "_reassign_or_swap_out_partitioned_parameters"
CYCLES = 200_000_000
"""Of the device, a tenth of a second: a gather that does not wait for a step would be over long before."""


def train_with_late_steps(overrides, ds, num_updates):
    """As scenarios.train, but the device sleeps before it writes weights; and whether a step left it asleep.

    The sleep stands behind the norm, which the host of a step waits for before it has the weights written.
    """
    step = DeepSpeedZeroOptimizer_Stage3.step
    write = getattr(DeepSpeedZeroOptimizer_Stage3, WRITE)
    ahead = []

    def late(self, *arguments):
        torch.cuda._sleep(CYCLES)
        write(self, *arguments)

    def observed(self, *arguments, **options):
        result = step(self, *arguments, **options)
        written = torch.cuda.Event()
        written.record()
        ahead.append(not written.query())
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeepSpeedZeroOptimizer_Stage3, WRITE, late)
        patch.setattr(DeepSpeedZeroOptimizer_Stage3, "step", observed)
        return scenarios.train(overrides, ds, num_updates), any(ahead)


@pytest.mark.parametrize("penalty", PENALTIES)
def test_gathers_wait_for_steps(penalty, monkeypatch):
    monkeypatch.setenv(ON_GPU, "1")
    pool = RankPool(2)
    try:
        overrides = [*PENALTIES[penalty], "seed=2"]
        results = pool.run(train_with_late_steps, overrides, dict.fromkeys(NETWORKS, zero(3)), FEWER)
    finally:
        pool.stop()
    states, ahead = zip(*results, strict=True)
    assert all(ahead), "no step came back before the device had written the weights: nothing is tested"
    error, name = reference.worst(scenarios.merge(states), expected(*overrides, updates=FEWER))
    print(f"ZeRO 3 with late steps, penalty {penalty}: worst {error:.1e} in {name}")
    assert error <= 10 * SAME  # another device, whose sums have another order

"""On a GPU: an update waits for nothing, and one whose gradients are not finite is refused by the device."""

import pytest
import torch

from bigsgan.config import NETWORKS
from tests.distributed import scenarios
from tests.distributed.test_state import ADAM, check_skipped
from tests.tiny import zero

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("alone"),
]

BF16 = {"bf16": {"enabled": True}}
WARM_UP = 6
"""Updates, in which cuDNN chooses and allocators fill."""


@pytest.mark.parametrize("method", ["double_backward", "forward_mode"])
@pytest.mark.parametrize("ds", [zero(0), zero(0, **BF16), zero(1), zero(2, **BF16)], ids=["0", "0-bf16", "1", "2-bf16"])
def test_an_update_waits_for_nothing(ds, method):
    """torch raises where it would wait."""
    penalty = f"objective.r1={{weight: 0.1, every: 2, method: {method}}}"
    run = scenarios.build([*ADAM, penalty], dict.fromkeys(NETWORKS, ds))
    scenarios.update(run, WARM_UP)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scenarios.update(run, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        scenarios.destroy(run)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ds", [zero(0), zero(0, **BF16), zero(1), zero(2, **BF16), zero(3)])
def test_the_device_refuses_an_update(ds, network):
    check_skipped([scenarios.poisoned(ADAM, dict.fromkeys(NETWORKS, ds), network, True)], network, True)

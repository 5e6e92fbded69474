"""How many Triton kernels torch.compile writes for BigGAN-128 stays below what tests/stand_in/kernels.py has."""

import pytest

from tests.stand_in import build, kernels
from tests.stand_in.test_counts import CLOSE

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(build.obstacle() is not None, reason=str(build.obstacle())),
]


@pytest.mark.parametrize("unit", kernels.MOST)
def test_a_compiled_update_keeps_within_its_bound(on_ranks, unit):
    found = on_ranks(1, kernels.count, unit)
    print(found)
    assert CLOSE * kernels.MOST[unit] <= found["kernels"] <= kernels.MOST[unit]
    assert found["different"] <= found["kernels"] <= found["launches"]

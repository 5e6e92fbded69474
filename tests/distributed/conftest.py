from collections.abc import Callable, Iterator

import pytest

from tests.distributed.pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], RankPool]]:
    """ranks(n): a pool of n ranks, started when first asked for."""
    pools: dict[int, RankPool] = {}

    def get(world_size: int) -> RankPool:
        for pool in pools.values():
            if pool.world_size > max(world_size, 4):
                pool.stop()  # many idle ranks are a load on two cores
        return pools.setdefault(world_size, RankPool(world_size))

    yield get
    for pool in pools.values():
        pool.stop()

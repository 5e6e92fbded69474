from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.pool import RankPool
from tests.stand_in import build, sanitizing

TIMEOUT = 400


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory) -> dict[str, str]:
    """Variables with which a process finds the stand-ins."""
    directory = tmp_path_factory.mktemp("stand_in")
    return build.environment(directory, build.build(directory))


@pytest.fixture(scope="session")
def on_ranks(stand_in) -> Iterator[Callable[..., Any]]:
    """on_ranks(n, function, *arguments): what rank 0 of n returns; ranks live on between tests."""
    pools: dict[Any, RankPool] = {}

    def call(num_ranks: int, function: Any, *arguments: Any, sanitizer: bool = False) -> Any:
        for key in [key for key in pools if key != (num_ranks, sanitizer)]:
            pools.pop(key).stop()
        environment = {**stand_in, "STAND_IN_DEVICES": str(num_ranks), **(sanitizing.ASKED if sanitizer else {})}
        pool = pools.setdefault((num_ranks, sanitizer), RankPool(num_ranks, environment))
        return pool.run(function, *arguments, timeout=TIMEOUT)[0]

    yield call
    for pool in pools.values():
        pool.stop()

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed.pool import ON_GPU, RankPool
from tests.stand_in import build, sanitizing

TIMEOUT = 400


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory) -> dict[str, str]:
    """Variables with which a process finds the stand-ins."""
    directory = tmp_path_factory.mktemp("stand_in")
    return build.environment(directory, build.build(directory))


def variables(num_ranks: int, sanitizer: bool = False, sharing: bool = False) -> dict[str, str]:
    """Of ranks that torch's sanitizer watches, or that share a device."""
    more = {ON_GPU: "1", "STAND_IN_DEVICES": "1"} if sharing else {"STAND_IN_DEVICES": str(num_ranks)}
    return {**more, **(sanitizing.ASKED if sanitizer else {})}


@pytest.fixture(scope="session")
def on_ranks(stand_in) -> Iterator[Callable[..., Any]]:
    """on_ranks(n, function, *arguments): what rank 0 of n returns; ranks live on between tests."""
    pools: dict[Any, RankPool] = {}

    def call(num_ranks: int, function: Any, *arguments: Any, **options: bool) -> Any:
        key = (num_ranks, *sorted(options.items()))
        for other in [other for other in pools if other != key]:
            pools.pop(other).stop()
        pool = pools.setdefault(key, RankPool(num_ranks, {**stand_in, **variables(num_ranks, **options)}))
        return pool.run(function, *arguments, timeout=TIMEOUT)[0]

    yield call
    for pool in pools.values():
        pool.stop()

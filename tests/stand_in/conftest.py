import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.distributed import nursery
from tests.distributed.nursery import Nursery
from tests.distributed.pool import ON_GPU, RankPool
from tests.stand_in import build, sanitizing

TIMEOUT = 400

FIRST, LAST = ["tests.stand_in.forking"], ["tests.stand_in.cells", "tests.stand_in.compiling"]
"""What the process imports from which ranks fork, before and after what ranks on CPUs need."""


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory) -> Nursery:
    """Where ranks fork that find the stand-ins, which all workers of a session share, with what Triton compiles."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    directory = root / "stand_in"
    with build.held(root / "stand_in.lock"):
        libraries = build.build(directory)
    return Nursery(build.environment(directory, libraries), (*FIRST, *nursery.MODULES, *LAST))


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
        pool = pools.setdefault(key, RankPool(num_ranks, variables(num_ranks, **options), [stand_in]))
        return pool.run(function, *arguments, timeout=TIMEOUT)[0]

    yield call
    for pool in pools.values():
        pool.stop()

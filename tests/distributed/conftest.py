import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from deepspeed.ops.op_builder import AsyncIOBuilder
from torch.utils import cpp_extension

from tests.distributed import agreement
from tests.distributed.pool import RankPool

BUILD_SECONDS = 3000


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


@pytest.fixture(autouse=True)
def kinks(record_property: Callable[[str, object], None]) -> Iterator[None]:
    """Tell of the kinks that a test met."""
    agreement.COUNTS.clear()
    yield
    if agreement.COUNTS:
        record_property("updates and kinks", [agreement.COUNTS["updates"], agreement.COUNTS["kinks"]])


def build_op():
    AsyncIOBuilder().load(verbose=False)


@pytest.fixture(scope="session")
def async_io():
    """DeepSpeed's op that reads and writes NVMe drives, built before a test's own time begins."""
    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("needs libaio and a C++ compiler: DeepSpeed's async_io is not compatible here")
    built = Path(cpp_extension._get_build_directory("async_io", verbose=False)) / "async_io.so"
    if not built.exists() and "BUILD_ASYNC_IO" not in os.environ:
        pytest.skip("building DeepSpeed's async_io takes minutes: set BUILD_ASYNC_IO=1 to do it")
    builder = multiprocessing.get_context("spawn").Process(target=build_op)
    builder.start()
    builder.join(BUILD_SECONDS)
    assert builder.exitcode == 0

"""What tests on a GPU begin with."""

from collections.abc import Iterator

import pytest

from bigsgan.runtime import comm
from bigsgan.runtime.tf32 import tf32
from tests.tiny import awake


@pytest.fixture(scope="session")
def joined() -> Iterator[None]:
    """This process as the only rank; once, as a process group that was left cannot be joined again."""
    comm.initialize()
    yield
    comm.leave()


@pytest.fixture
def alone(joined) -> Iterator[None]:
    """As ``joined``, with networks of which each tensor moves."""
    with awake():
        yield


@pytest.fixture
def exact() -> Iterator[None]:
    """Convolutions and matrix products in float32, and not in TF32."""
    pytest.importorskip("triton")
    with tf32(allowed=False):
        yield

"""What tests on a GPU begin with."""

import pytest

from bigsgan import comm
from tests.tiny import awake


@pytest.fixture(scope="module")
def alone():
    """This process as the only rank."""
    comm.initialize()
    with awake():
        yield
    comm.leave()

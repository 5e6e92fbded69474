"""Fixtures of tests that compute: they are quicker, and the same everywhere, on one thread."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def one_thread_and_seed(one_thread: None) -> None:
    torch.manual_seed(0)

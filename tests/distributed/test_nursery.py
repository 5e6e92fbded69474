"""Ranks that fork from a process that has imported everything."""

import os
import signal
import time

import pytest

from tests.distributed.pool import ON_GPU, RankPool

pytestmark = pytest.mark.skipif(os.environ.get(ON_GPU) == "1", reason="ranks on a GPU do not fork")


def known():
    return hash("a text in a set"), os.getpid(), os.getppid()


def test_ranks_differ_in_the_order_of_a_set(ranks):
    """As those that a launcher starts: collectives that follow it would be seen to."""
    first, second = ranks(2).run(known)
    assert first[0] != second[0]
    assert len({*first[1:], *second[1:]}) == 4


@pytest.mark.slow
def test_a_rank_that_is_dead_fails_one_test_and_is_replaced():
    pool = RankPool(2)
    (_, (_, before, _)) = pool.run(known)
    os.kill(before, signal.SIGKILL)
    time.sleep(0.5)  # its pipe closes
    with pytest.raises(RuntimeError, match="rank 1 is dead"):
        pool.run(known)
    (_, (_, after, _)) = pool.run(known)
    assert after != before
    pool.stop()


def test_a_pool_that_has_stopped_begins_again():
    pool = RankPool(1)
    ((_, before, nursery),) = pool.run(known)
    pool.stop()
    assert not os.path.exists(f"/proc/{before}")
    ((_, after, again),) = pool.run(known)
    assert (after != before, again) == (True, nursery)
    pool.stop()

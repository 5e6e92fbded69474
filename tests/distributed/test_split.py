"""G and D on ranks of their own are the same networks: against the plain PyTorch reference."""

import threading
from itertools import product
from unittest import mock

import pytest
import torch

from bigsgan.engines import build
from bigsgan.engines.exchange import overlaps
from bigsgan.errors import UserError
from bigsgan.runtime import comm, division
from tests.distributed import scenarios
from tests.distributed.test_equivalence import FEWER, OVERRIDES, PENALTIES, check
from tests.distributed.test_recovery import check_passed_over, not_finite, passing_over
from tests.distributed.test_state import ADAM, LOW, REMEMBERED, check_same_run
from tests.tiny import FAMILIES, both, stages, zero

NIGHTLY = pytest.mark.nightly
SLOW = pytest.mark.slow


def split(num_generator, *options):
    return [f"engines.generator.ranks={num_generator}", *options]


# Name: ranks of G and of D, overrides, DeepSpeed's files of both.
LAYOUTS = {
    "1 + 1, ZeRO 0": ((1, 1), [], both(0)),
    "1 + 1, ZeRO 3": ((1, 1), [], both(3)),
    "1 + 1, ZeRO 1 and 2": ((1, 1), [], {"generator": zero(1), "discriminator": zero(2)}),
    "1 + 2, ZeRO 2": ((1, 2), [], both(2)),
    "2 + 1, ZeRO 3": ((2, 1), [], both(3)),
    "2 + 2, ZeRO 0 and 3": ((2, 2), [], {"generator": zero(0), "discriminator": zero(3)}),
    "2 + 1, G in stages": ((2, 1), stages(2, 1), both(1)),
    "1 + 2, D in stages": ((1, 2), stages(1, 2), both(1)),
    "2 + 2, both in stages": ((2, 2), stages(2, 2), both(0)),
    "2 + 2, D in stages": ((2, 2), stages(1, 2), both(1)),
}
QUICK = {("1 + 1, ZeRO 0", 2, "finite_difference"), ("1 + 1, ZeRO 3", 2, "exact")}
IN_CI = {("2 + 1, ZeRO 3", 2, "exact"), ("1 + 2, D in stages", 2, "exact"), ("2 + 1, G in stages", 1, "exact")}


def cells():
    for name in LAYOUTS:
        for accumulation in (1, 2, 4):
            for penalty in PENALTIES:
                cell = name, accumulation, penalty
                marks = () if cell in QUICK else SLOW if cell in IN_CI else NIGHTLY
                yield pytest.param(*cell, marks=marks)


@pytest.mark.parametrize("name, accumulation, penalty", [*cells()])
def test_matrix(ranks, name, accumulation, penalty):
    (g, d), overrides, ds = LAYOUTS[name]
    options = [f"accumulation={accumulation}", "batch=8", *PENALTIES[penalty], *overrides]
    check(ranks(g + d), split(g, *options), ds)


GAMES = {
    **{name: OVERRIDES[name] for name in ("relativistic", "two_d_steps", "reused_fakes", "labels_of_the_data")},
    "own_accumulation": OVERRIDES["own_accumulation"],
    "path_length": FAMILIES["stylegan2_path_length"],
    "pairs": FAMILIES["pix2pix"],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in GAMES])
def test_games(ranks, name):
    check(ranks(2), split(1, *GAMES[name]), both(2), FEWER)


@pytest.mark.parametrize("num_sources, num_targets", [*product((1, 2, 3, 5), (1, 2, 3, 4))])
def test_each_sample_travels_once_from_where_it_is_to_where_it_is_read(num_sources, num_targets):
    num = 60
    sources, targets = range(num_sources), range(num_sources, num_sources + num_targets)
    found = {}
    for source, target, given, taken in overlaps(sources, targets):
        held, read = num // num_sources, num // num_targets
        sent = [source * held + i for i in range(held)[given.rows(held)]]
        arrived = [(target - num_sources) * read + i for i in range(read)[taken.rows(read)]]
        assert sent == arrived
        found.update(dict.fromkeys(sent, (source, target)))
    assert sorted(found) == [*range(num)]


STATES = {
    **{name: (options, both(2)) for name, options in REMEMBERED.items()},
    "zero3": (["accumulation=2", "objective.r1={weight: 0.2, every: 2}"], both(3)),
    "fp16": (["accumulation=2"], dict.fromkeys(("generator", "discriminator"), LOW[-1])),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in STATES])
def test_a_resumed_run_is_the_same(ranks, name, tmp_path):
    """What each network remembers, and what one side has to know of the other, goes on."""
    options, ds = STATES[name]
    overrides = split(1, *ADAM, *options)
    whole = ranks(2).run(scenarios.uninterrupted, overrides, ds, 6)
    parts = ranks(2).run(scenarios.resume, overrides, ds, str(tmp_path), 3, 3)
    check_same_run(whole, parts)


@pytest.mark.parametrize("network", [pytest.param(name, marks=SLOW) for name in ("generator", "discriminator")])
def test_both_sides_go_back(ranks, network):
    """After an update of one network that is not finite, as if its data had never been there."""
    found = ranks(2).run(not_finite, split(1), both(1), network, 1)
    expected = ranks(2).run(passing_over, split(1), both(1), [(24, 32)])
    check_passed_over(found, expected, (1, ((24, 32),)))


def refused_for(network, overrides, ds):
    """What each rank hears where the ranks of one network refuse to build it."""
    make = build._build_zero

    def refuse(plan, name, config):
        if name == network:
            raise UserError("engines", network, "is refused here", "nothing")
        return make(plan, name, config)

    with mock.patch.object(build, "_build_zero", refuse), pytest.raises(UserError) as caught:
        scenarios.build(overrides, ds)
    return str(caught.value)


@pytest.mark.parametrize("network", ["generator", pytest.param("discriminator", marks=SLOW)])
def test_what_one_side_refuses_is_said_on_both(ranks, network):
    said = ranks(2).run(refused_for, network, split(1), both(0))
    assert said == [f"engines: {network!r} is refused here; nothing"] * 2


def asked_meanwhile(overrides, ds):
    """What a thread hears of rank and number of ranks, again and again, while the main thread is in its part."""
    run, heard, stop = scenarios.build(overrides, ds), set(), threading.Event()

    def ask():
        while not stop.is_set():
            heard.add((comm.rank(), comm.world_size()))

    thread = threading.Thread(target=ask)
    thread.start()
    with division.within_part():
        own = comm.rank(), comm.world_size()
        for _ in range(20):
            comm.sum_over_ranks(torch.ones(2))
    total = [comm.total(1.0) for _ in range(20)]
    scenarios.update(run, 2)
    stop.set()
    thread.join()
    scenarios.destroy(run)
    return heard, own, set(total)


def test_threads_know_the_whole_job(ranks):
    found = ranks(2).run(asked_meanwhile, split(1), both(0))
    assert found == [({(rank, 2)}, (0, 1), {2.0}) for rank in range(2)]

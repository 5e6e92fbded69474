"""G and D on ranks of their own are the same networks: against the plain PyTorch reference."""

import logging
import threading
from datetime import timedelta
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bigsgan.config.placement import Placement
from bigsgan.engines import build
from bigsgan.engines.exchange import messages, overlaps
from bigsgan.errors import UserError
from bigsgan.monitor.logs import keeping_notices
from bigsgan.runtime import comm, division, roster
from bigsgan.training.recovery import Attempt
from bigsgan.training.schedules import scheduled
from tests.distributed import scenarios
from tests.distributed.test_equivalence import OVERRIDES, PENALTIES, TURNS, check
from tests.distributed.test_recovery import check_passed_over, not_finite, passing_over
from tests.distributed.test_state import ADAM, LOW, REMEMBERED, check_same_run
from tests.tiny import TINY_GAMES, both, stages, zero

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
QUICK = {("1 + 1, ZeRO 1 and 2", 2, "exact")}
IN_CI = {
    ("1 + 1, ZeRO 0", 2, "finite_difference"),
    ("2 + 1, ZeRO 3", 2, "exact"),
    ("1 + 2, D in stages", 2, "exact"),
    ("2 + 1, G in stages", 1, "exact"),
}


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
    check(ranks(g + d), split(g, *options), ds, TURNS)


def timeouts(overrides, ds, patience):
    """Those of the process groups of a run, in seconds."""
    with mock.patch.object(comm, "_patience", timedelta(seconds=patience)):
        run = scenarios.build(overrides, ds)
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    found = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    scenarios.destroy(run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options, ds", [(split(1), both(0)), (stages(2, 2), both(1)), ([], both(2))])
def test_all_groups_are_as_patient_as_the_run(ranks, options, ds):
    """While ranks of G measure, those of D wait in a group of both; torch would give it half an hour."""
    for found in ranks(2).run(timeouts, options, ds, 4321):
        assert found
        assert set(found) == {4321}
    for found in ranks(2).run(timeouts, options, ds, 60):
        assert min(found) >= 600


@NIGHTLY
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("stage_of_g, stage_of_d", [(0, 0), (2, 3)])
def test_two_and_three_ranks(ranks, stage_of_g, stage_of_d):
    """Neither number divides the other: each of G's ranks sends to two of D's, the middle one of which hears both."""
    ds = {"generator": zero(stage_of_g), "discriminator": zero(stage_of_d)}
    check(ranks(5), split(2, "accumulation=2", "batch=24", *PENALTIES["exact"]), ds)


GAMES = {
    **{name: OVERRIDES[name] for name in ("relativistic", "two_d_steps", "reused_fakes", "labels_of_the_data")},
    "own_accumulation": OVERRIDES["own_accumulation"],
    "path_length": TINY_GAMES["stylegan2_path_length"],
    "pairs": TINY_GAMES["pix2pix"],
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in GAMES])
def test_games(ranks, name):
    check(ranks(2), split(1, *GAMES[name]), both(2))


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


@pytest.mark.parametrize("world_size", [4, 12, 24, 32, 96])
def test_all_messages_have_one_order_in_which_each_rank_sends_before_it_receives(world_size):
    """One network in stages, or both in different numbers of them, or each on ranks of its own; both directions."""
    stages = [num for num in range(1, world_size + 1) if world_size % num == 0]
    for of_g, of_d, apart in product(stages, stages, (False, True)):
        makers = Placement(of_g, world_size // of_g).output_ranks()
        behind = world_size if apart else 0
        judges = Placement(of_d, world_size // of_d, reversed=True, first=behind).input_ranks()
        for sources, targets in ((makers, judges), (judges, makers)):
            found = messages(sources, targets)
            assert sorted(found) == sorted(overlaps(sources, targets))
            has_received = set()
            for source, target, *_ in found:
                if source != target:
                    assert source not in has_received, (of_g, of_d)
                    has_received.add(target)


STATES = {
    **{name: (options, both(2)) for name, options in REMEMBERED.items()},
    "zero3": (["accumulation=2", "objective.r1={weight: 0.2, every: 2}"], both(3)),
    "fp16": (["accumulation=2"], dict.fromkeys(("generator", "discriminator"), LOW[-1])),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in STATES])
def test_a_resumed_run_is_the_same(ranks, name, tmp_path):
    """What each network remembers, and what one side has to know of the other, is resumed."""
    options, ds = STATES[name]
    overrides = split(1, *ADAM, *(options(tmp_path) if callable(options) else options))
    whole = ranks(2).run(scenarios.uninterrupted, overrides, ds, 6)
    parts = ranks(2).run(scenarios.resume, overrides, ds, str(tmp_path), 3, 3)
    check_same_run(whole, parts)


@pytest.mark.parametrize("network", [pytest.param(name, marks=SLOW) for name in ("generator", "discriminator")])
def test_both_sides_go_back(ranks, network):
    """After an update of one network that is not finite, as if its data had never been there."""
    found = ranks(2).run(not_finite, split(1), both(1), network, 1)
    expected = ranks(2).run(passing_over, split(1), both(1), [(24, 32)])
    check_passed_over(found, expected, (1, ((24, 32),)))


def first_not_finite(overrides, ds, network):
    """What a repeated update is said to have had first, where the first layer of a network gives what is not finite."""
    run = scenarios.build(overrides, ds)
    scenarios.update(run, 1)
    engine = getattr(run.step, network)
    held = "generator" if run.step.generator.is_held else "discriminator"
    roster.know(comm.from_rank_zero(comm.gather_objects(roster.own(held))))

    def spoil(layer, inputs, outputs):
        return tuple(each * float("inf") if each.is_floating_point() else each for each in outputs)

    if engine.is_held:
        next(iter(engine.network.layers.values())).register_forward_hook(spoil)
    numbers = scheduled(run.recipe, run.counters.nimg)
    found = run.recovery._repeated(Attempt(1, (run.counters.position, run.counters.position), numbers))
    roster.know(())
    scenarios.destroy(run)
    return found


@pytest.mark.parametrize("rank, network", [pytest.param(0, "generator", marks=SLOW), (1, "discriminator")])
def test_what_was_not_finite_first_is_named_and_not_what_followed_from_it(ranks, rank, network):
    """Images that are not finite reach D, and gradients G: on both ranks something is not finite in the end."""
    for text in ranks(2).run(first_not_finite, split(1), both(0), network):
        assert text.startswith(f"rank {rank} ({network}): first in the output of layer 0 of the {network} (")


def noticed(overrides, ds):
    logger = logging.getLogger("bigsgan")
    level = logger.level
    logger.setLevel(logging.INFO)  # as a run's log does
    with keeping_notices() as notices:
        scenarios.destroy(scenarios.build(overrides, ds))
    logger.setLevel(level)
    return [record.getMessage() for record in notices]


@pytest.mark.parametrize("stages_of", [pytest.param((1, 2), marks=SLOW), pytest.param((2, 1), marks=NIGHTLY)])
def test_stages_are_shown_once_on_the_terminal_of_rank_0(ranks, stages_of):
    """Which holds nothing of D, whose ranks divide it."""
    network = "generator" if stages_of[0] == 2 else "discriminator"
    first, *others = ranks(3).run(noticed, split(stages_of[0], *stages(*stages_of)), both(1))
    (table,) = [text for text in first if "in 2 stages" in text]
    assert table.startswith(f"{network} in 2 stages, micro-batches of ")
    assert others[-1].count(table) == (network == "discriminator")  # in the log of its own ranks too


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


@pytest.mark.slow
def test_threads_know_the_whole_job(ranks):
    found = ranks(2).run(asked_meanwhile, split(1), both(0))
    assert found == [({(rank, 2)}, (0, 1), {2.0}) for rank in range(2)]

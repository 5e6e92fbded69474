"""A checkpoint of any layout is the same run in any other: every pair of a table."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from bigsgan import checkpoint
from bigsgan.runtime import comm
from tests.distributed import scenarios
from tests.reference import distance
from tests.tiny import TINY_GAMES, stages, zero

MOMENTUM = [
    *(f"optimizer.{n}={{kind: sgd, lr: 0.002, momentum: 0.9}}" for n in ("generator", "discriminator")),
    "ema.power={snapshot_nimg: 1000}",
]
TRANSFORMERS = {
    family: [
        *(option for option in TINY_GAMES[family] if not option.startswith("optimizer.")),
        "objective.fake_labels=data",
        f"optimizer.generator={{kind: sgd, lr: {lr}, momentum: 0.9}}",
        "optimizer.discriminator={kind: sgd, lr: 0.02, momentum: 0.9}",
    ]
    for family, lr in (("gat", 0.5), ("cat", 0.05))
}
ADAM = [f"optimizer.{n}={{kind: adam, lr: 1e-3, betas: [0.5, 0.9]}}" for n in ("generator", "discriminator")]
ADAMW = [
    *(
        f"optimizer.{n}={{kind: adamw, lr: 1e-3, betas: [0.5, 0.99], weight_decay: 0.1}}"
        for n in ("generator", "discriminator")
    ),
    *(f"objective.{name}={{weight: 0.2}}" for name in ("r1", "r2")),
]
OFFLOAD = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


# Name: ranks, overrides, DeepSpeed's files of G and of D.
LAYOUTS = {
    "1 rank": (1, [], zero(0), zero(0)),
    "1 rank, sharded": (1, [], zero(3), zero(1)),
    "2 ranks": (2, [], zero(0), zero(0)),
    "zero1": (2, [], zero(1), zero(1)),
    "zero2": (2, [], zero(2), zero(2)),
    "zero2, groups": (2, [], zero(2, zero={"reduce_bucket_size": 500}), zero(1, zero={"reduce_bucket_size": 300})),
    "zero3": (2, [], zero(3), zero(3)),
    "zero3, other groups": (2, [], zero(3, zero={"sub_group_size": 500}), zero(3, zero={"sub_group_size": 2000})),
    "zero3, offload": (2, [], zero(3, zero=OFFLOAD), zero(2, zero={"offload_optimizer": {"device": "cpu"}})),
    "stages": (2, stages(2, 2), zero(0), zero(1)),
    "G in stages": (2, stages(2, 1), zero(1), zero(2)),
    "apart": (2, ["engines.generator.ranks=1"], zero(3), zero(1)),
    "apart, D in stages": (3, ["engines.generator.ranks=1", *stages(1, 2)], zero(2), zero(1)),
    "stages x replicas": (4, stages(2, 2), zero(0), zero(0)),
}
IN_CI = ("1 rank", "zero3", "apart")
BF16 = zero(0, bf16={"enabled": True})
# Whose updates are rounded, so that they agree with no other's as closely as those of the table.
ROUNDED = {"stages, bf16": (2, stages(2, 2), BF16, BF16)}
FIRST, THEN = 3, 3


def saved_run(overrides, ds, directory):
    """Save after three updates, and resume for three: what was saved, and the parameters at the end."""
    run = scenarios.build(overrides, ds)
    scenarios.update(run, FIRST)
    scenarios.save(run, Path(directory))
    saved = scenarios.saved_parts(run)
    scenarios.update(run, THEN)
    end = scenarios.saved_parts(run)
    scenarios.destroy(run)
    return saved, end


def resumed_runs(overrides, ds, directories, then):
    """For each checkpoint, what a run has that resumes from it, and what it has ``then`` updates later."""
    run = scenarios.build(overrides, ds, checkpoint.newest(Path(directories[0])))
    results = []
    for directory in directories:
        if results:  # engines that have trained since are loaded as new ones are
            checkpoint.restore(checkpoint.newest(Path(directory)), run.entries, comm)
            run.reals.rewind(run.counters.position)
        begun = scenarios.saved_parts(run)
        scenarios.update(run, then)
        results.append((begun, scenarios.saved_parts(run)))
    scenarios.destroy(run)
    return results


class Table:
    """Runs of each layout, saved when they are first asked for."""

    def __init__(self, ranks):
        self.ranks, self.directory, self._saved = ranks, tempfile.mkdtemp(), {}

    def call(self, name, optimizer, function, *arguments):
        num_ranks, overrides, generator, discriminator = {**LAYOUTS, **ROUNDED}[name]
        ds = {"generator": generator, "discriminator": discriminator}
        return list(zip(*self.ranks(num_ranks).run(function, [*optimizer, *overrides], ds, *arguments), strict=True))

    def saved(self, name, optimizer):
        key = name, *optimizer
        if key not in self._saved:
            directory = tempfile.mkdtemp(dir=self.directory)
            self._saved[key] = directory, *self.call(name, optimizer, saved_run, directory)
        return self._saved[key]


@pytest.fixture(scope="module")
def table(ranks):
    return Table(ranks)


def check_resumed(table, target, optimizer, sources, then):
    """Values before and after some updates more, by source; the first are equal to what was saved, bit for bit."""
    saved = [table.saved(source, optimizer) for source in sources]
    resumed = table.call(target, optimizer, resumed_runs, [directory for directory, *_ in saved], then)
    for source, (_, expected, end), by_rank in zip(sources, saved, resumed, strict=True):
        begun, later = zip(*by_rank, strict=True)
        check_equal(expected, begun)
        yield source, begun, later, end


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, sources",
    [
        ("zero2, groups", ["2 ranks"]),
        *(pytest.param(target, list(LAYOUTS), marks=pytest.mark.slow) for target in IN_CI),
        *(pytest.param(target, list(LAYOUTS), marks=pytest.mark.nightly) for target in LAYOUTS if target not in IN_CI),
    ],
)
def test_every_pair(table, target, sources):
    """Parameters, momentum, EMA, buffers and counters are equal bit for bit; and the next updates are the same."""
    for source, begun, later, end in check_resumed(table, target, MOMENTUM, sources, THEN):
        before, found, reference = (scenarios.whole_values(each) for each in (begun, later, end))
        assert reference.keys() == found.keys()
        # Moments of biases before batch norm, whose true gradient is 0, hold nothing but rounding.
        names = [name for name in found if "/momentum_buffer/" not in name]
        worst = max(names, key=lambda name: apart(found[name], reference[name]))
        assert apart(found[worst], reference[worst]) <= 1e-5, f"from {source}: {worst}"
        assert any(apart(found[name], before[name]) > 1e-4 for name in found if "/master/" in name)


@pytest.mark.parametrize(
    "family, target, sources",
    [
        pytest.param("gat", "zero3", ["stages"], marks=pytest.mark.slow),
        pytest.param("cat", "stages", ["zero3"], marks=pytest.mark.slow),
        pytest.param("gat", "stages", ["zero3"], marks=pytest.mark.nightly),
        pytest.param("cat", "zero3", ["stages"], marks=pytest.mark.nightly),
        *(
            pytest.param(family, "zero2, groups", ["zero3", "stages"], marks=pytest.mark.nightly)
            for family in TRANSFORMERS
        ),
        *(pytest.param(family, "1 rank", ["stages x replicas"], marks=pytest.mark.nightly) for family in TRANSFORMERS),
    ],
)
def test_transformers(table, family, target, sources):
    """Whose seeds and classes travel, and which have several images of a sample at the seam."""
    for source, begun, later, end in check_resumed(table, target, TRANSFORMERS[family], sources, THEN):
        before, found, reference = (scenarios.whole_values(each) for each in (begun, later, end))
        worst = max(found, key=lambda name: apart(found[name], reference[name]))
        assert apart(found[worst], reference[worst]) <= 1e-4, f"from {source}: {worst}"
        assert any(apart(found[name], before[name]) > 1e-3 for name in found if "/master/" in name)


@pytest.mark.nightly
@pytest.mark.parametrize("family", TRANSFORMERS)
@pytest.mark.parametrize("target", ["zero3", "zero2, groups", "stages", "1 rank"])
def test_adamw_and_exact_penalties_of_transformers(table, family, target):
    """As their recipes have them: both moments, the weights and the number of steps, from stages and from shards."""
    options = [option for option in TRANSFORMERS[family] if not option.startswith("optimizer.")]
    for _, begun, later, _ in check_resumed(table, target, [*options, *ADAMW], ["stages", "zero3"], 1):
        kinds = {name.split("/")[1] for name in scenarios.whole_values(begun)}
        assert {"master", "exp_avg", "exp_avg_sq"} <= kinds
        assert later[0]["numbers"]["generator.optimizer.step"] == FIRST + 1


@pytest.mark.parametrize(
    "target, sources",
    [
        pytest.param("stages, bf16", ["zero3", "stages, bf16"], marks=pytest.mark.slow),
        pytest.param("zero2", ["stages, bf16"], marks=pytest.mark.slow),
        pytest.param("stages, bf16", list(LAYOUTS), marks=pytest.mark.nightly),
        *(pytest.param(target, list(ROUNDED), marks=pytest.mark.nightly) for target in LAYOUTS),
    ],
)
def test_to_and_from_stages_in_bf16(table, target, sources):
    """All values are float32 and equal bit for bit; in the same precision, so are the next updates."""
    for source, begun, later, end in check_resumed(table, target, MOMENTUM, sources, THEN):
        before, found, reference = (scenarios.whole_values(each) for each in (begun, later, end))
        assert {value.dtype for name, value in before.items() if "/master/" in name} == {np.dtype("float32")}
        moved = {name for name in found if not np.array_equal(found[name], before[name])}
        assert len([name for name in moved if "/master/" in name]) > 20, source
        if source == target:
            assert all(np.array_equal(found[name], reference[name]) for name in reference)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["1 rank", "zero1", "zero3, offload", "G in stages"])
def test_adam(table, target):
    """Both moments and the number of steps, which each optimizer keeps in its own way."""
    for _, begun, later, _ in check_resumed(table, target, ADAM, ["2 ranks", "zero3, offload", "stages"], 1):
        kinds = {name.split("/")[1] for name in scenarios.whole_values(begun)}
        assert kinds == {"master", "exp_avg", "exp_avg_sq", "buffer"}
        assert later[0]["numbers"]["generator.optimizer.step"] == FIRST + 1


MUON = [
    *(option for option in TINY_GAMES["gat"] if not option.startswith("optimizer.")),
    "objective.fake_labels=data",
    *(f"optimizer.{n}={{kind: muon, lr: 1e-3, betas: [0.5, 0.9]}}" for n in ("generator", "discriminator")),
]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["1 rank", "zero2, groups", "zero3, offload", "stages"])
def test_muon(table, target):
    """A momentum of each matrix, and both moments of the rest, are equal bit for bit from shards and from stages."""
    for source, begun, later, _ in check_resumed(table, target, MUON, ["2 ranks", "zero3", "stages"], 1):
        values = scenarios.whole_values(begun)
        by_kind = {}
        for name in values:
            entry, kind, parameter = name.split("/")
            by_kind.setdefault((entry, kind), set()).add(parameter)
        for network in ("generator", "discriminator"):
            momenta, moments = by_kind[network, "momentum_buffer"], by_kind[network, "exp_avg_sq"]
            assert momenta
            assert all(name.endswith(".weight") for name in momenta)
            assert moments == by_kind[network, "exp_avg"] == by_kind[network, "master"] - momenta
        assert later[0]["numbers"]["generator.optimizer.step"] == FIRST + 1
        moved = scenarios.whole_values(later)
        changed = [
            name for name in moved if "/momentum_buffer/" in name and not np.array_equal(moved[name], values[name])
        ]
        assert len(changed) > 20, source


def apart(a, b):
    return distance(torch.from_numpy(a), torch.from_numpy(b))


def check_equal(saved, begun):
    before, after = scenarios.whole_values(saved), scenarios.whole_values(begun)
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert np.array_equal(value, after[name]), name
    for rank in begun:
        assert rank["numbers"] == saved[0]["numbers"]

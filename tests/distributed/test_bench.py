"""`bigsgan bench` on ranks: who measures when, that variants play the same game, and that nothing of one is left."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from bigsgan.bench import comm as bench_comm
from bigsgan.bench import profile as bench_profile
from bigsgan.bench import train
from bigsgan.bench.measure import Settings, take_turns
from bigsgan.bench.phases import PHASES
from bigsgan.bench.variants import VARIANTS, Planned, plan_variants
from bigsgan.config import NETWORKS
from bigsgan.engines.deepspeed.leftovers import process_groups
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm
from tests.distributed.launching import TIMEOUT, needs_two_devices
from tests.tiny import TINY_GAMES, tiny_plan, tiny_recipe, zero

SAME = 1e-5


class Sleeper:
    """A loop whose update takes a known time, of which it waits for data half."""

    def __init__(self, name, seconds, log):
        self.name, self.seconds, self.log, self.waited_seconds = name, seconds, log, 0.0
        log.append(f"build {name}")

    def __call__(self):
        self.log.append(self.name)
        time.sleep(self.seconds)
        self.waited_seconds += self.seconds / 2

    def idle(self):
        return None

    def means(self):
        return {"updates": self.log.count(self.name)}

    def close(self):
        self.log.append(f"close {self.name}")


def sleepers():
    log = []
    builders = [
        (lambda: Sleeper("a", 0.01, log) if comm.rank() == 0 else None, nullcontext),
        (lambda: Sleeper("b", 0.03, log), nullcontext),
    ]
    told = []
    return take_turns(builders, Settings(rounds=2, warmup=2, steps=3), lambda *each: told.append(each)), log, told


def test_variants_take_turns(ranks):
    (first, log, told), ((second, _), log_of_idle, told_idle) = ranks(2).run(sleepers)
    turn = lambda name: [f"build {name}", *[name] * 5, f"close {name}"]  # noqa: E731
    assert log == [*turn("a"), *turn("b"), *turn("b"), *turn("a")]
    assert log_of_idle == [*turn("b"), *turn("b")]
    (a, b), failed = first
    assert failed == {}
    assert [[len(visits) for visits in rounds] for rounds in (a, b)] == [[1, 1], [2, 2]]
    for rounds, seconds in ((a, 0.01), (b, 0.03)):
        for visit in (visit for visits in rounds for visit in visits):
            assert seconds <= visit.seconds
            assert visit.data_seconds == pytest.approx(seconds / 2)
            assert visit.busy < 0.9
    assert [visits[0].first_losses["updates"] for visits in a] == [1, 6]  # after one update of each round
    assert second == [[[], []], [[], []]]
    order = [(0, 0), (0, 1), (1, 1), (1, 0)]
    assert [each[:2] for each in told[::2]] == [each[:2] for each in told[1::2]] == order
    slowest = [max(visit.seconds for visit in (a, b)[i][turn]) for turn, i in order]
    assert [seconds for *_, seconds in told] == [each for seconds in slowest for each in (None, seconds)]
    assert told_idle == [(*each, None) for each in order]


def networks_alive():
    """How many there are; tests before this one may have left some in a rank of the pool."""
    gc.unfreeze()  # of the pool's ranks
    gc.collect()
    return sum(isinstance(each, LayerStack) for each in gc.get_objects())


COMPILED = ("compiled", "compiled_layers")


def measured(overrides, only_compiled=False):
    """Records of all variants but the compiled ones, or of those, and whether the process is as it was."""
    recipe = tiny_recipe(Path(tempfile.mkdtemp()), *overrides)
    groups, linear, alive = process_groups(), torch.nn.functional.linear, networks_alive()
    others = [variant for variant in VARIANTS.values() if (variant.name in COMPILED) == only_compiled]
    planned = plan_variants(recipe, [VARIANTS["baseline"], *others] if only_compiled else others, comm.world_size())
    results = train._measure([train._on_machine(each) for each in planned], Settings(1, 1, 1))
    # The first engine of a process makes one group of all ranks, which DeepSpeed keeps for all.
    clean = len(process_groups() - groups) <= 1, torch.nn.functional.linear is linear, networks_alive() <= alive
    return [train.record(result, results, 100) for result in results] if comm.rank() == 0 else None, clean


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_all_variants_play_the_same_game(ranks, world_size):
    found = ranks(world_size).run(measured, ["objective.r1={weight: 0.2}"])
    assert [clean for _, clean in found] == [(True, True, True)] * world_size
    records = {record["variant"]: record for record in found[0][0]}
    assert list(records)[:2] == ["baseline", "control"]
    assert set(records) == {*VARIANTS, "control"} - {*COMPILED}
    refused = {"baseline_fp32", "baseline_tf32", "cuda_graphs"} | (
        {"pipeline", "separate_ranks"} if world_size == 1 else set()
    )
    assert {name for name, each in records.items() if "reason" in each} == refused
    for name, each in records.items():
        if "reason" in each:
            continue
        assert (each["achieved_share"] is None) == (name == "pipeline")
        assert (each["idle_share"] is None) == (name not in ("pipeline", "separate_ranks"))
        if name == "accumulation":
            assert each["d_loss_difference"] is None
            continue
        # G's update looks at other images, D at those of weights whose norm has moved; or penalties at fewer images.
        if name in ("reused_fakes", "penalized_quarter"):
            assert each["d_loss_difference"] < 0.1
            continue
        rounding = 0.05 if name in ("mixed_precision", "offload") else SAME
        assert each["d_loss_difference"] <= rounding, name
        if name != "clipping":  # G's loss comes after D's update, which is clipped here
            assert each["g_loss_difference"] <= rounding, name
        assert each["host_peak_bytes"] > 100 * 2**20


@pytest.mark.nightly
def test_so_do_compiled_networks(ranks):
    """Small ones, as compiling others takes minutes."""
    ((found, clean),) = ranks(1).run(measured, TINY_GAMES["mlp"], True)
    assert clean == (True, True, True)
    records = {record["variant"]: record for record in found}
    assert set(records) == {"baseline", *COMPILED, "control"}
    for name in COMPILED:
        assert records[name]["d_loss_difference"] <= SAME
        assert records[name]["g_loss_difference"] <= SAME


def counted(overrides, ds):
    """The collectives of one update of the tiny recipe on rank 0, and what was left behind."""
    groups = process_groups()
    plan = tiny_plan(Path(tempfile.mkdtemp()), comm.world_size(), overrides, ds)
    found = bench_comm.count(Planned(VARIANTS["zero0"], plan))
    return found, len(process_groups() - groups) <= 1  # see ``measured``


def sent(found, *phases, collective=None):
    """(calls, bytes of the whole tensors) in some phases."""
    chosen = [c for c in found["collectives"] if c["phase"] in phases and collective in (None, c["collective"])]
    return sum(c["calls"] for c in chosen), sum(c["bytes"] for c in chosen)


GAME = [
    "generator={family: mlp, latent_size: 12, width: 16, depth: 2}",
    "discriminator={family: mlp, width: 16, depth: 2}",
]
"""Without batch statistics, whose collectives would stand among those of the parameters."""


def all_gathered(found, network, *phases):
    """How often a network's parameters were gathered in some phases."""
    return sent(found, *phases, collective="all-gather")[1] / (4 * found["networks"][network]["parameters"])


UPDATES = {"G": "G pulls back", "D": "D trains"}


def test_collectives_of_stage_0_are_its_gradients(ranks):
    found, clean = ranks(2).run(counted, GAME, {"generator": zero(0), "discriminator": zero(0)})[0]
    assert clean
    for letter, network in (("G", "generator"), ("D", "discriminator")):
        numbers = found["networks"][network]
        _, num_bytes = sent(found, f"{UPDATES[letter]}: backward", f"{UPDATES[letter]}: step", collective="all-reduce")
        assert num_bytes == 4 * numbers["parameters"]
        assert numbers["least_bytes"] == 4 * numbers["parameters"]  # 2 (N - 1) / N of it
        assert numbers["ratio"] == 1.0
    assert sent(found, "G makes images, graphs kept", "D trains: forward", "D judges", "G makes images") == (0, 0)


@pytest.mark.parametrize("stage", [1, 2])
def test_collectives_of_stages_that_scatter(ranks, stage):
    """As DeepSpeed comes it all-reduces gradients where their scatter would do, and then gathers: 1.5 times as much."""
    ds = {"generator": zero(stage), "discriminator": zero(stage, zero={"use_multi_rank_bucket_allreduce": True})}
    found, _ = ranks(2).run(counted, GAME, ds)[0]
    for letter, network, ratio in (("G", "generator", 1.0), ("D", "discriminator", 1.5)):
        assert found["networks"][network]["ratio"] == pytest.approx(ratio, abs=0.05)
        assert all_gathered(found, network, f"{UPDATES[letter]}: step") == pytest.approx(1, abs=0.02)


KEEPING, NOT_KEEPING = {}, {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}


@pytest.mark.parametrize("section, backward", [(KEEPING, 0), (NOT_KEEPING, 1)], ids=["keeping", "gathering-again"])
def test_collectives_of_stage_3(ranks, section, backward):
    """Within the reuse distance parameters stay from the forward to the backward pass."""
    ds = dict.fromkeys(NETWORKS, zero(3, zero=section))
    found, _ = ranks(2).run(counted, GAME, ds)[0]
    assert all_gathered(found, "generator", "G makes images") == pytest.approx(1, abs=0.05)
    assert all_gathered(found, "discriminator", "D judges") == pytest.approx(1 + backward, abs=0.25)
    for letter, network in (("G", "generator"), ("D", "discriminator")):
        forward = "G makes images, graphs kept" if letter == "G" else "D trains: forward"
        assert all_gathered(found, network, forward) == pytest.approx(1, abs=0.05)
        assert all_gathered(found, network, f"{UPDATES[letter]}: backward") == pytest.approx(backward, abs=0.25)
        _, reduced = sent(
            found, *(f"{UPDATES[letter]}: {kind}" for kind in ("backward", "step")), collective="reduce-scatter"
        )
        assert reduced == pytest.approx(4 * found["networks"][network]["parameters"], rel=0.01)  # and padding
    if not backward:
        for network in NETWORKS:
            assert found["networks"][network]["ratio"] == pytest.approx(3 / 4, abs=0.02)


def test_what_persists_is_gathered_once_an_update(ranks):
    ds = dict.fromkeys(NETWORKS, zero(3, zero={"stage3_param_persistence_threshold": 100_000}))
    found, _ = ranks(2).run(counted, GAME, ds)[0]
    for network, phase in (("generator", "G makes images"), ("discriminator", "D judges")):
        assert all_gathered(found, network, phase) == pytest.approx(1, abs=0.05)
        assert found["networks"][network]["ratio"] == pytest.approx(2 / 4, abs=0.02)
    assert sent(found, "D trains: step", "G pulls back: step", collective="all-gather") == (0, 0)


def profile_of(overrides, ds):
    plan = tiny_plan(Path(tempfile.mkdtemp()), comm.world_size(), overrides, ds)
    out = Path(tempfile.mkdtemp())
    found = bench_profile.profiled(plan, out, warmup=1, steps=2)
    return found, json.loads((out / "trace.json").read_text())["traceEvents"] if comm.rank() == 0 else []


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_profile_names_the_phases(ranks, stage):
    ds = {"generator": zero(stage), "discriminator": zero(stage)}
    (found, events), _ = ranks(2).run(profile_of, ["objective.d_steps=2"], ds)
    unused = ("D checks", "D differentiates", "G differentiates", "G pulls back: forward", "D keeps")
    assert [*found["phases"]] == [name for name in PHASES if name not in unused]
    assert all(seconds > 0 for seconds in found["phases"].values())
    names = [event.get("name") for event in events if event.get("ph") == "X"]
    expected = {f"D trains: {kind}": 2 for kind in ("forward", "backward", "step")}
    expected |= {"G pulls back: backward": 1, "D judges": 2, "EMA": 1, "data wait": 2}
    assert {name: names.count(f"bigsgan: {name}") for name in expected} == expected
    assert len(found["operations"]) == 10
    assert not [each for each in found["operations"] if each["name"].startswith("bigsgan: ")]
    assert 0 < found["achieved_share"] < 1
    assert found["flops_per_second"] == pytest.approx(found["flops"] / found["update_seconds"])


@pytest.mark.nightly
@needs_two_devices
def test_a_launcher_gets_json_alone(tmp_path):
    """As documented: torchrun starts the command itself, and standard output holds the results and nothing else."""
    env = {name: value for name, value in os.environ.items() if name not in ("DS_ACCELERATOR", "RANK", "WORLD_SIZE")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    command = "torchrun --standalone --nproc_per_node 2 --no-python -- bigsgan bench comm --json batch=8"
    tiny = ["generator.channels=2", "discriminator.channels=2", "--variants", "zero1,zero3"]
    done = subprocess.run(
        [*command.split(), *tiny], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ranks"] == 2
    assert [each["variant"] for each in found["variants"]] == ["zero1", "zero3"]
    assert found["variants"][0]["networks"]["discriminator"]["ratio"] == pytest.approx(1, abs=0.1)

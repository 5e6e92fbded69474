"""States by the published formulas."""

from __future__ import annotations

import numpy as np
import pytest

from bigsgan.planner.states import build_states
from tests.tiny import tiny_plan, zero

ADAM = [f"optimizer.{n}={{kind: adam, lr: 1e-3, betas: [0.5, 0.9]}}" for n in ("generator", "discriminator")]
BF16 = {"bf16": {"enabled": True}}
NUM = 40_000
SIZES = [20_000, 12_000, 8_000]
"""Of parameters: whole numbers of parts for 1, 2 and 4 ranks."""


def states(tmp_path, stage, num_ranks, sizes=SIZES, **content):
    ds = zero(stage, **content)
    plan = tiny_plan(tmp_path, num_ranks, ADAM, {"generator": ds, "discriminator": ds})
    return build_states(plan, "generator", sizes)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(
    "stage, formula", [(0, lambda n: 16), (1, lambda n: 4 + 12 / n), (2, lambda n: 2 + 14 / n), (3, lambda n: 16 / n)]
)
def test_bytes_of_a_parameter_in_bf16_are_the_formulas(tmp_path, stage, formula, num_ranks):
    """Rajbhandari et al. 2020 (arXiv 1910.02054, section 3): weights, masters, two moments, and gradients in bf16."""
    buckets = {"zero": {"reduce_bucket_size": 1_000}} if stage == 2 else {}
    found = states(tmp_path, stage, num_ranks, **BF16, **buckets)
    gradients = {0: 2, 1: 2}.get(stage, 2 / num_ranks)
    first = found.gradients.during(np.array([0, NUM // 2, NUM]), False).tolist()[0]
    if stage == 3:
        assert first == gradients * NUM + 2 * NUM  # with the bucket, from the first moment on
    else:
        assert first == 0
        assert found.gradients.each == gradients
    assert sum(found.device.values()) / NUM + gradients == pytest.approx(formula(num_ranks), rel=1e-4)
    assert not found.host


@pytest.mark.parametrize("stage, saved", [(0, 4), (1, 4 / 2), (2, 4 / 2), (3, 4 / 2)])
def test_adam_with_beta1_0_keeps_no_first_moment(tmp_path, stage, saved):
    sums = []
    for beta1 in (0.5, 0.0):
        betas = [f"optimizer.generator.betas=[{beta1}, 0.9]"]
        plan = tiny_plan(tmp_path, 2, [ADAM[1], *betas, "optimizer.generator.kind=adam"], {"generator": zero(stage)})
        sums.append(sum(build_states(plan, "generator", SIZES).device.values()))
    assert sums[0] - sums[1] == saved * NUM


def test_float32_needs_no_masters_of_its_own_at_stage_0(tmp_path):
    assert states(tmp_path, 0, 2).device == {"weights": 4 * NUM, "masters": 0, "optimizer": 8 * NUM}


def test_offloading_moves_masters_and_optimizer_to_the_host(tmp_path):
    found = states(tmp_path, 2, 2, **BF16, zero={"offload_optimizer": {"device": "cpu"}})
    assert found.device["weights"] == 2 * NUM
    assert found.host["masters"] + found.host["optimizer"] == 12 * NUM // 2
    both = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    found = states(tmp_path, 3, 2, **BF16, zero=both)
    assert "weights" not in found.device
    assert found.host["weights"] == 2 * NUM // 2


def test_pinned_memory_comes_in_powers_of_two(tmp_path):
    """On 2 ranks with 20,000 elements each."""
    spare = {40_000: 65_536 - 40_000, 80_000: 131_072 - 80_000}
    cpu = {"device": "cpu", "pin_memory": True}
    found = states(tmp_path, 2, 2, **BF16, zero={"offload_optimizer": cpu})
    # Masters and gradients in float32; 16-bit weights, and the largest gradient.
    assert found.spare == 2 * spare[80_000] + 2 * spare[40_000]
    ds = zero(2, **BF16, zero={"offload_optimizer": cpu})
    plan = tiny_plan(tmp_path, 2, [*ADAM, "accumulation=2"], {"generator": ds, "discriminator": ds})
    # The first rank's half is one parameter, whose gradient is added up on the host.
    assert build_states(plan, "generator", SIZES).spare == found.spare + spare[40_000]
    # Parts of 10,000, 6,000 and 4,000 in two sub-groups: 16-bit weights, 16-bit gradients, and float32's by sub-group.
    both = {"offload_optimizer": cpu, "offload_param": cpu, "sub_group_size": 9_000}
    found = states(tmp_path, 3, 2, **BF16, zero=both)
    assert found.spare == 2 * spare[40_000] + 2 * spare[40_000]
    assert found.built == {32_768: 1, 16_384: 1, 8_192: 1}
    found = states(tmp_path, 3, 2, **BF16, zero={**both, "sub_group_size": 0})  # each parameter is a sub-group
    assert found.spare == 3 * spare[40_000] + (32_768 - 24_000) + (16_384 - 16_000)
    drive = {**both, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True}}
    assert states(tmp_path, 3, 2, **BF16, zero=drive).spare == 2 * spare[40_000]


def test_compiled_layers_are_gathered_whole(tmp_path):
    """What is used again at a distance of 0, with nothing gathered ahead."""
    ds = zero(3, zero={"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0})
    for compile, at_once in (("none", 20_000), ("layers", 32_000)):
        options = [*ADAM, f"engines.generator.compile={compile}"]
        plan = tiny_plan(tmp_path, 2, options, {"generator": ds, "discriminator": ds})
        found = build_states(plan, "generator", SIZES, largest_layer=32_000)
        assert (found.gathers, found.largest) == (4 * at_once, 4 * at_once)


def test_files_say_what_is_pinned(tmp_path):
    """DeepSpeed pins unless a file says otherwise, and ZeRO 3's weights in any case."""
    section = {"offload_optimizer": {"device": "cpu"}}
    assert states(tmp_path, 2, 2, **BF16, zero=section).spare > 0
    section["offload_optimizer"]["pin_memory"] = False
    found = states(tmp_path, 2, 2, **BF16, zero=section)
    assert (found.spare, found.built) == (0, {})
    section["offload_param"] = {"device": "cpu", "pin_memory": False}
    found = states(tmp_path, 3, 2, **BF16, zero=section)
    assert (found.spare, found.built) == (65_536 - 40_000, {})
    assert states(tmp_path, 3, 2, **BF16).spare == 0


def test_gradients_are_reduced_and_updated_group_by_group(tmp_path):
    """As many elements as a bucket has make a group."""
    bucket = {"zero": {"reduce_bucket_size": 10_000, "overlap_comm": False}}
    sizes = [1_000] * 40
    for num_ranks in (1, 4):
        found = states(tmp_path, 2, num_ranks, sizes, **BF16, **bucket).gradients
        own, group = NUM * 2 // num_ranks, 10_000 * 2  # of gradients
        assert found.during(np.array([5_000, 10_000, 20_000]), False).tolist() == [
            own // 8 + group,  # at most: what has arrived, and as much for the copy of a group that is complete
            own // 4 + 2 * group,
            own // 2 + 2 * group,
        ]
        assert found.ending == own
        assert found.updating == own + 10_000 // num_ranks * 4  # and a group's part in float32
        assert states(tmp_path, 1, num_ranks, sizes, **BF16, **bucket).gradients.updating == max(
            NUM * 2 + group + 10_000 // num_ranks * 2, found.updating
        )
    # A group is under way, with the part that comes of it, while the next one arrives; ZeRO 1 does as ZeRO 2.
    for stage in (1, 2):
        overlapping = states(tmp_path, stage, 4, sizes, **BF16, zero={"reduce_bucket_size": 10_000}).gradients
        assert overlapping.during(np.array([20_000]), False).tolist() == [own // 2 + 2 * group + 10_000 // 4 * 2]
        assert overlapping.updating == found.updating
    whole = states(tmp_path, 2, 4, **BF16).gradients
    assert whole.during(np.array([NUM]), False).tolist() == [NUM * 2]  # one group is complete at the end
    assert whole.ending == NUM * 2 // 4 + NUM * 2 + NUM * 2
    assert whole.updating == NUM * 2 // 4 + NUM * 4 // 4  # in float32


@pytest.mark.parametrize("numel, at_a_time", [(1_000_000, 2**18), (100_000_000, 24_000_000)])
def test_stage_0_copies_little_at_a_time(tmp_path, numel, at_a_time):
    """At most 6 % of the 16 bytes of a parameter in float32, 4 of which a copied gradient takes."""
    found = states(tmp_path, 0, 2, [1_000] * (numel // 1_000)).gradients
    assert found.ending == (numel + at_a_time) * 4
    assert found.updating == numel * 4


def test_several_micro_batches_add_up(tmp_path):
    found = states(tmp_path, 0, 1).gradients
    arrived = np.array([0, 10_000, NUM])
    assert found.during(arrived, False).tolist() == [0, 40_000, 4 * NUM]
    assert found.during(arrived, True).tolist() == [4 * NUM] * 3


def test_parameters_that_are_gathered(tmp_path):
    """Those needed again within the distance, the next ones, and one more; all of them where that is enough."""
    limits = {"stage3_max_reuse_distance": 9_000, "stage3_prefetch_bucket_size": 1_000}
    found = states(tmp_path, 3, 2, zero={**limits, "stage3_param_persistence_threshold": 8_000})
    assert (found.gathers, found.whole, found.persistent) == (30_000 * 4, NUM * 4, 8_000 * 4)
    assert states(tmp_path, 3, 2).gathers == NUM * 4
    assert states(tmp_path, 3, 1).gathers == states(tmp_path, 2, 2).gathers == 0

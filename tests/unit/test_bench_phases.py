"""The clock of phases, the least bytes of ZeRO's stages and the choice of operations, against numbers by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg

from bigsgan.bench import phases
from bigsgan.bench.arithmetic import matrix_flops_per_second, matrix_precision
from bigsgan.bench.comm import least_bytes, network_of
from bigsgan.bench.phases import PHASES, PhaseClock, name_of
from bigsgan.bench.profile import costliest
from bigsgan.engines.orders import all_in_turn
from bigsgan.engines.phases import Segments, update_phases
from tests.tiny import both, tiny_plan, zero


def test_a_phase_does_not_count_what_is_inside_it(monkeypatch):
    now = iter([0, 1, 3, 8, 9, 10, 20, 21])
    monkeypatch.setattr(phases.time, "perf_counter", lambda: next(now))
    clock = PhaseClock()  # at 0
    with clock.phase("G pulls back: backward"), clock.phase("reduce"):  # from 1; from 3 to 8
        pass
    clock.stop()  # 9 to 10
    with pytest.raises(ValueError, match="lost"), clock.phase("EMA"):
        raise ValueError("lost")
    assert clock.seconds == {"rest": 1 + 1 + 10, "G pulls back: backward": 2 + 1, "reduce": 5, "EMA": 1}


def test_phases_come_in_the_order_of_an_update():
    clock = PhaseClock()
    for name in ("EMA", "D judges", "data wait"):
        with clock.phase(name):
            pass
    assert list(clock.stop()) == ["data wait", "D judges", "EMA", "rest"]


@pytest.mark.parametrize(
    "stage, times",
    [
        # Of 4 micro-batches of D in 2 updates, and 2 of G in 1.
        (0, {"generator": 2, "discriminator": 2 * 2}),
        (1, {"generator": 2, "discriminator": 2 * 2}),
        (2, {"generator": 2 + 1, "discriminator": 4 + 2}),
        # Forward, backward and gradients of each; and G's for D's 4, D's for G's 2.
        (3, {"generator": 3 * 2 + 4, "discriminator": 3 * 4 + 2}),
    ],
)
def test_least_bytes(stage, times, tmp_path):
    files = {name: {**zero(stage), "bf16": {"enabled": name == "generator"}} for name in ("generator", "discriminator")}
    plan = tiny_plan(tmp_path, 4, ["accumulation=2", "objective.d_steps=2"], files)
    assert least_bytes(plan, "generator", 1000) == times["generator"] * 3 / 4 * 1000 * 2
    assert least_bytes(plan, "discriminator", 1000) == times["discriminator"] * 3 / 4 * 1000 * 4


def test_reused_fakes_need_the_generator_once(tmp_path):
    """Its images for D are those of its update, as long as their graphs are kept."""
    ds = dict.fromkeys(("generator", "discriminator"), zero(3))
    for accumulation, times in ((1, 3 + 1), (2, 3 * 2 + 2 * 2)):
        overrides = [f"accumulation={accumulation}", "objective={reuse_fakes: true, d_steps: 2}"]
        assert least_bytes(tiny_plan(tmp_path, 2, overrides, ds), "generator", 1000) == times / 2 * 1000 * 4


def test_each_phase_has_the_network_whose_parameters_it_needs():
    found = {phase: network_of(phase) for phase in PHASES}
    g, d = ([phase for phase, network in found.items() if network == n] for n in ("generator", "discriminator"))
    g_steps = [f"G pulls back: {kind}" for kind in ("forward", "backward", "step")]
    assert g == ["G makes images", "G differentiates", "G makes images, graphs kept", *g_steps]
    trains = [f"D trains: {kind}" for kind in ("forward", "backward", "step")]
    assert d == ["D checks", "D differentiates", *trains, "D judges", "D keeps"]


def test_names_are_the_labels_of_the_phases(tmp_path):
    """Every task of an update has a name with its phase's label, which the output has in its order."""
    overrides = ["objective.r1={weight: 1, method: forward_mode}", "objective.d_steps=2"]
    plan = tiny_plan(tmp_path, 1, overrides, {"generator": zero(0), "discriminator": zero(0)})
    update = update_phases(plan, [Segments(differentiated=1, checks=True)])
    found = [(update[task.phase].label, name_of(update[task.phase], task)) for task in all_in_turn(update)]
    assert all(name.startswith(label) for label, name in found)
    named = {name for _, name in found}
    assert named <= set(PHASES)
    assert {"D checks", "D differentiates", "D trains: forward", "D trains: step", "D judges"} <= named
    assert {label for label, _ in found} == {phase.label for phase in update}
    plan = tiny_plan(tmp_path, 1, [*overrides, "objective.schedule=overlapped"], both(0))
    update = update_phases(plan, [Segments(differentiated=1, checks=True)])
    tasks = [*all_in_turn(update)]
    assert {name_of(update[task.phase], task) for task in tasks} <= set(PHASES)
    assert {update[task.phase].label for task in tasks} == {phase.label for phase in update}


def averages(*events):
    """As torch.profiler gives them, of (name, microseconds of the host, of the GPU, changes)."""
    found = []
    for name, host, gpu, changes in events:
        event = FunctionEvent(0, name, 0, 0, host, use_device="cuda", **changes)
        if event.device_type == DeviceType.CPU and gpu:
            event.append_kernel("kernel", 0, gpu)
        average = FunctionEventAvg()
        average.add(event)
        found.append(average)
    return found


def test_costliest_operations_leave_the_phases_out():
    events = [(f"op{i}", 1000 * i, 1000 * (20 - i), {}) for i in range(12)]
    events += [("bigsgan: D judges", 9000, 9000, {"is_user_annotation": True}), ("op11", 500, 0, {})]
    found = costliest(averages(*events), on_gpu=False)
    assert [each["name"] for each in found] == [f"op{i}" for i in range(11, 1, -1)]
    assert found[0] == {"name": "op11", "calls": 2, "seconds": 0.0115, "share": pytest.approx(11.5 / 66.5)}


def test_kernels_count_once_for_the_operation_that_starts_them():
    """A kernel is an event of the GPU besides, and so is a phase there."""
    on_gpu, phase = {"device_type": DeviceType.CUDA}, {"is_user_annotation": True}
    events = [
        ("aten::mm", 10, 3000, {}),
        ("sgemm", 3000, 0, on_gpu),
        ("aten::add", 5000, 1000, {}),
        ("vectorized_elementwise_kernel", 1000, 0, on_gpu),
        ("bigsgan: D judges", 6000, 0, phase),
        ("bigsgan: D judges", 4000, 0, {**on_gpu, **phase}),
    ]
    assert costliest(averages(*events), on_gpu=True) == [
        {"name": "aten::mm", "calls": 1, "seconds": 0.003, "share": 0.75},
        {"name": "aten::add", "calls": 1, "seconds": 0.001, "share": 0.25},
    ]


@pytest.mark.parametrize("allowed", [True, False])
def test_a_matrix_product_may_use_what_convolutions_may(allowed, monkeypatch):
    cuda = SimpleNamespace(matmul=SimpleNamespace(allow_tf32=not allowed))
    backends = SimpleNamespace(cudnn=SimpleNamespace(allow_tf32=allowed), cuda=cuda)
    monkeypatch.setattr(torch, "backends", backends)
    seen = []
    monkeypatch.setattr(torch, "mm", lambda a, b: seen.append(cuda.matmul.allow_tf32))
    matrix_flops_per_second(torch.float32, torch.device("cpu"))
    assert set(seen) == {allowed}
    assert cuda.matmul.allow_tf32 is not allowed
    names = [matrix_precision("fp32", torch.device(kind)) for kind in ("cuda", "cpu")]
    assert names == ["fp32 (TF32, as convolutions)" if allowed else "fp32", "fp32"]


def test_a_matrix_product_has_a_speed():
    assert 1e8 < matrix_flops_per_second(torch.float32, torch.device("cpu")) < 1e13

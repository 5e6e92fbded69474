"""What a machine cannot compute, compile or replay: one message for each, before anything is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bigsgan.bench import train as bench_train
from bigsgan.bench.variants import VARIANTS, Planned
from bigsgan.config import NETWORKS, both_engines
from bigsgan.engines import compile_checks, deepspeed_config
from bigsgan.engines.build import on_this_machine
from bigsgan.errors import UserError
from tests.tiny import TINY_GAMES, tiny_plan, zero


@pytest.mark.parametrize("precision, other", [("fp16", "bf16"), ("bf16", "fp16")])
def test_a_precision_that_the_machine_cannot_compute(precision, other, tmp_path, monkeypatch):
    class Accelerator:
        def device_name(self) -> str:
            return "abacus"

        def is_fp16_supported(self) -> bool:
            return precision != "fp16"

        def is_bf16_supported(self) -> bool:
            return precision != "bf16"

    monkeypatch.setattr(deepspeed_config, "get_accelerator", Accelerator)
    plan = tiny_plan(tmp_path, 1, [], {"discriminator": zero(1, **{precision: {"enabled": True}})})
    with pytest.raises(UserError) as caught:
        deepspeed_config.checked_config(plan, "discriminator")
    assert caught.value.field == "engines.discriminator.ds_config"
    assert caught.value.value == str(tmp_path / "discriminator.json")
    assert caught.value.problem == f"sets {precision}, which this abacus does not support"
    assert caught.value.remedy == f"use another precision, such as ds_configs/zero1_{other}.json"


@pytest.mark.parametrize(
    "device, missing, remedy",
    [("cpu", "needs a C++ compiler, c++-99 is not installed", "CXX"), ("cuda", "Triton", "install it")],
)
def test_a_machine_that_cannot_compile(device, missing, remedy, tmp_path, monkeypatch):
    class Accelerator:
        def device_name(self) -> str:
            return device

    monkeypatch.setattr(compile_checks, "get_accelerator", Accelerator)
    monkeypatch.setattr(compile_checks, "has_triton", lambda: False)
    monkeypatch.setenv("CXX", "c++-99")
    plan = tiny_plan(tmp_path, 1, ["engines.generator.compile=layers"], {})
    compile_checks.check_compiler(plan, "discriminator")
    with pytest.raises(UserError) as caught:
        compile_checks.check_compiler(plan, "generator")
    assert (caught.value.field, caught.value.value) == ("engines.generator.compile", "layers")
    assert missing in caught.value.problem
    assert remedy in caught.value.remedy
    monkeypatch.setattr(compile_checks, "has_triton", lambda: True)
    monkeypatch.delenv("CXX")
    monkeypatch.setattr(compile_checks.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    compile_checks.check_compiler(plan, "generator")


@pytest.mark.parametrize("network", NETWORKS)
def test_a_recomputation_that_moves_no_state_is_not_compiled(network, tmp_path):
    recomputing = [f"engines.{network}.compile=layers", f"engines.{network}.activation_checkpointing=true"]
    with pytest.raises(UserError, match=r"layers that update state in forward \((Spectral|Batch)") as caught:
        compile_checks.check_compiler(tiny_plan(tmp_path, 1, recomputing, {}), network)
    assert caught.value.field == f"engines.{network}.compile"
    compile_checks.check_compiler(tiny_plan(tmp_path, 1, recomputing[:1], {}), network)
    compile_checks.check_compiler(tiny_plan(tmp_path, 1, [*TINY_GAMES["stylegan2"], *recomputing], {}), network)


REPLAYED = ["engines.discriminator.compile=whole", "engines.discriminator.cuda_graphs=true"]


@pytest.mark.parametrize(
    "device, version, ds, problem",
    [
        ("cpu", "2.15.0", zero(0), "must be false on this device (cpu)"),
        ("cuda", "2.14.1+cu130", zero(0), "must be false with torch 2.14.1+cu130, before 2.15 graphs may be"),
        ("cuda", "2.15.0", zero(2, zero={"reduce_scatter": False}), "DeepSpeed's own gradient reduction"),
        ("cuda", "2.15.0", zero(0, prescale_gradients=True), "DeepSpeed's own gradient reduction"),
    ],
)
def test_a_machine_that_cannot_replay(device, version, ds, problem, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_checks, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    monkeypatch.setattr(compile_checks.torch, "__version__", version)
    compile_checks.check_cuda_graphs(tiny_plan(tmp_path, 2, [], {"discriminator": ds}), "discriminator")
    plan = tiny_plan(tmp_path, 2, REPLAYED, {"discriminator": ds})
    compile_checks.check_cuda_graphs(plan, "generator")
    with pytest.raises(UserError) as caught:
        compile_checks.check_cuda_graphs(plan, "discriminator")
    assert (caught.value.field, caught.value.value) == ("engines.discriminator.cuda_graphs", True)
    assert problem in caught.value.problem
    assert "engines.discriminator.cuda_graphs=false" in caught.value.remedy


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_machine_that_can_replay(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_checks, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(compile_checks.torch, "__version__", "2.15.0+cu132")
    for world_size in (1, 2):
        plan = tiny_plan(tmp_path, world_size, REPLAYED, {"discriminator": zero(stage)})
        compile_checks.check_cuda_graphs(plan, "discriminator")


@pytest.mark.parametrize("stock", ["discriminator", "both"])
def test_what_deepspeed_reduces_itself_is_not_replayed(stock, tmp_path, monkeypatch):
    """On one rank at ZeRO 0 nothing is reduced."""
    monkeypatch.setattr(compile_checks, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(compile_checks.torch, "__version__", "2.15.0")
    switch = f"engines.stock_deepspeed={stock}"
    compile_checks.check_cuda_graphs(tiny_plan(tmp_path, 1, [*REPLAYED, switch], {}), "discriminator")
    with pytest.raises(UserError) as caught:
        compile_checks.check_cuda_graphs(tiny_plan(tmp_path, 2, [*REPLAYED, switch], {}), "discriminator")
    assert caught.value.problem == f"must be false with {switch}"
    assert caught.value.remedy == "set engines.discriminator.cuda_graphs=false, or engines.stock_deepspeed=neither"
    of_generator = tiny_plan(tmp_path, 2, [*REPLAYED, "engines.stock_deepspeed=generator"], {})
    compile_checks.check_cuda_graphs(of_generator, "discriminator")


def test_gradients_of_another_type_are_not_replayed(tmp_path):
    ds = zero(1, bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    with pytest.raises(UserError, match=r"engines.discriminator.cuda_graphs: must be false with data_types, got true"):
        tiny_plan(tmp_path, 1, REPLAYED, {"discriminator": ds})


def test_passes_with_collectives_are_not_replayed(tmp_path, monkeypatch):
    """Nor does a benchmark begin what it would have to break off."""
    monkeypatch.setattr(compile_checks, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: "cuda"))
    monkeypatch.setattr(compile_checks, "has_triton", lambda: True)
    monkeypatch.setattr(compile_checks.torch, "__version__", "2.15.0")
    replayed = both_engines("compile=whole", "cuda_graphs=true")
    alone, together = (tiny_plan(tmp_path, num_ranks, replayed, {}) for num_ranks in (1, 2))
    for network in NETWORKS:
        compile_checks.check_cuda_graphs(alone, network)
    compile_checks.check_cuda_graphs(together, "discriminator")
    with pytest.raises(UserError, match=r"engines.generator.cuda_graphs: must be false with layers that average over"):
        compile_checks.check_cuda_graphs(together, "generator")
    monkeypatch.setattr(bench_train, "checked_config", lambda plan, network: {})  # it asks for two ranks
    planned = bench_train._on_machine(Planned(VARIANTS["cuda_graphs"], together))
    assert planned.plan is None
    assert "average over 2 ranks" in planned.reason


def test_ranks_of_unknown_hosts_have_no_statistics_of_a_host(tmp_path, monkeypatch):
    plan = tiny_plan(tmp_path, 2, ["batch_statistics=host"], {})
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match=r"^LOCAL_WORLD_SIZE: must be set with batch_statistics=host \(an environment"):
        on_this_machine(plan)
    monkeypatch.setenv("LOCAL_SIZE", "1")
    assert on_this_machine(plan).statistics_parts("generator") == [range(1), range(1, 2)]

"""What `bigsgan bench train` compares, and what it refuses before torch is imported."""

from types import SimpleNamespace

import pytest

from bigsgan.bench.train import _on_machine
from bigsgan.bench.variants import VARIANTS, chosen_variants, plan_variants
from bigsgan.cli import main
from bigsgan.config import NETWORKS
from bigsgan.engines import compile_checks
from bigsgan.errors import UserError
from tests import REPOSITORY
from tests.tiny import tiny_recipe

BASELINES = {"baseline", "baseline_fp32", "baseline_tf32"}


def planned(tmp_path, world_size, *overrides):
    found = plan_variants(tiny_recipe(tmp_path, *overrides), list(VARIANTS.values()), world_size)
    return {each.variant.name: each for each in found}


def test_each_variant_changes_one_thing(tmp_path):
    plans = {name: each.plan for name, each in planned(tmp_path, 2, "objective.r1={weight: 1}").items()}
    assert all(plans.values())
    plain = plans["zero0"].recipe
    for name, plan in plans.items():
        recipe, files = plan.recipe, [engine.file for engine in plan.engines.values()]
        expected = {
            "mixed_precision": (0, "bf16", "none"),
            "zero1": (1, "fp32", "none"),
            "zero2": (2, "fp32", "none"),
            "zero3": (3, "fp32", "none"),
            "offload": (2, "bf16", "cpu"),
        }.get(name, (0, "fp32", "none"))
        assert {(file.stage, file.precision, file.offload_optimizer) for file in files} == {expected}
        assert recipe.batch == (32 if name == "accumulation" else 8)
        assert recipe.accumulation == (4 if name == "accumulation" else 1)
        assert recipe.optimizer.discriminator.clip_norm == (2 if name == "clipping" else None)
        assert recipe.engines.generator.pipeline_stages == (2 if name == "pipeline" else 1)
        assert (recipe.generator, recipe.data, recipe.seed) == (plain.generator, plain.data, plain.seed)
        assert plan.world_size == (1 if name in BASELINES else 2)
        assert plan.differentiates_forward("discriminator") == (name in ("forward_mode", "zero3", "pipeline"))


def test_ranks_of_their_own_are_the_recipes_or_half_of_all(tmp_path):
    for overrides, expected in (
        ([], [2, 2]),
        (["engines.generator.ranks=auto"], [2, 2]),
        (["engines.generator.ranks=3", "engines.discriminator.ranks=1"], [3, 1]),
        (["engines.discriminator.ranks=1"], [3, 1]),
    ):
        found = planned(tmp_path, 4, "batch=24", *overrides)
        plan = found["separate_ranks"].plan
        assert [len(plan.placement(network).ranks) for network in ("generator", "discriminator")] == expected
        assert not found["zero0"].plan.is_split


def test_a_recipes_own_layout_is_not_compared(tmp_path):
    overrides = ["engines.generator.ds_config=ds_configs/zero3.json", "engines.generator.pipeline_stages=1"]
    found = planned(tmp_path, 1, *overrides)
    assert found["zero0"].plan.engines["generator"].file.stage == 0


def test_accumulation_is_the_variants_own(tmp_path):
    found = planned(tmp_path, 1, "engines.generator.accumulation=4", "engines.discriminator.accumulation=2")
    for name, expected in (("zero0", 1), ("accumulation", 4)):
        recipe = found[name].plan.recipe
        assert [recipe.accumulation_of(n) for n in ("generator", "discriminator")] == [expected] * 2


def test_what_cannot_run_keeps_the_reason(tmp_path):
    found = planned(tmp_path, 1)
    lacking = ["double_backward", "forward_mode", "penalized_quarter", "separate_ranks", "pipeline"]
    assert [name for name, each in found.items() if each.plan is None] == lacking
    reason = "objective: has no exact R1, R2 or gradient penalty; add objective.r1, or leave the variant out"
    assert found["forward_mode"].reason == reason
    assert found["penalized_quarter"].reason == reason.replace("exact ", "")
    penalized = planned(tmp_path, 1, "objective.r1={weight: 1}", "objective.gradient_penalty={}")["penalized_quarter"]
    assert {each.batch_shrink for each in penalized.plan.objective.penalties.values()} == {4}
    assert found["pipeline"].reason.startswith("engines.generator.pipeline_stages: must divide the number of ranks (1)")
    found = planned(tmp_path, 3)
    # 8 images divide by 2 and by 1, but not by 3 ranks.
    assert {name for name, each in found.items() if each.plan is not None} == {*BASELINES, "separate_ranks"}
    assert "(1 micro-batch on 3 ranks" in found["data_parallel"].reason
    with pytest.raises(UserError, match=r"^--variants: 'zero1,zero2' cannot run here: batch: must be a multiple of 3"):
        plan_variants(tiny_recipe(tmp_path), chosen("zero1,zero2", tmp_path), 3)


def chosen(text, tmp_path, *overrides):
    return chosen_variants(text, tiny_recipe(tmp_path, *overrides))


def test_a_combination_has_the_changes_of_all_its_parts(tmp_path):
    text = "baseline_tf32, mixed_precision + compiled, clipping+zero2+accumulation+reused_fakes, pipeline+zero1"
    variants = chosen(text, tmp_path)
    assert [(each.name, each.title, each.is_plain, each.tf32) for each in variants] == [
        ("baseline_tf32", "plain PyTorch, one process, all float32 in TF32", True, True),
        ("mixed_precision+compiled", "ZeRO 0 in bf16, networks through torch.compile", False, None),
        (
            "clipping+zero2+accumulation+reused_fakes",
            "ZeRO 2, gradients clipped at norm 2, 4 times the micro-batches and the batch, "
            "D's last step and G's update on the same images",
            False,
            None,
        ),
        ("pipeline+zero1", "ZeRO 1, both networks in 2 stages", False, None),
    ]
    recipe = tiny_recipe(tmp_path, "accumulation=2")
    _, first, second, third = (each.plan for each in plan_variants(recipe, variants, 2))
    assert {(e.file.stage, e.file.precision) for e in first.engines.values()} == {(0, "bf16")}
    assert {first.recipe.engine(network).compile for network in NETWORKS} == {"whole"}
    assert {(e.file.stage, e.file.precision) for e in second.engines.values()} == {(2, "fp32")}
    assert (second.recipe.batch, second.recipe.accumulation) == (4 * 8, 4 * 2)
    assert {getattr(second.recipe.optimizer, network).clip_norm for network in NETWORKS} == {2}
    assert second.recipe.objective.reuse_fakes
    assert not first.recipe.objective.reuse_fakes
    assert {e.file.stage for e in third.engines.values()} == {1}
    assert {third.placement(network).num_stages for network in NETWORKS} == {2}


def test_the_title_of_a_change_names_the_stage_that_it_has_alone(tmp_path):
    titles = {each.name: each.title for each in chosen("compiled,compiled+reused_fakes,zero0+compiled", tmp_path)}
    assert titles == {
        "compiled": "ZeRO 0, networks through torch.compile",
        "compiled+reused_fakes": "ZeRO 0, networks through torch.compile, "
        "D's last step and G's update on the same images",
        "zero0+compiled": "two engines, ZeRO 0, networks through torch.compile",
    }


def test_a_combination_that_the_recipe_rules_out_keeps_the_reason(tmp_path):
    variants = chosen("zero0,zero3+compiled", tmp_path)
    _, refused = plan_variants(tiny_recipe(tmp_path), variants, 1)
    assert refused.plan is None
    assert refused.reason.startswith("engines.generator.compile: must be layers with ZeRO 3, got 'whole'")


@pytest.mark.parametrize("device, runs", [("cpu", False), ("cuda", True)])
def test_graphs_are_for_cuda(device, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(compile_checks, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: device))
    monkeypatch.setattr(compile_checks, "has_triton", lambda: True)
    monkeypatch.setattr(compile_checks.torch, "__version__", "2.15.0")
    found_here = planned(tmp_path, 1)
    for name in ("zero0", "compiled", "compiled_layers", "cuda_graphs"):
        found = _on_machine(found_here[name])
        assert (found.plan is not None) == (runs or name != "cuda_graphs"), name
        if found.plan is None:
            problem = "must be false on this device (cpu), got true; set engines.generator.cuda_graphs=false"
            assert found.reason == f"engines.generator.cuda_graphs: {problem}"
        else:
            engines = found.plan.recipe.engines
            assert (engines.generator.cuda_graphs, engines.discriminator.cuda_graphs) == 2 * (name == "cuda_graphs",)


HALF = {"RANK": "0", "WORLD_SIZE": "2"}
TWO_RANKS = {**HALF, "LOCAL_RANK": "0", "LOCAL_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        ("train --variants zero1,zero7", {}, "--variants: must be one of baseline, baseline_fp32"),
        ("train --variants zero1,zero1", {}, "--variants: must be named once, got 'zero1'"),
        ("train --variants zero1+compiled,compiled+zero1", {}, "--variants: must be named once, got 'compiled+zero1'"),
        ("train --variants compiled+zero1+compiled", {}, "--variants: must name compiled once"),
        ("train --variants zero0,compiled+baseline_tf32", {}, "--variants: 'compiled+baseline_tf32' joins"),
        (
            "train --variants zero1+clipping+mixed_precision",
            {},
            "--variants: 'zero1+clipping+mixed_precision' sets engines.generator.ds_config to ds_configs/zero1.json "
            "for zero1 and to ds_configs/zero0_bf16.json for mixed_precision; remove zero1 or mixed_precision",
        ),
        ("train --rounds 0", {}, "--rounds: must be 1 to"),
        ("profile --out README.md", {}, "--out: must be a directory, got 'README.md'"),
        ("profile --out x engines.generator.pipeline_stages=2", TWO_RANKS, "engines.generator.pipeline_stages"),
        ("comm", {}, "WORLD_SIZE: must be at least 2, got 1; start with deepspeed or torchrun"),
        ("comm --variants baseline", TWO_RANKS, "--variants: 'baseline' has no ZeRO stage to compare with"),
        ("comm --variants zero1+pipeline", TWO_RANKS, "--variants: 'zero1+pipeline' has no ZeRO stage to compare with"),
        ("comm", HALF, "MASTER_ADDR: must be set in the environment, as RANK is"),
    ],
)
def test_bad_input(arguments, environment, message, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for name in TWO_RANKS:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {message}")

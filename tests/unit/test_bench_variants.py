"""What `bigsgan bench train` compares, and what it refuses before torch is imported."""

import pytest

from bigsgan.bench.variants import VARIANTS, chosen_variants, plan_variants
from bigsgan.cli import main
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.errors import UserError
from tests.tiny import tiny_recipe


def planned(tmp_path, world_size, *overrides):
    found = plan_variants(tiny_recipe(tmp_path, *overrides), list(VARIANTS.values()), world_size)
    return {each.variant.name: each for each in found}


def test_each_variant_changes_one_thing(tmp_path):
    plans = {name: each.plan for name, each in planned(tmp_path, 2).items()}
    assert all(plans.values())
    plain = plans["zero0"].recipe
    for name, plan in plans.items():
        recipe, files = plan.recipe, plan.deepspeed_files.values()
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
        assert plan.world_size == (1 if name == "baseline" else 2)


def test_a_recipes_own_layout_is_not_compared(tmp_path):
    overrides = ["engines.generator.ds_config=ds_configs/zero3.json", "engines.generator.pipeline_stages=1"]
    found = planned(tmp_path, 1, *overrides)
    assert found["zero0"].plan.deepspeed_files["generator"].stage == 0


def test_accumulation_is_the_variants_own(tmp_path):
    found = planned(tmp_path, 1, "engines.generator.accumulation=4", "engines.discriminator.accumulation=2")
    for name, expected in (("zero0", 1), ("accumulation", 4)):
        recipe = found[name].plan.recipe
        assert [recipe.accumulation_of(n) for n in ("generator", "discriminator")] == [expected] * 2


def test_what_cannot_run_keeps_the_reason(tmp_path):
    found = planned(tmp_path, 1)
    assert [name for name, each in found.items() if each.plan is None] == ["pipeline"]
    assert found["pipeline"].reason.startswith("engines.generator.pipeline_stages: 2 times data-parallel ranks")
    found = planned(tmp_path, 3)
    assert {name for name, each in found.items() if each.plan is not None} == {"baseline"}  # 8 images, 3 ranks
    assert "does not divide into 1 micro-batches on 3 ranks" in found["data_parallel"].reason
    with pytest.raises(UserError, match=r"^--variants: 'zero1,zero2' cannot run here: batch: 8 does not divide"):
        plan_variants(tiny_recipe(tmp_path), chosen_variants("zero1,zero2"), 3)


TWO_RANKS = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    "arguments, environment, message",
    [
        ("train --variants zero1,zero7", {}, "--variants: 'zero7' is no variant; choose from baseline, data_parallel"),
        ("train --variants zero1,zero1", {}, "--variants: 'zero1' stands there twice"),
        ("train --rounds 0", {}, "--rounds: '0' is no number of them; give 1 to"),
        ("train --steps few", {}, "--steps: 'few' is no number of them"),
        ("train --plot /no/such/plot.png", {}, "--plot: '/no/such/plot.png' lies in a directory that does not exist"),
        ("train --json --markdown", {}, "--markdown: not allowed with argument --json"),
        ("train bathc=3", {}, "bathc: 3 is given for a key that does not exist; did you mean batch?"),
        ("train --wide", {}, "--wide: is no option of `bigsgan bench train`"),
        ("profile", {}, "--out: is missing"),
        ("profile --out README.md", {}, "--out: 'README.md' is no directory"),
        (
            "profile --out x engines.generator.pipeline_stages=2",
            TWO_RANKS,
            "engines.generator.pipeline_stages: 2 has phases that overlap",
        ),
        ("comm", {}, "WORLD_SIZE: 1 rank has nobody to talk to; start with deepspeed or torchrun"),
        ("comm --variants baseline", TWO_RANKS, "--variants: 'baseline' has no ZeRO stage to compare with"),
        ("comm", TWO_RANKS, "MASTER_ADDR: is not set in the environment and RANK is"),
        ("generate", TWO_RANKS, "WORLD_SIZE: 2 ranks, of which one alone has work"),
        ("generate --batches 1,0", {}, "--batches: '0' is no number of them"),
        ("generate --precisions fp8", {}, "--precisions: 'fp8' is none of the choices; choose from fp32, bf16, fp16"),
        ("generate --run nowhere batch=3", {}, "argument: 'batch=3' is for recipes"),
        (
            "generate --run nowhere --config launch/recipes/digits.yaml",
            {},
            "--config: 'launch/recipes/digits.yaml' is not",
        ),
        ("generate --run nowhere", {}, "--run: 'nowhere' is no run directory"),
    ],
)
def test_bad_input(arguments, environment, message, capsys, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["bench", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {message}")

"""What DeepSpeed files hold that is not theirs to set: files of other programs, removed features, recipes' ways."""

from __future__ import annotations

import base64
import json
from contextlib import nullcontext
from typing import Any

import pytest
from deepspeed.runtime import config
from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError

from bigsgan import cli
from bigsgan.config import NETWORKS, plan_run
from bigsgan.config.deepspeed_elsewhere import ELSEWHERE, TAKEN
from bigsgan.config.deepspeed_keys import FILE
from bigsgan.errors import UserError
from tests.tiny import tiny_recipe
from tests.unit.test_deepspeed_file import DERIVED, read

AUTO_SIZES = dict.fromkeys(DERIVED, "auto")
AUTO_ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
WARMUP = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}

# Files from the documentation of transformers (main_classes/deepspeed, ZeRO 3 and 2) and accelerate (usage_guides), and
# from LLaMA-Factory (examples/deepspeed), with the values that have an effect here.
HUGGING_FACE_3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": AUTO_ADAM,
    "scheduler": {"type": "WarmupLR", "params": WARMUP},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    **AUTO_SIZES,
}
ACCELERATE = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "torch_adam": True}},
    "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": 500}},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": None},
        "offload_param": {"device": "none", "nvme_path": None},
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "round_robin_gradients": True,
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "steps_per_print": float("inf"),
    "zero_allow_untested_optimizer": True,
    **AUTO_SIZES,
}


def test_a_file_of_the_hugging_face_trainer_loads_and_one_line_says_what_the_recipe_decides(tmp_path):
    file = read(tmp_path, HUGGING_FACE_3)
    assert (file.stage, file.precision, file.offload_optimizer, file.offload_parameters) == (3, "fp32", "cpu", "cpu")
    zero = HUGGING_FACE_3["zero_optimization"]
    kept = ("stage", "offload_optimizer", "offload_param", "overlap_comm", "contiguous_gradients", "sub_group_size")
    assert file.content == {
        "fp16": {"loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
        "bf16": {},
        "zero_optimization": {key: zero[key] for key in (*kept, "stage3_max_live_parameters")},
        "wall_clock_breakdown": False,
    }
    assert file.note == (
        f"{tmp_path}/ds.json: the recipe, or `bigsgan export`, decides instead of optimizer, scheduler, "
        "steps_per_print, train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps, "
        'gradient_clipping, stage3_gather_16bit_weights_on_model_save; "auto" is the default of fp16.enabled, '
        "bf16.enabled, zero_optimization.reduce_bucket_size, zero_optimization.stage3_prefetch_bucket_size, "
        "zero_optimization.stage3_param_persistence_threshold (ZeRO 3, fp32)"
    )


def test_a_file_of_accelerate_loads_also_with_an_optimizer_of_its_own(tmp_path):
    file = read(tmp_path, ACCELERATE)
    assert (file.stage, file.precision, file.offload_optimizer) == (2, "bf16", "none")
    assert file.content.keys() == {"bf16", "zero_optimization", "zero_allow_untested_optimizer"}
    assert "instead of optimizer, scheduler, steps_per_print, train_batch_size" in file.note
    assert "auto" not in file.note
    assert "gather" not in file.note


def test_auto_anywhere_counts_as_not_given(tmp_path):
    """Everywhere that DeepSpeed has a value, and in place of sections."""

    def autos(section: Any) -> Any:
        return {key: autos(rule) if hasattr(rule, "keys") else "auto" for key, rule in section.keys.items()}

    file = read(tmp_path, autos(FILE))
    assert (file.stage, file.precision) == (0, "fp32")

    def empty(section: Any) -> bool:
        return isinstance(section, dict) and all(map(empty, section.values()))

    assert empty(file.content)
    assert read(tmp_path, dict.fromkeys(FILE.keys, "auto")).content == {}
    off = {"compile": "auto", "elasticity": {"enabled": "auto"}, "autotuning": {"enabled": False, "metric": "auto"}}
    assert read(tmp_path, off).note.endswith(': "auto" switches nothing on: compile, elasticity.enabled')
    assert read(tmp_path, {}).note == read(tmp_path, {"zero_optimization": {"stage": 1}}).note == ""
    with pytest.raises(UserError, match=r"zero_optimization\.stages: unknown key"):
        read(tmp_path, {"zero_optimization": {"stages": "auto"}})


REMOVED = [
    *config._REMOVED_TOP_LEVEL_CONFIG_KEYS,
    *(f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS),
]


def nested(name: str, value: Any) -> dict[str, Any]:
    section, _, key = name.rpartition(".")
    return {section: {key: value}} if section else {key: value}


@pytest.mark.parametrize("name", REMOVED)
def test_what_deepspeed_has_removed_is_named_as_such(tmp_path, name):
    for value in ({"enabled": True}, True, 8):
        content = nested(name, value)
        with pytest.raises(DeepSpeedConfigError, match=r"removed|no longer"):
            DeepSpeedConfig({**content, "train_batch_size": 1})
        with pytest.raises(UserError, match=f"{name}: is removed from DeepSpeed 0.19.8; remove it"):
            read(tmp_path, content)
    for value in (False, None, "auto", {"enabled": False, "max_train_batch_size": 2000}):
        assert "auto" not in str(read(tmp_path, nested(name, value)).content)


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "onebitadam"])
def test_optimizers_that_deepspeed_has_removed(tmp_path, kind):
    with pytest.raises(UserError, match=rf"optimizer\.type: '{kind}' is removed from .*; use optimizer\.generator; "):
        read(tmp_path, {"optimizer": {"type": kind, "params": {"lr": "auto"}}})


WAYS = {
    "compile": ({"deepcompile": True}, "engines.generator.compile"),
    "autotuning": ({"enabled": True, "fast": False}, "`bigsgan plan`"),
    "activation_checkpointing": ({"partition_activations": True}, "engines.generator.activation_checkpointing"),
    "data_efficiency": ({"enabled": True, "data_sampling": {}}, "`seed`"),
    "tensor_parallel": ({"autotp_size": 4}, "engines.generator.pipeline_stages"),
    "checkpoint": ({"tag_validation": "Warn"}, "use checkpoints; `bigsgan import --from universal`"),
    "wandb": ({"enabled": True}, "monitor"),
}


@pytest.mark.parametrize("key", WAYS)
def test_what_the_recipe_owns_names_its_key(tmp_path, key):
    value, way = WAYS[key]
    with pytest.raises(UserError) as caught:
        read(tmp_path, {key: value})
    assert f"{tmp_path}/ds.json: {key}: " in str(caught.value)
    assert way in caught.value.remedy
    for off in ({"enabled": False}, {}):
        assert key not in read(tmp_path, {key: off}).content


@pytest.mark.parametrize("key, shown", [("sequence_parallel_size", "{}"), ("tensor_parallel", '{{"autotp_size": {}}}')])
def test_one_rank_is_not_parallel(tmp_path, key, shown):
    assert read(tmp_path, {key: json.loads(shown.format(1))}).content == {}
    for value in ("2", "true"):
        with pytest.raises(UserError, match=f"{key}: is not supported"):
            read(tmp_path, {key: json.loads(shown.format(value))})


class Asked(dict):
    """Notes the keys that are looked for."""

    seen: set[str]

    def __contains__(self, key: object) -> bool:
        self.seen.add(str(key))
        return super().__contains__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        found = Asked(super().items())
        found.seen = self.seen
        return found

    def __copy__(self) -> Asked:
        return self.keys()


def test_every_key_that_deepspeed_reads_is_known():
    content = Asked(train_batch_size=1)
    content.seen = set()
    DeepSpeedConfig(content)
    top = {name for name in ELSEWHERE if "." not in name}
    assert content.seen - FILE.keys.keys() - top <= {"bfloat16"}, "the old name of bf16"
    assert content.seen >= {"zero_optimization", "autotuning", "tensor_parallel", "elasticity", "steps_per_print"}
    assert not FILE.keys.keys() & top
    assert {name for name in TAKEN if "." not in name} <= FILE.keys.keys()


@pytest.mark.parametrize("option", [["--autotuning", "run"], ["--autotuning"], ["--deepspeed_config", "experiment"]])
def test_autotuning_ends_in_a_line_that_names_plan(tmp_path, capsys, option):
    """DeepSpeed's launcher gives experiments as base64, and shows what follows "error" in their log."""
    if option[-1] == "experiment":
        option = [option[0], base64.urlsafe_b64encode(json.dumps({"autotuning": {"enabled": True}}).encode()).decode()]
    tiny_recipe(tmp_path)
    assert cli.main(["train", "--config", str(tmp_path / "tiny.yaml"), *option]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "bigsgan plan" in line.partition("error")[2]


def test_both_networks_have_one_log_of_collectives(tmp_path):
    """Whatever the order of its keys."""
    recipe = tiny_recipe(tmp_path, *(f"engines.{name}.ds_config={tmp_path}/{name}.json" for name in NETWORKS))
    first = {"enabled": True, "prof_all": True}
    for second, is_same in ((dict(reversed(first.items())), True), ({**first, "debug": True}, False)):
        for name, logger in zip(NETWORKS, (first, second), strict=True):
            (tmp_path / f"{name}.json").write_text(json.dumps({"comms_logger": logger}))
        with nullcontext() if is_same else pytest.raises(UserError, match="comms_logger: must be that of "):
            plan_run(recipe, 1)


def test_sections_whose_features_are_all_off_ask_for_nothing(tmp_path):
    off = {"partition_activations": False, "cpu_checkpointing": False, "number_checkpoints": None, "profile": False}
    assert read(tmp_path, {"activation_checkpointing": off}).content == {}
    with pytest.raises(UserError):
        read(tmp_path, {"activation_checkpointing": {**off, "number_checkpoints": 4}})

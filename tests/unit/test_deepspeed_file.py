"""DeepSpeed files: what is read from them, where they are looked for, and what they may not hold."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from deepspeed.comm import comm

from bigsgan.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file
from bigsgan.config.deepspeed_keys import LOGGED_COLLECTIVES
from bigsgan.errors import UserError
from tests import REPOSITORY

DERIVED = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
}


def read(tmp_path: Path, content: Any) -> DeepSpeedFile:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_deepspeed_file("generator", str(path), None, DERIVED)


@pytest.mark.parametrize("path", sorted((REPOSITORY / "ds_configs").glob("*.json")), ids=lambda path: path.stem)
def test_the_files_of_the_repository_are_what_their_names_say(path):
    file = read_deepspeed_file("generator", f"ds_configs/{path.name}", None, DERIVED)
    assert file.path == path
    assert file.content == json.loads(path.read_text())
    assert file.note == ""
    assert file.path.stem.startswith(f"zero{file.stage}")
    for precision in ("bf16", "fp16"):
        if path.stem.endswith(precision):
            assert file.precision == precision
    assert file.uses_nvme == path.stem.endswith("nvme")
    assert (file.offload_optimizer == "none") == (not path.stem.endswith(("offload", "nvme")))


def test_stage_precision_and_offload(tmp_path):
    file = read(tmp_path, {})
    assert (file.stage, file.precision, file.offload_optimizer, file.offload_parameters) == (0, "fp32", "none", "none")
    zero = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}, "offload_param": {"device": "cpu"}}
    file = read(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": False}, "fp16": {"enabled": True}})
    assert (file.stage, file.precision, file.offload_optimizer, file.offload_parameters) == (3, "fp16", "nvme", "cpu")
    assert read(tmp_path, {"bf16": {"enabled": True}}).precision == "bf16"


def test_parameters_in_host_memory_have_no_keys_of_nvme(tmp_path):
    for key, value in {"nvme_path": "/x", "buffer_count": 6, "buffer_size": 1e9, "max_in_cpu": 0}.items():
        with pytest.raises(UserError, match=rf"offload_param\.{key}: must be unset with device cpu, got "):
            read(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", key: value}}})
    defaults = {"nvme_path": None, "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9}
    read(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", **defaults}}})


@pytest.mark.parametrize("report", [{"dump_state": True}, {"comms_logger": {"verbose": True}}])
def test_reports_of_deepspeeds_log_need_a_level_that_shows_them(tmp_path, report):
    for level in ({}, {"log_level": "warning"}):
        with pytest.raises(UserError, match=r'must be false without log_level, got true .* add "log_level": "info"'):
            read(tmp_path, {**report, **level})
    for level in ("info", "debug"):
        assert read(tmp_path, {**report, "log_level": level}).content == {**report, "log_level": level}
    read(tmp_path, {"comms_logger": {"enabled": False, "verbose": True}})


def test_keys_of_another_stage_and_of_nvme_are_named(tmp_path):
    sizes = {"allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8, "stage3_max_live_parameters": 1e9}
    drive = {"aio": {"block_size": 1048576}}
    host = {"offload_optimizer": {"device": "cpu", "pin_memory": True, "nvme_path": "/x", "buffer_count": 4}}
    for stage, unused in {
        0: "allgather_bucket_size, reduce_bucket_size, stage3_max_live_parameters, aio",
        1: "stage3_max_live_parameters, aio",
        3: "allgather_bucket_size, aio",
    }.items():
        file = read(tmp_path, {"zero_optimization": {"stage": stage, **sizes}, **drive})
        assert file.note == f"{file.path}: ZeRO {stage} without NVMe does not use {unused}"
    file = read(tmp_path, {"zero_optimization": {"stage": 2, **host}})
    unused = "offload_optimizer.nvme_path, offload_optimizer.buffer_count"
    assert file.note == f"{file.path}: ZeRO 2 without NVMe does not use {unused}"
    nvme = {"stage": 3, "sub_group_size": 1e9, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}
    assert read(tmp_path, {"zero_optimization": nvme, **drive}).note == ""
    assert read(tmp_path, {"zero_optimization": {"stage": 1, "enable_sanity_checks": False}}).note == ""
    file = read(tmp_path, {"zero_optimization": {"stage": 1, "memory_efficient_linear": False}})
    assert file.note == f"{file.path}: ZeRO 1 without NVMe does not use memory_efficient_linear"


@pytest.mark.parametrize(
    "content, note",
    [
        ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer stays true"),
        ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer has no effect without an optimizer on"),
        (
            {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 2}},
            "with a constant fp16.loss_scale fp16.hysteresis has no effect",
        ),
    ],
)
def test_keys_without_effect_beside_others_are_named(tmp_path, content, note):
    assert note in read(tmp_path, content).note
    kept = {"zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "hysteresis": 2}}
    assert read(tmp_path, kept).note == ""


def test_a_log_of_collectives_that_is_off_does_not_reach_deepspeed(tmp_path):
    """DeepSpeed takes the section's presence for true."""
    assert read(tmp_path, {"comms_logger": {"enabled": False, "prof_all": True}}).content == {}
    assert read(tmp_path, {"comms_logger": {"enabled": "auto"}}).content == {}
    for content in ({"comms_logger": {"enabled": True}}, {"comms_logger": {"prof_all": True}}):
        assert read(tmp_path, content).content == content


def test_a_profile_goes_into_the_run_directory_and_not_to_a_named_file(tmp_path):
    file = read(tmp_path, {"flops_profiler": {"enabled": True, "output_file": "/dev/full", "detailed": False}})
    assert file.profiles
    assert file.content == {"flops_profiler": {"enabled": True, "detailed": False}}
    assert file.note == f"{file.path}: flops_profiler writes flops_*.txt in `out` instead of output_file"
    off = read(tmp_path, {"flops_profiler": {"enabled": False, "output_file": "x"}})
    assert (off.profiles, off.note) == (False, "")


def test_a_file_may_repeat_what_follows_from_the_recipe_or_leave_it_to_auto(tmp_path):
    assert read(tmp_path, {**DERIVED, "gradient_clipping": 0}).stage == 0
    assert read(tmp_path, dict.fromkeys(DERIVED, "auto")).stage == 0
    assert read(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": None}}).offload_parameters == "none"


def test_a_file_is_looked_for_here_then_beside_the_recipe_then_in_the_repository(tmp_path, monkeypatch):
    here, beside = tmp_path / "here", tmp_path / "beside"
    name = "ds_configs/zero0.json"
    for stage, directory in ((1, beside), (2, here)):
        (directory / "ds_configs").mkdir(parents=True)
        (directory / name).write_text(json.dumps({"zero_optimization": {"stage": stage}}))
    monkeypatch.chdir(here)
    assert read_deepspeed_file("generator", name, beside, DERIVED).stage == 2
    monkeypatch.chdir(tmp_path)
    assert read_deepspeed_file("generator", name, beside, DERIVED).stage == 1
    assert read_deepspeed_file("generator", name, None, DERIVED).stage == 0


REFUSED: dict[str, tuple[Any, str]] = {
    "not json": ("{", "(Expecting property name enclosed in double quotes: line 1 column 2 (char"),
    "deep": ("[" * 100_000, "(it is nested too deeply)"),
    "duplicate": ('{"bf16": {}, "bf16": {}}', "(duplicate key 'bf16'); fix the file"),
    "list": ([1], "engines.generator.ds_config: must be a JSON object, got"),
    "optimizer is text": ({"optimizer": "Adam"}, "optimizer: must be an object, got 'Adam'; fix it, or"),
    "tensorboard": ({"tensorboard": {"enabled": True}}, "the recipe owns it; remove it and use monitor"),
    "batch": ({"train_batch_size": 32}, "train_batch_size: must be 64, as in the recipe, got 32 (named by"),
    "text for a batch": ({"train_batch_size": "64"}, "train_batch_size: must be 64, as in the recipe, got '64' (named"),
    "misspelt": ({"zero_optimisation": {}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
    "old name": ({"bfloat16": {"enabled": True}}, "bfloat16: is the old name of bf16; rename it to bf16"),
    "zero is a number": ({"zero_optimization": 2}, 'zero_optimization: must be an object, got 2; write {"stage": 1}'),
    "stage": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: must be 0, 1, 2 or 3, got 4; choose one"),
    "stage is a float": ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage: must be 0, 1, 2 or 3, got"),
    "bf16 is true": ({"bf16": True}, 'bf16: must be an object, got true; write {"enabled": true}'),
    "enabled is text": ({"fp16": {"enabled": "yes"}}, "fp16.enabled: must be true or false, got 'yes'; write true or"),
    "both": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "fp16.enabled"),
    "fp16 at ZeRO 0": ({"fp16": {"enabled": True}}, "fp16.enabled: must be false at ZeRO 0, got true (DeepSpeed 0.19"),
    "bf16 masters": ({"bf16": {"bf16_master_weights_and_grads": True}}, "bf16.bf16_master_weights_and_grads: is not"),
    "cpu_offload": ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "zero_optimization.cpu_offload: is not"),
}
NVME = {"device": "nvme", "nvme_path": "/x"}
OFFLOAD_REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "a part": (
        2,
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        "offload_optimizer.ratio: must be 1, got 0.5",
    ),
    "at ZeRO 0": (0, {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer.device: must be none at ZeRO 0,"),
    "parameters at ZeRO 2": (
        2,
        {"offload_param": {"device": "cpu"}},
        "offload_param.device: must be none at ZeRO 2, got",
    ),
    "state on nvme at ZeRO 2": (2, {"offload_optimizer": NVME}, "offload_optimizer.device: must be cpu at ZeRO 2,"),
    "parameters on nvme": (3, {"offload_param": NVME}, "offload_param.device: must be none or cpu, got 'nvme'"),
    "device": (3, {"offload_param": {"device": "disk"}}, "offload_param.device: must be none, cpu or nvme, got"),
    "nvme without path": (
        3,
        {"offload_optimizer": {"device": "nvme"}},
        "offload_optimizer.nvme_path: must be given; give a",
    ),
}
for name, (stage, offload, message) in OFFLOAD_REFUSED.items():
    REFUSED[f"offload {name}"] = {"zero_optimization": {"stage": stage, **offload}}, f"zero_optimization.{message}"


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_file_may_not_hold(tmp_path, name):
    content, message = REFUSED[name]
    with pytest.raises(UserError) as caught:
        read(tmp_path, content)
    assert message in str(caught.value)
    assert str(tmp_path / "ds.json") in str(caught.value)


@pytest.mark.parametrize("name", ["ds_configs/zero9.json", "", ".", "x" * 5000, "a\0b"])
def test_a_file_that_is_not_there(name):
    with pytest.raises(UserError) as caught:
        read_deepspeed_file("discriminator", name, None, DERIVED)
    assert caught.value.field == "engines.discriminator.ds_config"
    assert caught.value.value == name
    assert "does not exist; give the path of a DeepSpeed JSON file, or the name of a built-in one such as zero1" in str(
        caught.value
    )


def test_a_log_of_some_collectives_names_those_that_deepspeed_logs(tmp_path):
    """DeepSpeed passes over other names, and logs nothing without a word."""
    closures = (inspect.getclosurevars(found).nonlocals for _, found in inspect.getmembers(comm, inspect.isfunction))
    logged = {names["func"].__name__: names["default_log_name"] for names in closures if "default_log_name" in names}
    assert sorted({*logged.values()}) == sorted(LOGGED_COLLECTIVES)
    given = {"comms_logger": {"prof_all": False, "prof_ops": ["all_reduce", "broadcast"]}}
    assert read(tmp_path, given).content == given
    for names in (["allreduce"], ["all_reduce", "x"], [3]):
        with pytest.raises(UserError, match=r"comms_logger.prof_ops: must be a list of collectives, got \["):
            read(tmp_path, {"comms_logger": {"prof_all": False, "prof_ops": names}})
    for none in ({}, {"prof_ops": []}):
        with pytest.raises(UserError, match=r"comms_logger.prof_ops: must be empty unless prof_all is false, got"):
            read(tmp_path, {"comms_logger": {"prof_ops": ["all_reduce"]}})
        with pytest.raises(UserError, match=r"comms_logger.prof_all: must be true without prof_ops, got false; name"):
            read(tmp_path, {"comms_logger": {"prof_all": False, **none}})
        assert read(tmp_path, {"comms_logger": {"enabled": False, "prof_all": False, **none}}).content == {}

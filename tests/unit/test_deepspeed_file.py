"""DeepSpeed files: what is read from them, where they are looked for, and what they may not hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bigsgan.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file
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


def test_nvme_is_seen(tmp_path):
    device = {"device": "nvme", "nvme_path": "/nvme"}
    assert read(tmp_path, {"zero_optimization": {"stage": 3, "offload_optimizer": device}}).uses_nvme
    assert not read(tmp_path, {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}).uses_nvme


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
    "not json": ("{", "ds.json' is not valid JSON: Expecting property name"),
    "deep": ("[" * 100_000, "ds.json' is not valid JSON: "),
    "duplicate": ('{"bf16": {}, "bf16": {}}', "is not valid JSON: key 'bf16' stands twice; mend the file"),
    "list": ([1], 'holds no JSON object; write {"zero_optimization": {"stage": 1}}'),
    "optimizer": ({"optimizer": {"type": "Adam"}}, "optimizer: {'type': 'Adam'} is set there, but the recipe owns it; "
                  "remove it and use optimizer.generator"),
    "scheduler": ({"scheduler": {}}, "remove it and use optimizer.generator.decay"),
    "tensorboard": ({"tensorboard": {"enabled": True}}, "the recipe owns it; remove it and use report_nimg"),
    "autocast": ({"torch_autocast": {"enabled": True}}, "remove it and use bf16 or fp16 of the same file"),
    "batch": ({"train_batch_size": 32}, "train_batch_size: 32 contradicts the recipe, from which 64 follows "
              "(engines.generator.ds_config); remove it"),
    "micro batch": ({"train_micro_batch_size_per_gpu": 64}, "64 contradicts the recipe, from which 16 follows"),
    "accumulation": ({"gradient_accumulation_steps": 1}, "1 contradicts the recipe, from which 2 follows"),
    "clipping": ({"gradient_clipping": 1.0}, "gradient_clipping: 1.0 contradicts the recipe, from which 0.0 follows"),
    "misspelt": ({"zero_optimisation": {}}, "zero_optimisation: {} is given for a key that this trainer does not use; "
                 "did you mean zero_optimization?"),
    "misspelt batch": ({"train_batchsize": 64}, "did you mean train_batch_size?"),
    "old name": ({"bfloat16": {"enabled": True}}, "remove it; known keys here: zero_optimization, bf16, fp16, "),
    "unused": ({"elasticity": {"enabled": True}}, "remove it; known keys here: "),
    "zero is a number": ({"zero_optimization": 2}, 'zero_optimization: 2 is not an object; write {"stage": 1}'),
    "stage": ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is no ZeRO stage; set 0, 1, 2 or 3"),
    "stage is true": ({"zero_optimization": {"stage": True}}, "zero_optimization.stage: True is no ZeRO stage"),
    "stage is text": ({"zero_optimization": {"stage": "2"}}, "zero_optimization.stage: '2' is no ZeRO stage"),
    "stage is a float": ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage: 2.0 is no ZeRO stage"),
    "bf16 is true": ({"bf16": True}, 'bf16: True is not an object; write {"enabled": true}'),
    "enabled is text": ({"fp16": {"enabled": "yes"}}, "fp16.enabled: 'yes' is not true or false"),
    "both": ({"bf16": {"enabled": True}, "fp16": {"enabled": True}, "zero_optimization": {"stage": 1}},
             "fp16.enabled: True but bf16.enabled is true too; enable one of them"),
    "fp16 at stage 0": ({"fp16": {"enabled": True}}, "fp16.enabled: True does not train at ZeRO stage 0 (DeepSpeed "
                        "0.19 leaves the loss unscaled there); set zero_optimization.stage to 1"),
    "bf16 masters": ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
                     "bf16.bf16_master_weights_and_grads: True is not supported; remove it"),
    "cpu_offload": ({"zero_optimization": {"stage": 2, "cpu_offload": True}},
                    'cpu_offload: True is not supported; write "offload_optimizer": {"device": "cpu"}'),
    "part of an offload": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "offload_optimizer.ratio: 0.5 is not supported: DeepSpeed 0.19 updates the part that is not offloaded with an "
        "AdamW of its own; remove it, which offloads all"),
    "offload at stage 0": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
                           "device: 'cpu' needs ZeRO stage 1 or more; set zero_optimization.stage to 2"),
    "parameters at stage 2": ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
                              "offload_param.device: 'cpu' needs ZeRO stage 3; set zero_optimization.stage to 3"),
    "state on nvme at stage 2": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        "offload_optimizer.device: 'nvme' needs ZeRO stage 3; set zero_optimization.stage to 3, or write \"cpu\""),
    "parameters on nvme": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
        "offload_param.device: 'nvme' is not supported: DeepSpeed 0.19 fails as it prefetches parameters from there; "
        "write \"cpu\"; offload_optimizer may be nvme"),
    "offload is text": ({"zero_optimization": {"stage": 3, "offload_param": "nvme"}},
                        "offload_param: 'nvme' is not an object; write {\"device\": \"cpu\"}"),
    "device": ({"zero_optimization": {"stage": 3, "offload_param": {"device": "disk"}}},
               "offload_param.device: 'disk' is no offload device; set none, cpu or nvme"),
    "nvme without path": ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
                          "offload_optimizer.nvme_path: is missing; give a directory on the NVMe drive"),
}  # fmt: skip


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
    assert (
        "does not exist; give the path of a DeepSpeed JSON file, or the name of one that ships, such as zero1"
        in str(caught.value)
    )

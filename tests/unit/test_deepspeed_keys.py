"""The table of what DeepSpeed files may hold, against DeepSpeed's own models and readers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import typing
from typing import Any

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import constants
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadOptimizerConfig, DeepSpeedZeroOffloadParamConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from deepspeed.utils.logging import log_levels

from bigsgan.checkpoint import find_intact
from bigsgan.config import NETWORKS, deepspeed_elsewhere
from bigsgan.config import deepspeed_keys as keys
from bigsgan.config.deepspeed_file import read_deepspeed_file
from bigsgan.errors import UserError
from tests import REPOSITORY
from tests.tiny import tiny_recipe

MODELS = {
    DeepSpeedZeroConfig: keys.ZERO,
    DeepSpeedZeroOffloadOptimizerConfig: keys.OFFLOAD_OPTIMIZER,
    DeepSpeedZeroOffloadParamConfig: keys.OFFLOAD_PARAM,
    DeepSpeedZeroLeafModuleConfig: keys.LEAF_MODULE,
    DeepSpeedBF16Config: keys.BF16,
    DeepSpeedFP16Config: keys.FP16,
    CommsLoggerConfig: keys.COMMS_LOGGER,
    DeepSpeedThroughputTimerConfig: keys.THROUGHPUT,
}
TRIED = [None, True, False, "x", "", "nan", -1, 0, 1, 2, 7, 0.5, 0.8, 5e8, 1e30, math.inf, math.nan, [], ["x"], [1], {}]


@pytest.mark.parametrize("model, section", MODELS.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_sections_have_the_fields_of_deepspeeds_models(model, section):
    elsewhere = {name.rpartition(".")[2] for name in deepspeed_elsewhere.ELSEWHERE}
    assert set(section.keys) == {field.alias or name for name, field in model.model_fields.items()} - elsewhere


@pytest.mark.parametrize("model, section", MODELS.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_what_fits_is_what_deepspeed_takes_and_is_of_its_type(model, section):
    """It is stricter, as DeepSpeed takes 1 and "yes" for true, and has no bounds where there are some."""
    num = 0
    for name, field in model.model_fields.items():
        rule = section.keys.get(field.alias or name)
        if not isinstance(rule, keys.Rule) or rule is keys._CHECKED:
            continue
        kinds = typing.get_args(field.annotation) or (field.annotation,)
        for value in filter(rule.fits, TRIED):
            needed = {"stage": 1} if name == "compute_grad_norm" else {}
            model(**needed, **{field.alias or name: value})  # or this raises
            if bool in kinds:
                assert value is None or isinstance(value, bool)
            num += 1
        assert any(map(rule.fits, TRIED)), name
    assert num


def test_sections_without_a_model_have_the_keys_that_deepspeed_reads():
    assert set(keys.AIO.keys) == AIO_DEFAULT_DICT.keys()
    profiler = vars(DeepSpeedFlopsProfilerConfig({}))
    assert set(keys.FLOPS_PROFILER.keys) == profiler.keys()
    own = [constants.GRAD_ACCUM_DTYPE, constants.PARAM_DTYPE, constants.BUFFER_DTYPE, constants.KEEP_IN_FP32_MODULES]
    assert list(keys.DATA_TYPES.keys) == own
    for section, defaults in ((keys.AIO, AIO_DEFAULT_DICT), (keys.FLOPS_PROFILER, profiler)):
        for key, value in defaults.items():
            assert section.keys[key].fits(value), key
    for level in log_levels:
        assert keys.FILE.keys["log_level"].fits(level) == (level != "warn")


def zero(**content: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **content}}


NO_EFFECT = {
    **{f"zero_optimization.{key}": value for key, value in {
        "load_from_fp32_weights": False, "elastic_checkpoint": True, "pipeline_loading_checkpoint": True,
        "save_muon_momentum_buffer_in_memory": True, "allgather_partitions": False, "override_module_apply": False,
        "cpu_offload_use_pin_memory": True, "leaf_module.names": ["layers.1"], "leaf_module.name_suffixes": [""],
        "leaf_module.classes": ["Block"], "offload_optimizer.cpuadam_cores_perc": 0.5,
    }.items()},
    "aio.use_gds": True, "disable_allgather": True, "data_types.keep_in_fp32_modules": ["nosuchmodule"],
    "data_types.buffer_dtype": "bf16", "timers.throughput.enabled": True, "timers.throughput.synchronized": False,
    "gradient_allreduce_op": "sum",
}  # fmt: skip
"""Keys that change nothing in bigsgan, with a value that asks for a change."""


@pytest.mark.parametrize("name", NO_EFFECT)
def test_keys_without_effect_are_refused_with_the_reason_and_may_have_their_default(tmp_path, name):
    *sections, key = name.split(".")
    rule = keys.FILE
    for section in sections:
        rule = rule.keys[section]
    (default,) = (value for value in [*TRIED, "mean"] if rule.keys[key].fits(value) and value != "fp32")
    path = tmp_path / "ds.json"
    for value, loads in ((default, True), ("auto", True), (NO_EFFECT[name], False)):
        content = {key: value}
        for section in reversed(sections):
            content = {section: content}
        path.write_text(json.dumps(content))
        if loads:
            assert read_deepspeed_file("generator", str(path), None, {}).stage == 0
            continue
        shown = "true" if value is True else "false" if value is False else repr(value)
        with pytest.raises(UserError) as caught:
            read_deepspeed_file("generator", str(path), None, {})
        assert f"{path}: {name}: must be " in str(caught.value)
        assert f", got {shown} ({rule.keys[key].detail}); fix it, or remove it for the default" in str(caught.value)
        assert len(rule.keys[key].detail) > 15


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sparse gradients": ({"sparse_gradients": True}, "sparse_gradients: is removed from DeepSpeed 0.19.8; remove it;"),
    **{
        f"an empty name of {key}": (
            zero(leaf_module={key: [""]}),
            f"zero_optimization.leaf_module.{key}: must be [], got [''] (updates fail with it: ",
        )
        for key in ("classes", "names", "name_suffixes")
    },
    "a blank name": ({"comms_logger": {"prof_ops": [" "]}}, "comms_logger.prof_ops: must be a list of collectives"),
    "communication": ({"communication_data_type": "int8"}, "communication_data_type: must be one of fp32, bf16, fp16,"),
    "types": ({"data_types": "bf16"}, "data_types: must be an object, got 'bf16'; write an object such as"),
    "parameters": ({"data_types": {"param_dtype": "bf16"}}, "data_types.param_dtype: must be fp32, got 'bf16'; remove"),
    "gradients": ({"data_types": {"grad_accum_dtype": "float16"}}, "data_types.grad_accum_dtype: must be fp32 at ZeRO"),
    "modules": ({"data_types": {"keep_in_fp32_modules": 3}}, "data_types.keep_in_fp32_modules: must be [], got 3"),
    "aio": ({"aio": 3}, 'aio: must be an object, got 3; write an object such as {"block_size": ...}'),
    "zenflow": (zero(zenflow={}), "zero_optimization.zenflow: is not supported; remove it: the EMA needs"),
    "quantized": (zero(zero_quantized_weights=True), "zero_optimization.zero_quantized_weights: must be false, got"),
    "bucket": (zero(reduce_bucket_size=0), "zero_optimization.reduce_bucket_size: must be a whole number of at least"),
    "odd": (zero(allgather_bucket_size=3), "zero_optimization.allgather_bucket_size: must be an even number of at"),
    "infinite": ('{"zero_optimization": {"reduce_bucket_size": 1e999}}', "zero_optimization.reduce_bucket_size: must"),
    "gradients apart": (zero(contiguous_gradients=False), "zero_optimization.contiguous_gradients: must be true, got"),
    "predivided and scattered": ({**zero(), "gradient_predivide_factor": 2}, "gradient_predivide_factor: must be 1 at"),
    "prescaled and scattered": ({**zero(), "prescale_gradients": True}, "prescale_gradients: must be false at ZeRO 3,"),
    "misspelt": (zero(reduce_bucket_sise=5), "zero_optimization.reduce_bucket_sise: unknown key; did you mean"),
    "old name": (zero(prefetch_bucket_size=5), "did you mean stage3_prefetch_bucket_size?"),
    "predivide": ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: must be a number above 0, got 0; fix"),
    "loss scale": ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: must be a number of at least 0, got -1; fix it, or"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_do_not_fit_are_named(tmp_path, name):
    content, message = REFUSED[name]
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(UserError) as caught:
        read_deepspeed_file("generator", str(path), None, {})
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_what_files_in_use_hold_is_taken(tmp_path):
    content = {
        **zero(reduce_bucket_size=5e8, stage3_prefetch_bucket_size="auto", overlap_comm=None, offload_param=None),
        "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16},
        "data_types": {"param_dtype": "float32", "grad_accum_dtype": "fp32", "keep_in_fp32_modules": "auto"},
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "prescale_gradients": "auto",
        "aio": None,
        "flops_profiler": {"enabled": False, "module_depth": -1, "output_file": None},
    }
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    assert read_deepspeed_file("generator", str(path), None, {}).stage == 3


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param((2, 3), marks=pytest.mark.slow),
        pytest.param((0, 1), marks=pytest.mark.nightly),
    ],  # memory_breakdown is slow
)
def test_what_deepspeed_reports_of_itself_may_be_on(tmp_path, stages):
    reports = {
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True,
            "output_file": "/dev/full"},
        "comms_logger": {"enabled": True, "verbose": True, "prof_all": True, "debug": True},
        "dump_state": True, "wall_clock_breakdown": True, "memory_breakdown": stages[0] == 0, "steps_per_print": 1,
        "communication_data_type": "fp32", "log_level": "debug",
    }  # fmt: skip
    tiny_recipe(tmp_path)  # writes it
    settings = ["total_nimg=16", f"out={tmp_path / 'run'}"]
    for network, stage in zip(NETWORKS, stages, strict=True):
        path = tmp_path / f"{network}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}, **reports}))
        settings.append(f"engines.{network}.ds_config={path}")
    command = [sys.executable, "launch/train.py", "--config", str(tmp_path / "tiny.yaml"), *settings]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert find_intact(tmp_path / "run").nimg == 16
    said = done.stdout + done.stderr
    assert "comms_logger: collectives of both engines on this rank\ncollective " in said
    for network in NETWORKS:
        assert "Profile Summary at step 2" in (tmp_path / "run" / f"flops_{network}.txt").read_text()

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
from bigsgan.config import NETWORKS
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
TRIED = [None, True, False, "x", "", "nan", -1, 0, 1, 2, 7, 0.5, 1.5, 5e8, 1e30, math.inf, math.nan, [], ["x"], [1], {}]


@pytest.mark.parametrize("model, section", MODELS.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_sections_have_the_fields_of_deepspeeds_models(model, section):
    assert set(section.keys) == {field.alias or name for name, field in model.model_fields.items()}


@pytest.mark.parametrize("model, section", MODELS.items(), ids=lambda item: getattr(item, "__name__", ""))
def test_what_fits_is_what_deepspeed_takes_and_is_of_its_type(model, section):
    """It is stricter, as DeepSpeed takes 1 and "yes" for true, and has no bounds where there are some."""
    num = 0
    for name, field in model.model_fields.items():
        rule = section.keys[field.alias or name]
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


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "communication": ({"communication_data_type": "int8"}, "communication_data_type: 'int8' must be one of fp32, bf16, "
                      "fp16, or null; fix it, or remove it for the default"),
    "a list for a type": ({"communication_data_type": ["fp16"]}, "communication_data_type: ['fp16'] must be one of"),
    "types": ({"data_types": "bf16"}, "data_types: 'bf16' is not an object; write an object such as {\"grad_accum_"),
    "a type": ({"data_types": {"grad_accum_dtype": "int7"}}, "data_types.grad_accum_dtype: 'int7' must be one of"),
    "parameters": ({"data_types": {"param_dtype": "bf16"}}, "param_dtype: 'bf16' contradicts the file's fp32; "
                   "remove it: bf16.enabled and fp16.enabled decide"),
    "gradients": ({"data_types": {"grad_accum_dtype": "float16"}}, "data_types.grad_accum_dtype: 'float16' does not go "
                  "with fp32 at ZeRO stage 0; set zero_optimization.stage to 1"),
    "modules": ({"data_types": {"keep_in_fp32_modules": 3}}, "modules: 3 must be a list of names, or \"auto\""),
    "steps": ({"steps_per_print": "x"}, "steps_per_print: 'x' must be a whole number of at least 1, or null"),
    "no steps": ({"steps_per_print": 0}, "steps_per_print: 0 must be a whole number of at least 1"),
    "level": ({"log_level": "loud"}, "log_level: 'loud' must be one of debug, info, warning, error, critical, or null"),
    "level is a number": ({"log_level": 3}, "log_level: 3 must be one of"),
    "aio": ({"aio": 3}, "aio: 3 is not an object"),
    "in aio": ({"aio": {"queue_depth": 0}}, "aio.queue_depth: 0 must be a whole number of at least 1"),
    "auto in aio": ({"aio": {"block_size": "auto"}}, "aio.block_size: 'auto' must be a whole number"),
    "misspelt in aio": ({"aio": {"queue_dept": 8}}, "aio.queue_dept: 8 is given for a key that this trainer does not "
                        "use; did you mean queue_depth?"),
    "profiler": ({"flops_profiler": True}, "flops_profiler: True is not an object"),
    "in the profiler": ({"flops_profiler": {"profile_step": "x"}}, "flops_profiler.profile_step: 'x' must be a whole"),
    "zenflow": (zero(zenflow={}), "zero_optimization.zenflow: {} is not supported; remove it"),
    "quantized": (zero(zero_quantized_weights=True), "zero_quantized_weights: True must be false: it is not supported"),
    "quantized is text": (zero(zero_quantized_gradients="x"), "zero_quantized_gradients: 'x' must be false"),
    "groups": (zero(zero_hpz_partition_size=2), "zero_hpz_partition_size: 2 must be 1: it is not supported"),
    "bucket": (zero(reduce_bucket_size=0), "reduce_bucket_size: 0 must be a whole number of at least 1"),
    "half a bucket": (zero(reduce_bucket_size=5.5), "zero_optimization.reduce_bucket_size: 5.5 must be a whole number"),
    "odd": (zero(allgather_bucket_size=3), "allgather_bucket_size: 3 must be an even number of at least 2"),
    "infinite": ('{"zero_optimization": {"reduce_bucket_size": 1e999}}', "reduce_bucket_size: inf must be a whole"),
    "gradients apart": (zero(contiguous_gradients=False), "zero_optimization.contiguous_gradients: False must be true"),
    "predivided and scattered": ({**zero(), "gradient_predivide_factor": 2}, "gradient_predivide_factor: 2 is not "
                                 "supported by DeepSpeed 0.19 at ZeRO stage 3"),
    "prescaled and scattered": ({**zero(), "prescale_gradients": True}, "prescale_gradients: True is not supported"),
    "no group": (zero(sub_group_size=0), "zero_optimization.sub_group_size: 0 must be a whole number of at least 1"),
    "a boolean": (zero(overlap_comm="x"), "zero_optimization.overlap_comm: 'x' must be true or false, or null"),
    "one": (zero(reduce_scatter=1), "zero_optimization.reduce_scatter: 1 must be true or false"),
    "misspelt": (zero(reduce_bucket_sise=5), "zero_optimization.reduce_bucket_sise: 5 is given for a key that this "
                 "trainer does not use; did you mean reduce_bucket_size?"),
    "old name": (zero(prefetch_bucket_size=5), "did you mean stage3_prefetch_bucket_size?"),
    "predivide": ({"gradient_predivide_factor": 0}, "gradient_predivide_factor: 0 must be a number above 0"),
    "prescale": ({"prescale_gradients": "x"}, "prescale_gradients: 'x' must be true or false"),
    "dump": ({"dump_state": "x"}, "dump_state: 'x' must be true or false"),
    "timers": ({"timers": {"throughput": {"enabled": "x"}}}, "timers.throughput.enabled: 'x' must be true or false"),
    "logger": ({"comms_logger": {"prof_ops": [1]}}, "comms_logger.prof_ops: [1] must be a list of names"),
    "loss scale": ({"fp16": {"loss_scale": -1}}, "fp16.loss_scale: -1 must be a number of at least 0"),
    "power": ({"fp16": {"initial_scale_power": 1e9}}, "fp16.initial_scale_power: 1000000000.0 must be a whole number"),
    "offload": (zero(offload_optimizer={"device": "cpu", "pin_memory": "x"}), "offload_optimizer.pin_memory: 'x' must"),
    "path": (zero(offload_optimizer={"device": "nvme", "nvme_path": 3}), "nvme_path: 3 must be a text"),
}  # fmt: skip


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
        "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "comms_logger": {"enabled": True, "verbose": True, "prof_all": True, "debug": True},
        "dump_state": True, "wall_clock_breakdown": True, "memory_breakdown": stages[0] == 0, "steps_per_print": 1,
        "communication_data_type": "fp32", "disable_allgather": True, "log_level": "debug",
    }  # fmt: skip
    tiny_recipe(tmp_path)  # writes it
    settings = ["total_nimg=8", f"out={tmp_path / 'run'}"]
    for network, stage in zip(NETWORKS, stages, strict=True):
        path = tmp_path / f"{network}.json"
        path.write_text(json.dumps({"zero_optimization": {"stage": stage}, **reports}))
        settings.append(f"engines.{network}.ds_config={path}")
    command = [sys.executable, "launch/train.py", "--config", str(tmp_path / "tiny.yaml"), *settings]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert find_intact(tmp_path / "run").nimg == 8

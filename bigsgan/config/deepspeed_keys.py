"""The keys of a DeepSpeed file, and the values that each may have.

DeepSpeed checks some sections with pydantic, but only after its import, which takes seconds. In others it accepts "x"
as a boolean and 0 as a divisor. tests/unit/test_deepspeed_keys.py compares these tables with DeepSpeed's own.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bigsgan.errors import UserError

_MOST = 2**63 - 1


class Rule(NamedTuple):
    """The values that a key may have."""

    text: str  # describes them, after "must be"
    fits: Callable[[Any], bool]  # whether a value is allowed
    detail: str = ""  # the reason, if the message should give one


class Section(NamedTuple):
    """A JSON object in a file; it, and each of its values, may be "auto", which counts as not given."""

    keys: Mapping[str, Rule | Section]  # the keys that it may have
    may_be_null: bool = False  # whether the object may be null, which is DeepSpeed's default


def check_values(path: str, content: Mapping[str, Any], section: Section) -> dict[str, Any]:
    """Check all values of a JSON object, recursively, and return it without those that are "auto".

    ``path`` is the file, and the keys that lead to the object, each followed by a dot.

    Raises:
        UserError: A key is unknown, or its value is not allowed.
    """
    given: dict[str, Any] = {}
    for key, value in content.items():
        rule = section.keys.get(key)
        if rule is None:
            close = difflib.get_close_matches(key, section.keys, n=1, cutoff=0.8)
            known = f"remove it; the keys of this object are {', '.join(section.keys)}"
            remedy = f"did you mean {close[0]}?" if close else known
            raise UserError(f"{path}{key}", None, "unknown key", remedy)
        if value == "auto":
            continue
        given[key] = value
        if isinstance(rule, Section):
            if isinstance(value, dict):
                given[key] = check_values(f"{path}{key}.", value, rule)
            elif not (value is None and rule.may_be_null):
                example = _EXAMPLES.get(key, f"an object such as {{{next(iter(rule.keys))!r}: ...}}").replace("'", '"')
                problem = "must be an object" + (", got null" if value is None else "")
                raise UserError(f"{path}{key}", value, problem, f"write {example}")
        elif not rule.fits(value):
            problem = f"must be {rule.text}" + (", got null" if value is None else "")
            raise UserError(f"{path}{key}", value, problem, "fix it, or remove it for the default", rule.detail)
    return given


def _is_number(value: object) -> bool:
    return type(value) is int or (isinstance(value, float) and math.isfinite(value))


def _whole(least: int, most: int = _MOST) -> Rule:
    """Allow whole numbers, also as floats such as 5e8, which occur in DeepSpeed's own files."""

    def fits(value: Any) -> bool:
        return _is_number(value) and least <= value <= most and value == int(value)

    return Rule(f"a whole number of at least {least}" + ("" if most == _MOST else f" and at most {most}"), fits)


def _choice(*values: str) -> Rule:
    return Rule(f"one of {', '.join(values)}", lambda value: isinstance(value, str) and value in values)


def _or_null(rule: Rule) -> Rule:
    return Rule(f"{rule.text}, or null", lambda value: value is None or rule.fits(value))


def _only(value: Any, detail: str) -> Rule:
    """Allow one value, which is DeepSpeed's default: others have no effect, or are not supported."""
    return Rule(json.dumps(value), lambda other: type(other) is type(value) and other == value, detail)


_EVEN = Rule("an even number of at least 2", lambda value: _whole(2).fits(value) and value % 2 == 0)
_BOOL = Rule("true or false", lambda value: isinstance(value, bool))
_OFF = _only(False, "it is not supported")
_NOT_READ = "DeepSpeed 0.19 does not read it"
_CHECKPOINTS = "checkpoints are not DeepSpeed's, and load in any layout"
_TEXT = Rule("a string", lambda value: isinstance(value, str) and bool(value))
_SHARE = Rule("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_FROM_0 = Rule("a number of at least 0", lambda value: _is_number(value) and 0 <= value <= _MOST)
_ABOVE_0 = Rule("a number above 0", lambda value: _is_number(value) and 0 < value <= _MOST)
_OBJECT = Rule("an object", lambda value: value is None or isinstance(value, dict))
_STEPS = Rule(  # Accelerate writes infinity
    "a whole number of at least 1, or null", lambda value: value in (None, math.inf, "inf") or _whole(1).fits(value)
)
_CHECKED = Rule("", lambda value: True)
"""Checked by deepspeed_file.py."""

_BUFFERS = "buffers are float32 at every precision"
_DTYPE = _or_null(_choice("fp32", "bf16", "fp16", "float32", "bfloat16", "float16"))

_EXAMPLES = {
    "zero_optimization": '{"stage": 1}',
    "bf16": '{"enabled": true}',
    "fp16": '{"enabled": true}',
    "offload_optimizer": '{"device": "cpu"}',
    "offload_param": '{"device": "cpu"}',
}

OFFLOAD_OPTIMIZER = Section(
    {
        "device": _CHECKED,
        "nvme_path": _or_null(_TEXT),
        "buffer_count": _whole(1),
        "pin_memory": _BOOL,
        "pipeline_read": _BOOL,
        "pipeline_write": _BOOL,
        "fast_init": _BOOL,
        "ratio": _SHARE,
        "super_offload": _OFF,  # uses its own optimizer (0.19.8)
        "cpuadam_cores_perc": _only(0.8, "only SuperOffload reads it"),
    },
    may_be_null=True,
)
OFFLOAD_PARAM = Section(
    {
        "device": _CHECKED,
        "nvme_path": _or_null(_TEXT),
        "buffer_count": _whole(1),
        "buffer_size": _whole(1),
        "max_in_cpu": _whole(0),
        "pin_memory": _BOOL,
    },
    may_be_null=True,
)
_NO_LEAVES = _only([], "updates fail with it: gradients at the images go through D without its gradients")
LEAF_MODULE = Section(dict.fromkeys(("classes", "names", "name_suffixes"), _NO_LEAVES), may_be_null=True)
ZERO = Section(
    {
        "stage": _CHECKED,
        "contiguous_gradients": _only(True, "DeepSpeed 0.19 cannot reduce a single gradient without it"),
        "reduce_scatter": _BOOL,
        "reduce_bucket_size": _whole(1),
        "use_multi_rank_bucket_allreduce": _BOOL,
        "allgather_partitions": _only(True, _NOT_READ),
        "allgather_bucket_size": _EVEN,  # asserted by ZeRO 1 and 2 (0.19.8)
        "overlap_comm": _or_null(_BOOL),
        "compute_grad_norm": _BOOL,
        "load_from_fp32_weights": _only(True, _CHECKPOINTS),
        "elastic_checkpoint": _only(False, _CHECKPOINTS),
        "offload_param": OFFLOAD_PARAM,
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "sub_group_size": _whole(0),  # 0, as 1, updates each parameter by itself (0.19.8)
        "cpu_offload_use_pin_memory": _only(None, "use pin_memory of offload_optimizer"),
        "stage3_prefetch_bucket_size": _whole(0),
        "stage3_param_persistence_threshold": _whole(0),
        "stage3_model_persistence_threshold": _whole(0),
        "stage3_max_live_parameters": _whole(0),
        "stage3_max_reuse_distance": _whole(0),
        "stage3_gather_16bit_weights_on_model_save": _BOOL,
        "stage3_module_granularity_threshold": _only(0, "penalties would read sharded parameters"),
        "stage3_use_all_reduce_for_fetch_params": _BOOL,
        "stage3_allgather_sequential": _BOOL,
        "stage3_gather_fp16_weights_on_model_save": _BOOL,
        "ignore_unused_parameters": _BOOL,
        "legacy_stage1": _OFF,
        "round_robin_gradients": _BOOL,
        "parameter_alignment": _BOOL,
        "zero_hpz_partition_size": _only(1, "other values are not supported: a process would have one such group"),
        "zero_quantized_weights": _OFF,
        "zero_quantized_nontrainable_weights": _OFF,
        "zero_quantized_gradients": _OFF,
        "memory_efficient_linear": _BOOL,
        "pipeline_loading_checkpoint": _only(False, _CHECKPOINTS),
        "override_module_apply": _only(True, "networks are initialized without nn.Module.apply"),
        "log_trace_cache_warnings": _BOOL,
        "enable_sanity_checks": _BOOL,
        "save_muon_momentum_buffer_in_memory": _only(False, "it is of DeepSpeed's own Muon, with its state on NVMe"),
        "leaf_module": LEAF_MODULE,
    }
)
OF_STAGES = {
    **dict.fromkeys(("reduce_scatter", "reduce_bucket_size"), (1, 2, 3)),
    **dict.fromkeys(("use_multi_rank_bucket_allreduce", "allgather_bucket_size", "round_robin_gradients"), (1, 2)),
    **dict.fromkeys(("parameter_alignment", "ignore_unused_parameters"), (1, 2)),
    **dict.fromkeys(("sub_group_size", "memory_efficient_linear"), (3,)),
    **dict.fromkeys(("log_trace_cache_warnings", "enable_sanity_checks"), (3,)),
    **{key: (3,) for key, rule in ZERO.keys.items() if key.startswith("stage3_")},
}
"""ZeRO stages that use a key, where not all of them do."""
ON_BY_DEFAULT = (
    "reduce_scatter", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters", "memory_efficient_linear",
)  # fmt: skip
"""Those of them that are true unless a file says otherwise."""
OF_NVME = ("nvme_path", "buffer_count", "pipeline_read", "pipeline_write", "fast_init")
"""Keys of an offloaded optimizer that only a drive uses."""

BF16 = Section(
    {
        "enabled": _CHECKED,
        "immediate_grad_update": _BOOL,
        "check_grad_overflow": _BOOL,
        "bf16_optimizer_states": _OFF,
    }
)
FP16 = Section(
    {
        "enabled": _CHECKED,
        "auto_cast": _BOOL,
        "loss_scale": _FROM_0,
        "initial_scale_power": _whole(0, 127),
        "loss_scale_window": _whole(1),
        "hysteresis": _whole(1),
        "consecutive_hysteresis": _BOOL,
        "min_loss_scale": _whole(1),
    }
)
AIO = Section(
    {
        "block_size": _whole(1),
        "queue_depth": _whole(1),
        "intra_op_parallelism": _whole(1),
        "single_submit": _BOOL,
        "overlap_events": _BOOL,
        "use_gds": _only(False, "DeepSpeed 0.19 uses it for parameters on NVMe alone"),
    },
    may_be_null=True,
)
DATA_TYPES = Section(
    {
        "grad_accum_dtype": _DTYPE,
        "param_dtype": _DTYPE,
        "buffer_dtype": Rule("fp32, or null", lambda value: value in (None, "fp32", "float32"), _BUFFERS),
        "keep_in_fp32_modules": _only([], _BUFFERS),
    },
)
FLOPS_PROFILER = Section(
    {
        "enabled": _BOOL,
        "recompute_fwd_factor": _FROM_0,
        "profile_step": _whole(1),
        "module_depth": _whole(-1),
        "top_modules": _whole(1),
        "detailed": _BOOL,
        "output_file": _or_null(_TEXT),
    },
)
LOGGED_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "irecv", "isend",
    "monitored_barrier", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "send",
)  # fmt: skip
"""Names in DeepSpeed's log of collectives; it passes over others without a word (0.19.8, comm/comm.py)."""
_COLLECTIVES = Rule(
    "a list of collectives",
    lambda value: isinstance(value, list) and all(name in LOGGED_COLLECTIVES for name in value),
    f"they are {', '.join(LOGGED_COLLECTIVES)}",
)
COMMS_LOGGER = Section(
    {"enabled": _BOOL, "prof_all": _BOOL, "prof_ops": _COLLECTIVES, "verbose": _BOOL, "debug": _BOOL}
)
_SPEED = "it would wait for the device and report nothing; reports have the speed"
THROUGHPUT = Section({"enabled": _only(False, _SPEED), "synchronized": _only(True, _SPEED)})

FILE = Section(
    {
        "zero_optimization": ZERO,
        "bf16": BF16,
        "fp16": FP16,
        "data_types": DATA_TYPES,
        "communication_data_type": _or_null(_choice("fp32", "bf16", "fp16")),
        "prescale_gradients": _BOOL,
        "gradient_predivide_factor": _ABOVE_0,
        "gradient_allreduce_op": _only("mean", "gradients are averaged"),
        "disable_allgather": _only(False, _NOT_READ),
        "zero_allow_untested_optimizer": _BOOL,
        "zero_force_ds_cpu_optimizer": _BOOL,
        "aio": AIO,
        "steps_per_print": _STEPS,
        "log_level": _or_null(_choice("debug", "info", "warning", "error", "critical")),
        "dump_state": _BOOL,
        "wall_clock_breakdown": _BOOL,
        "memory_breakdown": _BOOL,
        "comms_logger": COMMS_LOGGER,
        "flops_profiler": FLOPS_PROFILER,
        "timers": Section({"throughput": THROUGHPUT}),
        "disable_python_gc": _BOOL,
        # The recipe owns these keys. The file's optimizer is not used; numbers may only repeat the recipe's, which
        # deepspeed_file.py checks.
        "optimizer": _OBJECT,
        "scheduler": _OBJECT,
        "train_batch_size": _CHECKED,
        "train_micro_batch_size_per_gpu": _CHECKED,
        "gradient_accumulation_steps": _CHECKED,
        "gradient_clipping": _CHECKED,
    }
)

"""All undocumented parts of DeepSpeed that bigsgan uses, by DeepSpeed's file.

tests/unit/test_touched.py compares the table with the installed DeepSpeed and with bigsgan's code, and lists names that
vanish with another version or are missing here. docs/explanation/deepspeed.md says what is replaced, and why.
"""

from __future__ import annotations

from typing import NamedTuple

VERSION = "0.19.8"
"""The version of DeepSpeed from which the table was made."""

_INTERNALS = "engines/deepspeed/internals.py"
_COLLECTIVES = "engines/deepspeed/collectives.py"
_AVERAGED = "engines/deepspeed/averaged_gradients.py"
_GROUPED = "engines/deepspeed/grouped_gradients.py"
_DIVIDED = "engines/deepspeed/divided_update.py"
_OFFLOADED = "engines/deepspeed/offloaded_norm.py"
_SKIP = "engines/deepspeed/device_skip.py"
_PREFETCHING = "engines/deepspeed/prefetching.py"
_REPORTS = "engines/deepspeed/reports.py"
_LEFTOVERS = "engines/deepspeed/leftovers.py"
_TANGENTS = "engines/deepspeed/tangents.py"
_SCALARS = "engines/deepspeed/scalars.py"


class Touched(NamedTuple):
    """The parts of one file of DeepSpeed that one file of bigsgan uses; names are separated by spaces."""

    file: str  # DeepSpeed's, below deepspeed/
    by: str  # ours, below bigsgan/
    reads: str = ""  # attributes and types that are read
    calls: str = ""  # functions, methods and classes that are called
    replaces: str = ""  # names that are assigned, or changed in place

    @property
    def names(self) -> list[str]:
        """All names."""
        return " ".join((self.reads, self.calls, self.replaces)).split()


TOUCHED = (
    Touched(
        "comm/comm.py",
        _COLLECTIVES,
        replaces="all_reduce all_reduce_coalesced reduce broadcast all_gather all_gather_into_tensor "
        "all_gather_coalesced all_gather_object allgather_fn reduce_scatter reduce_scatter_tensor reduce_scatter_fn "
        "all_to_all_single barrier",
    ),
    Touched("comm/comm.py", _INTERNALS, replaces="new_group"),
    Touched("comm/comm.py", _REPORTS, reads="comms_logger"),
    Touched("ops/__init__.py", "runtime/comm.py", replaces="__compatible_ops__"),
    Touched("ops/op_builder/async_io.py", "engines/deepspeed/native_ops.py", reads="NAME", calls="AsyncIOBuilder"),
    Touched("ops/op_builder/async_io.py", "engines/deepspeed/nvme.py", calls="AsyncIOBuilder is_compatible"),
    Touched("ops/op_builder/builder.py", "engines/deepspeed/native_ops.py", reads="OpBuilder", calls="load"),
    Touched("ops/op_builder/cpu/comm.py", "runtime/comm.py", reads="deepspeed_shm_comm"),
    Touched("ops/op_builder/cpu/cpu_adam.py", "engines/deepspeed/native_ops.py", reads="NAME", calls="CPUAdamBuilder"),
    Touched("ops/op_builder/pin_memory.py", "engines/deepspeed/native_ops.py", reads="NAME PinMemoryBuilder"),
    Touched("profiling/flops_profiler/profiler.py", _REPORTS, replaces="print_model_profile"),
    Touched("runtime/base_optimizer.py", _GROUPED, reads="ZeROOptimizer", calls="is_gradient_accumulation_boundary"),
    Touched("runtime/bf16_optimizer.py", _COLLECTIVES, reads="BF16_Optimizer", replaces="nccl_start_alignment_factor"),
    Touched("runtime/bf16_optimizer.py", _SKIP, reads="BF16_Optimizer"),
    Touched(
        "runtime/bf16_optimizer.py",
        _INTERNALS,
        reads="BF16_Optimizer bf16_groups fp32_groups_flat_partition",
        calls="update_hp_grads update_lp_params",
    ),
    Touched("runtime/config.py", "engines/deepspeed_config.py", reads="DeepSpeedConfigError", calls="DeepSpeedConfig"),
    Touched(
        "runtime/engine.py",
        _AVERAGED,
        reads="communication_data_type data_parallel_group gradient_average",
        calls="is_gradient_accumulation_boundary",
        replaces="buffered_allreduce_fallback",
    ),
    Touched(
        "runtime/engine.py",
        _COLLECTIVES,
        reads="dp_world_size optimizer",
        calls="zero_overlap_comm",
        replaces="buffered_allreduce_fallback zero_grad",
    ),
    Touched("runtime/engine.py", _SKIP, reads="basic_optimizer device optimizer"),
    Touched(
        "runtime/engine.py",
        _INTERNALS,
        reads="basic_optimizer optimizer",
        calls="empty_partition_cache gradient_accumulation_steps",
        replaces="clip_fp32_gradients global_steps micro_steps skipped_steps",
    ),
    Touched("runtime/engine.py", _PREFETCHING, reads="optimizer"),
    Touched(
        "runtime/engine.py",
        _REPORTS,
        reads="flops_profiler global_rank timers",
        calls="flops_profiler_enabled flops_profiler_profile_step",
    ),
    Touched("runtime/engine.py", _SCALARS, reads="module", replaces="_broadcast_model"),
    Touched(
        "runtime/engine.py",
        "engines/deepspeed_backed.py",
        reads="basic_optimizer optimizer",
        calls="destroy fp16_enabled get_global_grad_norm gradient_accumulation_steps gradient_clipping "
        "was_step_applied",
    ),
    Touched("runtime/engine.py", "engines/zero.py", calls="is_gradient_accumulation_boundary zero_optimization_stage"),
    Touched("runtime/fp16/loss_scaler.py", _INTERNALS, replaces="cur_scale cur_iter last_overflow_iter cur_hysteresis"),
    Touched("runtime/fp16/unfused_optimizer.py", _COLLECTIVES, reads="FP16_UnfusedOptimizer"),
    Touched(
        "runtime/fp16/unfused_optimizer.py",
        _DIVIDED,
        reads="FP16_UnfusedOptimizer clip_grad fp16_groups fp32_groups optimizer",
        calls="_skip_invalid_grad_norm _update_scale",
        replaces="_global_grad_norm overflow step",
    ),
    Touched("runtime/fp16/unfused_optimizer.py", _INTERNALS, reads="fp16_groups fp32_groups"),
    Touched("runtime/pipe/engine.py", _INTERNALS, reads="grid", calls="_exec_optimizer_step _exec_reduce_grads"),
    Touched(
        "runtime/pipe/topology.py",
        _INTERNALS,
        calls="get_data_parallel_group get_pipe_parallel_group",
        replaces="mapping",
    ),
    Touched(
        "runtime/swap_tensor/optimizer_utils.py",
        _INTERNALS,
        reads="compute_tensor swap_params_info swap_path",
        calls="numel",
        replaces="has_state_tensors tensors unswapped_gradients",
    ),
    Touched(
        "runtime/swap_tensor/partitioned_optimizer_swapper.py",
        _INTERNALS,
        calls="swap_in_optimizer_state swap_out_optimizer_state",
        replaces="swap_out_gradients",
    ),
    Touched(
        "runtime/swap_tensor/pipelined_optimizer_swapper.py",
        _INTERNALS,
        calls="swap_in_optimizer_state swap_out_optimizer_state",
        replaces="swap_out_gradients",
    ),
    Touched("runtime/zero/config.py", "engines/deepspeed_config.py", calls="DeepSpeedZeroConfig"),
    Touched("runtime/zero/linear.py", _TANGENTS, calls="apply", replaces="LinearFunctionForZeroStage3"),
    Touched(
        "runtime/zero/parameter_offload.py",
        _LEFTOVERS,
        reads="DeepSpeedZeRoOffload _register_deepspeed_module",
        replaces="FWD_MODULE_STACK",
    ),
    Touched(
        "runtime/zero/parameter_offload.py",
        _PREFETCHING,
        calls="get_param_coordinator release_backward_leftovers",
        replaces="param_coordinator",
    ),
    Touched("runtime/zero/parameter_offload.py", _TANGENTS, reads="pre_bwd_fn post_bwd_fn"),
    Touched(
        "runtime/zero/partition_parameters.py",
        _INTERNALS,
        reads="ds_id ds_numel",
        calls="all_gather partition partition_numel",
        replaces="ds_active_sub_modules",
    ),
    Touched("runtime/zero/partition_parameters.py", _LEFTOVERS, reads="Init", replaces="param_id"),
    Touched("runtime/zero/partition_parameters.py", _SCALARS, replaces="_convert_to_deepspeed_param"),
    Touched("runtime/zero/partition_parameters.py", "engines/parameter_groups.py", reads="ds_shape"),
    Touched(
        "runtime/zero/partitioned_param_coordinator.py",
        _LEFTOVERS,
        reads="PartitionedParameterCoordinator __params_to_release",
    ),
    Touched(
        "runtime/zero/partitioned_param_coordinator.py",
        _PREFETCHING,
        reads="__allgather_stream",
        calls="_clean_inflight_param_registry _clear_trace_structures",
    ),
    Touched(
        "runtime/zero/stage3.py",
        _COLLECTIVES,
        reads="DeepSpeedZeroOptimizer_Stage3 reduce_and_partition_stream",
        replaces="get_grad_norm_direct synchronize",
    ),
    Touched("runtime/zero/stage3.py", _SKIP, replaces="is_invalid_grad_norm"),
    Touched("runtime/zero/stage3.py", _GROUPED, reads="dp_process_group", calls="_model_parallel_all_reduce"),
    Touched(
        "runtime/zero/stage3.py",
        _INTERNALS,
        reads="buffer fp16_groups fp32_partitioned_groups_flat grad_partitions_flat_buffer ipg_buckets loss_scale "
        "loss_scaler offload_optimizer optimizer_swapper",
        calls="_unflatten_partitioned_parameters",
        replaces="fp16_partitioned_groups_flat",
    ),
    Touched("runtime/zero/stage3.py", _PREFETCHING, reads="parameter_offload", replaces="persistent_parameters"),
    Touched(
        "runtime/zero/stage_1_and_2.py",
        _COLLECTIVES,
        reads="DeepSpeedZeroOptimizer cpu_offload dp_process_group overlap_comm reduction_stream",
        calls="_add_to_grad_partition_buffer",
        replaces="allreduce_and_copy_with_multiple_ranks nccl_start_alignment_factor",
    ),
    Touched("runtime/zero/stage_1_and_2.py", _SKIP, replaces="is_invalid_grad_norm"),
    Touched("runtime/zero/stage_1_and_2.py", _DIVIDED, calls="is_invalid_grad_norm"),
    Touched(
        "runtime/zero/stage_1_and_2.py",
        _GROUPED,
        reads="DeepSpeedZeroOptimizer bit16_groups_flat communication_data_type dp_process_group "
        "gradient_accumulation_dtype gradient_average overlap_comm partition_gradients real_dp_process_group "
        "round_robin_bit16_groups round_robin_bit16_offsets single_partition_of_fp32_groups use_grad_accum_attribute",
        calls="GradPartitionBufferGroup _model_parallel_all_reduce fill_grad_accum_attribute",
        replaces="_grad_acc_hooks _update_model_bit16_weights averaged_gradients check_overflow flat_partition "
        "grad_accum overlapping_partition_gradients_reduce_epilogue reduce_gradients scaled_global_norm",
    ),
    Touched(
        "runtime/zero/stage_1_and_2.py",
        _INTERNALS,
        reads="bit16_groups loss_scale loss_scaler single_partition_of_fp32_groups use_grad_accum_attribute",
        calls="fill_grad_accum_attribute update_lp_params",
    ),
    Touched(
        "runtime/zero/stage_1_and_2.py",
        _OFFLOADED,
        reads="DeepSpeedZeroOptimizer bit16_groups_flat device ignore_unused_parameters norm_for_param_grads",
        calls="get_param_id",
        replaces="check_overflow complete_grad_norm_calculation_for_cpu_offload update_offload_overflow_tracker",
    ),
    Touched("utils/comms_logging.py", _REPORTS, reads="verbose", replaces="append enabled"),
    Touched("utils/groups.py", _LEFTOVERS, replaces="mpu _WORLD_GROUP"),
    Touched("utils/logging.py", "engines/build.py", reads="logger"),
    Touched("utils/logging.py", _REPORTS, calls="log_dist"),
    Touched("utils/mixed_precision_linkage.py", _INTERNALS, reads="_hp_mapping"),
    Touched("utils/tensor_fragment.py", _INTERNALS, reads="hp_fragment_address lp_fragment_address numel start"),
    Touched("utils/timer.py", _REPORTS, calls="reset", replaces="log"),
)
"""By DeepSpeed's file, then by ours."""

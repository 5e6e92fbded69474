"""What bigsgan uses of DeepSpeed's undocumented parts: by DeepSpeed's file, and by ours, the names.

test_touched.py compares the table with the installed DeepSpeed and with bigsgan's code, and lists names that vanish
with another version or are missing here. docs/explanation/deepspeed.md says what is replaced, and why.
"""

from __future__ import annotations

VERSION = "0.19.8"
"""The version of DeepSpeed from which the table was made."""

TOUCHED: dict[str, dict[str, str]] = {
    "comm/comm.py": {
        "engines/deepspeed/collectives.py": (
            "all_reduce all_reduce_coalesced reduce broadcast all_gather all_gather_into_tensor all_gather_coalesced "
            "all_gather_object allgather_fn reduce_scatter reduce_scatter_tensor reduce_scatter_fn all_to_all_single "
            "barrier"
        ),
        "engines/deepspeed/internals.py": "new_group",
        "engines/deepspeed/reports.py": "comms_logger",
    },
    "ops/__init__.py": {"runtime/comm.py": "__compatible_ops__"},
    "ops/op_builder/async_io.py": {
        "engines/deepspeed/native_ops.py": "NAME AsyncIOBuilder",
        "engines/deepspeed/nvme.py": "AsyncIOBuilder is_compatible",
    },
    "ops/op_builder/builder.py": {"engines/deepspeed/native_ops.py": "OpBuilder load"},
    "ops/op_builder/cpu/comm.py": {"runtime/comm.py": "deepspeed_shm_comm"},
    "ops/op_builder/cpu/cpu_adam.py": {"engines/deepspeed/native_ops.py": "NAME CPUAdamBuilder"},
    "ops/op_builder/pin_memory.py": {"engines/deepspeed/native_ops.py": "NAME PinMemoryBuilder"},
    "profiling/flops_profiler/profiler.py": {"engines/deepspeed/reports.py": "print_model_profile"},
    "runtime/base_optimizer.py": {
        "engines/deepspeed/grouped_gradients.py": "ZeROOptimizer is_gradient_accumulation_boundary"
    },
    "runtime/bf16_optimizer.py": {
        "engines/deepspeed/collectives.py": "BF16_Optimizer nccl_start_alignment_factor",
        "engines/deepspeed/device_skip.py": "BF16_Optimizer",
        "engines/deepspeed/internals.py": (
            "BF16_Optimizer bf16_groups fp32_groups_flat_partition update_hp_grads update_lp_params"
        ),
    },
    "runtime/config.py": {"engines/deepspeed_config.py": "DeepSpeedConfigError DeepSpeedConfig"},
    "runtime/engine.py": {
        "engines/deepspeed/averaged_gradients.py": (
            "communication_data_type data_parallel_group gradient_average is_gradient_accumulation_boundary "
            "buffered_allreduce_fallback"
        ),
        "engines/deepspeed/collectives.py": (
            "dp_world_size optimizer zero_overlap_comm buffered_allreduce_fallback zero_grad"
        ),
        "engines/deepspeed/device_skip.py": "basic_optimizer device optimizer",
        "engines/deepspeed/internals.py": (
            "basic_optimizer optimizer empty_partition_cache gradient_accumulation_steps clip_fp32_gradients "
            "global_steps micro_steps skipped_steps"
        ),
        "engines/deepspeed/prefetching.py": "optimizer",
        "engines/deepspeed/reports.py": (
            "flops_profiler global_rank timers flops_profiler_enabled flops_profiler_profile_step"
        ),
        "engines/deepspeed/scalars.py": "module _broadcast_model",
        "engines/deepspeed_backed.py": (
            "basic_optimizer optimizer destroy fp16_enabled get_global_grad_norm gradient_accumulation_steps "
            "gradient_clipping was_step_applied"
        ),
        "engines/zero.py": "is_gradient_accumulation_boundary zero_optimization_stage",
    },
    "runtime/fp16/loss_scaler.py": {
        "engines/deepspeed/internals.py": "cur_scale cur_iter last_overflow_iter cur_hysteresis"
    },
    "runtime/fp16/unfused_optimizer.py": {
        "engines/deepspeed/collectives.py": "FP16_UnfusedOptimizer",
        "engines/deepspeed/divided_update.py": (
            "FP16_UnfusedOptimizer clip_grad fp16_groups fp32_groups optimizer _skip_invalid_grad_norm _update_scale "
            "_global_grad_norm overflow step"
        ),
        "engines/deepspeed/internals.py": "fp16_groups fp32_groups",
    },
    "runtime/pipe/engine.py": {"engines/deepspeed/internals.py": "grid _exec_optimizer_step _exec_reduce_grads"},
    "runtime/pipe/topology.py": {
        "engines/deepspeed/internals.py": "get_data_parallel_group get_pipe_parallel_group mapping"
    },
    "runtime/swap_tensor/optimizer_utils.py": {
        "engines/deepspeed/internals.py": (
            "compute_tensor swap_params_info swap_path numel has_state_tensors tensors unswapped_gradients"
        )
    },
    "runtime/swap_tensor/partitioned_optimizer_swapper.py": {
        "engines/deepspeed/internals.py": "swap_in_optimizer_state swap_out_optimizer_state swap_out_gradients"
    },
    "runtime/swap_tensor/pipelined_optimizer_swapper.py": {
        "engines/deepspeed/internals.py": "swap_in_optimizer_state swap_out_optimizer_state swap_out_gradients"
    },
    "runtime/zero/config.py": {"engines/deepspeed_config.py": "DeepSpeedZeroConfig"},
    "runtime/zero/linear.py": {"engines/deepspeed/tangents.py": "apply LinearFunctionForZeroStage3"},
    "runtime/zero/parameter_offload.py": {
        "engines/deepspeed/layer_gathers.py": "forward_hooks backward_hooks",
        "engines/deepspeed/leftovers.py": "DeepSpeedZeRoOffload _register_deepspeed_module FWD_MODULE_STACK",
        "engines/deepspeed/prefetching.py": "get_param_coordinator release_backward_leftovers param_coordinator",
        "engines/deepspeed/tangents.py": "pre_bwd_fn post_bwd_fn",
    },
    "runtime/zero/partition_parameters.py": {
        "engines/deepspeed/internals.py": "ds_id ds_numel all_gather partition partition_numel ds_active_sub_modules",
        "engines/deepspeed/layer_gathers.py": "register_external_parameter",
        "engines/deepspeed/leftovers.py": "Init param_id",
        "engines/deepspeed/scalars.py": "_convert_to_deepspeed_param",
        "engines/parameter_groups.py": "ds_shape",
    },
    "runtime/zero/partitioned_param_coordinator.py": {
        "engines/deepspeed/leftovers.py": "PartitionedParameterCoordinator __params_to_release",
        "engines/deepspeed/prefetching.py": "__allgather_stream _clean_inflight_param_registry _clear_trace_structures",
    },
    "runtime/zero/stage3.py": {
        "engines/deepspeed/collectives.py": (
            "DeepSpeedZeroOptimizer_Stage3 reduce_and_partition_stream get_grad_norm_direct synchronize"
        ),
        "engines/deepspeed/device_skip.py": "is_invalid_grad_norm",
        "engines/deepspeed/grouped_gradients.py": "dp_process_group _model_parallel_all_reduce",
        "engines/deepspeed/internals.py": (
            "buffer fp16_groups fp32_partitioned_groups_flat grad_partitions_flat_buffer ipg_buckets loss_scale "
            "loss_scaler offload_optimizer optimizer_swapper _unflatten_partitioned_parameters "
            "fp16_partitioned_groups_flat"
        ),
        "engines/deepspeed/prefetching.py": "parameter_offload persistent_parameters",
    },
    "runtime/zero/stage_1_and_2.py": {
        "engines/deepspeed/collectives.py": (
            "DeepSpeedZeroOptimizer cpu_offload dp_process_group overlap_comm reduction_stream "
            "_add_to_grad_partition_buffer allreduce_and_copy_with_multiple_ranks nccl_start_alignment_factor"
        ),
        "engines/deepspeed/device_skip.py": "is_invalid_grad_norm",
        "engines/deepspeed/divided_update.py": "is_invalid_grad_norm",
        "engines/deepspeed/grouped_gradients.py": (
            "DeepSpeedZeroOptimizer bit16_groups_flat communication_data_type dp_process_group "
            "gradient_accumulation_dtype gradient_average overlap_comm partition_gradients real_dp_process_group "
            "round_robin_bit16_groups round_robin_bit16_offsets single_partition_of_fp32_groups "
            "use_grad_accum_attribute GradPartitionBufferGroup _model_parallel_all_reduce fill_grad_accum_attribute "
            "_grad_acc_hooks _update_model_bit16_weights averaged_gradients check_overflow flat_partition grad_accum "
            "overlapping_partition_gradients_reduce_epilogue reduce_gradients scaled_global_norm"
        ),
        "engines/deepspeed/internals.py": (
            "bit16_groups loss_scale loss_scaler single_partition_of_fp32_groups use_grad_accum_attribute "
            "fill_grad_accum_attribute update_lp_params"
        ),
        "engines/deepspeed/offloaded_norm.py": (
            "DeepSpeedZeroOptimizer bit16_groups_flat device ignore_unused_parameters norm_for_param_grads "
            "get_param_id check_overflow complete_grad_norm_calculation_for_cpu_offload update_offload_overflow_tracker"
        ),
    },
    "utils/comms_logging.py": {"engines/deepspeed/reports.py": "verbose append enabled"},
    "utils/groups.py": {"engines/deepspeed/leftovers.py": "mpu _WORLD_GROUP"},
    "utils/logging.py": {"engines/build.py": "logger", "engines/deepspeed/reports.py": "log_dist"},
    "utils/mixed_precision_linkage.py": {"engines/deepspeed/internals.py": "_hp_mapping"},
    "utils/tensor_fragment.py": {
        "engines/deepspeed/internals.py": "hp_fragment_address lp_fragment_address numel start"
    },
    "utils/timer.py": {"engines/deepspeed/reports.py": "reset log"},
}

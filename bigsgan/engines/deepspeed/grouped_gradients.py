"""Gradients of ZeRO 1 and 2, reduced group by group: a complete group becomes this rank's part of the mean at once.

By itself DeepSpeed (0.19.8, runtime/zero/stage_1_and_2.py) handles every parameter separately: a copy into a bucket,
slices of the bucket for each rank, all-reduced, and the parts of this rank's parameters flattened for the update. That
costs the host 33 to 48 microseconds a parameter (docs/reference/benchmarks.md), sends twice as much as a
reduce-scatter, and keeps whole gradients of which a rank needs a part. Here the parameters come in groups
(engines/optimizer.py), whose flat tensors DeepSpeed cuts into equal parts, one for each rank. A group's gradient is cut
in the same way: one copy, one collective, one part, which the optimizer uses directly.

tests/distributed/test_deepspeed_collectives.py fails first if a later version changes the private parts. DeepSpeed's
other ways to reduce gradients do not work with it: ``coalesce_grad_reduction``, ``no_sync``, and ``offload_states``,
which takes the weights out of the flat tensors.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer, GradPartitionBufferGroup
from torch import Tensor

from bigsgan.engines.deepspeed.gradient_groups import GradientGroup, use_here
from bigsgan.engines.deepspeed.reports import collectives


class _Sent(NamedTuple):
    """A reduction under way; ``sent`` must be kept until it ends."""

    work: dist.Work
    number: int
    part: Tensor
    sent: Tensor


class GroupedGradients:
    """Replaces the reductions of an optimizer with EnginePlan.reduces_by_group; its methods then refer to this."""

    def __init__(self, optimizer: DeepSpeedZeroOptimizer, replayed: bool = False) -> None:
        """Take over. ``replayed`` says whether gradients come from CUDA graphs."""
        self._optimizer = optimizer
        self._attribute = "grad_accum" if optimizer.use_grad_accum_attribute else "grad"
        self._groups = []
        for i, parameters in enumerate(optimizer.round_robin_bit16_groups):
            starts = [0, *accumulate(parameter.numel() for parameter in parameters)][:-1]
            assert list(optimizer.round_robin_bit16_offsets[i]) == starts, "there is padding between parameters"
            padding = optimizer.bit16_groups_flat[i].numel() - sum(parameter.numel() for parameter in parameters)
            self._groups.append(GradientGroup(parameters, optimizer.real_dp_process_group[i], padding, replayed))
        self._under_way: _Sent | None = None
        self._hook()
        optimizer.reduce_gradients = self.reduce
        optimizer.overlapping_partition_gradients_reduce_epilogue = self.finish
        optimizer.scaled_global_norm = self.norm
        optimizer.check_overflow = leave_to_the_norm
        # DeepSpeed's method makes every parameter a view of the flat tensor, which it is already.
        optimizer._update_model_bit16_weights = _keep_weights

    def _hook(self) -> None:
        """Hook the arrival of gradients, if they are reduced during a backward pass.

        ZeRO 1 reduces in an update's last backward pass, or after it if ``overlap_comm`` is false or gradients add up
        in a type of their own.
        """
        optimizer = self._optimizer
        for hook in optimizer._grad_acc_hooks:
            hook.remove()
        optimizer._grad_acc_hooks.clear()
        if optimizer.partition_gradients or (optimizer.overlap_comm and self._attribute == "grad"):
            for i, group in enumerate(self._groups):
                for parameter in group.parameters:
                    if parameter.requires_grad:
                        hook = parameter.register_post_accumulate_grad_hook(partial(self._arrived, i))
                        optimizer._grad_acc_hooks.append(hook)

    def _arrived(self, i: int, parameter: Tensor) -> None:
        optimizer = self._optimizer
        reduces = optimizer.partition_gradients or optimizer.is_gradient_accumulation_boundary()
        if reduces and self._groups[i].note_arrival(parameter):
            self._reduce(i)

    def reduce(self, pipeline_parallel: bool = False) -> None:
        """Reduce what ZeRO 1 has not reduced yet, at the end of an update's last backward pass.

        DeepSpeed passes ``pipeline_parallel``, which is not used.
        """
        optimizer = self._optimizer
        if self._attribute == "grad_accum":
            optimizer.fill_grad_accum_attribute()
        for i in reversed(range(len(self._groups))):  # the later layers' gradients came first
            if any(getattr(parameter, self._attribute) is not None for parameter in self._groups[i].parameters):
                self._reduce(i)
        self.finish()

    def finish(self) -> None:
        """Reduce the groups in which some parameter got no gradient, and wait for the reduction under way."""
        optimizer = self._optimizer
        for i in reversed(range(len(self._groups))):
            if self._groups[i].num_arrived:
                self._reduce(i)
        self._wait()
        if optimizer.is_gradient_accumulation_boundary():
            for i, master in enumerate(optimizer.single_partition_of_fp32_groups):
                if optimizer.averaged_gradients.get(i) is None:
                    self._add(i, torch.zeros_like(master))

    def norm(self, norm_type: int = 2) -> Tensor:
        """Return the norm of all groups' gradients, times the loss scale; inf if it is not finite.

        By itself DeepSpeed makes one collective a group, and all stages of a pipeline would need equally many groups.
        """
        assert norm_type == 2
        optimizer = self._optimizer
        parts = [optimizer.averaged_gradients[i].flat_partition for i in range(len(self._groups))]
        return norm_over_ranks(
            optimizer, torch.stack([torch.linalg.vector_norm(part, dtype=torch.float32) for part in parts])
        )

    def _reduce(self, i: int) -> None:
        optimizer, group = self._optimizer, self._groups[i]
        self._wait()  # free the last group's copy before making another
        gradient = group.take(self._attribute)
        if group.num_ranks == 1:
            self._add(i, gradient)
            return
        if optimizer.gradient_average:
            gradient.div_(group.num_ranks)
        gradient = gradient.to(optimizer.communication_data_type)
        part = gradient.new_empty(gradient.numel() // group.num_ranks)
        work = collectives().reduce_scatter_tensor(part, gradient, group=group.process_group, async_op=True)
        assert work is not None
        self._under_way = _Sent(work, i, part, gradient)
        if not optimizer.overlap_comm:
            self._wait()

    def _wait(self) -> None:
        if self._under_way is not None:
            work, i, part, sent = self._under_way
            work.wait()
            self._under_way = None
            use_here(part, sent)
            self._add(i, part)

    def _add(self, i: int, part: Tensor) -> None:
        """Add to this rank's part of group ``i``, in the type in which micro-batches add up."""
        optimizer = self._optimizer
        part = part.to(optimizer.gradient_accumulation_dtype)
        sums = optimizer.averaged_gradients
        if sums.get(i) is None:
            sums[i] = GradPartitionBufferGroup([part], part)
        else:
            sums[i].flat_partition.add_(part)


def norm_over_ranks(optimizer: ZeROOptimizer, norms: Tensor) -> Tensor:
    """Return the norm over all ranks, and all stages of a pipeline, a float32 tensor (); inf if it is not finite.

    ``norms``, (n,), are those of the parts on this rank.
    """
    total = norms.double().square().sum()
    collectives().all_reduce(total, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(total, dist.ReduceOp.SUM)
    return total.sqrt().float().nan_to_num(nan=torch.inf, posinf=torch.inf)


def _keep_weights(index: int) -> None:
    pass


def leave_to_the_norm(*arguments: Any, **options: Any) -> None:
    """Check nothing and do not wait for the device: the norm is inf if a gradient is not finite."""

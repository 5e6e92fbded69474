"""ZeRO 3's prefetching, for a network whose passes are of several kinds.

DeepSpeed (0.19.8, runtime/zero/partitioned_param_coordinator.py) records in which order a pass through a root uses its
modules, and gathers the parameters of the next pass ahead as long as its order is the same. A pass that differs makes
it drop the record. That pass and the next one gather parameters when they need them, release even those that should
persist, and make the ranks compare lists of integers, one by one, on the host. In an adversarial update passes differ
all the time: G makes images without a backward pass and then with one, D is penalized now and then, and judges images.

So here each kind of pass has its own record. All kinds share the parameters that are gathered or under way.
tests/distributed/test_host_waits.py fails first if a later version changes the private parts.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine


class Prefetching:
    """The records of one engine's passes; does nothing except at ZeRO 3."""

    def __init__(self, engine: DeepSpeedEngine, stock: bool) -> None:
        """Begin without a record.

        Args:
            engine: An engine before its first pass.
            stock: Leave DeepSpeed's own record in place, one for all kinds of passes.
        """
        self._offload: Any = None if stock else getattr(engine.optimizer, "parameter_offload", None)
        self._coordinators: dict[Hashable, Any] = {}
        if self._offload is not None:
            self._blank = self._offload.get_param_coordinator()
            # DeepSpeed would gather these one by one after an update. Passes gather them with the others.
            engine.optimizer.persistent_parameters = []

    def expect(self, kind: Hashable) -> None:
        """Set the kind of the next pass, forward and, if there is one, backward.

        Args:
            kind: Equal for passes that use the same modules in the same order.
        """
        if self._offload is None:
            return
        if kind not in self._coordinators:
            self._coordinators[kind] = copy.copy(self._blank)
            # Only the record is its own: all kinds must know the parameters under way or still gathered.
            self._coordinators[kind]._clear_trace_structures()
        self._offload.param_coordinator = self._coordinators[kind]
        # The compute stream wrote the parameters that a pass gathers: in the last step, or when the EMA was swapped in.
        # DeepSpeed itself waits for the device after each step (stage3.py:2840, for persistent parameters).
        if (gathers := self._blank._PartitionedParameterCoordinator__allgather_stream) is not None:
            gathers.wait_stream(get_accelerator().current_stream())

    def back_to(self, kind: Hashable) -> None:
        """Set the kind of a pass that goes backward; passes of other kinds may have come since its forward part."""
        if self._offload is not None and self._offload.param_coordinator is not self._coordinators.get(kind):
            self.expect(kind)

    def settle(self) -> None:
        """Wait for the parameters that the last pass gathered ahead, and release them."""
        if self._offload is not None:
            self._offload.get_param_coordinator()._clean_inflight_param_registry()

    def end(self) -> None:
        """After a backward pass outside of the engine, release the parameters that it left gathered.

        They belong to layers whose inputs have no gradient, such as embeddings.
        """
        if self._offload is not None:
            self._offload.release_backward_leftovers()

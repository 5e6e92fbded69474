"""Stage 3's prefetching, for a network whose passes are of several kinds.

DeepSpeed (0.19.8, runtime/zero/partitioned_param_coordinator.py) records in which order a pass through a root uses its
modules, and gathers the parameters of the next pass ahead as long as that is the same. A pass that differs throws the
record away: it and the next one gather where they need, hold no parameter back that is to persist, and make the ranks
compare lists of integers, one by one, on the host. In an adversarial update passes differ all the time: G makes images
without a backward pass and then with one, D is penalized now and then, and judges what G makes.

So each kind of pass has a record of its own here. What is gathered and under way they have in common. The private
parts are those that tests/distributed/test_host_waits.py fails on first if a later version changes them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine


class Prefetching:
    """The records of one engine's passes; does nothing but at stage 3."""

    def __init__(self, engine: DeepSpeedEngine, stock: bool) -> None:
        """Begin without a record.

        Args:
            engine: Whose module no pass has gone through.
            stock: Leave DeepSpeed's own record in place, one for all kinds of passes.
        """
        self._offload: Any = None if stock else getattr(engine.optimizer, "parameter_offload", None)
        self._coordinators: dict[Hashable, Any] = {}
        if self._offload is not None:
            self._blank = self._offload.get_param_coordinator()
            # Those that persist would be gathered one by one after an update. Passes gather them among the others.
            engine.optimizer.persistent_parameters = []

    def expect(self, kind: Hashable) -> None:
        """Tell of which kind the next pass is, forward and, where there is one, backward.

        Args:
            kind: The same for passes that use the same modules in the same order.
        """
        if self._offload is None:
            return
        if kind not in self._coordinators:
            self._coordinators[kind] = copy.copy(self._blank)
            # The record alone is its own: any kind must find what is under way, and what a pass has left gathered.
            self._coordinators[kind]._clear_trace_structures()
        self._offload.param_coordinator = self._coordinators[kind]
        # What a pass gathers was written on the stream that computes: by the last step, or as the EMA was swapped in.
        # DeepSpeed itself orders them by waiting for the device after each step (stage3.py:2840: what persists).
        if (gathers := self._blank._PartitionedParameterCoordinator__allgather_stream) is not None:
            gathers.wait_stream(get_accelerator().current_stream())

    def back_to(self, kind: Hashable) -> None:
        """Tell that a pass goes backward, between whose two parts there may have been passes of another kind."""
        if self._offload is not None and self._offload.param_coordinator is not self._coordinators.get(kind):
            self.expect(kind)

    def settle(self) -> None:
        """Wait for what the last pass has gathered ahead, and let go of it: nothing is under way then."""
        if self._offload is not None:
            self._offload.get_param_coordinator()._clean_inflight_param_registry()

    def end(self) -> None:
        """Let go of parameters that the pass left gathered, after one that the engine did not go backward through.

        Those of layers whose inputs have no gradient, such as embeddings.
        """
        if self._offload is not None:
            self._offload.release_backward_leftovers()

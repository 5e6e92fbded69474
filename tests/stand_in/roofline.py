"""Work of an update by phase, and the least time in which a GPU can do it.

Peak numbers are NVIDIA's, from the data sheets of the H100 SXM and the H200 SXM, without sparsity. A phase takes at
least the longest of three times: of its arithmetic, of its bytes if no cache held anything, and of its launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from bigsgan.bench.phases import PHASES, OpenPhases

HALF, TF32 = 989.4e12, 494.7e12
"""FLOP/s of both, by the type of the operands. Convolutions of float32 use TF32 unless torch is told not to."""
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
"""Bytes/s."""
LAUNCH = 5e-6
"""Seconds of a host for an operation of eager torch: an assumption, to be measured on the machine in question."""


@dataclass
class Work:
    """What one phase does.

    Attributes:
        launches: Kernels.
        half: FLOP of products of the half types.
        full: FLOP of products of float32.
        bytes: That its operations are given and return.
    """

    launches: int = 0
    half: float = 0.0
    full: float = 0.0
    bytes: float = 0.0

    def bounds(self) -> dict[str, float]:
        """Milliseconds: by arithmetic, by bytes on either GPU, and by launches."""
        found = {"FLOP": self.half / HALF + self.full / TF32}
        found |= {f"bytes, {gpu}": self.bytes / bandwidth for gpu, bandwidth in BANDWIDTH.items()}
        found["launches"] = self.launches * LAUNCH
        return {name: 1e3 * seconds for name, seconds in found.items()}


class Phases(OpenPhases):
    """Adds up work by phase; what ``label_phases`` lays around the parts of an update.

    Attributes:
        work: By phase.
    """

    def __init__(self, launches: Callable[[], int]) -> None:
        super().__init__()
        self.work: defaultdict[str, Work] = defaultdict(Work)
        self._launches, self._since = launches, launches()

    def turn(self) -> None:
        """Count launches up to here for the phase that is open."""
        now = self._launches()
        self._now.launches += now - self._since
        self._since = now

    def carry(self, num_bytes: int) -> None:
        """Count bytes for the phase that is open."""
        self._now.bytes += num_bytes

    def compute(self, function: Any, arguments: Any, keywords: Any, results: Any) -> None:
        """Count an operation's products, if it is one."""
        formula = flop_registry.get(function.overloadpacket)
        if formula is None:
            return
        if function.overloadpacket is torch.ops.aten.convolution_backward:
            flop = _of_gradients(formula, *arguments, out_val=results)
        else:
            flop = formula(*arguments, **keywords, out_val=results)
        operand = next(t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor))
        if operand.element_size() == 2:
            self._now.half += flop
        else:
            self._now.full += flop

    @property
    def _now(self) -> Work:
        return self.work[self.innermost]


def _of_gradients(formula: Any, *arguments: Any, out_val: Any) -> float:
    """FLOP of a convolution's gradients; torch counts those of the weight as if there were no groups."""
    *others, groups, (of_input, of_weight, _) = arguments
    found = formula(*others, groups, [of_input, False, False], out_val=out_val)
    return float(found + formula(*others, groups, [False, of_weight, False], out_val=out_val) / groups)


def table(work: dict[str, tuple[float, ...]]) -> str:
    """A Markdown table of phases in the order of an update, and of their sum; ``work`` is of ``Work``'s numbers."""
    phases = {phase: Work(*work[phase]) for phase in PHASES if phase in work}
    phases["sum"] = Work(*(sum(numbers) for numbers in zip(*work.values(), strict=True)))
    bounds = list(Work().bounds())
    head = ["phase", "launches", "TFLOP in half types", "in float32", "GB", *(f"ms by {bound}" for bound in bounds)]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for phase, each in phases.items():
        numbers = [f"{each.half / 1e12:.2f}", f"{each.full / 1e12:.2f}", f"{each.bytes / 1e9:.1f}"]
        rows.append([phase, f"{each.launches:,}", *numbers, *(f"{ms:.1f}" for ms in each.bounds().values())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plain(work: dict[str, Work]) -> dict[str, tuple[float, ...]]:
    """What travels between processes."""
    return {phase: astuple(each) for phase, each in work.items()}

"""`bigsgan bench comm`: the collectives of one update, by phase, compared with the minimum of its ZeRO stages."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigsgan.bench.about import on_all_ranks, print_results
from bigsgan.bench.phases import OpenPhases, label_phases
from bigsgan.bench.product import build_engine_loop
from bigsgan.bench.table import NOTHING, Table
from bigsgan.bench.train import label
from bigsgan.bench.variants import Planned
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.base import DTYPES
from bigsgan.engines.deepspeed import reports
from bigsgan.engines.deepspeed.leftovers import leaving_nothing
from bigsgan.planner.counting import count_parameters
from bigsgan.planner.traffic import turns
from bigsgan.runtime import comm

WARMUP = 3
"""Updates before the one that is counted: ZeRO 3 records its order of gathers in the first."""

# By torch's operator: the collective, the argument that holds the whole tensors, and how many times (N - 1) / N of
# their bytes leave a rank in a ring.
_OPERATORS = {
    "allreduce_": ("all-reduce", 0, 2),
    "allreduce_coalesced_": ("all-reduce", 0, 2),
    "_allgather_base_": ("all-gather", 0, 1),
    "allgather_": ("all-gather", 0, 1),
    "allgather_coalesced_": ("all-gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all-gather", 0, 1),
    "_reduce_scatter_base_": ("reduce-scatter", 1, 1),
    "reduce_scatter_": ("reduce-scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", 1, 1),
    "broadcast_": ("broadcast", 0, 1),
    "reduce_": ("reduce", 0, 1),
    "alltoall_base_": ("all-to-all", 0, 1),
    "alltoall_": ("all-to-all", 0, 1),
}


class Traffic(TorchDispatchMode):
    """Counts collectives where torch hands them to a backend, also those of DeepSpeed and DistributedDataParallel.

    Attributes:
        counts: By phase and collective: its ``calls``, the ``bytes`` of the whole tensors, and the ``wire_bytes`` that
            a rank sends in a ring.
        phases: The phases that are open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
        self.phases = OpenPhases()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if func.namespace == "c10d" and name in _OPERATORS:
            collective, where, times = _OPERATORS[name]
            num_bytes = sum(tensor.nbytes for tensor in tree_leaves(args[where]))
            sent = sent_in_ring(times, num_bytes, _group_size(args))
            self.counts[self.phases.innermost, collective].update(calls=1, bytes=num_bytes, wire_bytes=sent)
        return func(*args, **(kwargs or {}))


def sent_in_ring(times: int, num_bytes: int, num: int) -> int:
    """Bytes that each of ``num`` ranks sends if a whole tensor goes around a ring ``times`` times."""
    return times * num_bytes * (num - 1) // num


def _group_size(args: Sequence[Any]) -> int:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with contextlib.suppress(RuntimeError):  # not a group, but a kind of reduction
                return dist.ProcessGroup.unbox(value).size()
    return comm.world_size()


def least_bytes(plan: RunPlan, network: str, numel: int) -> float:
    """Least bytes that a rank sends in rings for a network of ``numel`` parameters, in an update at its ZeRO stage.

    Once through a ring is (N - 1) / N of the parameters; see ``turns``.
    """
    num, itemsize = len(plan.placement(network).ranks), DTYPES[plan.engines[network].file.precision].itemsize
    return turns(plan, network) * (num - 1) / num * numel * itemsize


def network_of(phase: str) -> str | None:
    """The network whose parameters or gradients a phase sends; None if it may be either."""
    return next((network for network in NETWORKS if phase.startswith(f"{network[0].upper()} ")), None)


def main(planned: Sequence[Planned], form: str | None) -> int:
    """Count collectives, print them, and return the exit status. Every rank calls this."""
    return on_all_ranks(lambda: [count(each) for each in planned], lambda found: _show(planned, found, form))


def count(planned: Planned) -> dict[str, Any]:
    """Count this rank's collectives in one steady update. Every rank calls this."""
    plan = planned.plan
    if plan is None:
        return {"variant": planned.variant.name, "reason": planned.reason}
    with leaving_nothing():
        loop, traffic = build_engine_loop(plan), Traffic()
        label_phases(loop.run, traffic.phases.phase)
        for _ in range(WARMUP):
            loop()
        reports.clear_log()
        with traffic:
            loop()
        logged = reports.logged()
        loop.close()
    collectives: list[dict[str, Any]] = [
        {"phase": phase, "collective": collective, **counts} for (phase, collective), counts in traffic.counts.items()
    ]
    networks = {}
    for network in NETWORKS:
        numel = count_parameters(plan, network)
        sent = sum(each["wire_bytes"] for each in collectives if network_of(each["phase"]) == network)
        least = least_bytes(plan, network, numel)
        networks[network] = {
            "stage": plan.engines[network].file.stage,
            "precision": plan.engines[network].file.precision,
            "parameters": numel,
            "wire_bytes": sent,
            "least_bytes": least,
            "ratio": sent / least if least else None,
        }
    found = {"variant": planned.variant.name, "networks": networks, "collectives": collectives}
    return found | ({"comms_logger": [each._asdict() for each in logged]} if logged else {})


def _show(planned: Sequence[Planned], found: Sequence[dict[str, Any]], form: str | None) -> None:
    name = label(next(each.plan.recipe for each in planned if each.plan is not None))
    rows = [row for each in found if "reason" not in each for row in _rows(each)]
    notes = [f"{each['variant']}: cannot run here: {each['reason']}" for each in found if "reason" in each]
    notes += [
        "bytes: of the whole tensors; sent: by rank 0, by ring algorithms; least: of that ZeRO stage",
        "less than the least: ZeRO 3 keeps parameters from the forward to the backward pass that fit in "
        "stage3_max_reuse_distance, and those below stage3_param_persistence_threshold for the next update",
    ]
    if planned[0].variant.name != "recipe":
        notes.append("variants have built-in DeepSpeed files: what the recipe's ask for, as comms_logger, is left out")
    headings = ("variant", "phase", "collective", "calls", "bytes", "sent", "least", "sent / least")
    tables = [Table(f"collectives of one update: {name}", headings, rows, notes, num_texts=3)]
    for each in found:
        if "comms_logger" in each:
            title = f"comms_logger, an update of {each['variant']}, both engines on rank 0"
            rows = reports.rows([reports.Logged(**c) for c in each["comms_logger"]])
            tables.append(Table(title, reports.HEADINGS, rows, ["bytes of an all-gather: of one rank's part"]))
    print_results(form, {"recipe": name, "variants": found}, *tables)


def _rows(each: dict[str, Any]) -> list[list[str]]:
    numbers = ("calls", "bytes", "wire_bytes")
    rows = [
        [each["variant"], c["phase"], c["collective"], *(f"{c[name]:,}" for name in numbers), NOTHING, NOTHING]
        for c in each["collectives"]
    ]
    for name, network in each["networks"].items():
        ratio = NOTHING if network["ratio"] is None else f"{network['ratio']:.3f}"
        about_it = f"{name}, {network['parameters']:,} x {network['precision']}, ZeRO {network['stage']}"
        calls = sum(c["calls"] for c in each["collectives"] if network_of(c["phase"]) == name)
        sums = [f"{calls:,}", NOTHING, f"{network['wire_bytes']:,}", f"{network['least_bytes']:,.0f}", ratio]
        rows.append([each["variant"], about_it, "all", *sums])
    return rows

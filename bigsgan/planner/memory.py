"""Predicts what the ranks of a run hold at their peak, from its plan alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bigsgan.checkpoint import saved_buffers
from bigsgan.config import NETWORKS, RunPlan
from bigsgan.engines.connecting import num_communicators
from bigsgan.engines.frozen import frozen_layout
from bigsgan.engines.phases import game_of
from bigsgan.models.frozen import frozen_parts, without_frozen
from bigsgan.models.network import LayerStack, frozen_tensors
from bigsgan.planner.activations import Traces
from bigsgan.planner.codes import trace_codes
from bigsgan.planner.counting import num_batches_made, stage_bounds
from bigsgan.planner.phases import Part, build_phases, kept_images, order_turns
from bigsgan.planner.states import FLOAT, States, build_states
from bigsgan.planner.teaching import PROGRAMS
from bigsgan.planner.update import Moment, Peak, Update, peaks
from bigsgan.training.ema import SWAP_ELEMENTS

COMMUNICATOR = 32 * (10 + 2) * 2**20
"""About how many bytes of a GPU one of NCCL's communicators takes: for 32 channels to a neighbour, 10 MiB each to
receive and 2 MiB to send, as allocated on H100 (github.com/NVIDIA/nccl/issues/1685). Fewer channels take less, and a
smaller NCCL_BUFFSIZE, 4 MiB of the 10; connections to several neighbours, as in trees, take more."""


@dataclass(frozen=True)
class Prediction:
    """Memory of the fullest rank, in bytes."""

    states: dict[str, States]  # of each network
    ema: int  # with the power function averages
    buffers: int  # of both networks' buffers, with their copies, and of frozen programs
    host: dict[str, int]  # what stays in the host's memory, by what it is; the rest is on the device
    spare: int  # bytes of pinned blocks in the host's memory beyond these; without a GPU nothing is pinned
    update: dict[str, Peak]  # fullest moments of an update, beside what stays
    # the same of an update with the penalties that are not in every one; empty if there are none
    penalized: dict[str, Peak]
    samples: Peak  # those of making images from the EMA
    communicators: int = 0  # over NCCL; their buffers, of about ``COMMUNICATOR`` each, are not counted
    begins: int = 0  # bytes of the end of the first update beside what stays, if codes begin anew there

    @property
    def stays(self) -> int:
        """What the device holds all the time."""
        own = sum(sum(states.device.values()) for states in self.states.values())
        return own + self.buffers + (0 if "average" in self.host else self.ema)

    @property
    def on_host(self) -> int:
        """What a rank with a GPU holds in the host's memory all the time."""
        return sum(self.host.values()) + self.spare

    @property
    def fullest(self) -> Peak:
        """The fullest moment of all."""
        own = *self.update.values(), *self.penalized.values(), self.samples, Peak(self.begins, 0, 0)
        return max(own, key=lambda peak: peak.total)

    @property
    def updating(self) -> int:
        """Most that is held on the device in an update after the first."""
        return self.stays + max(peak.total for peak in [*self.update.values(), *self.penalized.values()])

    @property
    def peak(self) -> int:
        """Most that is held on the device."""
        return self.stays + self.fullest.total


def predict(plan: RunPlan, traces: Traces) -> Prediction:
    """Predict the memory of the rank that needs most."""
    return max(predict_each(plan, traces), key=lambda prediction: prediction.peak)


def predict_each(plan: RunPlan, traces: Traces) -> list[Prediction]:
    """Predict the memory of one rank each of those that hold the same layers."""
    places = [plan.placement(network) for network in NETWORKS]
    # Of many ranks that hold the same layers, only the first is looked at.
    firsts = [place.of_stage(stage).start for place in places for stage in range(place.num_stages)]
    pairs = {tuple(place.stage(rank) for place in places): rank for rank in firsts}
    bounds = {network: stage_bounds(plan, network, traces.network(plan, network)) for network in NETWORKS}
    found = []
    for pair in sorted(pairs):
        stages = dict(zip(NETWORKS, pair, strict=True))
        parts = {n: _part(traces.network(plan, n), bounds[n], stages[n]) for n in NETWORKS}
        found.append(_predict_rank(plan, traces, parts, num_communicators(plan, pairs[pair])))
    return found


def _part(network: LayerStack, bounds: Sequence[int], stage: int) -> Part:
    if stage not in range(len(bounds) - 1):  # of a rank that holds nothing of the network
        return Part((bounds[0], bounds[1]), stage, len(bounds) - 1, [], 0)
    start, stop = bounds[stage], bounds[stage + 1]
    layers = network.part(start, stop)
    sizes = [parameter.numel() for parameter in layers.parameters()]
    buffers = sum(buffer.nbytes for buffer in without_frozen(layers, saved_buffers(layers)).values())
    computed = sum(each.nbytes for each in (*layers.buffers(), *frozen_tensors(layers))) - buffers
    in_matrices = sum(matrix.numel() for matrix in layers.matrices())
    frozen = sum(part.values.nbytes for part in frozen_parts(layers).values())
    largest = max((sum(each.numel() for each in layer.parameters()) for layer in layers.layers.values()), default=0)
    return Part((start, stop), stage, len(bounds) - 1, sizes, buffers, computed, in_matrices, frozen, largest)


def _predict_rank(plan: RunPlan, traces: Traces, parts: Mapping[str, Part], communicators: int) -> Prediction:
    """Go through an update without lazy penalties, one with them, and sampling."""
    states = {
        network: build_states(plan, network, part.sizes, part.in_matrices, part.largest_layer)
        for network, part in parts.items()
    }
    one = FLOAT * states["generator"].num_masters
    ema = one * (1 + len(plan.recipe.ema.widths))
    is_offloaded = plan.engines["generator"].file.offload_optimizer != "none"
    # Each network's buffers are kept for the case that an update is skipped, but those that are computed; G's are
    # copied with the EMA too.
    buffers = sum(2 * part.buffers + part.computed for part in parts.values()) + parts["generator"].buffers
    for name, is_here in zip(PROGRAMS, (parts["discriminator"].is_last, parts["discriminator"].is_first), strict=True):
        if is_here and (program := traces.program(plan.recipe, name)):
            buffers += program.held

    if plan.recipe.generator.simulates_steps and parts["generator"].is_held:
        num = num_batches_made(plan) * plan.recipe.batch // plan.placement("generator").num_replicas
        buffers += FLOAT * num * plan.recipe.latent_size  # images with noise, for a whole update
    codes = trace_codes(plan, makes_latents=parts["generator"].is_last)
    buffers += codes.held
    updates, kept = [], kept_images(plan, parts["discriminator"])
    for game in dict.fromkeys([game_of(plan, 1), game_of(plan, 0)]):  # where no penalty is lazy they are one
        phases = build_phases(plan, traces, parts, game)
        turns = order_turns(plan, parts, phases)
        updates.append(peaks(list(Update(phases, turns, states, kept).moments()), states))
    host = Counter({"average": ema} if is_offloaded else {})
    for network, part in parts.items():
        if not frozen_layout(plan, network).on_host:
            buffers += part.frozen
        elif part.frozen:
            host["frozen"] += part.frozen
    spare, built = 0, Counter[int]()
    for own in states.values():
        host.update(own.host)
        spare += own.spare
        built |= own.built  # blocks of the first network hold parameters of the second while it is built
    spare += sum(size * num for size, num in built.items())
    (samples,) = peaks(_sampling(plan, traces, parts["generator"], one, kept), states).values()
    updates[0] |= {"codes": Peak(codes.later, 0, 0)} if codes.later else {}
    penalized = updates[1] if updates[1:] else {}
    held = dict(host)
    return Prediction(states, ema, buffers, held, spare, updates[0], penalized, samples, communicators, codes.first)


def _sampling(plan: RunPlan, traces: Traces, part: Part, ema: int, kept: int) -> list[Moment]:
    """Images from the EMA, whose weights and buffers are swapped in before, beside those that D has ``kept``."""
    if not part.is_held:
        return [Moment("samples", "generator", kept, 0)]
    num = plan.engines["generator"].micro_batch_size
    passes = traces.passes(plan, "generator", "train", 1, num, part.bounds)
    swapped = min(ema, FLOAT * SWAP_ELEMENTS)
    return [
        Moment("samples", "generator", kept + part.buffers + swapped, 0),
        Moment("samples", "generator", kept + part.buffers, 0, passes.plain),
    ]

"""Recovery from non-finite gradients: reports where they arose, and rolls back to the last good checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigsgan import checkpoint
from bigsgan.adversarial import AdversarialStep, InputSource, Scheduled
from bigsgan.data import RealImages
from bigsgan.data.order import Stretch
from bigsgan.engines import Engine
from bigsgan.errors import UserError
from bigsgan.models.network import LayerStack
from bigsgan.runtime import comm, roster
from bigsgan.runtime.agreement import HostCopy
from bigsgan.training.state import Counters


class Attempt(NamedTuple):
    """An update, finite or not."""

    update: int  # its number, as its checkpoint counts
    read: Stretch  # the interval of data positions that it read
    scheduled: Scheduled  # its scheduled numbers, such as learning rates


class Recovery:
    """Rolls a run back to its last good checkpoint after a non-finite update, and skips that update's data.

    fp16's gradients are exempt: its loss scaling expects overflow, and skips and counts such updates.
    """

    def __init__(
        self,
        step: AdversarialStep,
        reals: RealImages,
        source: InputSource,
        counters: Counters,
        entries: Mapping[str, checkpoint.StateEntry],
        saver: checkpoint.Saver,
        most: int,
        moved: Callable[[int], None],
    ) -> None:
        """Take everything that a rollback restores or rewinds. After ``most`` rollbacks the run ends instead.

        ``saver`` saves the checkpoints, and removes bad ones. ``moved`` is called with the bytes read from them.
        """
        self._step, self._reals, self._source, self._counters = step, reals, source, counters
        self._entries, self._saver, self._most = entries, saver, most
        self._moved = moved
        # If D's input gradients overflow in fp16, so do G's gradients.
        engines = step.executor.engines.values()
        self._is_split = not all(engine.is_held for engine in engines)
        scaled = step.discriminator is not None and step.discriminator.scales_loss
        self._engines = [engine for engine in engines if not (scaled or engine.scales_loss)]
        self._known_skipped = self._num_skipped()
        self._pending: list[tuple[Attempt, HostCopy]] = []  # attempts whose outcome the host does not know yet
        self._restored: tuple[str, int] | None = None  # checksum of the checkpoint last restored, and its next update
        self._bad = saver.bad  # checksums of checkpoints from which training fails, on other data too

    def failed(self, attempt: Attempt, at_once: bool) -> Attempt | None:
        """Return the first non-finite update since the last call, the same on all ranks, or None.

        If the device decides, the host learns about an update after the next one, or ``at_once`` by waiting for it.
        """
        total: Tensor | float = sum(engine.outcomes.num_skipped_so_far for engine in self._engines)
        if self._is_split:  # some ranks have it on the host, others on the device; all must answer in the same call
            total = torch.as_tensor(total, device=comm.device())
        num_skipped = HostCopy(total)
        made = [*self._pending, (attempt, num_skipped)]
        self._pending = [] if at_once or num_skipped.is_known else [made.pop()]
        return next((each for each, number in made if number.value() > self._known_skipped), None)

    def roll_back(self, failed: Attempt, lost: str = "") -> str:
        """Find out where an update failed, and roll back. A collective.

        Args:
            failed: The result of ``failed``; or the latest update, if its state could not be saved.
            lost: Where that state has non-finite values. Any update since the last checkpoint may have caused them,
                so the data of all these updates is skipped.

        Returns:
            A line for the user.

        Raises:
            UserError: There were too many rollbacks, or there is no checkpoint.
        """
        counters = self._counters
        report = lost or self._repeated(failed)
        what = f"{'the state after ' * bool(lost)}update {failed.update}"
        rollbacks, skipped = counters.rollbacks + 1, counters.skipped
        if rollbacks > self._most:
            remedy = "lower the learning rates, raise precision, or look at the data of the updates that the log names"
            problem = f"is not enough: {what} is not finite"
            raise UserError("max_rollbacks", self._most, problem, remedy, report)
        if self._restored is not None and self._restored[1] == failed.update:
            self._bad.add(self._restored[0])
        found = self._last_good(what, report)
        if lost and self._restored is not None and self._restored[0] == found.manifest["sha256"]:
            self._bad.add(self._restored[0])  # training failed from it on other data too, and saved nothing since
            found = self._last_good(what, report)
        checkpoint.restore(found, self._entries, comm, self._moved)
        self._restored = found.manifest["sha256"], counters.update
        counters.rollbacks, counters.skipped = rollbacks, skipped
        counters.skipped = counters.skipped_with((counters.position, failed.read[1]) if lost else failed.read)
        self._rewind(counters.position)
        self._known_skipped, self._pending = self._num_skipped(), []
        data = "the real images read since" if lost else "its real images"
        return f"{what[0].upper()}{what[1:]} is not finite ({report}). Resuming from {found.path}, skipping {data}."

    def _repeated(self, failed: Attempt) -> str:
        """Repeat an update, and return its earliest non-finite value, which causes the others, with its rank."""
        self._rewind(failed.read[0])
        comm.barrier()  # all ranks count their seconds from here, whatever their clocks show
        with first_not_finite(self._step.executor.engines) as first:
            self._step(failed.update, failed.scheduled)
        found = comm.gather_objects(first[0] if first else None) or []
        firsts = [(*each, rank) for rank, each in enumerate(found) if each]
        texts = [f"{roster.named([rank])}: {text}" for _, text, rank in sorted(firsts)]
        return comm.from_rank_zero(texts[0] if texts else "not reproduced when the update was repeated")

    def _last_good(self, what: str, report: str) -> checkpoint.Checkpoint:
        def choose(passed_over: Collection[Path]) -> checkpoint.Checkpoint:
            newest = None
            if comm.rank() == 0:  # bad by checksum, as runs that rolled back reuse the paths
                newest = checkpoint.newest_or_none(self._saver.directory, passed_over, self._bad | self._saver.left)
            found: checkpoint.Checkpoint | None = comm.from_rank_zero(newest)
            if found is None or found.is_imported:
                problem = f"is not finite, and there is no {'other ' * bool(self._bad)}checkpoint to roll back to"
                remedy = "lower the learning rates, or raise precision"
                raise UserError(what, None, problem, remedy, report)
            return found

        return checkpoint.first_intact(
            choose, lambda found: found, lambda found: checkpoint.damage(found, comm, moved=self._moved)
        )

    def _rewind(self, position: int) -> None:
        for images in (self._reals, self._source):
            images.rewind(position, self._counters.skipped)

    def _num_skipped(self) -> int:
        return sum(engine.outcomes.num_skipped for engine in self._engines)


@contextmanager
def first_not_finite(engines: Mapping[str, Engine]) -> Iterator[list[tuple[float, str]]]:
    """Check the outputs of every layer and their gradients inside the block. This is slow.

    Yields:
        A list, to which one pair is appended: seconds into the block, and where the first non-finite value was.
    """
    first: list[tuple[float, str]] = []
    begun = time.perf_counter()

    def note(values: Tensor, what: str) -> None:
        if not first and (text := _not_finite(values, what)):
            first.append((time.perf_counter() - begun, text))

    handles = [handle for name, engine in engines.items() for handle in _watch_layers(name, engine.network, note)]
    try:
        with torch.compiler.set_stance("force_eager"):  # compiled code ignores new hooks
            yield first
    finally:
        for handle in handles:
            handle.remove()


def _watch_layers(network: str, stack: LayerStack, note: Callable[[Tensor, str], None]) -> Iterator[Any]:
    for number, layer in stack.layers.items():
        place = f"layer {number} of the {network} ({type(layer).__name__})"

        def look(module: Any, inputs: Any, outputs: Any, place: str = place) -> None:
            for tensor in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    note(tensor, f"output of {place}")
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: note(grad, f"gradient at the output of {place}"))

        yield layer.register_forward_hook(look)
        for name, parameter in layer.named_parameters():
            what = f"gradient of {name} in {place}"
            if parameter.requires_grad:
                yield parameter.register_hook(lambda grad, what=what: note(grad, what))


@torch.no_grad()
def _not_finite(values: Tensor, what: str) -> str:
    """Say how many numbers are not finite, and where. Empty if all are finite."""
    finite = values.isfinite()
    if finite.all():
        return ""
    good = values[finite]
    extremes = f", the others from {good.min():.3g} to {good.max():.3g}" if len(good) else ""
    return f"first in the {what}: {values.numel() - len(good)} of {values.numel()} numbers{extremes}"

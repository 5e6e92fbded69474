"""What ranks of a pool do; results go back to the test as plain tensors on rank 0's pipe."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from bigsgan import checkpoint
from bigsgan.config.run_directory import write_recipe
from bigsgan.doctor.runs import buffers, masters
from bigsgan.doctor.runs import merge as merge
from bigsgan.doctor.runs import on_host as on_host
from bigsgan.doctor.runs import snapshot as snapshot
from bigsgan.doctor.saving import save
from bigsgan.doctor.saving import saved_parts as saved_parts
from bigsgan.doctor.saving import whole_values as whole_values
from bigsgan.engines import Shard, muon
from bigsgan.engines.deepspeed import device_skip
from bigsgan.engines.phases import Segments, update_phases
from bigsgan.metrics.outside import MetricError
from bigsgan.models import transformer
from bigsgan.monitor import RankLog
from bigsgan.runtime import comm
from bigsgan.training.build import build_run
from bigsgan.training.loop import Run
from bigsgan.training.power import power_kind
from bigsgan.training.schedules import scheduled
from bigsgan.training.start import Start, find_start
from tests.tiny import tiny_plan


def build(overrides: list[str], ds: dict[str, Any], found: Any = None, recipe: Path | None = None) -> Run:
    """A run on this pool's ranks, of the tiny recipe unless one is given, put together as the product does."""
    directory = Path(tempfile.mkdtemp())
    plan = tiny_plan(directory, comm.world_size(), overrides, ds, recipe)
    return build_run(plan, directory, Start(found), RankLog(directory / "log", comm.rank(), print))


def tables_of_positions(overrides: list[str], ds: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A transformer's tables that are computed and not saved, by name, as in a new process."""
    transformer.rotations.cache_clear()
    transformer.sines_of_positions.cache_clear()
    run = build(overrides, ds)
    networks = {"generator": run.step.generator.network, "discriminator": run.step.discriminator.network}
    found = {f"{of}.{name}": each.float().cpu() for of, net in networks.items() for name, each in net.named_buffers()}
    destroy(run)
    return {name: each for name, each in found.items() if name.endswith((".rotation", ".table"))}


def update(run: Run, num_updates: int) -> None:
    """Make updates as the training loop does, without its reports."""
    for _ in range(num_updates):
        run.step(run.counters.update, scheduled(run.recipe, run.counters.nimg))
        run.count_update()


def labels_of_phases(overrides: list[str], ds: dict[str, Any], on_gpus: bool) -> list[str]:
    """What an update with R1 does in a run whose plan was made for GPUs, or for CPUs."""
    directory = Path(tempfile.mkdtemp())
    plan = replace(tiny_plan(directory, comm.world_size(), overrides, ds), on_gpus=on_gpus)
    run = build_run(plan, directory, Start(None), RankLog(directory / "log", comm.rank(), print))
    destroy(run)
    return [phase.label for phase in update_phases(run.step._plan, [Segments(differentiated=1)], has_kept=False)]


def local_state(run: Run) -> dict[str, Any]:
    """This rank's pieces of every parameter, and all buffers: entry -> name -> [(offset, values)]."""
    return on_host(snapshot(run))


def destroy(run: Run) -> None:
    run.reporter.close()
    run.step.executor.destroy()


def measured(overrides: list[str], ds: dict[str, Any], cache: str) -> dict[str, float] | None:
    """Metrics of the EMA's samples after two updates."""
    os.environ["BIGSGAN_CACHE"] = cache
    run = build(overrides, ds)
    update(run, 2)
    assert run.measuring is not None
    values = run.measuring(run.step.generator, run.ema, run.standing, run.counters.nimg)
    destroy(run)
    return values


def train(overrides: list[str], ds: dict[str, Any], num_updates: int, recipe: Path | None = None) -> dict[str, Any]:
    run = build(overrides, ds, recipe=recipe)
    update(run, num_updates)
    state = local_state(run)
    destroy(run)
    return state


def norms(overrides: list[str], ds: dict[str, Any], num_updates: int) -> tuple[list[float], dict[str, Any]]:
    """Norms of the gradients of both networks in each update, and the state after them."""
    run = build(overrides, ds)
    found = []
    for _ in range(num_updates):
        update(run, 1)
        found += [float(run.step.generator.grad_norm), float(run.step.discriminator.grad_norm)]
    state = local_state(run)
    destroy(run)
    return found, state


def named_parts(run: Run, network: str, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Pieces of flat tensors that lie as the network's masters do: name -> [(offset, values)]."""
    found: dict[str, Any] = {}
    for shard, tensor in zip(getattr(run.step, network).shards(), tensors, strict=True):
        for piece in shard.pieces:
            values = tensor.flatten()[piece.start : piece.start + piece.numel]
            found.setdefault(piece.name, []).append((piece.offset, values.float().cpu().numpy().copy()))
    return found


def adam_updates(overrides: list[str], ds: dict[str, Any], num_updates: int) -> dict[str, Any]:
    """Gradients that each optimizer was given, and its masters before and after, for every update."""
    run = build(overrides, ds)
    recorded: dict[str, Any] = {}
    for network in ("generator", "discriminator"):
        if getattr(run.step, network).is_held:
            _record_steps(run, network, recorded)
    update(run, num_updates)
    destroy(run)
    return recorded


def muon_updates(overrides: list[str], ds: dict[str, Any], num_updates: int) -> dict[str, Any]:
    """The same, and the shapes of the matrices that this rank orthogonalized."""
    shapes: list[tuple[int, ...]] = []

    def counting(matrix: torch.Tensor, section: Any) -> torch.Tensor:
        shapes.append(tuple(matrix.shape))
        return orthogonalized(matrix, section)

    orthogonalized = muon.orthogonalized
    with mock.patch.object(muon, "orthogonalized", counting):
        return {**adam_updates(overrides, ds, num_updates), "shapes": shapes}


def _record_steps(run: Run, network: str, recorded: dict[str, Any]) -> None:
    engine = getattr(run.step, network)
    optimizer = engine._engine.basic_optimizer
    original = optimizer.step
    grads: dict[int, torch.Tensor] = {}

    def step(*args: Any, **kwargs: Any) -> Any:
        for group in optimizer.param_groups:
            grads.update({p.data_ptr(): p.grad.detach().clone() for p in group["params"] if p.grad is not None})
        return original(*args, **kwargs)

    optimizer.step = step
    update_all = engine.step

    def recording(work: Any) -> None:
        before = [shard.master.clone() for shard in engine.shards()]
        update_all(work)
        masters = [shard.master for shard in engine.shards()]
        key = f"{network}.{engine.outcomes.num_applied}"
        recorded[f"{key}.grad"] = named_parts(run, network, [grads[m.data_ptr()] for m in masters])
        recorded[f"{key}.before"] = named_parts(run, network, before)
        recorded[f"{key}.after"] = named_parts(run, network, masters)

    engine.step = recording


def generator_phase_touches(overrides: list[str], ds: dict[str, Any]) -> dict[str, bool]:
    """What of D changes, bit for bit, while it judges and G is updated, after two ordinary updates."""
    run = build(overrides, ds)
    update(run, 2)
    d, engine = run.step.discriminator, run.step.discriminator._engine
    touched: dict[str, bool] = {}
    original = d.step
    before: dict[str, Any] = {}

    def of_d() -> dict[str, Any]:
        averaged = getattr(engine.optimizer, "averaged_gradients", {})
        return {
            "masters": [s.master.clone() for s in d.shards()],
            "moments": [v.clone() for s in d.shards() for v in s.optimizer_state.values() if torch.is_tensor(v)],
            "buffers": [b.clone() for b in d.network.buffers()],
            "parameters": [_local(p).clone() for p in d.network.parameters()],
            "gradients": [None if p.grad is None else p.grad.clone() for p in d.network.parameters()],
            "averaged": [g.clone() for group in averaged.values() for g in group or []],
            "requires_grad": [p.requires_grad for p in d.network.parameters()],
            "training": [m.training for m in d.network.modules()],
        }  # fmt: skip

    def step(work: Any) -> None:
        original(work)
        before.update(of_d())

    d.step = step
    update(run, 1)
    for key, after in of_d().items():
        same = len(after) == len(before[key]) and all(_equal(a, b) for a, b in zip(after, before[key], strict=True))
        touched[key] = not same
    destroy(run)
    return touched


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.ds_tensor if hasattr(parameter, "ds_tensor") else parameter.data


def _equal(a: Any, b: Any) -> bool:
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return a is b or a == b
    # Bits, not numbers: padding at ZeRO 3 is uninitialized, and NaN differs from itself.
    return a.shape == b.shape and torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (a, b)))


def ema_swap(overrides: list[str], ds: dict[str, Any]) -> dict[str, Any]:
    """Outputs of G live, with its EMA swapped in, and after; and whether all state came back bit for bit."""
    run = build(overrides, ds)
    update(run, 3)
    g = run.step.generator
    inputs = run.standing[0]

    def state() -> list[torch.Tensor]:
        tensors = [part.values for entry in run.entries.values() for part in entry.parts()]  # without padding
        return [t.clone() for t in tensors] + [torch.from_numpy(_valid(p)) for p in g.network.parameters()]

    before, live = state(), g.infer_everywhere(inputs)
    with run.ema.swapped():
        from_ema = g.infer_everywhere(inputs)
        g.infer_everywhere(inputs, moving=True)  # buffers may move inside
    restored = [all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))]
    failures = [MetricError("metrics", None, "fails", "correct it"), *[KeyboardInterrupt()] * (comm.world_size() == 1)]
    for error in failures:
        with suppress(type(error)), run.ema.swapped():
            g.infer_everywhere(inputs, moving=True)
            raise error
        restored.append(all(torch.equal(a, b) for a, b in zip(before, state(), strict=True)))
    again = g.infer_everywhere(inputs)
    result = {
        "restored": all(restored) and torch.equal(live, again),
        "ema": from_ema.float().numpy(),
        "live": live.float().numpy(),
        "inputs": [t.numpy() for t in inputs],
        "state": local_state(run),
    }
    destroy(run)
    return result


def resume(overrides: list[str], ds: dict[str, Any], directory: str, first: int, then: int) -> dict[str, Any]:
    """State after ``first`` updates, a save, new engines from the checkpoint, and ``then`` updates more."""
    begun(overrides, ds, directory, first)
    return resumed(overrides, ds, directory, then)


def begun(overrides: list[str], ds: dict[str, Any], directory: str, num_updates: int) -> None:
    run = build(overrides, ds)
    update(run, num_updates)
    save(run, Path(directory))
    destroy(run)


def resumed(overrides: list[str], ds: dict[str, Any], directory: str, num_updates: int) -> dict[str, Any]:
    return uninterrupted(overrides, ds, num_updates, checkpoint.newest(Path(directory)))


def uninterrupted(overrides: list[str], ds: dict[str, Any], num_updates: int, found: Any = None) -> dict[str, Any]:
    run = build(overrides, ds, found)
    update(run, num_updates)
    result = {"state": full_state(run), "update": run.counters.update, "position": run.reals.position}
    destroy(run)
    return result


def flat_tensors(run: Run) -> Iterator[tuple[str, str, Shard, torch.Tensor]]:
    """Yield this rank's shards of the state as entry, kind, shard and tensor."""
    for entry, shard, master in masters(run):
        yield entry, "master", shard, master
        for kind, value in shard.optimizer_state.items() if entry != "average" else ():
            if kind != "step" and torch.is_tensor(value):
                yield entry, kind, shard, value.flatten()
    for width, averages in run.ema.power.shards.items():
        for shard, values in zip(run.step.generator.shards(), averages, strict=True):
            yield "average", power_kind(width), shard, values


def full_state(run: Run) -> dict[str, Any]:
    """Every tensor and number of every entry on this rank without padding, and the forward pass's own parameters."""
    state: dict[str, Any] = {}
    for name, entry in run.entries.items():
        state.update({f"{name}.{key}": value for key, value in entry.numbers().items()})
        state.update({f"{name}.{p.kind}.{p.name}": p.values.numpy().copy() for p in entry.parts() if p.everywhere})
    for entry, named in buffers(run).items():
        state.update({f"{entry}.buffer.{name}": buffer.cpu().numpy().copy() for name, buffer in named.items()})
    for entry, kind, shard, tensor in flat_tensors(run):
        for piece in shard.pieces:  # what lies between the pieces is uninitialized memory at ZeRO 3
            values = tensor[piece.start : piece.start + piece.numel].cpu().float().numpy().copy()
            state[f"{entry}.shard.{kind}.{piece.name}"] = values
    for network, engine in run.step.executor.engines.items():
        for name, parameter in engine.network.named_parameters():
            state[f"{network}.parameter.{name}"] = _valid(parameter)
    return state


def _valid(parameter: torch.Tensor) -> np.ndarray:
    local = _local(parameter).cpu().float().flatten()
    if hasattr(parameter, "ds_tensor"):
        local = local[: max(0, parameter.ds_numel - comm.rank() * local.numel())]
    return local.numpy().copy()


@contextmanager
def decided(on_device: bool) -> Iterator[None]:
    """Let a CPU decide about updates as a GPU does, in engines that are built inside the block."""
    with mock.patch.object(device_skip, "_runs_ahead", return_value=on_device):
        yield


def poisoned(overrides: list[str], ds: dict[str, Any], network: str, on_device: bool = False) -> dict[str, Any]:
    """One good update, one whose gradients are NaN on rank 0 alone, one good one again."""
    with decided(on_device):
        run = build(overrides, ds)
    engine = getattr(run.step, network)
    update(run, 1)
    poisoned_parameter = next(engine.network.parameters())
    hook = poisoned_parameter.register_hook(lambda grad: grad * float("nan"))
    if comm.rank() != 0:
        hook.remove()
    own = (f"{network}.shard", f"{network}.parameter", f"{network}.buffer")
    before = full_state(run)
    other = "discriminator" if network == "generator" else "generator"
    update(run, 1)
    after = full_state(run)
    hook.remove()
    counts = (engine.outcomes.num_applied, engine.outcomes.num_skipped, bool(engine.outcomes.last))
    update(run, 1)
    result = {
        "counts": counts,
        "later": (engine.outcomes.num_applied, engine.outcomes.num_skipped, bool(engine.outcomes.last)),
        "moved": [k for k in before if k.startswith(own) and not np.array_equal(before[k], after[k])],
        "ema_moved": any(not np.array_equal(before[k], after[k]) for k in before if k.startswith("average.")),
        "other_moved": any(not np.array_equal(before[k], after[k]) for k in before if k.startswith(f"{other}.shard")),
        "finite": all(np.isfinite(v).all() for v in full_state(run).values()),
    }  # fmt: skip
    destroy(run)
    return result


def begin_with_exports(overrides: list[str], ds: dict[str, Any], out: str) -> dict[str, Any]:
    """Begin a run with exports that the overrides name, and return its state."""
    plan, directory = tiny_plan(Path(tempfile.mkdtemp()), comm.world_size(), overrides, ds), Path(out)
    run = build_run(plan, directory, find_start(plan, directory, ()), RankLog(directory / "log", comm.rank(), print))
    state = local_state(run)
    destroy(run)
    return state


def begin_with(overrides: list[str], ds: dict[str, Any], saved: str, later: list[str], num_updates: int) -> Any:
    """Save a run after two updates; begin another with its weights, and train it: state before and after."""
    return begin_another(overrides, ds, saved, [*overrides, f"init_from.run={saved}", *later], ds, num_updates)


def begin_another(
    overrides: list[str], ds: dict[str, Any], saved: str, others: list[str], their_ds: dict[str, Any], num_updates: int
) -> Any:
    """Do so with a run of any other recipe."""
    first = build(overrides, ds)
    update(first, 2)
    directory = Path(saved)
    if comm.rank() == 0:
        write_recipe(first.recipe, directory, {})
    comm.barrier()
    save(first, directory / "checkpoints")
    donor = local_state(first)
    destroy(first)
    plan = tiny_plan(Path(tempfile.mkdtemp()), comm.world_size(), others, their_ds)
    start = find_start(plan, directory / "new", ())
    run = build_run(plan, directory, start, RankLog(directory / "log", comm.rank(), print))
    begun = local_state(run)
    update(run, num_updates)
    after = local_state(run)
    destroy(run)
    return donor, begun, after

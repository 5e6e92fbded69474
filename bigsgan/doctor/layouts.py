"""Checks of layouts on the ranks that there are: each update of tiny runs is that of plain PyTorch in one process.

Networks have no kinks (``smooth_activations.py``), updates begin where the engine's began (``agreement.py``), and the
reference (``reference.py``) shares neither engines nor losses nor penalties with them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bigsgan.doctor.agreement import ROUNDING, SAME, SAME_MOVE, differences
from bigsgan.doctor.checks import Finding, Subject, failed, first_of, not_applicable, passed
from bigsgan.doctor.games import TINY_GAMES, both, stages, zero
from bigsgan.doctor.runs import DifferError, Game, exact, merge, played
from bigsgan.runtime import comm

_R1 = "objective.r1={weight: 0.2, every: 2%s}"
_R2 = "objective.r2={weight: 0.1, every: 2%s}"
_FINITE = ", form: finite_difference, sigma: 0.5"
_FORWARD = ", method: forward_mode"
_TWICE = ", method: double_backward"
_PATHS = "objective={loss: non_saturating, path_length: {weight: 0.1, every: 1, decay: 0.5%s}}"
_GRADIENT = "objective={loss: wasserstein, gradient_penalty: {weight: 1%s}}"
_STYLES = TINY_GAMES["stylegan2"]
_HALF = ", batch_shrink: 2"
_PARTS = "accumulation=2"

REMEDY = (
    "see whether `bigsgan doctor --only arithmetic` and `--only layouts.collectives` pass: if they do, install the "
    "versions of torch and deepspeed that bigsgan supports; if not, begin there"
)


def zero_stages(subject: Subject) -> Finding:
    """ZeRO 0 to 3, with micro-batches and a penalty, below ZeRO 3 differentiated twice; and different stages."""
    methods = [_TWICE, _TWICE, _TWICE, _FORWARD]
    games = [Game(f"ZeRO {stage}", [_PARTS, _R1 % methods[stage]], both(stage), 2) for stage in range(4)]
    games.append(Game("G at ZeRO 3, D at 1", [_R1 % ""], {"generator": zero(3), "discriminator": zero(1)}))
    return compare(subject, games)


def penalties(subject: Subject) -> Finding:
    """Each form of each penalty, and what else D's or G's loss has."""
    games = {
        "finite differences": [_R1 % _FINITE, _R2 % _FINITE],
        "antithetic differences, half the batch": [_PARTS, _R1 % f"{_FINITE}, antithetic: true{_HALF}"],
        "forward mode": [_PARTS, _R1 % _FORWARD, _R2 % _FORWARD],
        "gradient penalty, half the batch": [_GRADIENT % (_TWICE + _HALF)],
        "gradient penalty, forward mode": [_GRADIENT % _FORWARD],
        "path length": [*_STYLES, _PATHS % _TWICE],
        "path length, forward mode": [*_STYLES, _PATHS % _FORWARD],
        "relativistic": ["objective.loss=relativistic", "objective.d_steps=2", _PARTS],
        "orthogonal": ["objective.orthogonal={generator: 1e-2, discriminator: 1e-2}", _PARTS],
        "ADA": ["augmentation={pipeline: bgc, p: 0.6, target: 0.1, interval: 1, ramp_nimg: 200}"],
    }
    at_3 = ("forward mode", "path length, forward mode")
    return compare(subject, [Game(name, own, both(3 if name in at_3 else 1)) for name, own in games.items()])


def hand_overs(subject: Subject) -> Finding:
    """Images and gradients between the engines: shared, kept or made again, an update later, other micro-batches."""
    games = [
        Game("shared images", ["objective={reuse_fakes: true, d_steps: 2}"], both(1)),
        Game("shared images, made again", ["objective.reuse_fakes=true", _PARTS], both(3)),
        Game("other micro-batches", ["engines.discriminator.accumulation=2"], both(2)),
        Game("several micro-batches", [_PARTS], both(0)),
        Game("updates that overlap", ["objective={schedule: overlapped, d_steps: 2}", _PARTS], both(2), 2),
    ]
    return compare(subject, games)


def offload(subject: Subject) -> Finding:
    """Optimizer state on the host, at ZeRO 2, and at ZeRO 3 parameters too."""
    on_host = {"offload_optimizer": {"device": "cpu"}}
    games = [
        Game("ZeRO 2, its optimizer on the host", [_PARTS, _R1 % ""], both(2, zero=on_host), 2),
        Game(
            "ZeRO 3, all of it on the host", [_R1 % ""], both(3, zero={**on_host, "offload_param": {"device": "cpu"}})
        ),
    ]
    return compare(subject, games)


def pipelines(subject: Subject) -> Finding:
    """Both networks in stages, one of them, recomputed stages; with penalties of both forms."""
    num = next((num for num in (2, 3) if comm.world_size() % num == 0), None)
    if num is None:
        return not_applicable(f"needs a number of ranks that 2 or 3 divides, got {comm.world_size()}")
    recomputed = [*stages(num, num), "pipeline.generator_phase=recompute"]
    games = [
        Game("both in stages", [*stages(num, num), _PARTS, _R1 % (_FINITE + _HALF)], both(1)),
        Game("both in stages, forward mode", [*stages(num, num), _PARTS, _R1 % _FORWARD], both(0)),
        Game("recomputed", [*recomputed, _PARTS], both(1)),
        Game("G in stages", [*stages(num, 1), _R1 % ""], {"generator": zero(1), "discriminator": zero(3)}),
        Game("path length in stages", [*_STYLES, _PATHS % _FORWARD, *stages(num, num)], both(1)),
        Game("D in stages", [*stages(1, num), _PARTS], {"generator": zero(3), "discriminator": zero(0)}),
    ]
    return compare(subject, games)


def separate_ranks(subject: Subject) -> Finding:
    """G and D on ranks of their own, half of them each; of an odd number G has one."""
    num = comm.world_size()
    own = num // 2 if num % 2 == 0 else 1
    divided = [f"engines.generator.ranks={own}", *([f"batch={8 * (num - 1)}"] if num % 2 else [])]
    games = [
        Game("apart", [*divided, _PARTS, _R1 % ""], both(1), 2),
        Game("apart at ZeRO 3, forward mode", [*divided, _R1 % _FORWARD, "objective.d_steps=2"], both(3)),
        Game("apart, path length", [*divided, *_STYLES, _PATHS % ""], both(2)),
        Game("apart, overlapping", [*divided, _PARTS, "objective.schedule=overlapped"], both(1), 2),
    ]
    return compare(subject, games)


def compare(subject: Subject, games: Sequence[Game], bounds: Mapping[str, float] | None = None) -> Finding:
    """Play games on all ranks and compare each update with the reference's, on rank 0.

    Args:
        subject: Whose ranks play.
        games: To play.
        bounds: By the reference's device, how many times what ``agreement`` allows; that of rank 0, once, by default.
    """
    found: dict[str, tuple[float, float, str]] = {}
    bounds = bounds or {str(comm.device()): 1.0}
    with exact():
        for game in games:
            gathered = comm.gather_objects(played(game))
            for device, bound in bounds.items():
                name = game.name if len(bounds) < 2 else f"{game.name} against {device}"
                if gathered is not None:
                    found[name] = (bound, *_worst(game, gathered, torch.device(device), bound))
    if comm.rank():
        return passed("rank 0 compares", severity=-1)
    return replace(_told(found), of_all=True)


def _worst(
    game: Game, by_rank: Sequence[Sequence[Mapping[str, Any]]], device: torch.device, bound: float
) -> tuple[float, str]:
    """Largest difference in units of what is allowed, and where; of the first update that has too large a one."""
    worst = 0.0, "nowhere"
    try:
        states = [merge(ranks) for ranks in zip(*by_rank, strict=True)]
        with tempfile.TemporaryDirectory() as directory:
            recipe = game.recipe(Path(directory), comm.world_size())
            for update, shares in enumerate(differences(states, recipe, device, ROUNDING[::8])):
                worst = max(worst, (min(share for share, _ in shares), f"{shares[0][1]} in update {update}"))
                if worst[0] > bound:
                    break
    except DifferError as error:
        return float("inf"), str(error)
    return worst


def _told(found: Mapping[str, tuple[float, float, str]]) -> Finding:
    numbers: dict[str, Any] = {
        name: {"difference_in_bounds": share, "bound": bound, "where": where}
        for name, (bound, share, where) in found.items()
    }
    numbers |= {"1_of_a_parameter": f"{SAME_MOVE:.0e} of what an update adds", "1_of_a_buffer": f"{SAME:.0e} of it"}
    bad = [name for name, (bound, share, _) in found.items() if not share <= bound]
    if bad:
        bound, share, where = found[bad[0]]
        text = f"{first_of(bad, len(found))}: {where}"
        if share < float("inf"):
            text += f" differs from plain PyTorch's by {share / bound:.2g} times the bound"
        return failed(text, REMEDY, numbers, share)
    name = max(found, key=lambda each: found[each][1] / found[each][0])
    bound, share, where = found[name]
    text = f"{len(found)} games differ from plain PyTorch by at most {share / bound:.2f} of the bound"
    return passed(f"{text}: {name}, {where}", numbers)

"""Checks of arithmetic on each rank's device: tiny networks of all families, against plain PyTorch and float64."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bigsgan.config import both_engines
from bigsgan.doctor import layouts
from bigsgan.doctor.checks import Finding, Subject, failed, judged, not_applicable, passed
from bigsgan.doctor.games import DMD2, FLOW, LADD, TINY_GAMES, both, tiny_plan
from bigsgan.doctor.runs import Game, exact, merge, played
from bigsgan.engines.pipeline.layout import meta_inputs
from bigsgan.errors import UserError, counted
from bigsgan.models import convolutions
from bigsgan.models.build import build_network
from bigsgan.models.network import LayerStack, initialize
from bigsgan.runtime import comm

GAMES: dict[str, list[str]] = {"biggan": [], **TINY_GAMES}

COMPILED: list[str] = []
"""Overrides of the compiled networks. BigGAN's have every kind of layer, and take minutes to compile."""

DIFFERENTIATED = {
    "generator": ("generator", False),
    "discriminator": ("discriminator", False),
    "discriminator twice": ("discriminator", True),
}
"""Network, and whether the loss is the squared norm of a gradient; keys are used in messages."""

CLOSE = 1e-4
"""Largest relative norm of a difference: float32 rounds to 6e-8, which second derivatives of ten layers amplify."""

NO_WORSE = 2.0
"""Largest ratio of the bf16 errors of tensor cores' operations and of torch's own: their roundings differ."""

ELSEWHERE = 10.0
"""Factor on the bound between a GPU and a CPU, which add in different orders."""

MOST_OFF = 0.2
"""Largest relative change that bf16 (8 bits) or fp16 (11) make to updates whose losses are differentiated twice."""

HALF_TYPES: dict[str, Any] = {"bf16": {"enabled": True}, "fp16": {"enabled": True, "initial_scale_power": 8}}
"""Sections of a DeepSpeed file, by name."""

_OF_FLOAT64 = "of float64's norm off"

REMEDY = (
    "repeat on another device or host: if only this one fails, take it out of use; "
    "otherwise install a supported version of torch"
)


def updates(subject: Subject) -> Finding:
    """Compare one update of each game in float32 with plain PyTorch on the same device and on a CPU."""
    bounds = {str(comm.device()): 1.0, "cpu": 1.0 if comm.device().type == "cpu" else ELSEWHERE}
    games = [Game(name, own) for name, own in {**GAMES, "flow": FLOW, "dmd2": DMD2, "ladd": LADD}.items()]
    return layouts.compare(subject, games, bounds)


def float64(subject: Subject) -> Finding:
    """Compare gradients of each network in float32, once and twice differentiated, with float64 on the CPU."""
    with exact(is_smooth=False):
        errors = {name: error_of_float32(*case) for name, case in _cases()}
    return judged("gradients in float32 are", errors, dict.fromkeys(errors, CLOSE), _OF_FLOAT64, REMEDY)


def error_of_float32(game: str, network: str, penalized: bool) -> float:
    """Relative norm of the difference of a network's gradients on this rank's device from float64's on the CPU."""
    stack, inputs = built(network, GAMES[game])
    expected = _flat(gradients(stack, inputs, penalized))
    stack, inputs = built(network, GAMES[game])
    on_device = [x.to(comm.device(), torch.float32 if x.is_floating_point() else x.dtype) for x in inputs]
    found = _flat(gradients(stack.to(comm.device()).float(), on_device, penalized))
    return float((found - expected).norm() / expected.norm())


def tensor_cores(subject: Subject) -> Finding:
    """Check that operations for tensor cores are no worse in bf16 than torch's own, which they replace."""
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        return not_applicable("this GPU does not compute bf16")
    errors, bounds = {}, {}
    with exact():  # else a rectifier's kink, on whose other side a rounding falls, would decide
        for name, case in _cases():
            plain, errors[name] = errors_of_bf16(*case)
            bounds[name] = NO_WORSE * plain
    return judged("gradients in bf16 are", errors, bounds, _OF_FLOAT64, REMEDY)


def _cases() -> Iterator[tuple[str, tuple[str, str, bool]]]:
    """Yield names, and game, network and whether it is differentiated twice."""
    for game in GAMES:
        for said, differentiated in DIFFERENTIATED.items():
            yield f"{game} {said}", (game, *differentiated)


def errors_of_bf16(game: str, network: str, penalized: bool) -> tuple[float, float]:
    """Relative errors of gradients in bf16, without and with the operations for tensor cores."""
    stack, inputs = built(network, GAMES[game])
    for tensor in (*stack.parameters(), *(x for x in inputs if x.is_floating_point())):
        tensor.data.copy_(tensor.data.bfloat16())
    state = copy.deepcopy(stack.state_dict())
    expected = _flat(gradients(stack, inputs, penalized))
    errors = []
    for suits in (lambda device, dtype: False, convolutions.suits_tensor_cores):
        with mock.patch.object(convolutions, "suits_tensor_cores", suits):
            stack.load_state_dict(state)
            stack.to(comm.device())
            for module in stack.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    setattr(module, name, buffer.float())
            for parameter in stack.parameters():
                parameter.data = parameter.data.bfloat16()
            dtypes = [torch.float32 if x.is_floating_point() else x.dtype for x in inputs]
            on_device = [x.detach().to(comm.device(), dtype) for x, dtype in zip(inputs, dtypes, strict=True)]
            found = _flat(gradients(stack, on_device, penalized))
        errors.append(float((found - expected).norm() / expected.norm()))
    return errors[0], errors[1]


def half(subject: Subject) -> Finding:
    """Check that two updates in bf16 and fp16 change weights nearly as those in float32 do."""
    return _halves({"": ["accumulation=2", "objective.r1={weight: 0.2, every: 2}"]}, HALF_TYPES, 2)


def half_of_families(subject: Subject) -> Finding:
    """Check the same of one update of each game in bf16, but for those with a codebook.

    Where rounding gives a latent another code, images jump.
    """
    games = {game: options for game, options in GAMES.items() if game != "autoencoder_vq"}
    return _halves(games, {"bf16": HALF_TYPES["bf16"]}, 1)


def _halves(games: Mapping[str, Sequence[str]], types: Mapping[str, Any], num_updates: int) -> Finding:
    """Compare moves at ZeRO 1 in float32 with those in each half type that this device supports."""
    errors: dict[str, float] = {}
    lacking: set[str] = set()
    with exact():
        for game, options in games.items():
            exactly = _move(Game("float32", options, both(1), num_updates))
            for name in (name for name in types if name not in lacking):
                try:
                    move = _move(Game(name, options, both(1, **{name: types[name]}), num_updates))
                except UserError as error:
                    if not error.problem.startswith(f"sets {name}"):
                        raise
                    lacking.add(name)
                    continue
                off = (move - exactly).norm() / exactly.norm() if len(move) else torch.zeros(())
                errors[f"{game} {name}".strip()] = float(off)
    if not errors:
        return not_applicable(f"this device does not compute {' or '.join(types)}")
    if comm.rank():
        return passed("rank 0 compares", severity=-1)
    same = [name for name, error in errors.items() if error == 0]
    if same:
        text = f"{same[0]} gives the very numbers of float32: nothing was rounded"
        return replace(failed(text, REMEDY, {"errors": errors}), of_all=True)
    names = " and ".join(name for name in types if name not in lacking)
    lacks = "".join(f" ({name} is not supported here)" for name in types if name in lacking)
    what = f"{counted(num_updates, 'update')} in {names}{lacks} {'is' if num_updates == 1 else 'are'}"
    return replace(judged(what, errors, dict.fromkeys(errors, MOST_OFF), "off", REMEDY), of_all=True)


def compiled(subject: Subject) -> Finding:
    """Check that compiled networks, and on a GPU replayed CUDA graphs, train as plain PyTorch does."""
    games = []
    for unit in ("whole", "layers"):
        own = both_engines(f"compile={unit}")
        game = [*COMPILED, "accumulation=2", "objective.r1={weight: 0.2, every: 2}", *own]
        games.append(Game(f"compiled {unit}", game))
    if comm.device().type == "cuda":
        own = both_engines("compile=whole", "cuda_graphs=true")
        games.append(Game("CUDA graphs", [*COMPILED, "accumulation=2", *own], num_updates=4))
    torch.compiler.reset()
    return layouts.compare(subject, games)


def built(network: str, overrides: Sequence[str]) -> tuple[LayerStack, list[Tensor]]:
    """A network and its inputs for four samples, in float64 on the CPU."""
    with tempfile.TemporaryDirectory() as directory:
        plan = tiny_plan(Path(directory), 1, list(overrides), both(0))
        stack = build_network(plan.recipe, network)
        initialize(stack, 1)
        metas = meta_inputs(plan, network, 4)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stack.parameters():  # with biases of 0, rectifiers of zeros would be at their kink
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    inputs = [
        torch.randn(meta.shape, generator=generator)
        if meta.is_floating_point()
        else torch.zeros(meta.shape, dtype=meta.dtype)
        for meta in metas
    ]
    stack.checkpointing = False
    return stack.double(), [x.double() if x.is_floating_point() else x for x in inputs]


def gradients(stack: LayerStack, inputs: list[Tensor], penalized: bool) -> list[Tensor]:
    """Gradients of a weighted sum of the outputs, or of the squared norm of that sum's gradient at the first input."""
    for module in stack.modules():
        if hasattr(module, "exact"):  # attention: its fused kernels have no second derivatives
            module.exact = penalized  # type: ignore[assignment]
    first = inputs[0].requires_grad_()
    outputs: Any = stack(*inputs)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype, device=outputs.device).view(outputs.shape)
    loss = (weights * outputs).sum()
    if penalized:
        (grad,) = torch.autograd.grad(loss, first, create_graph=True)
        loss = grad.square().sum()
    wanted = [p for p in stack.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, wanted, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(wanted, found, strict=True)]


def _flat(grads: Sequence[Tensor]) -> Tensor:
    return torch.cat([grad.flatten().double().cpu() for grad in grads])


def _move(game: Game) -> Tensor:
    """Change of all weights in a game, as one vector on rank 0; empty on the other ranks."""
    states = played(game)
    gathered = comm.gather_objects([states[0], states[-1]])
    if gathered is None:
        return torch.empty(0)
    before, after = (merge([rank[i] for rank in gathered]) for i in (0, 1))
    deltas = [
        (after[entry][name] - value).flatten()
        for entry, tensors in sorted(before.items())
        for name, value in sorted(tensors.items())
        if name.endswith("weight")
    ]
    return torch.cat(deltas)

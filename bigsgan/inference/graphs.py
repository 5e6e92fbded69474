"""Exports a trained generator as a graph of torch's operations or ONNX's, which runs without bigsgan.

The graph is in evaluation mode: statistics are the network's own, a StyleGAN2's noise maps are its constant ones, and
spectrally normalized weights are already divided by their norms. It computes in float32, for any number of images.

Shapes: N samples, Z numbers in a latent, C channels, H x W pixels.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bigsgan.config import Recipe
from bigsgan.config.families.features import FeaturesNetwork
from bigsgan.draws import Draws
from bigsgan.errors import UserError, reason
from bigsgan.inference.mappings import set_psi
from bigsgan.inference.sheets import set_styles
from bigsgan.models.build import example_labels, with_images
from bigsgan.models.network import LayerStack
from bigsgan.models.precision import compute_in_float32
from bigsgan.runtime.atomic import fsync

SUFFIXES = {"onnx": ".onnx", "torch-export": ".pt2"}
BOUND = 1e-3
"""Largest difference of a graph's images from our own: 1/8 of a grey level, or this share of the largest number in an
image, if it is above 1."""
HEADER_FILE = "bigsgan.json"
"""Name of the header in a file of torch.export; in ONNX the header is metadata."""

_TRACED, _CHECKED = 2, (3, 1)
"""Numbers of images in the trace, and in the checks."""
_PSI = 0.7
_BATCH = "batch"
"""Name of the first axis of inputs and images."""
_LARGEST_ONNX = 1_900_000_000
"""Most bytes of weights in one ONNX file, which has at most 2 GB; more go to a file beside it."""

_REMEDY = "use --format safetensors or hub"

Inputs = Mapping[str, Tensor]
"""Inputs of a graph by name, in order: z or x, y, psi. In ONNX psi may be left out, and is 1 then."""
Run = Callable[[Inputs], Tensor]


class _Graph(nn.Module):
    def __init__(self, network: nn.Module, draws: bool = False) -> None:
        super().__init__()
        self.network, self._draws = network, draws

    def _made(self, first: Tensor, labels: Tensor) -> Tensor:
        return self.network(first, labels, *([_zeros(first)] if self._draws else []))  # seeds


class _Latents(_Graph):
    """Latents (N, Z) -> images (N, C, H, W)."""

    def forward(self, z: Tensor) -> Tensor:
        return self._made(z, _zeros(z))


class _Classes(_Graph):
    """Latents (N, Z), labels (N,) int64 or (N, K) float32 -> images (N, C, H, W)."""

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self._made(z, y)


class _Translated(_Graph):
    """Input images (N, C_in, H, W) in [-1, 1] -> images (N, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return self._made(x, _zeros(x))


class _ClassStyles(nn.Module):
    """Latents (N, Z), labels (N,) int64 or (N, K) float32, truncation psi () -> images (N, C, H, W)."""

    def __init__(self, network: LayerStack) -> None:
        super().__init__()
        self.mapping, self.synthesis = network.part(0, 1), network.part(1, len(network.layers))

    def forward(self, z: Tensor, y: Tensor, psi: Tensor) -> Tensor:
        ws, seeds = self.mapping.fold(z, y, _zeros(z))
        mapping: Any = next(iter(self.mapping.layers.values()))
        return self.synthesis(mapping.w_avg.lerp(ws, psi), seeds)


class _Styles(_Graph):
    """Latents (N, Z), truncation psi () -> images (N, C, H, W)."""

    def forward(self, z: Tensor, psi: Tensor) -> Tensor:
        return self.network(z, _zeros(z), psi)


class _TruncatedClasses(nn.Module):
    """Latents (N, Z), classes (N,) int64, truncation psi () -> images (N, C, H, W).

    w is truncated towards the mean of its class, a row of a table (K, W).
    """

    def __init__(self, network: LayerStack, num_classes: int) -> None:
        super().__init__()
        self.mapping, self.synthesis = network.part(0, 1), network.part(1, len(network.layers))
        mapping: Any = next(iter(self.mapping.layers.values()))
        self.register_buffer("means", mapping.means_of_classes(torch.arange(max(1, num_classes))))

    def forward(self, z: Tensor, y: Tensor, psi: Tensor) -> Tensor:
        (w,) = self.mapping.fold(z, y)
        return self.synthesis(self.get_buffer("means")[y].lerp(w, psi))


class _OfClasses(_Graph):
    """Latents (N, Z), classes (N,) int64, psi () if the network reads it -> images (N, C, H, W).

    A gather takes negative indices from the end, and refuses or skips those that are too large. So a class that does
    not exist becomes too large. Where nothing refuses it, its images are NaN.
    """

    def __init__(self, network: nn.Module, num_classes: int) -> None:
        super().__init__(network)
        self.num_classes = num_classes

    def forward(self, z: Tensor, y: Tensor, psi: Tensor | None = None) -> Tensor:
        exists = (y >= 0) & (y < self.num_classes)
        images = self.network(z, torch.where(exists, y, self.num_classes), *([] if psi is None else [psi]))
        return torch.where(exists[:, None, None, None], images, torch.nan)


def has_psi(recipe: Recipe) -> bool:
    """Return whether a graph has psi as an input: w has a mean, or one for each class."""
    return recipe.generator.has_styles or (recipe.generator.truncates_w and not recipe.data.has_vectors)


def write_graph(recipe: Recipe, network: LayerStack, form: str, header: Mapping[str, str], out: Path) -> float:
    """Write a generator as ``onnx`` or ``torch-export``, and check that the written file makes the same images.

    This changes ``network``.

    Returns:
        The largest difference from the images of ``network``.

    Raises:
        UserError: torch cannot export the generator, the file cannot be written, or images differ by over ``BOUND``.
    """
    if isinstance(recipe.generator, FeaturesNetwork):
        problem, detail = "cannot hold a generator of family features", "its frozen program is a file of its own"
        raise UserError("--format", form, problem, _REMEDY, detail)
    network = with_images(recipe, network)
    compute_in_float32(network.cpu())
    set_styles(network, "const", None)
    network.checkpointing = False
    for layer in network.spectral_layers():
        layer.orthogonal = 0.0
    network.eval()
    checks = [_inputs(recipe, num) for num in _CHECKED]
    wanted = [_expected(recipe, network, inputs) for inputs in checks]
    for layer in network.spectral_layers():
        layer.fold()
    save, opened = {"onnx": (_save_onnx, _open_onnx), "torch-export": (_save_program, _open_program)}[form]
    try:
        with tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.") as place:
            written = Path(place, out.name)
            try:
                save(_traced(recipe, network), header, written)
                images = list(map(opened(written), checks))
            except (OSError, MemoryError):
                raise
            except Exception as error:  # exporters and runtimes raise errors of many types
                problem = f"cannot hold this generator of family {recipe.generator.family}"
                first = next(iter(str(error).strip().splitlines()), "")  # advice on torch's own code follows
                detail = f"{type(error).__name__}: {first}"
                raise UserError("--format", form, problem, _REMEDY, detail) from error
            difference = check_images(images, wanted, form)
            for path in sorted(Path(place).iterdir(), reverse=True):  # weights in a file of their own go first
                fsync(path)
                os.replace(path, out.parent / path.name)
    except OSError as error:
        raise UserError("--out", str(out), f"cannot be written: {reason(error, out)}", "give a writable path") from None
    return difference


def _module(recipe: Recipe, network: LayerStack) -> nn.Module:
    data, draws = recipe.data, recipe.generator.draws and not recipe.generator.reads_times
    if recipe.translates:
        return _Translated(network, draws)
    styles: nn.Module | None = None
    if has_psi(recipe):
        by_class = partial(_TruncatedClasses, num_classes=data.num_classes)
        styles = (_ClassStyles if recipe.generator.has_styles else by_class)(network)
    if not data.condition_width:
        return _Latents(network, draws) if styles is None else _Styles(styles)
    labelled = styles or _Classes(network, draws)
    return labelled if data.has_vectors else _OfClasses(labelled, data.num_classes)


def _inputs(recipe: Recipe, num: int) -> dict[str, Tensor]:
    """Inputs of a graph for ``num`` images, by name."""
    data, draws = recipe.data, Draws(recipe.seed)
    if recipe.translates:
        shape = (recipe.input_channels, *data.network_size)
        pixels = draws.normal("graph", (0,), 0, num, shape[0] * shape[1] * shape[2])
        return {"x": torch.from_numpy(pixels).view(num, *shape).clamp(-1, 1)}
    inputs = {"z": torch.from_numpy(draws.normal("graph", (0,), 0, num, recipe.latent_size))}
    if data.conditions_are_tokens:
        inputs["y"] = example_labels(data, num)
    elif data.has_vectors:
        inputs["y"] = torch.from_numpy(draws.normal("graph/label", (0,), 0, num, data.condition_width))
    elif data.num_classes:
        inputs["y"] = torch.from_numpy(draws.integers("graph/label", (0,), 0, num, data.num_classes))
    if has_psi(recipe):
        inputs["psi"] = torch.tensor(_PSI)
    return inputs


@torch.no_grad()
def _expected(recipe: Recipe, network: LayerStack, inputs: Inputs) -> Tensor:
    """The network's own images, for styles truncated with psi."""
    first = inputs["x" if recipe.translates else "z"]
    if "psi" in inputs:
        set_psi(network, _PSI)
    rest = [_zeros(first)] if recipe.generator.draws and not recipe.generator.reads_times else []
    try:
        return network(first, inputs.get("y", _zeros(first)), *rest)
    finally:
        if "psi" in inputs:
            set_psi(network, None)


def _traced(recipe: Recipe, network: LayerStack) -> ExportedProgram:
    inputs = _inputs(recipe, _TRACED)
    batch = Dim(_BATCH)
    shapes = {name: {} if name == "psi" else {0: batch} for name in inputs}
    # Of a program that it cannot make, torch prints all that it has made.
    with torch.no_grad(), redirect_stderr(io.StringIO()):
        module = _module(recipe, network).eval()
        return torch.export.export(module, tuple(inputs.values()), dynamic_shapes=shapes, strict=False)


def _save_program(program: ExportedProgram, header: Mapping[str, str], path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file, extra_files={HEADER_FILE: json.dumps(dict(header))})


def _open_program(path: Path) -> Run:
    with path.open("rb") as file:
        module = torch.export.load(file).module()
    return lambda inputs: module(*inputs.values())


def _save_onnx(program: ExportedProgram, header: Mapping[str, str], path: Path) -> None:
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    # The program's names of axes are lost. All inputs share this one, and torch warns of a name given twice.
    axes = {name: {} if number else {0: _BATCH} for number, name in enumerate(names)}
    converted: Any = torch.onnx.export(
        program, dynamo=True, input_names=names, output_names=["images"], dynamic_shapes=axes, verbose=False
    )
    converted.model.metadata_props.update(header)
    for value in converted.model.graph.inputs:
        if value.name == "psi":  # an initializer of an input's name is its default
            value.const_value = importlib.import_module("onnx_ir").tensor(torch.tensor(1.0).numpy(), name="psi")
            converted.model.graph.initializers["psi"] = value
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    converted.save(path, external_data=size > _LARGEST_ONNX)


def _open_onnx(path: Path) -> Run:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(inputs: Inputs) -> Tensor:
        (images,) = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        return torch.from_numpy(images)

    return run


def check_images(found: Sequence[Tensor], wanted: Sequence[Tensor], form: str) -> float:
    """Compare a graph's batches of images with our own, and return the largest difference.

    Raises:
        UserError: The difference is above ``BOUND``.
    """
    pairs = zip(found, wanted, strict=True)
    difference = torch.stack([(images.detach() - ours).abs().max() for images, ours in pairs]).max().item()
    bound = BOUND * max(1.0, *(ours.abs().max().item() for ours in wanted))
    if not difference <= bound:  # also refuses NaN
        problem = f"makes images that differ by up to {difference:.3g} from this generator's, above {bound:.3g}"
        raise UserError("--format", form, problem, _REMEDY)
    return difference


def _zeros(like: Tensor) -> Tensor:
    """Labels or seeds of 0, (N,) int64."""
    return like.new_zeros(like.shape[0], dtype=torch.int64)

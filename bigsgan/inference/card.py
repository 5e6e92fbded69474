"""Makes a generator's model card from a run: a README.md, as the Hugging Face Hub shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bigsgan.config import Recipe
from bigsgan.config.data import Data
from bigsgan.config.run_directory import RECORDS_FILE
from bigsgan.config.yaml_file import dump_yaml
from bigsgan.errors import counted
from bigsgan.runtime.paths import parse_json

_HEAD = """\
---
library_name: bigsgan
pipeline_tag: {task}
tags:
- {game}
- {family}
# Choose a license, which also depends on the training data: https://huggingface.co/docs/hub/repositories-licenses
# license:
---

# {name}

{trained} `{family}`, trained with bigsgan.
{grid}
| | |
| --- | --- |
| images | {size} |
| values | {values} |
| classes | {classes} |
| parameters | {parameters} |
| weights | {weights}, {dtype} |
| statistics | {statistics} |
| real images seen | {nimg} |
| training data | {data} |

## Use

```python
{imports}

G = bigsgan.from_pretrained("FOLDER_OR_REPOSITORY")
{use}
```

The network is built from the recipe in `config.json`; no code comes from this repository.
"""

_USE = {
    "latents": "{made} = G(torch.randn(4, {latent_size}))  # (4, {channels}, {height}, {width}){values}",
    "classes": "{made} = G(torch.randn(4, {latent_size}), torch.tensor([0, 1, 2, 3]) % {classes})  "
    "# latents, classes -> (4, {channels}, {height}, {width}){values}",
    "vectors": "{made} = G(torch.randn(4, {latent_size}), {labels})  "
    "# latents, labels -> (4, {channels}, {height}, {width}){values}",
    "pairs": "images = G(inputs)  # (n, {inputs}, {height}, {width}) in [-1, 1] -> "
    "(n, {channels}, {height}, {width}){values}",
    "domains": "images = G(inputs)  # (n, {inputs}, {height}, {width}), channels of an image to translate and then of "
    "one of the other domain,\n# which may be 0 -> (n, {channels}, {height}, {width}), both in [-1, 1]",
}


_MOST_NAMES = 20
_CHANNELS = {1: "grey", 3: "colour"}


_BOUNDED = ("biggan", "biggan_deep", "cyclegan", "dcgan", "mlp", "pix2pix")
"""Families whose last layer is a tanh."""


def _units(data: Data) -> str:
    return "" if data.range is None else f", for values from {data.range[0]:g} to {data.range[1]:g}"


def _is_bounded(recipe: Recipe) -> bool:
    return recipe.generator.family in _BOUNDED and recipe.data.codec.kind == "pixels"


def _values(recipe: Recipe, scaled: str) -> str:
    """Describe layout and range of what G returns."""
    data = recipe.data
    if data.kind == "latents":
        return f"float32 (n, {data.channels}, height, width), latents {scaled}, which the autoencoder decodes"
    layout = f"float32 (n, {data.image_channels}, height, width)"
    meaning = ", red, green and blue" if data.image_channels == 3 else ""
    black, white = ("black", "white") if data.range is None else (f"{data.range[0]:g}", f"{data.range[1]:g}")
    more = "" if _is_bounded(recipe) else ". They are not bounded: clip them to [-1, 1]"
    return f"{layout}{meaning}, from -1 for {black} to 1 for {white}{more}"


def _quoted(name: str) -> str:
    """Quote a name that would not end where its entry of a list does, as CSV does; a bar would end its table's cell."""
    name = name.replace("|", r"\|")
    return '"' + name.replace('"', '""') + '"' if "," in name or '"' in name else name


def _classes(data: Data) -> str:
    """Describe the classes, by their first names if they have names."""
    names = [f"{number} {_quoted(name)}" for number, name in enumerate(data.class_names or [])]
    listed = ", ".join([*names[:_MOST_NAMES], *(["..."] if len(names) > _MOST_NAMES else [])])
    if isinstance(data.condition_size, list):
        most, width = data.condition_size
        return f"up to {counted(most, 'token')} of {counted(width, 'number')}, each with a 1 behind it"
    if data.condition_size or data.multi_label:
        several = "any number of them" if data.multi_label else "one of them"
        marks = f"a 0 or 1 for each of {counted(data.num_classes, 'class')} ({several})" if data.num_classes else ""
        numbers = counted(data.condition_size, "further number" if marks else "number") if data.condition_size else ""
        return " and ".join(filter(None, (marks, numbers))) + (f": {listed}" if names else "")
    return (str(data.num_classes) if data.num_classes else "none") + (f": {listed}" if names else "")


def model_card(
    run: Path, recipe: Recipe, nimg: int, header: Mapping[str, str], num_parameters: int, grid: str | None
) -> str:
    """Write the card of a run's generator. The license is left to the user.

    Args:
        run: Run directory, whose records have the metrics.
        recipe: Recipe of the run.
        nimg: Images seen at the checkpoint.
        header: Header of the safetensors file.
        num_parameters: Number of the generator's parameters.
        grid: Name of the file with samples; None for none.
    """
    data = recipe.data
    kind = "pairs" if recipe.translates else "classes" if data.num_classes else "latents"
    kind = "vectors" if data.has_vectors else "domains" if data.joins_domains else kind
    size_text = f"{data.resolution.height} x {data.resolution.width}"
    decoded = data.kind == "latents"  # the user decodes them
    size = data.network_size if decoded else data.resolution
    scaled = f"scaled by {data.codec.scale:g}" if data.codec.scale else "scaled as the autoencoder's config.json says"
    example = "ones" if data.conditions_are_tokens else "eye"
    use = _USE[kind].format(
        latent_size=recipe.latent_size,
        classes=data.num_classes,
        labels=f"torch.{example}(4, {', '.join(map(str, data.condition_shape))})",
        channels=data.channels if decoded else data.image_channels,
        inputs=recipe.input_channels,
        height=size.height,
        width=size.width,
        made="encoded" if decoded else "images",
        values=f", {scaled}" if decoded else f" {'in' if _is_bounded(recipe) else 'about'} [-1, 1]{_units(data)}",
    )
    of_latents = f", as the autoencoder `{Path(str(data.codec.path)).name}` decodes them" if decoded else ""
    is_gan = recipe.has_discriminator
    head = _HEAD.format(
        game="gan" if is_gan else "flow-matching" if recipe.objective.flow else "generator",
        trained=f"{'The generator of a GAN' if is_gan else 'A generator that learned alone,'} of family",
        task="image-to-image" if recipe.translates else "unconditional-image-generation",
        family=recipe.generator.family,
        name=run.absolute().name,
        grid="" if grid is None else f"\n![Samples]({grid})\n",
        size=f"{size_text}, {_CHANNELS.get(data.image_channels, f'{data.image_channels} channels')}{of_latents}",
        values=_values(recipe, scaled),
        classes=_classes(data),
        parameters=f"{num_parameters / 1e6:.2f} M",
        weights=_name(header),
        dtype=header["dtype"],
        statistics=header["statistics"],
        nimg=f"{nimg:,}",
        data=" ".join(f"`{part}`" for part in (data.kind, data.dataset, data.root) if part).replace("|", r"\|"),
        imports="import bigsgan" if recipe.translates else "import bigsgan\nimport torch",
        use=use,
    )
    tree = recipe.model_dump(mode="json", exclude_defaults=True)
    for section, key in (("data", "kind"), ("generator", "family"), ("discriminator", "family")):
        tree[section] = {key: getattr(getattr(recipe, section), key), **tree[section]}
    settings = f"## Recipe\n\n`config.json` has it whole, with all defaults.\n\n```yaml\n{dump_yaml(tree)}```\n"
    return "\n".join(part for part in (head, _metrics(run, nimg, header, recipe), settings) if part)


def _name(header: Mapping[str, str]) -> str:
    width = f" of width {header['ema_width']}" if "ema_width" in header else ""
    return f"EMA{width}" if header["weights"] == "ema" else "live"


def _metrics(run: Path, nimg: int, header: Mapping[str, str], recipe: Recipe) -> str:
    """A table of the newest values up to the checkpoint, of samples made in the same way; empty if there are none."""
    newest: dict[tuple[Any, ...], dict[str, Any]] = {}
    steps = recipe.generator.num_steps
    for record in _records(run / RECORDS_FILE):
        if record["nimg"] > nimg or _weights(record) != _weights(header) or record.get("steps", steps) != steps:
            continue
        names = ("metric", "direction", "features_sha256", "resizer", "reference")
        key = tuple(str(record.get(name) or "") for name in names)
        if key not in newest or newest[key]["nimg"] <= record["nimg"]:
            newest[key] = record
    if not newest:
        return ""
    rows = [
        "## Metrics",
        "",
        "| metric | value | images seen | features | compared with |",
        "| --- | --- | --- | --- | --- |",
    ]
    for _, record in sorted(newest.items()):
        reference = record.get("reference")  # only its name is shown: its directory means nothing to others
        against = "the training data" if reference is None else f"`{Path(str(reference)).name}`"
        about = f"{record['nimg']:,} | {record['features']} | {against}"
        for name, value in record.items():
            if name.startswith(record["metric"]) and isinstance(value, float | int):
                rows.append(f"| {name} | {value:.5g} | {about} |")
    return "\n".join([*rows, ""])


def _weights(about: Mapping[str, Any]) -> tuple[str | None, ...]:
    """Weights, truncation and guidance of a record or a header, as texts, because a header has numbers as text."""
    found = [about.get(name) for name in ("weights", "ema_width", "truncation", "guidance")]
    return tuple(None if value is None else str(value) for value in found)


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the valid records; a kill may have left half a line, and a broken disk anything."""
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):
            record = parse_json(line)
            whole = isinstance(record, dict) and {"metric", "nimg", "weights", "features"} <= record.keys()
            if whole and isinstance(record["metric"], str) and isinstance(record["nimg"], int):
                yield record

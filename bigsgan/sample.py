"""`bigsgan sample`: images from a run's generator, as a sheet, an animation, single files or an .npz file."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from bigsgan import checkpoint
from bigsgan.config import Recipe
from bigsgan.config.run_directory import refuse_directory, refuse_output
from bigsgan.config.sections import LARGEST_INT
from bigsgan.data.conditions import picked
from bigsgan.errors import UserError, counted
from bigsgan.images.codec import encode
from bigsgan.images.grids import image_grid, save_png
from bigsgan.images.npz import write_images
from bigsgan.images.size import Size
from bigsgan.images.wide import ARRAYS, in_units
from bigsgan.inference.columns import labels_of_columns, open_conditions
from bigsgan.inference.mappings import set_guidance
from bigsgan.inference.sheets import Sampler, Sheet, set_styles, translated_pairs
from bigsgan.inference.trained import TrainedNetwork, best_device, open_trained, set_steps
from bigsgan.inference.translations import NO_LABELS, Translations
from bigsgan.runtime import memory
from bigsgan.runtime.atomic import replacing
from bigsgan.runtime.paths import writing
from bigsgan.training.sampling import (
    FORWARD,
    LARGEST_NUM,
    check_batch,
    check_guidance,
    check_truncation,
    class_labels,
    has_standing_statistics,
    smaller_batch,
)

DEFAULT_NUM = 100
NPZ, _GIF, _PNG = ".npz", ".gif", ".png"
"""Suffixes of an archive of samples, of an animation, and of any other sheet, which may have none."""

MILLISECONDS = 60
"""How long an animation shows each image."""

MOST_STEPS, MOST_PIXELS = 10**4, 2**30
"""Most images in a row from one sample to the next, and pixels of a sheet, which is in memory until it is written."""


class Options(NamedTuple):
    """What to sample."""

    num: int | None  # number of images or pairs; None for 100, or for all images of `input`
    # thresholds of latents, or psi of styles; several make a sweep, none for no truncation
    truncations: Sequence[float]
    seed: int  # seed of the latents
    classes: Sequence[str] | None  # classes of the columns: names, numbers and ranges; None for the first that fit
    batch: int  # images computed at a time
    interpolate: int | None = None  # images in a row from one sample to the next; None for no interpolation
    morph: bool = False  # interpolate also from class to class
    mix: int = 0  # number of styles that style mixing counts as coarse; 0 for no mixing
    files: bool = False  # write single images into the directory `out`
    input: Path | None = None  # directory of images to translate
    direction: str | None = None  # of their translation between two domains; None for that from the first
    noise: str | None = None  # `random`, `const` or `none`; None for the generator's default
    cutoff: int | None = None  # number of the first styles to which psi applies; None for all
    standing: bool = True  # whether batch norm gets standing statistics
    # relative width of the EMA, which is computed from snapshots; None for the EMA of the checkpoint
    width: float | None = None
    guidance: float | None = None  # factor on the distance of w from its mean over the classes; None for 1
    steps: int | None = None  # from noise to an image, by flow matching; None for the recipe's
    conditions: Path | None = None  # file of the columns' labels, which are vectors; None for some of the data

    @property
    def num_latents(self) -> int:
        """Number of samples, or of the run's pairs."""
        return DEFAULT_NUM if self.num is None else self.num

    @property
    def truncation(self) -> float | None:
        """The first truncation, if any."""
        return self.truncations[0] if self.truncations else None


def main(
    run: Path,
    out: Path,
    nimg: int | None,
    live: bool,
    options: Options,
    rank: int,
    num_ranks: int,
    ranks: checkpoint.ObjectCollectives | None = None,
) -> None:
    """Write a PNG sheet, a GIF of an interpolation, single PNG files, or an .npz file, as ``options`` and ``out`` say.

    Ranks share the work for single files and an .npz file, with the collectives ``ranks``. Anything else is rank
    0's work.

    Raises:
        UserError: The run cannot be opened, an option is out of range, or memory runs out.
    """
    _check(options, out)
    if rank > 0 and not (options.files or out.suffix == NPZ):
        return
    remedy = f"{smaller_batch(options.batch)}, or fewer in all (--num)"
    where = f"with {counted(options.batch, 'image')} at a time and {options.num or DEFAULT_NUM} in all"
    with memory.naming_remedy(where, remedy):
        trained = open_trained(run, "generator", live, nimg, best_device(), options.width, ranks)
        set_steps(trained, options.steps, options.guidance)
        _check_run(trained.recipe, options, out.suffix == NPZ)
        if options.input is not None:
            text = _translate(trained, options, out, rank, num_ranks)
        elif options.files:
            text = _write_files(trained, options, out, rank, num_ranks)
        elif out.suffix == NPZ:
            text = _write_npz(trained, options, out, ranks or checkpoint.SingleProcess())
        else:
            text = _write_sheet(_make_sheet(trained, options), out)
    if rank == 0 or options.files:
        print(f"{out}: {text} of {run} at {trained.nimg} images seen")


def _check(options: Options, out: Path) -> None:
    if not 1 <= options.num_latents <= LARGEST_NUM:
        raise UserError("--num", options.num, f"must be 1 to {LARGEST_NUM}", "give a number in this range")
    check_batch(options.batch)
    if not 0 <= options.seed <= LARGEST_INT:
        raise UserError("--seed", options.seed, f"must be 0 to {LARGEST_INT}", "give a number in this range")
    if options.interpolate is not None and not 2 <= options.interpolate <= MOST_STEPS:
        problem = f"must be 2 to {MOST_STEPS} images from one sample to the next"
        raise UserError("--interpolate", options.interpolate, problem, "give a number in this range")
    if options.mix < 0:
        raise UserError("--mix", options.mix, "must be at least 1 coarse style", "give a number such as 4")
    if options.morph and not options.interpolate:
        raise UserError("--morph", None, "needs --interpolate", "add --interpolate 16")
    asked = [name for name in ("interpolate", "mix", "files") if getattr(options, name)]
    if len(options.truncations) > 1:
        asked.append("truncation (several)")
    if len(asked) > 1:
        raise UserError(f"--{asked[0]}", None, f"cannot be combined with --{asked[1]}", "give only one of them")
    if out.suffix == NPZ and asked:
        raise UserError("--out", str(out), f"cannot be combined with --{asked[0]}", "give a PNG file, or a directory")
    if out.suffix == _GIF and not options.interpolate:
        raise UserError("--out", str(out), "is an animation, which needs --interpolate", "add --interpolate 16")
    if options.files:
        refuse_directory(out, "--out")
    else:
        fits = out.suffix in ("", NPZ, _GIF) or out.suffix.lower() == _PNG
        refuse_output(out, kind=(out.suffix if out.suffix in (NPZ, _GIF) else _PNG) if fits else None)
        if not fits:
            remedy = f"give {out.with_suffix(_PNG)}"
            raise UserError("--out", str(out), f"must end in {_PNG}, {_GIF} or {NPZ}", remedy)


def _check_run(recipe: Recipe, options: Options, npz: bool) -> None:
    """Refuse options that the run's generator does not support."""
    for truncation in options.truncations:
        check_truncation(recipe, truncation)
    if options.guidance is not None:
        check_guidance(recipe, options.guidance)
    data, paired, styles, no_input = recipe.data, recipe.translates, recipe.generator.has_styles, options.input is None
    normed = options.standing or (has_standing_statistics(recipe) and not (paired and no_input))
    latents, takes_labels = "a generator from latents", "a generator from latents, or --input and labels"
    labelled = not paired or (data.condition_width > 0 and not no_input)
    for option, given, fits, needed in (
        ("--noise", options.noise, styles, "a generator with noise maps (StyleGAN2)"),
        ("--truncation-cutoff", options.cutoff is not None, styles, "a generator with styles (StyleGAN2)"),
        ("--no-standing", not options.standing, normed, "batch norm, and with pairs also --input"),
        ("--input", not no_input, paired, "a generator that translates images"),
        ("--direction", options.direction, data.joins_domains and not no_input, "two domains, and --input"),
        ("--truncation", options.truncations, not paired, latents),
        ("--classes", options.classes, labelled, takes_labels),
        ("--conditions", options.conditions is not None, labelled, takes_labels),
        ("--interpolate", options.interpolate, not paired, latents),
        ("--mix", options.mix, not paired, latents),
        ("--files", options.files and no_input, not paired, latents),
        ("--out *.npz", npz, not paired, latents),
        ("--seed", options.seed and no_input, not paired, latents),
        ("--morph", options.morph, data.condition_width and not data.conditions_are_tokens, "a run with classes"),
    ):
        if given and not fits:
            raise UserError(option, None, f"needs {needed}", "remove the option")
    if paired and labelled and options.classes is None and options.conditions is None:
        raise UserError("--input", None, "needs the labels of the images", "add --classes, or --conditions")
    if options.cutoff is not None and not options.truncations:
        raise UserError("--truncation-cutoff", None, "needs --truncation", "add --truncation 0.7")
    if options.interpolate and recipe.sample_statistics == "batch":
        problem = "must be unset with sample_statistics=batch"
        raise UserError("--interpolate", options.interpolate, problem, "set sample_statistics: running in config.yaml")


def _make_sheet(trained: TrainedNetwork, options: Options) -> Sheet:
    data, num = trained.recipe.data, options.num_latents
    if not options.interpolate:
        _check_pixels("--num", num, 1, data.resolution)
    if trained.recipe.translates:
        return translated_pairs(trained, num, options.batch)
    sampler, columns = _sampler(trained, options)
    _check_num(options, len(columns))
    if len(options.truncations) > 1:
        return sampler.sweep(columns, options.truncations)
    if options.interpolate:
        num_rows = options.num or len(columns)
        _check_pixels("--interpolate", options.interpolate, num_rows, data.resolution)
        columns = columns[torch.arange(num_rows) % len(columns)]
        return sampler.interpolation(columns, options.interpolate, options.truncation, options.morph)
    if options.mix:
        return sampler.mixed_styles(columns, max(1, num // len(columns)), options.mix, options.truncation)
    return sampler.grid(num, columns, options.truncation)


def _check_num(options: Options, columns: int) -> None:
    """Refuse a ``--num`` of a sheet whose columns and rows give another number of images."""
    rows = len(options.truncations)
    if options.num is None:
        return
    if options.mix and options.num % columns:
        problem = f"must be a multiple of {columns}, the number of columns, with --mix"
        raise UserError("--num", options.num, problem, f"give {max(1, options.num // columns) * columns}")
    if rows > 1 and options.num not in (columns, columns * rows):
        problem = f"must be {columns * rows} with {counted(rows, 'truncation')} of {counted(columns, 'column')}"
        raise UserError("--num", options.num, problem, "leave it out, or choose the columns by --classes")


def _sampler(trained: TrainedNetwork, options: Options) -> tuple[Sampler, Tensor]:
    """Return a sampler, and the label of each column."""
    set_styles(trained.network, options.noise, options.cutoff)
    set_guidance(trained.network, options.guidance)
    data, given = trained.recipe.data, options.conditions
    conditions = functools.cache(functools.partial(open_conditions, trained.run, data))
    columns = labels_of_columns(data, options.classes, options.num_latents, conditions, given)
    stands = options.standing and has_standing_statistics(trained.recipe)
    needed = conditions() if stands or (options.classes is None and given is None) else range(1)
    return Sampler(trained, options.seed, options.batch, needed, options.standing), columns


def _translate(trained: TrainedNetwork, options: Options, out: Path, rank: int, num_ranks: int) -> str:
    """Write a directory's images beside their translations, or only this rank's share of the translations."""
    assert options.input is not None
    direction = options.direction or FORWARD
    asked = trained.recipe.data, options.classes, LARGEST_NUM, lambda: range(1), options.conditions
    labels = labels_of_columns(*asked) if trained.recipe.data.condition_width else NO_LABELS
    translations = Translations(trained, options.input, options.num, options.seed, options.standing, direction, labels)
    if not options.files:
        remedy = "give a smaller number, or --files"
        _check_pixels("--num", len(translations), 2, trained.recipe.data.resolution, remedy)
        return _write_sheet(translations.sheet(options.batch), out)
    names = translations.file_names()
    _refuse_files(out, set(names).__contains__)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    shares = _shares(len(names), options.batch, rank, num_ranks)
    for numbers in shares:
        for number, image in zip(numbers, translations.of_own_sizes(numbers, options.batch), strict=True):
            save_png(encode(image), out / names[number])
    return counted(sum(map(len, shares)), "file")


def _shares(num: int, batch: int, rank: int, num_ranks: int) -> list[range]:
    """Return the batches of a rank. Ranks take them in turn, so that they are the same for any number of ranks."""
    return [range(start, min(start + batch, num)) for start in range(rank * batch, num, batch * num_ranks)]


def _check_pixels(option: str, number: int, times: int, size: Size, remedy: str = "give a smaller number") -> None:
    most = MOST_PIXELS // (times * size.num_pixels)
    if number > most:
        problem = f"must be at most {most} with images of {size}"
        raise UserError(option, number, problem, remedy)


def _write_sheet(sheet: Sheet, out: Path) -> str:
    if out.suffix != _GIF:
        save_png(image_grid(sheet.images, sheet.columns), out)
        return f"{counted(len(sheet.images), 'image')} in {counted(sheet.columns, 'column')}"
    steps = sheet.images.unflatten(0, (-1, sheet.columns)).transpose(0, 1)  # (steps, rows, C, H, W)
    frames = [image_grid(images, len(images)).permute(1, 2, 0).squeeze(2).numpy() for images in steps]
    first, *rest = (Image.fromarray(frame) for frame in frames)
    with writing(out), replacing(out) as unfinished:
        first.save(unfinished, format="GIF", save_all=True, append_images=rest, duration=MILLISECONDS, loop=0)
    return f"an animation of {counted(len(frames), 'step')}"


def _write_files(trained: TrainedNetwork, options: Options, out: Path, rank: int, num_ranks: int) -> str:
    """Write this rank's share of the images: ``class003_sample000012.png`` is sample 12 of the seed, of class 3."""
    (sampler, columns), num = _sampler(trained, options), options.num_latents
    names = [f"class{label:03d}" for label in columns.tolist()] if columns.dim() == 1 else []
    names, data = names or [f"column{number:03d}" for number in range(len(columns))], trained.recipe.data
    _refuse_files(out, lambda name: _is_name(name, names, num))
    sampler.prepare(options.truncation)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    shares = _shares(num, options.batch, rank, num_ranks)
    for numbers in shares:
        labels = columns[torch.tensor(numbers) % len(columns)]
        images = sampler.images(sampler.inputs(numbers.start, labels, options.truncation))
        for number, image in zip(numbers, images, strict=True):
            _save(image, data.range, out / _file_name(names, number))
    return counted(sum(map(len, shares)), "file")


def _save(image: Tensor, values: Sequence[float] | None, path: Path) -> None:
    """Write an image (C, H, W) as PNG; in the data's own ``values``, or of other channels, as .npy (H, W, C)."""
    if values is None and len(image) in (1, 3):
        save_png(encode(image), path)
        return
    path = path.with_suffix(ARRAYS)
    with writing(path), replacing(path) as unfinished, unfinished.open("wb") as file:
        np.save(file, in_units(image, values).permute(1, 2, 0).contiguous().numpy())


def _file_name(columns: Sequence[str], number: int) -> str:
    return f"{columns[number % len(columns)]}_sample{number:06d}.png"


_SAMPLE = re.compile(r"(?:class|column)[0-9]{3,}_sample([0-9]{6,})(?:\.png|" + re.escape(ARRAYS) + ")")
"""The names of files of samples."""


def _is_name(name: str, columns: Sequence[str], num: int) -> bool:
    """Return whether one of ``num`` samples gets this name."""
    found = _SAMPLE.fullmatch(name)
    number = int(found[1]) if found else num
    return number < num and Path(name).stem == Path(_file_name(columns, number)).stem


def _refuse_files(out: Path, is_name: Callable[[str], bool]) -> None:
    """Refuse to replace what is no image, or to add to samples of another call.

    ``is_name`` tells the names of the files to be written.
    """
    if os.path.isdir(out):
        with writing(out):
            names = sorted(os.listdir(out))
        if others := [name for name in names if _SAMPLE.fullmatch(name) and not is_name(name)]:
            problem = f"contains {counted(len(others), 'sample')} of another call, such as {others[0]}"
            raise UserError("--out", str(out), problem, "remove them, or give another directory")
        for name in filter(is_name, names):
            refuse_output(out / name, kind=Path(name).suffix)


def _write_npz(trained: TrainedNetwork, options: Options, out: Path, ranks: checkpoint.ObjectCollectives) -> str:
    """Make batches in turn, the same for any number of ranks, while rank 0 writes them.

    Without ``classes``, all classes take turns: their numbers of samples differ by at most one. Of tokens, the file has
    the place of each sample's in ``labels.npy`` or ``--conditions``.
    """
    (sampler, columns), num, data = _sampler(trained, options), options.num_latents, trained.recipe.data
    if options.classes is None and options.conditions is None:
        of_classes = data.num_classes and not data.condition_size and not data.multi_label
        all_of_data = np.arange(len(sampler.conditions))
        columns = class_labels(data, range(data.num_classes)) if of_classes else picked(sampler.conditions, all_of_data)
    places = torch.arange(num) % len(columns)
    sampler.prepare(options.truncation)

    def made(first: int) -> np.ndarray:
        own = columns[places[first : first + options.batch]]
        images = sampler.images(sampler.inputs(first, own, options.truncation))
        images = encode(images) if data.range is None else in_units(images, data.range)
        return images.permute(0, 2, 3, 1).contiguous().numpy()

    batches = _in_turn(ranks, made, num, options.batch)
    if ranks.rank() > 0:
        for _ in batches:
            pass
        return ""
    shape = (num, *data.resolution, data.image_channels)
    with writing(out), replacing(out) as unfinished:
        dtype = np.dtype(np.uint8 if data.range is None else np.float32)
        # Tokens of all samples may not fit into memory.
        labels = places if data.conditions_are_tokens else columns[places]
        write_images(unfinished, shape, batches, labels.numpy() if data.condition_width else None, dtype)
    return counted(num, "image")


def _in_turn(
    ranks: checkpoint.ObjectCollectives, make: Callable[[int], np.ndarray], num: int, batch: int
) -> Iterator[np.ndarray]:
    """Call ``make`` with the first sample of each batch, on ranks in turn; on rank 0, yield all results in order."""
    for start in range(0, num, batch * ranks.world_size()):
        first = start + batch * ranks.rank()
        found = ranks.gather_objects(make(first) if first < num else np.empty(0, np.uint8))
        yield from (images for images in found or [] if len(images))

"""Text encoders of transformers on disk, with which `bigsgan data encode` makes tokens of captions, and the captions.

Shapes: t tokens of a caption, up to T, of W numbers.
"""

from __future__ import annotations

import csv
import importlib
import io
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from bigsgan.config.data import Data
from bigsgan.data.autoencoders import weights_digest
from bigsgan.data.listing import Ignored, is_image, warn_once
from bigsgan.data.source import Source
from bigsgan.errors import UserError, counted, reason, shown
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import check_regular, read_text

_FIELD, _CAPTIONS = "--text-encoder", "--captions"
_MOST_TOKENS = 120
"""T by default, if the tokenizer has no lower limit: that of PixArt (arXiv 2310.00426)."""
_BESIDE = ".txt"
_SECOND = "text_encoder_2"
"""Folder of a further encoder in pipelines of diffusers."""
_MOST_BYTES, _MOST_HALF = 1 << 30, 65_504
_REMEDY = "give a folder of transformers with a text encoder and its tokenizer"


class TextEncoder(NamedTuple):
    """Makes tokens of captions."""

    size: list[int]  # T and W
    plan: dict[str, Any]  # what all parts of a conversion must share of it
    # captions -> the last hidden states (t, W) of each, in float16 if that holds them; how many had more tokens
    encode: Callable[[Sequence[str]], tuple[list[np.ndarray], int]]


@torch.no_grad()
def open_text_encoder(folder: Path, most: int | None, device: torch.device) -> TextEncoder:
    """Open a text encoder in a folder of transformers, or in a pipeline's folder of diffusers.

    Args:
        folder: The folder, in which ``text_encoder`` and ``tokenizer`` may have folders of their own.
        most: T; None for the tokenizer's limit, or 120.
        device: The device on which it computes.

    Raises:
        UserError: transformers is not installed, the folder cannot be read or holds several encoders, its tokenizer
            takes fewer tokens or has no padding, or its numbers are not finite.
    """
    require("text", _FIELD, str(folder))
    if (folder / _SECOND).exists():
        remedy = "give a folder with one of them as text_encoder and its tokenizer as tokenizer, such as links"
        raise UserError(_FIELD, str(folder), "has several text encoders", remedy, f"text_encoder and {_SECOND}")
    try:
        return _opened(folder, most, device)
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # OSError, ValueError, SafetensorError, ...: the library raises all kinds
        raise UserError(_FIELD, str(folder), f"cannot be read: {reason(error, folder)}", _REMEDY) from None


def _opened(folder: Path, most: int | None, device: torch.device) -> TextEncoder:
    library = importlib.import_module("transformers")
    library.logging.disable_progress_bar()
    weights, words = (folder / name if (folder / name).is_dir() else folder for name in ("text_encoder", "tokenizer"))
    tokenizer = library.AutoTokenizer.from_pretrained(str(words), local_files_only=True)
    network = library.AutoModelForTextEncoding.from_pretrained(str(weights), local_files_only=True)
    if tokenizer.pad_token is None:
        remedy = "name one as pad_token in its tokenizer_config.json"
        raise UserError(_FIELD, str(folder), "has a tokenizer without a token of padding", remedy)
    if most is not None and most > tokenizer.model_max_length:
        problem = f"must be at most {tokenizer.model_max_length}, as the tokenizer takes"
        raise UserError("--max-tokens", most, problem, "give a smaller number")
    network, limit = network.float().to(device).eval(), most or min(tokenizer.model_max_length, _MOST_TOKENS)

    def encode(captions: Sequence[str]) -> tuple[list[np.ndarray], int]:
        given = tokenizer(list(captions), truncation=True, max_length=limit, padding=True, return_tensors="pt")
        num_longer = sum(len(ids) > limit for ids in tokenizer(list(captions), verbose=False)["input_ids"])
        mask = given["attention_mask"]
        with torch.no_grad():
            made = network(input_ids=given["input_ids"].to(device), attention_mask=mask.to(device))[0].cpu().numpy()
        own = [tokens[kept] for tokens, kept in zip(made, mask.bool().numpy(), strict=True)]
        if wrong := [caption for caption, each in zip(captions, own, strict=True) if not np.isfinite(each).all()]:
            remedy, detail = "repair its weights, or give another one", f"of the caption {shown(wrong[0])}"
            raise UserError(_FIELD, str(folder), "makes numbers that are not finite", remedy, detail)
        return [each.astype(np.float16 if abs(each).max() < _MOST_HALF else np.float32) for each in own], num_longer

    (example,), _ = encode(["a"])
    files = sorted(path for place in {weights, words} for path in place.iterdir() if path.is_file())
    size = [limit, example.shape[1]]
    return TextEncoder(size, {"text_encoder": weights_digest(files, _FIELD), "condition_size": size}, encode)


def with_captions(data: Data, source: Source, given: str | None) -> Source:
    """Return a source with the caption of each image.

    Args:
        data: The section that reads the images.
        source: The images.
        given: A file (.csv or .tsv) with rows of an image's path below SRC and a text; the name of a column of texts
            of ``huggingface``; or None for files <name>.txt beside the images of a folder.

    Raises:
        UserError: They cannot be read, or an image has none.
    """
    names = [source.images.name(index) for index in range(len(source.labels))]
    if data.kind == "huggingface":
        return source._replace(captions=_column(source, given))
    if given is not None:
        found = _table(Path(given))
        names = [name.removeprefix(f"{source.root}{os.sep}") for name in names]
        if missing := [name for name in names if not found.get(name)]:
            problem = f"has no caption of {counted(len(missing), 'image')}"
            raise UserError(_CAPTIONS, given, problem, "give rows of a path below SRC and a text", missing[0])
        head = {name for name in list(found)[:1] if not is_image(name)}
        if others := sorted(found.keys() - set(names) - head):
            warn_once(f"{given}: {counted(len(others), 'caption')} of no image ignored, such as of {others[0]}")
        return source._replace(captions=[found[name] for name in names])
    if data.kind != "folder":
        problem, remedy = f"must be given with --kind {data.kind}", "give a file of paths and texts (.csv)"
        raise UserError(_CAPTIONS, None, problem, remedy)
    read = {os.path.splitext(name)[0] for name in names}
    ignored = source.ignored
    unread = Counter(ignored.kinds) - Counter({_BESIDE: len(read)})
    of_image = os.path.splitext(source.root / ignored.example)[0] in read
    example = "" if of_image and ignored.example.endswith(_BESIDE) else ignored.example
    ignored = Ignored(dict(unread), ignored.num_lost, example)
    return source._replace(captions=[_beside(name) for name in names], ignored=ignored)


def _beside(image: str) -> str:
    path = f"{os.path.splitext(image)[0]}{_BESIDE}"
    try:
        check_regular(path)
        text = Path(path).read_text(encoding="utf-8-sig").strip()
    except (OSError, ValueError) as error:
        remedy = "write a caption there, or give --captions with a file of paths and texts (.csv)"
        raise UserError("SRC", path, f"cannot be read: {reason(error, path)}", remedy) from None
    if not text:
        raise UserError("SRC", path, "is empty", "write a caption there")
    return text


def _table(path: Path) -> dict[str, str]:
    """Read rows of a path and a text; a head counts as a row of no image."""
    separator = {".csv": ",", ".tsv": "\t"}.get(path.suffix.lower())
    if separator is None:
        raise UserError(_CAPTIONS, str(path), "must end in .csv or .tsv", "name it so, or give --kind huggingface")
    try:
        check_regular(path)
        text = io.StringIO(read_text(path, _MOST_BYTES).removeprefix("\ufeff"), newline="")
        rows = [row for row in csv.reader(text, delimiter=separator) if row]
    except (OSError, ValueError, csv.Error) as error:
        problem = f"cannot be read: {reason(error, path)}"
        raise UserError(_CAPTIONS, str(path), problem, "give rows of a path below SRC and a text") from None
    if wrong := [row for row in rows if len(row) != 2]:
        problem = f"has a row that is no path and one text, {separator.join(wrong[0])[:60]!r}"
        raise UserError(_CAPTIONS, str(path), problem, "quote texts with commas")
    names = [name.strip() for name, _ in rows]
    if twice := [name for name, num in Counter(names).items() if num > 1]:
        raise UserError(_CAPTIONS, str(path), f"has several rows of {twice[0]}", "give one for each")
    return {name: caption.strip() for name, (_, caption) in zip(names, rows, strict=True)}


def _column(source: Source, name: str | None) -> list[str]:
    rows: Any = cast(Any, source.images).dataset.source
    texts = rows.texts(name)
    if texts is None:
        problem = f"must be a column of texts of {source.root}"
        raise UserError(_CAPTIONS, name, problem, "name one", f"it has {', '.join(rows.others)}")
    if missing := [row for row, text in enumerate(texts) if not (text or "").strip()]:
        raise UserError(_CAPTIONS, name, f"has no text in row {missing[0]}", "name another column, or remove such rows")
    return [str(text) for text in texts]

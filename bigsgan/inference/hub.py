"""A generator as a folder for the Hugging Face Hub, and such folders from there and to there."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from bigsgan.config.run_directory import refuse_directory
from bigsgan.errors import UserError, reason
from bigsgan.images.grids import save_png
from bigsgan.inference.loading import CONFIG_FILE, WEIGHTS_FILE, ExportedNetwork, load
from bigsgan.runtime.atomic import replacing, write_text
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import writing

CARD_FILE, GRID_FILE = "README.md", "samples.png"
FILES = (WEIGHTS_FILE, CONFIG_FILE, CARD_FILE, GRID_FILE)


def from_pretrained(
    name: str | Path,
    device: torch.device | str = "cpu",
    dtype: str | None = None,
    revision: str | None = None,
    **options: Any,
) -> ExportedNetwork:
    """Open a folder that `bigsgan export --format hub` made, here or on the Hub.

    Of a repository, only the four files of such a folder are downloaded; HF_HUB_OFFLINE=1 takes them from the local
    cache.

    Args:
        name: A folder, or a repository such as ``user/name``.
        device: As in ``bigsgan.load``.
        dtype: As in ``bigsgan.load``.
        revision: Branch, tag or commit of the repository.
        options: Of ``huggingface_hub.snapshot_download``, such as ``cache_dir`` or ``token``.

    Returns:
        What ``bigsgan.load`` makes of a folder; of a repository a ``bigsgan.PretrainedNetwork``.

    Raises:
        UserError: There is no such folder or repository, it is no exported network, or huggingface_hub is missing.
    """
    if os.path.isdir(name):
        return load(name, device, dtype)
    require("hub", "from_pretrained", str(name))
    network = importlib.import_module("bigsgan.inference.pretrained").PretrainedNetwork
    try:
        return network.from_pretrained(name, revision=revision, device=device, dtype=dtype, **options)
    except (OSError, ValueError, AttributeError) as error:  # the last of a config.json that holds no mapping
        problem, remedy = f"cannot be downloaded: {reason(error)}", "give a folder, or a repository that you can read"
        raise UserError("from_pretrained", str(name), problem, remedy) from error


def push_to_hub(folder: str | Path, name: str, private: bool | None = None, token: str | None = None) -> str:
    """Upload a folder that `bigsgan export --format hub` made, and return the address of the commit.

    Its four files alone are uploaded, as one commit. A repository that does not exist is made, ``private`` or by the
    account's default.

    Raises:
        UserError: The folder holds no exported network, or the Hub does not take it, or huggingface_hub is missing.
    """
    require("hub", "push_to_hub", name)
    load(folder)
    library = importlib.import_module("huggingface_hub")
    try:
        api = library.HfApi(token=token)
        made = api.create_repo(name, private=private, exist_ok=True)  # of a bare name, the user's
        commit = api.upload_folder(repo_id=made.repo_id, folder_path=str(folder), allow_patterns=list(FILES))
    except Exception as error:  # errors of the connection are the library's client's own
        problem = f"cannot be uploaded to: {reason(error)}"
        remedy = "see that the Hub can be reached, log in (`hf auth login`), or give another name"
        raise UserError("push_to_hub", name, problem, remedy) from error
    return str(commit.commit_url)


def refuse_folder(out: Path, field: str = "--out") -> None:
    """Refuse a folder that cannot be made, or whose files an export would replace: a model card is edited by hand.

    Raises:
        UserError: It is so.
    """
    refuse_directory(out, field)
    if held := [name for name in FILES if os.path.lexists(out / name)]:
        problem, detail = "must be a new directory, or one without these files", f"it holds {', '.join(held)}"
        raise UserError(field, str(out), problem, "give another directory, or remove them", detail)


def write_folder(
    state: Mapping[str, Tensor], header: Mapping[str, str], card: str, grid: Tensor | None, out: Path
) -> None:
    """Write weights, configuration, model card and, if there is one, a grid of samples uint8 (C, H, W).

    Raises:
        UserError: They cannot be written.
    """
    texts = {"library_name": "bigsgan", **header}
    numbers = {
        name: json.loads(header[name])
        for name in ("nimg", "ema_width", "truncation", "guidance", "recipe")
        if name in header
    }
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        with replacing(out / WEIGHTS_FILE) as unfinished:
            save_file(dict(state), unfinished, metadata={"format": "pt", **header})
        if grid is not None:
            save_png(grid, out / GRID_FILE)
        write_text(out / CARD_FILE, card)
        write_text(out / CONFIG_FILE, json.dumps({**texts, **numbers}, indent=2) + "\n")

"""Generators from the Hugging Face Hub, and folders to there."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from bigsgan.errors import UserError, reason
from bigsgan.inference.folder import FILES
from bigsgan.inference.loading import ExportedNetwork, load
from bigsgan.runtime.extras import require


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
        UserError: There is no such folder or repository, it is not an exported network, or huggingface_hub is missing.
    """
    if os.path.isdir(name):
        return load(name, device, dtype)
    require("hub", "from_pretrained", str(name))
    network = importlib.import_module("bigsgan.inference.pretrained").PretrainedNetwork
    try:
        folder = network.download(str(name), revision=revision, **options)
    except (OSError, ValueError) as error:  # the library's own errors are among these
        problem, remedy = f"cannot be downloaded: {reason(error)}", "give a folder, or a repository that you can read"
        raise UserError("from_pretrained", str(name), problem, remedy) from error
    opened: ExportedNetwork = network.open_folder(folder, device, dtype)
    return opened


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

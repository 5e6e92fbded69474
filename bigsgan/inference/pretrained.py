"""An exported generator with the methods of huggingface_hub's ModelHubMixin. Needs the extra ``hub``."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import torch

from bigsgan.checkpoint.exported import WEIGHTS_FILE
from bigsgan.engines.base import DTYPES
from bigsgan.inference.folder import FILES, refuse_folder, write_weights
from bigsgan.inference.loading import ExportedNetwork, load
from bigsgan.runtime.extras import require
from bigsgan.runtime.paths import writing

require("hub", "bigsgan.PretrainedNetwork")
_Mixin = importlib.import_module("huggingface_hub").ModelHubMixin


class PretrainedNetwork(ExportedNetwork, _Mixin, library_name="bigsgan"):  # type: ignore[misc, valid-type, call-arg]
    """A generator from the Hub, or from a folder that `bigsgan export --format hub` made.

    ``PretrainedNetwork.from_pretrained("user/name")`` opens it, with ``device`` and ``dtype`` as in ``bigsgan.load``.
    ``save_pretrained(folder)`` writes the weights as they are now, and the other files as they came; the library writes
    a model card where there was none.
    ``push_to_hub("user/name")`` uploads the same.

    The mixin passes entries of config.json that are named like arguments of ``__init__``. There are none.

    Attributes:
        texts: The other files by name: configuration, model card and samples.
    """

    def __init__(self, opened: ExportedNetwork, texts: dict[str, bytes]) -> None:
        super().__init__(opened.recipe, opened.network, opened.header)
        self.texts = texts

    @classmethod
    def _from_pretrained(
        cls, *, model_id: str, device: torch.device | str = "cpu", dtype: str | None = None, **options: Any
    ) -> PretrainedNetwork:
        """Open a folder or a repository; ``options`` are those of ``huggingface_hub.snapshot_download``."""
        folder = model_id if os.path.isdir(model_id) else cls.download(model_id, **options)
        return cls.open_folder(folder, device, dtype)

    @staticmethod
    def download(name: str, **options: Any) -> str:
        """Download a repository, with the options of ``huggingface_hub.snapshot_download``; return its folder."""
        library = importlib.import_module("huggingface_hub")
        folder: str = library.snapshot_download(name, allow_patterns=list(FILES), **options)
        return folder

    @classmethod
    def open_folder(cls, folder: str, device: torch.device | str, dtype: str | None) -> PretrainedNetwork:
        """Open a folder as ``bigsgan.load`` does."""
        opened = load(folder, device, dtype)
        others = [Path(folder, name) for name in FILES if name != WEIGHTS_FILE]
        return cls(opened, {path.name: path.read_bytes() for path in others if path.is_file()}).eval()

    def save_pretrained(self, save_directory: str | Path, **options: Any) -> str | None:
        """Write the files into a new folder; ``options`` are the mixin's, such as ``push_to_hub``.

        Raises:
            UserError: The folder holds such files, or cannot be written. The mixin would remove its config.json.
        """
        folder = Path(save_directory)
        refuse_folder(folder, "save_directory")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return super().save_pretrained(folder, **options)

    def _save_pretrained(self, save_directory: Path) -> None:
        """Write the weights, in the type of the file that they came from, and the other files."""
        stored, parameters = DTYPES[self.header.get("dtype", "fp32")], dict(self.network.named_parameters())
        state = {
            name: tensor.to("cpu", stored if name in parameters else tensor.dtype).contiguous()
            for name, tensor in self.network.state_dict().items()
        }
        with writing(save_directory):
            write_weights(state, self.header, save_directory)
            for name, content in self.texts.items():
                (save_directory / name).write_bytes(content)

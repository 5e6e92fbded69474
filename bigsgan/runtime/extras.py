"""Packages that only some commands need, each installed by an extra of this package."""

from __future__ import annotations

import importlib.util

from bigsgan.errors import UserError

PACKAGES = {
    "diffusers": ("diffusers",),
    "hdf5": ("h5py",),
    "hub": ("huggingface_hub",),
    "huggingface": ("datasets",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "text": ("transformers",),
    "tiff": ("imagecodecs", "tifffile"),
    "wandb": ("wandb",),
}
"""The packages of each extra, as in pyproject.toml."""


def require(extra: str, field: str, value: object = None) -> None:
    """Check that the packages of an extra are installed. ``field`` and ``value`` are the option that needs them.

    Raises:
        UserError: A package is not installed.
    """
    for package in PACKAGES[extra]:
        if importlib.util.find_spec(package) is None:
            problem = f"needs the package {package}, which is not installed"
            remedy = f"install the extra `{extra}` (`pip install -e '.[{extra}]'` in bigsgan's repository)"
            raise UserError(field, value, problem, remedy)

"""Packages that only some commands need, and that an extra of this one installs."""

from __future__ import annotations

import importlib.util

from bigsgan.errors import UserError

PACKAGES = {
    "diffusers": ("diffusers",),
    "hub": ("huggingface_hub",),
    "onnx": ("onnx", "onnxruntime", "onnxscript"),
    "wandb": ("wandb",),
}
"""By extra, as pyproject.toml has them."""


def require(extra: str, field: str, value: object = None) -> None:
    """Check that the packages of an extra are installed; ``field`` and ``value`` are what needs them.

    Raises:
        UserError: One is not.
    """
    for package in PACKAGES[extra]:
        if importlib.util.find_spec(package) is None:
            problem = f"needs the package {package}, which is not installed"
            remedy = f"install the extra `{extra}` (`pip install -e '.[{extra}]'` in bigsgan's repository)"
            raise UserError(field, value, problem, remedy)

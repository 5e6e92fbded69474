"""Objects from outside the package, which a recipe names as ``package.module:name``."""

from __future__ import annotations

import os
import pkgutil
import sys
from typing import Any

from bigsgan.errors import UserError


def load(field: str, name: str) -> Any:
    """Import what ``package.module:name`` names; the current directory can be imported from, as with `python -m`.

    Args:
        field: The key that has the name, for messages.
        name: The name.

    Raises:
        UserError: There is no such module, or it has no such attribute.
    """
    if not all(name.partition(":")[::2]):
        raise UserError(field, name, "must have the form package.module:name", "write a module, a colon and a name")
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return pkgutil.resolve_name(name)
    except (ModuleNotFoundError, ValueError) as error:
        remedy = "install it, or add its folder to PYTHONPATH"
        raise UserError(field, name, "cannot be imported", remedy, str(error)) from None
    except AttributeError as error:
        raise UserError(field, name, "cannot be found", "give a name that the module defines", str(error)) from None

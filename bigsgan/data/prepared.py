"""What `bigsgan data prepare` and `encode` have made, and its description for the user."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

from bigsgan.errors import counted
from bigsgan.images.size import Fitting

_SHOWN_UNREADABLE = 10

_log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """The result of ``prepare``."""

    num_images: int
    num_classes: int  # 0 if the images are not in class folders
    image_channels: int  # 1 if all images are greyscale
    num_unreadable: int  # images that were skipped
    unreadable: list[tuple[str, str]]  # their paths and the reasons; empty if the zip file was complete before
    ignored: str = ""  # the files beside images, described
    values: str = ""  # the range of images of more than 8 bits, described if they use a part of it
    label_size: int = 0  # numbers of a label, if labels are vectors


def describe(
    made: Prepared,
    what: str,
    data: Mapping[str, Any],
    fitting: Fitting,
    codec: Mapping[str, Any] | None = None,
    labels: str | None = None,
) -> None:
    """Print the result, the skipped images, the overrides of a recipe that uses it, and the files that were ignored.

    ``data`` and ``codec`` are keys of these sections besides those that ``made`` and ``fitting`` tell. ``labels`` says
    what labels there are, where ``made`` does not.
    """
    for path, why in made.unreadable[:_SHOWN_UNREADABLE]:
        _log.warning("skipped an unreadable image: %s: %s", path, why)
    if made.num_unreadable:
        were = "image was" if made.num_unreadable == 1 else "images were"
        _log.warning("%d unreadable %s skipped", made.num_unreadable, were)
    if made.values:
        _log.warning("%s", made.values)
    classes = counted(made.num_classes, "class") if made.num_classes else "no classes"
    classes = f"labels of {counted(made.label_size, 'number')}" if made.label_size else classes
    print(f"{data['root']}: {what} {labels or f'of {classes}'}, {fitting.text}")
    overrides = {**data, "resolution": fitting.size.text}
    overrides |= {"image_channels": made.image_channels, "num_classes": data.get("num_classes", made.num_classes)}
    overrides |= {f"codec.{key}": value for key, value in (codec or {}).items()}
    print(*(shlex.quote(f"data.{key}={value}") for key, value in overrides.items()))
    if made.ignored:
        print(made.ignored)

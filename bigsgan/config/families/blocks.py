"""Convolution variants: keys that several families share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from bigsgan.config.sections import Section, Width
from bigsgan.errors import UserError


class BlockSection(Section):
    """The variant of a network's convolutions. Convolutions that read or write an image are always full."""

    block: Literal["standard", "depthwise_separable", "grouped", "inverted_residual"] = "standard"
    """Full convolutions; depthwise and 1x1 (Howard et al. 2017, arXiv 1704.04861); grouped (Xie et al. 2017, arXiv
    1611.05431); or a wide depthwise one with squeeze-and-excitation between two 1x1 (Sandler et al. 2018, arXiv
    1801.04381; Howard et al. 2019, arXiv 1905.02244)."""
    groups: Width = 8
    """Groups of ``grouped`` convolutions."""
    expansion: Width = 4
    """Channels inside an ``inverted_residual``, divided by its output's."""


def check_groups(network: str, section: BlockSection, widths: Iterable[int]) -> None:
    """Raise UserError if ``widths`` of feature maps between grouped convolutions do not divide into groups."""
    if section.block != "grouped":
        return
    for width in widths:
        if width % section.groups:
            problem = f"must divide the {width} channels of a feature map"
            remedy = f"set {network}.groups to a divisor of {width}, or {network}.block=standard"
            raise UserError(f"{network}.groups", section.groups, problem, remedy)

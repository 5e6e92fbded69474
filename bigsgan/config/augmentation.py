"""The recipe's ``augmentation`` section: transformations of the discriminator's inputs, real and fake."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from bigsgan.config.data import Data
from bigsgan.config.sections import PositiveInt, Section, Share
from bigsgan.errors import UserError

Sign = Annotated[float, Field(gt=-1, lt=1)]

# The probability of each transformation as a multiple of p (Karras et al. 2020, arXiv 2006.06676, appendix B).
_BLIT = {"flip": 1.0, "quarter_turns": 1.0, "shift": 1.0}
_GEOMETRY = {"scale": 1.0, "rotation": 1.0, "stretch": 1.0, "translation": 1.0}
_COLOR = {"brightness": 1.0, "contrast": 1.0, "luma_flip": 1.0, "hue": 1.0, "saturation": 1.0}
_FILTER = {"filter": 1.0}
_NOISE = {"noise": 1.0}
_CUTOUT = {"cutout": 1.0}

ADA_PIPELINES: dict[str, dict[str, float]] = {
    "b": _BLIT,
    "geom": _GEOMETRY,
    "color": _COLOR,
    "filter": _FILTER,
    "noise": _NOISE,
    "cutout": _CUTOUT,
    "bg": _BLIT | _GEOMETRY,
    "bgc": _BLIT | _GEOMETRY | _COLOR,
    "bgcf": _BLIT | _GEOMETRY | _COLOR | _FILTER,
    "bgcfn": _BLIT | _GEOMETRY | _COLOR | _FILTER | _NOISE,
    "bgcfnc": _BLIT | _GEOMETRY | _COLOR | _FILTER | _NOISE | _CUTOUT,
    # Huang et al. 2024, arXiv 2501.05441.
    "r3gan": _BLIT | _GEOMETRY | dict.fromkeys(_COLOR, 0.5) | _CUTOUT,
}

_UNUSED = {"ada": ("policy",), "diffaugment": ("pipeline", "p", "final_p", "target")}


_COLOURLESS = tuple(name for name, scales in ADA_PIPELINES.items() if not scales.keys() & _COLOR.keys())


class Augmentation(Section):
    """Augmentation of the discriminator's images.

    ``ada`` is the pipeline of Karras et al. 2020 (arXiv 2006.06676): each transformation acts with a probability p that
    is fixed, follows the discriminator (``target``), or follows a schedule (``final_p``). ``diffaugment`` is that of
    Zhao et al. 2020 (arXiv 2006.10738), which acts on every image.
    """

    kind: Literal["ada", "diffaugment"] = "ada"
    """``ada`` applies each transformation with probability p (Karras et al. 2020, arXiv 2006.06676), ``diffaugment``
    all to every image (Zhao et al. 2020, arXiv 2006.10738)."""
    pipeline: Literal[
        "b", "geom", "color", "filter", "noise", "cutout", "bg", "bgc", "bgcf", "bgcfn", "bgcfnc", "r3gan"
    ] = "bgc"
    """ADA's groups: (b)lit, (g)eom, (c)olor, (f)ilter, (n)oise, (c)utout; ``b`` is the published ``blit``."""
    policy: list[Literal["color", "latent_color", "translation", "cutout", "flip"]] = Field(
        default=["color", "translation", "cutout"], min_length=1, max_length=5
    )
    """DiffAugment's groups, in order. ``latent_color`` recolours half of the samples around the means of a sample's
    last image, ``flip`` mirrors four of ten (GAT, arXiv 2509.24935)."""
    p: Share = 0.0
    """Probability p at the start, or throughout without ``target`` and ``final_p``."""
    target: Sign | None = None
    """Mean sign of D's logits at real images to which p is adjusted; 0.6 as published."""
    interval: PositiveInt = 4
    """Updates between two adjustments of p."""
    final_p: Share | None = None
    """Probability p after ``ramp_nimg`` images, along half a cosine, as in R3GAN."""
    ramp_nimg: PositiveInt = 500_000
    """Images over which p goes from ``p`` to ``final_p``, or with ``target`` can rise from 0 to 1."""

    @model_validator(mode="after")
    def _check(self) -> Augmentation:
        self.refuse_changed("augmentation", _UNUSED[self.kind], f"kind={self.kind}")
        if len(set(self.policy)) != len(self.policy):
            raise UserError("augmentation.policy", self.policy, "must name each group once", "remove the second")
        if self.target is not None and self.final_p is not None:
            problem, detail = "must be unset with augmentation.target", "only one of them can change p"
            raise UserError("augmentation.final_p", self.final_p, problem, "remove one of the two", detail)
        if self.kind == "ada" and not self.p and not self.final_p and self.target is None:
            problem, detail = "must be greater than 0 without target and final_p", "no image would ever change"
            remedy = "set augmentation.target=0.6, or p, or final_p; or augmentation=null for none"
            raise UserError("augmentation.p", self.p, problem, remedy, detail)
        return self

    def check(self, data: Data) -> None:
        """Raise UserError if the section does not fit the data."""
        if self.kind == "ada" and data.image_channels not in (1, 3) and self.pipeline not in _COLOURLESS:
            problem, detail = f"must be one of {', '.join(_COLOURLESS)} with these images", "others turn colours"
            remedy = "choose one of these, or set augmentation.kind=diffaugment"
            raise UserError("augmentation.pipeline", self.pipeline, problem, remedy, detail)
        if self.kind == "ada" and data.codec.kind != "pixels":
            problem, detail = f"must be diffaugment with data.codec.kind={data.codec.kind}", "ADA augments pixels"
            remedy = "set augmentation.kind=diffaugment, or augmentation=null"
            raise UserError("augmentation.kind", "ada", problem, remedy, detail)
        if self.kind == "ada" and data.resolution.shorter < 4:
            value, problem, detail = data.resolution.value, "must be at least 4", "ADA pads by reflection"
            raise UserError("data.resolution", value, problem, "set data.resolution=4", detail)

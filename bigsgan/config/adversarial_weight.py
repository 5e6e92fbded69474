"""Section of the recipe's ``objective``: the weight of the loss on logits in G's loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bigsgan.config.sections import NaturalFloat, NaturalInt, PositiveFloat, Section


class Adaptive(Section):
    """Multiplies the weight by |gradient of the terms of images| / (|gradient of the loss on logits| + 1e-4).

    Both are [at one of G's parameters](../how-to/image-games.md#when-and-how-much-d-counts) (Esser et al. 2021, arXiv
    2012.09841, equation 7).
    """

    parameter: Annotated[str, Field(min_length=1)]
    """End of the parameter's name, such as ``decoder.conv_out.weight``."""
    largest: PositiveFloat = 1e4
    """Largest ratio."""
    over: Literal["batch", "micro_batch"] = "batch"
    """Gradients of the whole batch; or of each rank's micro-batch, as in public trainers."""


class Normalize(Section):
    """The gradient g_i of the loss on logits at each of G's images becomes g_i / (sqrt(v) + 1e-8).

    v is the moving average of C * H * W * E[|g_i|^2] over the batch (Lin et al. 2025, arXiv 2511.22475).
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the old average, at first 0, that an update keeps."""


class Adversarial(Section):
    """The weight of the loss on logits in G's loss."""

    weight: NaturalFloat = 1.0
    """Factor; of the ratio if the weight is adaptive."""
    from_nimg: NaturalInt = 0
    """Images before which it is 0."""
    ramp_nimg: NaturalInt = 0
    """Further images over which it rises linearly."""
    adaptive: Adaptive | None = None
    normalize: Normalize | None = None

    @property
    def weighs(self) -> str:
        """Name of the key by which gradients of the whole batch give the loss on logits its factor; empty if none."""
        return "adaptive" if self.adaptive else "normalize" if self.normalize else ""

    @property
    def parts(self) -> int:
        """Number of parts of G's loss whose gradients at the images travel from D to G."""
        return 2 if self.weighs else 1

    def factor(self, nimg: int) -> float:
        """Return the factor in the update that begins at ``nimg`` images."""
        since = nimg - self.from_nimg
        return self.weight * (0.0 if since < 0 else min(1.0, (since + 1) / (self.ramp_nimg + 1)))

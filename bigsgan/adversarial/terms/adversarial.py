"""The loss on D's logits, the first term of both networks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from bigsgan.adversarial.terms.judged import JudgedOutputs
from bigsgan.adversarial.terms.losses import AdversarialLoss
from bigsgan.adversarial.terms.term import Term
from bigsgan.monitor import Statistics


class OfDiscriminator(Term):
    """D's side, which also records logits."""

    def __init__(self, loss: AdversarialLoss, judged: JudgedOutputs | None = None) -> None:
        super().__init__("discriminator", "discriminator", ("real_logits", "fake_logits"))
        self.judged = judged
        self.statistics += ("logits/real", "logits/fake", "accuracy/real", "accuracy/fake")
        self._function = loss.discriminator

    def value(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        """Return the mean over the samples, a scalar."""
        return self._function(real_logits, fake_logits)

    def loss(self, read: Mapping[str, Tensor], statistics: Statistics) -> Tensor:
        """Return the value, and record logits and how often their sign is right."""
        real, fake = (read[name].detach() for name in self.reads)
        recorded = (real, fake, (real > 0).float(), (fake < 0).float())
        for name, value in zip(self.statistics[1:], recorded, strict=True):
            statistics.add(name, value)
        return super().loss(read, statistics)


class OfGenerator(Term):
    """G's side."""

    def __init__(self, loss: AdversarialLoss, judged: JudgedOutputs | None = None) -> None:
        super().__init__("generator", "generator", ("fake_logits", "real_logits"))
        self.judged = judged
        self._function = loss.generator

    def begin_update(self, weights: Mapping[str, float]) -> None:
        """Take this update's factor, if it has one."""
        self.factor = weights.get(self.name, self.factor)

    def value(self, fake_logits: Tensor, real_logits: Tensor) -> Tensor:
        """Return the mean over the samples, a scalar; ``real_logits`` stand for themselves only where D judges both."""
        return self._function(real_logits, fake_logits)

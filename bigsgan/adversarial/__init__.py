"""The adversarial step, its losses and penalties."""

from bigsgan.adversarial.latents import LatentSource, Slice
from bigsgan.adversarial.step import AdversarialStep, LearningRates

__all__ = ["AdversarialStep", "LatentSource", "LearningRates", "Slice"]

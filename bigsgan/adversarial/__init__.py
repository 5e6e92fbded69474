"""The adversarial step, its losses and penalties."""

from bigsgan.adversarial.latents import LatentSource, Slice
from bigsgan.adversarial.step import AdversarialStep, Scheduled

__all__ = ["AdversarialStep", "LatentSource", "Scheduled", "Slice"]

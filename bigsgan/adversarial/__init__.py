"""The adversarial step, its losses and penalties."""

from bigsgan.adversarial.latents import InputSource, LatentSource, SampleDraws
from bigsgan.adversarial.pairs import PairSource
from bigsgan.adversarial.step import AdversarialStep, Scheduled

__all__ = ["AdversarialStep", "InputSource", "LatentSource", "PairSource", "SampleDraws", "Scheduled"]

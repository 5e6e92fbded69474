"""The adversarial step, its losses and penalties."""

from bigsgan.adversarial.latents import InputSource, LatentSource, SampleDraws, Slice
from bigsgan.adversarial.pairs import PairSource
from bigsgan.adversarial.step import AdversarialStep, LearningRates

__all__ = ["AdversarialStep", "InputSource", "LatentSource", "LearningRates", "PairSource", "SampleDraws", "Slice"]

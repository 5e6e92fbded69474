"""The adversarial step, its losses and penalties."""

from bigsgan.adversarial.latents import InputSource, LatentSource, SampleDraws
from bigsgan.adversarial.sources import Infer, build_source
from bigsgan.adversarial.step import AdversarialStep, Scheduled

__all__ = ["AdversarialStep", "Infer", "InputSource", "LatentSource", "SampleDraws", "Scheduled", "build_source"]

"""Quality metrics of generated images, measured by all ranks together."""

from bigsgan.metrics.evaluation import Evaluation, Generate, Measured, Replica
from bigsgan.metrics.features import Features, open_features

__all__ = ["Evaluation", "Features", "Generate", "Measured", "Replica", "open_features"]

"""Quality metrics of generated images, measured by the ranks that hold the generator together.

These are all ranks unless a run gives each network ranks of its own, and in this room they are what "all ranks" means:
collectives here are made within ``runtime.division.within_part``.
"""

from bigsgan.metrics.evaluation import Evaluation, Generate, Measured, Replica
from bigsgan.metrics.features import Features, open_features

__all__ = ["Evaluation", "Features", "Generate", "Measured", "Replica", "open_features"]

"""Quality metrics of generated images, measured together by the ranks that hold the generator.

These are all ranks unless a run gives each network ranks of its own. In this room, "all ranks" means these ranks:
collectives here are made within ``runtime.division.within_part``.
"""

from bigsgan.metrics.evaluation import Evaluation, Generate, Made, Measured, Replica
from bigsgan.metrics.features import Features, open_features

__all__ = ["Evaluation", "Features", "Generate", "Made", "Measured", "Replica", "open_features"]

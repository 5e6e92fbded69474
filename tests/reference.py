"""The doctor's reference, which tests compare with too."""

from bigsgan.doctor.reference import LOSSES, Reference, build_networks, distance, make_optimizer, run_reference, worst

__all__ = ["LOSSES", "Reference", "build_networks", "distance", "make_optimizer", "run_reference", "worst"]

"""The doctor's networks without kinks, which tests train too."""

from bigsgan.doctor.smooth import leaky_relu, no_kernels, relu, smooth

__all__ = ["leaky_relu", "no_kernels", "relu", "smooth"]

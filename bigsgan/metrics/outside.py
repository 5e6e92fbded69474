"""Metrics from outside the package."""

from bigsgan.errors import UserError


class MetricError(UserError):
    """A metric from outside failed."""

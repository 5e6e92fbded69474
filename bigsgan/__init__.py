"""bigsgan trains generators and discriminators as two separate DeepSpeed engines."""

__version__ = "0.1.0"

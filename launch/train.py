"""Trains a recipe: `deepspeed launch/train.py [--config RECIPE] [dotted.key=value ...]`, or the same under torchrun."""

import sys

from bigsgan.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))

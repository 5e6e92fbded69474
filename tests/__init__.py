"""Tests, and the repository that they are in."""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]

"""A place for tests of bad input, and the check that all of them share."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigsgan import cli
from bigsgan.config import load_recipe, plan_run
from bigsgan.errors import UserError
from tests.tiny import TINY

RECIPE = """
out: run
total_nimg: 1000
batch: 64
report_nimg: 100
sample_nimg: 100
checkpoint_nimg: 100
data: {kind: digits, resolution: 16}
generator: {channels: 4, latent_size: 60}
discriminator: {channels: 4}
optimizer:
  generator: {lr: 2e-4, betas: [0.0, 0.999]}
  discriminator: {lr: 2e-4}
ema: {half_life_nimg: 10}
"""

BOMB = "a0: &a0 [1, 1, 1]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}, *a{i}]\n" for i in range(29))


class WentOnError(AssertionError):
    """The command would have gone on."""


def check(capsys, arguments: list[str], field: str, *parts: str) -> None:
    """The command ends with status 2 and one line of these parts, the last in the remedy, and changes no file."""
    before = sorted(Path().iterdir())
    assert cli.main(arguments) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    (line,) = message.splitlines()
    assert line.startswith(f"bigsgan: {field}: "), line
    problem, _, remedy = line.partition("; ")
    for part in parts[:-1]:
        assert part in problem, line
    assert parts[-1] in remedy, line
    assert "Traceback" not in line
    assert sorted(Path().iterdir()) == before


def check_refused(directory, overrides, field, problem, remedy):
    """The tiny recipe with overrides is refused on two ranks, by one line with these parts."""
    path = directory / "recipe.yaml"
    path.write_text(TINY)
    with pytest.raises(UserError) as caught:
        plan_run(load_recipe(path, overrides), 2)
    message = str(caught.value)
    assert message.startswith(f"{field}: ")
    assert problem in message
    assert remedy in message.partition("; ")[2]

"""A place for tests of bad input, and the check that all of them share."""

from __future__ import annotations

from pathlib import Path

from bigsgan import cli

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

"""A generator that learns alone, by flow matching or as an autoencoder, agrees with the reference in all layouts."""

import json
import subprocess
import sys

import pytest

from bigsgan.doctor.games import FLOW
from tests.codebooks import AVERAGED
from tests.distributed import scenarios
from tests.distributed.agreement import check_updates
from tests.distributed.test_state import BF16, check_same_run
from tests.outside import TOKENS
from tests.tiny import TINY_GAMES, stages, zero

_, CLASSES, AUTOENCODER, *_ = TINY_GAMES["autoencoder_vq"]
ALONE = ["discriminator={family: none}", "optimizer={generator: {kind: sgd, lr: 0.1}}"]
GAMES = {
    "flow": FLOW,
    "autoencoder": [
        *(CLASSES, AUTOENCODER, *ALONE),
        "objective={l1: 3, codebook: {weight: 2, commitment: 0.5}}",
    ],
}
GAMES["tokens"] = [
    *TOKENS[:2],
    'generator={family: "tests.outside:TokensToVelocities", latent_size: 256, times: true}',
    *(ALONE[0], "optimizer={generator: {kind: sgd, lr: 0.5}}", "objective={flow: {}}"),
]
GAMES["labels left out"] = [
    "data={kind: digits, resolution: 8, condition_dropout: 0.25, missing_labels: accept}",
    "seed=3",
    FLOW[1].replace("288", "64"),
    *FLOW[2:],
]
HALVES = "accumulation=2"
LAYOUTS = {
    "one rank, micro-batches": (1, [HALVES], zero(0)),
    "ZeRO 3": (2, [HALVES], zero(3)),
    "stages": (2, [HALVES, *stages(2, 1)[:1]], zero(1)),
    "ZeRO 2": (2, [], zero(2)),
    "ZeRO 3, layers recomputed": (2, [HALVES, "engines.generator.activation_checkpointing=true"], zero(3)),
    "stages, layers recomputed": (
        2,
        [*stages(2, 1)[:1], "engines.generator.activation_checkpointing=true"],
        zero(1),
    ),
    "compiled by layer": (2, [HALVES, "engines.generator.compile=layers"], zero(1)),
}
QUICK = [("flow", "one rank, micro-batches"), ("flow", "ZeRO 3"), ("labels left out", "ZeRO 3")]
SLOW = [("flow", "stages"), ("autoencoder", "ZeRO 3"), ("autoencoder", "stages"), ("tokens", "ZeRO 3")]
WHOLE = ("one rank, micro-batches", "ZeRO 3", "ZeRO 2")


def marked():
    for game in GAMES:
        for layout in WHOLE if game in ("tokens", "labels left out") else LAYOUTS:
            case, mark = (game, layout), pytest.mark.nightly
            if case in QUICK or case in SLOW:
                mark = () if case in QUICK else pytest.mark.slow
            yield pytest.param(*case, marks=mark)


@pytest.mark.parametrize("game, layout", [*marked()])
def test_updates(ranks, game, layout):
    world_size, more, content = LAYOUTS[layout]
    check_updates(ranks(world_size), [*GAMES[game], *more], {"generator": content}, 3)


RESUMED = {
    "ZeRO 3 in bf16": ([], {**zero(3), **BF16}),
    "stages": (stages(2, 1)[:1], zero(1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", RESUMED)
def test_a_resumed_run_is_the_same(ranks, layout, tmp_path):
    more, content = RESUMED[layout]
    overrides, ds = [*FLOW, HALVES, *more], {"generator": content}
    whole = ranks(2).run(scenarios.uninterrupted, overrides, ds, 4)
    check_same_run(whole, ranks(2).run(scenarios.resume, overrides, ds, str(tmp_path), 2, 2), 4)


@pytest.mark.slow
@pytest.mark.parametrize("game", ["digits_dit", "averaged codes"])
def test_a_run_goes_on(game, tmp_path):
    """By the command itself, which also makes samples; codes of an autoencoder follow averages and are revived."""
    small = ["report_nimg=64", "sample_nimg=64", "checkpoint_nimg=64", "ema.half_life_nimg=64"]
    if game == "averaged codes":
        small += [AUTOENCODER.partition("bottleneck")[0] + AVERAGED + "}", CLASSES]
        small += ["data.codec={kind: pixels}", "objective={l1: 3, codebook: {entropy: {}}}"]
    for nimg in (64, 128):
        command = [sys.executable, "-m", "bigsgan", "train", "--config", "digits_dit", f"total_nimg={nimg}"]
        done = subprocess.run([*command, f"out={tmp_path}", *small], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert "Resuming from" in done.stdout + done.stderr
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][-1]
    assert (last["nimg"], last["skipped/generator"]) == (128, 0)
    assert last["loss/generator"] > 0
    assert not {"lr/discriminator", "grad_norm/discriminator"} & last.keys()
    assert (tmp_path / "samples/samples_ema_000000000128.png").stat().st_size > 0

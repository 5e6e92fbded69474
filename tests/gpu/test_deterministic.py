"""With ``deterministic: true`` a run that another process resumes is the same bit for bit; on a CPU too."""

import pytest
import torch

from bigsgan.config import NETWORKS, both_engines
from bigsgan.runtime.kernels import kernels
from tests.distributed import scenarios
from tests.distributed.pool import RankPool
from tests.distributed.test_state import ADAM, check_same_run
from tests.tiny import TINY_GAMES, zero

ON_DEVICE = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu"}
PENALIZED = [*ADAM, "accumulation=2", "objective.r1={weight: 0.2, every: 2, method: forward_mode}"]
TWICE = [*ADAM, "accumulation=2", "objective.r1={weight: 0.2, every: 2, method: double_backward}"]
COMPILED = both_engines("compile=whole")

GAMES = {
    "BigGAN": (PENALIZED, zero(0)),
    "BigGAN, differentiated twice": (TWICE, zero(0)),
    "BigGAN in bf16": (PENALIZED, zero(2, bf16={"enabled": True})),
    "StyleGAN2": ([*ADAM, *TINY_GAMES["stylegan2"]], zero(0)),
    "compiled": ([*TWICE, *TINY_GAMES["mlp"], *COMPILED], zero(1)),
    "compiled convolutions": ([*TWICE, *TINY_GAMES["dcgan"], *COMPILED], zero(1)),
}
"""What the recipe has and DeepSpeed's file; cuDNN, the Triton kernels and torch.compile each choose in some of them."""

NIGHTLY = ["compiled convolutions", *([] if ON_DEVICE == {} else ["BigGAN, differentiated twice", "compiled"])]
IN_CI = [name for name in GAMES if name not in NIGHTLY]


def first_half(directory, names):
    """By game what an uninterrupted run of this process ends with, and what the first half of another one saves."""
    found = {}
    with kernels(deterministic=True):
        for name in names:
            overrides, ds = GAMES[name]
            both = dict.fromkeys(NETWORKS, ds)
            found[name] = scenarios.uninterrupted([*overrides, "deterministic=true"], both, 6)
            scenarios.begun([*overrides, "deterministic=true"], both, f"{directory}/{name}", 3)
    return found


def second_half(directory, names):
    """By game what this process, which resumes it, ends with."""
    found = {}
    with kernels(deterministic=True):
        for name in names:
            overrides, ds = GAMES[name]
            both = dict.fromkeys(NETWORKS, ds)
            found[name] = scenarios.resumed([*overrides, "deterministic=true"], both, f"{directory}/{name}", 3)
    return found


def in_a_process(function, *arguments):
    pool = RankPool(1, ON_DEVICE)
    try:
        return pool.run(function, *arguments)[0]
    finally:
        pool.stop()


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(IN_CI, id="some", marks=pytest.mark.slow),
        pytest.param(NIGHTLY, id="rest", marks=pytest.mark.nightly),
    ],
)
def test_another_process_resumes_the_same_run(tmp_path, names):
    whole = in_a_process(first_half, str(tmp_path), names)
    parts = in_a_process(second_half, str(tmp_path), names)
    assert list(whole) == list(parts) == names
    for name in names:
        check_same_run([whole[name]], [parts[name]])
        print(f"{name}: {len(whole[name]['state'])} tensors are the same, bit for bit")

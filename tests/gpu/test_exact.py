"""On a GPU: networks in float32 and bf16, once and twice differentiated, against the same in float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from bigsgan.doctor import arithmetic
from bigsgan.doctor.arithmetic import CLOSE, DIFFERENTIATED, GAMES, NO_WORSE
from bigsgan.doctor.smooth_activations import smooth
from bigsgan.models.initial import draw_orthogonal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("alone", "exact"),
]


@pytest.mark.parametrize("shape", [(1024, 1152), (1536, 1024)])
def test_a_large_matrix_is_made_orthogonal_on_the_device(shape):
    found, expected = (
        draw_orthogonal(shape, torch.Generator().manual_seed(1), device)
        for device in (torch.device("cuda"), torch.device("cpu"))
    )
    assert found.device.type == "cuda"
    found = found.cpu().double()
    product = found @ found.mT if shape[0] < shape[1] else found.mT @ found
    error = float((found - expected).norm() / expected.norm())
    print(f"orthogonal {shape}: {error:.1e} from the CPU's")
    assert error < 1e-3  # what rounding does to the last of its rows or columns
    assert float((product - torch.eye(min(shape), dtype=torch.float64)).abs().max()) < 1e-5


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("what", DIFFERENTIATED)
def test_gradients_are_those_of_float64(game, what):
    error = arithmetic.error_of_float32(game, *DIFFERENTIATED[what])
    print(f"{game} {what}: {error:.1e}")
    assert error <= CLOSE


@pytest.mark.parametrize("game", GAMES)
@pytest.mark.parametrize("what", DIFFERENTIATED)
def test_what_tensor_cores_are_given_is_no_worse_than_torchs_own(game, what):
    """Attention without weights, channels filled up, biases elsewhere, other orders: in bf16, which rounds it all.

    Without Triton's kernels, which ``smooth`` turns off.
    """
    with smooth():  # else a rectifier's kink, on whose other side a rounding falls, would decide
        plain, given = arithmetic.errors_of_bf16(game, *DIFFERENTIATED[what])
    print(f"{game} {what}: {plain:.1e} and {given:.1e}")
    assert given <= NO_WORSE * plain

"""On a GPU: compiled kernels against torch's own operations, and a run of StyleGAN2 that uses them."""

import logging

import pytest
import torch

from bigsgan.doctor import kernels
from bigsgan.doctor.kernels import FILTERS, LIMIT, NETWORKS, ROUNDING, filter_excess, network_error, rectifier_excess
from bigsgan.models import fused
from tests.gpu.test_gpu import check, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact"),
]

CELLS = [pytest.param(*cell, id="-".join(map(str, cell))) for cell in kernels.CELLS]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_the_kernels_are_used_and_the_log_says_so_once(dtype, caplog):
    for cached in (fused._decide, fused._log_once):
        cached.cache_clear()
    with caplog.at_level(logging.INFO, "bigsgan"):
        for _ in range(2):
            assert fused.used_for(torch.zeros(1, device="cuda", dtype=dtype))
    assert [record.getMessage() for record in caplog.records] == [
        "filters and rectifiers of feature maps: Triton kernels"
    ]


@pytest.mark.parametrize("dtype, shape, layout", CELLS)
@pytest.mark.parametrize("name", FILTERS)
def test_filters(name, dtype, shape, layout):
    assert filter_excess(name, shape, layout, dtype, "cuda") <= 1


@pytest.mark.parametrize("dtype, shape, layout", CELLS)
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_rectifier(limit, dtype, shape, layout):
    assert rectifier_excess(limit, shape, layout, dtype, "cuda") <= 1


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks(name):
    assert network_error(name, "cuda") <= NETWORKS[name][0]


def test_maps_of_more_numbers_than_an_int32_counts():
    """The far end of maps of 2^31 + 2^25 numbers, 4.1 GiB each in bf16."""
    if torch.cuda.mem_get_info()[0] < 14 << 30:
        pytest.skip("needs 14 GiB of the GPU's memory")
    x = torch.zeros(1, 65, 8192, 4096, dtype=torch.bfloat16, device="cuda")
    x[0, -1, -8:, -8:] = torch.arange(64, device="cuda").view(8, 8) / 8
    corner = x[:, -1:, -16:, -16:].double()
    y = fused.resample(x, torch.ones(4, 4, device="cuda"), fused.Geometry(1, 1, 1, 8191, 4095))
    expected = torch.nn.functional.conv2d(corner, corner.new_ones(1, 1, 4, 4), padding=1)
    assert torch.equal(y[:, -1:, -8:, -8:], expected[:, :, -8:, -8:].to(x.dtype))
    y = fused.rectify(x, x.new_full((65,), -1), 0.25, 4.0)
    expected = torch.nn.functional.leaky_relu(corner - 1, 0.25).clamp(-4, 4)
    assert torch.equal(y[:, -1:, -16:, -16:], expected.to(x.dtype))


def test_stylegan2_trains_with_the_kernels(tmp_path):
    rows = train(
        tmp_path / "run", "--config", "launch/recipes/stylegan2_256.yaml", "data.kind=synthetic", "data.root=null",
        "total_nimg=1024", "report_nimg=256", "sample_nimg=1024", "checkpoint_nimg=1024",
    )  # fmt: skip
    check(rows)
    log = (tmp_path / "run" / "logs" / "rank00000.log").read_text()
    assert log.count("filters and rectifiers of feature maps: Triton kernels") == 1


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("num", kernels.DRAWN)
def test_random_numbers(kind, num):
    """Uniform numbers bit for bit those of a CPU; normal ones within a rounding or two."""
    assert kernels.draw_excess(kind, num) <= 1

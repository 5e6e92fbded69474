"""Each of a host's ranks may see its own GPU alone."""

import pytest

from bigsgan.config import NETWORKS
from bigsgan.runtime import gpus
from tests.tiny import tiny_plan, zero

RANK = {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}
ENVIRONMENTS = {
    "deepspeed": ({**RANK, "LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}, "6"),
    "torchrun": ({**RANK, "LOCAL_WORLD_SIZE": "4"}, "2"),
    "srun, all visible": ({**RANK, "LOCAL_SIZE": "3", "CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b, GPU-c"}, "GPU-c"),
    "fewer GPUs than ranks": ({**RANK, "LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2"}, None),
    "fewer on the machine": ({**RANK, "LOCAL_SIZE": "5"}, None),
    "one rank on each host": ({**RANK, "LOCAL_RANK": "0", "LOCAL_SIZE": "1"}, None),
    "no launcher": ({"LOCAL_RANK": "x", "LOCAL_SIZE": "4"}, None),
    "CPUs asked for": ({**RANK, "LOCAL_SIZE": "4", "DS_ACCELERATOR": "cpu"}, None),
    "none visible": ({**RANK, "LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": ""}, None),
}


@pytest.fixture(autouse=True)
def four_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "DEVICES", tmp_path)
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()


@pytest.mark.parametrize("environment, device", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_a_rank_sees_its_own_device(environment, device):
    num_ranks = environment.get("LOCAL_SIZE") or environment["LOCAL_WORLD_SIZE"]
    own = {"LOCAL_RANK": "0", "LOCAL_SIZE": "1", "LOCAL_WORLD_SIZE": num_ranks}
    assert gpus.own_device(environment) == ({} if device is None else {"CUDA_VISIBLE_DEVICES": device, **own})


def test_a_machine_without_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "none")
    assert gpus.own_device({**RANK, "LOCAL_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}) == {}


EAGER, IMPLICIT = {"CUDA_MODULE_LOADING": "EAGER"}, {"NCCL_LAUNCH_ORDER_IMPLICIT": "1"}


@pytest.mark.parametrize(
    "num, overrides, own, expected",
    [
        (2, ["engines.generator.pipeline_stages=2"], {}, EAGER),
        (2, ["engines.generator.ranks=1"], {}, EAGER),
        (2, ["engines.generator.ranks=1"], {"CUDA_MODULE_LOADING": "LAZY"}, {}),
        (2, [], {}, IMPLICIT),
        (2, [], {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, {}),
        (1, [], {}, {}),
    ],
)
def test_kernels_are_loaded_before_messages_and_collectives_keep_their_order(tmp_path, num, overrides, own, expected):
    plan = tiny_plan(tmp_path, num, overrides, dict.fromkeys(NETWORKS, zero(1)))
    assert gpus.launch_order(plan.has_messages, {"WORLD_SIZE": str(num), **own}) == expected

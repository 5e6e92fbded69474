"""A network of a checkpoint as DeepSpeed's universal checkpoint, read by DeepSpeed's own engines."""

from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from bigsgan import checkpoint
from bigsgan.checkpoint.universal import write_universal
from bigsgan.models.build import build_network
from bigsgan.runtime import comm
from tests.distributed import scenarios
from tests.tiny import both

ADAM = [
    "optimizer.generator={kind: adam, lr: 0.001, betas: [0.5, 0.99]}",
    "optimizer.discriminator={kind: adam, lr: 0.001, betas: [0.0, 0.99]}",  # keeps no first moment
]


def written(overrides, ds, network, directory):
    """Train two updates, save, write the universal checkpoint; what the network's entry held, whole, by rank."""
    run = scenarios.build(overrides, ds)
    scenarios.update(run, 2)
    scenarios.save(run, Path(directory) / "checkpoints")
    if comm.rank() == 0:
        with torch.device("meta"):
            whole = build_network(run.recipe, network)
        found = checkpoint.find(Path(directory))
        write_universal(found, network, whole, Path(directory) / "universal", {"nimg": found.nimg})
    comm.barrier()
    parts = scenarios.saved_parts(run)
    recipe = run.recipe
    scenarios.destroy(run)
    return {"parts": parts, "recipe": recipe}


def loaded(recipe, network, stage, directory):
    """What a plain DeepSpeed engine holds after it has loaded."""
    model = build_network(recipe, network)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 7.0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"load_universal": True},
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    path, client = engine.load_checkpoint(directory)
    found = {}
    for name, parameter in engine.module.named_parameters():
        kinds = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
        found[name] = {"master": safe_get_full_fp32_param(parameter), **kinds}
        found[name] = {kind: value.flatten().clone().numpy() for kind, value in found[name].items()}
    steps = {float(state["step"]) for state in engine.optimizer.optimizer.state.values() if "step" in state}
    buffers = {name: value.numpy() for name, value in client["buffers"].items()}
    found = {"path": path, "nimg": client["nimg"], "steps": steps, "values": found, "buffers": buffers}
    engine.destroy()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("network, saved_at", [("discriminator", 3), ("generator", 1)])
def test_deepspeed_loads_it(ranks, tmp_path, network, saved_at, stage):
    by_rank = ranks(2).run(written, ADAM, both(saved_at), network, str(tmp_path))
    own = scenarios.whole_values([rank["parts"] for rank in by_rank])
    (found, _) = ranks(2).run(loaded, by_rank[0]["recipe"], network, stage, str(tmp_path / "universal"))
    assert found["nimg"] > 0
    assert found["steps"] == {2.0}
    moments = ["exp_avg", "exp_avg_sq"] if network == "generator" else ["exp_avg_sq"]
    kept = tuple(f"{network}/{kind}/" for kind in ["master", *moments])
    assert {name for name in own if name.startswith(kept)} == {k + name for k in kept for name in found["values"]}
    for name, values in found["values"].items():
        assert abs(values["exp_avg_sq"]).max() > 0
        for kind, value in values.items():
            expected = own.get(f"{network}/{kind}/{name}", np.zeros_like(value))
            assert (value == expected).all(), (name, kind)
    for name, value in found["buffers"].items():
        assert (value.flatten() == own[f"{network}/buffer/{name}"]).all(), name

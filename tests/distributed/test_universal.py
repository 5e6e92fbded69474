"""A network as DeepSpeed's universal checkpoint: ours, read by DeepSpeed's own engines, and theirs, read by us."""

import argparse
from pathlib import Path

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from bigsgan import checkpoint
from bigsgan.checkpoint.universal import write_universal
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from bigsgan.runtime import comm
from bigsgan.weights.universal import Folder
from tests.distributed import scenarios
from tests.tiny import both, tiny_recipe

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


def trained(recipe, directory, stage):
    """Train a discriminator in a plain engine of DeepSpeed, and convert its checkpoint; what the engine holds."""
    network = build_network(recipe, "discriminator")
    initialize(network, 3)
    model = torch.nn.ModuleDict({"critic": network})
    model.forward = lambda images, labels: network(images, labels)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
    }
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    generator = torch.Generator().manual_seed(comm.rank())
    for _ in range(3):
        images, labels = torch.randn(2, 1, 16, 16, generator=generator), torch.randint(10, (2,), generator=generator)
        logits = engine(images, labels)
        engine.backward(logits.square().mean() + logits.mean())
        engine.step()
    engine.save_checkpoint(f"{directory}/theirs", tag="global_step3")
    comm.barrier()
    if comm.rank() == 0:
        folders = {"input_folder": f"{directory}/theirs/global_step3", "output_folder": f"{directory}/universal/step3"}
        workers = {"num_extract_workers": 1, "num_merge_workers": 1}
        choices = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
        ds_to_universal.main(argparse.Namespace(**folders, **workers, **choices))
    comm.barrier()
    found = {}
    for name, parameter in network.named_parameters():
        kinds = {kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")}
        found[name] = {"master": safe_get_full_fp32_param(parameter), **kinds}
        found[name] = {kind: value.clone().numpy() for kind, value in found[name].items()}
    buffers = {name: value.numpy() for name, value in checkpoint.saved_buffers(network).items()}
    engine.destroy()
    return found, buffers


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
def test_we_load_what_deepspeed_trained(ranks, tmp_path, stage):
    recipe = tiny_recipe(tmp_path)
    ((values, buffers), _) = ranks(2).run(trained, recipe, str(tmp_path), stage)
    with torch.device("meta"):
        network = build_network(recipe, "discriminator")
    found = Folder("--discriminator", tmp_path / "universal").read("discriminator", network)
    assert found.moments is not None
    assert found.moments.steps == 3
    assert found.unknown == []
    assert found.state.keys() == values.keys() | buffers.keys()
    for name, value in buffers.items():
        assert (found.state[name].numpy() == value).all(), name
    for name, kinds in values.items():
        assert abs(kinds["exp_avg_sq"]).max() > 0
        ours = {"master": found.state[name], **{kind: each[name] for kind, each in found.moments.values.items()}}
        for kind, value in kinds.items():
            assert (ours[kind].numpy() == value.reshape(ours[kind].shape)).all(), (name, kind)

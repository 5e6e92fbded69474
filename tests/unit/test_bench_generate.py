"""`bigsgan bench generate` on tiny generators: the cases, what differs, and cases that cannot run."""

import json

import pytest
import torch

from bigsgan.bench import generate
from bigsgan.bench.generate import Cases, measured
from bigsgan.cli import main
from bigsgan.models.build import build_network, initial_seed
from bigsgan.models.network import initialize
from bigsgan.runtime import comm
from tests.tiny import TINY_GAMES, tiny_recipe


def cases(tmp_path, *overrides, **changes):
    recipe = tiny_recipe(tmp_path, *overrides)
    network = build_network(recipe, "generator")
    initialize(network, initial_seed(recipe, "generator"))
    asked = Cases([1, 3], ["fp32", "bf16"], ["eager"], warmup=1, steps=4)
    return measured(network, recipe, asked._replace(**changes))


@pytest.mark.parametrize(
    "family", ["stylegan2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("biggan", "pix2pix", "r3gan"))]
)
def test_precisions_and_batches(tmp_path, family):
    found = cases(tmp_path, *TINY_GAMES.get(family, []))
    assert [(each["precision"], each["batch"]) for each in found] == [
        ("fp32", 1),
        ("fp32", 3),
        ("bf16", 1),
        ("bf16", 3),
    ]
    for each in found:
        assert each["p50_seconds"] <= each["p90_seconds"] <= each["p99_seconds"]
        assert each["host_peak_bytes"] > 100 * 2**20
        assert (each["difference"] == 0) == (each["precision"] == "fp32")
        assert each["difference"] < 0.5


def test_a_case_that_fails_says_why_and_the_others_go_on(tmp_path, monkeypatch):
    def no_compiler(network, dynamic):
        def fail(*inputs):
            raise RuntimeError("InvalidCxxCompiler: no working C++ compiler\nsecond line")

        return fail

    monkeypatch.setattr(torch, "compile", no_compiler)
    found = cases(tmp_path, modes=["compiled", "eager"], precisions=["fp32"], batches=[1])
    assert found[0]["reason"] == "InvalidCxxCompiler: no working C++ compiler"
    assert found[1]["difference"] == 0


@pytest.mark.parametrize("part", ["_inputs", "_reference_images"])
def test_what_surrounds_a_case_may_lack_memory_too(tmp_path, monkeypatch, part):
    whole = getattr(generate, part)

    def limited(*args):
        if args[1] == 3 or (isinstance(args[1], tuple) and len(args[1][0]) == 3):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")
        return whole(*args)

    monkeypatch.setattr(generate, part, limited)
    found = cases(tmp_path, batches=[1, 3, 2], precisions=["fp32"])
    assert ["reason" in each for each in found] == [False, True, False]
    assert "CUDA out of memory. Tried to allocate 2 GiB" in found[1]["reason"]


def test_the_peak_begins_after_the_reference(tmp_path, monkeypatch):
    order, reference = [], generate._reference_images
    monkeypatch.setattr(generate, "_reference_images", lambda *args: [order.append("reference"), reference(*args)][1])
    monkeypatch.setattr(comm, "forget_peak_memory", lambda: order.append("forget"))
    cases(tmp_path, batches=[1, 2], precisions=["bf16"])
    assert order == ["reference", "forget"] * 2


@pytest.mark.slow
def test_each_batch_is_compiled_anew(tmp_path, monkeypatch):
    """torch goes on without compiling after 8 shapes."""
    order = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: order.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda network, dynamic: [order.append("compile"), network][1])
    cases(tmp_path, batches=[1, 2, 3], precisions=["fp32"], modes=["compiled"])
    assert order == ["reset", "compile"] * 3


def test_the_command_prints_json(capsys):
    words = "generate generator.channels=2 --batches 2 --precisions fp32 --modes eager --steps 2 --json"
    assert main(["bench", *words.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["generator"] == "biggan at 16, random weights"
    assert [(case["mode"], case["batch"]) for case in found["cases"]] == [("eager", 2)]
    assert {"device", "torch", "deepspeed", "ranks", "threads", "command"} <= found.keys()


@pytest.mark.slow
def test_compiled(tmp_path):
    (found,) = cases(tmp_path, *TINY_GAMES["mlp"], modes=["compiled"], precisions=["fp32"], batches=[2])
    assert found["difference"] < 1e-4
    assert found["first_seconds"] > 10 * found["p50_seconds"]  # it was compiled

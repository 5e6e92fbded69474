"""What is said of a torch whose compiled code was not compared with plain PyTorch's."""

import pytest
import torch

from bigsgan.engines.compile_checks import check_compiler
from tests.tiny import both, tiny_plan


@pytest.mark.parametrize("version, unit, is_told", [("2.10.0+cu130", "layers", True), ("2.11.0", "layers", False)])
def test_older_torch_is_warned_of_where_code_is_compiled(tmp_path, monkeypatch, caplog, version, unit, is_told):
    monkeypatch.setattr(torch, "__version__", version)
    plan = tiny_plan(tmp_path, 1, [f"engines.generator.compile={unit}"], both(1))
    check_compiler(plan, "generator")
    check_compiler(plan, "discriminator")
    assert [
        message.startswith(f"engines.generator.compile: torch is {version}, and ") for message in caplog.messages
    ] == ([True] * is_told)


@pytest.mark.parametrize("version, is_told", [("2.11.0", True), ("2.14.1", False)])
def test_codes_need_a_newer_torch(tmp_path, monkeypatch, caplog, version, is_told):
    monkeypatch.setattr(torch, "__version__", version)
    game = (
        "data.num_classes=0",
        "generator={family: autoencoder, latent_channels: 4, bottleneck: {kind: vq, num_codes: 8}}",
    )
    plan = tiny_plan(
        tmp_path,
        1,
        [*game, "objective={l1: 1, codebook: {}, reuse_fakes: true}", "engines.generator.compile=layers"],
        both(1),
    )
    check_compiler(plan, "generator")
    assert ("wrong updates with codes" in caplog.text) == is_told

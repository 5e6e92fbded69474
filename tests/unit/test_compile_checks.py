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

"""The watchdog knows when torch compiles."""

from __future__ import annotations

import time

import torch
from torch._dynamo.backends.common import aot_autograd

from bigsgan.engines import compiling
from bigsgan.runtime.compile_clock import CLOCK


def test_time_counts_while_torch_compiles_a_pass_and_its_backward_pass():
    seen = []

    def compiler(graph, inputs):
        time.sleep(0.01)
        seen.append(CLOCK.seconds())
        return graph

    for _ in range(2):
        torch.compiler.reset()  # which takes callbacks away
        compiling._watch()
        compiling._watch()
        function = torch.compile(lambda x: (x.sin() * x).sum(), backend=aot_autograd(fw_compiler=compiler))
        x = torch.rand(3, requires_grad=True)
        function(x).backward()
        assert CLOCK.seconds() == 0
        assert torch.allclose(x.grad, x.detach().cos() * x.detach() + x.detach().sin())
    assert len(seen) == 4
    assert all(0.01 <= seconds < 60 for seconds in seen)

"""What an engine computes in an update is what `bigsgan plan` counts."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from bigsgan.config import NETWORKS
from bigsgan.models.transformer import Attention
from bigsgan.planner.counting import count_work
from tests.distributed import scenarios
from tests.tiny import tiny_plan, zero

GAT = [
    "generator={family: gat, depth: 4, width: 64, heads: 4, patch: 2, levels: 2}",
    "discriminator={family: gat, depth: 4, width: 64, heads: 4, patch: 2, levels: 2, embedding_size: 64}",
]
GAME = "loss: relativistic, reuse_fakes: true, fake_labels: data"
_SLOPE = "{weight: 0.1, form: finite_difference, check_every: 0}"
SLOPES = f"r1: {_SLOPE}, r2: {_SLOPE}"


class Counter(TorchDispatchMode):
    """Counts as FlopCounterMode does, without its hooks of modules, at which a gradient by the images raises."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if (operation := func._overloadpacket) in flop_registry:
            self.total += flop_registry[operation](*args, **(kwargs or {}), out_val=out)
        return out


def operations(overrides, ds):
    """Of one update."""
    run = scenarios.build(overrides, ds)
    for network in NETWORKS:
        for module in getattr(run.step, network).network.modules():
            if isinstance(module, Attention):
                module.exact = True  # torch counts no kernel of a CPU's
    scenarios.update(run, 1)
    with Counter() as counter:
        scenarios.update(run, 1)
    scenarios.destroy(run)
    return counter.total


@pytest.mark.parametrize(
    "objective, accumulation, passes",
    [
        pytest.param(f"{{{GAME}}}", 1, (3, 10), marks=pytest.mark.nightly),
        pytest.param(f"{{{GAME}, {SLOPES}}}", 1, (3, 16), marks=pytest.mark.nightly),
        pytest.param(f"{{{GAME}, {SLOPES}}}", 2, (4, 16), marks=pytest.mark.slow),
        pytest.param("{loss: relativistic}", 2, (4, 10), marks=pytest.mark.nightly),
    ],
)
def test_an_update_computes_what_a_plan_counts(ranks, tmp_path, objective, accumulation, passes):
    """In passes of G and D: a backward pass counts twice, once where D's gradient goes to the images alone.

    What is reused with several micro-batches is made again. The count includes the products of a backward pass
    that nothing needs, by the first layer's inputs.
    """
    overrides = [*GAT, f"objective={objective}", f"accumulation={accumulation}"]
    ds = dict.fromkeys(NETWORKS, zero(1))
    (computed,) = ranks(1).run(operations, overrides, ds)
    counted = count_work(tiny_plan(tmp_path, 1, overrides, ds))
    batch, (g, d) = 8, (counted[network]["forward_flop"] for network in NETWORKS)
    assert counted["update_flop"] + counted["penalties_flop"] == passes[0] * g + passes[1] * d
    assert computed / batch == pytest.approx(passes[0] * g + passes[1] * d, rel=0.04)

"""Penalties on a part of D's batch, in every layout, against the reference, which uses the same images."""

import pytest

from bigsgan.config import both_engines
from tests.distributed.test_equivalence import check
from tests.distributed.test_forward_mode import LAYOUTS as ALL
from tests.tiny import both

HALF = "batch_shrink: 2"
FINITE = f"{HALF}, form: finite_difference, sigma: 0.5"
TWICE, FORWARD = (f"{HALF}, method: {method}" for method in ("double_backward", "forward_mode"))
PENALTIES = {
    "finite differences": f"r1: {{weight: 0.2, {FINITE}}}, r2: {{weight: 0.1, antithetic: true, {FINITE}}}",
    "lazy R1": f"r1: {{weight: 0.2, every: 2, {TWICE}}}",
    "R1 and R2": f"r1: {{weight: 0.2, {TWICE}}}, r2: {{weight: 0.1, {TWICE}}}",
    "lazy R1 in forward mode": f"r1: {{weight: 0.2, every: 2, {FORWARD}}}",
    "R1 and R2 in forward mode": f"r1: {{weight: 0.2, {FORWARD}}}, r2: {{weight: 0.1, {FORWARD}}}",
    "gradient penalty": f"loss: wasserstein, gradient_penalty: {{weight: 1, {TWICE}}}",
    "both forms": f"r1: {{weight: 0.2, {FINITE}}}, gradient_penalty: {{weight: 0.3, {HALF}}}",
}
LAYOUTS = {
    **{name: ALL[name] for name in ("zero0", "zero1", "zero2", "zero3", "pipelines", "D in stages", "four stages")},
    "one rank": (1, [], both(1)),
    "ranks of its own": (2, ["engines.generator.ranks=1"], both(1)),
    "recomputed layers": (2, both_engines("activation_checkpointing=true"), both(1)),
}
CHOSEN = [
    ("zero1", "finite differences"),
    ("zero3", "R1 and R2"),
    ("zero3", "R1 and R2 in forward mode"),
    ("pipelines", "both forms"),
    ("ranks of its own", "lazy R1"),
]
"""Cells in which most parts meet."""
REST = [
    (layout, penalty)
    for layout, (_, options, _) in LAYOUTS.items()
    for penalty in PENALTIES
    if (layout, penalty) not in CHOSEN and not ("stages" in str(options) and "double" in PENALTIES[penalty])
]


@pytest.mark.parametrize(
    "layout, penalty",
    [
        *(pytest.param(*cell, marks=pytest.mark.slow) for cell in CHOSEN),
        *(pytest.param(*cell, marks=pytest.mark.nightly) for cell in REST),
    ],
)
def test_matrix(ranks, layout, penalty):
    num, options, ds = LAYOUTS[layout]
    check(ranks(num), [*options, f"objective={{{PENALTIES[penalty]}}}", "accumulation=2"], ds, 2)

"""What `bigsgan plan` says of the networks: against counts written down elsewhere, and by hand."""

import pytest

from bigsgan.cli import main
from bigsgan.config import load_recipe, plan_run
from bigsgan.config.deepspeed_file import REPOSITORY
from bigsgan.plan import count_network, describe_networks
from tests.tiny import tiny_plan

RECIPES = REPOSITORY / "launch" / "recipes"

WIDTHS = (16, 16, 8, 4, 2, 1)
SHORTCUTS = sum(1.5 * 96**2 * WIDTHS[i] * WIDTHS[i + 1] * (8 << i) ** 2 for i in range(5)) / 1e9


@pytest.mark.parametrize(
    "name, batch, expected",
    [
        # Millions of parameters and forward GFLOP an image, counted on the public classes. Those of BigGAN enlarge
        # before the shortcuts' convolutions, which costs three quarters of 2 C_in C_out H W more.
        ("biggan128_imagenet", 1, {"generator": (70.43, 42.5 - SHORTCUTS), "discriminator": (87.98, 21.9)}),
        ("biggan_deep128_imagenet", 1, {"generator": (50.24, 18.1), "discriminator": (34.59, 18.5)}),
        ("stylegan2_256", 8, {"generator": (24.77, 30.1), "discriminator": (24.00, 31.3)}),
    ],
)
def test_known_networks(name, batch, expected):
    recipe = load_recipe(RECIPES / f"{name}.yaml", [f"batch={batch}", "accumulation=1"])
    plan = plan_run(recipe, 1)
    for network, (millions, gflop) in expected.items():
        numel, flops = count_network(plan, network)
        assert numel / 1e6 == pytest.approx(millions, abs=0.005)
        assert flops / 1e9 == pytest.approx(gflop, rel=0.04)


def test_a_perceptron_by_hand(tmp_path):
    options = [
        "generator={family: mlp, latent_size: 10, width: 20, depth: 2}", "data.num_classes=0",
        "discriminator={family: mlp, width: 30, depth: 1}", "objective.d_steps=2",
    ]  # fmt: skip
    plan = tiny_plan(tmp_path, 1, options, {})
    g, d = 2 * (10 * 20 + 20 * 20 + 20 * 256), 2 * (256 * 30 + 30)
    assert count_network(plan, "generator") == (g // 2 + 20 + 20 + 256, g)
    assert count_network(plan, "discriminator") == (d // 2 + 30 + 1, d)
    lines = describe_networks(plan).splitlines()
    assert lines[1].split() == ["generator", f"{g // 2 + 296:,}", f"{g / 1e9:.3f}"]
    assert lines[3].split()[2] == f"{(5 * g + 14 * d) / 1e9:.3f}"


def test_what_a_choice_buys_is_seen(capsys):
    def parameters(*overrides):
        assert main(["plan", *overrides]) == 0
        return [int(line.split()[1].replace(",", "")) for line in capsys.readouterr().out.splitlines()[1:3]]

    standard = parameters()
    for block in ("depthwise_separable", "grouped"):
        light = parameters(f"generator.block={block}", f"discriminator.block={block}")
        assert all(few < many for few, many in zip(light, standard, strict=True))

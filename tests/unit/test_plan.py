"""What `bigsgan plan` says of the networks: against counts written down elsewhere, and by hand."""

import json
from itertools import pairwise

import pytest

from bigsgan.cli import main
from bigsgan.config import load_recipe, plan_run
from bigsgan.plan import describe_networks
from bigsgan.planner import counting
from bigsgan.planner.counting import count_heads, count_layers, count_network, count_work
from tests import REPOSITORY
from tests.tiny import both, tiny_plan

RECIPES = REPOSITORY / "launch" / "recipes"

# BigGAN-128 by resolution, in units of 96 channels: G's blocks from 4x4 on, D's from 64x64 on.
G_SHORTCUTS = sum(2 * 96**2 * a * b * (8 << i) ** 2 for i, (a, b) in enumerate(pairwise((16, 16, 8, 4, 2, 1))))
D_SHORTCUTS = sum(2 * 96**2 * a * b * (64 >> i) ** 2 for i, (a, b) in enumerate(pairwise((1, 2, 4, 8, 16))))
# StyleGAN2-256: channels by resolution.
STYLEGAN2 = {4: 512, 8: 512, 16: 512, 32: 512, 64: 256, 128: 128, 256: 64}
IMAGE_FILTERS = sum(2 * 3 * 16 * size**2 for size in list(STYLEGAN2)[1:])
SKIP_FILTERS = {size: 2 * 16 * STYLEGAN2[size] for size in list(STYLEGAN2)[1:]}  # operations of a pixel
DEMODULATION = sum(2 * b * (a + b) for a, b in pairwise(STYLEGAN2.values())) + 2 * 512**2


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, options, expected",
    [
        # Parameters, and operations of a forward pass for one image, counted by torch's FlopCounterMode on the public
        # classes: those of two images less those of one, which leaves out the power iteration. G enlarges before the
        # shortcuts' 1x1 convolutions there, and D's second block and those behind it shrink after them; both commute,
        # and cost four times as much.
        (
            "biggan128_imagenet",
            ["batch=1"],
            {
                "generator": (70_433_988, 42_243_048_960 - G_SHORTCUTS * 3 // 4),
                "discriminator": (87_982_370, 21_673_282_560 - D_SHORTCUTS * 3 // 4),
            },
        ),
        (
            "biggan_deep128_imagenet",
            ["batch=1"],
            {"generator": (50_244_484, 17_918_197_760), "discriminator": (34_590_210, 18_417_192_960)},
        ),
        # Its filters there multiply the zeros between pixels when they enlarge an image, and in D's shortcuts compute
        # (size - 1)^2 pixels to keep a quarter of size^2. The demodulation's sums of squares are not a matrix product.
        (
            "stylegan2_256",
            ["batch=8", "augmentation=null"],
            {
                "generator": (24_767_458, 30_071_306_240 - IMAGE_FILTERS * 3 // 4 + DEMODULATION),
                "discriminator": (
                    24_001_089,
                    31_275_103_232 - sum(n * ((size - 1) ** 2 - size**2 // 4) for size, n in SKIP_FILTERS.items()),
                ),
            },
        ),
    ],
)
def test_known_networks(name, options, expected):
    plan = plan_run(load_recipe(RECIPES / f"{name}.yaml", [*options, "accumulation=1"]), 1)
    assert {network: count_network(plan, network) for network in expected} == expected


def test_a_perceptron_by_hand(tmp_path):
    options = [
        "generator={family: mlp, latent_size: 10, width: 20, depth: 2}", "data.num_classes=0",
        "discriminator={family: mlp, width: 30, depth: 1}", "objective.d_steps=2",
    ]  # fmt: skip
    plan = tiny_plan(tmp_path, 1, options, {})
    g, d = 2 * (10 * 20 + 20 * 20 + 20 * 256), 2 * (256 * 30 + 30)
    assert count_network(plan, "generator") == (g // 2 + 20 + 20 + 256, g)
    assert count_network(plan, "discriminator") == (d // 2 + 30 + 1, d)
    lines = describe_networks(plan, count_work(plan)).splitlines()
    assert lines[1].split() == ["generator", f"{g // 2 + 296:,}", f"{g / 1e9:.3f}"]
    assert lines[3].split()[2] == f"{(5 * g + 14 * d) / 1e9:.3f}"
    assert len(lines) == 4  # no batch norm


def test_what_a_choice_buys_is_seen(capsys):
    def parameters(*overrides):
        assert main(["plan", *overrides]) == 0
        return [int(line.split()[1].replace(",", "")) for line in capsys.readouterr().out.splitlines()[1:3]]

    standard = parameters()
    for block in ("depthwise_separable", "grouped"):
        light = parameters(f"generator.block={block}", f"discriminator.block={block}")
        assert all(few < many for few, many in zip(light, standard, strict=True))


def test_a_number_of_gpus_alone_is_told_what_is_missing(capsys):
    hint = "To see which layouts fit into these GPUs, add --gpu-memory GIB."
    for options, hinted in ((["--gpus", "8"], True), ([], False), (["--gpus", "8", "--json"], False)):
        assert main(["plan", *options]) == 0
        assert (hint in capsys.readouterr().out.splitlines()) == hinted


@pytest.mark.parametrize(
    "options, where",
    [
        ([], "all ranks"),
        (["batch_statistics=host"], "the ranks of each host"),
        pytest.param(
            ["batch_statistics=host", "--gpus", "4", "--gpu-memory", "1", "--nodes", "2"],
            "the 2 ranks of each host",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_over_which_ranks_batch_norm_takes_its_statistics(options, where, capsys):
    assert main(["plan", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"batch norm of the generator: statistics over {where}" in lines
    if "--nodes" in options:  # a communicator for gradients, one for all else, one for the statistics: 384 MiB each
        (whole,) = (line for line in lines if line.startswith("ZeRO 0  "))
        assert whole.endswith("  3 (1152.00)  fits")


def gat_parameters(depths, width, heads):
    """Of G and D by hand, at patch 2 on latents 4x32x32 of 1,000 classes, with 4 levels."""
    inside = int(8 / 3 * width)
    block = 4 * width**2 + 4 * width + 2 * width // heads + 3 * width * inside + 2 * inside + width
    mapping = 1000 * 64 + (128 + 1) * width + (width + 1) * width
    g = mapping + depths[0] * (block + 4 * width * (width + 1)) + 4 * (width * (width + 1) + 16 * (width + 1))
    judged = width + (width + 1) * 2048 + 1000 * 2048 + 2 * (2048 + 1) * 2048
    return g, (64 + 1) * width + width + depths[1] * (block + 4 * width) + judged


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, depths, width, heads", [("gat_xl_imagenet256", (28, 28), 1152, 16), ("gat_8b", (32, 40), 4096, 32)]
)
def test_gat_of_published_and_of_great_size(name, depths, width, heads, capsys):
    assert main(["plan", "--config", str(RECIPES / f"{name}.yaml"), "--gpus", "8", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    g, d = counted["generator"], counted["discriminator"]
    assert (g["parameters"], d["parameters"]) == gat_parameters(depths, width, heads)
    if name == "gat_8b":
        assert (g["parameters"], d["parameters"]) == (8_676_320_448, 8_074_200_352)
    else:
        # Published with D's heads for the features of a teacher, of 257 tokens: 237 and 242 GFLOP.
        taught = load_recipe(RECIPES / f"{name}.yaml", ["objective.teacher={path: dinov2.pt2}"])
        heads = count_heads(plan_run(taught, 8))
        assert heads == 2 * 257 * (1152 * 2048 + 2048**2 + 2048 * 768)
        assert g["forward_flop"] == pytest.approx(237e9, rel=3e-3)
        assert d["forward_flop"] + heads == pytest.approx(242e9, rel=3e-3)
        # The public loop makes images twice, and for G's update goes back through the fakes alone: 4 of G and 15 of D.
        assert 4 * g["forward_flop"] + 15 * (d["forward_flop"] + heads) == pytest.approx(4.6e12, rel=1e-2)
    # Images of several micro-batches are made again for G's update.
    made = 2 if name == "gat_8b" else 1
    assert counted["update_flop"] == (made + 2) * g["forward_flop"] + 10 * d["forward_flop"]
    assert counted["penalties_flop"] == 6 * d["forward_flop"]


@pytest.mark.slow
@pytest.mark.parametrize("size, published", [("m", 46), ("h", 167)])
def test_operations_of_cat(size, published, capsys):
    """Published are GFLOP of multiply-adds; D, which is the same in both, counts each of its four sizes for itself."""
    assert main(["plan", "--config", str(RECIPES / f"cat_{size}_imagenet256.yaml"), "--gpus", "8", "--json"]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert round(counted["generator"]["forward_flop"] / 2e9) == published
    tokens, width, inside = [1 + (side // 2) ** 2 for side in (4, 8, 16, 32)], 768, 2048
    of_tokens = sum(tokens) * (4 * width**2 + 3 * width * inside) + 2 * width * sum(num**2 for num in tokens)
    ends = sum(num - 1 for num in tokens) * 16 * width + 4 * width * 2048 + 2 * 2048**2
    assert counted["discriminator"]["forward_flop"] == pytest.approx(2 * (12 * of_tokens + ends), rel=1e-3)
    taught = load_recipe(RECIPES / f"cat_{size}_imagenet256.yaml", ["objective.teacher={path: dinov2.pt2}"])
    assert count_heads(plan_run(taught, 8)) == 2 * tokens[-1] * (width * 2048 + 2048**2 + 2048 * 768)


@pytest.mark.slow
def test_how_long_a_run_takes(capsys):
    config = ["plan", "--config", str(RECIPES / "gat_xl_imagenet256.yaml"), "--gpus", "64"]
    assert main([*config, "--mfu", "0.4", "--peak-tflops", "989", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    images = 64 * 0.4 * 989e12 / (found["update_flop"] + found["penalties_flop"])
    assert found["images_per_second"] == pytest.approx(images)
    assert found["update_seconds"] == pytest.approx(512 / images)
    assert found["days"] == pytest.approx(76_870_000 / images / 86_400)
    assert main([*config, "--mfu", "0.4", "--peak-tflops", "989"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("64 GPUs at 40% of 989 TFLOP/s: ")
    assert last.endswith(f"{76_870_000 / images / 3_600:.3g} hours for 76,870,000 images")


@pytest.mark.parametrize(
    "options, message",
    [
        (["--mfu", "0.4"], "--mfu: needs --peak-tflops; add --peak-tflops"),
        (["--peak-tflops", "989"], "--peak-tflops: needs --mfu; add --mfu"),
        (["--mfu", "40", "--peak-tflops", "989"], "--mfu: must be greater than 0 and at most 1, got 40"),
        (["--mfu", "nan", "--peak-tflops", "989"], "--mfu: must be greater than 0 and at most 1, got nan"),
        (["--mfu", "0.4", "--peak-tflops", "inf"], "--peak-tflops: must be a positive number, got inf"),
        (["--mfu", "0.4", "--peak-tflops", "9", "--pipeline"], "--mfu: cannot be combined with --pipeline"),
        (["--mfu", "0.4", "--peak-tflops", "9", "--gpu-memory", "80"], "--mfu: cannot be combined with --gpu-memory"),
    ],
)
def test_speeds_that_are_none(options, message, capsys):
    assert main(["plan", *options]) == 2
    assert capsys.readouterr().err.startswith(f"bigsgan: {message}")


@pytest.mark.slow
def test_each_recipe_and_micro_batch_has_its_own_counts(tmp_path, monkeypatch):
    """Whatever was counted before: as in a new process."""
    games = [[], ["batch=16"], ["discriminator.channels=8"], ["augmentation={kind: diffaugment}"]]
    plans = [tiny_plan(tmp_path, 1, options, both(0)) for options in games]
    together = [count_layers(plan, "discriminator") for plan in plans]
    for plan, found in zip(plans, together, strict=True):
        monkeypatch.setattr(counting, "_FLOP_OF_LAYERS", {})
        assert count_layers(plan, "discriminator") == found
    assert together[2] != together[0]

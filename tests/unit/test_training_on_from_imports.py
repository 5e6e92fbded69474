"""Training on from an import: the settings of the nearest recipe, the images seen, and the EMA that was imported."""

import json
import pickle
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from bigsgan import trainer
from bigsgan.cli import main
from bigsgan.config import plan_run
from bigsgan.config.run_directory import read_saved_recipe
from bigsgan.importing import make_recipe
from bigsgan.inference.trained import open_trained
from bigsgan.models.augment import AdaptiveAugment
from bigsgan.monitor import RankLog
from bigsgan.training import opening
from bigsgan.training.directory import Traces
from bigsgan.training.initial_weights import InitialWeights
from bigsgan.training.opening import Opened
from bigsgan.training.script import Command
from bigsgan.training.start import Start
from bigsgan.training.stopping import StopRequests
from bigsgan.weights.sources import Found
from tests.snapshots import write_options, write_snapshot
from tests.tiny import tiny_recipe
from tests.unit.test_r3gan_pickle import classes, snapshot

__all__ = ["classes"]

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "data" / "r3gan_unconditional.safetensors"
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "family, resolution, num_classes, name, r1",
    [
        ("stylegan2", 32, 10, "stylegan2_cifar", 0.01),
        ("stylegan2", 256, 0, "stylegan2_256", 1.0),
        ("stylegan2", 1024, 0, "stylegan2_1024", 2.0),
        ("r3gan", 32, 10, "r3gan_cifar10", 0.05),
        ("r3gan", 32, 1000, "r3gan_imagenet32", None),
        ("r3gan", 64, 0, "r3gan_ffhq64", 2.0),
        ("r3gan", 64, 1000, "r3gan_imagenet64", None),
        ("r3gan", 256, 0, "r3gan_ffhq256", None),
    ],
)
def test_settings_are_those_of_the_nearest_recipe(tmp_path, family, resolution, num_classes, name, r1):
    widths = {"widths": [8] * (resolution.bit_length() - 2)}
    widths |= {"cardinalities": widths["widths"], "blocks": [1] * len(widths["widths"])}
    sections = {network: {"family": family, **(widths if family == "r3gan" else {})} for network in ("generator",)}
    if family == "stylegan2":
        sections["discriminator"] = {"family": family, "mbstd_group": 4}
    found = Found({"resolution": resolution, "num_classes": num_classes, "image_channels": 3}, sections, {})
    recipe, text = make_recipe(found, tmp_path / "run")
    assert text.startswith(f"settings:      from launch/recipes/{name}.yaml, the nearest to {resolution}x{resolution} ")
    if r1 is not None:
        assert recipe.objective.r1.weight == r1
    if family == "r3gan":
        has_classes = num_classes > 0
        assert (recipe.objective.reuse_fakes, recipe.objective.fake_labels == "data") == (has_classes, has_classes)
    if name == "stylegan2_cifar":
        assert recipe.objective.path_length is None
        assert recipe.generator.style_mixing == 0
        assert recipe.ema.half_life_nimg == 500_000
    elif family == "stylegan2":
        assert recipe.objective.path_length.batch_shrink == 2  # the default of the published loss
    assert (recipe.ema.start_nimg, recipe.ema.ramp, recipe.ema.warmup_nimg) == (0, None, 0)


def trained_on(run: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> str:
    """Train an imported run on images that are drawn; return what it said."""
    data = ["data.kind=synthetic", "data.root=null", "data.dataset=null", "checkpoint_nimg=8"]
    command = [sys.executable, *launcher, "launch/train.py", "--config", str(run / "config.yaml"), *data, *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_ema_and_the_images_seen_are_kept(classes, tmp_path):
    weights, run = tmp_path / "network-snapshot-000003.pkl", tmp_path / "run"
    weights.write_bytes(pickle.dumps(snapshot(classes, load_file(RECORD), [], [], 3_000)))
    assert main(["import", "--from", "r3gan", "--weights", str(weights), "--out", str(run)]) == 0
    before = [open_trained(run, "generator", live, None, CPU).network for live in (False, True)]
    half_life = 64
    still = ["optimizer.generator.lr=1e-12", "optimizer.generator.final_lr=1e-12"]
    size = ["data.horizontal_flip=false", "batch=8", "total_nimg=3016"]
    trained_on(run, *size, f"ema={{half_life_nimg: {half_life}}}", *still)
    ema_now, live = (open_trained(run, "generator", live, None, CPU) for live in (False, True))
    assert ema_now.nimg == live.nimg == 3016
    share = 0.5 ** (2 * 8 / half_life)  # of the imported EMA, after two updates; the generator stands still
    ema, still = (dict(network.named_parameters()) for network in before)
    for name, tensor in ema_now.network.named_parameters():
        expected = share * ema[name] + (1 - share) * still[name]
        torch.testing.assert_close(tensor, expected, atol=1e-5, rtol=1e-5)
    for name, tensor in live.network.named_parameters():
        torch.testing.assert_close(tensor, still[name], atol=1e-6, rtol=0)


@pytest.mark.slow
def test_a_stylegan_snapshot_is_trained_on_with_its_settings(tmp_path):
    """The EMA, p, the images seen and what depends on them follow the snapshot and the file beside it."""
    ema = write_snapshot(tmp_path / "network-snapshot-000003.pkl")
    write_options(tmp_path, ada_interval=1, ada_kimg=1, ada_target=0.99)
    run, weights = tmp_path / "run", str(tmp_path / "network-snapshot-000003.pkl")
    assert main(["import", "--from", "stylegan2-ada", "--weights", weights, "--out", str(run)]) == 0
    trained_on(run, "total_nimg=3016", "report_nimg=8")
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reports = [report for report in reports if "ema_decay" in report]
    assert [report["nimg"] for report in reports] == [3_008, 3_016]
    expected = ema["synthesis.b8.conv0.weight"]
    for report in reports:
        decay = 0.5 ** (8 / (0.05 * report["nimg"]))  # the ramp, as the images seen are few for a half-life of 2,500
        assert report["ema_decay"] == pytest.approx(decay)
        assert (report["lr/generator"], report["lr/discriminator"]) == (0.002, 0.003)
        live = dict(open_trained(run, "generator", True, report["nimg"], CPU).network.named_parameters())
        expected = decay * expected + (1 - decay) * live["layers.2.conv0.weight"].detach()
    found = dict(open_trained(run, "generator", False, None, CPU).network.named_parameters())
    torch.testing.assert_close(found["layers.2.conv0.weight"].detach(), expected, atol=1e-6, rtol=1e-5)
    assert (found["layers.2.conv0.weight"] - ema["synthesis.b8.conv0.weight"]).abs().max() > 1e-3
    d = open_trained(run, "discriminator", False, None, CPU).network
    (p,) = (module.p for module in d.modules() if isinstance(module, AdaptiveAugment))
    moved = (float(p) - 0.37) / 0.008  # an adjustment is 8 images of 1,000
    assert abs(moved) == pytest.approx(2, abs=1e-3) or abs(moved) == pytest.approx(0, abs=1e-3)


@pytest.mark.slow
def test_what_freeze_d_kept_stays(tmp_path):
    write_snapshot(tmp_path / "x.pkl", freeze_layers=4)
    run, weights = tmp_path / "run", str(tmp_path / "x.pkl")
    assert main(["import", "--from", "stylegan2-ada", "--weights", weights, "--out", str(run)]) == 0
    for _ in range(2):  # the second start finds the run complete, with the section that it began with
        trained_on(run, "batch=8", "total_nimg=16")
    before, after = (
        dict(open_trained(run, "discriminator", False, nimg, CPU).network.named_parameters()) for nimg in (0, 16)
    )
    moved = {name.split(".")[1] for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {"1"}
    assert {name.split(".")[1] for name in before} == {"0", "1"}


@pytest.mark.slow
def test_fp16_of_a_snapshot_is_float32_on_a_cpu(tmp_path):
    """Said once for each network, and the numbers are those of a recipe without half precision, in pipelines too."""
    write_snapshot(tmp_path / "x.pkl")
    found = {}
    for half, stages in ((True, []), (False, []), (True, ["engines.generator.pipeline_stages=2"])):
        run = tmp_path / f"{half}{len(stages)}"
        arguments = ["--weights", str(tmp_path / "x.pkl"), "--out", str(run)]
        assert main(["import", "--from", "stylegan2-ada", *arguments]) == 0
        assert read_saved_recipe(run).generator.computes_in == "fp16"
        more = stages if half else ["generator.half_resolutions=0", "discriminator.half_resolutions=0"]
        launcher = ("-m", "torch.distributed.run", "--nproc-per-node=2") if stages else ()
        said = trained_on(run, "batch=8", "total_nimg=8", *more, launcher=launcher)
        for network in ("generator", "discriminator"):
            line = f"{network}: layers in fp16 compute in float32, because this is a CPU"
            assert said.count(line) == half, said
        found[half, len(stages)] = dict(open_trained(run, "generator", True, None, CPU).network.named_parameters())
    for name, expected in found[False, 0].items():
        assert torch.equal(found[True, 0][name], expected), name
        torch.testing.assert_close(found[True, 1][name], expected, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.slow
def test_schedules_begin_where_the_snapshot_stood(classes, tmp_path):
    """Half-way of R3GAN's 20 M images, each scheduled number is half-way between its values."""
    weights, run = tmp_path / "x.pkl", tmp_path / "run"
    weights.write_bytes(pickle.dumps(snapshot(classes, load_file(RECORD), [], [], 10_000_000)))
    assert main(["import", "--from", "r3gan", "--weights", str(weights), "--out", str(run)]) == 0
    trained_on(run, "batch=8", "total_nimg=10000008")
    reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (report,) = (report for report in reports if "ema_decay" in report)
    assert report["nimg"] == 10_000_008
    expected = {"lr/generator": 1.25e-4, "beta2/discriminator": 0.945, "penalty_weight/r1": 0.0275}
    expected |= {"augmentation": 0.275, "ema_decay": 0.5 ** (8 / 2_500_000)}
    for name, value in expected.items():
        assert report[name] == pytest.approx(value, rel=1e-5), name


def test_an_import_that_has_seen_all_images_is_complete(tmp_path, monkeypatch, capsys):
    """As a run's own checkpoint is, and nothing is built or written."""

    class BuiltError(Exception):
        pass

    def build(*arguments):
        raise BuiltError

    recipe = tiny_recipe(tmp_path, "total_nimg=16")
    monkeypatch.setattr(opening, "build_run", build)
    out = Path(recipe.out)
    for own, nimg, expected in ((True, 16, 16), (True, 24, 24), (True, 8, None), (False, 16, None)):
        initial = InitialWeights(recipe, SimpleNamespace(nimg=nimg), live=True, own=own)
        try:
            opened = Opened(Start(initial=initial), RankLog(out, 0, print), lambda: None, Traces(out))
            monkeypatch.setattr(trainer, "opened", lambda *arguments, opened=opened: nullcontext(opened))
            with trainer.Trainer(plan_run(recipe, 1), around=Command(StopRequests(False))) as complete:
                assert complete.to_end() is None
        except BuiltError:
            nimg = None
        text = f"{out} is complete at {nimg} images; raise total_nimg to continue\n"
        assert capsys.readouterr().out == (text if expected else "")
        assert nimg == expected
    assert not (out / "config.yaml").exists()


@pytest.mark.nightly
def test_imported_codes_stay(tmp_path):
    """Those of a run whose codes began with the centres of k-means do not begin again."""
    runs, exports = [tmp_path / "run", tmp_path / "imported"], [tmp_path / f"{i}.safetensors" for i in range(2)]
    codes = [
        "generator.bottleneck={kind: vq, num_codes: 16, kmeans_steps: 3}",
        "objective.kl=0",
        "objective.codebook={}",
    ]
    short = ["total_nimg=64", "report_nimg=64", "sample_nimg=64", "checkpoint_nimg=64"]
    for number, run in enumerate(runs):
        if number:
            given = ["--weights", str(exports[0]), "--out", str(run), "optimizer.generator.lr=1e-9"]
            assert main(["import", "--from", "bigsgan", *given]) == 0
        config = ["digits_autoencoder", f"out={run}", *codes, *short] if not number else [str(run / "config.yaml")]
        done = subprocess.run(
            [sys.executable, "-m", "bigsgan", "train", "--config", *config],
            cwd=ROOT, capture_output=True, text=True, timeout=200,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert main(["export", "--run", str(run), "--live", "--out", str(exports[number])]) == 0
    before, after = (load_file(path)["layers.7.codebook"] for path in exports)
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)

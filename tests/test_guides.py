"""The guides on code of one's own: their files and commands, in a directory outside the repository.

Overrides behind the commands make the training short. What a file or a command makes is looked at afterwards.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from safetensors.torch import load_file

from bigsgan import cli
from bigsgan.config.run_directory import RECORDS_FILE
from tests.archives import write_tar
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
SHORT = [
    "total_nimg=64", "report_nimg=32", "sample_nimg=64", "checkpoint_nimg=32", "batch=16", "generator.channels=2",
    "discriminator.channels=2",
]  # fmt: skip


RUNS = "bright", "straight"


def written(page: str) -> str:
    """Write the files of a guide into the working directory; return the guide."""
    (path,) = (ROOT / "docs").glob(f"*/{page}.md")
    text = path.read_text()
    for name, content in re.findall(r'^```(?:python|yaml) title="(\S+)"\n(.*?)^```', text, re.MULTILINE | re.DOTALL):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(content)
    return text


def commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in "".join(blocks).replace("\\\n", " ").splitlines()]


def merged(words: list[str]) -> list[str]:
    """The words of a command with the last of the overrides of each key, as no key may be given twice."""
    keys = [word.partition("=")[0] if re.match(r"[\w.]+=", word) else None for word in words]
    return [word for i, word in enumerate(words) if keys[i] is None or keys[i] not in keys[i + 1 :]]


def execute(words: list[str], *more: str, status: int = 0) -> str:
    program, *rest = merged([*words, *more])
    launches = ["--master_port", str(free_port())] if program == "torchrun" else []
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [program, *launches, *rest], env=environment, text=True, timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    return done.stdout


def rows(run: str) -> list[dict]:
    return [json.loads(line) for line in Path(run, "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.slow
def test_your_images(elsewhere, capsys):
    """Classes and channels are found by a start, and again by one that would resume."""
    page = (ROOT / "docs" / "tutorials" / "your-images.md").read_text()
    check = commands(page)[0]
    for number, name in enumerate(["cat", "dog", "horse"] * 4):
        Path("photos", name).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (40, 36 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(Path("photos", name, f"{number}.png"))
    both = {"channel_base": 256, "channel_max": 8, "half_resolutions": 0, "mapping_layers": 1}
    small = [f"{network}.{key}={value}" for network in ("generator", "discriminator") for key, value in both.items()]
    small += ["generator.latent_size=8", "generator.w_size=8", "data.resolution=auto 32", "data.num_workers=0"]
    small += ["batch=4", "total_nimg=16", "report_nimg=8", "sample_nimg=16", "checkpoint_nimg=16"]
    shown = execute([word for word in check if word != "--dry-run"], *small)
    (told,) = (line for line in shown.splitlines() if line.startswith("photos has"))
    assert f"\n{told.replace('data.resolution=32', 'data.resolution=256')}\n" in page
    assert "done: 16 images" in shown
    data = yaml.safe_load(Path("runs/photos/config.yaml").read_text())["data"]
    assert (data["num_classes"], data["image_channels"], data["class_names"]) == (3, 3, ["cat", "dog", "horse"])
    assert cli.main([*check[1:], *small]) == 0
    said = capsys.readouterr().err  # what the run began with stays
    assert said.startswith("runs/photos began with data.image_channels=3 data.resolution=32\n")
    assert "\nphotos has 3 classes (cat, dog, horse): data.num_classes=3\n" in said
    Path("photos/zebra").mkdir()
    Image.new("RGB", (32, 32)).save("photos/zebra/0.png")
    assert cli.main([*check[1:], *small]) == 2
    assert "data.num_classes: must be 3" in capsys.readouterr().err


@pytest.mark.slow
def test_own_data(elsewhere):
    *_, prepare, train, evaluate = commands(written("own-data"))
    written("own-metric")
    assert "discs.zip: 24 images of 3 classes" in execute(prepare, "data.arguments.num=24")
    shown = execute(train, *SHORT)
    assert "done: 64 images" in shown
    # ... a stopped run that resumes goes on in the same images
    straight = [row["logits/real"] for row in rows("runs/discs")]
    execute(train, *SHORT, "out=runs/parts", "total_nimg=32")
    execute(train, *SHORT, "out=runs/parts")
    assert [row["logits/real"] for row in rows("runs/parts")] == straight
    assert re.search(r"Brightness_ratio +[-\d.]+\n", execute(evaluate))


@pytest.mark.slow
def test_own_loss(elsewhere):
    (train,) = commands(written("own-loss"))
    execute(train, *SHORT)
    found = rows("runs/own_loss")[0]
    assert {"loss/generator", "loss/discriminator", "loss/total_variation", "loss/small_logits"} <= found.keys()
    assert 0 < found["loss/total_variation"] < 4


@pytest.mark.slow
def test_distill(elsewhere):
    """A student learns, resumes and makes images: of the family, and of one's own networks."""
    teach, distill, sample, *others, pretrain, train, sample_own, _ = commands(written("distill"))
    short = ["total_nimg=128", "report_nimg=64", "sample_nimg=128", "checkpoint_nimg=64"]
    execute(teach, *short)
    execute(next(words for words in others if "digits_ladd" in words), *short)
    for words in (sample, sample_own):
        if words is sample_own:
            Path("flow.py").write_text(Path("flow.py").read_text().replace("num_steps=8000", "num_steps=20"))
            execute(pretrain)
            distill = train
        execute(distill, *short, "total_nimg=64")
        assert "Resuming" in (said := execute(distill, *short))
        assert "UserWarning" not in said
        run = words[words.index("--run") + 1]
        assert {"loss/denoising", "loss/matching", "loss/generator"} <= rows(run)[1].keys()
        execute(words)
        assert Image.open("digits.png").size[0] > 8
    half = ["out=runs/half", "total_nimg=64", "engines.discriminator.ds_config=zero0_bf16"]
    execute(train, *short, *half, "generator.arguments.steps=2")


@pytest.mark.slow
def test_distill_a_published_backbone(elsewhere):
    """A DiT of diffusers that is small and random: all three networks, resumed."""
    diffusers = pytest.importorskip("diffusers")
    train = ["bigsgan", "train", "--config", "published.yaml"]
    written("distill")
    Path("dmd2.py").write_text(Path("dmd2.py").read_text().replace("from flow import", "from backbone import"))
    dit = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=1, out_channels=2, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip
    dit.save_pretrained("dit/transformer")
    own = ["data={kind: digits, resolution: 8}", "generator.latent_size=64", "discriminator.arguments.width=16"]
    own += ["batch=16", "total_nimg=32", "report_nimg=16", "sample_nimg=32", "checkpoint_nimg=16"]
    execute(train, *own, "total_nimg=16")
    assert "Resuming" in execute(train, *own)
    assert {"loss/denoising", "loss/matching", "loss/generator"} <= rows("runs/published")[1].keys()


@pytest.mark.slow
def test_distill_a_published_backbone_of_texts(elsewhere):
    """A PixArt that is small and random: all three networks, resumed."""
    diffusers = pytest.importorskip("diffusers")
    train = ["bigsgan", "train", "--config", "published.yaml", "data.num_classes=0", "objective.fake_labels=data"]
    written("distill")
    Path("dmd2.py").write_text(Path("dmd2.py").read_text().replace("from flow import", "from pixart import"))
    pixart = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=12, out_channels=24, num_layers=2, sample_size=8,
        cross_attention_dim=16, caption_channels=3,
    )  # fmt: skip
    pixart.save_pretrained("pixart/transformer")
    own = [*write_captioned("latents"), "discriminator.arguments.width=16", *SHORT[:-2], "generator.arguments.steps=2"]
    execute(train, *own, "total_nimg=32")
    assert "Resuming" in execute(train, *own)
    assert {"loss/denoising", "loss/matching", "loss/generator"} <= rows("runs/published")[1].keys()


@pytest.mark.slow
def test_a_backbone_of_noise_tells_velocities(elsewhere, monkeypatch):
    """Of normal data, whose noise and velocities have formulas: E[e | x] = s x where x = a d + s e, a^2 + s^2 = 1."""
    diffusers = pytest.importorskip("diffusers")
    written("distill")
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0)  # Ho et al. 2020, section 4

    class Perfect(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.transformer_blocks = torch.nn.ModuleList([torch.nn.Identity()])

        def forward(self, seen, timestep, class_labels):
            deviations = (1 - kept[timestep]).sqrt().float()[:, None, None, None]
            self.transformer_blocks[0](seen.flatten(2).mT)
            return SimpleNamespace(sample=torch.cat([deviations * seen, torch.full_like(seen, 9)], dim=1))

    monkeypatch.setattr(diffusers.DiTTransformer2DModel, "from_pretrained", lambda *_, **__: Perfect())
    network = runpy.run_path("backbone.py")["pretrained"]()
    times = torch.linspace(0.02, 0.98, 25)
    noisy = torch.randn(25, 4, 2, 2, generator=torch.Generator().manual_seed(0))
    velocities, features = network(noisy, times, torch.zeros(25, dtype=torch.long))
    t = times[:, None, None, None]
    expected = (2 * t - 1) / ((1 - t) ** 2 + t**2) * noisy  # E[e - d | (1 - t) d + t e]
    assert features.shape == (25, 4)
    torch.testing.assert_close(velocities, expected, rtol=0.02, atol=0.02)  # there are 1,000 steps


@pytest.mark.slow
def test_image_games(elsewhere):
    """Two generators of one's own, and an autoencoder: train, resume, sample, translate and export."""
    found = {" ".join(words[-2:]): words for words in commands(written("image-games"))}
    two_ways, autoencoder = found["--config two_ways.yaml"], found["--config autoencoder.yaml"]
    circles, made_again = found["--out circles.png"], found["--out made_again.png"]  # of the last, its own
    short = ["total_nimg=64", "report_nimg=32", "sample_nimg=64", "checkpoint_nimg=32"]
    execute(two_ways, *short, "total_nimg=32")
    assert "Resuming" in execute(two_ways, *short)
    assert {"loss/cycle", "loss/contrast", "loss/generator", "loss/discriminator"} <= rows("runs/two_ways")[1].keys()
    execute(circles)
    assert Image.open("circles.png").size == (12 * 18 + 2, 50 * 18 + 2)
    Path("digits").mkdir()
    Image.new("L", (16, 16), 99).save("digits/0.png")
    execute(["bigsgan", "sample", "--run", "runs/two_ways", "--input", "digits", "--files", "--out", "made",
             "--direction", "b_to_a"])  # fmt: skip
    assert sorted(path.name for path in Path("made").iterdir()) == ["0.png"]
    execute(["bigsgan", "export", "--run", "runs/two_ways", "--format", "torch-export", "--out", "g.pt2"])
    execute(autoencoder, *SHORT[:-2], "metrics={names: [psnr200, ssim200], every_nimg: 32}")
    assert rows("runs/autoencoder")[0]["loss/divergence"] > 0
    execute(made_again)
    evaluate = ["bigsgan", "evaluate", "--run", "runs/autoencoder", "--metrics"]
    assert "features of" not in execute([*evaluate, "psnr200,ssim200"])
    execute([*evaluate, "psnr2k,fid2k"])
    records = [json.loads(line) for line in Path("runs/autoencoder", RECORDS_FILE).read_text().splitlines()]
    assert [record["nimg"] for record in records] == [32, 32, *[64] * 6]
    for before, after in zip(records[2:4], records[4:6], strict=True):
        assert after[after["metric"]] == pytest.approx(before[before["metric"]], rel=1e-5)
    assert {record["metric"]: record["num_fake"] for record in records[6:]} == {"psnr2k": 1797, "fid2k": 1797}
    execute(["bigsgan", "export", "--run", "runs/autoencoder", "--format", "torch-export", "--out", "a.pt2"])


@pytest.mark.slow
def test_own_metric(elsewhere):
    train, evaluate, shared = commands(written("own-metric"))
    shown = execute(train, *SHORT, "metrics.every_nimg=32")
    assert "Brightness_ratio" in shown
    measured = [row for row in rows("runs/bright") if "metrics/Brightness_ratio" in row]
    assert [row["nimg"] for row in measured] == [32, 64]
    execute(evaluate)
    execute(shared)
    records = [json.loads(line) for line in Path("runs/bright", RECORDS_FILE).read_text().splitlines()]
    own = [record for record in records if record["metric"] == "Brightness"]
    assert [record["by"] for record in own] == ["train", "train", "evaluate", "evaluate"]
    assert {record["num_real"] for record in own} == {1000}
    for name in ("Brightness_ratio", "Brightness_spread"):
        assert own[1][name] == measured[1][f"metrics/{name}"]
        assert own[2][name] == pytest.approx(own[3][name], rel=1e-5)  # on one rank, and on two


@pytest.mark.slow
def test_a_metric_that_failed_at_the_end_is_measured_by_the_same_command(elsewhere):
    """And what is saved is what would have been without it."""
    train, *_ = commands(written("own-metric"))
    code = Path("mypackage/metrics.py").read_text()
    asked = [*SHORT, "metrics.every_nimg=64"]
    execute(train, *asked, "out=runs/straight")
    Path("mypackage/metrics.py").write_text(code.replace("def compute(self, real, fake):", "def compute(self, real):"))
    assert "fails in compute" in execute(train, *asked, status=2)
    found, expected = (load_file(*Path("runs", run, "checkpoints/000000000064").glob("*.safetensors")) for run in RUNS)
    assert found.keys() == expected.keys()
    assert all(map(torch.equal, found.values(), expected.values()))
    Path("mypackage/metrics.py").write_text(code)
    assert "is complete" not in execute(train, *asked)
    assert [row["nimg"] for row in rows("runs/bright") if "metrics/Brightness_ratio" in row] == [64]
    assert "is complete" in execute(train, *asked)


@pytest.mark.slow
def test_one_call_from_python(elsewhere):
    alone, together, *_ = commands(written("train-from-python"))
    shown = execute(alone, *SHORT)
    lines = ["from 0 to 64 images", "saved runs/script/checkpoints/000000000032", "2 reports", "64 "]
    assert [line for line in lines if line not in shown] == []
    shown = execute(together, *SHORT)
    assert shown.count("from 0 to 64 images") == shown.count("2 reports") == 1  # on rank 0 alone
    assert [row["ranks"] for row in rows("runs/two_ranks")] == [2, 2]


@pytest.mark.slow
def test_a_loop_and_callbacks(elsewhere):
    _, _, loop, table = commands(written("train-from-python"))
    shown = execute(loop, *SHORT)
    assert "saved runs/loop/checkpoints/000000000032" in shown
    assert re.search(r"torch.Size\(\[20, 1, 16, 16\]\) \{'metrics/fid1k': [\d.]+, 'metrics/seconds'", shown)
    execute(table, *SHORT)
    found = [line.split() for line in Path("table.txt").read_text().splitlines()]
    assert found == [[str(row["nimg"]), str(row["loss/generator"])] for row in rows("runs/table")]
    # ... and a callback that fails lets the run save
    Path("mypackage", "hooks.py").write_text("class Table:\n    def on_report(self, nimg, metrics):\n        1 / 0\n")
    refused = execute(
        table, *SHORT, "out=runs/fails", "callbacks=[mypackage.hooks:Table]", "checkpoint_nimg=64", status=2
    )
    text = "callbacks: 'mypackage.hooks:Table' fails in on_report: ZeroDivisionError: division by zero (hooks.py:3)"
    assert text in refused
    assert Path("runs/fails/checkpoints/000000000032/manifest.json").exists()


@pytest.mark.slow
def test_several_runs_in_one_script_on_two_ranks(elsewhere):
    code = f"""
import gc
import bigsgan
import torch

def train(*changes):
    with bigsgan.Trainer(bigsgan.Recipe.read("digits", "metrics=null", *changes)) as trainer:
        trainer.train()
    gc.collect()
    assert not [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Parameter)]

short = {[word for word in SHORT if not word.startswith("total")]}
train(*short, "out=runs/split", "total_nimg=32", "engines.generator.ranks=1")
whole = [f"engines.{{network}}.ds_config=zero3" for network in ("generator", "discriminator")]
train(*short, *whole, "out=runs/parts", "total_nimg=32")
train(*short, *whole, "out=runs/parts", "total_nimg=64")
"""
    Path("several.py").write_text(code)
    execute(["torchrun", "--nproc_per_node", "2", "several.py"])
    assert len(rows("runs/split")) == 1
    assert [row["nimg"] for row in rows("runs/parts")] == [32, 64]


def write_captioned(root):
    """Latents (12, 8, 8) with up to five tokens of three numbers; return what a recipe of them has."""
    draws, members = np.random.default_rng(0), []
    for number in range(32):
        tokens = draws.normal(size=(number % 6, 3))
        for name, numbers in (("npy", draws.normal(size=(12, 8, 8))), ("tokens.npy", tokens)):
            np.save(file := io.BytesIO(), numbers.astype(np.float16))
            members.append((f"{number}.{name}", file.getvalue()))
    write_tar(Path(root, "0.tar"), members)
    found = [f"data.root={root}", "data.resolution=16", "data.codec={kind: dct}", "data.condition_size=[5, 3]"]
    return [*found, "data.missing_labels=accept", "data.num_workers=0", "generator.latent_size=768"]


@pytest.mark.slow
def test_captions(elsewhere):
    """The guide's networks train on tokens of any length, resume in the same captions, and make images of others."""
    *_, train = (words for words in commands(written("latents")) if "captioned.yaml" in words)
    own = [*write_captioned("latents"), *SHORT[:-2]]
    np.save("asked.npy", np.random.default_rng(1).normal(size=(2, 5, 3)))
    chain = [
        merged([*train, *own, "out=runs/straight"]),
        merged([*train, *own, "total_nimg=32"]),
        merged([*train, *own]),
        ["bigsgan", "sample", "--run", "runs/captioned", "--out", "asked.png", "--conditions", "asked.npy"],
    ]
    lines = "import sys; from bigsgan import cli", f"[cli.main(words[1:]) and sys.exit(2) for words in {chain!r}]"
    assert "Resuming" in execute([sys.executable, "-c", "; ".join(lines)])
    straight, resumed = ([row["logits/real"] for row in rows(f"runs/{run}")] for run in ("straight", "captioned"))
    assert straight == resumed
    assert np.load("runs/captioned/labels.npy").shape == (32, 5, 4)
    assert Image.open("asked.png").size[0] == 2 * 18 + 2


@pytest.mark.slow
def test_latent_space(elsewhere):
    """The tutorial's chain from a folder of images to samples of a GAT on their latents."""
    _, tokenizer, evaluate, export, encode, gat, sample = commands(written("latent-space"))
    runpy.run_path("write_digits.py")
    for number, path in enumerate(sorted(Path("digits").glob("*/*.png"))):
        if number % 16:  # others take seconds
            path.unlink()
    once = [f"{key}=16" for key in ("total_nimg", "report_nimg", "sample_nimg", "checkpoint_nimg", "batch")]
    once.append("data.num_workers=0")
    tokenizer += [*once, "generator.channels=8", "discriminator.channels=2", "metrics=null"]
    chain = [merged(tokenizer), evaluate, export, encode, merged([*gat, *once]), sample]
    Path("chain.json").write_text(json.dumps([words[1:] for words in chain]))
    lines = "import json, sys; from bigsgan import cli", "[cli.main(words) and sys.exit(2) for words in chain]"
    printed = execute([sys.executable, "-c", "; ".join([lines[0], "chain = json.load(open('chain.json'))", lines[1]])])
    about, made = (
        json.loads(Path(name).read_text()) for name in ("digits-codec/config.json", "digits-latents/codec.json")
    )
    assert about["shift_factor"] == pytest.approx(made["mean"], rel=1e-4, abs=1e-4)  # of the same images
    assert 1 / about["scaling_factor"] == pytest.approx(made["deviation"], rel=1e-4)
    keys = {key for word in gat if (key := word.partition("=")[0]).startswith("data.")} - {"data.codec.scale"}
    assert keys <= {word.partition("=")[0] for word in printed.split()}
    assert Image.open("latent_digits.png").size == (10 * 18 + 2, 10 * 18 + 2)

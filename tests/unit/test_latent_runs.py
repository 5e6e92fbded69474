"""Runs in the space of a codec: what they are measured by, exported as and resumed with."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.fft import idctn
from scipy.linalg import sqrtm

import bigsgan
from bigsgan import evaluate, export
from bigsgan.config import plan_run
from bigsgan.config.data import Data
from bigsgan.config.metrics import FeatureNetwork, parse_metric
from bigsgan.data import build_dataset
from bigsgan.draws import Draws
from bigsgan.errors import UserError
from bigsgan.inference.trained import TrainedNetwork, open_trained
from bigsgan.metrics.evaluation import drawn_labels
from bigsgan.monitor import open_rank_log
from bigsgan.training.measuring import Measuring
from bigsgan.training.rank_consistency import refuse_other_codec
from tests.autoencoders import latents, save_autoencoder, write_latents
from tests.runs import make_run

CPU = torch.device("cpu")


def make_latent_run(directory: Path, metrics: str = "null") -> Path:
    """A run on latents of ``directory``'s autoencoder, which is not written."""
    write_latents(directory / "data", 8, posterior=False)
    codec = f"{{kind: diffusers, path: {directory / 'vae'}}}"
    images = f"root: {directory / 'data'}, resolution: 64, image_channels: 3, num_classes: 2, num_workers: 0"
    tiny = "{family: gat, depth: 4, width: 32, heads: 2}"
    game = "objective={loss: relativistic, reuse_fakes: true, fake_labels: data}"
    data = f"data={{kind: latents, {images}, codec: {codec}}}"
    return make_run(directory, data, f"generator={tiny}", f"discriminator={tiny}", game, f"metrics={metrics}")[0]


def latents_of(directory: Path, folder: str, **more: Any) -> Data:
    return latents(directory, codec={"kind": "diffusers", "path": str(directory / folder), **more})


def asked(run: Path, *overrides: str) -> evaluate.Options:
    metrics = [parse_metric("fid10", "--metrics")]
    features = FeatureNetwork(network="auto", weights=None, resizer="tensorflow")
    return evaluate.Options(
        run, None, False, None, metrics, features, None, 8, 0, None, None, None, overrides, None, False
    )


def generator_of(run: Path) -> TrainedNetwork:
    return open_trained(run, "generator", False, None, CPU)


@pytest.mark.slow
def test_samples_of_a_latent_run_are_decoded_whatever_they_are_compared_with(tmp_path):
    network, run = save_autoencoder(tmp_path / "vae"), make_latent_run(tmp_path)
    inputs = (torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1]))
    with torch.no_grad():
        expected = network.decode(generator_of(run).infer(inputs)[:, -4:] / 0.5).sample
    (tmp_path / "vae").rename(tmp_path / "moved")
    moved = [f"data.codec.path={tmp_path / 'moved'}"]
    for overrides in (["data.kind=folder", "data.codec.kind=pixels", "data.codec.path=null"], moved):
        trained = generator_of(run)
        recipe = evaluate._with_data(trained, asked(run, *overrides))
        if overrides is not moved:
            (tmp_path / "moved").rename(tmp_path / "vae")
            assert (recipe.data.kind, recipe.data.codec.kind) == ("folder", "pixels")
        torch.testing.assert_close(trained.show(inputs, False), expected, rtol=1e-4, atol=1e-4)
        if overrides is not moved:
            (tmp_path / "vae").rename(tmp_path / "moved")


class Means(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean(dim=(2, 3))


def test_training_measures_latents_against_a_reference(tmp_path):
    """The decoded samples' FID from the file's statistics, by scipy's square root of a matrix."""
    network = save_autoencoder(tmp_path / "vae")
    torch.jit.script(Means()).save(tmp_path / "means.pt")
    mean, covariance = np.array([100.0, 120.0, 140.0]), np.diag([9.0, 16.0, 25.0])
    np.savez(tmp_path / "real.npz", mu=mean, sigma=covariance)
    names = f"names: [fid10], every_nimg: 64, features: {{network: {tmp_path / 'means.pt'}}}"
    run = make_latent_run(tmp_path, f"{{{names}, reference: {tmp_path / 'real.npz'}}}")
    trained = generator_of(run)
    plan, seed = plan_run(trained.recipe, 1), trained.recipe.seed
    engine = SimpleNamespace(network=trained.network, infer_everywhere=trained.infer)
    ema = SimpleNamespace(swapped=nullcontext)
    with closing(open_rank_log(run / "logs", 0, print)) as rank_log:
        measuring = Measuring(plan, run, build_dataset(trained.recipe.data), range(2), 8, rank_log)
        found = measuring(engine, ema, [], 64)

    labels = drawn_labels(0, 10, torch.ones(2))
    latents = torch.from_numpy(Draws(seed).normal("metrics", (0,), 0, 10, 64))
    with torch.no_grad():
        made = network.decode(trained.infer((latents, labels))[:, -4:] / 0.5).sample
    bytes_of = (made.clamp(-1, 1) * 127.5 + 127.5).round().clamp(0, 255)
    seen = bytes_of.mean(dim=(2, 3)).double().numpy()
    both = np.cov(seen, rowvar=False)
    cross = sqrtm(both @ covariance).real
    expected = ((seen.mean(0) - mean) ** 2).sum() + np.trace(both + covariance - 2 * cross)
    assert found["metrics/fid10"] == pytest.approx(expected, rel=1e-3)
    (record,) = [json.loads(line) for line in (run / "evaluations.jsonl").read_text().splitlines()]
    digest = hashlib.sha256((tmp_path / "real.npz").read_bytes()).hexdigest()
    assert (record["reference"], record["reference_sha256"]) == (str(tmp_path / "real.npz"), digest)
    assert (record["num_real"], record["num_fake"]) == (0, 10)


def test_a_run_is_decoded_by_its_own_scale(tmp_path):
    save_autoencoder(tmp_path / "vae")
    run = make_latent_run(tmp_path)
    with pytest.raises(UserError, match=r"data\.codec\.scale: must be unset, as in the run, got 3"):
        evaluate._with_data(generator_of(run), asked(run, "data.codec.scale=3"))


def test_a_run_resumes_with_its_own_autoencoder_alone(tmp_path):
    """Wherever that is; of a checkpoint from before digests were kept nothing is known."""
    network = save_autoencoder(tmp_path / "vae")
    write_latents(tmp_path / "data", 2, posterior=False)
    data = latents_of(tmp_path, "vae")
    saved = build_dataset(data).fingerprint()._asdict()
    assert saved["scaling"] == "scale 0.5, shift 0"
    shutil.copytree(tmp_path / "vae", tmp_path / "moved")
    for before in (saved, {"num_images": 2}, None):
        refuse_other_codec(before, latents_of(tmp_path, "moved"))
    config = tmp_path / "moved" / "config.json"
    config.write_text(config.read_text().replace('"scaling_factor": 0.5', '"scaling_factor": 0.25'))
    with pytest.raises(UserError, match=r"data\.codec\.path: .*moved' shifts and scales"):
        refuse_other_codec(saved, latents_of(tmp_path, "moved"))
    refuse_other_codec(saved, latents_of(tmp_path, "moved", scale=0.25))  # which --allow-change has let pass
    torch.nn.init.ones_(network.post_quant_conv.bias)
    network.save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=r"data\.codec\.path: .*other' has other weights than the autoencoder that"):
        refuse_other_codec(saved, latents_of(tmp_path, "other"))
    there = build_dataset(latents_of(tmp_path, "other")).fingerprint()
    assert build_dataset(data).fingerprint().difference(there) == "an autoencoder of other weights"


def test_an_export_takes_its_autoencoder_along_by_reference(tmp_path):
    network, run, out = save_autoencoder(tmp_path / "vae"), make_latent_run(tmp_path), tmp_path / "g.safetensors"
    export.main(run, out, export.Options(batch=8))
    generator = bigsgan.load(out)
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 1])
    with torch.no_grad():
        made = generator(*inputs)
        expected = network.decode(made / 0.5).sample
    torch.testing.assert_close(generator.decode(made), expected, rtol=1e-4, atol=1e-4)
    (tmp_path / "vae").rename(tmp_path / "moved")
    torch.testing.assert_close(bigsgan.load(out).decode(made, tmp_path / "moved"), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"data\.codec\.path: .*vae' cannot be read"):
        bigsgan.load(out).decode(made)
    torch.nn.init.ones_(network.post_quant_conv.bias)
    network.save_pretrained(tmp_path / "vae")
    with pytest.raises(UserError, match=r"data\.codec\.path: .*vae' is not the autoencoder that the generator was"):
        bigsgan.load(out).decode(made)


@pytest.mark.slow
def test_a_generator_of_cosines_exports_images(tmp_path):
    """As a file, and as a graph where onnx is installed; both are what `bigsgan sample` shows."""
    tiny = "{family: gat, depth: 4, width: 32, heads: 2, patch: 1}"
    data = "data={kind: digits, resolution: 16, image_channels: 1, num_classes: 10, codec: {kind: dct, block: 4}}"
    game = "objective={loss: relativistic, reuse_fakes: true, fake_labels: data}"
    run, _ = make_run(tmp_path, data, f"generator={tiny}", f"discriminator={tiny}", game, "metrics=null")
    inputs = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 7, 9])
    trained = generator_of(run)
    trained.network.eval()
    made = trained.infer(inputs)[:, -16:]
    frequencies = made.reshape(3, 4, 4, 4, 4).double().numpy()  # (n, u, v, rows, columns)
    blocks = idctn(frequencies, type=2, norm="ortho", axes=(1, 2))
    expected = torch.from_numpy(blocks.transpose(0, 3, 1, 4, 2).reshape(3, 1, 16, 16)).float()
    torch.testing.assert_close(trained.show(inputs, False), expected, rtol=1e-4, atol=1e-4)
    export.main(run, tmp_path / "g.safetensors", export.Options(batch=8))
    with torch.no_grad():
        generator = bigsgan.load(tmp_path / "g.safetensors")
        found = generator(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert generator.decode(found) is found
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    export.main(run, tmp_path / "g.onnx", export.Options(batch=8))
    session = onnxruntime.InferenceSession(str(tmp_path / "g.onnx"))
    names = [each.name for each in session.get_inputs()]
    (drawn,) = session.run(None, dict(zip(names, (each.numpy() for each in inputs), strict=True)))
    torch.testing.assert_close(torch.from_numpy(drawn), expected, rtol=1e-3, atol=1e-3)

"""Metrics against torchmetrics, scipy, scikit-learn and closed forms, on the same features."""

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from sklearn.neighbors import NearestNeighbors
from torch_fidelity.metric_isc import isc_features_to_metric
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from bigsgan.config.metrics import Metrics, parse_metric
from bigsgan.errors import UserError
from bigsgan.metrics import pairwise
from bigsgan.metrics.moments import Moments, frechet_distance
from bigsgan.metrics.path_length import trimmed_mean
from bigsgan.metrics.scores import SPLITS, ClassScores, jensen_shannon, kullback_leibler
from tests.unit.test_metrics_evaluation import Given

WIDTH = 16


@pytest.fixture(scope="module")
def clouds():
    """Two sets of correlated features that overlap in part; values in float32, as networks give them."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(WIDTH, WIDTH, generator=generator)
    real = torch.randn(300, WIDTH, generator=generator) @ mix
    fake = 0.8 * torch.randn(250, WIDTH, generator=generator) @ mix + 0.5
    return real, fake


def moments_of(features):
    found = Moments(features.shape[1])
    for part in features.split(70):
        found.add(part)
    return found


def test_frechet_distance_is_torchmetrics(clouds):
    real, fake = clouds
    theirs = FrechetInceptionDistance(feature=Given(WIDTH), input_img_size=(WIDTH,))
    theirs.set_dtype(torch.float64)
    theirs.update(real, real=True)
    theirs.update(fake, real=False)
    assert frechet_distance(moments_of(real), moments_of(fake)) == pytest.approx(float(theirs.compute()), rel=1e-6)


def test_kernel_distance_is_torchmetrics(clouds):
    real, fake = clouds[0][:250], clouds[1]
    theirs = KernelInceptionDistance(feature=Given(WIDTH), subsets=1, subset_size=250)
    theirs.set_dtype(torch.float64)
    theirs.update(real, real=True)
    theirs.update(fake, real=False)
    ours = pairwise.kernel_distance(*(pairwise.share(x) for x in (real, fake)))
    assert ours == pytest.approx(float(theirs.compute()[0]), rel=1e-5)


def test_inception_score_is_torch_fidelitys():
    logits = 3 * torch.randn(400, 7, generator=torch.Generator().manual_seed(1))
    theirs = isc_features_to_metric(logits, splits=SPLITS, shuffle=False)
    ours = ClassScores(7)
    for positions in torch.arange(len(logits)).split(90):
        ours.add(logits[positions], positions * SPLITS // len(logits))
    assert ours.inception_score() == pytest.approx(tuple(theirs.values()), rel=1e-5)


def radii(features, k):
    return NearestNeighbors(n_neighbors=k + 1).fit(features).kneighbors(features)[0][:, k]


@pytest.mark.parametrize("chunk", [64, 2048])
def test_manifold_metrics_are_their_definitions(clouds, chunk, monkeypatch):
    monkeypatch.setattr(pairwise, "CHUNK", chunk)
    real, fake = (x.double().numpy() for x in clouds)
    distances = np.linalg.norm(real[:, None] - fake[None], axis=2)
    precision = (distances <= radii(real, 3)[:, None]).any(0).mean()
    recall = (distances <= radii(fake, 3)[None]).any(1).mean()
    inside = distances <= radii(real, 5)[:, None]
    expected = (precision, recall, inside.sum() / (5 * len(fake)), inside.any(1).mean())
    ours = pairwise.manifold_metrics(*(pairwise.share(x) for x in clouds))
    assert ours == pytest.approx(expected, abs=1e-12)
    assert 0.05 < ours.precision < 1
    assert 0.05 < ours.recall < 0.99
    assert ours.density != ours.coverage


def test_divergences_of_histograms():
    p, q = torch.tensor([30.0, 0.0, 10.0]).double(), torch.tensor([5.0, 5.0, 30.0]).double()
    assert jensen_shannon(p, q) == pytest.approx(jensenshannon(p, q) ** 2, rel=1e-9)
    assert kullback_leibler(p, q) == pytest.approx(entropy((p + 1).numpy(), (q + 1).numpy()), rel=1e-6)
    assert jensen_shannon(p, p) == kullback_leibler(p, p) == 0


def test_path_lengths_are_trimmed_as_torchmetrics_does():
    distances = torch.arange(1000, dtype=torch.float64)
    distances[0], distances[-1] = -1e9, 1e9
    lower, upper = np.quantile(distances, 0.01, method="lower"), np.quantile(distances, 0.99, method="higher")
    kept = [d for d in distances.tolist() if lower <= d <= upper]
    assert trimmed_mean(distances) == pytest.approx(sum(kept) / len(kept))


def test_names_of_metrics():
    assert [parse_metric(name, "--metrics").num for name in ("fid50k", "KID1000", "is5k")] == [50_000, 1000, 5000]
    for wrong in ("fid", "fid50m", "foo50k", "50k", "fid-5k", "fid5", "fid999999999k"):
        with pytest.raises(UserError, match=r"^--metrics: "):
            parse_metric(wrong, "--metrics")
    with pytest.raises(UserError, match=r"metrics.names: 'ppl10k' is not available during training"):
        Metrics(names=["fid1k", "ppl10k"], every_nimg=1)

"""Our archives and metrics against the definitions of ADM's evaluator, written here in numpy.

Transcribed from openai/guided-diffusion, evaluations/evaluator.py: FIDStatistics.frechet_distance,
_compute_inception_score and ManifoldEstimator. Its sFID and its TensorFlow graph are left out: a fixed projection
stands in for the network.
"""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
import torch

from bigsgan.images.npz import write_images
from tests.unit.test_metrics_evaluation import WIDTH
from tests.unit.test_metrics_reference import ASKED, DIGITS, NUM, digits, features_of, measured, noisy, random_features

__all__ = ["digits"]

SPLITS = 10


def frechet_distance(seen, other):
    (mu1, sigma1), (mu2, sigma2) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (seen, other))
    covmean = scipy.linalg.sqrtm(sigma1.dot(sigma2))
    diff = mu1 - mu2
    return diff.dot(diff) + np.trace(sigma1) + np.trace(sigma2) - 2 * np.trace(covmean.real)


def inception_score(logits, split_size):
    preds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    scores = []
    for i in range(0, len(preds), split_size):
        part = preds[i : i + split_size]
        kl = part * (np.log(part) - np.log(np.expand_dims(np.mean(part, 0), 0)))
        scores.append(np.exp(np.mean(np.sum(kl, 1))))
    return float(np.mean(scores))


def squared_distances(u, v):
    return (u**2).sum(1)[:, None] - 2 * u @ v.T + (v**2).sum(1)[None]


def precision_and_recall(reals, fakes, nearest=3):
    """An image is in a manifold that is within the distance from one of its images to this one's third neighbour."""
    radii = [np.sort(squared_distances(x, x), axis=1)[:, nearest] for x in (reals, fakes)]
    precision = (squared_distances(fakes, reals) <= radii[0][None]).any(1).mean()
    recall = (squared_distances(reals, fakes) <= radii[1][None]).any(1).mean()
    return precision, recall


def test_the_evaluator_of_adm_finds_the_same_in_our_archive(tmp_path, digits):
    images, labels = digits
    classes = np.arange(NUM) % 10  # balanced, as `bigsgan sample --out samples.npz` has them
    fakes = (torch.clamp((noisy(0, torch.from_numpy(classes)).images + 1) * 127.5 + 0.5, 0, 255)).byte()
    fakes = fakes.permute(0, 2, 3, 1).numpy()
    write_images(tmp_path / "samples.npz", fakes.shape, iter(np.array_split(fakes, 7)), classes)
    np.savez(tmp_path / "reference.npz", images, labels)

    with np.load(tmp_path / "samples.npz") as samples, np.load(tmp_path / "reference.npz") as reference:
        assert np.bincount(samples["arr_1"]).tolist() == [NUM // 10] * 10
        ours, theirs = samples["arr_0"], reference["arr_0"]
    seen, real = features_of(ours).numpy(), features_of(theirs).numpy()
    assert seen.shape == (NUM, WIDTH)
    names = [f"{kind}{NUM}" for kind in ("fid", "is", "pr")]
    found = measured(tmp_path / "reference.npz", tmp_path, names, DIGITS)
    assert len(ASKED) == NUM
    assert found[f"fid{NUM}"] == pytest.approx(frechet_distance(seen, real), rel=1e-5)
    logits = random_features()(torch.from_numpy(ours).permute(0, 3, 1, 2)).logits.numpy()
    score = next(value for name, value in found.items() if name.startswith("is") and "deviation" not in name)
    assert score == pytest.approx(inception_score(logits, NUM // SPLITS), rel=1e-5)
    precision, recall = precision_and_recall(real, seen)
    assert (found[f"pr{NUM}_precision"], found[f"pr{NUM}_recall"]) == pytest.approx((precision, recall), abs=1e-9)
    assert 0.05 < precision < 1

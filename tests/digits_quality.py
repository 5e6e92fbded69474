"""How good generated digits are: a classifier trained on the real ones, and the spread within each class."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from bigsgan.config.data import Data
from bigsgan.data import build_dataset
from bigsgan.inference.sheets import Sampler
from bigsgan.inference.trained import open_trained

CPU = torch.device("cpu")


def real_digits(resolution: int):
    dataset = build_dataset(Data(kind="digits", resolution=resolution, image_channels=1, num_classes=10))
    pairs = [dataset[i] for i in range(len(dataset))]
    return torch.stack([p[0] for p in pairs]).float() / 127.5 - 1, torch.tensor([p[1] for p in pairs])


def train_classifier(images, labels):
    """A small CNN, and its accuracy on a held-out fifth."""
    torch.manual_seed(0)
    order = torch.randperm(len(images))
    held, rest = order[: len(order) // 5], order[len(order) // 5 :]
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10),
    )  # fmt: skip
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(12):
        for batch in rest[torch.randperm(len(rest))].split(64):
            optimizer.zero_grad()
            F.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    net.eval()
    with torch.no_grad():
        return net, float((net(images[held]).argmax(1) == labels[held]).float().mean())


def spread(images, labels):
    """Mean pairwise distance within a class, averaged over the classes."""
    means = []
    for label in labels.unique():
        flat = images[labels == label].flatten(1)
        n = len(flat)
        means.append(float(torch.cdist(flat, flat).sum() / (n * (n - 1))))
    return sum(means) / len(means)


def measure(run: Path, num: int = 1000, seed: int = 12345) -> dict[str, float]:
    """Share of samples that the classifier labels as asked, its own accuracy, and the spread against the real one."""
    trained = open_trained(run, "generator", live=False, nimg=None, device=CPU)
    real, real_labels = real_digits(trained.recipe.data.resolution)
    net, held_out = train_classifier(real, real_labels)
    classes = torch.eye(10) if trained.recipe.data.has_vectors else torch.arange(10)
    images = Sampler(trained, seed, 100, range(10)).grid(num, classes, None).images
    labels = torch.arange(num) % 10
    with torch.no_grad():
        right = float((net(images).argmax(1) == labels).float().mean())
    return {"held_out": held_out, "right": right, "spread": spread(images, labels) / spread(real, real_labels)}

"""Feature networks: Inception against torch-fidelity's, the digits classifier by its accuracy, files and messages."""

import hashlib

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

from bigsgan.config.data import Data
from bigsgan.config.metrics import FeatureNetwork
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.metrics import digits, inception
from bigsgan.metrics.digits import digit_images, train_classifier
from bigsgan.metrics.features import RECIPE, check_features, open_features

COLOUR = Data(kind="synthetic", resolution=40, image_channels=3, num_classes=0)


def images(num=2, channels=3, resolution=40):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (num, channels, resolution, resolution), generator=generator, dtype=torch.uint8)


@pytest.fixture
def random_weights(tmp_path):
    """A file of random weights with statistics as if they had been trained: outputs of order one."""
    torch.manual_seed(0)
    network = inception.Inception()
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                module.bias.uniform_(-0.5, 0.5)
                module.running_mean.uniform_(-0.1, 0.1)
    path = tmp_path / "weights.pth"
    torch.save(network.state_dict(), path)
    return path


@pytest.mark.slow
def test_inception_is_torch_fidelitys(random_weights):
    theirs = FeatureExtractorInceptionV3("x", ["2048", "logits_unbiased"], str(random_weights))
    features = open_features(FeatureNetwork(network="inception", weights=str(random_weights)), COLOUR, random_weights)
    seen, (expected, logits) = features(images()), theirs(images())
    assert expected.std() > 0.01
    torch.testing.assert_close(seen.features, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.logits, logits, rtol=1e-4, atol=1e-4)
    assert (features.width, features.num_classes, features.resizer) == (2048, 1008, "tensorflow")


@pytest.mark.parametrize("resolution", [32, 299, 500])
def test_resizer_is_tensorflows(resolution):
    pixels = images(resolution=resolution).float()
    theirs = interpolate_bilinear_2d_like_tensorflow1x(pixels, size=(299, 299), align_corners=False)
    torch.testing.assert_close(inception.resized(pixels, "tensorflow"), theirs, rtol=0, atol=2e-3)


def test_antialiased_resizer_is_pillows():
    pixels = images(num=1, channels=1, resolution=500).float()
    picture = torchvision.transforms.functional.to_pil_image(pixels[0], mode="F")
    theirs = torch.from_numpy(np.array(picture.resize((299, 299), Image.Resampling.BICUBIC)))[None, None].clamp(0, 255)
    torch.testing.assert_close(inception.resized(pixels, "antialiased"), theirs, rtol=0, atol=1e-2)
    edge = torch.zeros(1, 1, 100, 100)
    edge[..., 50:] = 255  # bicubic overshoots at an edge
    assert torch.equal(torch.stack(inception.resized(edge, "antialiased").aminmax()), torch.tensor([0.0, 255.0]))


@pytest.mark.slow
def test_digits_classifier_is_right_on_held_out_digits():
    pixels, labels = digit_images(Size.of(16))
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    held, rest = order[:360], order[360:]
    state = torch.get_rng_state()
    network = train_classifier(pixels[rest], labels[rest])
    assert torch.equal(torch.get_rng_state(), state)
    assert float((network(pixels[held])[1].argmax(1) == labels[held]).float().mean()) >= 0.97


def test_digits_classifier_is_trained_once(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "_EPOCHS", 1)
    data = Data(kind="digits", resolution=16, image_channels=1, num_classes=10)
    first = open_features(FeatureNetwork(), data, tmp_path)
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    again = open_features(FeatureNetwork(), data, tmp_path)
    assert file.stat().st_mtime_ns == written
    assert (first.name, first.hash, first.width, first.num_classes) == ("digits", again.hash, 64, 10)
    file.write_bytes(b"damaged")
    assert open_features(FeatureNetwork(), data, tmp_path).num_classes == 10


def test_torchvision_features_are_what_the_last_layer_reads(tmp_path):
    network = torchvision.models.resnet18(weights=None).eval()
    path = tmp_path / "resnet18.pth"
    torch.save(network.state_dict(), path)
    seen = open_features(FeatureNetwork(network="torchvision:resnet18", weights=str(path)), COLOUR, tmp_path)(images())
    torch.testing.assert_close(network.fc(seen.features), seen.logits, rtol=1e-4, atol=1e-5)
    transform = torchvision.models.ResNet18_Weights.DEFAULT.transforms()
    torch.testing.assert_close(network(transform(images().float() / 255)), seen.logits, rtol=1e-4, atol=1e-5)


class Means(nn.Module):
    """Features: the mean of each colour; as in StyleGAN's files, probabilities unless they are asked for."""

    def forward(self, img: torch.Tensor, return_features: bool = False, no_output_bias: bool = False) -> torch.Tensor:
        means = img.float().mean(dim=(2, 3))
        if return_features:
            return means
        return torch.softmax(means / 10 + (0.0 if no_output_bias else 1.0) * torch.arange(3), dim=1)


def test_torchscript_files(tmp_path):
    path = tmp_path / "means.pt"
    torch.jit.script(Means()).save(str(path))
    features = open_features(FeatureNetwork(network=str(path)), COLOUR, tmp_path)
    seen, means = features(images()), images().float().mean(dim=(2, 3))
    torch.testing.assert_close(seen.features, means)
    torch.testing.assert_close(seen.logits.softmax(1), (means / 10).softmax(1))
    assert features.hash == hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def test_missing_weights_are_named_with_hash_and_place(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    with pytest.raises(UserError) as caught:
        open_features(FeatureNetwork(network="inception"), COLOUR, tmp_path)
    text = str(caught.value)
    assert caught.value.value == str(tmp_path / "checkpoints" / "pt_inception-2015-12-05-6726825d.pth")
    for part in ("--weights: ", "does not exist; its SHA-256 begins with 6726825d", "https://", "--weights"):
        assert part in text
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "pt_inception-2015-12-05-6726825d.pth").write_bytes(b"another")
    with pytest.raises(UserError, match=r"--weights: must be a file whose SHA-256 begins with 6726825d, got '"):
        open_features(FeatureNetwork(network="inception"), COLOUR, tmp_path)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"network": "digits"}, "--features: 'digits' needs data.kind=digits (data.kind is synthetic)"),
        ({"network": "torchvision:nothing"}, "--features: must be a network of torchvision, got 'torchvision:nothing'"),
        ({"network": "nothing.pt"}, "--features: must be a feature network or a file, got 'nothing.pt'"),
        ({"network": "inception", "weights": "nowhere.pth"}, "--weights: 'nowhere.pth' does not exist"),
    ],
)
def test_wrong_networks(section, message, tmp_path):
    with pytest.raises(UserError) as caught:
        open_features(FeatureNetwork(**section), COLOUR, tmp_path)
    assert str(caught.value).startswith(message)


def test_damaged_files(tmp_path):
    path = tmp_path / "damaged"
    damaged = "--weights: '.*' does not contain the network's weights: it is damaged; download the file again"
    for content, section, message in (
        (b"PK no archive", {"network": str(path)}, "--features: must be a TorchScript file, got"),
        (b"PK no archive", {"network": "inception", "weights": str(path)}, damaged),
        (b"", {"network": "inception", "weights": str(path)}, damaged),  # torch's error has no text
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=message):
            open_features(FeatureNetwork(**section), COLOUR, tmp_path)


class PerceptualDistance(nn.Module):
    """With the arguments of the file that StyleGAN2's path lengths are measured with."""

    def forward(
        self, x: torch.Tensor, resize_images: bool = True, return_features: bool = False, return_lpips: bool = False
    ) -> torch.Tensor:
        assert return_features != return_lpips
        flat = x.float().mean(dim=(2, 3))
        return flat if return_features else torch.cat([flat, flat * (2 if resize_images else 3)], dim=1)


def test_torchscript_files_for_path_lengths(tmp_path):
    path = tmp_path / "vgg16.pt"
    torch.jit.script(PerceptualDistance()).save(str(path))
    features = open_features(FeatureNetwork(network=str(path)), COLOUR, tmp_path)
    means = images().float().mean(dim=(2, 3))
    torch.testing.assert_close(features(images()).features, means)
    torch.testing.assert_close(features.look_for_paths(images()), torch.cat([means, 3 * means], dim=1))


@pytest.mark.parametrize("network", ["inception", "torchvision:resnet18", "nothing.pt"])
def test_missing_files_are_found_without_building_a_network(network, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    field = "network" if network == "nothing.pt" else "weights"
    with pytest.raises(UserError, match=rf"^metrics\.features\.{field}: "):
        check_features(FeatureNetwork(network=network), COLOUR, RECIPE)
    given = tmp_path / "file"
    given.write_bytes(b"not looked into")
    own, weights = (network, str(given)) if field == "weights" else (str(given), None)
    check_features(FeatureNetwork(network=own, weights=weights), COLOUR)
    section = FeatureNetwork(network=own, weights=str(given), resizer="antialiased")
    check_features(section, COLOUR)
    unread = {"inception": [], "torchvision:resnet18": ["resizer"]}
    assert section.unread(COLOUR.kind) == unread.get(network, ["weights", "resizer"])

"""Losses and terms as users write them, which recipes of tests name; and the same again, as the reference has them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigsgan.doctor.reference import Reference


class Margins:
    """Least squares between logits and a margin on either side."""

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = margin

    def discriminator(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        return (real_logits - self.margin).square().mean() + (fake_logits + self.margin).square().mean()

    def generator(self, fake_logits: Tensor) -> Tensor:
        return (fake_logits - self.margin).square().mean()


class PairedMargins(Margins):
    def generator(self, fake_logits: Tensor, real_logits: Tensor) -> Tensor:
        return (fake_logits - real_logits - self.margin).square().mean()


class Wing:
    """Feng et al. 2018, arXiv 1711.06753, equation 5, between G's images and the real ones of the batch."""

    def __init__(self, width: float, curvature: float = 2.0) -> None:
        self.width, self.curvature = width, curvature

    def __call__(self, images: Tensor, real_images: Tensor) -> Tensor:
        x = (images - real_images).abs()
        scale = torch.tensor(1 + self.width / self.curvature).log()
        inner = self.width * (1 + x / self.curvature).log()
        return torch.where(x < self.width, inner, x - self.width * (1 - scale)).mean()


class Features(nn.Module):
    """The mean square of a frozen layer's outputs, with a weight for each class."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, 4, 3)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.zeros_(self.layer.bias)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return ((1 + labels) * self.layer(images).square().mean(dim=(1, 2, 3))).mean()


class Counting:
    """Grows from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, images: Tensor) -> Tensor:
        self.calls += 1
        return (1 + self.calls // 1000) * images.mean()


class Drawn(nn.Module):
    """The mean output of a layer as torch draws it, with a window that is made at the first call of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.window = nn.Conv2d(1, 2, 3), torch.zeros(0)

    def forward(self, images: Tensor) -> Tensor:
        if self.window.shape != images.shape[-2:]:
            self.window = torch.ones(images.shape[-2:])
        return self.layer(self.window * images).mean()


def shifted_in_place(images: Tensor, real_images: Tensor) -> Tensor:
    return (images - real_images.add_(1)).mean()


def bounded(real_logits: Tensor, fake_logits: Tensor, scale: float = 1.0) -> Tensor:
    return (1 + scale * real_logits.square()).log().mean() + (1 + scale * fake_logits.square()).log().mean()


def diversity(images: Tensor) -> Tensor:
    return images.flatten(1).std(dim=0, correction=0).mean()


class Diversity:
    """The deviation of each pixel over the batch, averaged; it falls as images come closer to each other."""

    def means(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        return torch.stack([pixels.mean(dim=0), pixels.square().mean(dim=0)])

    def __call__(self, means: Tensor) -> Tensor:
        first, second = means
        return -(second - first.square() + 1e-4).sqrt().mean()


class Balance:
    """The square of the mean logit over all images, real and fake."""

    def means(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        return real_logits.mean() + fake_logits.mean()

    def __call__(self, means: Tensor) -> Tensor:
        return means.square()


class Largest(Balance):
    def means(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        return torch.maximum(real_logits.max(), fake_logits.max())


class LargestBesideMore(Balance):
    def means(self, real_logits: Tensor, fake_logits: Tensor) -> Tensor:
        return torch.stack([1e4 + fake_logits.mean(), real_logits.max()])

    def __call__(self, means: Tensor) -> Tensor:
        return means.square().sum()


class Several(Balance):
    def means(self, fake_logits: Tensor) -> list[Tensor]:
        return [fake_logits.mean()]


def noisy(images: Tensor) -> Tensor:
    return (images + torch.randn_like(images)).square().mean()


def not_reduced(images: Tensor) -> Tensor:
    return images.square().mean(dim=(1, 2, 3))


def without_gradient(images: Tensor) -> Tensor:
    return images.detach().mean()


def of_both(images: Tensor, fake_logits: Tensor) -> Tensor:
    return images.mean() * fake_logits.mean()


def of_labels(fake_logits: Tensor, labels: Tensor) -> Tensor:
    return (fake_logits * labels).mean()


def of_pixels(pixels: Tensor) -> Tensor:
    return pixels.mean()


def broken(images: Tensor) -> Tensor:
    return images.reshape(-1, 7).mean()


class Slopes:
    """The mean of log(1 + |gradient|^2) at real and at fake images."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, real_gradients: Tensor, fake_gradients: Tensor) -> Tensor:
        slopes = torch.cat([real_gradients, fake_gradients]).flatten(1).square().sum(dim=1)
        return (1 + self.scale * slopes).log().mean()


def of_gradients_and_logits(real_gradients: Tensor, real_logits: Tensor) -> Tensor:
    return real_gradients.square().mean() * real_logits.mean()


OWN = [
    "objective.loss={use: 'tests.own_losses:PairedMargins', pairs: true}",
    "objective.terms=[{use: 'tests.own_losses:Wing', weight: 3, every: 2, arguments: {width: 0.5}},"
    " {use: 'tests.own_losses:Features', weight: 0.7, arguments: {channels: 1}},"
    " {use: 'tests.own_losses:bounded', network: discriminator, weight: 0.3, arguments: {scale: 4.0}},"
    " {use: 'tests.own_losses:Slopes', network: discriminator, weight: 0.7, every: 2, differentiates: [real, fake],"
    " arguments: {scale: 3.0}},"
    " {use: 'tests.own_losses:Diversity', weight: 0.5},"
    " {use: 'tests.own_losses:Balance', network: discriminator, weight: 3},"
    " {use: 'tests.own_losses:bounded', name: bounded_for_g, weight: 0.2}]",
]


class OwnReference(Reference):
    """The reference with the parts of the game ``OWN``, written out."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)

        def far(r, f, scale):
            return torch.log1p(scale * r**2).mean() + torch.log1p(scale * f**2).mean()

        def d_loss(r, f):
            balance = torch.cat([r, f]).mean() * 2
            return F.mse_loss(r, r * 0 + 1) + F.mse_loss(f, f * 0 - 1) + 0.3 * far(r, f, 4) + 3 * balance**2

        self.d_loss = d_loss
        self.g_loss = lambda r, f: ((f - r - 1) ** 2).mean() + 0.2 * far(r, f, 1)
        self.pairs = True
        self.penalty = self.slopes
        self.image_terms = self.terms_of_images

    def slopes(self, d_step, *sides):
        if d_step % 2:
            return 0
        grads = [torch.autograd.grad(logits.sum(), x, create_graph=True)[0].flatten(1) for x, logits in sides]
        return 2 * 0.7 * sum(torch.log1p(3 * g.norm(dim=1) ** 2).mean() for g in grads) / 2

    def terms_of_images(self, update, images, targets, labels):
        x = (images - targets).abs()
        inside = 0.5 * torch.log1p(x / 2)
        wing = torch.where(x < 0.5, inside, x - 0.5 + 0.5 * torch.log(torch.tensor(1.25))).mean()
        sums = 0.1 * F.conv2d(images, torch.ones(1, images.shape[1], 3, 3, device=images.device))
        spread = (images.var(dim=0, correction=0) + 1e-4).sqrt().mean()
        return (
            3 * (0 if update % 2 else 2) * wing
            - 0.5 * spread
            + 0.7 * ((1 + labels) * sums.square().mean(dim=(1, 2, 3))).mean()
        )


def of_reals(real_images):
    return real_images.square().mean()


def of_two(images):
    return images[:2].sub(images[1]).square().mean()


def contrast(images):
    """Minus the deviation of all pixels of the batch."""
    return -images.std()

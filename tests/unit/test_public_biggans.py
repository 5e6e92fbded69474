"""BigGANs of BigGAN-PyTorch without a shared embedding, and of StudioGAN, against both written out on their names."""

import math

import pytest
import torch
import torch.nn.functional as F

from bigsgan.errors import UserError
from bigsgan.models.build import build_network
from bigsgan.weights import biggan_pytorch, studiogan
from tests.tiny import tiny_recipe
from tests.unit.test_weights_biggan_pytorch import state_of


class Public:
    """A network's entries, made when they are first asked for, and its layers in evaluation mode."""

    def __init__(self, studio):
        self.studio, self.state, self.generator = studio, {}, torch.Generator().manual_seed(4)

    def entry(self, name, *shape, scale=0.5, offset=0.0):
        if name not in self.state:
            drawn = offset + scale * torch.randn(shape, generator=self.generator)
            self.state[name] = drawn.double().requires_grad_(not name.endswith(("_u", "_v", "u0", "mean", "var")))
        return self.state[name]

    def spectral(self, name, *shape):
        weight = self.entry(f"{name}.weight_orig" if self.studio else f"{name}.weight", *shape)
        matrix = weight.detach().flatten(1)
        if self.studio:  # torch.nn.utils.spectral_norm in evaluation
            u, v = self.entry(f"{name}.weight_u", shape[0]), self.entry(f"{name}.weight_v", math.prod(shape[1:]))
        else:
            v = F.normalize(self.entry(f"{name}.u0", 1, shape[0])[0] @ matrix, dim=0, eps=1e-12)
            u = F.normalize(matrix @ v, dim=0, eps=1e-12)
        return weight / (u @ (weight.flatten(1) @ v))

    def conv(self, name, h, out, kernel, bias=True):
        bias = self.entry(f"{name}.bias", out) if bias else None
        return F.conv2d(h, self.spectral(name, out, h.shape[1], kernel, kernel), bias, padding=kernel // 2)

    def linear(self, name, x, out, bias=True):
        return F.linear(x, self.spectral(name, out, x.shape[1]), self.entry(f"{name}.bias", out) if bias else None)

    def normalized(self, name, h, eps):
        mean, var = ("bn.running_mean", "bn.running_var") if self.studio else ("stored_mean", "stored_var")
        mean, var = (f"{name}.{leaf}" for leaf in (mean, var))
        if self.studio and name == "bn4":
            mean, var = f"{name}.running_mean", f"{name}.running_var"
        self.entry(var, h.shape[1], scale=0.05, offset=0.5)
        return F.batch_norm(h, self.entry(mean, h.shape[1]), self.state[var].abs(), eps=eps)

    def attention(self, names, h):
        theta, phi, g, out, gamma = names
        n, c, height, width = h.shape
        query = self.conv(theta, h, c // 8, 1, False).view(n, c // 8, -1)
        key = F.max_pool2d(self.conv(phi, h, c // 8, 1, False), 2).view(n, c // 8, -1)
        value = F.max_pool2d(self.conv(g, h, c // 2, 1, False), 2).view(n, c // 2, -1)
        weights = F.softmax(torch.bmm(query.transpose(1, 2), key), -1)
        mixed = torch.bmm(value, weights.transpose(1, 2)).view(n, c // 2, height, width)
        return h + self.entry(gamma, *([1] if self.studio else [])) * self.conv(out, mixed, c, 1, False)


def unshared(public, z, labels, eps=1e-5, channels=4, classes=3):
    """BigGAN-PyTorch's Generator(G_shared=False, hier=False) at 32x32 with attention at 16x16."""
    width = 4 * channels
    h = public.linear("linear", z, width * 16).view(len(z), width, 4, 4)
    for i in range(3):

        def bn(name, h):
            gain = 1 + F.embedding(labels, public.entry(f"{name}.gain.weight", classes, width))
            bias = F.embedding(labels, public.entry(f"{name}.bias.weight", classes, width))
            return public.normalized(name, h, eps) * gain[:, :, None, None] + bias[:, :, None, None]

        block = f"blocks.{i}.0"
        x = F.interpolate(F.relu(bn(f"{block}.bn1", h)), scale_factor=2)
        x = public.conv(f"{block}.conv1", x, width, 3)
        x = public.conv(f"{block}.conv2", F.relu(bn(f"{block}.bn2", x)), width, 3)
        h = x + public.conv(f"{block}.conv_sc", F.interpolate(h, scale_factor=2), width, 1)
        if i == 1:
            h = public.attention([*(f"blocks.1.1.{n}" for n in ("theta", "phi", "g", "o")), "blocks.1.1.gamma"], h)
    h = public.normalized("output_layer.0", h, 1e-5) * public.entry("output_layer.0.gain", width)[:, None, None]
    h = h + public.entry("output_layer.0.bias", width)[:, None, None]
    return torch.tanh(public.conv("output_layer.2", F.relu(h), 3, 3))


def studio_generator(public, z, labels, multiples=(4, 4, 4, 4), channels=4, classes=3, shared=5):
    """StudioGAN's big_resnet Generator, at 32x32 unless told otherwise, with attention behind the second block."""
    widths, chunks = [channels * multiple for multiple in multiples], z.chunk(len(multiples), dim=1)
    embedding = F.embedding(labels, public.entry("shared.weight", classes, shared))
    h = public.linear("linear0", chunks[0], widths[0] * 16).view(len(z), widths[0], 4, 4)
    for i, width in enumerate(widths[1:]):
        affine, number = torch.cat([embedding, chunks[i + 1]], 1), i + (i > 1)

        def bn(name, h, affine=affine):
            gain = 1 + public.linear(f"{name}.gain", affine, h.shape[1], False)
            bias = public.linear(f"{name}.bias", affine, h.shape[1], False)
            return public.normalized(name, h, 1e-4) * gain[:, :, None, None] + bias[:, :, None, None]

        block = f"blocks.{number}.0"
        x = F.interpolate(F.relu(bn(f"{block}.bn1", h)), scale_factor=2)
        x = public.conv(f"{block}.conv2d1", x, width, 3)
        x = public.conv(f"{block}.conv2d2", F.relu(bn(f"{block}.bn2", x)), width, 3)
        h = x + public.conv(f"{block}.conv2d0", F.interpolate(h, scale_factor=2), width, 1)
        if i == 1:
            names = [f"blocks.2.0.{n}" for n in ("conv1x1_theta", "conv1x1_phi", "conv1x1_g", "conv1x1_attn", "sigma")]
            h = public.attention(names, h)
    h = public.normalized("bn4", h, 1e-4) * public.entry("bn4.weight", widths[-1])[:, None, None]
    return torch.tanh(public.conv("conv2d5", F.relu(h + public.entry("bn4.bias", widths[-1])[:, None, None]), 3, 3))


def studio_generator_64(public, z, labels):
    return studio_generator(public, z, labels, (16, 8, 4, 2, 1), channels=8)


def studio_discriminator(public, images, labels, channels=8, classes=3):
    """StudioGAN's big_resnet Discriminator at 32x32 with projection and attention behind the first block."""
    width, h = 2 * channels, images
    for i, number in enumerate((0, 2, 3, 4)):
        block = f"blocks.{number}.0"
        h = F.relu(h) if i else h  # in place there: the shortcut reads it too
        x = public.conv(f"{block}.conv2d1", h, width, 3)
        x = public.conv(f"{block}.conv2d2", F.relu(x), width, 3)
        if i < 2:
            shortcut = public.conv(f"{block}.conv2d0", h, width, 1)
            h = F.avg_pool2d(x, 2) + F.avg_pool2d(shortcut, 2)
        else:
            h = x + h
        if i == 0:
            names = [f"blocks.1.0.{n}" for n in ("conv1x1_theta", "conv1x1_phi", "conv1x1_g", "conv1x1_attn", "sigma")]
            h = public.attention(names, h)
    h = F.relu(h).sum(dim=(2, 3))
    table = public.spectral("embedding", classes, width)
    return public.linear("linear1", h, 1)[:, 0] + (F.embedding(labels, table) * h).sum(1)


def check(tmp_path, module, network, function, inputs, labels, **overrides):
    """Outputs, and gradients by inputs and by all weights, are those of the function on the public names."""
    public = Public(module is studiogan)
    function(public, inputs, labels)  # makes the entries
    theirs = inputs.clone().requires_grad_()
    out = function(public, theirs, labels)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (out * weights).sum().backward()
    state = {name: tensor.detach().float() for name, tensor in public.state.items()}
    grads = {n: state[n] if t.grad is None else t.grad for n, t in public.state.items()}
    convert = getattr(module, f"{network}_state")
    section = getattr(module, f"{network}_section")(state) | overrides
    data = module.data_section(state)
    recipe = tiny_recipe(tmp_path, "data={kind: synthetic, num_images: 8}")
    tree = recipe.model_dump()
    tree["data"] |= data
    tree[network] = section
    other = "discriminator" if network == "generator" else "generator"
    tree[other]["attention"] = []
    ours = build_network(type(recipe).model_validate(tree), network)
    ours.load_state_dict(convert(state))
    ours.double().eval()
    x = inputs.clone().requires_grad_()
    found = ours(x, labels)
    (found * weights).sum().backward()
    torch.testing.assert_close(found, out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    expected = convert(grads)
    assert out.std() > 0.05
    for name, parameter in ours.named_parameters():
        tolerance = 1e-5 * max(1.0, expected[name].abs().max().item())
        torch.testing.assert_close(parameter.grad, expected[name].double(), rtol=1e-5, atol=tolerance, msg=name)
    return section


LATENTS = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
LABELS = torch.tensor([0, 2, 1, 2])


def test_biggan_pytorch_without_a_shared_embedding(tmp_path):
    section = check(tmp_path, biggan_pytorch, "generator", unshared, LATENTS, LABELS)
    assert section == {
        "family": "biggan", "channels": 4, "latent_size": 8, "hierarchical": False, "shared_embedding": False,
        "attention": [16],
    }  # fmt: skip


def test_bn_eps_is_that_of_the_blocks(tmp_path):
    def network(*arguments):
        return unshared(*arguments, eps=1e-2)

    check(tmp_path, biggan_pytorch, "generator", network, LATENTS, LABELS, norm_eps=1e-2)


def test_weights_without_spectral_norm_are_refused():
    state = {name: t for name, t in state_of("biggan", "generator").items() if not name.endswith(("u0", "sv0"))}
    with pytest.raises(UserError, match="weights: must have spectral norm, as all BigGANs here"):
        biggan_pytorch.generator_state(state)


def test_studiogan(tmp_path):
    section = check(tmp_path, studiogan, "generator", studio_generator, LATENTS, LABELS)
    assert section["norm_eps"] == section["output_norm_eps"] == 1e-4
    assert (section["attention"], section["latent_size"], section["embedding_size"]) == ([16], 8, 5)
    check(tmp_path, studiogan, "discriminator", studio_discriminator, IMAGES, LABELS)


def test_studiogan_at_64_has_its_own_widths(tmp_path):
    latents = torch.randn(4, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    section = check(tmp_path, studiogan, "generator", studio_generator_64, latents, LABELS)
    assert (section["multiples"], section["channels"], section["attention"]) == ([16, 8, 4, 2, 1], 8, [16])


def test_multiples_are_one_for_each_feature_map(tmp_path):
    with pytest.raises(UserError, match=r"generator.multiples: must have 3 numbers, got \[4, 2\]"):
        tiny_recipe(tmp_path, "generator.multiples=[4, 2]")
    alone = ["generator.channels=8", "generator.attention=[]"]
    stack = build_network(tiny_recipe(tmp_path, "generator.multiples=[4, 2, 1]", *alone), "generator")
    assert [stack.layers[str(i)].conv2.weight.shape[0] for i in (1, 2)] == [16, 8]


def test_attention_after_blocks_of_one_resolution_is_refused_by_its_cause():
    """The public D of 32x32 counts all its blocks as 16x16: --D_attn 16 puts attention after each of the four."""
    public = Public(studio=True)
    studio_discriminator(public, IMAGES, LABELS)
    state = {name: tensor.detach() for name, tensor in public.state.items()}
    attention = {name: tensor for name, tensor in state.items() if name.startswith("blocks.1.")}
    more = {name.replace("blocks.1.", "blocks.5."): tensor for name, tensor in attention.items()}
    with pytest.raises(UserError, match=r"^weights: has attention after .* resolution, 8x8 \(block 3; .*D_attn 16"):
        studiogan.discriminator_section({**state, **more})

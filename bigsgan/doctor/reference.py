"""The reference: plain PyTorch in one process, with no engine, no seam and no concatenation.

G's gradient comes from backpropagating through D(G(z)); real and fake go through D one after the other; losses and
penalties are written out. It shares with the product only the draws, the layers, which are tested against torch's, and
frozen networks, whose code is compared with the published one. ``Reference.update`` has all schedules.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F

from bigsgan.adversarial import LatentSource, SampleDraws
from bigsgan.adversarial.terms.teacher import build_teacher
from bigsgan.config import NETWORKS, Recipe
from bigsgan.data import RealImages, Slice, build_training_dataset
from bigsgan.data.conditions import conditions_of
from bigsgan.doctor import few_steps
from bigsgan.doctor.adversarial_weights import adversarial_weights, normalized
from bigsgan.doctor.distance import Distance, distance_to_teacher
from bigsgan.doctor.games import awake
from bigsgan.doctor.losses import losses_on_logits, of_judged, of_outputs
from bigsgan.doctor.penalties import Penalties
from bigsgan.doctor.rates import make_optimizer, moved, own_rate
from bigsgan.draws import Draws
from bigsgan.models import noise
from bigsgan.models.build import build_network
from bigsgan.models.layers import moving_state
from bigsgan.models.network import initialize
from bigsgan.models.precision import avoid_fp16_on_a_cpu


def build_networks(recipe: Recipe) -> tuple[Any, Any]:
    """G and D in the initial state of a run of this recipe, on the CPU."""
    with awake():
        networks = build_network(recipe, "generator"), build_network(recipe, "discriminator")
        for network, seed in zip(networks, (recipe.seed, recipe.seed + 2**32), strict=True):
            network.checkpointing = False
            for layer in network.spectral_layers():
                layer.orthogonal = 0.0  # added below, from its definition
            initialize(network, seed)
    return networks


class Reference:
    """Runs updates and holds the networks, the EMA and the last gradients."""

    def __init__(self, recipe: Recipe, device: torch.device | None = None) -> None:
        """Begin as a run of this recipe does, on a device or else the CPU."""
        self.recipe, self.device = recipe, device or torch.device("cpu")
        # Of a loss from outside, a caller sets these six.
        self.d_loss, self.g_loss = losses_on_logits(recipe)
        self.pairs = recipe.objective.loss == "relativistic"
        self.image_terms: Any = lambda update, images, targets, labels: 0
        self.output_terms = self.image_terms  # of what G returns after its images
        self.penalty: Any = lambda d_step, real, fake: 0  # of images and logits, each
        self.g, self.d = (network.to(self.device) for network in build_networks(recipe))
        for network in (self.g, self.d):
            avoid_fp16_on_a_cpu(network, self.device.type == "cuda")
        self.opt_g = make_optimizer(recipe.optimizer.generator, self.g)
        self.opt_d = make_optimizer(recipe.optimizer.discriminator, self.d)
        self.outputs: list[Any] = []
        self.beside: list[Any] = []  # what D returned of the last images after its logits
        self.seen: list[Any] = []
        self.anchors: list[Any] | None = None
        self.signs: list[Any] = []
        self.lengths: list[Any] = []
        self.mean_length: Any = 0.0
        self.mean_square: Any = 0.0
        self.ema = {k: v.clone() for k, v in self.g.state_dict().items()}
        self.phases: dict[tuple[int, int], Any] = {}
        self.kept: dict[int, Any] = {}  # images for D's steps, by update, if updates overlap
        draws = Draws(recipe.seed)
        self.draws = SampleDraws(draws, self.device)
        self.parts = {n: Slice(recipe.batch, recipe.accumulation_of(n), 0, 1) for n in NETWORKS}
        part = self.parts["discriminator"]
        self.teacher: Any = build_teacher(recipe, self.device)
        self.distance = Distance(recipe, self.device)
        dataset = build_training_dataset(recipe.data)
        conditions = conditions_of(recipe.data, dataset, recipe.objective.fake_labels == "frequencies")
        timed, dropout = recipe.generator.reads_times, recipe.data.condition_dropout
        self.source = LatentSource(self.draws, recipe.latent_size, conditions, recipe.generator.draws, timed, dropout)
        self.reals = RealImages(dataset, recipe.data, draws, part, self.device, shows=self.teacher is not None)

    def forward(self, network, moving, *inputs):
        """A network's first output; those of G that follow are kept. The network's state moves if ``moving``."""
        with moving_state(network.stateful_layers(), moving):
            output, *more = network.fold(*inputs)
        if network is self.g:
            self.outputs = more
        return output

    def generator_inputs(self, stream, counters, part):
        """G's inputs for each micro-batch of a part."""
        if not self.recipe.translates:
            inputs = self.source.phase(stream, counters, part)
            found = [inputs(j) for j in range(part.accumulation)]
            if self.recipe.objective.fake_labels == "data":
                found = [(z, y, *rest) for (z, _, *rest), (_, y) in zip(found, self.last_reals, strict=True)]
            if self.recipe.generator.num_steps == 1:
                return found
            places = [(stream, counters, part.positions(j)) for j in range(part.accumulation)]
            if self.recipe.generator.simulates_steps:
                return [few_steps.of_samples(self, *place, *drawn) for place, drawn in zip(places, found, strict=True)]
            return [
                few_steps.of_reals(self, *place, *real) for place, real in zip(places, self.last_reals, strict=True)
            ]
        seeds = [self.draws.seeds(f"{stream}/seed", counters, part.positions(j)) for j in range(part.accumulation)]
        first, num = self.recipe.input_channels, int(self.recipe.generator.draws)
        return [(x[:, :first], y, *[seed] * num) for (x, y), seed in zip(self.last_reals, seeds, strict=True)]

    def _targets(self, x):
        return x[:, self.recipe.data.input_channels :] if self.recipe.data.paired else x

    def _conditions(self, labels, inputs, seeds, is_real=False):
        latents = [inputs[0] * (not is_real)] if self.recipe.discriminator_reads_latents else []
        return (labels, inputs[0]) if self.recipe.data.paired else (labels, *latents, *seeds)

    def _seeds(self, stream, counters, part, j):
        reads = self.recipe.augmentation or self.recipe.discriminator.draws
        return [self.draws.seeds(f"augment/{stream}", counters, part.positions(j))] if reads else []

    def _learn_from_logits(self):
        real, fake = (torch.cat(logits) for logits in zip(*self.seen, strict=True))
        self.seen = []
        if lecam := self.recipe.objective.lecam:
            means = [real.mean(), fake.mean()]
            pairs = zip(self.anchors or means, means, strict=True)
            self.anchors = [lecam.decay * old + (1 - lecam.decay) * new for old, new in pairs]
        augmentation = self.recipe.augmentation
        if augmentation and augmentation.target is not None:
            self.signs.append(real.sign())
            if len(self.signs) == augmentation.interval:
                direction = torch.sign(torch.cat(self.signs).mean() - augmentation.target)
                step = self.recipe.batch * augmentation.interval / augmentation.ramp_nimg * direction
                self.d.layers["-1"].p.add_(step).clamp_(min=0)
                self.signs = []

    def _judged(self, x, *y, moving=False):
        """D's logits of images. D sees as many copies of a real image as G makes images of a sample."""
        channels = self.recipe.data.channels
        copies = self.recipe.generator.images_per_sample if x.shape[1] == channels else 1
        judged = self.forward(self.d, moving, torch.cat([x] * copies, dim=1), *y)
        if self.recipe.objective.distribution_matching:
            judged, *self.beside = judged.split(1, dim=1)
        return judged

    def _features(self, h):
        found = []
        for layer in list(self.d.layers.values())[:-1]:
            h = layer(*h)
            found.append(h[0])
        return found

    def _path_length(self, inputs):
        styles, seeds = self.g.layers["0"](*inputs)
        section: Any = self.recipe.objective.path_length
        h = styles, seeds
        for layer in list(self.g.layers.values())[1:]:
            h = layer(*h)
        y = noise.normal(inputs[2], 2**32, tuple(h[0].shape[1:]))
        (g,) = torch.autograd.grad(
            (h[0] * y).sum() / math.sqrt(h[0].shape[2] * h[0].shape[3]), styles, create_graph=True
        )
        lengths = g.pow(2).sum(-1).mean(-1).sqrt()[:: section.batch_shrink]
        self.lengths.append(lengths.detach())
        self.moved_length = (1 - section.decay) * self.mean_length + section.decay * torch.cat(self.lengths).mean()
        return (lengths - self.moved_length).square().mean()

    def _penalty_weight(self, section, nimg):
        if section.final_weight is None:
            return section.weight
        return moved(section.weight, section.final_weight, nimg, section.decay_nimg or self.recipe.total_nimg)

    def _set_rates(self, optimizer, section, nimg):
        end = section.decay_nimg or self.recipe.total_nimg
        lr = moved(section.lr, section.final_lr, nimg, end) if section.decay == "cosine" else section.lr
        for group in optimizer.param_groups:
            group["lr"] = lr * own_rate(section.groups, group.get("name", ""), nimg)
            if section.decay == "cosine" and section.final_beta2 is not None:
                group["betas"] = (section.betas[0], moved(section.betas[1], section.final_beta2, nimg, end))

    def _read(self, update, d_step):
        if (update, d_step) not in self.phases:
            self.phases[update, d_step] = self.reals.next_phase()
        self.last_reals = self.phases[update, d_step]
        return self.last_reals

    def _latents(self, update, d_step):
        return self.generator_inputs("discriminator", (update, d_step), self.parts["discriminator"])

    def _make(self, update):
        """Images for all steps of D in an update."""
        with torch.no_grad():
            num = self.recipe.objective.d_steps
            return [[self.forward(self.g, False, *z) for z in self._latents(update, k)] for k in range(num)]

    def _d_step(self, update, d_step, fakes=None):
        section, part = self.recipe.objective, self.parts["discriminator"]
        reals, latents = self._read(update, d_step), self._latents(update, d_step)
        self.last_latents = latents
        phase = update * section.d_steps + d_step
        for j, ((x, y), inputs) in enumerate(zip(reals, latents, strict=True)):
            real, fake = (self._seeds(f"discriminator/{kind}", (update, d_step), part, j) for kind in ("real", "fake"))
            x, y = self._targets(x), self._conditions(y, inputs, real, True)
            c = self._conditions(inputs[1], inputs, fake)
            # If G's update takes the same images, only this forward pass moves G's state.
            moving = section.schedule == "exact" and section.reuse_fakes and d_step == section.d_steps - 1 and j == 0
            every = self.recipe.statistics == "every_pass"
            with torch.no_grad():
                fake = self.forward(self.g, moving or every, *inputs) if fakes is None else fakes[j].clone()
            x.requires_grad_(), fake.requires_grad_()
            # Only the first of these forward passes moves the power iteration, before the others use it.
            logits_real = self._judged(x, *y, moving=every or j == 0)
            logits_fake = self._judged(fake, *c)
            loss = self.d_loss(logits_real, logits_fake) + self.penalty(phase, (x, logits_real), (fake, logits_fake))
            loss = loss + of_judged(self.recipe, "discriminator", self.beside)
            if section.centering:
                loss = loss + section.centering * ((logits_real + logits_fake) ** 2).mean()
            if self.teacher is not None:
                loss = loss + distance_to_teacher(self.recipe, self.d, self.teacher, reals[j], x, *y)
            place, weight = (update, d_step), lambda each: self._penalty_weight(each, update * self.recipe.batch)
            of = Penalties(self.recipe, self._judged, self.draws, place, part.positions(j))
            for name, images, labels, logits in (("r1", x, y, logits_real), ("r2", fake, c, logits_fake)):
                penalty = getattr(section, name)
                if penalty and phase % penalty.every == 0:
                    loss = loss + penalty.every * weight(penalty) / 2 * of.norm(name, images, labels, logits)
            if section.gradient_penalty:
                loss = loss + section.gradient_penalty.weight * of.distance(x, fake, y)
            if section.lecam and self.anchors:
                a_real, a_fake = self.anchors
                far = F.relu(logits_real - a_fake).square().mean() + F.relu(a_real - logits_fake).square().mean()
                loss = loss + section.lecam.weight * far
            self.seen.append((logits_real.detach(), logits_fake.detach()))
            learns = update * self.recipe.batch >= section.discriminator_from_nimg
            (learns * loss / part.accumulation).backward()
        self.d_grads = self._finish(self.d, self.opt_d, section.orthogonal.discriminator)

    def _g_backward(self, update):
        """Compute G's gradient with D as it is now."""
        part, self.own_images, parts, made = self.parts["generator"], [], [], []
        latents = self.last_latents
        if not self.recipe.objective.reuse_fakes:
            latents = self.generator_inputs("generator", (update,), part)
        for j, inputs in enumerate(latents):
            seeds = {kind: self._seeds(f"generator/{kind}", (update,), part, j) for kind in ("real", "fake")}
            comes_first = self.recipe.objective.schedule != "exact"
            every = self.recipe.statistics == "every_pass"
            moving = every or (j == 0 and (comes_first or not self.recipe.objective.reuse_fakes))
            images, c = self.forward(self.g, moving, *inputs), self._conditions(inputs[1], inputs, seeds["fake"])
            self.own_images.append(images.detach())
            x, y = self.last_reals[j]
            real = None
            if self.pairs:
                real = self._judged(self._targets(x), *self._conditions(y, inputs, seeds["real"], True), moving=every)
            adversarial = self.g_loss(real, self._judged(images, *c, moving=every and real is None))
            rest = self.image_terms(update, images, self._targets(x), inputs[1])
            loss: Any = self.output_terms(update, images, self._targets(x), inputs[1])
            loss = loss + of_outputs(self.recipe, inputs[0], *self.outputs)
            loss = loss + of_judged(self.recipe, "generator", self.beside)
            rest = rest + self.distance(images, self._targets(x))
            if transport := self.recipe.objective.transport:
                weight = self._penalty_weight(transport, update * self.recipe.batch)
                rest = rest + weight * (images.flatten(1) - inputs[0]).pow(2).mean()
            if near := self.recipe.objective.consistency:
                *coarser, last = images.chunk(self.recipe.generator.images_per_sample, dim=1)
                error = sum(F.mse_loss(x, last) / (len(coarser) - i) for i, x in enumerate(coarser))
                rest = rest + near.weight * error / len(coarser)
            if self.recipe.objective.feature_matching:
                targets = self._targets(x), *self._conditions(y, inputs, seeds["real"], True)
                pairs = zip(self._features(targets), self._features((images, *c)), strict=True)
                distances = [F.l1_loss(ours, theirs.detach()) for theirs, ours in pairs]
                loss = loss + self.recipe.objective.feature_matching * sum(distances) / len(distances)
            path_length = self.recipe.objective.path_length
            if path_length and update % path_length.every == 0:
                loss = loss + path_length.every * path_length.weight * self._path_length(inputs)
            parts.append((adversarial, rest, loss))
            made.append(images)
        section = self.recipe.objective.adversarial
        weights = adversarial_weights(section, update * self.recipe.batch, self.g, parts)
        if section.normalize:
            self.mean_square, weights = normalized(section.normalize, self.mean_square, weights, parts, made)
        for weight, (adversarial, rest, loss) in zip(weights, parts, strict=True):
            ((weight * adversarial + rest + loss) / part.accumulation).backward()
        self.opt_d.zero_grad()

    def _g_step(self):
        if self.lengths:
            self.mean_length, self.lengths = self.moved_length, []
        self.g_grads = self._finish(self.g, self.opt_g, self.recipe.objective.orthogonal.generator)

    def _finish(self, network, optimizer, orthogonal):
        if orthogonal:
            for layer in network.spectral_layers():
                w = layer.weight.flatten(1)
                off = (w @ w.T) * (1 - torch.eye(len(w), device=w.device))
                (orthogonal * off.square().sum()).backward()
        grads = {n: p.grad.clone() for n, p in network.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        return grads

    def _take_turns(self, update):
        for d_step in range(self.recipe.objective.d_steps):
            self._d_step(update, d_step)
        self._g_backward(update)
        self._g_step()

    def _begin_with_generator(self, update):
        """Compute G's gradient before D's steps, the first of which trains on the images of G's update if it may."""
        self._read(update, 0)
        self.last_latents = self._latents(update, 0)
        self._g_backward(update)
        fakes = self.own_images if self.recipe.objective.reuse_fakes else None
        self._g_step()
        for d_step in range(self.recipe.objective.d_steps):
            self._d_step(update, d_step, fakes if d_step == 0 else None)

    def _overlap(self, update):
        """Compute G's gradient before D's steps, and train D on images of the previous G, at first of the initial G."""
        last = self.recipe.objective.d_steps - 1
        self._read(update, 0)
        self.last_latents = self._latents(update + 1, last)  # for G's update, if it shares D's fakes
        self._g_backward(update)
        fakes = self.kept.get(update) or self._make(update)
        self.kept = {update + 1: self._make(update + 1)}
        self._g_step()
        for d_step in range(last + 1):
            self._d_step(update, d_step, fakes[d_step])

    def update(self, update: int) -> Reference:
        """Make the update with this number."""
        self.begun = copy.deepcopy(self.g) if self.recipe.generator.simulates_steps else self.g
        batch, ema = self.recipe.batch, self.recipe.ema
        self._set_rates(self.opt_g, self.recipe.optimizer.generator, update * batch)
        self._set_rates(self.opt_d, self.recipe.optimizer.discriminator, update * batch)
        orders = {"overlapped": self._overlap, "generator_first": self._begin_with_generator}
        orders.get(self.recipe.objective.schedule, self._take_turns)(update)
        self._learn_from_logits()
        half_life: float = ema.half_life_nimg
        if ema.warmup_nimg:
            half_life = moved(0, half_life, update * batch, ema.warmup_nimg)
        decay = 0.5 ** (batch / half_life) if half_life else 0
        for name, value in self.g.state_dict().items():
            is_parameter = name in dict(self.g.named_parameters())
            self.ema[name] = decay * self.ema[name] + (1 - decay) * value if is_parameter else value.clone()
        nimg = (update + 1) * batch
        if ema.reset_nimg and nimg % ema.reset_nimg < batch and nimg >= ema.reset_from_nimg:
            self.g.load_state_dict(self.ema)
        return self

    def result(self) -> dict[str, dict[str, torch.Tensor]]:
        """State of generator, discriminator and EMA: entry -> name -> tensor."""
        return {
            "generator": dict(self.g.state_dict()), "discriminator": dict(self.d.state_dict()), "average": self.ema
        }  # fmt: skip

    def memory(self) -> Any:
        """Return the state that an update leaves to the next, besides ``result``."""
        own = self.seen, self.anchors, self.signs, self.lengths, self.mean_length, self.mean_square, self.kept
        return copy.deepcopy((own, self.opt_g.state_dict(), self.opt_d.state_dict()))

    def go_back(self, state: Any, memory: Any) -> None:
        """Set the state to one from ``result``, whose tensors may have other shapes, and one from ``memory``."""
        own, of_g, of_d = copy.deepcopy(memory)
        self.seen, self.anchors, self.signs, self.lengths, self.mean_length, self.mean_square, self.kept = own
        for optimizer, saved in ((self.opt_g, of_g), (self.opt_d, of_d)):
            optimizer.load_state_dict(saved)
            optimizer.zero_grad()
        with torch.no_grad():
            for entry, tensors in self.result().items():
                for name, value in tensors.items():
                    value.copy_(state[entry][name].view(value.shape))

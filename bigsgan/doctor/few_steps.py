"""What a student of several steps reads in the reference: images with noise, of the time of one of its steps.

Shapes: n samples, Z numbers in a latent and in an image.
"""

# mypy: disable-error-code="no-untyped-def"

import torch


def _time(section, step):
    """Of a step (n, ...) from 0; float32's rounding would be that of an angle 1000 times as large."""
    t = 1 - step.double() / section.steps
    return (t * section.time_shift / (1 - t + t * section.time_shift)).float()


def _drawn(reference, stream, counters, samples, shape):
    u = reference.draws.uniform(f"{stream}/time", counters, samples, shape)
    return torch.ceil(u * reference.recipe.generator.steps - 1)


def of_reals(reference, stream, counters, samples, x, y):
    """Real images x with noise, (n, Z), labels, times (n,), maybe seeds."""
    section = reference.recipe.generator
    z = reference.draws.noise(f"{stream}/latent", counters, samples, x.shape[1:])
    t = _time(section, _drawn(reference, stream, counters, samples, (1, 1, 1)))
    seeds = [reference.draws.seeds(f"{stream}/seed", counters, samples)] * section.draws
    return (x + t * (z - x)).flatten(1), y, t.flatten(), *seeds


@torch.no_grad()
def of_samples(reference, stream, counters, samples, z, y, ones, *seeds):
    """The same of images by G's steps before, from latents z, by the G with which the update begins."""
    section, noisy = reference.recipe.generator, [z]
    last = _drawn(reference, stream, counters, samples, (1,))
    for step in range(section.steps - 1):
        t, later = _time(section, ones[:, None] * step), _time(section, ones[:, None] * (step + 1))
        x = reference.begun.fold(noisy[-1], y, t[:, 0], *seeds)[0].flatten(1)
        z = (noisy[-1] - (1 - t) * x) / t
        if section.sampler == "sde":
            z = reference.draws.noise(f"{stream}/step{step}", counters, samples, z.shape[1:])
        noisy.append((1 - later) * x + later * z)
    found = torch.stack(noisy).gather(0, last.long()[None].expand(1, *z.shape))[0]
    return found, y, _time(section, last)[:, 0], *seeds

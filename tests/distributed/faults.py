"""Faults in the product and below it, on one rank or all, that the doctor has to find; planted where such bugs live."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from bigsgan.adversarial.terms import GradientNorm
from bigsgan.checkpoint import saver
from bigsgan.doctor import arithmetic, examine, registry
from bigsgan.doctor import ranks as doctor_ranks
from bigsgan.doctor.checks import Subject
from bigsgan.doctor.games import TINY_GAMES
from bigsgan.draws import Draws
from bigsgan.engines import compiling, replicas
from bigsgan.engines.deepspeed.averaged_gradients import AveragedGradients
from bigsgan.engines.exchange import Exchange
from bigsgan.models.batch_norm import BatchStatistics
from bigsgan.models.layers import SpectralLayer
from bigsgan.runtime import comm
from bigsgan.training.ema import ShardedEMA
from tests.distributed import host_faults
from tests.examined import Kept

FAULTY = 1


def is_faulty():
    return comm.rank() == FAULTY


def wrapped(owner, name, around):
    """Patch a function or method: ``around(original, *arguments)`` takes its place."""
    original = getattr(owner, name)
    return mock.patch.object(owner, name, lambda *arguments, **options: around(original, *arguments, **options))


def sum_without_average():
    def begin(original, self, engine, *arguments, **options):
        original(self, engine, *arguments, **options)
        engine.gradient_average = False

    return wrapped(AveragedGradients, "__init__", begin)


def a_rank_left_out():
    def add(original, tensor, *arguments, **options):
        return original(tensor.zero_() if is_faulty() else tensor, *arguments, **options)

    return wrapped(dist, "all_reduce", add)


def noise_in_a_sum():
    def add(original, tensor, *arguments, **options):
        work = original(tensor, *arguments, **options)
        if tensor.is_floating_point() and tensor.numel() > 1:
            tensor[0] += 1e-6 * float(torch.rand(()))
        return work

    return wrapped(dist, "all_reduce", add)


def stale_gather():
    """Stage 3 does not write what its step computed where the next gather reads."""

    def write(original, self, *arguments):
        if not is_faulty():
            original(self, *arguments)

    return wrapped(DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", write)


def own_statistics():
    """Layers that average over ranks take what this rank has."""
    return mock.patch.object(replicas, "mean_over_ranks", lambda tensor, group=None, known=None: tensor * 1)


def inexact_kernel():
    def convolve(original, x, *arguments, **options):
        return original(x, *arguments, **options) * (1.001 if x.dtype == torch.float32 else 1)

    return wrapped(F, "conv2d", convolve)


def another_seed():
    def key(original, self, stream, counters):
        return original(self, stream, (*counters, 7) if is_faulty() else counters)

    return wrapped(Draws, "_key", key)


def swapped_hand_over():
    """Gradients of one micro-batch go to another."""
    held = []

    def send(original, self, phase, output):
        if phase.network != "discriminator":
            original(self, phase, output)
            return
        held.append(output)
        if len(held) == phase.num:
            while held:
                original(self, phase, held.pop())

    return wrapped(Exchange, "send", send)


def heavier_penalty():
    def of_squares(original, self, squares):
        return 1.01 * original(self, squares)

    return wrapped(GradientNorm, "of_squares", of_squares)


def ema_that_stays():
    def update(original, self, decay):
        if not is_faulty():
            original(self, decay)

    return wrapped(ShardedEMA, "update", update)


def changed_bit():
    def write(original, path, tensors, *arguments):
        changed = dict(tensors)
        if is_faulty():
            name = max(changed, key=lambda each: changed[each].numel())
            changed[name] = changed[name].detach().clone()
            changed[name].view(torch.int32)[-1] ^= 1
        return original(path, changed, *arguments)

    return wrapped(saver, "write_tensors", write)


def keeps_its_state(original, self, *arguments):
    moving, self.moving = self.moving, self.moving and not is_faulty()
    try:
        return original(self, *arguments)
    finally:
        self.moving = moving


def stale_statistic():
    """A running mean and variance that stop moving on one rank."""
    return wrapped(BatchStatistics, "_normalize", keeps_its_state)


def stale_power_iteration():
    """Singular vectors that stop moving on one rank."""
    return wrapped(SpectralLayer, "normalized_weight", keeps_its_state)


def small_networks():
    """No fault: networks whose compilation takes seconds."""
    return mock.patch.object(arithmetic, "COMPILED", TINY_GAMES["mlp"])


@contextmanager
def inexact_compilation():
    def compiled(original, *arguments):
        fast, *others = original(*arguments)
        return (lambda *inputs, **options: fast(*inputs, **options) * 1.001), *others

    with small_networks(), wrapped(compiling, "passes", compiled):
        yield


@contextmanager
def planted(name):
    with ExitStack() as stack:
        if name:
            stack.enter_context((globals().get(name) or getattr(host_faults, name))())
        yield


def examined(fault, names, directory):
    """By check, status, what rank 0 shows, its numbers and seconds, with a fault planted, on this rank of a pool."""
    name = f"faults{fault}{names}"
    default = dist.distributed_c10d._get_default_store()
    job = doctor_ranks.Job(dist.PrefixStore(name, default), comm.open_board(name), comm.rank(), comm.world_size())
    report = Kept()
    subject = Subject(job, local_rank=comm.rank(), out=directory)
    with planted(fault):
        examine.Examiner(subject, report).examine(registry.chosen(names, False))
    job.leave()
    if comm.rank():
        return None
    return {
        each.check.name: (each.finding.status, each.finding.said, dict(each.finding.numbers), each.seconds)
        for each in report.results
    }

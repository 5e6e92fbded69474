"""The sections of a recipe for the engines: how ranks share the networks."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from bigsgan.config.sections import NaturalInt, PathText, PositiveInt, Section

Ranks = PositiveInt | Annotated[float, Field(gt=0, lt=1)] | Literal["auto"]
"""Number of ranks of a network, their share of all ranks, or ``auto`` for the shortest updates."""


class FrozenParameters(Section):
    """How an engine holds parameters that it does not train: [a
    teacher's](../how-to/distill.md#what-is-exact-and-what-it-costs), or a frozen encoder's or decoder's."""

    precision: Literal["fp32", "bf16"] | None = None
    """Type in which they are kept, and in which layers of the package compute; by default that in which they are made.
    Code from outside computes as before, with a copy of a layer's frozen parameters, or of one at a time if they are
    sharded or offloaded. Codes stay float32."""
    sharded: bool | None = None
    """Each rank holds a part of their matrices, gathered at each use; by default at ZeRO 3."""
    offload: Literal["none", "cpu"] | None = None
    """``cpu`` keeps their matrices in host memory; by default as the DeepSpeed file's ``offload_param``."""
    persistence_threshold: NaturalInt | None = None
    """Largest matrix, in numbers, that stays whole on each device; by default 100,000, or at ZeRO 3
    ``stage3_param_persistence_threshold``."""


class Engine(Section):
    """How the ranks share one network."""

    ds_config: PathText = "ds_configs/zero0.json"
    """DeepSpeed file: ZeRO stage, offload, buckets, precision, communication."""
    accumulation: PositiveInt | None = None
    """Micro-batches of this network; by default the recipe's."""
    activation_checkpointing: bool = False
    """Recompute each layer in the backward pass: less memory, about a third more time."""
    compile: Literal["none", "layers", "whole"] = "none"
    """What torch.compile compiles at a time: faster updates after some minutes."""
    cuda_graphs: bool = False
    """Replay compiled code as CUDA graphs: less work for the host, more GPU memory."""
    pipeline_stages: PositiveInt = 1
    """Stages of layers, each on its own ranks."""
    ranks: Ranks | None = None
    """[Ranks of this network alone](../how-to/separate-ranks.md): their number or share; ``auto`` divides for the
    shortest updates. By default each rank holds a part of both networks."""
    partition: Literal["parameters", "uniform", "profile"] = "parameters"
    """What stages share equally: parameters, layers, or time, measured once on this machine."""
    frozen: FrozenParameters = FrozenParameters()


class Engines(Section):
    """The two engines."""

    generator: Engine = Engine()
    discriminator: Engine = Engine()
    stock_deepspeed: Literal["neither", "generator", "discriminator", "both"] = "neither"
    """Engines that keep DeepSpeed's own reductions, updates and prefetching, for comparison."""


class Pipeline(Section):
    """How updates run through pipelines; without effect if no network has pipeline stages."""

    generator_phase: Literal["keep", "recompute"] = "keep"
    """Keep G's activations of all micro-batches while D judges, or recompute them."""
    schedule: Literal["joint", "phases"] = "joint"
    """Let an update's phases overlap, or fill and drain the pipelines for each."""

"""Makes the two engines of a run's plan: networks, initialization, optimizers, DeepSpeed, executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import logger
from torch import nn

from bigsgan.config import NETWORKS, RunPlan
from bigsgan.config.deepspeed_file import DeepSpeedFile
from bigsgan.config.families.outside import is_outside
from bigsgan.config.run_directory import check_hosts
from bigsgan.engines.absent import AbsentEngine, share_outcomes
from bigsgan.engines.base import DTYPES, Engine
from bigsgan.engines.compile_checks import check_compiler, check_cuda_graphs
from bigsgan.engines.connecting import connect_groups
from bigsgan.engines.deepspeed import internals, nvme
from bigsgan.engines.deepspeed.device_skip import DeviceSkip, device_decides
from bigsgan.engines.deepspeed.layer_gathers import gather_by_layer
from bigsgan.engines.deepspeed.leftovers import divide_ranks, forget_pipeline
from bigsgan.engines.deepspeed.native_ops import ASYNC_IO, build_for_both, build_once
from bigsgan.engines.deepspeed.scalars import broadcasting_scalars
from bigsgan.engines.deepspeed_config import checked_config
from bigsgan.engines.exchange import build_exchange
from bigsgan.engines.executor import Executor
from bigsgan.engines.frozen import check_frozen, frozen_layout, hold_frozen, tell_frozen
from bigsgan.engines.initialization import initialize_engine
from bigsgan.engines.orders import Order
from bigsgan.engines.pipeline.build import build_pipeline
from bigsgan.engines.pipeline.layout import StageDivision, comparable, describe_bubble, meta_inputs
from bigsgan.engines.pipeline.observer import TRACE_FILE, Observer
from bigsgan.engines.replicas import join_replicas
from bigsgan.engines.zero import Root, ZeroEngine
from bigsgan.models import dual
from bigsgan.models.build import build_network, initial_seed, network_on_meta
from bigsgan.models.initial import with_memory
from bigsgan.models.network import LayerStack, initialize
from bigsgan.models.ours import is_ours
from bigsgan.models.precision import avoid_fp16_on_a_cpu
from bigsgan.monitor import NOTICE
from bigsgan.monitor.logs import keeping_notices
from bigsgan.runtime import comm, division, launched
from bigsgan.runtime.collective_errors import by_each

_log = logging.getLogger(__name__)


def on_this_machine(plan: RunPlan) -> RunPlan:
    """The same plan, for the devices and hosts that these ranks have.

    Raises:
        UserError: The plan depends on the number of ranks on a host, which the launcher does not tell.
    """
    check_hosts(plan)
    return replace(plan, on_gpus=comm.device().type == "cuda", ranks_per_host=launched.local_size(os.environ))


def build_executor(plan: RunPlan, divisions: Mapping[str, list[int]]) -> Executor:
    """Build generator and discriminator, each with its own DeepSpeed engine. Every rank calls this.

    Args:
        plan: The run's.
        divisions: By network, of the layers into stages, as a checkpoint has it; see Engine.division.

    Raises:
        UserError: This machine cannot do what the recipe or a DeepSpeed file asks for.
    """
    logger.setLevel(logging.ERROR)  # its warnings (an untested optimizer, say) ask nothing of the user
    networks = plan.recipe.networks
    configs = {network: checked_config(plan, network) for network in networks}
    for network in networks:
        check_compiler(plan, network)
        check_cuda_graphs(plan, network)
        check_frozen(plan, network)
    if any(map(plan.differentiates_forward, networks)):
        dual.load_rules()
    _tell_of_fp16(plan)
    exchange, divided = build_exchange(plan), dict[str, StageDivision]()
    if plan.is_split:
        build_for_both({n: plan.engines[n].file for n in NETWORKS}, plan.held_by(comm.rank()))
        divide_ranks([plan.placement(n).ranks for n in NETWORKS])

    def build() -> dict[str, Engine]:
        return _build_held(plan, configs, divisions, divided)

    with keeping_notices() as records:
        engines = by_each(comm, build) if plan.is_split else build()
    comm.extend_patience()
    connect_groups()
    if plan.is_split:
        _show_on_rank_zero(plan, [(record.levelno, record.getMessage()) for record in records])
    stages = {network: plan.placement(network).stage(comm.rank()) for network in NETWORKS}
    order = Order(plan, stages, comparable(divided))
    if bubble := describe_bubble(plan, divided):
        _log.log(NOTICE, bubble)
    observer = Observer(Path(plan.recipe.out) / TRACE_FILE) if bubble or plan.is_split else None
    if not plan.is_split:
        return Executor(engines, order, exchange, observer)
    for network in NETWORKS:
        own = engines.get(network)
        bounds = comm.from_rank(plan.placement(network).ranks.start, own and own.division)
        if own is None:
            engines[network] = AbsentEngine(plan.engines[network].file.precision == "fp16", bounds)
    engines = {network: engines[network] for network in NETWORKS}
    return Executor(engines, order, exchange, observer, partial(share_outcomes, plan, engines))


def _tell_of_fp16(plan: RunPlan) -> None:
    for network in NETWORKS:
        if getattr(plan.recipe, network).computes_in == "fp16" and not plan.on_gpus:
            _log.log(NOTICE, "%s: layers in fp16 compute in float32, because this is a CPU", network)


def _build_held(
    plan: RunPlan,
    configs: Mapping[str, dict[str, Any]],
    divisions: Mapping[str, list[int]],
    divided: dict[str, StageDivision],
) -> dict[str, Engine]:
    """Build the engines of the networks that this rank holds; ``divided`` gets the divisions of those in stages."""
    engines: dict[str, Engine] = {}
    for network, config in configs.items():
        if comm.rank() not in plan.placement(network).ranks:
            continue
        forget_pipeline()
        with division.within_part():
            if plan.placement(network).num_stages > 1:
                engine, divided[network] = build_pipeline(plan, network, config, divisions.get(network))
                engines[network] = engine
            else:
                engines[network] = _build_zero(plan, network, config)
    forget_pipeline()
    return engines


def _show_on_rank_zero(plan: RunPlan, notices: Sequence[tuple[int, str]]) -> None:
    """Log on rank 0, whose terminal it is, what the first ranks of other networks have noticed. A collective."""
    for network in NETWORKS:
        first = plan.placement(network).ranks.start
        noticed = comm.from_rank(first, notices)
        if comm.rank() == 0 != first:
            for level, text in noticed:
                _log.log(level, "%s", text)


def _build_zero(plan: RunPlan, network: str, config: dict[str, Any]) -> ZeroEngine:
    section, file = plan.engines[network].section, plan.engines[network].file
    release = _offload_to_nvme(plan, network, config) if file.uses_nvme else None
    stack = _build_initialized(plan, network, file, config)
    tell_frozen(plan, network, stack)
    _tell_of_spectral_norm(plan, network, stack)
    root = Root(stack, section.compile, section.cuda_graphs, file.stage == 3)
    engine, averaged = initialize_engine(plan, network, stack, root, config)
    if file.stage == 3 and section.compile != "none":
        gather_by_layer(engine, stack)
    if file.uses_nvme:
        internals.keep_gradients_in_memory(engine)
    join_replicas(stack, comm.world_size(), 0, division.part(), plan.statistics_parts(network))
    device_skip = DeviceSkip(engine) if device_decides(engine, plan, network) else None
    stock = plan.engines[network].is_stock
    built = ZeroEngine(engine, root, release, averaged, device_skip, stock)
    if file.stage == 3 and any(map(_is_foreign, stack.modules())):
        built.note_foreign_uses(tuple(torch.zeros_like(x, device=comm.device()) for x in meta_inputs(plan, network, 2)))
    return built


def _tell_of_spectral_norm(plan: RunPlan, network: str, stack: LayerStack) -> None:
    engine = plan.engines[network]
    if engine.file.stage == 3 and not engine.section.activation_checkpointing and stack.spectral_layers():
        _log.warning(
            "%s: from forward to backward, spectral norm keeps an unsharded copy of every weight on each rank; "
            "engines.%s.activation_checkpointing=true keeps them sharded",
            network,
            network,
        )


def _is_foreign(module: nn.Module) -> bool:
    """Return whether a module has parameters and is none of the package's."""
    return any(True for _ in module.parameters(recurse=False)) and not is_ours(module)


def _offload_to_nvme(plan: RunPlan, network: str, config: dict[str, Any]) -> Callable[[], None]:
    """Complete the section for NVMe; return what removes the swap files."""
    file = plan.engines[network].file
    buffers = nvme.num_swap_buffers(file, plan.engines[network].optimizer)
    path, release = by_each(
        comm, lambda: nvme.open_swap_directory(file, network, comm.rank()), undo=lambda opened: opened[1]()
    )
    build_once(ASYNC_IO)
    zero = config["zero_optimization"]
    zero["offload_optimizer"] = {**zero["offload_optimizer"], "nvme_path": str(path), "buffer_count": buffers}
    return release


def _build_initialized(plan: RunPlan, network: str, file: DeepSpeedFile, config: dict[str, Any]) -> LayerStack:
    """Build the network and initialize it; at ZeRO 3 sharded from the first parameter on."""
    seed = initial_seed(plan.recipe, network)
    section = getattr(plan.recipe, network)
    if is_outside(section.family) or section.freezes:  # zero.Init shares out parameters before they become buffers
        return _build_layer_by_layer(plan, network, file, config)
    if file.stage < 3:
        stack = build_network(plan.recipe, network).to(comm.device())
        avoid_fp16_on_a_cpu(stack, plan.on_gpus)
        initialize(stack, seed)
        return stack
    with deepspeed.zero.Init(config_dict_or_path=config, data_parallel_group=division.part()):
        stack = build_network(plan.recipe, network)
    avoid_fp16_on_a_cpu(stack, plan.on_gpus)
    for module in stack.modules():  # zero.Init gives buffers the parameters' type and place
        for name, buffer in module.named_buffers(recurse=False):
            dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
            setattr(module, name, torch.empty(buffer.shape, dtype=dtype, device=comm.device()))

    def gather(parameters: list[nn.Parameter]) -> AbstractContextManager:
        return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)

    by_each(comm, lambda: initialize(stack, seed, gather, writes=comm.rank() == 0))
    return stack


def _build_layer_by_layer(plan: RunPlan, network: str, file: DeepSpeedFile, config: dict[str, Any]) -> LayerStack:
    """Construct each layer whole on every rank; share out what ranks hold parts of before the next.

    Code from outside fills its parameters where it constructs them, which it cannot do with shards, and those that it
    freezes become buffers before zero.Init would share them out.
    """
    stack = network_on_meta(plan.recipe, network)
    for number in range(len(stack.layers)):
        layer = with_memory(stack.part(number, number + 1), comm.device())
        initialize(layer, initial_seed(plan.recipe, network))
        if frozen_layout(plan, network).num_ranks > 1:
            comm.broadcast(layer.buffers(), 0, division.part())
        gather = partial(comm.gather_parts, group=division.part())
        hold_frozen(plan, network, layer, comm.rank(), gather, comm.device())
        if file.stage == 3:
            for parameter in layer.parameters():
                parameter.data = parameter.data.to(DTYPES[file.precision])
            with broadcasting_scalars():
                deepspeed.zero.Init(layer, data_parallel_group=division.part(), config_dict_or_path=config)
    if not getattr(getattr(plan.recipe, network), "exact", True):  # its random numbers must differ from rank to rank
        torch.manual_seed(initial_seed(plan.recipe, network) + comm.rank())
    return stack

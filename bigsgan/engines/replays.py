"""Passes that are replayed as CUDA graphs (engines.*.cuda_graphs), and the lifetime of their results.

The results of CUDA graphs lie in a pool of memory that later replays use again. From reading torch 2.15,
torch/_inductor/cudagraph_trees.py:

- Between two marks (``cudagraph_mark_step_begin``) no tensor is overwritten that somebody holds. A graph is replayed
  only if the tensors that were dead when it was recorded are dead again (``check_invariants``); else it is recorded
  anew after the living ones. Storages are watched, so views and tensors that autograd saved count (``check_refcount``).
  After the first mark, calls of compiled functions no longer count as marks (``get_curr_generation``).
- Tensors that outlive a mark are overwritten, without a warning if they were replayed (``try_end_curr_execution``).
- Static inputs, which are parameters and buffers, are read and changed in place; their addresses are compared before
  each replay (``check_for_mutation``, ``check_invariants``). One that does not begin at a multiple of 16 bytes, as
  weights in ZeRO 1's and 2's flat tensors may, is copied before each replay, as all other inputs are
  (torch/_inductor/utils.py, ``remove_unaligned_input_idxs``).

So there is one mark, at the beginning of each adversarial update (``begin_update``). D's images, both networks' graphs,
and the gradients to which micro-batches add all belong to one update. No gradient outlives it, as the engines drop
parameters' gradients in their steps. Statistics are sums and gradients at images are quotients; neither lies in the
pool. The largest singular values do, and are copied after each pass.

The allocator cannot save a pool's state while a freed block waits for another stream ("Events should have synchronized
when checkpointing block", libc10_cuda). So ``record_stream`` must not be called on tensors in the pool. Those that
travel to other ranks need it, and are copied first (engines/deepspeed/gradient_groups.py).

Refused (compiling.py, config/recipe.py), as not shown to be safe: collectives in a pass, as all ranks would have to
record and replay alike; recomputation, which replays within a backward pass; gradients that DeepSpeed reduces in ways
of its own; and torch before 2.15, in which none of this was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigsgan.engines.base import Engine
from bigsgan.models.layers import SpectralLayer


def begin_update(*engines: Engine) -> None:
    """Begin an adversarial update of these engines: replays may now overwrite the results of the update before.

    Nothing happens unless one of them replays.
    """
    if any(engine.replays for engine in engines):
        torch.compiler.cudagraph_mark_step_begin()


def keeping_norms(run: Callable[..., Any], layers: Sequence[SpectralLayer]) -> Callable[..., Any]:
    """Wrap a pass through the layers: it copies their largest singular values, which reports read, out of the pool."""

    def kept(*inputs: Any, **options: Any) -> Any:
        outputs = run(*inputs, **options)
        if layers:
            sigmas: list[Any] = [layer.sigma for layer in layers]
            for layer, sigma in zip(layers, torch.stack(sigmas).unbind(), strict=True):
                layer.sigma = sigma
        return outputs

    return kept

"""Passes that are replayed as CUDA graphs (engines.*.cuda_graphs), and how long what they compute lasts.

What CUDA graphs compute lies in a pool of memory that later replays use again. Read in torch 2.15,
torch/_inductor/cudagraph_trees.py:

- Between two marks (``cudagraph_mark_step_begin``) nothing is written over that somebody holds. A graph is replayed
  only where what was dead when it was recorded is dead again (``check_invariants``), else recorded anew behind what
  lives. Storages are watched, so views count, and so does what autograd saved (``check_refcount``). Once a mark was
  set, calls of compiled functions are no marks of their own any more (``get_curr_generation``).
- What lives on over a mark is written over, without a word where it was replayed (``try_end_curr_execution``).
- Static inputs, which are parameters and buffers, are read and changed in place; their addresses are compared before
  each replay (``check_for_mutation``, ``check_invariants``). One that does not begin at a multiple of 16 bytes, as
  weights in ZeRO 1's and 2's flat tensors may, is copied before each replay, as all other inputs are
  (torch/_inductor/utils.py, ``remove_unaligned_input_idxs``).

So the mark comes once, at the beginning of each adversarial update (``begin_update``): D's images, both networks'
graphs, and gradients that micro-batches add to where autograd left them are all of one update. No gradient outlives
it: the engines drop those of parameters in their steps, which an update completes. Statistics are sums and gradients at
images quotients, neither of which lies in the pool. The largest singular values do, and are copied behind each pass.

The allocator keeps no pool's state while a freed block waits for another stream ("Events should have synchronized when
checkpointing block", libc10_cuda), so ``record_stream`` must not be called on what lies there, as it is for what
travels to other ranks: that is copied first (engines/deepspeed/gradient_groups.py).

Refused (compiling.py, config/recipe.py) is what has not been shown to be safe: collectives in a pass, as all ranks
would have to record and replay alike; recomputation, which replays within a backward pass; gradients that DeepSpeed
reduces in ways of its own; and torch before 2.15, where none of this was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigsgan.engines.base import Engine
from bigsgan.models.layers import SpectralLayer


def begin_update(*engines: Engine) -> None:
    """Let replays write over what was computed before: an adversarial update begins, the one before is complete.

    Args:
        engines: All that take part; nothing happens unless some of them replays.
    """
    if any(engine.replays for engine in engines):
        torch.compiler.cudagraph_mark_step_begin()


def keeping_norms(run: Callable[..., Any], layers: Sequence[SpectralLayer]) -> Callable[..., Any]:
    """The function, after which the layers' largest singular values, which reports read, lie in memory of their own.

    Args:
        run: Passes through these layers, all of them.
        layers: Some of a network.
    """

    def kept(*inputs: Any, **options: Any) -> Any:
        outputs = run(*inputs, **options)
        if layers:
            sigmas: list[Any] = [layer.sigma for layer in layers]
            for layer, sigma in zip(layers, torch.stack(sigmas).unbind(), strict=True):
                layer.sigma = sigma
        return outputs

    return kept

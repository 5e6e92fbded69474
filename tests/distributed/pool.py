"""Ranks that stay alive between tests: importing torch and deepspeed costs more than most tests."""

import faulthandler
import gc
import importlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any
from unittest import mock

from tests.distributed.nursery import SPAWN, Nursery, nurseries
from tests.ports import free_port

ON_GPU = "TESTS_ON_GPU"
"""Variable with which all ranks share the first GPU; over gloo, as most NCCLs take one rank for each."""

OVER_NCCL = "TESTS_OVER_NCCL"
"""Variable with which they do so over NCCL, from 2.30 on with ``NCCL_MULTI_RANK_GPU_ENABLE=1``."""

DEFAULT_TIMEOUT = float(os.environ.get("TESTS_TIMEOUT_SECONDS", 240))


class RankPool:
    """Processes 0 .. world_size - 1 of one group, each with one thread, that run functions together.

    Args:
        world_size: Number of processes.
        environment: Variables that they begin with; on CPUs unless these, or ``TESTS_ON_GPU=1``, say otherwise. Ranks
            without such begin quicker.
        born: Where they fork, if they have variables and are to begin as quickly; these had others as it began.
    """

    def __init__(
        self, world_size: int, environment: dict[str, str] | None = None, born: Sequence[Nursery] = ()
    ) -> None:
        self.world_size = world_size
        if environment is None and os.environ.get(ON_GPU) == "1":
            environment = {"DS_ACCELERATOR": "cuda"}
        self._environment, self._born = environment, born
        self._ranks: list[Any] = []

    def run(self, function: Any, *arguments: Any, timeout: float = DEFAULT_TIMEOUT) -> list[Any]:
        """Call an importable function on every rank and return the results by rank.

        The first rank that raises, or one that does not answer, fails the test, and the next call gets fresh ranks.
        """
        if not self._ranks:
            self._start()
        for rank, (_, pipe) in enumerate(self._ranks):
            try:
                pipe.send((function.__module__, function.__qualname__, arguments))
            except OSError:
                self.stop()
                raise RuntimeError(f"rank {rank} is dead") from None
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        while len(results) < len(self._ranks):
            pending = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in results}
            ready = connection.wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                self._show_stacks()
                self.stop()
                raise TimeoutError(f"rank {min(pending.values())} did not answer within {timeout} s")
            for rank, pipe in sorted((pending[pipe], pipe) for pipe in ready):
                try:
                    outcome, result = pipe.recv()
                except (EOFError, OSError):
                    self.stop()
                    raise RuntimeError(f"rank {rank} died") from None
                if outcome == "raised":
                    self.stop()
                    raise RuntimeError(f"rank {rank} raised:\n{result}")
                results[rank] = result
        return [results[rank] for rank in range(len(self._ranks))]

    def _show_stacks(self) -> None:
        """Let each rank print where it stands."""
        for process, _ in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR2)
            time.sleep(0.5)  # for one after the other

    def stop(self) -> None:
        """End the processes."""
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._ranks = []

    def _start(self) -> None:
        port = free_port()
        born = nurseries("cpu") if self._environment is None else self._born
        if born:
            more = self.world_size, port, self._environment or {}
            begun = [born[r % len(born)].begin(_serve, r, *more) for r in range(self.world_size)]
            self._ranks = [wait() for wait in begun]
            return
        for rank in range(self.world_size):
            ours, theirs = SPAWN.Pipe()
            process = SPAWN.Process(target=_serve, args=(theirs, rank, self.world_size, port), daemon=True)
            with mock.patch.dict(os.environ, self._environment):  # LD_PRELOAD is read as a process begins
                process.start()
            theirs.close()
            self._ranks.append((process, ours))


def _share_gpu(accelerator: Any) -> None:
    """Let ranks compute on one device, the same sums in every run.

    Over gloo messages pass through the host. What has no deterministic kernel, such as ADA's grid_sample, warns and
    goes on.
    """
    os.environ.update(LOCAL_RANK="0", LOCAL_SIZE="1")
    if os.environ.get(OVER_NCCL) != "1":
        accelerator.communication_backend_name = lambda: "gloo"
        importlib.import_module("tests.distributed.messages").through_host().start()
    importlib.import_module("bigsgan.runtime.kernels").choose_kernels(deterministic=True)
    importlib.import_module("torch").use_deterministic_algorithms(True, warn_only=True)


def _serve(pipe: Any, rank: int, world_size: int, port: int, environment: dict[str, str] | None = None) -> None:
    faulthandler.register(signal.SIGUSR2)
    os.environ.update(environment or {})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    logging.getLogger("bigsgan").setLevel(logging.ERROR)
    importlib.import_module("tests.stand_in.sanitizing").begin_if_asked()
    comm = importlib.import_module("bigsgan.runtime.comm")
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    # torch computes fp16 on every CPU, if slowly; DeepSpeed refuses it where there are no fast instructions.
    accelerator.is_fp16_supported = lambda: True
    if os.environ.get(ON_GPU) == "1":
        _share_gpu(accelerator)
        precision = importlib.import_module("bigsgan.runtime.tf32").tf32(allowed=False)
        precision.__enter__()  # which would be undone with the last reference to it
    comm.initialize()
    if os.environ.get(ON_GPU) == "1" and os.environ.get(OVER_NCCL) != "1":
        # else torch would split gloo's groups, which gloo cannot do
        importlib.import_module("torch.distributed").group.WORLD.bound_device_id = None
    awake = importlib.import_module("tests.tiny").awake()  # as the reference's networks are
    awake.__enter__()  # which would be undone with the last reference to it
    leftovers = importlib.import_module("bigsgan.engines.deepspeed.leftovers")
    keep = leftovers.process_groups()
    importlib.import_module("tests.distributed.scenarios")
    gc.collect()
    gc.freeze()  # half a million objects of torch and deepspeed, which each collection would look through
    while True:
        try:
            module, name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = "returned", getattr(importlib.import_module(module), name)(*arguments)
        except Exception:
            result = "raised", traceback.format_exc()
            if os.environ.get(OVER_NCCL) == "1":  # other ranks may hang, and groups wait for them
                print(result[1], file=sys.stderr, flush=True)
        leftovers.unite_ranks()  # had the run not come to its end
        leftovers.release_process_groups(keep)  # which collects
        gc.freeze()  # what the job has imported and cached: DeepSpeed collects several times for each engine
        pipe.send(result)

"""torchrun for elastic runs: `python -m bigsgan.elastic [torchrun's options] -- [bigsgan train's options]`.

This is torchrun's agent, adapted to a run: hosts may return, bad input ends the job at once, and a rank that was
stopped does not count as finished.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher import api

from bigsgan.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError

EXIT_STOPPED = 85
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_DEFAULTS = ("--rdzv-backend=c10d", "--max-restarts=10")


class Agent(LocalElasticAgent):
    """torchrun's agent, which restarts a host's ranks, but not after bad input, which would fail again."""

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        found = super()._monitor_workers(worker_group)
        if _is_bad_input(found.failures.values()):
            self._remaining_restarts = 0
        return found


def main(arguments: Sequence[str]) -> int:
    """Look after this host's ranks until the run ends, and return the exit status.

    It is 0 if the run is complete, 2 if ranks of this host refused their input (and printed why), 85 if this process
    was asked to stop, and 1 otherwise.

    Raises:
        UserError: There is no ``--``.
    """
    if arguments[:1] in (["-h"], ["--help"]):
        print(__doc__)
        run.parse_args(["--help"])  # ends the process
    if "--" not in arguments:
        remedy = "write torchrun's options, then -- and the options of `bigsgan train`"
        raise UserError("arguments", None, "must contain --", remedy)
    at = list(arguments).index("--")
    # torch 2.15 keeps using the store of its first rendezvous; after a loss, ranks would wait in it for ever.
    os.environ.setdefault(_SHARED_STORE, "1")
    module = ["--module", "bigsgan", "train", f"--stopped-status={EXIT_STOPPED}", *arguments[at + 1 :]]
    vars(api)["LocalElasticAgent"] = Agent  # `run` builds this class; there is no option for another
    try:
        options = run.parse_args([*_DEFAULTS, *arguments[:at], *module])
        options.rdzv_conf = _tell_host(options.rdzv_endpoint, options.rdzv_conf)
        run.run(options)
    except ValueError as error:
        words = " ".join(arguments[:at])
        raise UserError("arguments", words, f"are not valid: {error}", "see `torchrun --help`") from None
    except ChildFailedError as error:
        failures = error.failures.values()
        if _is_bad_input(failures):
            return EXIT_BAD_INPUT
        for failure in failures:
            _print(f"local rank {failure.local_rank} exited with status {failure.exitcode} and was not restarted")
        return EXIT_FAILED
    except SignalException as error:
        _print(f"stopped by {error.sigval.name}")
        return EXIT_STOPPED
    except RendezvousError as error:
        _print(f"the hosts cannot connect to each other: {type(error).__name__}: {error}")
        return EXIT_FAILED
    return 0


def _tell_host(endpoint: str, conf: str) -> str:
    """Add ``is_host`` to the meeting's settings if the endpoint is this host's name with a domain.

    torch looks the name up to learn that. Kubernetes gives a pod its name after the pod has started, and a first pod
    that does not find its own would wait for another one's store.
    """
    name, _, domain = endpoint.partition(".")
    if not domain or name != socket.gethostname() or "is_host" in conf:
        return conf
    return ",".join(filter(None, [conf, "is_host=true"]))


def _is_bad_input(failures: Any) -> bool:
    return any(failure.exitcode == EXIT_BAD_INPUT for failure in failures)


def _print(text: str) -> None:
    print(f"bigsgan: {os.uname().nodename}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        print(f"bigsgan: {error}", file=sys.stderr)
        sys.exit(EXIT_BAD_INPUT)

"""Names missing ranks while the others wait for them to join, and ends the job if their host cannot run a rank."""

from __future__ import annotations

import base64
import json
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from bigsgan import preflight
from bigsgan.errors import EXIT_BAD_INPUT, UserError, end_process, print_error
from bigsgan.runtime import first_word, launched

_FIRST_LOOK_SECONDS, _PATIENCE_SECONDS = 15.0, 30.0
_CONNECTION = timedelta(minutes=30)
_MOST_NAMED = 8


@contextmanager
def taken(first_look: float = _FIRST_LOOK_SECONDS, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Register this rank; inside the block, rank 0 prints which ranks are missing, again every ``patience`` seconds.

    This begins after ``first_look`` seconds. Before, rank 0 checks the hosts of missing ranks over ssh, if `deepspeed`
    has named them. If one cannot run a rank, this process prints a message and exits with status 2, and the launcher
    ends the others. So does this one, in silence, where rank 0 on another host printed one before it could be asked.
    """
    if launched.world_size() == 1 or not os.environ.get("RANK"):
        yield
        return
    if first_word.is_on_another_host() and first_word.rank_zero_spoke(_CONNECTION.total_seconds()):
        end_process(EXIT_BAD_INPUT)
    joined = threading.Event()
    threading.Thread(target=_take, args=(joined, first_look, patience), daemon=True).start()
    try:
        yield
    finally:
        joined.set()


def _take(joined: threading.Event, first_look: float, patience: float) -> None:
    rank = launched.rank()
    try:
        store = _open_store(rank)
        store.set(str(rank), socket.gethostname())
        if rank != 0 or joined.wait(first_look):
            return
        hosts = hosts_of_ranks()
        problems = _hosts_without_ranks(_missing(store), hosts)
        still = {hosts[rank] for rank in _missing(store) if rank < len(hosts)}
        problems = [problem for problem in problems if problem.host in still]
        if problems and not joined.is_set():
            print_error(UserError("hosts", None, "; ".join(map(str, problems)), preflight.REMEDY))
            os._exit(EXIT_BAD_INPUT)  # the main thread waits inside torch
        while not joined.is_set():
            if (missing := _missing(store)) and not joined.is_set():
                named = _named(missing, hosts)
                text = f"rank 0 on {socket.gethostname()} is waiting for {named}: see the messages of that host"
                print(f"bigsgan: {text}", file=sys.stderr, flush=True)
            joined.wait(patience)
    except RuntimeError:  # joining fails with the same error, and reports it
        return


def _missing(store: dist.Store) -> list[int]:
    return [rank for rank in range(launched.world_size()) if not store.check([str(rank)])]


def _hosts_without_ranks(missing: Sequence[int], hosts: Sequence[str]) -> list[preflight.Problem]:
    """Return the sure problems of the missing ranks' hosts; none if ssh cannot even reach this host."""
    absent = {hosts[rank] for rank in missing if rank < len(hosts)} - set(hosts[:1])
    if not absent:
        return []
    try:
        problems = preflight.look_at([hosts[0], *sorted(absent)])
    except UserError:  # no ssh
        return []
    if any(problem.host == hosts[0] for problem in problems):
        return []
    return [problem for problem in problems if problem.sure]


def _open_store(rank: int) -> dist.Store:
    """Open the rendezvous store: rank 0's, which shares its port with torch's own, or torchrun's."""
    (host, port), serves = launched.meeting_place(), launched.keeps_store(rank)
    store = dist.TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=_CONNECTION, multi_tenant=True)
    return dist.PrefixStore(f"bigsgan/came/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def hosts_of_ranks(parent: int | None = None) -> list[str]:
    """Return the host of each rank from the command line of `deepspeed`'s process; none with another launcher."""
    try:
        words = Path(f"/proc/{parent or os.getppid()}/cmdline").read_text().split("\0")
        (info,) = [word.partition("=")[2] for word in words if word.startswith("--world_info=")]
        slots = json.loads(base64.urlsafe_b64decode(info))
    except (OSError, ValueError):
        return []
    return [host for host, devices in slots.items() for _ in devices]


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown = [f"{rank} ({hosts[rank]})" if rank < len(hosts) else str(rank) for rank in ranks[:_MOST_NAMED]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}{', ...' if len(ranks) > _MOST_NAMED else ''}"

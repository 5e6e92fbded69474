"""Refuses to start if ranks have different recipes, versions or data.

Ranks that differ would not fail: each would train on its own permutation, and nobody would notice.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bigsgan.checkpoint.files import checksum
from bigsgan.config import NETWORKS, Recipe, RunPlan
from bigsgan.config.data import Data
from bigsgan.config.run_directory import FROZEN, same_on_hosts
from bigsgan.data.autoencoders import identity, weights_digest
from bigsgan.data.datasets import ImageDataset
from bigsgan.data.fingerprint import Fingerprint
from bigsgan.data.perceptual import open_maps
from bigsgan.errors import UserError, counted, shown
from bigsgan.metrics.reference import Reference, open_reference
from bigsgan.preflight import versions
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import attempted, by_each, compared

_MOST_HOSTS_NAMED = 4

_Found = TypeVar("_Found")


def check_plans(plan: RunPlan) -> None:
    """Compare recipes, DeepSpeed files and versions of the ranks. A collective.

    Raises:
        UserError: With the first that differs from rank 0's, and the hosts that it differs on.
    """

    def find() -> dict[str, Any]:
        return {f"version of {name}": version for name, version in versions().items()} | same_on_hosts(plan)

    def compare(by_rank: Sequence[tuple[str, dict[str, Any]]]) -> UserError | None:
        (host, first), *rest = by_rank
        for key in first:
            hosts = [(name, told.get(key)) for name, told in rest if told.get(key) != first[key]]
            if hosts:
                others = named([f"{'null' if value is None else shown(value)} on {name}" for name, value in hosts])
                remedy = "start all hosts with the same recipe, DeepSpeed files and versions"
                return UserError(key, None, f"must be {shown(first[key])} as on {host} (rank 0), got {others}", remedy)
        return None

    _find_compared(find, compare)


def open_compared(build: Callable[[Data], ImageDataset], data: Data) -> ImageDataset:
    """Open a data set on every rank, and compare what the ranks have found. A collective.

    Raises:
        UserError: It cannot be opened, on the hosts that the message names; or it holds different images there.
    """
    if comm.world_size() == 1:  # fingerprints of some data sets read all of them
        return build(data)
    opened: list[ImageDataset] = []

    def find() -> Fingerprint:
        opened.append(build(data))
        return opened[0].fingerprint()

    _find_compared(find, lambda by_rank: _different_data(by_rank, data))
    return opened[0]


def refuse_other_codec(saved: object, data: Data) -> None:
    """Refuse to resume with another autoencoder, or another scale of its latents, than a checkpoint's.

    Where it lies may differ between runs, and between hosts. ``saved`` is the data's fingerprint in the checkpoint's
    manifest, of before autoencoders were recorded too. The same on all ranks, whose data is the same.

    Raises:
        UserError: Networks would see other latents than before, or samples would be decoded by other weights.
    """
    if not isinstance(saved, dict) or data.kind != "latents":
        return
    before, now = (saved.get(key) or "" for key in ("codec", "scaling")), identity(data.codec)
    weights, scaling = before
    remedy = "give the run's own autoencoder, or another `out` to start a new run"
    if weights and weights != now.weights:
        problem = "has other weights than the autoencoder that the run began with"
        raise UserError("data.codec.path", data.codec.path, problem, remedy)
    if scaling and scaling != now.scaling and data.codec.scale is None:  # one that is given is a key of the recipe
        problem = f"shifts and scales latents otherwise than before ({now.scaling}, before {scaling})"
        raise UserError("data.codec.path", data.codec.path, problem, remedy)


def checked_frozen(recipe: Recipe, saved: Mapping[str, Any]) -> dict[str, str]:
    """Digests of the files of the recipe's frozen networks, for a manifest's layout, by its keys. A collective.

    ``saved`` is the layout of a checkpoint, with whose digests they are compared.

    Raises:
        UserError: A file cannot be read, or differs, on the hosts that the message names; or the networks have learned
            from another one; or the program of a family's network does not fit.
    """
    digests = dict[str, str]()
    for field in FROZEN:
        *_, name, part = field.split(".")
        section: Any = getattr(recipe if name in NETWORKS else recipe.objective, name, None)
        if not hasattr(section, part):
            continue
        path, key = getattr(section, part), name if part == "path" else f"{name}.{part}"
        digest = _same_file(field, path, partial(_digest_of, path, field))  # it may be null on one host alone
        if name in saved and saved.get(key, "") != digest:
            remedy = "give the run's own file, or another `out` to start a new run"
            problem = "is another file than the one that the run began with"
            if path is None or key not in saved:
                problem = f"must be {'given' if path is None else 'null'}, as when the run began"
            raise UserError(field, path, problem, remedy)
        digests |= {key: digest} if digest else {}
        if name in NETWORKS:
            by_each(comm, partial(open_maps, section, recipe.data.network_size, comm.device()))
    return digests


def _digest_of(path: str | None, field: str) -> str:
    return "" if path is None else weights_digest([Path(path)], field)


def open_same_reference(path: Path, data: Data, width: int, field: str) -> tuple[Reference, dict[str, str]]:
    """Open the file that metrics compare with on every rank, and compare what the ranks have. A collective.

    See ``open_reference`` for the arguments.

    Returns:
        What is in the file, and what the record of a measurement says about it.

    Raises:
        UserError: It cannot be used, or differs, on the hosts that the message names.
    """
    opened: list[Reference] = []

    def find() -> str:
        opened.append(open_reference(path, data, width, field))
        return checksum(path)

    digest = _same_file(field, str(path), find)
    return opened[0], {"reference": str(path), "reference_sha256": digest}


def _same_file(field: str, path: str | None, find: Callable[[], _Found]) -> _Found:
    """Compare over ranks the digest of a file, which ``find`` returns. A collective."""

    def compare(by_rank: Sequence[tuple[str, _Found]]) -> UserError | None:
        (first_host, first), *others = by_rank
        hosts = [host for host, told in others if told != first]
        problem = f"differs between hosts: {named(hosts)} have another file than {first_host} (rank 0)"
        return UserError(field, path, problem, "copy the same file to all hosts") if hosts else None

    return _find_compared(find, compare)


def _different_data(by_rank: Sequence[tuple[str, Fingerprint]], data: Data) -> UserError | None:
    (first_host, first), *others = by_rank
    found = [f"{words} on {host}" for host, told in others if (words := first.difference(told))]
    if not found:
        return None
    if data.is_outside and any(host == first_host and first.difference(told) for host, told in others):
        ranks = named([str(rank) for rank, (_, told) in enumerate(by_rank) if first.difference(told)])
        problem = f"differs between ranks: rank {ranks} has other data than rank 0"
        remedy = "seed the random numbers that it draws as it is constructed"
        return UserError("data.kind", data.kind, problem, remedy)
    field, value = ("data.root", data.root) if data.root else ("data.kind", data.kind)
    problem = f"differs between hosts: {counted(first.num_images, 'image')} on {first_host} (rank 0), {named(found)}"
    return UserError(field, value, problem, "copy the same files to all hosts, or give a path on a shared file system")


def _find_compared(
    find: Callable[[], _Found], compare: Callable[[Sequence[tuple[str, _Found]]], UserError | None]
) -> _Found:
    """Find something on each rank, and compare on rank 0 what was found, by host and rank. A collective.

    Raises:
        UserError: The resulting error; or what was refused instead, with the hosts, unless all refuse.
    """
    told = attempted(find)

    def refuse(by_rank: Sequence[tuple[str, _Found | UserError]]) -> UserError | None:
        errors = [(host, told) for host, told in by_rank if isinstance(told, UserError)]
        found = [(host, told) for host, told in by_rank if not isinstance(told, UserError)]
        if not errors:
            return compare(found)
        error = errors[0][1]
        hosts = f"on {named([host for host, _ in errors])}" if found else ""
        detail = "; ".join(filter(None, (error.detail, hosts)))
        return UserError(error.field, error.value, error.problem, error.remedy, detail)

    compared(comm, (socket.gethostname(), told), refuse)
    assert not isinstance(told, UserError), "who could not find it has refused"
    return told


def named(texts: Sequence[str]) -> str:
    """Join texts, each once and not too many."""
    each = list(dict.fromkeys(texts))
    return ", ".join(each[:_MOST_HOSTS_NAMED]) + (", ..." if len(each) > _MOST_HOSTS_NAMED else "")

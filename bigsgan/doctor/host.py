"""Checks of what the host gives to processes. No torch here."""

from __future__ import annotations

import resource

from bigsgan.doctor.checks import Finding, Subject, failed, passed


def open_files(subject: Subject) -> Finding:
    """The soft limit of files that this process may open.

    A rank has some 100 open files of its own and its loading processes, and sockets to, and shards of, all ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 512 + 8 * subject.ranks.size
    numbers = {"soft": soft, "hard": hard, "least": least}
    if _below(soft, least):
        remedy = f"run `ulimit -n {least}` before the launcher"
        if _below(hard, least):
            remedy = f"ask the administrator for a `nofile` of {least} or more in limits.conf"
        return failed(f"{soft} files may be open at once, {least} are needed", remedy, numbers, -soft)
    return passed(f"{_shown(soft)} files may be open at once", numbers, -soft)


def _below(limit: int, least: int) -> bool:
    return limit != resource.RLIM_INFINITY and limit < least


def _shown(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)

"""`bigsgan submit`: checks a job for Slurm, then queues it with launch/slurm/train.sbatch."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from bigsgan.commands.parsing import Commands, add_number, add_recipe, path_type
from bigsgan.commands.planning import plan_on_ranks
from bigsgan.config import Recipe, load_recipe
from bigsgan.config.saved_recipe import refuse_moved
from bigsgan.config.sweep import Task, read_sweep
from bigsgan.errors import UserError, counted
from bigsgan.runtime.signals import STOPPING
from bigsgan.shipped import SLURM

_PASSED_ON = ("account", "partition", "time")
_NOTICE_SECONDS, _LEAST_MINUTES = 180, 3
"""How long before a job's time limit train.sbatch asks to be warned, and the least limit. Slurm may warn a minute
early, and a run takes a minute to start."""

_SLURMS_SECONDS = 60
"""How long before the limit Slurm signals, where `--signal` does not say it."""

_SIZES = {"--nodes": "N", "--ntasks": "n", "--gpus": "G"}
_SIZES |= dict.fromkeys(("--gres", "--tres-per-task", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket"), "")
_SIZES |= dict.fromkeys(("--ntasks-per-node", "--ntasks-per-gpu", "--ntasks-per-socket", "--ntasks-per-core"), "")
"""Options of sbatch, with their letters, that decide how many nodes, ranks and GPUs a job has."""

_WHOLE = (*_SIZES, "--array", "--account", "--partition", "--time", "--time-min", "--signal", "--gres-flags")
"""Options of sbatch that are no abbreviation of another."""

_GPU = re.compile(r"(?:^|[,/:])gpu(?=$|[:=,])")
"""A GPU in a list of resources, such as ``nvme:1,gpu:a100:2`` or ``gres/gpu=1``."""

_DAYS = re.compile(r"([0-9]{1,5})-([0-9]{1,5})(?::([0-9]{1,5}))?(?::([0-9]{1,5}))?")
_MINUTES = re.compile(r"(?:([0-9]{1,5}):(?=[0-9]+:))?([0-9]{1,9})(?::([0-9]{1,5}))?")
"""Slurm's forms: days-hours[:minutes[:seconds]], and [hours:]minutes[:seconds]."""

_SIGNAL = re.compile(r"(?:R:)?(?:SIG)?([A-Z0-9]+)(?:@([0-9]{1,9}))?", re.IGNORECASE)
"""Slurm's form of `--signal`: a name or a number, and the seconds before the limit."""


def add(commands: Commands) -> None:
    """Add the command and its options."""
    command = commands.add_parser("submit", help="check a recipe for a job on Slurm, and queue it")
    add_recipe(command)
    add_number(command, "--nodes", int, 1, "number of nodes (default 1)")
    add_number(command, "--gpus-per-node", int, None, "GPUs of each node, a rank for each")
    add_number(command, "--tasks-per-node", int, None, "ranks of each node, where nodes have no GPUs")
    command.add_argument("--time", help="time limit, such as 24:00:00")
    command.add_argument("--account", help="account that the job is charged to")
    command.add_argument("--partition", help="partition to run in")
    text = "file with a line of overrides for each job: queued as a job array"
    command.add_argument("--sweep", metavar="FILE", type=path_type("--sweep", str), help=text)
    command.add_argument("--array", help="tasks of the sweep, such as 2,5 or 1-8%%4 (default: all)")
    add_number(command, "--restarts", int, None, "most restarts without a new checkpoint (default 3)")
    text = "the site's file (default: BIGSGAN_SITE, or site.sh in launch/slurm)"
    command.add_argument("--site", metavar="FILE", type=path_type("--site", str), help=text)
    text = "another option of sbatch, such as --sbatch=--qos=high; may be given several times"
    command.add_argument("--sbatch", dest="others", metavar="OPTION", action="append", default=[], help=text)
    command.add_argument("--dry-run", action="store_true", help="print the command and the job's script, and stop")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Check everything that can be checked here; then queue the job, or print its command and script."""
    ranks = _ranks(options)
    _check_options(options)
    notice, is_asked = _notice(options)
    tasks = [Task()] if options.sweep is None else read_sweep(Path(options.sweep))
    if options.array is not None:
        _check_array(options.array, len(tasks) if options.sweep else 0)
    _check_recipes(options.config, tasks, options.overrides, ranks)
    variables = _variables(options, notice)
    _check_environment(variables)
    asking = [] if is_asked or notice == _NOTICE_SECONDS else [f"--signal=USR1@{notice}"]
    command = _command(options, len(tasks), asking)
    if options.dry_run:
        print(" ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)]))
        print((SLURM / "train.sbatch").read_text(), end="")
        return 0
    if shutil.which(command[0]) is None:
        remedy = "submit from a login node, or look at the job with --dry-run"
        raise UserError(command[0], None, "must be on the PATH", remedy)
    return subprocess.run(command, env={**os.environ, **variables}).returncode


def _ranks(options: argparse.Namespace) -> int:
    for flag in ("--nodes", "--gpus-per-node", "--tasks-per-node"):
        number = getattr(options, flag.strip("-").replace("-", "_"))
        if number is not None and number < 1:
            raise UserError(flag, number, "must be at least 1", "give a larger number")
    if options.restarts is not None and options.restarts < 0:
        raise UserError("--restarts", options.restarts, "must be at least 0", "give a larger number")
    per_node = [n for n in (options.gpus_per_node, options.tasks_per_node) if n is not None]
    if len(per_node) != 1:
        problem = "must be given" if not per_node else "must be unset with --tasks-per-node"
        remedy = "give --gpus-per-node, or on nodes without GPUs --tasks-per-node"
        raise UserError("--gpus-per-node", options.gpus_per_node, problem, remedy)
    return int(options.nodes * per_node[0])


def _check_options(options: argparse.Namespace) -> None:
    """Refuse empty options, and those of sbatch that this command decides: sbatch takes the last, or adds them up."""
    for flag, text in (
        ("--account", options.account),
        ("--partition", options.partition),
        *(("--sbatch", word) for word in options.others),
    ):
        if text is not None and not text.strip():
            raise UserError(flag, text, "must have a value", "give one, or remove the option")
    for before, word in zip(("", *options.others), options.others, strict=False):
        if not word.startswith("-") and (not before.startswith("-") or "=" in before):
            problem, detail = "must begin with a dash", "sbatch would take it for the job's script"
            raise UserError("--sbatch", word, problem, f"write --sbatch=--{word}", detail)
    own = _SIZES | {"--array": "a"}
    own |= {f"--{name}": letter for name, letter in (("account", "A"), ("partition", "p")) if getattr(options, name)}
    for flag, letter in own.items():
        text = _among(options.others, flag, letter)
        if text is None or (flag in ("--gres", "--tres-per-task") and not _GPU.search(text)):
            continue
        given = flag if flag not in _SIZES else "--nodes, --gpus-per-node or --tasks-per-node"
        remedy = f"give {given} of this command" + (", with --sweep" if flag == "--array" else "")
        raise UserError("--sbatch", text, f"must be without {flag}, which this command decides", remedy)


def _check_array(text: str, num_tasks: int) -> None:
    """Refuse tasks without a line in the sweep; ``text`` has Slurm's form, such as ``1-9:2,12%4``."""
    if not num_tasks:
        raise UserError("--array", None, "needs --sweep", "give a sweep file")
    if not re.fullmatch("N(-N(:N)?)?(,N(-N(:N)?)?)*(%N)?".replace("N", "[0-9]{1,9}"), text):
        raise UserError("--array", text, "must be a list of tasks as in Slurm", "write tasks such as 2,5 or 1-8%4")
    numbers = [int(number) for number in re.findall(r"(?<![:\d])\d+", text.partition("%")[0])]
    if min(numbers) < 1 or max(numbers) > num_tasks:
        problem = f"must be within 1-{num_tasks}, as the sweep has {counted(num_tasks, 'line')} of overrides"
        raise UserError("--array", text, problem, f"write tasks such as 1-{num_tasks}")


def _check_recipes(path: Path, tasks: list[Task], overrides: list[str], ranks: int) -> None:
    """Check each job's recipe for its number of ranks, its DeepSpeed files, its data and where it writes."""
    users: dict[str, int] = {}
    for number, swept in enumerate(tasks, start=1):
        with swept.naming_line():
            recipe = load_recipe(path, swept + overrides)
            refuse_moved(path, recipe.out, swept + overrides)
            plan_on_ranks(recipe, ranks, path)
            _check_paths(recipe)
        out = os.path.abspath(recipe.out)
        if out in users:
            remedy = "give each line its own `out`"
            problem = f"is the `out` of both task {users[out]} and task {number}"
            raise UserError("--sweep", recipe.out, problem, remedy)
        users[out] = number


def _check_paths(recipe: Recipe) -> None:
    out = Path(os.path.abspath(recipe.out))
    existing = next(parent for parent in (out, *out.parents) if os.path.lexists(parent))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "cannot be written" if existing.is_dir() else "is not a directory"
        problem, remedy = f"cannot be made: {existing} {what}", "give a directory that you can write to"
        raise UserError("out", str(recipe.out), problem, remedy)
    for key, path in (("data.root", recipe.data.root), ("data.input_root", recipe.data.input_root)):
        if path is not None and not os.path.exists(os.path.expanduser(path)):
            raise UserError(key, path, "does not exist", "give the path of the images on the host that submits")


def _variables(options: argparse.Namespace, notice: int) -> dict[str, str]:
    """Environment variables that the job's script reads."""
    found = {}
    if notice != _NOTICE_SECONDS or "BIGSGAN_NOTICE" in os.environ:  # the job would inherit another
        found["BIGSGAN_NOTICE"] = str(notice)
    if options.site is not None:
        found["BIGSGAN_SITE"] = os.path.abspath(options.site)
    if options.restarts is not None:
        found["BIGSGAN_RESTARTS"] = str(options.restarts)
    return found


def _check_environment(variables: dict[str, str]) -> None:
    """Check the site's file, or without one that `bigsgan` is on the PATH, which the job inherits."""
    given = variables.get("BIGSGAN_SITE") or os.environ.get("BIGSGAN_SITE")
    field = "--site" if "BIGSGAN_SITE" in variables else "BIGSGAN_SITE"
    site = Path(given) if given else SLURM / "site.sh"
    if not site.is_file():
        if given:
            remedy = "give the path of a copy of launch/slurm/site.example.sh"
            raise UserError(field, given, "must be a file", remedy)
        if shutil.which("bigsgan") is None:
            remedy = "activate its environment, or set one up in launch/slurm/site.sh"
            raise UserError("bigsgan", None, "must be on the PATH, which the job inherits", remedy)
        return
    checked = subprocess.run(["bash", "-n", str(site)], capture_output=True, text=True)
    if checked.returncode:
        problem = f"must be a valid bash script: {checked.stderr.strip()}"
        raise UserError(str(site), None, problem, "fix it, and check it with `bash -n`")


def _notice(options: argparse.Namespace) -> tuple[int, bool]:
    """Return how many seconds before the time limit Slurm warns the ranks, and whether the user asks for it.

    Raises:
        UserError: The limit has not Slurm's form, or leaves no time to train before the warning; or none is warned.
    """
    seconds_asked, among_others = _signalled(options.others), _among(options.others, "--time", "t")
    is_asked = seconds_asked is not None
    given = _NOTICE_SECONDS if seconds_asked is None else seconds_asked
    if options.time is not None and among_others is not None:
        problem, remedy = "must have no time limit with --time", "give the limit once, by --time"
        raise UserError("--sbatch", among_others, problem, remedy)
    flag, text = ("--time", options.time) if options.time is not None else ("--sbatch", among_others)
    if text is None and os.environ.get("SBATCH_TIMELIMIT"):
        flag, text = "SBATCH_TIMELIMIT", os.environ["SBATCH_TIMELIMIT"]
    least = "--sbatch", _among(options.others, "--time-min")  # down to which Slurm may lower the limit
    limits = [(_seconds(flag, text), flag, text) for flag, text in ((flag, text), least) if text is not None]
    if not (finite := [limit for limit in limits if limit[0]]):
        return given, is_asked
    seconds, flag, text = min(finite)
    notice = given if is_asked else min(given, seconds // 4)
    if seconds < 60 * _LEAST_MINUTES:
        problem = f"must be at least {_LEAST_MINUTES} minutes"
        detail = "a job has to start, train and save, and Slurm may warn a minute early"
        raise UserError(flag, text, problem, "give a longer limit, such as 24:00:00", detail)
    if notice + 60 >= seconds:
        problem = f"must be more than a minute longer than the {notice} s that Slurm warns before"
        raise UserError(flag, text, problem, f"give a longer limit, or --sbatch=--signal=USR1@{seconds // 4}")
    return notice, is_asked


def _signalled(others: list[str]) -> int | None:
    """Return how many seconds before the time limit the user has Slurm signal; None if it is not asked to.

    Raises:
        UserError: The signal is not one by which the ranks save and end, or comes with the end.
    """
    among_others = _among(others, "--signal")
    where, text = "--sbatch", among_others
    if text is None:
        where, text = "SBATCH_SIGNAL", os.environ.get("SBATCH_SIGNAL") or None
    if text is None:
        return None
    remedy = f"give one such as --sbatch=--signal=USR1@{_NOTICE_SECONDS}"
    if re.match("R?B", text, re.IGNORECASE):
        problem = "must be for the ranks, not for the batch script (B:), which only waits for them"
        raise UserError(where, text, problem, remedy)
    found = _SIGNAL.fullmatch(text)
    name = found[1].upper() if found else ""
    handled = [number.name.removeprefix("SIG") for number in STOPPING]
    if not found or name not in (*handled, *(str(number.value) for number in STOPPING)):
        detail = "by others they end without saving"
        raise UserError(where, text, f"must be {', '.join(handled[:-1])} or {handled[-1]}", remedy, detail)
    seconds = int(found[2] or _SLURMS_SECONDS)
    if seconds < 1:
        raise UserError(where, text, "must come at least a second before the time limit", remedy)
    return seconds


def _among(others: list[str], option: str, letter: str = "") -> str | None:
    """Return an option among sbatch's, as -t1, --time=1, --ti=1, or in two words; sbatch takes the last."""
    found = None
    for word, following in zip(others, (*others[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if name == option or (len(name) > 2 and option.startswith(name) and name not in _WHOLE):
            found = value if equals else following
        elif letter and (attached := re.fullmatch(rf"-[hHIOQsvVW]*{letter}\s*(.*)", word)):
            found = attached[1] or following
    return found


def _seconds(flag: str, text: str) -> int:
    """Return a time limit of Slurm in seconds; 0 stands for none."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    if days := _DAYS.fullmatch(text):
        day, hours, minutes, seconds = (int(part or 0) for part in days.groups())
        return ((day * 24 + hours) * 60 + minutes) * 60 + seconds
    if found := _MINUTES.fullmatch(text):
        hours, minutes, seconds = (int(part or 0) for part in found.groups())
        return (hours * 60 + minutes) * 60 + seconds
    raise UserError(flag, text, "must be a time limit as in Slurm", "write one such as 24:00:00, or 2-12 for 60 hours")


def _command(options: argparse.Namespace, num_tasks: int, warning: list[str]) -> list[str]:
    command = ["sbatch", f"--nodes={options.nodes}"]
    if options.gpus_per_node is not None:
        command.append(f"--gpus-per-node={options.gpus_per_node}")
    else:
        command.append(f"--ntasks-per-node={options.tasks_per_node}")
    command += [f"--{name}={value}" for name in _PASSED_ON if (value := getattr(options, name)) is not None]
    if options.sweep:
        command.append(f"--array={options.array or f'1-{num_tasks}'}")
    command += [*warning, *options.others, str(SLURM / "train.sbatch"), "--config", str(options.config)]
    return command + (["--sweep", options.sweep] if options.sweep else []) + options.overrides

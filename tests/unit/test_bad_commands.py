"""Bad command lines and environments, and how the message reaches the user."""

from __future__ import annotations

import argparse
import io
import logging
import os
import pickle
import pty
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bigsgan import cli, errors
from bigsgan.commands import choosing, parsing
from bigsgan.errors import UserError
from bigsgan.runtime import first_word, launched
from tests import REPOSITORY
from tests.bad_input import check

pytestmark = pytest.mark.usefixtures("beside_a_recipe")

COMMANDS: dict[str, tuple[str, ...]] = {
    "--foo": ("COMMAND", "must be given", "see `bigsgan --help`"),
    "train digits": ("override", "must have the form dotted.key=value, got 'digits'", "did you mean --config digits?"),
    "train --allow-change nope": ("--allow-change", "must be a key of the recipe, got 'nope'", "key such as batch"),
    "plan --mfu 1e-300 --peak-tflops 1e-300": ("--mfu", "must be at least 1e-06, got 1e-300", "give a larger number"),
    "plan --mfu 1 --peak-tflops 1e300": ("--peak-tflops", "must be at most 1e+09, got 1e+300", "data sheet's 989"),
    "trian": ("COMMAND", "must be one of 'train', 'submit', 'plan', 'sample',", "did you mean train?"),
    "train --config digit": ("--config", "'digit' does not exist", "did you mean digits?"),
    "train --config recipes/digit": ("--config", "'recipes/digit' does not exist", "give the path of a recipe"),
    "train generator.family=stylegan3": ("generator.family", "'stylegan2' or 'package.module:function',", "did you"),
    "train --confg x": ("--confg", "unknown option of `bigsgan train`", "see `bigsgan train --help`"),
    "train --config": ("--config", "expected one argument", "see `bigsgan train --help`"),
    "train --config missing.yaml": ("--config", "'missing.yaml' does not exist", "give the path of a recipe, or the"),
    "train --config .": ("--config", "'.' cannot be read", "give a readable text file"),
    "train batch=63 --local_rank=0 accumulation=2": ("batch", "must be a multiple of 2, got 63", "batch=64"),
    "train --config ~nobody_of_that_name/x": ("--config", "names a home directory that does not", "the whole path"),
    "data prepare ~nobody_of_that_name y --resolution 8 --format zip": ("SRC", "names a home", "the whole path"),
    "train --stopped-status 256": ("--stopped-status", "must be 0 to 255, got 256", "give an exit status"),
    "sample": ("--run, --out", "must be given", "see `bigsgan sample --help`"),
    "sample --run run --out x.png --num ten": ("--num", "must be an integer, got 'ten'", "write an integer such as 1"),
    "sample --run run --out x.png 10": ("argument", "'10' is not an argument of `bigsgan sample`", "see `bigsgan"),
    "evaluate --run run --metrics fid10k,kid10k,FID10k": ("--metrics", "'fid10k' is named twice", "remove the second"),
    "evaluate --run run --metrics psnr10k --lpips x.pt": (
        *("--lpips", "must be unset without the", "remove it"),
    ),
    "evaluate --run run --metrics psnr10k --resizer antialiased": (
        "--resizer", "must be unset with metrics that compare no features, got 'antialiased'", "remove it"),
    "train --list --dry-run": ("--list", "cannot be combined with --dry-run", "give only one of them"),
    "doctor --list seed=1": ("--list", "cannot be combined with overrides", "give only one of them"),
    "export --run run --out x --format pickle": ("--format", "must be one of 'safetensors', 'hub',", "choose one of"),
    "sample --run run --out x.png --truncation 0.5 --truncation 0.7": (
        "--truncation", "must be given once, got '0.5' and '0.7'", "remove one of them"),
    "train --config=recipe.yaml --config digits": ("--config", "once, got 'recipe.yaml' and 'digits'", "remove one"),
    "train data.root=a --config recipe.yaml data.root=b": ("data.root", "must be given once, got two", "remove one"),
    "export --run run --out x --standing --no-standing": ("--no-standing", "not allowed with", "see `bigsgan"),
}  # fmt: skip


MET = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ENVIRONMENTS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "no number": ({"WORLD_SIZE": "two"}, ("WORLD_SIZE", "must be a whole number from 1 to", "`unset WORLD_SIZE`")),
    "no rank": ({"WORLD_SIZE": "2"}, ("WORLD_SIZE", "must be unset without RANK, got 2", "deepspeed or torchrun")),
    "odd ranks": ({"WORLD_SIZE": "3", "RANK": "0", "LOCAL_SIZE": "3", **MET},
        ("batch", "must be a multiple of 3, got 64 (1", "batch=66")),
    "local rank": ({"RANK": "0", "LOCAL_RANK": "-1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ("LOCAL_RANK",
        "must be a whole number from 0 to 2147483647, got '-1' (an", "`unset LOCAL_RANK`")),
    "no local rank": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, ("LOCAL_RANK",
        "must be set in the environment, as RANK is", "`unset RANK`")),
    "no port": ({"RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "99999"}, ("MASTER_PORT", "must be a whole", "unset")),
    "many digits": ({"WORLD_SIZE": "9" * 5000}, ("WORLD_SIZE", "must be a whole number from 1", "`unset WORLD_SIZE`")),
    "many digits of Slurm": ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "9" * 5000}, ("SLURM_NODEID",
        "must be a whole number, got", "start with `srun`")),
    "many tasks of Slurm": (
        {
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_NODEID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "1(x999999999)",
        },
        ("SLURM_STEP_TASKS_PER_NODE", "must be as Slurm sets it, got '1(x999999999)'", "start with `srun`"),
    ),
    "accelerator": ({"DS_ACCELERATOR": "foo"}, ("DS_ACCELERATOR", "must be one of cuda", "`unset DS_ACCELERATOR`")),
    "interface": ({"GLOO_SOCKET_IFNAME": "none7"}, ("GLOO_SOCKET_IFNAME", "must be a network", "name one of them")),
    "more on a host than in all": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_SIZE": "3", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("LOCAL_SIZE", "must be a whole number from 1 to 2, got '3'", "`unset LOCAL_SIZE`"),
    ),
    "local rank of others": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"},
        ("LOCAL_RANK", "must be less than LOCAL_SIZE (2), got 2 (environment variables)", "run `unset RANK`"),
    ),
    "host": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "x" * 80, "MASTER_PORT": "1"},
        ("MASTER_ADDR", "can resolve, got 'xxx", "rank 0's host")),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_command_lines(command, capsys):
    check(capsys, command.split(), *COMMANDS[command])


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name, monkeypatch, capsys):
    variables, expected = ENVIRONMENTS[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    check(capsys, ["train", "--config", "recipe.yaml"], *expected)


@pytest.mark.parametrize(
    "option",
    ["train --print", "train --sweep", "train --config", "train --data-root", "sample --run x --out", "sample --run"],
)
def test_an_empty_text_is_a_mistake_and_not_nothing(option, capsys, monkeypatch):
    monkeypatch.setattr(parsing, "import_late", lambda module: pytest.fail("it goes on"))
    field = option.split()[-1]
    problem = "must be a key of the recipe" if field == "--print" else "must be a path"
    check(capsys, [*option.split(), ""], field, f"{problem}", "write ")


NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@pytest.mark.parametrize("name", [*NUMBERS, "DS_ACCELERATOR"])
def test_a_variable_that_is_set_to_nothing_is_not_set(name, monkeypatch, capsys):
    monkeypatch.setenv(name, "")
    assert cli.main(["train", "--config", "recipe.yaml", "--print", "batch"]) == 0
    assert capsys.readouterr().out == "64\n"
    assert name not in os.environ


ALONE = {
    "RANK": {"RANK": "1", "WORLD_SIZE": "1"},
    "LOCAL_RANK": {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "x", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"},
    "WORLD_SIZE": {"RANK": "1", "WORLD_SIZE": "abc"},
    "MASTER_PORT": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
    "RANK, though the batch does not fit either": {**MET, "RANK": "3", "WORLD_SIZE": "3"},
    "LOCAL_RANK, though the batch does not fit either": {**MET, "RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "7"},
    "MASTER_ADDR, though the batch does not fit either": {"RANK": "1", "WORLD_SIZE": "3"},
    "SLURM_STEP_TASKS_PER_NODE": {
        "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "0",
    },
}  # fmt: skip


@pytest.mark.parametrize("field", ALONE)
def test_a_rank_whose_own_numbers_are_wrong_speaks_at_once(field, monkeypatch, capsys):
    monkeypatch.setattr(cli, "wait_for_termination", lambda: pytest.fail("a rank waits"))
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(first_word, "ALONE_SECONDS", 0)
    for patient in ("rank_zero_spoke", "tell_other_hosts"):
        monkeypatch.setattr(first_word, patient, lambda: pytest.fail("a rank waits"))
    for name, value in ALONE[field].items():
        monkeypatch.setenv(name, value)
    check(capsys, ["train", "--config", "recipe.yaml"], field.partition(",")[0], "must be ", "")


@pytest.mark.parametrize("launcher", [None, "TORCHELASTIC_RUN_ID"])
def test_a_rank_that_no_launcher_has_started_may_be_alone_and_speaks_at_once(launcher, monkeypatch, capsys):
    events = []
    monkeypatch.setattr(first_word, "rank_zero_spoke", lambda seconds=30.0: events.append(seconds))
    monkeypatch.setattr(cli, "print_error", lambda error, real=cli.print_error: (events.append("said"), real(error)))
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(first_word, "meets_store", lambda: False)
    for name in launched.LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    if launcher:
        monkeypatch.setenv(launcher, "3")
    for name, value in {**MET, "RANK": "1", "WORLD_SIZE": "3"}.items():
        monkeypatch.setenv(name, value)
    check(capsys, ["train", "--config", "recipe.yaml"], "batch", "must be a multiple of 3", "batch=66")
    assert events == ([30.0, "said"] if launcher else ["said", first_word.ALONE_SECONDS])


def test_a_launchers_mistake_is_said_by_rank_0(monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(cli, "wait_for_termination", lambda: waited.append(True))
    monkeypatch.setattr(errors.time, "sleep", lambda seconds: None)
    for name, value in {**ALONE["MASTER_PORT"], "LOCAL_RANK": "1", "CROSS_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    check(capsys, ["train", "--config", "recipe.yaml"], "MASTER_PORT", "must be ", "")
    assert waited == [True]


@pytest.mark.parametrize("name", ["xpu", "npu"])
def test_an_accelerator_that_deepspeed_does_not_find_is_named(name, monkeypatch, capsys):
    def imported(module):
        raise ValueError("XPU_Accelerator requires PyTorch with XPU support.")

    monkeypatch.setattr(parsing.importlib, "import_module", imported)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(UserError) as caught:
        parsing.import_late("bigsgan.trainer")
    said = f"DS_ACCELERATOR: '{name}' cannot be used on {socket.gethostname()}: XPU_Accelerator requires PyTorch"
    assert str(caught.value).startswith(said)
    assert str(caught.value).endswith("(an environment variable); run `unset DS_ACCELERATOR`")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(ValueError, match="XPU"):  # a mistake of ours
        parsing.import_late("bigsgan.trainer")


def test_a_working_directory_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert cli.main(["train", "--dry-run"]) == 2
    said = "bigsgan: working directory: cannot be found: No such file or directory; change to another directory\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", [[], ["data"], ["bench"], ["train", "--help"]])
def test_without_a_command_there_is_help(words, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 0
    assert f"usage: {' '.join(['bigsgan', *words]).removesuffix(' --help')} [-h]" in capsys.readouterr().out


def parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers(below)


def test_help_fits_into_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    texts = [parser.format_help() for parser in parsers(choosing._parser())]
    assert len(texts) == 17
    assert [line for text in texts for line in text.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("gpus", [[], [Path("/dev/nvidia0")]], ids=["no GPU", "one"])
def test_deepspeeds_choice_of_the_cpu_is_told_where_there_are_gpus(monkeypatch, caplog, gpus):
    logger = logging.getLogger("DeepSpeed")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(cli, "nvidia_gpus", lambda: gpus)
    assert cli.main(["nope"]) == 2
    monkeypatch.setattr(logger, "propagate", True)
    texts = "Setting accelerator to CPU. If you have GPU or other accelerator, we were unable to detect it.", "others"
    for text in texts:
        logger.warning(text)
    assert {record.message for record in caplog.records} == set(texts if gpus else texts[1:])


@pytest.mark.slow
@pytest.mark.parametrize("lines", [0, 1])
def test_a_reader_that_goes_away_is_no_error(lines):
    script = f"bigsgan train --dry-run | head -n {lines} > first; echo ${{PIPESTATUS[0]}}"
    script = script.replace("bigsgan", f"{sys.executable} -c 'import sys, bigsgan.cli; sys.exit(bigsgan.cli.main())'")
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stderr == ""
    assert run.stdout in ("141\n", "0\n")  # 0 where all was in the pipe before its reader had gone
    assert Path("first").read_text().count("\n") == lines


def test_a_terminal_that_hung_up_changes_no_status(monkeypatch):
    ours, theirs = pty.openpty()
    os.close(ours)
    monkeypatch.setattr(choosing, "parse", lambda arguments: SimpleNamespace(run=lambda options: 85))
    with io.TextIOWrapper(os.fdopen(theirs, "wb", buffering=0), write_through=True) as stream:  # PYTHONUNBUFFERED
        with pytest.raises(OSError, match="Input/output error"):
            stream.write("")
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main([]) == 85


def test_names_that_are_no_utf_8_are_printed(monkeypatch, capsys):
    options = SimpleNamespace(run=lambda options: print("\udcff") or 0)
    monkeypatch.setattr(choosing, "parse", lambda arguments: options)
    assert cli.main([]) == 0
    assert capsys.readouterr().out == "\\udcff\n"


@pytest.mark.parametrize("name, value", [("LOCAL_RANK", "x"), ("LOCAL_WORLD_SIZE", "x"), ("LOCAL_RANK", "2")])
def test_a_dry_run_refuses_numbers_of_ranks_that_are_none(monkeypatch, capsys, name, value):
    """It reads them where it finds the numbers of ranks that a recipe leaves to it."""
    for key, text in {"RANK": "0", "WORLD_SIZE": "2", name: value}.items():
        monkeypatch.setenv(key, text)
    assert cli.main(["train", "--config", "digits", "--dry-run", "engines.generator.ranks=auto"]) == 2
    assert f"bigsgan: {name}: must be " in capsys.readouterr().err


def test_a_dry_run_is_printed_by_one_rank_and_knows_the_number_of_ranks(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert cli.main(["train", "--config", "recipe.yaml", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    arguments = ["train", "--config", "recipe.yaml", "--dry-run"]
    check(capsys, [*arguments, "batch=63"], "batch", "on 2 ranks", "batch=64")
    told = "LOCAL_WORLD_SIZE", "must be set with batch_statistics=host", "number of ranks on each host"
    check(capsys, [*arguments, "batch_statistics=host"], *told)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.main([*arguments, "batch_statistics=host"]) == 0


def test_other_ranks_wait_and_speak_only_where_rank_0_did_not_end_them(monkeypatch, capsys):
    waits = []
    monkeypatch.setattr(first_word, "meets_store", lambda: False)
    monkeypatch.setattr(time, "sleep", lambda seconds: waits.append((seconds, len(said))))
    said: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", lambda text, write=sys.stderr.write: (said.append(text), write(text)))
    for name, value in {**MET, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        check(capsys, ["train", "--config", "missing.yaml"], "--config", "does not exist", "give the path of a recipe")
    (to_be_ended, before), (_, after), (to_be_forwarded, last) = waits
    assert before == 0 < after < last  # rank 1 before it speaks and behind that, rank 0 behind that
    assert to_be_ended > 10 * to_be_forwarded


@pytest.mark.parametrize("rank, size", [("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")])
def test_one_of_several_ranks_speaks_and_is_heard(monkeypatch, capsys, rank, size):
    """Under srun also before its tasks have the variables of the other launchers."""
    silent, slept = [], []
    monkeypatch.setattr(cli, "wait_for_termination", lambda: silent.append(True))
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    monkeypatch.setenv(size, "2")
    monkeypatch.setenv("CROSS_SIZE", "1")
    for number in ("0", "1"):
        monkeypatch.setenv(rank, number)
        assert cli.main(["plan", "--gpus", "0"]) == 2
        assert len(silent) == int(number)
    assert "must be 1 to 1048576, got 0" in capsys.readouterr().err
    assert slept == [errors.FORWARDING_SECONDS] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_ended_while_it_checks_does_not_wait(monkeypatch, capsys, number):
    """The signal comes once: a rank that waited for a second one would print the message of rank 0 again."""
    monkeypatch.setattr(cli, "wait_for_termination", lambda: pytest.fail("a rank waits"))

    def parse(words):
        os.kill(os.getpid(), number)
        raise UserError("batch", 0, "must be positive", "give 1")

    monkeypatch.setattr(choosing, "parse", parse)
    for key, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(key, value)
    assert cli.main(["train"]) == 2
    assert capsys.readouterr().err == ""


def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(choosing, "parse", interrupted)
    assert cli.main(["sample"]) == 130
    assert capsys.readouterr().err == ""


def test_the_script_ends_with_status_2_and_one_line(tmp_path):
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), "batch=sixty"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "bigsgan: batch: must be an integer, got 'sixty'; write an integer such as 64\n"
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "recipe.yaml"]


def test_a_message_is_one_line_short_and_survives_the_way_between_ranks():
    error = UserError("path", "x" * 1000, "is wrong:\n  line 1\n  line 2", "mend it")
    assert str(error) == f"path: '{'x' * 119}... is wrong: line 1 line 2; mend it"
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    parts = [(each.field, each.value, each.problem, each.remedy) for each in (copy, error)]
    assert parts[0] == parts[1]

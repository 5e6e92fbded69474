"""Which checkpoint a run goes back to, and what an end between any two steps of that leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigsgan import checkpoint, cli
from bigsgan.checkpoint import returns, tags
from bigsgan.config.run_directory import EVENT_FILES
from bigsgan.config.sections import Checkpoints
from bigsgan.errors import UserError
from bigsgan.training import returning, start
from bigsgan.training.build import _build_reporter
from bigsgan.training.recovery import Recovery
from bigsgan.training.start import Start
from tests.bad_runs import contents, train_arguments
from tests.single_process import entry, save
from tests.tiny import tiny_recipe


@pytest.fixture
def past(tmp_path: Path) -> Path:
    """A run's directory with checkpoints at 64, 128 and 192 images, and its files of these images."""
    out = tmp_path / "run"
    for nimg in (64, 128, 192):
        save_one(out, nimg)
        for name in (f"samples/samples_ema_{nimg:012d}.png", f"ema_snapshots/{nimg:012d}/file", f"{EVENT_FILES}{nimg}"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(f"{nimg}")
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        (out / name).write_text("".join(f'{{"nimg": {nimg}}}\n' for nimg in (64, 128, 192)))
    (out / "metrics.csv").write_text("nimg,name,value\n64,a,1\n128,a,2\n")
    return out


def test_measurements_of_training_that_a_run_has_left_are_dropped(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    returning.drop_measurements(tmp_path, 64)
    kept = ['{"nimg": 64, "by": "train"}\n', '{"nimg": 96, "by": "evaluate"}\n', "no record\n"]
    path.write_text("".join([*kept, '{"nimg": 72, "by": "train"}\n']))
    returning.drop_measurements(tmp_path, 64)
    assert path.read_text() == "".join(kept)


def test_a_run_begins_without_the_measurements_that_come_after_it(tmp_path):
    path = tmp_path / "evaluations.jsonl"
    path.write_text('{"nimg": 8, "by": "train"}\n{"nimg": 16, "by": "train"}\n')
    _build_reporter(tiny_recipe(tmp_path, "monitor=[]"), tmp_path, Start(None), 8, range(1)).close()
    assert path.read_text() == '{"nimg": 8, "by": "train"}\n'


def save_one(out: Path, nimg: int, value: float = 0.0, saver: checkpoint.Saver | None = None) -> None:
    directory, entries = out / "checkpoints", {"generator": entry({"a": torch.full((4,), nimg + value)})}
    if saver is None:
        assert save(directory, nimg, entries)
    else:
        assert saver.save(nimg, entries, checkpoint.Description({}, {}, {}))
        assert saver.finish()


def chosen(out: Path, nimg: int | None = None) -> Start:
    found, goes_back, left = start._own(out, (), nimg)
    return Start(found, None, nimg, goes_back, left)


def begun(out: Path, nimg: int | None = None) -> checkpoint.Saver:
    """What saves further checkpoints of a run that starts so."""
    returning.settle(out)
    found = chosen(out, nimg)
    returning.begin(out, found)
    saver = checkpoint.Saver(out / "checkpoints", checkpoint.SingleProcess(), Checkpoints(keep=100))
    saver.left.update(found.left.values())
    return saver


def nimgs(out: Path) -> list[int]:
    return sorted(each.nimg for each in tags.complete(out / "checkpoints"))


def test_the_newest_is_chosen_unless_another_is_asked_for(past):
    found = chosen(past)
    assert (found.nimg, found.goes_back, dict(found.left)) == (192, False, {})
    found = chosen(past, 64)
    assert (found.nimg, found.goes_back, sorted(found.left)) == (64, True, ["000000000128", "000000000192"])
    found = chosen(past, 192)
    assert (found.nimg, found.goes_back, dict(found.left)) == (192, True, {})


@pytest.mark.parametrize("nimg", [0, -64, 65, 1 << 70])
def test_another_number_names_those_that_there_are(past, nimg):
    before = contents(past)
    text = f"^--nimg: must be a saved checkpoint, got {nimg}; choose from 192, 128, 64$"
    with pytest.raises(UserError, match=text):
        chosen(past, nimg)
    assert contents(past) == before


def test_a_damaged_one_is_refused_and_a_newer_one_of_another_version_too(past):
    with pytest.raises(UserError, match=r"got 128 \(that checkpoint is damaged\); choose from 192, 64$"):
        start._own(past, [past / "checkpoints" / "000000000128"], 128)
    path = past / "checkpoints" / "000000000192" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(UserError, match="000000000192: has format 99 of a newer version"):
        chosen(past, 64)


def test_what_is_later_stays_until_the_next_save(past):
    saver = begun(past, 64)
    assert nimgs(past) == [64, 128, 192]
    assert [path.name for path in (past / "samples").iterdir()] == ["samples_ema_000000000064.png"]
    assert [path.name for path in (past / "ema_snapshots").iterdir()] == ["000000000064"]
    assert (past / "evaluations.jsonl").read_text() == '{"nimg": 64}\n'
    save_one(past, 96, 0.5, saver)
    assert nimgs(past) == [64, 96]
    assert not saver.left
    assert not (past / "checkpoints" / "left").exists()
    assert returns.read(past / "checkpoints") == returns.Return(64, {}, {}, saved=True)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_the_same_tag_again(past, value):
    """Even with the same contents, to the last bit, it is the one that was saved after the return."""
    saver = begun(past, 64)
    save_one(past, 128, value, saver)
    assert nimgs(past) == [64, 128]
    returning.settle(past)
    assert nimgs(past) == [64, 128]
    assert chosen(past).nimg == 128
    save_one(past, 192, value, saver)
    assert nimgs(past) == [64, 128, 192]


def test_the_same_command_goes_on_and_another_number_goes_back(past):
    save_one(past, 160, 0.5, begun(past, 128))
    found = chosen(past, 128)
    assert (found.nimg, found.goes_back) == (160, False)
    tags.remove(past / "checkpoints" / "000000000128")  # as a recipe may keep few
    assert chosen(past, 128).nimg == 160
    assert chosen(past, 64).goes_back
    begun(past, 128)
    assert chosen(past, 160).goes_back


def test_a_start_that_asks_for_nothing_forgets_the_return(past):
    save_one(past, 160, 0.5, begun(past, 64))
    begun(past)
    assert not (past / "checkpoints" / returns.MARK).exists()
    assert chosen(past, 64).goes_back


def test_without_a_save_all_counts_again(past):
    before = contents(past)
    begun(past, 64)
    (past / f"{EVENT_FILES}new").write_text("")
    (past / "samples" / "samples_ema_000000000096.png").write_text("new")
    (past / "samples" / "samples_ema_000000000128.png").write_text("new")
    (past / "metrics.jsonl").write_text('{"nimg": 64}\n{"nimg": 70}\n')
    with (past / "evaluations.jsonl").open("a") as file:
        file.write('{"nimg": 64, "fid": 1}\n{"nimg": 96}\n')
    returning.settle(past)
    after = contents(past)
    added = after[str(past / "evaluations.jsonl")].removeprefix(before.pop(str(past / "evaluations.jsonl")))
    assert added == b'{"nimg": 64, "fid": 1}\n'  # of a checkpoint that stays
    del after[str(past / "evaluations.jsonl")]
    assert after == before
    assert chosen(past, 64).goes_back


class EndError(Exception):
    """Stands for a kill."""


def ending(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any], step: int) -> bool:
    """End the work before its ``step``-th change on the disk; return whether it has so many."""
    real, count = os.replace, [0]

    def replace(source: Any, target: Any) -> None:
        count[0] += 1
        if count[0] == step:
            raise EndError
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", replace)
        try:
            work()
        except EndError:
            return True
    return False


@pytest.mark.parametrize("step", range(1, 10))
def test_an_end_between_any_two_steps_loses_nothing(past, monkeypatch, step):
    before = contents(past)
    assert ending(monkeypatch, lambda: begun(past, 64), step)
    for again in range(1, 13):
        ending(monkeypatch, lambda: returning.settle(past), again)
    returning.settle(past)
    assert contents(past) == before


@pytest.mark.parametrize("step", range(1, 12))
def test_an_end_during_the_next_save_loses_nothing(past, monkeypatch, step):
    """Either all of the old checkpoints count, or the new one."""
    before, saver = contents(past), begun(past, 64)
    entries = {"generator": entry({"a": torch.full((4,), 128.5)})}
    job = checkpoint.saver._Job(saver, 128)
    ending(monkeypatch, lambda: _saved(job, entries), step)
    returning.settle(past)
    found = chosen(past)
    if found.nimg == 192:
        after = {path: text for path, text in contents(past).items() if ".partial" not in path}
        assert after == before
    else:
        assert nimgs(past) == [64, 128]
        assert torch.equal(_first(past), torch.full((4,), 128.5))
        assert (past / "metrics.csv").read_bytes() == before[str(past / "metrics.csv")]  # opened later


def _saved(job: Any, entries: Any) -> None:
    parts = {name: each.parts() for name, each in entries.items()}
    job.begin(parts)
    job._write(parts)
    numbers = {name: each.numbers() for name, each in entries.items()}
    job._commit({"recipe": {}, "layout": {}, "metrics": {}, "numbers": numbers})


def _first(past: Path) -> torch.Tensor:
    found = checkpoint.newest(past / "checkpoints")
    assert found is not None
    values = torch.empty(4)
    checkpoint.Reader(found).entry("generator").read("master", "a", 0, values)
    return values


def test_a_rollback_before_the_next_save_does_not_return_to_what_was_left(past):
    saver = begun(past, 64)
    recovery: Any = SimpleNamespace(_saver=saver, _bad=saver.bad, _moved=lambda num_bytes: None)
    assert Recovery._last_good(recovery, "update 9", "").nimg == 64
    save_one(past, 128, 0.5, saver)
    assert Recovery._last_good(recovery, "update 9", "").nimg == 128


def test_a_damaged_mark_is_named(past):
    (past / "checkpoints" / returns.MARK).write_text("{")
    with pytest.raises(UserError, match=r"returned\.json: is damaged; remove that file"):
        returning.settle(past)


def test_the_commands(run, capsys):
    before = contents(Path())
    for words, text in (
        (("out=run", "--nimg", "5"), "--nimg: must be a saved checkpoint, got 5; choose from 64"),
        (("out=none", "--nimg", "5"), "out: 'none' has no complete checkpoint; give the `out` directory of a run"),
        (("out=none", "--list"), "out: 'none' has no complete checkpoint; give the `out` directory of a run"),
    ):
        assert cli.main(train_arguments(*words)) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("bigsgan: ")]
        assert line.startswith(f"bigsgan: {text}")
    assert contents(Path()).keys() - {"tiny.yaml"} == before.keys() - {"tiny.yaml"}
    assert cli.main(train_arguments("out=run", "--list")) == 0
    title, row = capsys.readouterr().out.splitlines()
    assert title.split() == ["images", "saved", "size", "ranks", "generator", "discriminator"]
    words = row.split()
    assert (words[0], words[-6:]) == ("64", ["1", "ZeRO", "0", "ZeRO", "0", "newest"])
    assert max(map(len, (title, row))) <= 80

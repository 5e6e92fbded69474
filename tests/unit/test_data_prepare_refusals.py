"""What `bigsgan data prepare` refuses, and reports, without harm to what is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from pathlib import Path

import pytest

from bigsgan import cli
from bigsgan.data import conversion, originals, prepare
from bigsgan.errors import UserError
from tests.preparing import FORMATS, SIZE, Killed, destination, identities, interrupt, noise, origin

pytestmark = pytest.mark.usefixtures("small_parts")

CHANGES = {
    "resolution": (lambda source: None, 7, r"holds work with resolution 6, not 7; give another destination"),
    "content": (lambda source: noise(90).save(source / "cat/1.png"), SIZE, r"holds work on other images"),
    "time": (lambda source: os.utime(source / "cat/1.png", (1, 1)), SIZE, r"holds work on other images"),
}


@pytest.mark.parametrize(
    "state, name", [*(("tar", name) for name in CHANGES), ("zip parts", "content"), ("folder", "content")]
)
def test_a_changed_source_or_resolution_is_refused(tmp_path, source, name, state):
    kind = state.split()[0]
    place = destination(tmp_path, kind)
    with pytest.MonkeyPatch.context() as patch:
        if state == "zip parts":
            interrupt(patch, "replacing", 2)
            with pytest.raises(Killed):
                prepare.prepare(origin(source), place, kind, 1)
        else:
            prepare.prepare(origin(source), place, kind, 1)
    before = identities(tmp_path)
    change, resolution, message = CHANGES[name]
    change(source)
    with pytest.raises(UserError, match=rf"DST: '{place}' {message}.*or delete it.* first$") as caught:
        prepare.prepare(origin(source, resolution), place, kind, 1)
    assert ("made.zip.parts" in caught.value.remedy) == (state == "zip parts")
    assert identities(tmp_path) == before


def test_another_format_in_the_same_place_is_refused(tmp_path, source):
    prepare.prepare(origin(source), tmp_path / "made", "tar", 1)
    with pytest.raises(UserError, match=r"DST: '.*' holds work with format tar, not folder; "):
        prepare.prepare(origin(source), tmp_path / "made", "folder", 1)
    with pytest.raises(UserError, match=r"DST: '.*' exists, and was not made by `bigsgan data prepare`; "):
        prepare.prepare(origin(source), tmp_path / "made", "zip", 1)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("found", ["file", "directory", "zip"])
def test_what_others_made_is_left_alone(tmp_path, source, kind, found):
    place = destination(tmp_path, kind)
    if found == "directory":
        place.mkdir()
        (place / "thesis.txt").write_text("mine")
    elif found == "zip":
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("thesis.txt", "mine")
            archive.comment = b"5"
    else:
        place.write_text("mine")
    before = identities(tmp_path)
    with pytest.raises(UserError, match=r"DST: '.*' exists, and was not made by `bigsgan data prepare`; give another"):
        prepare.prepare(origin(source), place, kind, 1)
    assert identities(tmp_path) == before


def test_parts_that_others_made_are_left_alone(tmp_path, source):
    (tmp_path / "made.zip.parts").mkdir()
    (tmp_path / "made.zip.parts/thesis.txt").write_text("mine")
    with pytest.raises(UserError, match=r"DST: '.*' exists, and was not made by `bigsgan data prepare`"):
        prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1)
    shutil.rmtree(tmp_path / "made.zip.parts")
    (tmp_path / "made").mkdir()
    prepare.prepare(origin(source), tmp_path / "made", "folder", 1)  # an empty directory will do
    for plan in (json.dumps({"plan": "mine"}), "[" * 100_000):
        (tmp_path / "made/.prepare/plan.json").write_text(plan)
        with pytest.raises(UserError, match=r"DST: .* exists, and was not made by"):
            prepare.prepare(origin(source), tmp_path / "made", "folder", 1)


def test_a_full_disk_is_reported(tmp_path, source, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = r"DST: '.*' cannot be written: No space left on device; free space, or fix its permissions, then"

    def fail(*_):
        raise full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "write_tar", fail)
        with pytest.raises(UserError, match=message):
            prepare.prepare(origin(source), tmp_path / "made", "tar", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "replacing", fail)  # in the processes, which are forked
        with pytest.raises(UserError, match=message):
            prepare.prepare(origin(source), tmp_path / "made_folder", "folder", 1)
    assert prepare.prepare(origin(source), tmp_path / "made", "tar", 1).num_images == 14


def test_a_source_disk_that_fails_does_not_lose_images(tmp_path, source, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(UserError, match=r"SRC: '.*' cannot be read: Input/output error; fix the disk, then run the"):
        prepare.prepare(origin(source), tmp_path / "made", "tar", 1)


def test_a_process_that_dies_is_reported(tmp_path, source, monkeypatch):
    monkeypatch.setattr(originals, "open_image", lambda *_: os._exit(9))
    with pytest.raises(UserError, match=r"--workers: 2 cannot be kept up: a worker process died"):
        prepare.prepare(origin(source), tmp_path / "made", "tar", 2)


@pytest.fixture
def place(tmp_path, source, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "empty").mkdir()
    (tmp_path / "mixed/cat").mkdir(parents=True)
    noise(0).save(tmp_path / "mixed/cat/1.png")
    shutil.copytree(tmp_path / "mixed", tmp_path / "unfilled")
    (tmp_path / "unfilled/dog").mkdir()
    noise(0).save(tmp_path / "mixed/loose.png")
    os.mkdir(os.fsencode(tmp_path / "mixed") + b"/\xff")
    shutil.copytree(tmp_path / "mixed/cat", tmp_path / os.fsdecode(b"bytes/\xff"))
    return tmp_path


PREPARE = ["data", "prepare", "source", "made", "--format", "tar", "--resolution", "6"]


def changed(number: int, word: str) -> list[str]:
    return [*PREPARE[:number], word, *PREPARE[number + 1 :]]


MISTAKES = {
    "no source": (changed(2, "nowhere"), "SRC", "'nowhere' does not exist", "give the directory with the images"),
    "no image": (changed(2, "empty"), "SRC", "'empty' contains no images", "give a directory with images"),
    "an empty class": (changed(2, "unfilled"), "SRC", "'unfilled' has class folders without", "fill or remove them"),
    "loose images": (changed(2, "mixed"), "SRC", "'mixed' contains images beside its class folders", "move them"),
    "bytes": (changed(2, "bytes"), "SRC", "has a class folder whose name is not UTF-8, '\\udcff'", "rename it"),
    "within": (changed(3, "source/made"), "DST", "must lie outside SRC, got 'source/made'", "give another destination"),
    "around": (changed(3, "."), "DST", "'.' exists, and was not made by", "give another destination"),
    "resolution": (changed(7, "0"), "--resolution", "must be at least 1, got 0", "give a larger number"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_answered_in_one_line(place, capsys, name):
    arguments, field, problem, remedy = MISTAKES[name]
    before = sorted(place.rglob("*"))
    assert cli.main(arguments) == 2
    printed, message = capsys.readouterr()
    assert printed == ""
    (line,) = message.splitlines()
    assert line.startswith(f"bigsgan: {field}: "), line
    assert problem in line.partition("; ")[0]
    assert remedy in line.partition("; ")[2]
    assert sorted(place.rglob("*")) == before

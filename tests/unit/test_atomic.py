"""A file that is replaced is the old one or the new one at every moment, and nothing else stays behind."""

import os
import stat

import pytest

from bigsgan.runtime import atomic


def names(directory):
    return [path.name for path in directory.iterdir()]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_fails_while_writing_leaves_the_old_file_alone(tmp_path, error):
    path = tmp_path / "file"
    path.write_text("old")

    def write():
        with atomic.replacing(path) as unfinished:
            unfinished.write_text("ne")
            assert path.read_text() == "old"
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_text("old")
    events = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor):
        events.append(("fsync", os.fstat(descriptor).st_ino, path.read_text()))
        real_fsync(descriptor)

    def replace(source, target):
        events.append(("replace", os.stat(source).st_ino, path.read_text()))
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    atomic.write_text(path, "new")
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]
    inode = path.stat().st_ino
    assert events == [("fsync", inode, "old"), ("replace", inode, "old")]


def test_a_rename_that_fails_leaves_nothing_behind(tmp_path):
    directory = tmp_path / "taken"
    directory.mkdir()
    with pytest.raises(OSError, match="taken"):
        atomic.write_text(directory, "new")
    assert names(tmp_path) == ["taken"]
    assert stat.S_ISDIR(directory.stat().st_mode)

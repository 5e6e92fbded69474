"""Tags of another version of bigsgan: refused by name, and never touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bigsgan import checkpoint
from bigsgan.checkpoint.tags import sealed
from bigsgan.errors import UserError
from tests.unit.test_checkpoint import assert_holds, names, save_one


def of_format(directory: Path, nimg: int, number: int) -> bytes:
    """Make a tag an intact one of another version; returns its manifest."""
    path = directory / f"{nimg:012d}" / "manifest.json"
    path.write_text(json.dumps(sealed({**json.loads(path.read_text()), "format": number})))
    return path.read_bytes()


@pytest.fixture
def directory(tmp_path) -> Path:
    """Checkpoints of a run at 64 and 128 images."""
    directory = tmp_path / "checkpoints"
    for nimg in (64, 128):
        assert save_one(directory, nimg)
    return directory


@pytest.mark.parametrize("number, version", [(3, "a newer"), (1, "an older")])
def test_a_newest_tag_of_another_version_is_refused(directory, number, version):
    of_format(directory, 128, number)
    said = f"has format {number} of {version} version, this version reads format 2; "
    with pytest.raises(UserError, match=f"000000000128: {said}finish the run with that version") as caught:
        checkpoint.newest(directory)
    assert str(directory / "000000000128") in str(caught.value)
    for find in (checkpoint.find, checkpoint.find_intact):
        with pytest.raises(UserError, match=f"^--run: .* has the checkpoint 000000000128, which {said}") as caught:
            find(directory.parent)
        assert caught.value.remedy == "use that version, or give --nimg to choose from 64"
        assert_holds(find(directory.parent, 64), 64)


def test_a_tag_of_another_version_is_neither_replaced_nor_removed(directory, caplog):
    kept = {nimg: of_format(directory, nimg, 3) for nimg in (64, 128)}
    assert not save_one(directory, 128)  # as of a run that would resume from an older tag
    assert "has format 3 of another version, and is not overwritten" in caplog.text
    assert save_one(directory, 256, keep=1)
    assert names(directory) == {"000000000064", "000000000128", "000000000256", "latest"}
    for nimg, manifest in kept.items():
        assert (directory / f"{nimg:012d}" / "manifest.json").read_bytes() == manifest


def test_messages_name_what_the_user_wrote(tmp_path):
    fields = ("init_from.run", "init_from.nimg")
    with pytest.raises(UserError, match=r"^init_from.run: '.*' has no complete checkpoint"):
        checkpoint.find(tmp_path, None, (), fields)
    assert save_one(tmp_path / "checkpoints", 64)
    with pytest.raises(UserError, match=r"^init_from\.nimg: must be a saved checkpoint, got 63; choose from 64$"):
        checkpoint.find(tmp_path, 63, (), fields)

"""`bigsgan data prepare`: what training reads from it equals what it reads from the source; the same bytes always."""

from __future__ import annotations

import os
import shlex
import socket
import tarfile
import zipfile

import pytest
import torch

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset, prepare
from bigsgan.data.prepared import Prepared
from bigsgan.errors import UserError
from tests.preparing import FORMATS, Killed, destination, files, identities, interrupt, noise, opened, origin, samples

pytestmark = pytest.mark.usefixtures("small_parts")


@pytest.mark.parametrize("kind", FORMATS)
def test_training_reads_what_it_would_read_from_the_source(tmp_path, source, kind):
    made = prepare.prepare(origin(source), destination(tmp_path, kind), kind, 1)
    assert made == Prepared(14, 3, 3, 0, [])
    expected = samples(opened("folder", source))
    assert [label for _, label in expected] == [0] * 4 + [1] * 6 + [2] * 4  # "dog" comes before "dog-big"
    assert samples(opened(kind, destination(tmp_path, kind))) == expected
    without_classes = opened(kind, destination(tmp_path, kind), num_classes=0)
    assert sorted(pixels for pixels, _ in samples(without_classes)) == sorted(pixels for pixels, _ in expected)


@pytest.mark.parametrize("kind", FORMATS)
def test_images_without_classes_and_grey_ones_stay_so(tmp_path, kind):
    source = tmp_path / "source"
    source.mkdir()
    for seed in range(6):
        noise(seed, channels=1).save(source / f"{seed}.png")
    (source / "notes").mkdir()
    (source / "notes/readme.txt").write_text("no image")
    made = prepare.prepare(origin(source), destination(tmp_path, kind), kind, 1)
    assert made == Prepared(6, 0, 1, 0, [], "1 other file ignored: 1 .txt, such as notes/readme.txt")
    for channels in (1, 3):
        changes = {"num_classes": 0, "channels": channels}
        expected = samples(opened("folder", source, **changes))
        assert samples(opened(kind, destination(tmp_path, kind), **changes)) == expected


@pytest.mark.parametrize("kind", FORMATS)
def test_the_bytes_do_not_depend_on_the_number_of_processes_or_on_time(tmp_path, source, kind):
    found = []
    for workers in (1, 2):
        place = tmp_path / str(workers)
        place.mkdir()
        prepare.prepare(origin(source), destination(place, kind), kind, workers)
        found.append(files(place))
    assert found[0] == found[1]
    assert len(found[0]) == {"zip": 1, "tar": 4 + 4 + 2 + 1, "folder": 14 + 4 + 2}[kind]  # tar: with names of classes


def test_shards_have_the_layout_of_webdataset(tmp_path, source):
    prepare.prepare(origin(source), tmp_path / "made", "tar", 1)
    members = []
    for number in range(4):
        with tarfile.open(tmp_path / f"made/shard-{number:06d}.tar") as archive:
            for info in archive:
                assert (info.mtime, info.uid, info.gid, info.uname, info.gname, info.mode) == (0, 0, 0, "", "", 0o644)
                members.append((number, info.name, archive.extractfile(info).read()))
    labels = [0] * 4 + [1] * 6 + [2] * 4
    assert [(number, name) for number, name, _ in members] == [
        (index // 4, f"{index:08d}.{suffix}") for index in range(14) for suffix in ("png", "cls")
    ]
    assert [int(content) for _, name, content in members if name.endswith(".cls")] == labels
    assert all(content.startswith(b"\x89PNG") for _, name, content in members if name.endswith(".png"))


def test_the_zip_file_is_not_compressed(tmp_path, source):
    prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1)
    with zipfile.ZipFile(tmp_path / "made.zip") as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.namelist()[3:5] == ["cat/00000003.png", "dog/00000004.png"]
    assert sorted(os.listdir(tmp_path)) == ["made.zip", "source"]


INTERRUPTIONS = [
    # format, function and calls that succeed: write_text writes the plan and the reports, replacing the archives
    *((kind, "write_text", calls) for kind in FORMATS for calls in (0, 3)),
    *((kind, "replacing", 2) for kind in ("zip", "tar")),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name, calls", INTERRUPTIONS)
def test_an_interrupted_run_resumes_and_makes_the_same(tmp_path, source, kind, name, calls):
    whole, place = tmp_path / "whole", tmp_path / "place"
    whole.mkdir()
    place.mkdir()
    prepare.prepare(origin(source), destination(whole, kind), kind, 1)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, name, calls)
        with pytest.raises(Killed):
            prepare.prepare(origin(source), destination(place, kind), kind, 2)
    before = identities(place)
    prepare.prepare(origin(source), destination(place, kind), kind, 2)
    assert files(place) == files(whole)
    after = identities(place)
    finished = [f"made/shard-{number:06d}.tar" for number in range(2)] if kind == "tar" and calls else []
    if kind == "folder" and calls:
        finished = [key for key in before if key.endswith(".png")]
        assert len(finished) >= 8
    assert [after[key] for key in finished] == [before[key] for key in finished]


def test_finished_parts_of_a_zip_file_are_not_made_again(tmp_path, source, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, "replacing", 2)
        with pytest.raises(Killed):
            prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1)
    jobs = []
    real = prepare.in_order

    def in_order(work, todo, workers, originals):
        listed = list(todo)
        jobs.extend(originals.name(job.number) for job in listed)
        return real(work, iter(listed), workers, originals)

    monkeypatch.setattr(prepare, "in_order", in_order)
    prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1)
    folder = opened("folder", source)
    assert jobs == [folder.path(index) for index in range(8, 14)]


@pytest.mark.parametrize("when", ["joining", "removing"])
def test_a_zip_file_interrupted_at_the_end_is_finished(tmp_path, source, monkeypatch, when):
    prepare.prepare(origin(source), tmp_path / "whole.zip", "zip", 1)
    with pytest.MonkeyPatch.context() as patch:
        if when == "joining":
            interrupt(patch, "replacing", 4)
        else:
            patch.setattr(prepare.shutil, "rmtree", lambda path: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1)
    assert (tmp_path / "made.zip").exists() == (when == "removing")
    assert (tmp_path / "made.zip.parts").is_dir()
    monkeypatch.setattr(prepare, "in_order", lambda *_: pytest.fail("converted again"))
    assert prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1) == Prepared(14, 3, 3, 0, [])
    assert sorted(files(tmp_path)) == ["made.zip", "whole.zip"]
    assert (tmp_path / "made.zip").read_bytes() == (tmp_path / "whole.zip").read_bytes()


@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_a_complete_destination_is_left_alone(tmp_path, source, kind, monkeypatch):
    (source / "cat/broken.png").write_bytes(b"not an image")
    first = prepare.prepare(origin(source), destination(tmp_path, kind), kind, 1)
    before = identities(tmp_path)
    monkeypatch.setattr(prepare, "in_order", lambda *_: pytest.fail("converted again"))
    again = prepare.prepare(origin(source), destination(tmp_path, kind), kind, 1)
    assert again[:4] == first[:4] == (14, 3, 3, 1)
    assert again.unreadable == ([] if kind == "zip" else first.unreadable)
    assert identities(tmp_path) == before


def test_a_second_process_is_refused_as_long_as_one_works(tmp_path, source, monkeypatch):
    place, real, told = tmp_path / "made", prepare.in_order, []

    def in_order(work, jobs, workers, originals):  # in the midst of the first
        with pytest.raises(UserError) as caught:
            prepare.prepare(origin(source), place, "tar", 1)
        told.append(str(caught.value))
        return real(work, jobs, workers, originals)

    monkeypatch.setattr(prepare, "in_order", in_order)
    prepare.prepare(origin(source), place, "tar", 1)
    (message,) = told
    holder = f"process {os.getpid()} on {socket.gethostname()} since "
    assert message.startswith(f"DST: '{place}' is in use by {holder}")
    assert message.endswith("; wait until it has ended, or give another destination")
    assert len(opened("tar", place)) == 14


def test_a_part_that_was_deleted_is_made_again(tmp_path, source):
    prepare.prepare(origin(source), tmp_path / "made", "tar", 1)
    before = files(tmp_path)
    (tmp_path / "made/shard-000001.tar").unlink()
    prepare.prepare(origin(source), tmp_path / "made", "tar", 1)
    assert files(tmp_path) == before


@pytest.mark.parametrize("kind", FORMATS)
def test_images_that_cannot_be_read_are_left_out_and_named(tmp_path, source, kind, caplog, capsys):
    expected = samples(opened("folder", source))
    whole = (source / "cat/1.jpg").read_bytes()
    bad = {"cat/0_cut.jpg": whole[: len(whole) // 2], "dog/a_text.png": b"not an image", "dog/b_empty.png": b""}
    for name, content in bad.items():
        (source / name).write_bytes(content)
    (source / "dog/c_gone.png").symlink_to(tmp_path / "nowhere")
    place = destination(tmp_path, kind)
    for again in range(2):  # a second run says the same, but of a complete zip file it knows the number alone
        caplog.clear()
        prepare.main(origin(source), place, kind, 1)
        assert capsys.readouterr().out.startswith(f"{place}: 14 images of 3 classes, cropped to 6x6\n")
        *named, total = caplog.messages
        assert total == "4 unreadable images were skipped"
        if again and kind == "zip":
            assert named == []
            continue
        start = "skipped an unreadable image: "
        paths = [f"{start}{source}/{name}: " for name in (*bad, "dog/c_gone.png")]
        assert [line[: len(path)] for line, path in zip(named, paths, strict=True)] == paths
        reasons = ["truncated", "cannot identify image file", "cannot identify image file", "no such file"]
        assert not any("object at" in line for line in named)  # an address would make each run's reports differ
        assert all(reason in line.lower() for line, reason in zip(named, reasons, strict=True))
    assert samples(opened(kind, place)) == expected


def test_at_most_ten_paths_are_named(tmp_path, source, caplog):
    for number in range(23):
        (source / f"cat/bad{number:02d}.png").write_bytes(b"not an image")
    prepare.main(origin(source), tmp_path / "made", "tar", 1)
    assert len(caplog.messages) == 11
    assert caplog.messages[-1] == "23 unreadable images were skipped"
    assert len(opened("tar", tmp_path / "made")) == 14  # some parts are empty


def test_a_class_without_a_readable_image_would_shift_the_others(tmp_path, source):
    for name in ("1.png", "1.jpg", "alpha.png", "deep/er/0.webp"):
        (source / "cat" / name).write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"SRC: '.*' has class folders without readable images \(cat\) \(such as"):
        prepare.prepare(origin(source), tmp_path / "made.zip", "zip", 1)
    assert not (tmp_path / "made.zip").exists()


def test_a_source_without_a_readable_image_is_refused(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/1.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"SRC: '.*' contains no readable image \(such as .*1.png: cannot identify"):
        prepare.prepare(origin(tmp_path / "source"), tmp_path / "made.zip", "zip", 1)


@pytest.mark.parametrize("kind", ["zip", "folder"])
def test_the_command_prints_what_a_recipe_needs(tmp_path, source, monkeypatch, capsys, kind):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    out = "made here.zip" if kind == "zip" else "made here"
    assert cli.main(["data", "prepare", "source", out, "--format", kind, "--resolution", "6", "--workers", "2"]) == 0
    summary, overrides = capsys.readouterr().out.splitlines()
    assert summary == f"{out}: 14 images of 3 classes, cropped to 6x6"
    assert overrides.startswith(f"data.kind={kind} 'data.root={out}' data.resolution=6 data.image_channels=3 ")
    pairs = dict(word.removeprefix("data.").split("=", 1) for word in shlex.split(overrides))
    data = Data(**{key: int(value) if value.isdecimal() else value for key, value in pairs.items()})
    dataset, expected = build_dataset(data), opened("folder", source)
    assert len(dataset) == len(expected) == 14
    assert all(torch.equal(dataset[index][0], expected[index][0]) for index in range(14))

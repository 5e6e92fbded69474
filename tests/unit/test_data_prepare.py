"""`bigsgan data prepare`: what training reads from it equals what it reads from the source; the same bytes always."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import socket
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from bigsgan import cli
from bigsgan.config.data import Data
from bigsgan.data import build_dataset, conversion, prepare
from bigsgan.errors import UserError

FORMATS = ["zip", "tar", "folder"]
SIZE = 6


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Four images a part, so that a few make several parts."""
    monkeypatch.setattr(prepare, "_PART_SIZE", 4)


def noise(seed: int, height: int = 9, width: int = 7, channels: int = 3) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze())


def write_source(root: Path) -> Path:
    """14 images of all kinds in three classes, of which two differ in their endings alone."""
    turned = Image.Exif()
    turned[0x0112] = 6
    wide = np.random.default_rng(50).integers(0, 65_536, (8, 8), dtype=np.uint16)
    images = {
        "cat/1.png": noise(1), "cat/1.jpg": noise(2), "cat/deep/er/0.webp": noise(3),
        "cat/alpha.png": noise(4, 8, 8, 4),
        "dog-big/grey.png": noise(5, channels=1), "dog-big/wide.png": Image.fromarray(wide),
        "dog-big/turned.jpg": noise(6), "dog-big/palette.png": noise(7).quantize(16),
        "dog/bits.png": noise(8, channels=1).convert("1"), "dog/cmyk.tif": noise(9).convert("CMYK"),
        "dog/small.bmp": noise(10, 3, 2), "dog/grey_alpha.png": noise(11, channels=2),
        "dog/x.y.z.png": noise(12, 40, 90), "dog/ü.png": noise(13),
    }  # fmt: skip
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / name, **({"exif": turned} if "turned" in name else {}))
    return root


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "source")


def destination(tmp_path, kind: str) -> Path:
    return tmp_path / ("made.zip" if kind == "zip" else "made")


def opened(kind: str, root: Path, num_classes: int = 3, channels: int = 3, resolution: int = SIZE):
    return build_dataset(
        Data(kind=kind, root=str(root), num_classes=num_classes, image_channels=channels, resolution=resolution)
    )


def samples(dataset) -> list[tuple[list, int]]:
    return [(dataset[index][0].tolist(), dataset[index][1]) for index in range(len(dataset))]


def files(root: Path) -> dict[str, bytes]:
    """Every file beside ``source``, with its content."""
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.relative_to(root).parts[0] != "source"
    }


def identities(root: Path) -> dict[str, tuple[int, int]]:
    """What changes when a file is written anew, though with the same bytes."""
    return {name: ((root / name).stat().st_ino, (root / name).stat().st_mtime_ns) for name in files(root)}


@pytest.mark.parametrize("kind", FORMATS)
def test_training_reads_what_it_would_read_from_the_source(tmp_path, source, kind):
    made = prepare.prepare(source, destination(tmp_path, kind), SIZE, kind, 2)
    assert made == prepare.Prepared(14, 3, 3, 0, [])
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
    made = prepare.prepare(source, destination(tmp_path, kind), SIZE, kind, 1)
    assert made == prepare.Prepared(6, 0, 1, 0, [])
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
        prepare.prepare(source, destination(place, kind), SIZE, kind, workers)
        found.append(files(place))
    assert found[0] == found[1]
    assert len(found[0]) == {"zip": 1, "tar": 4 + 4 + 2, "folder": 14 + 4 + 2}[kind]


def test_shards_have_the_layout_of_webdataset(tmp_path, source):
    prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1)
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
    prepare.prepare(source, tmp_path / "made.zip", SIZE, "zip", 1)
    with zipfile.ZipFile(tmp_path / "made.zip") as archive:
        assert archive.testzip() is None
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        assert archive.namelist()[3:5] == ["cat/00000003.png", "dog/00000004.png"]
    assert sorted(os.listdir(tmp_path)) == ["made.zip", "source"]


class Killed(BaseException):
    """Stands for a signal: nothing catches it."""


def interrupt(monkeypatch, name: str, calls: int) -> None:
    """Have a function of ``prepare`` fail on its call after ``calls``, leaving an unfinished file as a kill does."""
    real, seen = getattr(prepare, name), []

    def fail(path, *arguments):
        seen.append(path)
        if len(seen) > calls:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            raise Killed
        return real(path, *arguments)

    monkeypatch.setattr(prepare, name, fail)


INTERRUPTIONS = [
    # format, function and calls that succeed: write_text writes the plan and the reports, replacing the archives
    *((kind, "write_text", calls) for kind in FORMATS for calls in (0, 3)),
    *((kind, "replacing", 2) for kind in ("zip", "tar")),
]


@pytest.mark.parametrize("kind, name, calls", INTERRUPTIONS)
def test_an_interrupted_run_goes_on_and_makes_the_same(tmp_path, source, kind, name, calls):
    whole, place = tmp_path / "whole", tmp_path / "place"
    whole.mkdir()
    place.mkdir()
    prepare.prepare(source, destination(whole, kind), SIZE, kind, 1)
    with pytest.MonkeyPatch.context() as patch:
        interrupt(patch, name, calls)
        with pytest.raises(Killed):
            prepare.prepare(source, destination(place, kind), SIZE, kind, 2)
    before = identities(place)
    prepare.prepare(source, destination(place, kind), SIZE, kind, 2)
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
            prepare.prepare(source, tmp_path / "made.zip", SIZE, "zip", 1)
    jobs = []
    real = prepare.conversions

    def conversions(todo, workers):
        listed = list(todo)
        jobs.extend(job.path for job in listed)
        return real(iter(listed), workers)

    monkeypatch.setattr(prepare, "conversions", conversions)
    prepare.prepare(source, tmp_path / "made.zip", SIZE, "zip", 1)
    folder = opened("folder", source)
    assert jobs == [folder.path(index) for index in range(8, 14)]


@pytest.mark.parametrize("when", ["joining", "removing"])
def test_a_zip_file_interrupted_at_the_end_is_finished(tmp_path, source, monkeypatch, when):
    prepare.prepare(source, tmp_path / "whole.zip", SIZE, "zip", 1)
    with pytest.MonkeyPatch.context() as patch:
        if when == "joining":
            interrupt(patch, "replacing", 4)
        else:
            patch.setattr(prepare.shutil, "rmtree", lambda path: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            prepare.prepare(source, tmp_path / "made.zip", SIZE, "zip", 1)
    assert (tmp_path / "made.zip").exists() == (when == "removing")
    assert (tmp_path / "made.zip.parts").is_dir()
    monkeypatch.setattr(prepare, "conversions", lambda *_: pytest.fail("converted again"))
    assert prepare.prepare(source, tmp_path / "made.zip", SIZE, "zip", 1) == prepare.Prepared(14, 3, 3, 0, [])
    assert sorted(files(tmp_path)) == ["made.zip", "whole.zip"]
    assert (tmp_path / "made.zip").read_bytes() == (tmp_path / "whole.zip").read_bytes()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_complete_destination_is_left_alone(tmp_path, source, kind, monkeypatch):
    (source / "cat/broken.png").write_bytes(b"not an image")
    first = prepare.prepare(source, destination(tmp_path, kind), SIZE, kind, 1)
    before = identities(tmp_path)
    monkeypatch.setattr(prepare, "conversions", lambda *_: pytest.fail("converted again"))
    again = prepare.prepare(source, destination(tmp_path, kind), SIZE, kind, 1)
    assert again[:4] == first[:4] == (14, 3, 3, 1)
    assert again.unreadable == ([] if kind == "zip" else first.unreadable)
    assert identities(tmp_path) == before


@pytest.mark.parametrize("kind", FORMATS)
def test_a_second_process_is_refused_as_long_as_one_works(tmp_path, source, kind, monkeypatch):
    place, real, told = destination(tmp_path, kind), prepare.conversions, []

    def conversions(jobs, workers):  # in the midst of the first
        with pytest.raises(UserError) as caught:
            prepare.prepare(source, place, SIZE, kind, 1)
        told.append(str(caught.value))
        return real(jobs, workers)

    monkeypatch.setattr(prepare, "conversions", conversions)
    prepare.prepare(source, place, SIZE, kind, 2)
    (message,) = told
    holder = f"process {os.getpid()} on {socket.gethostname()} since "
    assert message.startswith(f"DST: '{place}' is in use by {holder}")
    assert message.endswith("; wait until it has ended, or give another destination")
    assert len(opened(kind, place)) == 14


def test_a_part_that_was_deleted_is_made_again(tmp_path, source):
    prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1)
    before = files(tmp_path)
    (tmp_path / "made/shard-000001.tar").unlink()
    prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1)
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
        prepare.main(source, place, SIZE, kind, 2)
        assert capsys.readouterr().out.startswith(f"{place}: 14 images of 3 classes\n")
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
    prepare.main(source, tmp_path / "made", SIZE, "tar", 1)
    assert len(caplog.messages) == 11
    assert caplog.messages[-1] == "23 unreadable images were skipped"
    assert len(opened("tar", tmp_path / "made")) == 14  # some parts are empty


@pytest.mark.parametrize("kind", FORMATS)
def test_a_class_without_a_readable_image_would_shift_the_others(tmp_path, source, kind):
    for name in ("1.png", "1.jpg", "alpha.png", "deep/er/0.webp"):
        (source / "cat" / name).write_bytes(b"not an image")
    with pytest.raises(
        UserError, match=r"SRC: '.*' has class folders without readable images \(cat\) \(such as .*1.jpg"
    ):
        prepare.prepare(source, destination(tmp_path, kind), SIZE, kind, 1)
    assert not (tmp_path / "made.zip").exists()


def test_a_source_without_a_readable_image_is_refused(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/1.png").write_bytes(b"not an image")
    with pytest.raises(UserError, match=r"SRC: '.*' contains no readable image \(such as .*1.png: cannot identify"):
        prepare.prepare(tmp_path / "source", tmp_path / "made.zip", SIZE, "zip", 1)


CHANGES = {
    "resolution": (lambda source: None, 7, r"was started with resolution 6, not 7; give another destination"),
    "content": (lambda source: noise(90).save(source / "cat/1.png"), SIZE, r"was started from other images"),
    "time": (lambda source: os.utime(source / "cat/1.png", (1, 1)), SIZE, r"was started from other images"),
    "more": (lambda source: noise(90).save(source / "cat/2.png"), SIZE, r"was started from other images"),
    "name": (
        lambda source: (source / "cat/1.png").rename(source / "cat/3.png"),
        SIZE,
        r"was started from other images",
    ),
}


@pytest.mark.parametrize(
    "state, name",
    [*(("tar", name) for name in CHANGES), ("zip", "resolution"), ("zip parts", "content"), ("folder", "content")],
)
def test_a_changed_source_or_resolution_is_refused(tmp_path, source, name, state):
    kind = state.split()[0]
    place = destination(tmp_path, kind)
    with pytest.MonkeyPatch.context() as patch:
        if state == "zip parts":
            interrupt(patch, "replacing", 2)
            with pytest.raises(Killed):
                prepare.prepare(source, place, SIZE, kind, 1)
        else:
            prepare.prepare(source, place, SIZE, kind, 1)
    before = identities(tmp_path)
    change, resolution, message = CHANGES[name]
    change(source)
    with pytest.raises(UserError, match=rf"DST: '{place}' {message}.*or delete it.* first$") as caught:
        prepare.prepare(source, place, resolution, kind, 1)
    assert ("made.zip.parts" in caught.value.remedy) == (state == "zip parts")
    assert identities(tmp_path) == before


def test_another_format_in_the_same_place_is_refused(tmp_path, source):
    prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1)
    with pytest.raises(UserError, match=r"DST: '.*' was started with format tar, not folder; "):
        prepare.prepare(source, tmp_path / "made", SIZE, "folder", 1)
    with pytest.raises(UserError, match=r"DST: '.*' exists, and was not made by `bigsgan data prepare`; "):
        prepare.prepare(source, tmp_path / "made", SIZE, "zip", 1)


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
        prepare.prepare(source, place, SIZE, kind, 1)
    assert identities(tmp_path) == before


def test_parts_that_others_made_are_left_alone(tmp_path, source):
    (tmp_path / "made.zip.parts").mkdir()
    (tmp_path / "made.zip.parts/thesis.txt").write_text("mine")
    with pytest.raises(
        UserError, match=r"DST: '.*' exists, and was not made by `bigsgan data prepare`; give another destination, or"
    ):
        prepare.prepare(source, tmp_path / "made.zip", SIZE, "zip", 1)
    shutil.rmtree(tmp_path / "made.zip.parts")
    (tmp_path / "made").mkdir()
    prepare.prepare(source, tmp_path / "made", SIZE, "folder", 1)  # an empty directory will do
    (tmp_path / "made/.prepare/plan.json").write_text(json.dumps({"plan": "mine"}))
    with pytest.raises(UserError, match=r"DST: .* exists, and was not made by"):
        prepare.prepare(source, tmp_path / "made", SIZE, "folder", 1)


def test_a_full_disk_is_reported(tmp_path, source, monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    message = r"DST: '.*' cannot be written: No space left on device; free space, or fix its permissions, then"

    def fail(*_):
        raise full

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "write_tar", fail)
        with pytest.raises(UserError, match=message):
            prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "replacing", fail)  # in the processes, which are forked
        with pytest.raises(UserError, match=message):
            prepare.prepare(source, tmp_path / "made_folder", SIZE, "folder", 1)
    assert prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1).num_images == 14


def test_a_source_disk_that_fails_does_not_lose_images(tmp_path, source, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(conversion.Path, "read_bytes", fail)
    with pytest.raises(
        UserError, match=r"SRC: '.*' cannot be read: Input/output error; fix the disk, then run the same command again,"
    ):
        prepare.prepare(source, tmp_path / "made", SIZE, "tar", 1)


def test_a_process_that_dies_is_reported(tmp_path, source, monkeypatch):
    monkeypatch.setattr(conversion, "open_image", lambda *_: os._exit(9))
    with pytest.raises(
        UserError,
        match=r"--workers: 2 worker processes were started and one died; lower it, or give the machine more memory",
    ):
        prepare.prepare(source, tmp_path / "made", SIZE, "tar", 2)


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
    "a file": (
        changed(2, "source/cat/1.png"),
        "SRC",
        "must be a directory, got 'source/cat/1.png'",
        "give the directory",
    ),
    "no image": (changed(2, "empty"), "SRC", "'empty' contains no images", "give a directory with images"),
    "an empty class": (
        changed(2, "unfilled"),
        "SRC",
        "'unfilled' has class folders without images (dog)",
        "fill or remove them",
    ),
    "loose images": (
        changed(2, "mixed"),
        "SRC",
        "'mixed' contains images beside its class folders (loose.png)",
        "move them",
    ),
    "bytes": (changed(2, "bytes"), "SRC", "has a class folder whose name is not UTF-8, '\\udcff'", "rename it"),
    "within": (changed(3, "source/made"), "DST", "must lie outside SRC, got 'source/made'", "give another destination"),
    "around": (changed(3, "."), "DST", "'.' exists, and was not made by", "give another destination"),
    "zip around": (
        [*changed(3, ".")[:5], "zip", "--resolution", "6"],
        "DST",
        "'.' exists, and was not made by `bigsgan data prepare`",
        "give another destination",
    ),
    "resolution": (changed(7, "0"), "--resolution", "must be at least 1, got 0", "give a larger number"),
    "large resolution": (
        changed(7, "1000000"),
        "--resolution",
        "must be at most 16384, got 1000000",
        "give a smaller number",
    ),
    "text": (changed(7, "big"), "--resolution", "must be an integer, got 'big'", "write an integer"),
    "workers": ([*PREPARE, "--workers", "0"], "--workers", "must be at least 1, got 0", "give a larger number"),
    "format": (
        changed(5, "rar"),
        "--format",
        "must be one of 'zip', 'tar', 'folder', got 'rar'",
        "choose one of these",
    ),
    "missing": (PREPARE[:3], "DST, --resolution, --format", "must be given", "see `bigsgan data prepare --help`"),
    "missing command": (["data"], "COMMAND", "must be given", "see `bigsgan data --help`"),
    "option": (
        [*PREPARE, "--size=3"],
        "--size",
        "unknown option of `bigsgan data prepare`",
        "see `bigsgan data prepare",
    ),
    "override": ([*PREPARE, "batch=3"], "argument", "'batch=3' is not an argument of `bigsgan data prepare`", "see"),
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


@pytest.mark.parametrize("kind", FORMATS)
def test_the_command_prints_what_a_recipe_needs(place, capsys, kind):
    out = "made here.zip" if kind == "zip" else "made here"
    assert cli.main(["data", "prepare", "source", out, "--format", kind, "--resolution", "6", "--workers", "2"]) == 0
    summary, overrides = capsys.readouterr().out.splitlines()
    assert summary == f"{out}: 14 images of 3 classes"
    assert overrides.startswith(f"data.kind={kind} 'data.root={out}' data.resolution=6 data.image_channels=3 ")
    pairs = dict(word.removeprefix("data.").split("=", 1) for word in shlex.split(overrides))
    data = Data(**{key: int(value) if value.isdecimal() else value for key, value in pairs.items()})
    dataset, expected = build_dataset(data), opened("folder", place / "source")
    assert len(dataset) == len(expected) == 14
    assert all(torch.equal(dataset[index][0], expected[index][0]) for index in range(14))

import errno
import io
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
from torch.utils.tensorboard import SummaryWriter

from bigsgan.errors import UserError
from bigsgan.monitor.sinks import CSV, JsonLines, TensorBoard


def strict_rows(path: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text(encoding="utf-8").splitlines()]


def events_of(directory: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(directory), size_guidance={"scalars": 0, "images": 0})
    return accumulator.Reload()


def scalars_of(directory: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events_of(directory).Scalars(tag)]


def test_json_lines_hold_nimg_first_and_every_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path, 0)
    lines.add_scalars({"loss/generator": 0.1, "loss/discriminator": 1.83}, 64)
    lines.add_scalars({"loss/generator": -1e-30}, 128)
    # Read before closing: a killed run loses no report.
    assert strict_rows(path) == [
        {"nimg": 64, "loss/generator": 0.1, "loss/discriminator": 1.83},
        {"nimg": 128, "loss/generator": -1e-30},
    ]
    assert path.read_text().startswith('{"nimg": 64, ')
    lines.close()


@pytest.mark.parametrize(
    "torn", [b'{"nimg": 96, "loss": 0.', b'{"nimg": 96', b"\0\0\0\0", b"\xff\xfe\xfd", b"12", b"{}"]
)
def test_opening_drops_a_torn_last_line(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"nimg": 32, "loss": 1.0}\n{"nimg": 64, "loss": 0.5}\n' + torn)
    lines = JsonLines(path, 1000)
    lines.add_scalars({"loss": 0.25}, 96)
    lines.close()
    assert [(row["nimg"], row["loss"]) for row in strict_rows(path)] == [(32, 1.0), (64, 0.5), (96, 0.25)]


@pytest.mark.parametrize("resume_nimg, kept", [(0, []), (63, [32]), (64, [32, 64]), (500, [32, 64, 96])])
def test_resuming_drops_the_rows_after_the_resumed_image(tmp_path, resume_nimg, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"nimg": {nimg}}}\n' for nimg in (32, 64, 96)))
    JsonLines(path, resume_nimg).close()
    assert [row["nimg"] for row in strict_rows(path)] == kept
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("row", ['{"nimg": "5"}', '{"nimg": null}', '{"nimg": [1]}', "[" * 100_000, "5", "{}"])
def test_rows_of_others_are_dropped(tmp_path, row):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"nimg": 32}}\n{row}\n{{"nimg": 64}}\n')
    rows = JsonLines(path, 500)
    assert [row["nimg"] for row in strict_rows(path)] == [32, 64]
    path.write_text(f'{{"nimg": 32}}\n{row}\n')
    rows.rewind(40)
    assert [row["nimg"] for row in strict_rows(path)] == [32]
    rows.close()


def test_csv_holds_a_row_for_each_number(tmp_path):
    path = tmp_path / "metrics.csv"
    table = CSV(path, 0)
    table.add_scalars({"loss/generator": 0.1, "logits/real": math.nan}, 64)
    table.add_scalars({"alarm/a,b": math.inf}, 128)
    # Read before closing: a killed run loses no report.
    assert path.read_text() == 'nimg,name,value\n64,loss/generator,0.1\n64,logits/real,nan\n128,"alarm/a,b",inf\n'
    table.close()


@pytest.mark.parametrize("torn", ["", "9", "96", "96,loss", "96,loss,0.2", "96,loss,0.25\n97,x", "a,b,c\n", "1\n"])
@pytest.mark.parametrize("resume_nimg, kept", [(0, []), (63, [32]), (64, [32, 64]), (95, [32, 64])])
def test_resuming_drops_the_rows_of_a_csv_file_after_the_resumed_image(torn, resume_nimg, kept, tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("nimg,name,value\n32,loss,1.0\n64,loss,0.5\n" + torn)
    table = CSV(path, resume_nimg)
    table.add_scalars({"loss": 0.125}, 128)
    table.add_scalars({"loss": 0.0625}, 160)
    table.rewind(128)
    table.close()
    rows = path.read_text().splitlines()
    assert rows[0] == "nimg,name,value"
    assert [int(row.split(",")[0]) for row in rows[1:]] == [*kept, 128]
    assert rows[-1] == "128,loss,0.125"


def test_tensorboard_holds_scalars_and_images(tmp_path):
    board = TensorBoard(tmp_path, 0)
    board.add_scalars({"loss/generator": 0.5, "logits/real": math.nan}, 64)
    board.add_scalars({"loss/generator": 0.25, "logits/real": -3.0}, 128)
    # Read before closing: a killed run loses no report.
    assert scalars_of(tmp_path, "loss/generator") == [(64, 0.5), (128, 0.25)]
    about = events_of(tmp_path).SummaryMetadata("loss/generator")
    assert "images seen" in about.summary_description
    assert (about.data_class, about.plugin_data.plugin_name) == (DATA_CLASS_SCALAR, "scalars")
    picture = torch.randint(0, 256, (3, 5, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    grey = torch.arange(12, dtype=torch.uint8).reshape(1, 3, 4)
    board.add_image("samples/ema", picture, tmp_path / "unused.png", 128)
    board.add_image("samples/reals", grey, tmp_path / "unused.png", 128)
    (first_step, first), last = scalars_of(tmp_path, "logits/real")
    assert first_step == 64
    assert math.isnan(first)
    assert last == (128, -3.0)
    images = events_of(tmp_path).Images("samples/ema")
    assert [event.step for event in images] == [128]
    decoded = np.asarray(Image.open(io.BytesIO(images[0].encoded_image_string)))
    np.testing.assert_array_equal(decoded, picture.permute(1, 2, 0).numpy())
    decoded = np.asarray(Image.open(io.BytesIO(events_of(tmp_path).Images("samples/reals")[0].encoded_image_string)))
    np.testing.assert_array_equal(decoded[:, :, 0], grey[0].numpy())
    board.close()


def test_tensorboard_catches_up_when_there_is_room_again(tmp_path, monkeypatch):
    board = TensorBoard(tmp_path, 0)
    board.add_scalars({"loss": 4.0}, 32)
    with monkeypatch.context() as patch:
        patch.setattr(SummaryWriter, "flush", full)
        for nimg in (64, 96, 128):
            with pytest.raises(UserError, match="No space left"):
                board.add_scalars({"loss": 128.0 / nimg}, nimg)
    board.rewind(96)
    board.add_scalars({"loss": 0.5}, 160)
    found = dict(scalars_of(tmp_path, "loss"))
    assert {32: 4.0, 64: 2.0, 160: 0.5}.items() <= found.items()
    assert 96 in found
    assert 128 not in found
    board.close()


def full(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_tensorboard_hides_what_came_after_the_resumed_image(tmp_path, monkeypatch):
    board = TensorBoard(tmp_path, 0)
    for nimg in (32, 64, 96):
        board.add_scalars({"loss/generator": float(nimg), "only_before": 1.0}, nimg)
    board.close()
    later = time.time() + 10  # event files are read in the order of the second in their names
    monkeypatch.setattr(time, "time", lambda: later)
    board = TensorBoard(tmp_path, 64)
    board.add_scalars({"loss/generator": -96.0}, 96)
    board.close()
    assert scalars_of(tmp_path, "loss/generator") == [(32, 32.0), (64, 64.0), (96, -96.0)]
    assert scalars_of(tmp_path, "only_before") == [(32, 1.0), (64, 1.0)]


def test_a_tensorboard_directory_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        TensorBoard(tmp_path / "file" / "tensorboard", 0)

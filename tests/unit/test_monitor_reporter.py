import itertools
import json
import re
import time

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from bigsgan.errors import UserError
from bigsgan.monitor import Reporter

METRICS = {"loss/generator": 0.5, "loss/discriminator": 1.25}


def test_rank_0_keeps_and_shows_everything(tmp_path, capsys):
    out = tmp_path / "run"
    reporter = Reporter(out, rank=0, total_nimg=1024, resume_nimg=0)
    reporter.report(256, METRICS)
    images = torch.linspace(-1, 1, 2 * 3 * 4 * 4).reshape(2, 3, 4, 4)
    reporter.images("samples/ema", images, 2, 256)
    reporter.message("saved runs/a/checkpoints/256")
    reporter.close()

    assert json.loads((out / "metrics.jsonl").read_text()) == {"nimg": 256, **METRICS}
    with Image.open(out / "samples" / "samples_ema_000000000256.png") as picture:
        pixels = np.asarray(picture)
    assert pixels.shape == (4 + 4, 2 * (4 + 2) + 2, 3)
    expected = np.round((images[1].double().numpy() + 1) * 127.5).transpose(1, 2, 0)
    np.testing.assert_array_equal(pixels[2:6, 8:12], expected)

    events = EventAccumulator(str(out)).Reload()
    for name, value in METRICS.items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(256, value)]
    (image,) = events.Images("samples/ema")
    assert (image.step, image.height, image.width) == (256, 8, 14)

    shown = capsys.readouterr().err.splitlines()
    assert shown[0].startswith("nimg 256/1024  G 0.50  D 1.25  ")
    assert shown[1:] == ["saved runs/a/checkpoints/256"]


def test_a_resumed_run_reports_each_image_count_once(tmp_path, monkeypatch, capsys):
    ticks = itertools.count()
    monkeypatch.setattr("bigsgan.monitor.progress.monotonic", lambda: next(ticks))
    now = time.time()
    for resume_nimg, values in ((0, {64: 1.0, 128: 2.0, 192: 3.0}), (128, {192: 4.0, 256: 5.0})):
        # Event files are read in the order of the second in their names.
        monkeypatch.setattr(time, "time", lambda started=now + resume_nimg: started)
        reporter = Reporter(tmp_path, 0, 256, resume_nimg)
        for nimg, value in values.items():
            reporter.report(nimg, {"loss/generator": value})
        reporter.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [(64, 1.0), (128, 2.0), (192, 4.0), (256, 5.0)]
    assert [(row["nimg"], row["loss/generator"]) for row in rows] == expected
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss/generator")] == expected
    # 64 images in the one second since the resumed run began; the 128 images before it count for nothing.
    assert capsys.readouterr().err.splitlines()[-2] == "nimg 192/256  G 4.00  64.0 images/s  00:01 left"


def test_tensorboard_shows_both_networks_and_both_kinds_of_images_on_one_chart(tmp_path):
    """Each number that has a pair is on one chart with it, and no other is; a resumed run has the same charts."""
    pairs = {
        ("loss/generator", "loss/discriminator"), ("logits/real", "logits/fake"), ("accuracy/real", "accuracy/fake"),
        ("grad_norm/generator", "grad_norm/discriminator"), ("lr/generator", "lr/discriminator"),
        ("spectral_norm/generator", "spectral_norm/discriminator"), ("skipped/generator", "skipped/discriminator"),
    }  # fmt: skip
    names = {name for pair in pairs for name in pair}
    names |= {"penalty/r1", "loss/l1", "images_per_second", "loss_scale/generator"}
    for resume_nimg in (0, 64):
        Reporter(tmp_path, 0, 256, resume_nimg).close()
    events = EventAccumulator(str(tmp_path)).Reload()
    (content,) = events.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val
    layout = layout_pb2.Layout.FromString(content)
    assert [category.title for category in layout.category] == ["losses", "real and fake", "both networks"]
    charts = [chart for category in layout.category for chart in category.chart]
    assert (charts[0].title, len(charts)) == ("loss over images seen", 8)
    shown = [{name for name in names for tag in chart.multiline.tag if re.search(tag, name)} for chart in charts]
    assert {frozenset(each) for each in shown} == {*map(frozenset, pairs), frozenset({"penalty/r1"})}


@pytest.mark.parametrize(
    "monitor, header, kept", [(["csv"], "nimg,name,value", 2), ([], "nimg,name,value", 2), ([], "step,name,value", 4)]
)
def test_a_table_of_an_earlier_attempt_ends_where_the_run_resumes(header, kept, monitor, tmp_path):
    lines = [f"{line}\n" for line in (header, "64,loss,1.0", "128,loss,2.0", "192,loss,3.0")]
    (tmp_path / "metrics.csv").write_text("".join(lines))
    Reporter(tmp_path, 0, 256, 64, monitor).close()
    assert (tmp_path / "metrics.csv").read_text() == "".join(lines[:kept])


def test_other_ranks_leave_no_trace(tmp_path, capsys):
    reporter = Reporter(tmp_path / "run", rank=1, total_nimg=1024, resume_nimg=0)
    reporter.report(256, METRICS)
    reporter.images("samples/ema", torch.zeros(1, 3, 4, 4), 1, 256)
    reporter.message("hello")
    reporter.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr() == ("", "")


def test_a_run_directory_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory") as caught:
        Reporter(tmp_path / "file" / "run", 0, 1024, 0)
    assert caught.value.field == str(tmp_path / "file" / "run")

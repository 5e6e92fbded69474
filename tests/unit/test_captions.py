"""`bigsgan data encode --text-encoder`: tokens of captions beside latents, by a stand-in for transformers.

The real library was tried by hand with tiny random T5 and CLIP, as it is too large for every machine that runs this.
"""

from __future__ import annotations

import logging
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from bigsgan.config.data import Data
from bigsgan.config.origin import Origin
from bigsgan.data import build_dataset
from bigsgan.data.source import open_source
from bigsgan.data.text_encoders import with_captions
from tests.unit.test_encode import contents, encode, printed_data

T, W = 4, 3
CAPTIONS = ["a cat", "dogs on the red mat", "one", "a very long text, with more words than fit"]
WRITTEN = [range(2), range(4), range(1), range(4)]
"""The words of each caption of which there are tokens."""


class Tokenizer:
    """A word's number is its length. Pads with 0."""

    model_max_length, pad_token = T, "0"

    @classmethod
    def from_pretrained(cls, folder: str, local_files_only: bool) -> Tokenizer:
        assert local_files_only
        if not Path(folder, "tokenizer.json").exists():
            raise OSError("there is no tokenizer")
        return cls()

    def __call__(self, captions, truncation=False, max_length=None, padding=False, return_tensors=None, verbose=True):
        ids = [[len(word) for word in caption.split()] for caption in captions]
        if not truncation:
            return {"input_ids": ids}
        ids = [each[:max_length] for each in ids]
        longest = max(map(len, ids))
        mask = [[1] * len(each) + [0] * (longest - len(each)) for each in ids]
        padded = [each + [0] * (longest - len(each)) for each in ids]
        return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


class Network(nn.Module):
    """Hidden states: the number, its place, and how many tokens its caption has."""

    @classmethod
    def from_pretrained(cls, folder: str, local_files_only: bool) -> Network:
        assert local_files_only
        return cls()

    def forward(self, input_ids, attention_mask):
        places = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        num = attention_mask.sum(1, keepdim=True).expand_as(input_ids)
        places = places / (input_ids != len("infinite")).all(1, keepdim=True)
        return (torch.stack([input_ids, places, num], 2).double() * attention_mask[..., None] / 7,)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    found = types.ModuleType("transformers")
    found.__spec__ = ModuleSpec("transformers", None)
    found.AutoTokenizer, found.AutoModelForTextEncoding = Tokenizer, Network
    found.PreTrainedTokenizerBase = Tokenizer  # which datasets looks for
    found.logging = types.SimpleNamespace(disable_progress_bar=lambda: None)
    monkeypatch.setitem(sys.modules, "transformers", found)


@pytest.fixture
def source(tmp_path):
    """Images of two classes with captions beside them, and a folder of an encoder."""
    for number, caption in enumerate(CAPTIONS):
        folder = tmp_path / "images" / f"class{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f" {caption}\n")
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "tokenizer.json").write_text("{}")
    return tmp_path


ORDER = [0, 2, 1, 3]
"""The images in the order of their classes."""


def expected(number: int) -> np.ndarray:
    words = CAPTIONS[number].split()
    found = np.zeros((T, W + 1), np.float32)
    for place in WRITTEN[number]:
        numbers = [len(words[place]) / 7, place / 7, len(WRITTEN[number]) / 7]
        found[place] = [*np.float64(numbers).astype(np.float32).astype(np.float16), 1]
    return found


def refused(capsys, *arguments: str) -> str:
    assert encode(*arguments) == 2
    return capsys.readouterr().err


def test_captions_beside_images(source, capsys, caplog):
    made, words = source / "made", ["--text-encoder", str(source / "encoder")]
    assert encode(source / "images", made, "dct", *words) == 0
    captured = capsys.readouterr()
    assert "of 4 captions, 2 had more than 4 tokens, and were cut" in caplog.text + captured.err
    assert "latents of 4 images with captions, " in captured.out
    assert "ignored" not in captured.out
    before = contents(made)
    assert encode(source / "images", made, "dct", *words) == 0  # a second run
    assert contents(made) == before
    data = printed_data(capsys)
    assert (data.condition_size, data.num_classes) == ([T, W], 0)
    caplog.clear()
    dataset = build_dataset(data)
    assert not [each for each in caplog.records if each.levelno > logging.INFO]  # of the classes, too
    for place, number in enumerate(ORDER):
        np.testing.assert_array_equal(dataset[place][1], expected(number))
    (source / "images" / "class0" / "0.txt").write_text("another")
    (source / "images" / "class0" / "none.txt").write_text("of no image")
    assert encode(source / "images", source / "more", "dct", *words) == 0
    assert "1 other file ignored: 1 .txt" in capsys.readouterr().out
    assert "holds work on other images" in refused(capsys, source / "images", made, "dct", *words)


@pytest.mark.parametrize("suffix", ["csv", "tsv"])
def test_captions_in_a_table(source, capsys, caplog, suffix):
    separator = {"csv": ",", "tsv": "\t"}[suffix]
    rows = [f'class{number % 2}/{number}.png{separator}"{caption}"' for number, caption in enumerate(CAPTIONS)]
    for path in (source / "images").glob("*/*.txt"):
        path.unlink()
    table = source / f"captions.{suffix}"
    table.write_text("\n".join(["file" + separator + "text", *rows]))
    words = ["--text-encoder", str(source / "encoder"), "--captions", str(table), "--max-tokens", "3"]
    assert encode(source / "images", source / "made", "dct", *words) == 0
    dataset = build_dataset(printed_data(capsys))
    assert [int(dataset[place][1][:, -1].sum()) for place in range(4)] == [2, 1, 3, 3]
    assert "ignored" not in caplog.text
    table.write_text("\n".join([*rows, f"class0/9.png{separator}none"]))
    assert encode(source / "images", source / "more", "dct", *words) == 0
    assert "1 caption of no image ignored, such as of class0/9.png" in caplog.text
    table.write_text("\n".join([*rows, rows[2]]))
    assert "has several rows of class0/2.png; give one for each" in refused(
        capsys, source / "images", source / "other", "dct", *words
    )
    table.write_text("\n".join(rows[:3]))
    message = refused(capsys, source / "images", source / "other", "dct", *words)
    assert "has no caption of 1 image" in message
    assert "class1/3.png" in message


@pytest.mark.parametrize("suffix", ["csv", "txt"])
def test_texts_as_other_programs_write_them(source, suffix):
    texts = ["two\nlines", "a separator\u2028of lines", "one", "more"]
    root = source / "images"
    images = [f"class{number % 2}/{number}.png" for number in range(4)]
    for image, text in zip(images, texts, strict=True):
        (root / image).with_suffix(".txt").write_text(text, encoding="utf-8-sig", newline="")
    quoted = [f'"{text}"' if "\n" in text else text for text in texts]
    rows = [f"{image},{text}\r\n" for image, text in zip(images, quoted, strict=True)]
    table = source / "captions.csv"
    table.write_text("".join(rows), encoding="utf-8-sig", newline="")
    data = Data(kind="folder", root=str(root), resolution=32, num_classes=0)
    opened = open_source(Origin(data), 0)
    found = with_captions(data, opened, str(table) if suffix == "csv" else None)
    assert found.captions == [texts[number] for number in ORDER]


def test_captions_in_a_column(source, capsys):
    datasets = pytest.importorskip("datasets")
    images = [str(source / "images" / f"class{number % 2}" / f"{number}.png") for number in range(4)]
    table = datasets.Dataset.from_dict({"image": images, "text": CAPTIONS, "number": [1] * 4})
    table.cast_column("image", datasets.Image()).save_to_disk(source / "table")
    words = ["--text-encoder", str(source / "encoder"), "--captions"]
    assert encode(source / "table", source / "made", "dct", *words, "text") == 0
    dataset = build_dataset(printed_data(capsys))
    for number in range(4):
        np.testing.assert_array_equal(dataset[number][1], expected(number))
    for name in ("number", "none"):
        message = refused(capsys, source / "table", source / "other", "dct", *words, name)
        assert "must be a column of texts" in message
        assert "it has text, number" in message


def test_what_is_refused(source, capsys):
    words = [source / "images", source / "made", "dct", "--text-encoder"]
    assert "cannot be read: there is no tokenizer" in refused(capsys, *words, str(source / "images"))
    words.append(str(source / "encoder"))
    assert "must be at most 4, as the tokenizer takes, got 5" in refused(capsys, *words, "--max-tokens", "5")
    assert "must be 1 to" in refused(capsys, *words, "--max-tokens", "0")
    assert "must end in .csv or .tsv" in refused(capsys, *words, "--captions", "text")
    assert "needs a text encoder" in refused(capsys, *words[:3], "--captions", "x.csv")
    (source / "images" / "class1" / "1.txt").write_text("\n")
    assert "class1/1.txt' is empty" in refused(capsys, *words)
    (source / "images" / "class1" / "1.txt").unlink()
    assert "class1/1.txt' cannot be read" in refused(capsys, *words)
    (source / "captions.csv").write_text("a,b,c\n")
    assert "a row that is no path and one text, 'a,b,c'" in refused(
        capsys, *words, "--captions", str(source / "captions.csv")
    )
    (source / "images" / "class1" / "1.txt").write_text("an infinite one")
    message = refused(capsys, *words[:2], "dct", "--text-encoder", str(source / "encoder"))
    assert "encoder' makes numbers that are not finite (of the caption 'an infinite one')" in message
    (source / "made").rename(source / "begun")
    for key, value in (("condition_size", 2), ("labels_file", "labels.csv"), ("num_classes", 2)):
        message = refused(capsys, *words, f"data.{key}={value}")
        assert f"data.{key}: {value!r} cannot be given with --text-encoder" in message
    (source / "encoder" / "text_encoder_2").mkdir()
    assert "has several text encoders" in refused(capsys, *words)
    assert not (source / "made").exists()
    message = refused(capsys, *words[:3], "--kind", "tar", "data.condition_size=[4, 3]")
    assert "data.condition_size: must be one number here" in message


def test_a_tokenizer_without_padding(source, capsys, monkeypatch):
    words = source / "images", source / "made", "dct", "--text-encoder", str(source / "encoder")
    monkeypatch.setattr(Tokenizer, "pad_token", None)
    message = refused(capsys, *words)
    assert "has a tokenizer without a token of padding; name one as pad_token in its tokenizer_config.json" in message
    monkeypatch.setattr(Tokenizer, "pad_token", "0")
    monkeypatch.setattr(Network, "forward", lambda self, **inputs: {}["none"])
    assert "encoder' cannot be read: 'none'" in refused(capsys, *words)


def test_without_the_library(source, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = source / "images", source / "made", "dct", "--text-encoder", str(source / "encoder")
    assert "needs the package transformers, which is not installed; install the extra `text`" in refused(capsys, *words)

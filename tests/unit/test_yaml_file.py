"""YAML as people write it: types of plain scalars, duplicate keys, overrides, and writing what reads back the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigsgan.config.yaml_file import apply_overrides, dump_yaml, parse_override, read_yaml
from bigsgan.errors import UserError

# Plain scalars and what the core schema of YAML 1.2 (section 10.3.2) makes of them, in part against YAML 1.1.
SCALARS: dict[str, Any] = {
    "1e-4": 1e-4,
    "-.5": -0.5,
    "1.": 1.0,
    "1_000": 1000,
    "010": 10,
    "+12": 12,
    "no": "no",
    "12:30": "12:30",
    "2024-01-01": "2024-01-01",
    "0x10": "0x10",
    "true": True,
    "null": None,
    "~": None,
    "": None,
    ".inf": math.inf,
    "'1e-4'": "1e-4",
}


def read(tmp_path: Path, text: str) -> dict[str, Any]:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


@pytest.mark.parametrize("text", SCALARS)
def test_plain_scalars_have_the_types_of_yaml_1_2_in_files_and_overrides(tmp_path, text):
    expected = SCALARS[text]
    (found,) = read(tmp_path, f"key: {text}\n").values()
    assert found == expected
    assert type(found) is type(expected)
    assert parse_override(f"a.b={text}") == (["a", "b"], expected)


def test_nan_is_read_as_a_float():
    assert math.isnan(parse_override("x=.nan")[1])


def test_an_empty_file_is_an_empty_mapping_and_a_byte_order_mark_is_passed_over(tmp_path):
    assert read(tmp_path, "# nothing\n") == {}
    assert read(tmp_path, "\ufeffbatch: 8\n") == {"batch": 8}


BROKEN = {
    "duplicate": ("batch: 1\nseed: 2\nbatch: 3\n", "must be valid YAML: duplicate key 'batch' (line 3, column 1); fix"),
    "number as key": ("data:\n  10: x\n", "key 10 is not a string (line 2, column 3)"),
    "list as key": ("[a, b]: x\n", "key ['a', 'b'] is not a string (line 1, column 1)"),
    "mapping in a line": ("a: b: c\n", "mapping values are not allowed here (line 1, column 5)"),
    "two documents": ("a: 1\n---\nb: 2\n", "but found another document (line 2, column 1)"),
    "python object": ("a: !!python/object/apply:os.getcwd []\n", "could not determine a constructor for the tag"),
    "wrong tag": ("a: !!bool maybe\n", "must be valid YAML: must be true or false, got 'maybe'; fix that line"),
    "endless number": (f"a: {'9' * 5000}\n", "Exceeds the limit"),
    "deep": ("a: " + "[" * 3000, "it is nested too deeply"),
    "control character": ("a: \x01\n", "special characters are not allowed"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_valid_yaml_is_refused_with_its_place(tmp_path, name):
    text, problem = BROKEN[name]
    with pytest.raises(UserError) as caught:
        read(tmp_path, text)
    assert caught.value.field == str(tmp_path / "file.yaml")
    assert "must be valid YAML: " in caught.value.problem
    assert problem in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.remedy == "fix that line"


def test_a_file_that_is_no_mapping_is_missing_or_is_not_text_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must be a mapping, got \['a', 'b'\]; write `key: value` lines"):
        read(tmp_path, "- a\n- b\n")
    with pytest.raises(UserError, match=r"--config: .*missing.yaml' does not exist; give the path of a recipe"):
        read_yaml(tmp_path / "missing.yaml")
    with pytest.raises(UserError, match=r"--config: .* cannot be read: Is a directory"):
        read_yaml(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"--config: .*binary' cannot be read: .*utf-8"):
        read_yaml(tmp_path / "binary")


OVERRIDES = {
    "batch=64": (["batch"], 64),
    "optimizer.generator.lr=1e-4": (["optimizer", "generator", "lr"], 1e-4),
    "optimizer.generator.betas=[0.0, 0.99]": (["optimizer", "generator", "betas"], [0.0, 0.99]),
    "objective.r1={weight: 10, every: 16}": (["objective", "r1"], {"weight": 10, "every": 16}),
    "objective.r1=null": (["objective", "r1"], None),
    "data.root=": (["data", "root"], None),
    "out=runs/a=b": (["out"], "runs/a=b"),
    "out='5'": (["out"], "5"),
    " data . kind = folder": (["data", "kind"], "folder"),
}


@pytest.mark.parametrize("text", OVERRIDES)
def test_overrides_split_at_the_first_equals_sign_and_hold_any_yaml(text):
    assert parse_override(text) == OVERRIDES[text]


@pytest.mark.parametrize("text", ["batch", "=5", "a..b=1", ".=1", " =1", "a.=1", ""])
def test_what_is_no_override_is_refused(text):
    with pytest.raises(UserError, match=r"override: must have the form dotted.key=value, got '.*'; write it like "):
        parse_override(text)


def test_overrides_make_sections_and_replace_values_in_their_order():
    tree: dict[str, Any] = {"batch": 8, "data": {"kind": "digits"}, "objective": None}
    apply_overrides(tree, ["batch=16", "data={kind: folder}", "data.root=/x", "objective.r1.weight=2"])
    assert tree == {"batch": 16, "data": {"kind": "folder", "root": "/x"}, "objective": {"r1": {"weight": 2}}}


def test_an_override_changes_one_of_two_sections_that_share_an_anchor(tmp_path):
    tree = read(tmp_path, "optimizer: {generator: &o {lr: 1}, discriminator: *o}\n")
    apply_overrides(tree, ["optimizer.generator.lr=2"])
    assert tree == {"optimizer": {"generator": {"lr": 2}, "discriminator": {"lr": 1}}}


CONFLICTS = {
    "twice": (["batch=8", "seed=1", "batch=16"], "batch: must be given once, got two overrides; remove one of them"),
    "section after its key": (["data.kind=folder", "data={}"], "data: replaces the earlier override data.kind; put it"),
    "below a value": (["data.kind.name=1"], "data.kind.name: unknown key: data.kind is a value, not a section"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_overrides_that_undo_each_other_are_refused(name):
    overrides, message = CONFLICTS[name]
    with pytest.raises(UserError) as caught:
        apply_overrides({"data": {"kind": "digits"}}, overrides)
    assert str(caught.value).startswith(message)


STRINGS = [
    *["1e-4", "1e5", "-.5", "1.", "010", "1_000", "+1", "12:30", "0x1f", "2024-01-01", ".inf", ".nan"],
    *["no", "yes", "on", "y", "true", "True", "FALSE", "null", "Null", "~"],
    *["", "=", "<<", "-", "#a", "a: b", " padded ", "two\nlines", "é", "'"],
]
FLOATS = [1e-08, 1e20, 1e16, 1.0, -0.0, 0.1, 1 / 3, 5e-324, 1.7976931348623157e308, 123456789.0]


def test_what_is_written_reads_back_the_same(tmp_path):
    tree = {
        "strings": STRINGS, "floats": FLOATS, "integers": [0, -7, 10, 2**63 - 1], "flags": [True, False], "none": None,
        "empty": {"list": [], "section": {}}, "deep": {"er": {"lr": 2e-4, "betas": [0.0, 0.999]}},
    }  # fmt: skip
    text = dump_yaml(tree)
    found = read(tmp_path, text)
    assert found == tree
    for kind in ("strings", "floats", "integers", "flags"):
        assert [type(value) for value in found[kind]] == [type(value) for value in tree[kind]]  # 1.0 == 1 == True
    # And a reader of YAML 1.1, such as PyYAML itself, sees the same.
    assert yaml.safe_load(text) == tree


def test_the_order_of_keys_is_kept():
    assert dump_yaml({"b": 1, "a": {"d": 2, "c": 3}}).splitlines() == ["b: 1", "a: {d: 2, c: 3}"]

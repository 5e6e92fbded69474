"""Ranks that were given different data, or another recipe, end with one message before anything is written."""

from __future__ import annotations

import hashlib
import os
import socket
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from bigsgan.config import RunPlan
from bigsgan.config.data import Data
from bigsgan.errors import UserError
from bigsgan.runtime import comm
from bigsgan.runtime.collective_errors import by_each
from bigsgan.training.rank_consistency import check_plans, checked_frozen, open_same_reference
from tests.distributed import scenarios
from tests.tiny import tiny_plan, zero

BOTH = dict.fromkeys(("generator", "discriminator"), zero(0))
HOST = socket.gethostname()
REMEDY = "copy the same files to all hosts, or give a path on a shared file system"


def fill(root, names, size=16):
    for i, name in enumerate(names):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (size, size), 10 * i).save(path)
    return root


def begin(roots, overrides=()):
    """Put a run together on a root of this rank's own; what is refused, as text."""
    try:
        scenarios.destroy(scenarios.build([*overrides, f"data.root={roots[comm.rank()]}"], BOTH))
    except UserError as error:
        return str(error)
    return None


FOLDER = ["data={kind: folder, resolution: 16, num_classes: 2, num_workers: 0}"]
SAME = ["a/0.png", "a/1.png", "b/2.png", "b/3.png"]
OTHERS = {
    "3 images": SAME[:3],
    "images of other names": [*SAME[:3], "b/4.png"],
    "images of other classes": ["a/0.png", "b/1.png", "b/2.png", "b/3.png"],
}


def test_the_same_files_in_another_place_are_the_same(ranks, tmp_path):
    roots = [fill(tmp_path / name, SAME) for name in ("here", "or/there")]
    assert ranks(2).run(begin, roots, FOLDER) == [None, None]


@pytest.mark.parametrize("words", OTHERS)
def test_another_listing_is_refused(ranks, tmp_path, words):
    roots = [fill(tmp_path / "first", SAME), fill(tmp_path / "second", OTHERS[words])]
    words = "images of other names" if words == "images of other classes" else words  # a class is a folder's name
    problem = f"differs between hosts: 4 images on {HOST} (rank 0), {words} on {HOST}"
    first, second = ranks(2).run(begin, roots, FOLDER)
    assert first == f"data.root: '{roots[0]}' {problem}; {REMEDY}"
    assert second == first


def test_other_contents_of_the_same_names_are_refused(ranks, tmp_path):
    roots = [fill(tmp_path / "first", SAME), fill(tmp_path / "second", SAME, size=64)]
    assert f", files of other sizes on {HOST}; {REMEDY}" in ranks(2).run(begin, roots, FOLDER)[1]


def test_data_that_one_host_lacks_is_told_with_its_name(ranks, tmp_path):
    roots = [fill(tmp_path / "first", SAME), tmp_path / "second"]
    told = f"data.root: '{roots[1]}' does not exist (on {HOST}); give the directory with the images"
    assert ranks(2).run(begin, roots, FOLDER) == [told, told]
    told = f"data.root: '{roots[1]}' does not exist; give the directory with the images"
    assert ranks(2).run(begin, roots[1:] * 2, FOLDER) == [told, told]


class Drawn:
    """Images of this process's own: nothing seeds them."""

    def __init__(self):
        self.images = np.random.default_rng().integers(0, 256, (8, 16, 16), np.uint8)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index]


def begin_drawn():
    """Put a run together on ``Drawn``; what is refused, as text."""
    try:
        scenarios.destroy(scenarios.build([f"data={{kind: '{__name__}:Drawn', resolution: 16, num_classes: 0}}"], BOTH))
    except UserError as error:
        return str(error)
    return None


def test_data_that_each_rank_draws_is_refused(ranks):
    told = "differs between ranks: rank 1 has other data than rank 0; seed the random numbers that it draws as it is"
    assert ranks(2).run(begin_drawn) == [f"data.kind: '{__name__}:Drawn' {told} constructed"] * 2


def with_teacher(paths):
    """The digest of a teacher of this rank's own; what is refused, as text."""
    teacher = SimpleNamespace(path=str(paths[comm.rank()]))
    objective = SimpleNamespace(teacher=teacher, perceptual=None)
    try:
        return checked_frozen(SimpleNamespace(objective=objective), {})["teacher"]
    except UserError as error:
        return str(error)


def test_a_teacher_is_the_same_on_all_hosts(ranks, tmp_path):
    here, there, missing = (tmp_path / name for name in ("here.pt", "there.pt", "missing.pt"))
    here.write_bytes(b"a program")
    there.write_bytes(b"another")
    (digest, _) = same = ranks(2).run(with_teacher, [here, here])
    assert same == [digest, digest]
    field = "objective.teacher.path"
    told = f"{field}: '{here}' differs between hosts: {HOST} have another file than {HOST} (rank 0)"
    assert [each.partition(";")[0] for each in ranks(2).run(with_teacher, [here, there])] == [told] * 2
    told = f"{field}: '{missing}' cannot be read: No such file or directory (on {HOST})"
    assert [each.partition(";")[0] for each in ranks(2).run(with_teacher, [here, missing])] == [told] * 2


def with_reference(paths):
    """The record about a file of this rank's own that metrics compare with; what is refused, as text."""
    try:
        return open_same_reference(paths[comm.rank()], Data(kind="digits"), 3, "metrics.reference")[1]
    except UserError as error:
        return str(error)


def test_a_reference_is_the_same_on_all_hosts(ranks, tmp_path):
    here, there = tmp_path / "here.npz", tmp_path / "there.npz"
    for path, mean in ((here, 0.0), (there, 1.0)):
        np.savez(path, mu=np.full(3, mean), sigma=np.eye(3))
    digest = hashlib.sha256(here.read_bytes()).hexdigest()
    assert ranks(2).run(with_reference, [here, here]) == [{"reference": str(here), "reference_sha256": digest}] * 2
    told = f"metrics.reference: '{here}' differs between hosts: {HOST} have another file than {HOST} (rank 0)"
    assert [each.partition(";")[0] for each in ranks(2).run(with_reference, [here, there])] == [told] * 2
    for each in ranks(2).run(with_reference, [here, tmp_path / "missing.npz"]):
        assert "missing.npz" in each
        assert f"(on {HOST})" in each


def each_but(refusing):
    """What this rank hears of work that one rank refuses, and what it has taken back."""
    undone = []

    def work():
        if comm.rank() == refusing:
            raise UserError("field", refusing, "is refused", "nothing")
        return comm.rank()

    try:
        return by_each(comm, work, undone.append), undone
    except UserError as error:
        return str(error), undone


def test_what_one_rank_refuses_is_raised_and_taken_back_on_all(ranks):
    assert ranks(2).run(each_but, None) == [(0, []), (1, [])]
    told = "field: 1 is refused; nothing"
    assert ranks(2).run(each_but, 1) == [(told, [0]), (told, [])]


def planned(overrides, directory):
    """Compare plans with overrides of this rank's own."""
    place = directory / str(comm.rank())
    place.mkdir()
    try:
        options, num = overrides[comm.rank()], str(2 - comm.rank())
        plan = tiny_plan(place, comm.world_size(), options, BOTH)
        recipe = plan.recipe.model_copy(update={"out": "run"})
        with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=num):
            check_plans(RunPlan(recipe, plan.world_size, plan.engines))
    except UserError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    "first, second, told",
    [
        (["data.prefetch=1"], ["data.prefetch=2"], None),
        (
            ["batch_statistics=host"],
            ["batch_statistics=host"],
            f"LOCAL_WORLD_SIZE: must be 2 as on {HOST} (rank 0), got 1 on {HOST}; "
            "start all hosts with the same recipe, DeepSpeed files and versions",
        ),
        (
            ["seed=1", "optimizer.generator.lr=0.1"],
            ["seed=1", "optimizer.generator.lr=0.2"],
            f"optimizer.generator.lr: must be 0.1 as on {HOST} (rank 0), got 0.2 on {HOST}; "
            "start all hosts with the same recipe, DeepSpeed files and versions",
        ),
    ],
)
def test_recipes_are_compared(ranks, tmp_path, first, second, told):
    assert ranks(2).run(planned, [first, second], tmp_path) == [told, told]

"""Any rank reads any part of a checkpoint, and what does not fit the network is refused."""

from __future__ import annotations

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint import StateShard
from bigsgan.errors import UserError
from tests.alone import Entry, entry, save
from tests.unit.test_checkpoint import FILE, A, B, ThreadRank, on_ranks, rank_entries


def test_any_rank_reads_any_stretch(tmp_path):
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), rank_entries()) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert set(found.manifest["files"]) == {FILE, "rank00001.safetensors"}
    assert found.manifest["kinds"] == {"extra": ["state"], "generator": ["buffer", "master"]}
    for world_size in (1, 2, 3, 5):
        for rank in range(world_size):
            saved = checkpoint.Reader(found, rank, world_size).entry("generator")
            for name, value in (("a", A), ("b", B)):
                for start in range(len(value)):
                    for end in range(start, len(value) + 1):
                        out = torch.full((end - start,), -1.0)
                        saved.read("master", name, start, out)
                        assert torch.equal(out, value[start:end])
    state = torch.zeros(3)
    checkpoint.Reader(found, 1, 2).entry("extra").read("state", "s", 0, state)
    assert torch.equal(state, torch.ones(3))


def test_a_rank_opens_no_more_files_than_it_needs(tmp_path):
    """Eight ranks wrote; as many, half or twice as many read next to nothing of the others' files."""
    values = torch.arange(80.0)
    parts = [{"g": Entry([StateShard("master", "a", 10 * r, values[10 * r : 10 * r + 10])])} for r in range(8)]
    assert all(on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), parts))
    found = checkpoint.newest(tmp_path)
    assert found is not None
    for world_size, most in ((8, 1), (4, 3), (16, 1)):
        share = len(values) // world_size
        for rank in range(world_size):
            reader = checkpoint.Reader(found, rank, world_size)
            out = torch.zeros(share)
            reader.entry("g").read("master", "a", rank * share, out)
            assert torch.equal(out, values[rank * share : (rank + 1) * share])
            assert reader.num_opened <= most


def test_missing_elements_are_counted_and_named(tmp_path):
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), rank_entries()) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    reader = checkpoint.Reader(found)
    with pytest.raises(UserError, match=r"lacks 3 elements of generator/master/a, which") as caught:
        reader.entry("generator").read("master", "a", 10, torch.zeros(5))
    assert caught.value.field == str(found.path)
    with pytest.raises(UserError, match="lacks 2 elements of generator/master/c"):
        reader.entry("generator").read("master", "c", 0, torch.zeros(2))
    with pytest.raises(
        UserError, match=r"has no anchors, which this run's recipe needs; resume with the recipe that saved it"
    ):
        reader.entry("anchors")


def test_a_network_of_another_size_is_refused(tmp_path):
    assert save(tmp_path, 64, {"generator": entry({"weight": torch.zeros(12), "bias": torch.zeros(3)})})
    found = checkpoint.newest(tmp_path)
    assert found is not None
    checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(4, 3))
    with pytest.raises(
        UserError,
        match=r".*: must have 2 elements of generator/master/bias with this run's recipe, got 3; use another",
    ):
        checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(4, 2))
    with pytest.raises(UserError, match="lacks 3 elements of generator/master/weight"):
        checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(5, 3))


def with_more(kind: str, name: str) -> list[dict[str, Entry]]:
    """A linear layer on two ranks, of which the second has a value more, at the end of its file."""
    weight, bias = torch.arange(12.0), torch.zeros(3)
    first = [StateShard("master", "weight", 0, weight[:6]), StateShard("exp_avg", "weight", 0, weight[:6])]
    second = [StateShard("master", "weight", 6, weight[6:]), StateShard("master", "bias", 0, bias)]
    return [{"g": Entry(first)}, {"g": Entry([*second, StateShard(kind, name, 0, torch.full((2,), 5.0))])}]


@pytest.mark.parametrize(
    "kind, name, problem",
    [
        ("master", "extra", "has g/master/extra, which the network of this run's recipe does not have"),
        ("buffer", "extra", "has g/buffer/extra, which the network of this run's recipe does not have"),
        ("master", "layers.-1.p", None),  # of augmentation, which may be taken out
        ("exp_avg", "extra", None),
    ],
)
def test_values_without_a_place_in_the_network_are_refused(tmp_path, kind, name, problem):
    """Whether one process reads all, or some rank restores the part that it is asked for."""
    assert on_ranks(lambda ranks, part: save(tmp_path, 64, part, ranks), with_more(kind, name)) == [True, True]
    found = checkpoint.newest(tmp_path)
    assert found is not None
    with torch.device("meta"):
        network = torch.nn.Linear(4, 3)

    def refused(ranks: ThreadRank, wanted: dict[str, Entry]) -> str:
        try:
            checkpoint.restore(found, wanted, ranks, networks={"g": network})
        except UserError as error:
            return str(error)
        return ""

    remedy = "use another checkpoint, or the version of bigsgan that saved it"
    expected = {"", f"{found.path}: {problem}; {remedy}"} if problem else {""}
    for world_size in (1, 2, 3):
        part = {"g": Entry([StateShard("master", "weight", 0, torch.zeros(2))])}
        assert set(on_ranks(refused, [part] * world_size)) | {""} == expected
    reading = torch.nn.Linear(4, 3)
    if problem is None:
        checkpoint.Reader(found).entry("g").read_network(reading)
        assert torch.equal(reading.weight.flatten(), torch.arange(12.0))
    else:
        with pytest.raises(UserError, match=f"{problem}; {remedy}"):
            checkpoint.Reader(found).entry("g").read_network(reading)

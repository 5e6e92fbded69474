"""Any rank reads any part of a checkpoint, and what does not fit the network is refused."""

from __future__ import annotations

import pytest
import torch

from bigsgan import checkpoint
from bigsgan.checkpoint import StateShard
from bigsgan.checkpoint.reader import intervals, numbered
from bigsgan.engines.base import Piece, Shard
from bigsgan.errors import UserError
from bigsgan.training.state import MOST_WRITERS, _shard_parts
from tests.single_process import Entry, entry, save
from tests.unit.test_checkpoint import FILE, A, B, ThreadRank, on_ranks, rank_entries, saved


def test_any_rank_reads_any_stretch(tmp_path):
    found = saved(tmp_path, rank_entries())
    assert set(found.manifest["files"]) == {FILE, "rank00001.safetensors"}
    assert found.manifest["kinds"] == {"extra": ["state"], "generator": ["buffer", "master"]}
    for world_size in (1, 2, 3, 5):
        for rank in range(world_size):
            entry = checkpoint.Reader(found, rank, world_size).entry("generator")
            for name, value in (("a", A), ("b", B)):
                for start in range(len(value)):
                    for end in range(start, len(value) + 1):
                        out = torch.full((end - start,), -1.0)
                        entry.read("master", name, start, out)
                        assert torch.equal(out, value[start:end])
    state = torch.zeros(3)
    checkpoint.Reader(found, 1, 2).entry("extra").read("state", "s", 0, state)
    assert torch.equal(state, torch.ones(3))


def test_a_rank_opens_no_more_files_than_it_needs(tmp_path):
    """Eight ranks wrote; as many, half or twice as many read next to nothing of the others' files."""
    values = torch.arange(80.0)
    parts = [{"g": Entry([StateShard("master", "a", 10 * r, values[10 * r : 10 * r + 10])])} for r in range(8)]
    found = saved(tmp_path, parts)
    for world_size, most in ((8, 1), (4, 3), (16, 1)):
        share = len(values) // world_size
        for rank in range(world_size):
            reader = checkpoint.Reader(found, rank, world_size)
            out = torch.zeros(share)
            reader.entry("g").read("master", "a", rank * share, out)
            assert torch.equal(out, values[rank * share : (rank + 1) * share])
            assert reader.num_opened <= most


def written_by(num_ranks, directory):
    """A checkpoint: each rank has a stretch of one value, the fourth half of a second one, rank 0 all of a third."""
    parts = [[StateShard("master", "a", 4 * rank, A4 + rank)] for rank in range(num_ranks)]
    parts[0] += [StateShard("buffer", "mean", 0, A4), StateShard("master", "b", 0, A4)]
    parts[3] += [StateShard("master", "b", 4, A4)]
    entries = [{"g": Entry(own), "shared": Entry([StateShard("state", "s", 0, A4, everywhere=True)])} for own in parts]
    return saved(directory, entries)


A4 = torch.arange(4.0)


def restored(found, num_ranks):
    """What each rank of the same layout reads, and how many files it opens for that."""
    for rank in range(num_ranks):
        reader = checkpoint.Reader(found, rank, num_ranks)
        own, mean, other, state = torch.zeros(4), torch.zeros(4), torch.zeros(8), torch.zeros(4)
        values = reader.entry("g")
        values.read("master", "a", 4 * rank, own)
        values.read("buffer", "mean", 0, mean)
        values.read("master", "b", 0, other)
        reader.entry("shared").read("state", "s", 0, state)
        assert not values.has("exp_avg", "a")
        assert values.has("master", "b")
        for read, value in ((own, A4 + rank), (mean, A4), (other, torch.cat([A4, A4])), (state, A4)):
            assert torch.equal(read, value)
        yield reader.num_opened


@pytest.mark.parametrize("num_ranks", [8, 24])
def test_a_rank_that_resumes_opens_its_own_file_and_those_of_the_few_that_hold_what_all_need(num_ranks, tmp_path):
    found = written_by(num_ranks, tmp_path)
    assert found.manifest["holders"] == {
        "g/buffer/mean": "0",
        "g/master/a": f"0-{num_ranks - 1}",
        "g/master/b": "0 3",
        "shared/state/s": "0",
    }
    opened = list(restored(found, num_ranks))
    assert opened == [2, 3, 3, 2] + [3] * (num_ranks - 4)


@pytest.mark.parametrize("num_replicas", [1, 3, 8, 9, 1024])
def test_few_of_many_replicas_write_what_all_hold(num_replicas):
    """Each element is written once, of tiny values too; otherwise each of N replicas would open N files."""
    values = torch.arange(36.0)
    pieces = [Piece("a", 0, 30, 0), Piece("b", 0, 1, 30), Piece("c", 7, 5, 31)]
    found, writers = [], set()
    for replica in range(num_replicas):
        own = list(_shard_parts(Shard(values, {}, pieces, (replica, num_replicas)), "master", values))
        found += [(part.name, part.offset + i, value) for part in own for i, value in enumerate(part.values.tolist())]
        writers |= {replica} if own else set()
    assert len(writers) == min(num_replicas, MOST_WRITERS)
    assert sorted(found) == [
        (piece.name, piece.offset + i, float(piece.start + i)) for piece in pieces for i in range(piece.numel)
    ]


@pytest.mark.parametrize("numbers", [[], [0], [3, 4], [0, 1, 2, 5, 7, 8]])
def test_numbers_of_files_as_a_text(numbers):
    assert numbered(intervals(numbers)) == numbers


def test_missing_elements_are_counted_and_named(tmp_path):
    found = saved(tmp_path, rank_entries())
    reader = checkpoint.Reader(found)
    with pytest.raises(UserError, match=r"lacks 3 elements of generator/master/a, which") as caught:
        reader.entry("generator").read("master", "a", 10, torch.zeros(5))
    assert caught.value.field == str(found.path)
    with pytest.raises(UserError, match="lacks 2 elements of generator/master/c"):
        reader.entry("generator").read("master", "c", 0, torch.zeros(2))
    with pytest.raises(UserError, match=r"has no anchors, which this run's recipe needs"):
        reader.entry("anchors")


def test_a_network_of_another_size_is_refused(tmp_path):
    assert save(tmp_path, 64, {"generator": entry({"weight": torch.zeros(12), "bias": torch.zeros(3)})})
    found = checkpoint.newest(tmp_path)
    checkpoint.Reader(found).entry("generator").read_network(torch.nn.Linear(4, 3))
    with pytest.raises(UserError, match=r".*: must have 2 elements of generator/master/bias with this run's recipe"):
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
    found = saved(tmp_path, with_more(kind, name))
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

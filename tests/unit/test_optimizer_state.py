"""The optimizers' state in an R3GAN snapshot: what is Adam's is taken, and the reason said why another is not."""

import pickle
import re

import pytest
import torch
from safetensors.torch import load_file

from bigsgan.cli import main
from bigsgan.weights.optimizer_state import adam_moments
from bigsgan.weights.stylegan_pickle import ForeignNetwork
from tests.unit.test_r3gan_pickle import RECORDS, classes, snapshot

__all__ = ["classes"]


def import_of(classes, tmp_path, **changes):
    """Import a snapshot with classes; return it."""
    content = snapshot(classes, load_file(RECORDS / "r3gan_conditional.safetensors"), [], [], 3_000)
    content |= changes
    (tmp_path / "snapshot.pkl").write_bytes(pickle.dumps(content))
    arguments = ["--weights", str(tmp_path / "snapshot.pkl"), "--out", str(tmp_path / "run")]
    assert main(["import", "--from", "r3gan", *arguments]) == 0
    return content


def without_one(content):
    state = content["G_opt_state"]
    return {**state, "state": {number: each for number, each in state["state"].items() if number}}


def changed(content, kind, value):
    state = content["G_opt_state"]["state"]
    return {**content["G_opt_state"], "state": {**state, 0: {**state[0], kind: value(state[0][kind])}}}


OTHERS = {
    "parameters": (without_one, "it is not for the network's [0-9]+ parameters"),
    "shape": (lambda c: changed(c, "exp_avg", lambda t: t[:1]), "exp_avg of .* is missing or of another shape"),
    "NaN": (lambda c: changed(c, "exp_avg_sq", lambda t: t * float("nan")), "exp_avg_sq of .* is not finite"),
    "negative": (lambda c: changed(c, "exp_avg_sq", lambda t: t - 100), "a second moment is negative"),
    "updates": (lambda c: changed(c, "step", lambda t: t + 1), "its parameters differ in their number of updates"),
    "count": (lambda c: changed(c, "step", lambda t: t * float("inf")), "its number of updates is not known"),
    "something": (lambda c: [1, 2], "it does not have exactly one group of parameters"),
}


@pytest.mark.slow
@pytest.mark.parametrize("other", OTHERS)
def test_another_optimizers_state_is_named_and_left(classes, tmp_path, capsys, other):
    change, problem = OTHERS[other]
    record = load_file(RECORDS / "r3gan_conditional.safetensors")
    content = snapshot(classes, record, [], [])
    import_of(classes, tmp_path, G_opt_state=change(content))
    text = capsys.readouterr().out
    assert re.search(rf"Adam of the generator starts from zero \([^)]*{problem}", text)
    assert "Adam of the discriminator resumes after 4 updates" in text


@pytest.mark.parametrize("step", [torch.tensor(1j), torch.tensor([1.0, 1.0]), 0.5, True, float("nan"), 10**400, "3"])
def test_a_number_of_updates_that_is_none_is_told(step):
    network = ForeignNetwork({"w": torch.zeros(2)}, parameters=("w",))

    def saved(step):
        moments = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(2)}
        return {"param_groups": [{"params": [0]}], "state": {0: {"step": step, **moments}}}

    assert adam_moments(saved(torch.tensor(3.0)), network).steps == 3
    with pytest.raises(ValueError, match="its number of updates is not known"):
        adam_moments(saved(step), network)

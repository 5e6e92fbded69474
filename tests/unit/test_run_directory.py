"""What a run directory keeps of its recipe, what a resumed run may change of it, and which files commands may write."""

from __future__ import annotations

import re
from collections.abc import Collection

import pytest

from bigsgan.config import Recipe, load_recipe
from bigsgan.config.metrics import Metrics
from bigsgan.config.run_directory import (
    FREE_KEYS,
    STEPS,
    check_run_directory,
    compare_recipes,
    flat,
    read_saved_recipe,
    refuse_foreign_metrics,
    write_recipe,
)
from bigsgan.config.run_plan import plan_run
from bigsgan.config.saved_recipe import refuse_moved
from bigsgan.doctor.games import TINY_GAMES
from bigsgan.errors import UserError
from tests.bad_runs import make_run
from tests.tiny import tiny_recipe

FREE = {
    "total_nimg=2000000",
    "report_nimg=5",
    "checkpoints.keep=9",
    "checkpoints.keep_best={metric: fid}",
    "engines.generator.pipeline_stages=2",
    "data.root=/elsewhere",
    "data.num_workers=0",
    "data.max_corrupt=0",
    "engines.generator.ds_config=ds_configs/zero1.json",
    "engines.discriminator.activation_checkpointing=true",
}

FIXED = {
    "batch=64": r"batch: must be \d+, as in the run '",
    "data.kind=synthetic": "data.kind: must be 'digits', as in the run '",
    "generator.channels=12": r"generator.channels: must be \d+, as in the run '",
    "optimizer.generator.lr=0.125": r"optimizer.generator.lr: must be 0.\d+, as in the run '",
    "objective.r1.weight=1": "objective.r1: must be unset, as in the run '",
    "objective.schedule=overlapped": "objective.schedule: must be 'exact', as in the run '",
    "ema.power={snapshot_nimg: 8}": "ema.power: must be unset, as in the run '",
}


def compare(saved: Recipe, given: Recipe, allowed: Collection[str] = ()) -> list[str]:
    return compare_recipes(flat(saved.model_dump()), flat(given.model_dump()), given.out, allowed)


def test_what_is_measured_may_change():
    metrics = Metrics(names=["fid10"], every_nimg=1)
    assert {f"metrics.{key}" for key in flat(metrics.model_dump())} <= FREE_KEYS


def test_every_free_key_may_change():
    """Also those of a network, whose other keys determine its weights."""
    for key in FREE_KEYS:
        of_flow = {"discriminator.family": "none"}
        assert compare_recipes({key: 1, **of_flow}, {key: 2, **of_flow}, "run", []) == [f"{key}: 1 -> 2"]


@pytest.mark.parametrize("key", sorted(STEPS))
def test_steps_that_a_generator_learns_beside_a_discriminator_stay_unless_allowed(key):
    saved, given = ({key: each, "discriminator.family": "dmd2"} for each in (2, 4))
    with pytest.raises(UserError, match=f"or accept it by --allow-change {key}"):
        compare_recipes(saved, given, "run", [])
    assert compare_recipes(saved, given, "run", [key]) == [f"{key}: 2 -> 4"]


def test_so_does_a_sampler_by_which_images_are_made_that_it_learns_from():
    saved, given = ({"generator.sampler": each, "generator.noised": "samples"} for each in ("ode", "sde"))
    with pytest.raises(UserError, match=r"or accept it by --allow-change generator\.sampler"):
        compare_recipes(saved, given, "run", [])


@pytest.mark.parametrize("override", sorted(FREE))
def test_what_does_not_change_the_meaning_of_a_run_may_change(tmp_path, override):
    files = ["data={kind: folder, root: /here}"] if override.startswith(("data.root", "data.max_")) else []
    saved, given = tiny_recipe(tmp_path, *files), tiny_recipe(tmp_path, *files, override)
    assert given != saved
    key = override.partition("=")[0]
    for before, after in ((saved, given), (given, saved)):
        assert [line.partition(":")[0].startswith(key) for line in compare(before, after)].count(False) == 0
        assert compare(before, after)


@pytest.mark.parametrize("override", sorted(FIXED))
def test_what_changes_the_meaning_of_a_run_is_refused(tmp_path, override):
    with pytest.raises(UserError) as caught:
        compare(tiny_recipe(tmp_path), tiny_recipe(tmp_path, override))
    assert re.match(FIXED[override], str(caught.value))
    remedy = "; set it back to resume, or give another `out` to start a new run"
    if override.startswith(("generator.", "objective.schedule=overlapped")):
        assert str(caught.value).endswith(f"{remedy} (with init_from to keep the weights)")
    else:
        assert str(caught.value).endswith(f"{remedy}; or accept it by --allow-change {caught.value.field}")
    assert str(tmp_path / "run") in str(caught.value)


def test_images_of_earlier_updates_cannot_be_added(tmp_path):
    """But there may be more or fewer of them, or none."""
    none, few, many = (tiny_recipe(tmp_path, "data.num_classes=0", f"objective.pool={num}") for num in (0, 5, 9))
    with pytest.raises(UserError, match=r"objective.pool: must be 0, as in the run .* \(with init_from to keep the"):
        compare(none, few, ["objective.pool"])
    for before, after in ((few, many), (many, few), (few, none)):
        assert len(compare(before, after, ["objective.pool"])) == 1


def test_which_network_comes_first_may_change(tmp_path):
    overlapped, first, exact = (
        tiny_recipe(tmp_path, f"objective.schedule={name}") for name in ("overlapped", "generator_first", "exact")
    )
    for before, after in ((exact, first), (first, exact)):
        assert len(compare(before, after, ["objective.schedule"])) == 1
    with pytest.raises(UserError, match=r"with init_from to keep"):
        compare(first, overlapped, ["objective.schedule"])


def test_a_recipe_of_another_family_is_told_by_its_family(tmp_path):
    with pytest.raises(UserError, match=r"^discriminator\.family: must be 'biggan', as in the run '.*', got 'dcgan';"):
        compare(tiny_recipe(tmp_path), tiny_recipe(tmp_path, *TINY_GAMES["dcgan"]))


@pytest.mark.parametrize(
    "changes, key",
    [
        (["objective.lecam={weight: 0.3}"], "objective.lecam"),
        (["augmentation={kind: ada, p: 0.3}"], "augmentation"),
        (["augmentation={kind: diffaugment}"], None),
    ],
)
def test_sections_with_state_of_their_own_are_not_added(tmp_path, changes, key):
    """A checkpoint without the state could not be resumed from, whatever is allowed."""
    saved, given = tiny_recipe(tmp_path), tiny_recipe(tmp_path, *changes)
    allowed = [name for name in flat(given.model_dump()) if name.startswith(("objective.lecam", "augmentation"))]
    if key is None:
        assert compare(saved, given, allowed)
        return
    with pytest.raises(UserError, match=rf"^{key}: must be unset, as in the run .* \(with init_from to keep"):
        compare(saved, given, allowed)
    assert compare(given, saved, allowed)


def test_a_target_is_not_added_to_ada(tmp_path):
    fixed, adapted, other = (
        tiny_recipe(tmp_path, f"augmentation={{kind: ada, {how}}}") for how in ("p: 0.3", "target: 0.5", "target: 0.6")
    )
    with pytest.raises(UserError, match=r"^augmentation\.target: must be unset"):
        compare(fixed, adapted, ["augmentation.target", "augmentation.p"])
    assert compare(adapted, other, ["augmentation.target"]) == ["augmentation.target: 0.5 -> 0.6"]


def test_a_change_is_accepted_where_the_user_says_so(tmp_path):
    saved, given = tiny_recipe(tmp_path), tiny_recipe(tmp_path, "seed=99", "batch=64")
    assert compare(saved, given, ["batch", "seed"]) == ["batch: 8 -> 64", "seed: 1 -> 99"]
    with pytest.raises(UserError, match=r"^seed: must be 1, as in the run '.*', got 99;"):
        compare(saved, given, ["batch"])
    with pytest.raises(UserError, match=r"^--allow-change: must be a key of the recipe, got 'bacth'"):
        compare(saved, given, ["batch", "bacth", "seed"])
    with pytest.raises(UserError, match=r"^generator.channels: must be 2, as in the run '.*'"):
        compare(saved, tiny_recipe(tmp_path, "generator.channels=3"), ["generator.channels"])


def test_a_section_that_only_one_recipe_has_is_named_once():
    without, with_r1 = {"objective.r1": None, "batch": 8}, {"objective.r1.form": "exact", "objective.r1.weight": 1.0}
    with_r1 |= {"batch": 8}
    with pytest.raises(UserError, match=r"^objective\.r1: must be unset, as in the run 'run'; .* objective\.r1$"):
        compare_recipes(without, with_r1, "run", [])
    with pytest.raises(UserError, match=r"^objective\.r1: must be set, as in the run 'run'; .* objective\.r1$"):
        compare_recipes(with_r1, without, "run", [])
    for saved, given in ((without, with_r1), (with_r1, without)):
        assert len(compare_recipes(saved, given, "run", ["objective.r1"])) == 2


def test_the_recipe_of_a_moved_run_begins_no_other_run(tmp_path):
    moved = tmp_path / "moved"
    checkpoint = moved / "checkpoints" / f"{64:012d}"
    checkpoint.mkdir(parents=True)
    config = moved / "config.yaml"
    refuse_moved(config, "runs/old", [])  # another program's
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=rf"^out: 'runs/old' is not the directory of {config}, which holds a run; give"):
        refuse_moved(config, "runs/old", ["batch=8"])
    refuse_moved(config, "runs/old", [" out=runs/old"])
    refuse_moved(config, str(tmp_path / "." / "moved"), [])
    refuse_moved(moved / "other.yaml", "runs/old", [])


def test_a_run_may_be_moved(tmp_path):
    recipe = tiny_recipe(tmp_path)
    assert compare(recipe, recipe.model_copy(update={"out": "elsewhere"})) == [f"out: {recipe.out!r} -> 'elsewhere'"]


def test_a_recipe_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"^out: '.*/file/run' cannot be written: Not a directory"):
        write_recipe(tiny_recipe(tmp_path), tmp_path / "file" / "run", {})


def test_the_shape_of_what_networks_see_stays(tmp_path):
    saved, given = (tiny_recipe(tmp_path, f"data.codec={{kind: dct, block: {block}}}", "data.resolution=64",
                                "generator={family: mlp, latent_size: 4}", "discriminator={family: mlp}")
                    for block in (2, 4))  # fmt: skip
    with pytest.raises(UserError, match=r"^data.codec.block: must be 2, as in the run .*\(with init_from to keep the"):
        compare(saved, given, ["data.codec.block"])


def test_a_saved_recipe_that_keeps_the_best_by_no_metric_can_be_read(tmp_path):
    more = ["metrics={names: [fid2k], every_nimg: 64}", "checkpoints.keep_best.metric=metrics/fid9k"]
    recipe = tiny_recipe(tmp_path, *more)
    (tmp_path / "config.yaml").write_text(recipe.to_yaml())
    assert read_saved_recipe(tmp_path) == recipe
    with pytest.raises(UserError, match=r"^checkpoints\.keep_best\.metric: must be a metric that metrics.names gives"):
        plan_run(recipe, 1)


def test_a_directory_that_lost_its_recipe_has_it_in_its_newest_checkpoint(tmp_path):
    run = make_run(tmp_path)
    expected = read_saved_recipe(run)
    (run / "config.yaml").unlink()
    assert read_saved_recipe(run) == expected
    check_run_directory(run)
    (run / "metrics.jsonl").write_text('{"nimg": 64}\n')
    refuse_foreign_metrics(run)
    (run / "ds_generator.json").write_text("{}")
    assert load_recipe(run / "config.yaml", ["seed=5"]).engines.generator.ds_config == "ds_generator.json"
    (run / "config.yaml").symlink_to("nothing")
    with pytest.raises(UserError, match="must be a run directory"):
        check_run_directory(run)
    (run / "config.yaml").unlink()
    (run / "checkpoints" / f"{64:012d}" / "manifest.json").write_text("[]")
    with pytest.raises(UserError, match=r"must be a run directory, got '.*' \(it has no config.yaml\)"):
        read_saved_recipe(run)

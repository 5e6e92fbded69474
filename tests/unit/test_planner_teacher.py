"""What a teacher costs, by hand: its program, and D's heads for its features."""

import pytest
import torch

from bigsgan.adversarial.terms.teacher import distances
from bigsgan.cli import main
from bigsgan.config import NETWORKS
from bigsgan.engines.pipeline.layout import build_on_meta, meta_inputs
from bigsgan.plan import Speed, describe_networks, estimate_time
from bigsgan.planner import memory, teaching
from bigsgan.planner.activations import Traces, trace_discriminator
from bigsgan.planner.census import Census
from bigsgan.planner.counting import count_heads, count_work
from bigsgan.planner.layers import watched
from bigsgan.planner.teaching import left_out, trace_program
from tests.teachers import write_teacher
from tests.tiny import TINY_GAMES, both, stages, tiny_plan
from tests.unit.test_planner_passes import Head

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
TOKENS, WIDTH, HIDDEN, FEATURES = 1 + 16, 16, 10, 6
HEADS = 2 * TOKENS * (WIDTH * HIDDEN + HIDDEN**2 + HIDDEN * FEATURES)
PROGRAM = 2 * (16 * FEATURES * 3 * 7 * 7 + FEATURES**2)
"""Patches of 7x7 pixels, and the class token's linear map."""
AWAY = f"objective.teacher={{path: away.pt, width: {FEATURES}, hidden: {HIDDEN}}}"
TAUGHT = ["gat", "cat"]
"""Families whose D predicts features, of as many tokens in either."""
LARGE = "objective.teacher={path: away.pt, width: 48, hidden: 96}"


def held(features):
    """Bytes of the program's tensors."""
    return 4 * (features * 3 * 7 * 7 + features + features**2 + features)


@pytest.mark.parametrize("suffix", [".pt", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_a_program_by_hand(tmp_path, suffix):
    networks = [option for option in TINY_GAMES["gat"] if not option.startswith("augmentation")]
    plan = tiny_plan(tmp_path, 1, [*networks, *write_teacher(tmp_path / f"t{suffix}", FEATURES)], both(0))
    found = trace_program(plan.recipe, "teacher")
    assert (found.flop, found.patches, found.held) == (PROGRAM, 16, held(FEATURES))
    # Images of 28x28 in three colours, beside those of 16x16 that they are enlarged from.
    assert found.peak(5) == 5 * 4 * 3 * (16**2 + 28**2)


@pytest.mark.slow
@pytest.mark.parametrize("family", TAUGHT)
def test_operations_of_heads(tmp_path, family):
    """Of the tokens of the full image, also where D reads others."""
    without, plan = (tiny_plan(tmp_path, 1, [*TINY_GAMES[family], *more], both(0)) for more in ([], [AWAY]))
    assert (count_heads(without), count_heads(plan)) == (0, HEADS)
    before, counted = count_work(without), count_work(plan)
    assert counted["discriminator"]["forward_flop"] == before["discriminator"]["forward_flop"]
    assert counted["update_flop"] - before["update_flop"] == 3 * HEADS  # forward and backward, of the real images
    assert counted["heads_flop"] == HEADS


@pytest.mark.slow
def test_what_is_said_of_a_teacher(tmp_path):
    here = write_teacher(tmp_path / "t.pt", FEATURES)
    plan = tiny_plan(tmp_path, 1, [*TINY_GAMES["gat"], *here, "objective.d_steps=2"], both(0))
    counted = count_work(plan)
    lines = describe_networks(plan, counted).splitlines()
    heads, program = (f"{flop / 1e9:.3f}" for flop in (HEADS, 2 * PROGRAM))
    assert lines[3].split()[:2] == ["heads", heads]
    assert " ".join(lines[-1].split()) == f"teacher {program} of its program in an update"
    assert counted["teacher_flop"] == 2 * PROGRAM
    estimate = estimate_time(plan, counted, Speed(1, 1e3))
    assert estimate["images_per_second"] == 1e3 / (counted["update_flop"] + 2 * PROGRAM)
    away = tiny_plan(tmp_path, 1, [*TINY_GAMES["gat"], AWAY], both(0))
    text = "teacher: neither operations nor memory of its program are counted, as there is no 'away.pt'"
    counted = count_work(away)
    assert describe_networks(away, counted).splitlines()[-1] == text
    assert counted["teacher_flop"] is None


def predicted(stack, inputs, num, section):
    """A pass of D in training, all layers at once, with features as ``num`` samples have them."""
    targets = torch.empty(num, section.width, device="meta"), torch.empty(num, 16, section.width, device="meta")
    outputs, found = stack.with_predictions(*inputs, num=num, segments=2)
    return outputs, sum(distances(found, *targets))


def peaks_of_whole(stack, inputs, num, section):
    census = Census()
    with watched(stack, census):
        census.ignore(inputs)
        with census:
            outputs, distance = predicted(stack, inputs, num, section)
            forward = census.take()
            (Head.apply(outputs) + distance).backward()
            backward = census.take()
    return {"forward": forward.peak, "kept": forward.end, "backward": backward.peak}


@pytest.mark.slow
@pytest.mark.parametrize("family", TAUGHT)
@pytest.mark.parametrize("checkpointing", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layers_with_heads_make_a_whole(tmp_path, checkpointing, family):
    n, recompute = 32, f"engines.discriminator.activation_checkpointing={checkpointing}"
    options = [f"batch={n}", *TINY_GAMES[family], LARGE, recompute]
    plan = tiny_plan(tmp_path, 1, options, both(0))
    stack, inputs = build_on_meta(plan, "discriminator"), list(meta_inputs(plan, "discriminator", 2 * n))
    found = peaks_of_whole(stack, inputs, n, plan.recipe.objective.teacher)
    traces = Traces()
    passes = traces.passes(plan, "discriminator", "train", 2, n, (0, len(stack.layers)))
    near = 0.1 if checkpointing else 0.02  # the distance, which is computed once, is taken to be computed again
    assert passes.forward.peak == pytest.approx(found["forward"], rel=near)
    assert passes.backward.peak == pytest.approx(found["backward"], rel=near)
    if not checkpointing:
        judging = traces.passes(plan, "discriminator", "judge", 2, n, (0, len(stack.layers)))
        assert passes.kept == pytest.approx(found["kept"], rel=0.02)
        # What each linear layer reads, and each SiLU: the tokens of D are kept as they are.
        assert passes.kept - judging.kept > 4 * n * TOKENS * (4 * 96 + 48)


@pytest.mark.slow
@pytest.mark.parametrize("family", TAUGHT)
def test_tangents_have_heads_too(tmp_path, family):
    options = [*TINY_GAMES[family], "batch=16", "objective.r1={weight: 1}"]
    kept = []
    for more in ([], [LARGE]):
        plan = tiny_plan(tmp_path, 1, [*options, *more], both(0))
        num = len(build_on_meta(plan, "discriminator").layers)
        kept.append(Traces().passes(plan, "discriminator", "train with tangents", 2, 16, (0, num)).kept)
    assert 4 * 16 * TOKENS * (4 * 96 + 48) < kept[1] - kept[0] < 2 * 4 * 16 * TOKENS * (4 * 96 + 4 * 48)


@pytest.mark.slow
@pytest.mark.parametrize("family", TAUGHT)
def test_double_backward_has_heads_too(tmp_path, family):
    options = [*TINY_GAMES[family], "batch=16", "objective.r1={weight: 1, method: double_backward}"]
    kept = []
    for more in ([], [LARGE]):
        plan, traces = tiny_plan(tmp_path, 1, [*options, *more], both(0)), Traces()
        kept.append(traces.penalized(plan, "discriminator", 16).kept)
        exact = trace_discriminator(plan, traces.prepared(plan, "discriminator"), 16)
        assert kept[-1] == pytest.approx(exact.kept, rel=0.01)
    assert 4 * 16 * TOKENS * (4 * 96 + 48) < kept[1] - kept[0] < 2 * 4 * 16 * TOKENS * (4 * 96 + 4 * 48)


def predictions(tmp_path, options, num_stages, traces):
    """Of the ranks of each of D's stages."""
    plan = tiny_plan(tmp_path, 2, [*TINY_GAMES["gat"], "accumulation=2", *stages(1, num_stages), *options], both(1))
    bounds = {network: memory.stage_bounds(plan, network, traces.network(plan, network)) for network in NETWORKS}
    for stage in range(num_stages):
        places = {"generator": 0, "discriminator": stage}
        parts = {n: memory._part(traces.network(plan, n), bounds[n], places[n]) for n in NETWORKS}
        yield memory._predict_rank(plan, traces, parts, 0)


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_program_lies_where_the_last_layer_does(tmp_path, num_stages):
    """Its tensors stay; and what it needs before D trains is here more than what D does."""
    section = f"width: {FEATURES}, hidden: {HIDDEN}, resolution: 448"
    write_teacher(tmp_path / "t.pt", FEATURES, 448)
    here = [f"objective.teacher={{path: {tmp_path / 't.pt'}, {section}}}"]
    found = [list(predictions(tmp_path, more, num_stages, Traces())) for more in ([AWAY], here)]
    most = [max(p.update["D trains"].activations for p in each[-1:]) for each in found]
    for away, near in list(zip(*found, strict=True))[:-1]:
        assert (near.stays, near.peak) == (away.stays, away.peak)
    assert found[1][-1].stays - found[0][-1].stays == held(FEATURES)
    # On two replicas, or in two stages, micro-batches of 2 or of 4; and 64 x 64 tokens of 7 x 7 pixels for each image.
    n = 8 // 2 // (3 - num_stages)
    assert most[1] - most[0] > n * 4 * 3 * 448**2


@pytest.mark.slow
def test_a_survey_says_what_is_left_out(capsys):
    options = ["--gpus", "1", "--gpu-memory", "80"]
    recipe = ["batch=4", *TINY_GAMES["gat"], AWAY]
    assert main(["plan", *options, *recipe]) == 0
    assert "teacher: neither operations nor memory of its program" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--mfu", "0.4", "--peak-tflops", "100"], ["--gpus", "1", "--gpu-memory", "80"]])
def test_a_program_is_traced_once(options, tmp_path, monkeypatch):
    """For all numbers that `bigsgan plan` prints."""
    traced, calls = teaching._traced, []
    monkeypatch.setattr(teaching, "_traced", lambda recipe: calls.append(recipe) or traced(recipe))
    here = write_teacher(tmp_path / "t.pt", FEATURES)
    assert main(["plan", *options, "batch=4", *TINY_GAMES["gat"], *here]) == 0
    assert len(calls) == 1


class NeedsNumbers(torch.nn.Module):
    """Asks for a value, which tensors of the meta device do not have."""

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(len(images), 4, 8) + float(images.sum().item())
        return tokens[:, 0], tokens


def test_a_program_that_needs_numbers_is_left_out(tmp_path):
    torch.jit.script(NeedsNumbers()).save(tmp_path / "t.pt")
    teacher = f"objective.teacher={{path: {tmp_path / 't.pt'}, width: 8, hidden: 10, resolution: 16}}"
    recipe = tiny_plan(tmp_path, 1, [*TINY_GAMES["gat"], teacher], both(0)).recipe
    assert trace_program(recipe, "teacher") is None
    assert left_out(recipe, False, "teacher").endswith("are counted, as it does not run on torch's meta device")
    assert left_out(recipe, True, "teacher") == ""

"""A teacher's features: D's heads and their loss as the public code has them, what the teacher sees, bad ones.

The record has what github.com/hse1032/GAT computed in float64 with heads on its discriminator, of random weights: what
its teacher is shown, and losses and gradients for features of 4x4 and of 5x5 patches. Neither augmentation nor noise
nor a penalty was in it, and the loss's coefficient was 0.7.
"""

import io
import shutil
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.testing import assert_close

from bigsgan.adversarial.objectives import DiscriminatorObjective
from bigsgan.adversarial.terms import stateless_terms
from bigsgan.adversarial.terms.teacher import PATH, Teacher, build_teacher
from bigsgan.config import objective as sections
from bigsgan.config.data import Data
from bigsgan.config.families.gat import GATDiscriminator
from bigsgan.config.objective import Objective
from bigsgan.data import RealImages, Slice, build_dataset
from bigsgan.draws import Draws
from bigsgan.engines.zero import Pass, Root
from bigsgan.errors import UserError
from bigsgan.images.size import Size
from bigsgan.models import gat
from bigsgan.models.diff_augment import DiffAugment
from bigsgan.models.network import LayerStack, initialize
from bigsgan.monitor import Statistics
from bigsgan.training.rank_consistency import checked_frozen
from bigsgan.weights import gat as weights
from tests.archives import png, write_tar
from tests.networks import part
from tests.teachers import TinyTeacher, write_teacher
from tests.tiny import TINY_GAMES, tiny_recipe

RECORD = Path(__file__).resolve().parents[1] / "data" / "gat_teacher.safetensors"
CPU = torch.device("cpu")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]


@pytest.mark.parametrize(
    "size, width, published",
    [("S", 384, 39_212_928), ("B", 768, 104_676_864), ("L", 1024, 323_035_872), ("XL", 1152, 467_678_784)],
)
def test_published_sizes_with_heads(size, width, published):
    """Of the public classes, which count fixed positions, too."""
    config = GATDiscriminator(size=size)
    with torch.device("meta"):
        layers = gat.discriminator_layers(config, Size.of(32), 4, 1000)
        layers[-1].teacher = gat.TeacherHead(config, sections.Teacher(path="dinov2.pt"))
    assert sum(p.numel() for p in LayerStack(layers).parameters()) + 16 * 16 * width == published


@pytest.fixture(scope="module")
def record():
    return load_file(RECORD)


def discriminator(record, section):
    state = part(record, "D.")
    config = GATDiscriminator.model_validate(weights.discriminator_section(state))
    layers = gat.discriminator_layers(config, Size.of(8), 2, 3)
    layers[-1].teacher = gat.TeacherHead(config, section)
    network = LayerStack(layers)
    initialize(network, 0)
    found = network.load_state_dict(weights.discriminator_state(state), strict=False)
    assert not found.unexpected_keys
    assert not found.missing_keys
    return network.part(1, len(layers)).double()  # behind the noise


@pytest.mark.parametrize("side", [4, 5])
def test_losses_and_gradients_are_the_published_ones(record, side):
    section = Objective(loss="relativistic", teacher={"path": "dinov2.pt", "weight": 0.7, "width": 6, "hidden": 10})
    network, statistics = discriminator(record, section.teacher), Statistics(CPU)
    terms = stateless_terms(section)
    statistics.declare(*(name for term in terms for name in term.statistics))
    game = DiscriminatorObjective(terms, statistics, 0, 4)
    made = record["made"].double().transpose(0, 1).flatten(1, 2)
    batch = game.batch((record["images"].double(), record["y"]), (made, record["y"]), {})
    targets = record[f"{side}.class"].double(), record[f"{side}.patches"].double()
    (loss,) = Root(network)(batch, Pass(loss=game, targets=targets))
    assert_close(loss, record[f"{side}.loss"], rtol=1e-6, atol=0)
    means = statistics.reduce(lambda tensor: tensor)
    assert means["teacher/class"] == pytest.approx(record[f"{side}.of_class"].item(), rel=1e-5)
    assert means["teacher/patch"] == pytest.approx(record[f"{side}.of_patches"].item(), rel=1e-5)
    loss.backward()
    none = {name: torch.zeros_like(value) for name, value in part(record, "D.").items()}
    recorded = weights.discriminator_state({**none, **part(record, f"{side}.grad.")})
    expected = {name: grad for name, grad in recorded.items() if grad.any()}
    assert sum("teacher" in name for name in expected) == 6
    assert len(expected) > 15
    found = dict(network.named_parameters())
    for name, grad in expected.items():
        assert (found[name].grad - grad).norm() <= 1e-5 * grad.norm(), name


def test_a_teacher_sees_what_the_published_one_sees(record):
    """Bytes of 16x16 images at 224x224, in ImageNet's normalization; of 3 x 224 x 224 numbers 3 x 14 x 14 were kept."""
    teacher = Teacher(nn.Identity(), sections.Teacher(path="x.pt"), CPU, [], 16)
    seen = teacher.prepared(record["raw"].float() / 127.5 - 1)
    assert_close(seen[:, :, ::16, ::16], record["prepared"], rtol=1e-5, atol=1e-5)


def test_a_teacher_s_images_move_as_those_of_the_discriminator():
    """A latent pixel is 7 of its pixels; black as the middle of the colours comes in, and cutouts stay out."""
    policy = ["latent_color", "translation", "cutout", "flip"]
    teacher = Teacher(nn.Identity(), sections.Teacher(path="x.pt"), CPU, policy, 32)
    seeds, n = torch.arange(12), 12
    latents = torch.randn(n, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    moved, _ = DiffAugment(["translation", "flip"], 1)(latents, seeds, seeds)
    images = latents.repeat_interleave(7, dim=2).repeat_interleave(7, dim=3)
    mean, std = teacher._mean, teacher._std
    found = teacher.prepared(images, seeds)
    within = moved != 0  # where nothing came in
    expected = ((moved + 1) / 2 - mean) / std
    assert_close(found[:, :, 3::7, 3::7], torch.where(within, expected, 0.0), rtol=1e-5, atol=1e-5)
    assert not torch.equal(moved, latents)
    assert len({tuple(row.tolist()) for row in within.flatten(1)}) > 6


@pytest.mark.parametrize("suffix", [".pt", ".pt2"])
def test_programs_of_both_kinds(tmp_path, suffix):
    """Give what the module gives, in a recipe's type and of other numbers of images than they were traced with."""
    override = write_teacher(tmp_path / f"t{suffix}", width=5)
    teacher = build_teacher(tiny_recipe(tmp_path, *TINY_GAMES["gat"], *override), CPU)
    images = torch.randn(4, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = TinyTeacher(5)(images), teacher.features(images)
    assert_close(found[0], expected["x_norm_clstoken"])
    assert_close(found[1], expected["x_norm_patchtokens"])
    assert found[1].shape == (4, 16, 5)


BAD = {
    "missing": (None, "cannot be read: No such file or directory"),
    "not a program": (b"no program", "must be a TorchScript file"),
    "fails": (nn.Linear(3, 3), r"fails at images \(2, 3, 28, 28\): "),
    "one tensor": (nn.Conv2d(3, 6, 7, stride=7), "must make two tensors, in a tuple or named x_norm_clstoken and"),
}


@pytest.mark.parametrize("name", BAD)
def test_programs_that_do_not_fit(tmp_path, name):
    content, message = BAD[name]
    path, override = tmp_path / "bad.pt", write_teacher(tmp_path / "good.pt")
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.jit.save(torch.jit.script(content), str(path))
    recipe = tiny_recipe(tmp_path, *TINY_GAMES["gat"], *override, f"objective.teacher.path={path}")
    with pytest.raises(UserError, match=rf"{PATH}: {message}|{PATH}: '.*bad\.pt' {message}"):
        build_teacher(recipe, CPU)


@pytest.mark.parametrize("family", ["gat", "cat"])
def test_a_teacher_of_another_width_is_refused(tmp_path, family):
    override = write_teacher(tmp_path / "t.pt", width=6)
    recipe = tiny_recipe(tmp_path, *TINY_GAMES[family], *override, "objective.teacher.width=8")
    with pytest.raises(UserError, match=r"must make tokens \(2, 8\) and \(2, P, 8\) .*it makes \(2, 6\) and"):
        build_teacher(recipe, CPU)


def test_networks_without_tokens_have_no_teacher(tmp_path):
    problem = r"objective\.teacher: must be null with discriminator\.family=biggan"
    with pytest.raises(UserError, match=f"{problem}.*; remove it, or set discriminator.family to gat or cat"):
        tiny_recipe(tmp_path, "objective.teacher={path: x.pt}")


def test_a_run_resumes_with_its_own_teacher_alone(tmp_path):
    """Wherever that is."""
    layouts = []
    for name, width in (("a", 6), ("moved", 6), ("b", 7)):
        (tmp_path / name).mkdir()
        recipe = tiny_recipe(tmp_path, *TINY_GAMES["gat"], *write_teacher(tmp_path / name / "t.pt", width))
        if name == "moved":
            shutil.copy(tmp_path / "a" / "t.pt", tmp_path / name / "t.pt")
        layouts.append(checked_frozen(recipe, layouts[0] if name == "moved" else {}))
    assert layouts[0] == layouts[1] != layouts[2]
    message = r"objective\.teacher\.path: .* is another file than the one that the run began with"
    with pytest.raises(UserError, match=message):
        checked_frozen(recipe, layouts[0])


def shown(root, *, horizontal_flip=False, **more):
    data = Data.model_validate({"num_workers": 0, "horizontal_flip": horizontal_flip, **more, "root": root})
    reals = RealImages(build_dataset(data), data, Draws(0), Slice(6, 2, 0, 1), CPU, shows=True)
    with closing(reals):
        return reals.next_phase()


def write_shards(root, num, without=()):
    """Latents of the grey level of their images, which stand beside them."""
    members = {}
    for i in range(num):
        level, latent = 20 * i + 10, io.BytesIO()
        np.save(latent, np.full((4, 4, 4), level / 127.5 - 1, dtype=np.float32))
        members |= {f"{i:03}.npy": latent.getvalue(), f"{i:03}.cls": b"0"}
        if i not in without:
            members[f"{i:03}.png"] = png(np.full((8, 8, 3), level, dtype=np.uint8))
    return write_tar(root / "shard-000000.tar", members).parent


CODEC = {"kind": "torchscript", "path": "x.pt", "factor": 2, "channels": 4}
LATENTS = {"kind": "latents", "resolution": 8, "image_channels": 3, "num_classes": 1, "codec": CODEC}


@pytest.mark.parametrize("workers", [0, 1])
def test_images_come_beside_their_latents(tmp_path, workers):
    root, codec = write_shards(tmp_path / "shards", 9), tmp_path / "d.pt"
    torch.jit.save(torch.jit.script(nn.Identity()), str(codec))
    section = {**LATENTS, "num_workers": workers, "codec": {**LATENTS["codec"], "path": str(codec)}}
    for batch in shown(str(root), **section):
        assert batch.pixels.shape == (3, 3, 8, 8)
        assert_close(batch.pixels[:, 0, 0, 0], batch.images[:, 0, 0, 0])
        assert len(set(batch.images[:, 0, 0, 0].tolist())) == 3


def test_latents_without_images_are_refused(tmp_path):
    codec = tmp_path / "d.pt"
    torch.jit.save(torch.jit.script(nn.Identity()), str(codec))
    section = {**LATENTS, "codec": {**LATENTS["codec"], "path": str(codec)}}
    root = write_shards(tmp_path / "shards", 9, without=[4])
    with pytest.raises(UserError, match=r"data\.root: .* has latents without their images .*004.npy\); encode them"):
        shown(str(root), **section)


def test_images_are_mirrored_with_what_networks_see(tmp_path):
    for batch in shown(None, kind="digits", resolution=16, codec={"kind": "dct", "block": 4}, horizontal_flip=True):
        means = batch.images[:, 0] / 4  # the first coefficient of each block
        assert_close(means, batch.pixels[:, 0].unfold(1, 4, 4).unfold(2, 4, 4).mean(dim=(3, 4)), rtol=1e-4, atol=1e-5)
    plain = shown(None, kind="digits", resolution=16)[0]
    mirrored = shown(None, kind="digits", resolution=16, horizontal_flip=True)[0]
    assert torch.equal(mirrored.pixels, mirrored.images)
    assert not torch.equal(plain.pixels, mirrored.pixels)

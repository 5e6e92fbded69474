"""Command lines, recipes, DeepSpeed files and run directories that nobody would write by intent.

Whatever is given: status 0, or 2 with one message; no traceback; nothing changed but what the command makes; and an end
within seconds. Hypothesis draws the same cases in every run of CI, and others in every nightly one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import stat
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bigsgan import cli
from bigsgan.checkpoint.tags import sealed
from bigsgan.commands import choosing
from bigsgan.config.deepspeed_keys import FILE
from bigsgan.config.run_directory import write_recipe
from bigsgan.models.build import build_network
from bigsgan.models.network import initialize
from tests import REPOSITORY
from tests.bad_input import RECIPE, WentOnError
from tests.single_process import save, whole
from tests.tiny import tiny_recipe

SECONDS = 20
FEW = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    deadline=timedelta(seconds=SECONDS),
    suppress_health_check=list(HealthCheck),
)
MANY = settings(FEW, max_examples=3_000, derandomize=False, print_blob=True)
DEPTHS = [FEW, pytest.param(MANY, marks=pytest.mark.nightly)]
RUN_DEPTHS = [
    settings(FEW, max_examples=40),
    pytest.param(settings(MANY, max_examples=1_000), marks=pytest.mark.nightly),
]
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty working directory within one that is watched."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def light(place, monkeypatch) -> Path:
    """Commands end where they would import what computes."""

    real = importlib.import_module

    def go_on(name: str, package: str | None = None) -> Any:
        if name.startswith("bigsgan.") and name != "bigsgan.commands.choosing":
            raise WentOnError(name)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", go_on)
    Path("recipe.yaml").write_text(RECIPE)
    Path("directory").mkdir()
    os.mkfifo("pipe")
    os.symlink("loop", "loop")
    return place


def tree(root: Path) -> dict[str, Any]:
    """All that lies below a directory: kinds, and the content of files."""
    found: dict[str, Any] = {}
    for path in root.rglob("*"):
        mode = path.lstat().st_mode
        found[str(path)] = path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
    return found


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """End the test where a command does not."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"no end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(arguments: list[str], root: Path) -> int:
    """Run a command; check all that is said at the top of this file, and return its status."""
    before, out, err = tree(root), io.StringIO(), io.StringIO()
    with ending(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main(arguments)
        except WentOnError:
            status = 0
        except SystemExit as ended:  # of --help
            status = int(str(ended.code))
    assert status in (0, 2), arguments
    if status == 2:
        lines = [line for line in err.getvalue().splitlines() if not line.startswith("skipping ")]
        assert len(lines) == 1, err.getvalue()
        assert lines[0].startswith("bigsgan: "), lines
        assert "; " in lines[0], lines
        assert len(lines[0]) < 2_600, lines
        assert lines[0].isprintable(), lines
        assert out.getvalue() == ""
        assert tree(root) == before, arguments
    return status


NUMBERS = st.one_of(
    st.integers(-(2**64), 2**64),
    st.sampled_from([0, 1, 2, 3, 8, 16, 64, 2**16, 2**31, 2**62, 2**63 - 1, 2**63, 10**400]),
    st.floats(),
)
# Without the zero byte, which no argument of a process can hold.
TEXT = st.text(st.characters(min_codepoint=1, max_codepoint=0x10FFFF), max_size=12)
PLACES = ["recipe.yaml", "missing", "directory", "pipe", "loop", "~", "~nobody", "/dev/null", "/dev/zero", "/", ""]
PATHS = st.sampled_from([*PLACES, "x" * 300, "x" * 5000])
ODD = st.sampled_from(["true", "null", "a=b", "--", "-", "=", "@x", "9" * 5000])
WORDS = st.one_of(TEXT, PATHS, NUMBERS.map(str), ODD)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXT, PATHS),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(TEXT, below, max_size=3),
    max_leaves=6,
)


def options_of(parser: Any) -> list[tuple[list[str], list[str]]]:
    """Each command's words, and its options."""
    groups = [action for action in parser._actions if hasattr(action, "choices") and isinstance(action.choices, dict)]
    if not groups:
        return [([], [flag for action in parser._actions for flag in action.option_strings])]
    return [([name, *words], flags) for name, below in groups[0].choices.items() for words, flags in options_of(below)]


COMMANDS = options_of(choosing._parser())


@st.composite
def command_lines(draw: Callable[..., Any]) -> list[str]:
    words, flags = draw(st.sampled_from(COMMANDS))
    line = list(words)
    if draw(st.booleans()):  # what is required, so that more is reached
        required = {"sample": "--run run --out x.png", "export": "--run run --out x", "evaluate": "--run run"}
        required |= {"import": "--from r3gan --weights x --out y", "data": "directory y --resolution 8 --format zip"}
        line += required.get(words[0], "").split()
    flag = st.sampled_from(flags)
    for _ in range(draw(st.integers(0, 4))):
        line += draw(st.one_of(st.tuples(flag, WORDS), st.tuples(flag), st.tuples(WORDS)))
    return line


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_command_lines(light, depth):
    statuses: set[int] = set()

    @depth
    @given(command_lines())
    def check(line: list[str]) -> None:
        statuses.add(run(line, light))

    check()
    assert statuses == {0, 2}


def keys_of(section: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key, value in section.items():
        found += [prefix + key, *(keys_of(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return found


def recipe_keys() -> list[str]:
    """Those of all recipes of the repository."""
    paths = sorted((REPOSITORY / "launch" / "recipes").glob("*.yaml"))
    return sorted({key for path in paths for key in keys_of(yaml.safe_load(path.read_text()))})


KEYS = st.deferred(lambda: st.sampled_from(recipe_keys()) | TEXT)
CHANGES = st.tuples(KEYS, VALUES.map(json.dumps) | WORDS).map("=".join)
GOOD = st.sampled_from(["seed=3", "batch=8", "out=new/run", "ema={half_life_nimg: 5}", "generator.channels=8"])


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_overrides(light, depth):
    statuses: set[int] = set()

    @depth
    @given(st.lists(CHANGES | GOOD, min_size=1, max_size=3))
    def check(overrides: list[str]) -> None:
        statuses.add(run(["train", "--config", "recipe.yaml", "--dry-run", *overrides], light))

    check()
    assert statuses == {0, 2}


PIECES = st.sampled_from(
    ["a", "batch", "data", ": ", "\n", "  ", "- ", "[", "]", "{", "}", ",", "&x ", "*x", "!!map ", "!!int ", "!!float ",
     "!!bool ", "!!str ", "!!seq ", "!!null ", "!!set ", "!!binary ", "!!merge ", "<<", "? ", "| ", "> ", "'", '"', "#",
     "%YAML 1.1", "---", "...", "\t", "~", "1", "1e5", ".nan", "\x00", "\x85", "\ufeff", "\u2028", "0o7", "@", "`"]
)  # fmt: skip


TAGS = st.sampled_from(["", "", "!!map", "!!seq", "!!str", "!!int", "!!float", "!!bool", "!!null", "!!merge", "!x"])
LINES = st.tuples(KEYS, TAGS, st.sampled_from(["", "", "&x", "&y"]), VALUES.map(json.dumps) | st.just("*x")).map(
    lambda parts: f"{parts[0].rpartition('.')[2]}: {' '.join(parts[1:])}\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_recipe_files(light, depth):
    @depth
    @given(
        st.lists(PIECES | TEXT, max_size=15).map("".join) | st.lists(LINES, max_size=5).map("".join),
        st.sampled_from(["", RECIPE]),
    )
    def check(text: str, before: str) -> None:
        Path("recipe.yaml").write_bytes((before + text).encode("utf-8", "surrogatepass"))
        run(["train", "--config", "recipe.yaml", "--dry-run"], light)

    check()


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
def test_deepspeed_files(light, depth):
    inner = st.dictionaries(st.sampled_from(["stage", "enabled", "device", "offload_optimizer"]) | TEXT, VALUES)
    content = st.dictionaries(st.sampled_from(sorted(FILE.keys)) | TEXT, inner | VALUES, max_size=4).map(json.dumps)
    statuses: set[int] = set()

    @depth
    @given(content | st.text(st.sampled_from('{}[]",:0e-tnf'), max_size=9) | VALUES.map(json.dumps))
    def check(text: str) -> None:
        Path("ds.json").write_text(text)
        statuses.add(
            run(["train", "--dry-run", "--config", "recipe.yaml", "engines.generator.ds_config=ds.json"], light)
        )

    check()
    assert statuses == {0, 2}


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> Path:
    """A run directory with one checkpoint."""
    directory = tmp_path_factory.mktemp("good")
    recipe = tiny_recipe(directory)
    network = initialized(build_network(recipe, "generator"))
    write_recipe(recipe, directory / "run", {})
    assert save(directory / "run/checkpoints", 64, {"average": whole(network)}, recipe=recipe.model_dump())
    return directory / "run"


def initialized(network: Any) -> Any:
    initialize(network, seed=0)
    return network


FILES = ["config.yaml", "checkpoints/000000000064/manifest.json", "checkpoints/000000000064/rank00000.safetensors"]


@st.composite
def damages(draw: Callable[..., Any]) -> Callable[[Path], None]:
    """Something that is done to a run directory."""
    path, kind = draw(st.sampled_from(FILES)), draw(st.sampled_from(["bytes", "values", "values", "kind"]))
    at, inserted, left_out = draw(st.integers(0, 3_000)), draw(st.binary(max_size=9)), draw(st.integers(0, 9))
    key, value = draw(st.integers(0, 500)), draw(VALUES)
    other = draw(st.sampled_from(["pipe", "directory", "link", "nothing"]))

    def change_value(run: Path) -> None:
        is_recipe = path == FILES[0]
        file = run / (path if is_recipe else FILES[1])
        content = yaml.safe_load(file.read_text()) if is_recipe else json.loads(file.read_text())
        keys = list(content) if key % 2 else keys_of(content)
        *above, last = keys[key % len(keys)].split(".")
        section = content
        for name in above:
            if not isinstance(section, dict) or name not in section:  # a key with a point in it
                return
            section = section[name]
        if isinstance(section, dict):
            section[last] = value
        file.write_text(json.dumps(content if is_recipe else sealed(content)))

    def change_bytes(run: Path) -> None:
        content = (run / path).read_bytes()
        (run / path).write_bytes(content[:at] + inserted + content[at + left_out :])

    def change_kind(run: Path) -> None:
        (run / path).unlink()
        if other == "pipe":
            os.mkfifo(run / path)
        elif other == "directory":
            (run / path).mkdir()
        elif other == "link":
            os.symlink(path.rpartition("/")[2], run / path)

    def damage(run: Path) -> None:
        if all((run / file).is_file() for file in (path, FILES[1])):  # to open a pipe would wait for a writer
            {"bytes": change_bytes, "values": change_value, "kind": change_kind}[kind](run)

    return damage


@pytest.mark.slow
@pytest.mark.parametrize("depth", RUN_DEPTHS)
def test_run_directories(place, good_run, depth):
    statuses: set[int] = set()

    @depth
    @given(st.lists(damages(), max_size=2), st.sampled_from(["export --no-standing", "sample --num 2"]))
    def check(done: list[Callable[[Path], None]], command: str) -> None:
        shutil.rmtree("run", ignore_errors=True)
        Path("out.png").unlink(missing_ok=True)
        shutil.copytree(good_run, "run")
        for damage in done:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # two that do not go together
                damage(Path("run"))
        statuses.add(run([*command.split(), "--run", "run", "--out", "out.png"], place))

    check()
    assert statuses == {0, 2}

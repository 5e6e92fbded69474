"""The pages of the repository: links lead somewhere, and generated tables are what the code says."""

import importlib.util
import re
from functools import cache
from pathlib import Path

import pytest

from bigsgan.config.sections import EMA
from tests.unit.touched import VERSION

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


@cache
def anchors(page):
    """What its headings are called in a link: small letters and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(scope="module")
def generate():
    """docs/generate.py, which belongs to no package."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_somewhere():
    for page in PAGES:
        for path, anchor in LINK.findall(page.read_text()):
            if "://" in path:
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{page}: {path}"
            assert not anchor or anchor in anchors(target), f"{page}: {path}#{anchor}"


def test_blocks_of_code_are_closed():
    for page in PAGES:
        fences = re.findall(r"^ *```(.*)", page.read_text(), re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert not any(fences[1::2]), f"{page}: a closing fence has no name of a language"


def test_links_are_found():
    assert len(PAGES) > 25
    recipes = (ROOT / "docs" / "reference" / "recipes.md").read_text()
    assert ("../how-to/speed-up.md", "reuse-the-fakes") in LINK.findall(recipes)


def test_the_site_and_its_first_page_have_every_page_in_one_order():
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    section = (ROOT / "docs" / "index.md").read_text().partition("## All pages\n")[2]
    assert re.findall(r"\]\(([\w/-]+\.md)\)", section) == [page for page in listed if page != "index.md"]


@pytest.mark.parametrize(
    "page, num_tables", [("reference/recipes.md", 9), ("reference/deepspeed-files.md", 9), ("reference/commands.md", 9)]
)
def test_tables_are_generated(page, num_tables, generate):
    """Where this fails, run `python docs/generate.py`."""
    text = (generate.DOCS / page).read_text()
    assert text.count("<!-- end -->") >= num_tables
    assert page in generate.PAGES
    assert generate.refreshed(text) == text


def test_tables_say_what_the_schema_says(generate):
    assert "| `batch` | integer 1 to 1,048,576 | required | Images in a batch," in generate.keys_table("recipe")
    assert "| `betas` | list of numbers >= 0, < 1 | `[0.0, 0.999]` |" in generate.keys_table("optimizer")
    assert "| `<network>.widths` | list of sizes | required |" in generate.keys_table("family r3gan")
    assert "| `r1.form` | `exact`, `finite_difference` | `exact` |" in generate.keys_table("objective")
    assert "`<network>.depth`, `<network>.width`, " in generate.keys_table("family cat")
    assert "| as of [`gat`](#family-gat) |" in generate.keys_table("family cat")
    assert "bigsgan export --run RUN --out OUT\n" in generate.options_table("bigsgan export")
    assert "`--config CONFIG`" in generate.options_table("bigsgan train")
    assert "| options of a recipe | [as of `train`](#bigsgan-train) |" in generate.options_table("bigsgan plan")
    assert (
        "| `block_size`, `queue_depth`, `intra_op_parallelism` | a whole number of at least 1 |"
        in generate.deepspeed_table("aio")
    )


def test_the_page_on_deepspeed_is_of_the_version_that_is_touched():
    text = (ROOT / "docs" / "explanation" / "deepspeed.md").read_text()
    assert f"It describes **DeepSpeed {VERSION}**" in text


def test_a_missing_table_is_noticed(generate):
    text = (generate.DOCS / "reference" / "recipes.md").read_text()
    with pytest.raises(KeyError, match="no table of keys for ema"):
        generate.refreshed(text.replace("<!-- keys: ema -->", ""))


def test_a_key_without_a_docstring_is_noticed(generate, monkeypatch):
    monkeypatch.setattr(generate, "field_docs", lambda section: {})
    with pytest.raises(KeyError, match=r"EMA\.half_life_nimg has no docstring"):
        generate.meaning(EMA, "half_life_nimg")

"""Links between the pages of the repository lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")


def anchors(page):
    """What its headings are called in a link: small letters and hyphens."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_lead_somewhere(page):
    links = [(path, anchor) for path, anchor in LINK.findall(page.read_text()) if "://" not in path]
    for path, anchor in links:
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target), f"{path}#{anchor}"


def test_links_are_found():
    assert len(PAGES) > 10
    assert ("performance.md", "one-graph-for-both-updates") in LINK.findall((ROOT / "docs" / "recipes.md").read_text())

"""Check the documents: links, the map, and the length of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_README_WORDS = 900
PAGE_IN_CODE = re.compile(r"docs/[\w/]+\.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(text: str) -> set[str]:
    """The anchors that a renderer makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(document: Path):
    missing = []
    for link in LINK.findall(document.read_text("utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8"))):
            missing.append(link)
    assert not missing


def test_pages_that_code_names_exist():
    files = [path for folder in ("paragan", "benchmarks", "examples") for path in (ROOT / folder).rglob("*.py")]
    named = {page for path in files for page in PAGE_IN_CODE.findall(path.read_text("utf-8"))}
    assert "docs/lost_ranks.md" in named
    assert [page for page in sorted(named) if not (ROOT / page).is_file()] == []


def test_the_map_links_every_page():
    linked = set()
    for page in (ROOT / "docs" / "README.md", ROOT / "docs" / "measurements" / "README.md"):
        for link in LINK.findall(page.read_text("utf-8")):
            linked.add((page.parent / link.partition("#")[0]).resolve())
    pages = {path for path in (ROOT / "docs").rglob("*.md") if path.name != "README.md"}
    assert pages <= linked, sorted(path.name for path in pages - linked)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").split()) <= MAX_README_WORDS

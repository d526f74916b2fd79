"""In the repository's Markdown pages, links lead to existing targets, lines are short, and the
index is complete.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = ("benchmarks", "cluster", "configs", "docs", "emulator", "examples", "models", "tests")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
MENTION = re.compile(r"(?<![\w/.-])docs/[\w/-]+\.(?:md|png)")
TEST = re.compile(r"`(\w[\w/]*\.py)`:\s+`(test_\w+)`")
# Files whose comments and docstrings refer to pages of docs/.
NAMING = ("*.md", "*.py", "*.h", "*.cpp", "*.sh", "*.yaml", "*.toml")
MAX_COLUMNS = 120


def links(page: Path) -> set[str]:
    """Return the relative links of a page, without their anchors. Code blocks are left out."""
    targets = LINK.findall(FENCED.sub("", page.read_text(encoding="utf-8")))
    return {target.partition("#")[0] for target in targets if "://" not in target} - {""}


def test_every_relative_link_resolves() -> None:
    dead = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in PAGES
        for link in sorted(links(page))
        if not (page.parent / link).exists()
    ]

    assert not dead


def test_every_page_that_is_named_in_the_tree_exists() -> None:
    sources = [
        path
        for name in (*FOLDERS, "dist_aclgraph", "tools")
        for kind in NAMING
        for path in (ROOT / name).rglob(kind)
    ]
    missing = {
        f"{path.relative_to(ROOT)}: {mention}"
        for path in [*ROOT.glob("*.md"), *sources]
        for mention in MENTION.findall(path.read_text(encoding="utf-8"))
        # Names that begin with docs/zh/ are pages of CANN's documentation.
        if not mention.startswith("docs/zh/") and not (ROOT / mention).exists()
    }

    assert not missing


def test_every_test_that_the_page_of_tests_names_exists() -> None:
    page = (ROOT / "docs" / "develop" / "tests.md").read_text(encoding="utf-8")
    named = TEST.findall(page)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if f"\ndef {test}(" not in (ROOT / "tests" / file).read_text(encoding="utf-8")
    ]

    assert len(named) > 30 and not missing


def test_the_index_has_every_page_of_the_documentation() -> None:
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / link).resolve() for link in links(index)}
    pages = set((ROOT / "docs").rglob("*.md"))

    assert pages - linked == {index}


def test_no_line_of_a_page_is_longer_than_120_characters() -> None:
    long = [
        f"{page.relative_to(ROOT)}:{number}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > MAX_COLUMNS
    ]

    assert not long

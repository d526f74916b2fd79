from __future__ import annotations

from pathlib import Path

from dist_aclgraph.cli.keys import render_keys
from dist_aclgraph.config import Config, Section

PAGE = Path(__file__).parents[3] / "docs" / "use" / "configuration.md"


def count_keys(section: type[Section]) -> int:
    kinds = [field.annotation for field in section.model_fields.values()]
    return sum(
        count_keys(kind) if isinstance(kind, type) and issubclass(kind, Section) else 1
        for kind in kinds
    )


def test_the_page_in_the_documentation_is_the_one_that_the_command_prints() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_keys(), (
        "run: dist-aclgraph keys > docs/use/configuration.md"
    )


def test_the_page_has_an_item_with_a_meaning_for_every_key() -> None:
    items = render_keys().split("\n- **`")[1:]

    assert len(items) == count_keys(Config)
    meanings = [item.partition("):")[2].split("\n\n")[0].strip() for item in items]
    assert all(len(meaning) > 8 for meaning in meanings)


def test_no_line_of_an_item_reads_as_a_list_or_a_quotation_in_markdown() -> None:
    lines = render_keys().splitlines()

    assert not [line for line in lines if line.startswith("  ") and line.split()[0] in "-+*>#"]

"""The findings of ``doctor`` about the graphs of the last start."""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.cli.doctor.examine import examine
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.last_start import keep_report


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def of_graphs() -> list[Finding]:
    return [finding for finding in examine() if finding.name.startswith("graphs of")]


def test_doctor_warns_of_slow_operators_in_the_graphs_of_the_last_start() -> None:
    keep_report("m", {"graph_warnings": ["an older one"]})
    keep_report("m", {"graph_warnings": ["the graph full decode 4 holds aclnnCumsum (2)"]})

    (finding,) = of_graphs()

    assert finding.name.startswith("graphs of m, started 20")
    assert (finding.is_ok, finding.mark) == (True, "warn")
    assert finding.found == "the graph full decode 4 holds aclnnCumsum (2)"
    assert "steps are slower" in finding.remedy


def test_doctor_finds_nothing_slow_in_graphs_without_warnings() -> None:
    keep_report("m", {"graph_warnings": []})

    (finding,) = of_graphs()

    assert finding.mark == "ok  "


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_doctor_is_silent_where_no_start_is_known(cache: Path, text: str | None) -> None:
    if text is not None:
        (cache / "dist-aclgraph").mkdir()
        (cache / "dist-aclgraph" / "last-start.json").write_text(text)

    assert of_graphs() == []


def test_a_report_that_cannot_be_kept_stops_nobody(cache: Path) -> None:
    (cache / "dist-aclgraph").write_text("a file")

    keep_report("m", {})

"""``doctor`` reads the output of the driver's hccn_tool. In these tests, a shell script replaces
hccn_tool.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dist_aclgraph.cli.doctor import rdma_links
from dist_aclgraph.cli.doctor.cluster import ping_findings, rdma_targets
from dist_aclgraph.cli.doctor.rdma_links import find_tool, link_finding, ping_failures

NPUS = ["davinci0", "davinci1"]


def make_tool(folder: Path, script: str) -> str:
    tool = folder / "hccn_tool"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    return str(tool)


def test_links_that_are_up_are_ok(tmp_path: Path) -> None:
    tool = make_tool(tmp_path, 'test "$1 $3 $4" = "-i -link -g" && echo "link status: UP"')

    finding = link_finding(NPUS, tool)

    assert (finding.mark, finding.found) == ("ok  ", "2 are UP")


@pytest.mark.parametrize(
    ("script", "state"),
    [
        ('echo "link status: DOWN"', "DOWN"),
        ('echo "cmd failed, ret 2" >&2', "cmd failed, ret 2"),
        ("true", "no output"),
    ],
)
def test_a_link_that_is_not_up_is_named(tmp_path: Path, script: str, state: str) -> None:
    tool = make_tool(tmp_path, f'test $2 = 0 && echo "link status: UP" || {script}')

    finding = link_finding(NPUS, tool)

    assert (finding.mark, finding.found) == ("warn", f"davinci1 {state}")
    assert "-net_health -g" in finding.remedy


def test_a_tool_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rdma_links, "ANSWER_S", 1.0)

    finding = link_finding(NPUS[:1], make_tool(tmp_path, "exec sleep 60"))

    assert finding.found == "davinci0 no answer within 1 s"


def test_a_host_without_the_tool_is_a_warning(tmp_path: Path) -> None:
    assert find_tool(tmp_path / "none") is None

    finding = link_finding(NPUS, None)

    assert (finding.mark, finding.found) == ("warn", "there is no hccn_tool to ask")


PINGS = """
case "$6" in
  10.0.0.2) echo "3 packets transmitted, 3 received, 0.00% packet loss";;
  10.0.0.3) echo "3 packets transmitted, 0 received, 100.00% packet loss";;
  *) echo "Cmd execution failed"; exit 1;;
esac
"""


def test_addresses_that_do_not_answer_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tool(tmp_path, PINGS)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    assert ping_failures(["10.0.0.2", "10.0.0.3", "10.0.0.4"]) == {
        "10.0.0.3": "no packet came back",
        "10.0.0.4": "Cmd execution failed",
    }


def test_each_node_pings_the_next_two() -> None:
    first_npus = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3", "d": "10.0.0.4"}

    assert rdma_targets("a", first_npus) == ["10.0.0.2", "10.0.0.3"]
    assert rdma_targets("d", first_npus) == ["10.0.0.1", "10.0.0.2"]
    assert rdma_targets("head", first_npus) == []
    assert rdma_targets("a", {"a": "10.0.0.1"}) == []


def test_the_findings_about_pings() -> None:
    first_npus = {"a": "10.0.0.1", "b": "10.0.0.2"}

    assert ping_findings({}, {"a": "10.0.0.1"}) == []
    [fine] = ping_findings({"a": {}, "b": {}}, first_npus)
    [wrong] = ping_findings({"a": {"10.0.0.2": "no packet came back"}, "b": {}}, first_npus)

    assert fine.mark == "ok  "
    assert (wrong.name, wrong.mark) == ("RDMA from a", "FIX ")
    assert wrong.found == "10.0.0.2 does not answer: no packet came back"

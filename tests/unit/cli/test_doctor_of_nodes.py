"""The findings of ``doctor --cluster``: for nodes that fit together, and for nodes with a fault."""

from __future__ import annotations

import re
import socket
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dist_aclgraph.actors.cluster.node_probes import NodeProbe, OpenPorts
from dist_aclgraph.cli.doctor.cluster import (
    MAX_PORTS,
    declared_findings,
    node_findings,
    port_findings,
    ports_to_reach,
    ports_to_try,
    rdma_findings,
    reach_findings,
    size_findings,
    version_findings,
)
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.doctor.node_facts import NodeFacts, node_facts
from dist_aclgraph.cli.main import cli
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.version import hash_sources
from tests.deployments import make_config

HEAD = NodeFacts({"python": "3.12.3", "dist_aclgraph": "0.1.0 with sources aa"})
NPU_NODE = NodeFacts(
    {**HEAD.versions, "CANN": "9.1.0", "driver": "25.5.0"},
    npus=("davinci0", "davinci1"),
    rdma_addresses={"davinci0": "10.1.0.1", "davinci1": "10.1.0.2"},
    sizes={"cores": "192", "memory": "1024 GiB"},
)
OTHER = replace(NPU_NODE, rdma_addresses={"davinci0": "10.1.0.3", "davinci1": "10.1.0.4"})
FACTS = {"h": HEAD, "a": NPU_NODE, "b": OTHER}


def only(findings: list[Finding]) -> Finding:
    [finding] = [each for each in findings if each.mark != "ok  "]
    return finding


def with_versions(facts: NodeFacts, **versions: str) -> NodeFacts:
    return replace(facts, versions={**facts.versions, **versions})


def test_nodes_that_fit_together_are_ok() -> None:
    findings = [
        *node_findings(FACTS),
        *declared_findings(FACTS, {"h": 0, "a": 2, "b": 2}),
        *version_findings(FACTS),
        *size_findings(FACTS),
        *rdma_findings(FACTS),
        *reach_findings({"h": {}, "a": {}, "b": {}}),
    ]

    assert {finding.mark for finding in findings} == {"ok  "}
    assert findings[-1].found == "each of 3 nodes reaches all others by TCP"
    found = {finding.name: finding.found for finding in findings}
    assert found["python"] == "3.12.3 on all of 3 nodes"
    assert found["CANN"] == "9.1.0 on all of 2 nodes"  # a head without NPUs needs no CANN
    assert found["RDMA addresses"] == "4 NPUs, all different"


@pytest.mark.parametrize("name", ["python", "dist_aclgraph", "CANN", "driver"])
def test_versions_that_differ_are_named_with_their_nodes(name: str) -> None:
    finding = only(version_findings(FACTS | {"b": with_versions(OTHER, **{name: "7"})}))

    assert (finding.name, finding.mark) == (name, "FIX ")
    assert finding.found.endswith("a; 7 on b")


def test_sizes_that_differ_are_a_warning() -> None:
    smaller = replace(OTHER, sizes={"cores": "96", "memory": "1024 GiB"})

    finding = only(size_findings(FACTS | {"b": smaller}))

    assert (finding.mark, finding.name) == ("warn", "cores")
    assert finding.found == "192 on a; 96 on b"


def test_an_address_of_two_npus_is_found() -> None:
    twin = replace(OTHER, rdma_addresses={"davinci0": "10.1.0.2", "davinci1": "10.1.0.4"})

    finding = only(rdma_findings(FACTS | {"b": twin}))

    assert finding.found == "davinci1 of a, davinci0 of b have 10.1.0.2"


def test_npus_that_ray_does_not_count_are_found() -> None:
    finding = only(declared_findings(FACTS, {"h": 0, "a": 2, "b": 0}))

    assert (finding.name, finding.found) == ("NPUs of b", "Ray counts 0, there are 2")
    assert "--resources='{\"NPU\": 2}'" in finding.remedy


def test_the_same_fault_on_several_nodes_is_one_line() -> None:
    fault = Finding("CANN libraries", False, "libhccl.so: not found", "source it")
    ok = Finding("python", True, "3.12.3")
    facts = {name: replace(each, findings=(fault, ok)) for name, each in FACTS.items()}

    finding = only(node_findings(facts))

    assert (finding.name, finding.remedy) == ("CANN libraries on h, a, b", "source it")


def test_a_port_in_use_is_a_warning_while_a_group_finds_enough() -> None:
    config = make_config({"model": "m", "cluster": {"ports": "20000-20004"}})
    opened = {
        "a": OpenPorts((20000, 20001, 20002, 20003, 20004), ()),
        "b": OpenPorts((20000, 20001, 20002, 20004), (20003,)),
        "c": OpenPorts((20000, 20001, 20004), (20002, 20003)),
    }

    findings = port_findings(opened, config)

    assert [finding.mark for finding in findings] == ["ok  ", "warn", "FIX "]
    assert findings[1].found == "4 free, in use: 20003"
    assert port_findings(opened, make_config({"model": "m"})) == []
    prefill = make_config(
        {
            "model": "m",
            "cluster": {"ports": "20000-20004"},
            "kv": {"host_gib": 1},
            "parallel": {"dp": 2, "prefill_groups": 1},
        }
    )
    assert [finding.mark for finding in port_findings(opened, prefill)] == ["ok  ", "FIX ", "FIX "]


def test_a_host_that_another_does_not_reach_is_found() -> None:
    failures = {"a": {("10.0.0.2", 20000): "timed out", ("10.0.0.2", 20004): "timed out"}, "b": {}}

    finding = only(reach_findings(failures))

    assert finding.name == "links from a"
    assert finding.found == "10.0.0.2 is not reached at 20000, 20004: timed out"


def test_both_ends_of_a_long_range_are_tried_and_not_all_of_it() -> None:
    config = make_config({"model": "m", "cluster": {"ports": "20000-29999"}})

    ports = ports_to_try(config)

    assert (ports[0], ports[-1]) == (20000, 29999)
    assert 2 < len(ports) <= MAX_PORTS + 1
    assert ports_to_reach(OpenPorts(tuple(ports), ())) == [20000, ports[len(ports) // 2], 29999]
    assert ports_to_try(make_config({"model": "m"})) == [0]
    assert ports_to_reach(OpenPorts((), (20000,))) == []


def test_a_probe_listens_and_says_what_it_does_not_reach() -> None:
    one, other = NodeProbe(), NodeProbe()

    opened = one.listen("127.0.0.1", [0])
    [port] = opened.listening

    assert other.listen("127.0.0.1", [port]) == OpenPorts((), (port,))
    assert other.unreachable([("127.0.0.1", port)]) == {}
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # a bound socket that does not listen
        assert list(other.unreachable([silent.getsockname()])) == [silent.getsockname()]
    with pytest.raises(PlacementError, match=r"203\.0\.113\.1 is no address of this machine"):
        one.listen("203.0.113.1", [0])


def test_this_machine_says_its_facts() -> None:
    facts = node_facts()

    assert re.fullmatch(r"[0-9.]+ with sources [0-9a-f]{12}", facts.versions["dist_aclgraph"])
    assert facts.versions["dist_aclgraph"].endswith(hash_sources())
    assert set(facts.sizes) == {"NPUs", "cores", "memory"}
    assert {"python", "torch", "torch-npu"} <= {finding.name for finding in facts.findings}


def test_an_address_of_ray_is_for_a_cluster_only() -> None:
    said = CliRunner().invoke(cli, ["doctor", "--ray", "127.0.0.1:1"])

    assert said.exit_code == 2
    assert said.stderr == "error: --ray needs --cluster\n"

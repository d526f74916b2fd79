"""``dist-aclgraph doctor --cluster`` checks all nodes of a Ray cluster and compares the nodes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from dist_aclgraph.actors.cluster.local_ray import joined_ray
from dist_aclgraph.actors.cluster.node_probes import (
    NodeProbes,
    OpenPorts,
    lost_nodes,
    probe_nodes,
)
from dist_aclgraph.actors.cluster.ray_errors import ray_logs
from dist_aclgraph.cli.doctor.finding import Finding
from dist_aclgraph.cli.doctor.node_facts import NodeFacts, node_facts
from dist_aclgraph.cli.doctor.rdma_links import ping_failures
from dist_aclgraph.config import Config

TIMEOUT_S = 120.0  # long, because a busy node needs time to start a process and to load CANN
PORTS_OF_A_GROUP = 4  # number of ports of a lockstep group, without the port for KV blocks
MAX_PORTS = 128  # maximum number of ports that are tried in one range


def examine_cluster(config: Config | None, ray_address: str | None) -> list[Finding]:
    """Join a Ray cluster, ask all of its nodes, and return the findings.

    Args:
        config: a configuration. Each node tries to listen at the configured ports
            (``cluster.ports``), and checks that it can use the configured transport of KV copies.
            If None, the nodes listen at any free port.
        ray_address: see ``join_ray``.

    Raises:
        PlacementError: there is no cluster.
    """
    with joined_ray(ray_address), probe_nodes(TIMEOUT_S) as probes:
        return [*examine_nodes(probes, config), *map(lost_finding, lost_nodes())]


def examine_nodes(probes: NodeProbes, config: Config | None) -> list[Finding]:
    """Ask all nodes, and return the findings. For ``config``, see ``examine_cluster``."""
    uses_hixl = config is not None and config.fetches_by_hixl
    facts = probes.call("answer", lambda node: [partial(node_facts, uses_hixl=uses_hixl)])
    ports = ports_to_try(config)
    opened = probes.call("listen", lambda node: (node.address, ports))
    targets = {
        name: [(probes.nodes[name].address, port) for port in ports_to_reach(found)]
        for name, found in opened.items()
    }
    failures = probes.call(
        "unreachable",
        lambda node: [
            [pair for name, pairs in targets.items() if name != str(node) for pair in pairs]
        ],
    )
    first_npus = {name: first for name, found in facts.items() if (first := _first_rdma(found))}
    unanswered = probes.call(
        "answer", lambda node: [partial(ping_failures, rdma_targets(str(node), first_npus))]
    )
    npus = {name: node.npus for name, node in probes.nodes.items()}
    return [
        *(silent_finding(name, reason) for name, reason in probes.silent.items()),
        *node_findings(facts),
        *declared_findings(facts, npus),
        *version_findings(facts),
        *size_findings(facts),
        *rdma_findings(facts),
        *port_findings(opened, config),
        *reach_findings(failures),
        *ping_findings(unanswered, first_npus),
    ]


def rdma_targets(node: str, first_npus: Mapping[str, str]) -> list[str]:
    """Return the RDMA addresses that a node pings: the addresses of the next two nodes.

    The nodes form a ring: the first node follows the last node. Each node sends pings to two nodes,
    so the number of pings grows only linearly with the number of nodes.
    """
    names = sorted(first_npus)
    if node not in first_npus:
        return []
    at = names.index(node)
    following = [*names[at + 1 :], *names[:at]]
    return [first_npus[name] for name in following[:2]]


def _first_rdma(facts: NodeFacts) -> str | None:
    return next(iter(facts.rdma_addresses.values()), None)


def ports_to_try(config: Config | None) -> list[int]:
    """Return the ports at which each node tries to listen; 0 means any free port."""
    ports = None if config is None else config.cluster.port_range
    if ports is None:
        return [0]
    step = max(1, -(-(len(ports) - 1) // (MAX_PORTS - 1)))
    return sorted({*ports[::step], ports[-1]})


def ports_to_reach(opened: OpenPorts) -> list[int]:
    """Return the first, the middle and the last of the ports at which a node listens. The other
    ports need no test, because a firewall opens or blocks a range of ports as a whole.
    """
    ports = opened.listening
    return sorted({*ports[:1], *ports[len(ports) // 2 :][:1], *ports[-1:]})


def silent_finding(node: str, reason: str) -> Finding:
    """Return the finding about a node that does not answer although Ray counts it as alive."""
    remedy = (
        f"look at its load and at Ray's logs there ({ray_logs()}); each node needs this package in "
        "the Python of its `ray start`"
    )
    return Finding(f"node {node}", False, reason, remedy)


def lost_finding(address: str) -> Finding:
    """Return the finding about a node that has left the cluster."""
    remedy = "start Ray there again (cluster/start-worker.sh), unless it has left for good"
    return Finding(f"node {address}", True, "Ray has lost it", remedy, is_warning=True)


def node_findings(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """Return the faults and warnings that each node reports; equal findings are merged."""
    nodes: dict[Finding, list[str]] = defaultdict(list)
    for node, found in facts.items():
        for finding in found.findings:
            if not finding.is_ok or finding.is_warning:
                nodes[finding].append(node)
    return [
        Finding(f"{each.name} on {', '.join(where)}", each.is_ok, each.found, each.remedy,
                each.is_warning)
        for each, where in nodes.items()
    ]  # fmt: skip


def declared_findings(facts: Mapping[str, NodeFacts], declared: Mapping[str, int]) -> list[Finding]:
    """Return findings about nodes for which Ray counts a wrong number of NPUs.

    Args:
        declared: maps each node to the number of NPUs that Ray counts on it.
    """
    return [
        Finding(
            f"NPUs of {node}",
            False,
            f"Ray counts {declared[node]}, there are {len(found.npus)}",
            f"start Ray there with --resources='{{\"NPU\": {len(found.npus)}}}'",
        )
        for node, found in facts.items()
        if found.npus and declared.get(node, len(found.npus)) != len(found.npus)
    ]


def version_findings(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """Return findings that say whether all nodes have the same versions of the software."""
    values_of = _nodes_by_value({node: found.versions for node, found in facts.items()})
    return [
        Finding(name, len(nodes) == 1, _words(nodes), f"install the same {name} on all nodes")
        for name, nodes in values_of.items()
    ]


def size_findings(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """Return findings that say whether all nodes with NPUs have the same number of NPUs, the same
    number of cores, and the same size of memory.
    """
    values_of = _nodes_by_value({node: each.sizes for node, each in facts.items() if each.npus})
    remedy = "ranks of a group wait for each other, and for those on the smallest node"
    return [
        Finding(name, True, _words(nodes), remedy, is_warning=len(nodes) > 1)
        for name, nodes in values_of.items()
    ]


def rdma_findings(facts: Mapping[str, NodeFacts]) -> list[Finding]:
    """Return findings about RDMA addresses that belong to more than one NPU."""
    owners: dict[str, list[str]] = defaultdict(list)
    for node, found in facts.items():
        for npu, address in found.rdma_addresses.items():
            owners[address].append(f"{npu} of {node}")
    if not owners:
        return []
    twice = [f"{', '.join(npus)} have {a}" for a, npus in owners.items() if len(npus) > 1]
    found_words = "; ".join(twice) or f"{len(owners)} NPUs, all different"
    remedy = "give each NPU an address of its own with hccn_tool"
    return [Finding("RDMA addresses", not twice, found_words, remedy)]


def port_findings(opened: Mapping[str, OpenPorts], config: Config | None) -> list[Finding]:
    """Return findings that say whether each node can listen at the configured ports."""
    if config is None or config.cluster.ports is None:
        return []
    findings = []
    for node, ports in opened.items():
        name = f"ports {config.cluster.ports} of {node}"
        found = f"{len(ports.listening)} free"
        if not ports.in_use:
            findings.append(Finding(name, True, found))
            continue
        found = f"{found}, in use: {', '.join(map(str, ports.in_use))}"
        num_needed = PORTS_OF_A_GROUP + config.sends_files
        is_enough = len(ports.listening) >= num_needed
        remedy = f"widen cluster.ports: a group takes up to {num_needed}"
        findings.append(Finding(name, is_enough, found, remedy, is_warning=is_enough))
    return findings


def reach_findings(failures: Mapping[str, Mapping[tuple[str, int], str]]) -> list[Finding]:
    """Return findings that say whether each node reaches all other nodes by TCP.

    Args:
        failures: nested mapping: node that connects -> (address, port) of another node -> why the
            connection fails.
    """
    remedy = (
        "open cluster.ports between the nodes in their firewalls, and start Ray on each node with "
        "--node-ip-address=ADDRESS that the others reach: docs/operate/cluster.md"
    )
    findings = []
    for node, unreached in failures.items():
        ports_of: dict[tuple[str, str], list[str]] = defaultdict(list)
        for (host, port), reason in unreached.items():
            ports_of[host, reason].append(str(port))
        for (host, reason), ports in ports_of.items():
            found = f"{host} is not reached at {', '.join(ports)}: {reason}"
            findings.append(Finding(f"links from {node}", False, found, remedy))
    found = f"each of {len(failures)} nodes reaches all others by TCP"
    return findings or [Finding("links", True, found)]


def ping_findings(
    unanswered: Mapping[str, Mapping[str, str]], first_npus: Mapping[str, str]
) -> list[Finding]:
    """Return findings that say whether the first NPU of each node reaches the first NPUs of the
    next two nodes through the NPUs' network.

    Args:
        unanswered: node -> RDMA address of another node -> why this address does not answer.
        first_npus: node -> RDMA address of its first NPU.
    """
    if len(first_npus) < 2:
        return []
    remedy = "look at the addresses, netmasks and gateways of the NPUs (hccn_tool -i N -ip -g)"
    findings = [
        Finding(f"RDMA from {node}", False, f"{address} does not answer: {reason}", remedy)
        for node, reasons in unanswered.items()
        for address, reason in reasons.items()
    ]
    found = f"no ping between the first NPUs of {len(first_npus)} nodes has failed"
    return findings or [Finding("RDMA", True, found)]


def _nodes_by_value(
    values_of: Mapping[str, Mapping[str, str]],
) -> dict[str, dict[str, list[str]]]:
    """Return a nested mapping: name of a property -> value of this property -> the nodes that have
    this value.
    """
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for node, values in values_of.items():
        for name, value in values.items():
            found[name][value].append(node)
    return found


def _words(nodes_of: Mapping[str, Sequence[str]]) -> str:
    if len(nodes_of) == 1:
        [(value, nodes)] = nodes_of.items()
        return f"{value} on all of {len(nodes)} nodes" if len(nodes) > 1 else value
    return "; ".join(f"{value} on {', '.join(nodes)}" for value, nodes in nodes_of.items())

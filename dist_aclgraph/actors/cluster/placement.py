"""Finding NPUs: one placement group per lockstep group, one bundle for ranks that stay together.

The ranks of a tensor parallel group share a node: they are one bundle, which Ray never splits. The
pure part says what to ask Ray for, and how ranks are numbered where they landed; the rest asks,
with a bounded wait.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Any, Literal

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from dist_aclgraph.actors.cluster.local_ray import CONTROLLER, NAMESPACE
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.topology import ParallelLayout

# An emulated NPU needs no resource; by the small share of a CPU, Ray counts and spreads ranks.
EMULATED_RANK = {"CPU": 0.001}
START = "start nodes with --resources='{\"NPU\": 8}'"
ROOM_S, POLL_S = 5.0, 0.1
SWEEP_S = 2.0  # of waiting for places
OF_A_CONTROLLER = re.compile(rf"({CONTROLLER}-[0-9a-f]{{8}})/")


@dataclass(frozen=True)
class Node:
    """A living node of the Ray cluster.

    Attributes:
        npus: declared NPUs, used or not; in the result of ``free_nodes``, unused NPUs only.
    """

    node_id: str
    address: str
    npus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.address}/{self.node_id[:8]}"


@dataclass(frozen=True)
class BundleRequest:
    """What one lockstep group asks Ray for.

    Attributes:
        rank: resources of each rank.
        num_bundles, ranks_of_bundle: bundles, each of which lies on one node.
        labels: of the nodes that may be taken.
    """

    rank: dict[str, float]
    num_bundles: int
    ranks_of_bundle: int
    strategy: Literal["STRICT_PACK", "PACK"]
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """How many ranks a group has."""
        return self.num_bundles * self.ranks_of_bundle

    @property
    def ranks_of_node(self) -> int:
        """How many ranks of a group have to share a node, at least."""
        return self.size if self.strategy == "STRICT_PACK" else self.ranks_of_bundle

    @property
    def bundles(self) -> list[dict[str, float]]:
        count = self.ranks_of_bundle
        bundle = {name: count * amount for name, amount in self.rank.items()}
        return [dict(bundle) for _ in range(self.num_bundles)]


def plan_bundles(
    layout: ParallelLayout,
    num_groups: int,
    nodes: Sequence[Node],
    labels: Mapping[str, str] | None = None,
    *,
    tp_across_nodes: bool = False,
    may_be_undeclared: bool = False,
) -> BundleRequest:
    """Choose bundles and strategy: a group lies on one node, if all groups find one that holds it.

    Args:
        layout: of the whole deployment.
        num_groups: that are to be placed now; NPUs are demanded for no others.
        nodes: of the cluster, which live.
        labels: that a node must have.
        tp_across_nodes: whether a tensor parallel group that no node holds may span several.
        may_be_undeclared: whether any node will do where no node declares NPUs, as they are
            emulated.

    Raises:
        PlacementError: the cluster has too few NPUs, or has them on too many nodes.
    """
    labels = dict(labels or {})
    size = layout.world_size // len(layout.lockstep_groups)
    fitting = _with_labels(nodes, labels)
    if not fitting:
        raise PlacementError(
            f"no living node has the labels {_words(labels)} of cluster.labels; the Ray cluster "
            f"has {', '.join(sorted(map(str, nodes))) or 'no node'}; start nodes with "
            f"--labels={_words(labels)}, or change cluster.labels"
        )
    if may_be_undeclared and not any(node.npus for node in nodes):
        return BundleRequest(EMULATED_RANK, 1, size, "STRICT_PACK", labels)
    total, needed = sum(node.npus for node in fitting), num_groups * size
    has = f"the Ray cluster has {total} ({_by_node(fitting)})"
    if total < needed:
        which = f" on nodes with the labels {_words(labels)}" if labels else ""
        raise PlacementError(
            f"the deployment needs {needed} NPUs{which} for {num_groups} times {size}, {has}; "
            f"lower parallel.tp, parallel.dp, parallel.pcp or parallel.ep, or add nodes with NPUs; "
            f"for emulated NPUs, {START}"
        )
    unit = layout.tp
    ways = [
        BundleRequest({"NPU": 1}, size // unit, unit, "STRICT_PACK", labels),
        BundleRequest({"NPU": 1}, size // unit, unit, "PACK", labels),
    ]
    if tp_across_nodes:
        ways.append(BundleRequest({"NPU": 1}, size, 1, "PACK", labels))
    # While all nodes live, place as for the whole deployment: a lost group was placed that way.
    for count in (max(num_groups, len(layout.lockstep_groups)), num_groups):
        for request in ways:
            if has_places(request, fitting, count):
                return request
    raise PlacementError(
        f"the deployment needs {needed // unit} times {unit} NPUs (parallel.tp) that share "
        f"a node, {has}, which is room for {sum(node.npus // unit for node in fitting)}; lower "
        "parallel.tp, or set parallel.tp_across_nodes=true where nodes are linked as NPUs of one "
        "node are"
    )


def has_places(request: BundleRequest, nodes: Sequence[Node], num_groups: int) -> bool:
    """Whether so many groups fit on these nodes, in any order in which Ray takes nodes."""
    if "NPU" not in request.rank:
        return True  # they are emulated, and any node will do
    unit = request.ranks_of_node
    found = sum(node.npus // unit for node in _with_labels(nodes, request.labels))
    return found * unit >= num_groups * request.size


def rank_order(landed: Sequence[tuple[str, tuple[int, ...]]]) -> list[int]:
    """Return the workers in the order of their ranks: neighbours share nodes, and lie side by side.

    As every node holds whole bundles, a tensor parallel group stays on one node.

    Args:
        landed: node and NPUs of each worker.
    """
    return sorted(range(len(landed)), key=lambda i: (*landed[i], i))


def _by_node(nodes: Sequence[Node]) -> str:
    return ", ".join(sorted(f"{node}: {node.npus}" for node in nodes))


def _with_labels(nodes: Sequence[Node], labels: Mapping[str, str]) -> list[Node]:
    return [node for node in nodes if labels.items() <= dict(node.labels).items()]


def _words(labels: Mapping[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in sorted(labels.items()))


def cluster_nodes() -> list[Node]:
    """Return the living nodes of the cluster."""
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["Resources"].get("NPU", 0)),
            node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def free_nodes() -> list[Node]:
    """Return the living nodes with their unused NPUs, as far as Ray has counted."""
    available = available_resources_per_node()
    return [
        replace(node, npus=int(available.get(node.node_id, {}).get("NPU", 0)))
        for node in cluster_nodes()
    ]


def may_have_others(address: str) -> bool:
    """Whether peers of a node at ``address`` may be on other nodes, now or later.

    A Ray on loopback is for one machine alone, unless it pretends to have several nodes.
    """
    return not ip_address(address).is_loopback or len(cluster_nodes()) > 1


def has_room(request: BundleRequest, num_groups: int, wait_s: float = ROOM_S) -> bool:
    """Whether so many groups would be placed now, as far as Ray has counted.

    Args:
        wait_s: how long to wait for room: Ray counts returned NPUs with a delay.
    """
    deadline_s = time.monotonic() + wait_s
    while not (fits := has_places(request, free_nodes(), num_groups)):
        if time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    return fits


def count_npus(request: BundleRequest, nodes: Sequence[Node]) -> str:
    """Say which NPUs these nodes have where a group may be, and how it takes them."""
    nodes, unit = _with_labels(nodes, request.labels), request.ranks_of_node
    return (
        f"{sum(node.npus for node in nodes)} ({_by_node(nodes) or 'on no node'}), of which a group "
        f"takes {request.size // unit} times {unit} on one node"
    )


def reserve(request: BundleRequest, timeout_s: float, name: str) -> PlacementGroup:
    """Return a placement group that is ready.

    Args:
        name: by which ``release_all`` finds it.

    Raises:
        PlacementError: it was not ready in time; says what is available.
    """
    group, bundles = ask_for(request, name), request.bundles
    deadline_s = time.monotonic() + timeout_s
    while not group.wait(timeout_seconds=min(SWEEP_S, timeout_s)):
        release_dead()
        if time.monotonic() < deadline_s:
            continue
        available = {k: v for k, v in ray.available_resources().items() if k in ("NPU", "CPU")}
        remove_placement_group(group)
        raise PlacementError(
            f"{len(bundles)} bundles of {bundles[0]} ({request.strategy}) were not placed within "
            f"{timeout_s:g} s; available now: {available or 'nothing'}; are other deployments "
            "holding the NPUs?"
        )
    return group


def ask_for(request: BundleRequest, name: str) -> PlacementGroup:
    """Return a placement group that gets its bundles as soon as there is room for them.

    Args:
        name: by which ``release_all`` finds it.
    """
    bundles = request.bundles
    return placement_group(
        bundles,
        strategy=request.strategy,
        name=name,
        bundle_label_selector=[request.labels for _ in bundles] if request.labels else None,
    )


def is_placed(group: PlacementGroup) -> bool:
    """Whether a placement group has its bundles now, all of them on nodes that live."""
    return bool(placement_group_table(group)["state"] == "CREATED")


def leading_node(group: PlacementGroup) -> str:
    """Return the node of rank 0 of a group that is placed, as ``rank_order`` orders ranks."""
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    return min(nodes.values())


def release(group: PlacementGroup) -> None:
    """Give the bundles back; actors in them die."""
    remove_placement_group(group)


def release_all(prefix: str) -> None:
    """Give back the bundles of a deployment whose controller died before it could.

    Ray keeps them for as long as the job lives that the controller was part of.
    """
    for entry in placement_group_table().values():
        if entry["name"].startswith(prefix) and entry["state"] != "REMOVED":
            remove_placement_group(get_placement_group(entry["name"]))


def release_dead() -> None:
    """Give back the bundles of deployments whose controllers and drivers are both gone.

    A replica of Ray Serve that is killed cannot call ``release_all``, and its job never ends.
    """
    for entry in placement_group_table().values():
        found = OF_A_CONTROLLER.match(entry["name"])
        if found and entry["state"] != "REMOVED" and not _is_actor(found[1]):
            with suppress(ValueError):  # another process was faster
                remove_placement_group(get_placement_group(entry["name"]))


def _is_actor(name: str) -> bool:
    try:
        ray.get_actor(name, NAMESPACE)
    except ValueError:
        return False
    return True


def actor_options(group: PlacementGroup, request: BundleRequest, bundle: int) -> dict[str, Any]:
    """Return Ray options that put a worker into a bundle, with a rank's share of it."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return {
        "num_cpus": request.rank.get("CPU", 0),
        "resources": {name: n for name, n in request.rank.items() if name != "CPU"},
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=bundle
        ),
    }

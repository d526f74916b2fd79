"""Sends questions to all nodes of a Ray cluster at the same time, with one short-lived actor on
each node.

If a node does not answer a question in time, the node gets no more questions, so that later
questions do not wait for this node.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dist_aclgraph.actors.cluster.placement import Node, cluster_nodes
from dist_aclgraph.actors.cluster.ray_errors import ours
from dist_aclgraph.errors import PlacementError

CONNECT_S = 3.0
THREADS = 16


@dataclass(frozen=True)
class OpenPorts:
    """The result of a request to listen at ports: the ports at which the probe listens now, and the
    ports that other processes use.
    """

    listening: tuple[int, ...]
    in_use: tuple[int, ...]


class NodeProbe:
    """The actor that answers the questions on one node."""

    def __init__(self) -> None:
        self._sockets: list[socket.socket] = []

    def answer(self, question: Callable[[], Any]) -> Any:
        """Call ``question``, a function of this package, and return the result. The code of the
        function is the code that is installed on this node.
        """
        return question()

    def listen(self, host: str, ports: Sequence[int]) -> OpenPorts:
        """Listen at the address ``host`` until the probe ends; port 0 means any free port.

        Raises:
            PlacementError: ``host`` is not an address of this node.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        in_use = []
        for port in ports:
            try:
                self._sockets.append(socket.create_server((host, port), family=family))
            except OSError as e:
                if e.errno == errno.EADDRNOTAVAIL:
                    raise PlacementError(
                        f"{host} is no address of this machine; start Ray there with its own "
                        "--node-ip-address"
                    ) from None
                in_use.append(port)
        listening = tuple(each.getsockname()[1] for each in self._sockets)
        return OpenPorts(listening, tuple(in_use))

    def unreachable(self, targets: Sequence[tuple[str, int]]) -> dict[tuple[str, int], str]:
        """Try to connect to each target (address, port). Return the targets that could not be
        reached, with the reasons.
        """
        with ThreadPoolExecutor(THREADS) as threads:
            reasons = threads.map(_connect, targets)
        return {target: why for target, why in zip(targets, reasons, strict=True) if why}


def _connect(target: tuple[str, int]) -> str:
    try:
        socket.create_connection(target, CONNECT_S).close()
    except OSError as e:
        return str(e)
    return ""


class NodeProbes:
    """The probes of all living nodes.

    Attributes:
        nodes: the nodes that have answered all questions so far; the keys are the nodes' names.
        silent: the reasons why nodes did not answer; the keys are the nodes' names.
    """

    def __init__(self, timeout_s: float) -> None:
        """Start the probes on the cluster that this process has joined.

        Args:
            timeout_s: time limit of each question.
        """
        self._timeout_s = timeout_s
        self.nodes = {str(node): node for node in cluster_nodes()}
        self.silent: dict[str, str] = {}
        probe = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
        self._actors = {
            name: probe.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            ).remote()
            for name, node in self.nodes.items()
        }

    def call(self, method: str, arguments: Callable[[Node], Sequence[object]]) -> dict[str, Any]:
        """Call a method of all probes. Return the answers that arrive in time. The keys are the
        names of the nodes.
        """
        refs = {
            getattr(self._actors[name], method).remote(*arguments(node)): name
            for name, node in self.nodes.items()
        }
        if not refs:
            return {}
        done, late = ray.wait(list(refs), num_returns=len(refs), timeout=self._timeout_s)
        answers = {}
        for ref in done:
            try:
                answers[refs[ref]] = ray.get(ref)
            except RayError as e:
                self._drop(refs[ref], str(ours(e, "asking it")))
        for ref in late:
            self._drop(refs[ref], f"it has not answered for {self._timeout_s:g} s")
        return {name: answers[name] for name in self.nodes}

    def _drop(self, name: str, reason: str) -> None:
        self.silent[name] = reason
        del self.nodes[name]
        ray.kill(self._actors[name])

    def end(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)


@contextmanager
def probe_nodes(timeout_s: float) -> Iterator[NodeProbes]:
    """Start probes on all nodes of the Ray cluster, and end the probes at the end of the context;
    see ``NodeProbes``.
    """
    probes = NodeProbes(timeout_s)
    try:
        yield probes
    finally:
        probes.end()


def lost_nodes() -> list[str]:
    """Return the addresses of nodes that Ray has lost. If another node with the same address is
    alive, the address is left out.
    """
    here = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return sorted({node["NodeManagerAddress"] for node in ray.nodes()} - here)

"""Finds a deployment that another process of this cluster has started."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import list_named_actors

from dist_aclgraph.actors.cluster.local_ray import CONTROLLER, joined_ray
from dist_aclgraph.actors.cluster.ray_errors import ours
from dist_aclgraph.actors.deployment.controller_life import OnProgress, progress_of
from dist_aclgraph.actors.worker.worker_group import fetch
from dist_aclgraph.config import Config
from dist_aclgraph.errors import PlacementError
from dist_aclgraph.topology import NO_RANK


class RunningDeployment:
    """A deployment that another process has started and will stop. Owns only the controller's
    handle.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._controller = ray.get_actor(name)

    def scale(self, count: int, on_progress: OnProgress) -> None:
        """Change the number of groups that accept requests; see ``ServingGroups.scale``."""
        self._wait_for(self._controller.scale.remote(count), on_progress)

    def roll(self, config: Config, on_progress: OnProgress) -> None:
        """Replace all groups; see ``ServingGroups.roll``."""
        self._wait_for(self._controller.roll.remote(config), on_progress)

    def _wait_for(self, change: Any, on_progress: OnProgress) -> None:
        """Wait until a change has ended. Meanwhile, call ``on_progress`` with the controller's
        progress.

        Raises:
            DistAclGraphError: the change failed. The groups that served before the change continue
                to serve.
        """
        for progress in progress_of(self._controller, change):
            if progress is not None:
                on_progress(progress)
        fetch(change, NO_RANK, "SERVING")


@contextmanager
def running_deployment(
    name: str | None = None, local_ray: str | None = None
) -> Iterator[RunningDeployment]:
    """Find a deployment. Until the end of the context, this process is connected to the
    deployment's Ray cluster; see ``join_ray``.

    Args:
        name: name of the controller; required if several deployments run.
        local_ray: address of a Ray that a service has started; required if several services have
            started a Ray.

    Raises:
        PlacementError: no cluster or no deployment was found; several clusters were found, and
            ``local_ray`` is None; or several deployments were found, and ``name`` is None.
    """
    with joined_ray(local_ray):
        try:
            names = [n for n in list_named_actors() if n.startswith(f"{CONTROLLER}-")]
        except RayError as e:
            raise ours(e, "looking for deployments") from e
        yield RunningDeployment(choose_deployment(sorted(names), name))


def choose_deployment(names: list[str], wanted: str | None) -> str:
    """Return ``wanted`` if a deployment has this name. If ``wanted`` is None, return the name of
    the only deployment.

    Raises:
        PlacementError: there is no such deployment; or ``wanted`` is None, and there are several
            deployments.
    """
    if wanted is not None and wanted not in names:
        raise PlacementError(f"no deployment {wanted!r} runs; there are: {', '.join(names) or '-'}")
    if wanted is None and len(names) != 1:
        found = f"{len(names)} deployments run: {', '.join(names)}; say which by --deployment"
        raise PlacementError(found if names else "no deployment runs on this Ray cluster")
    return wanted or names[0]

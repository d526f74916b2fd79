"""A controller that Ray cannot reach for a moment does not end the service."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RaySystemError

from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.actors.deployment.deployment import RayDeployment
from dist_aclgraph.errors import EngineDeadError


def running(error: Exception, monkeypatch: pytest.MonkeyPatch) -> RayDeployment:
    """Return a deployment whose controller answers every call with ``error``."""

    def get(*_: Any, **__: Any) -> None:
        raise error

    here = SimpleNamespace(get_node_id=lambda: "node")
    fake = SimpleNamespace(get=get, get_runtime_context=lambda: here)
    monkeypatch.setattr(deployment, "ray", fake)
    call = SimpleNamespace(remote=lambda: None)
    controller = SimpleNamespace(failure=call, outlook=call)
    keeper: Any = SimpleNamespace(controller=controller, failure="", progress="")
    return RayDeployment(keeper)


@pytest.mark.parametrize(
    "error",
    [ActorDiedError(), GetTimeoutError(), ActorUnavailableError("connection lost", None)],
    ids=lambda error: type(error).__name__,
)
def test_a_controller_that_does_not_answer_is_not_the_end(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the controller is dead, the deployment starts another controller. If Ray is dead, the
    regular check of Ray notices the death.
    """
    service = running(error, monkeypatch)

    service.raise_if_dead()

    assert service.outlook().progress == "the controller does not answer"


def test_another_failure_of_ray_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    service = running(RaySystemError("no such object"), monkeypatch)

    with pytest.raises(EngineDeadError, match="no such object"):
        service.raise_if_dead()

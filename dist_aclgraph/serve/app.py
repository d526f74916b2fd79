"""The Ray Serve application: ``serve run dist_aclgraph:app config=configs/x.yaml``.

The application has two parts. ``groups`` starts and stops the controller and its workers.
``ingress`` has ``serve.replicas`` replicas, which serve HTTP with these workers until Ray Serve
stops the replicas.

This module does not import ``annotations`` from ``__future__``. With this import, Serve would read
the name of the argument's class, but Serve needs the class.
"""

import asyncio
from contextlib import suppress
from typing import Any

import click
import msgspec
import pydantic
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from dist_aclgraph.actors.client.outage import Outlook
from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.actors.deployment.deployment_protocol import StartDeployment
from dist_aclgraph.actors.deployment.llm import start_on_ray
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.config import Config, load_config, read_value
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.files.hub import with_local_model
from dist_aclgraph.files.log_folder import file_name, with_log_folder
from dist_aclgraph.logs import ProcessLog
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.access import Access, check_exposure, read_access
from dist_aclgraph.serve.observe.traces import check_packages
from dist_aclgraph.serve.openai.state import open_state
from dist_aclgraph.text.tokenizer import Tokenizer

DEFAULT_CONFIG = "configs/tiny-qwen3.yaml"  # a path in the working directory or in the package
# the limit of the scheduler's queue is lower, and is reached first
MAX_ONGOING_REQUESTS = 4096
OUTLOOK_S = 20.0  # time limit of a call of ``outlook``; longer than the deployment's limit
STAY_AGAIN_S, HEARD_S = 1.0, 2.0


class RefusedError(click.ClickException, RayServeException):  # type: ignore[misc]  # untyped
    """The application cannot be served.

    ``serve run`` prints click's errors as one sentence. ``serve status`` prints Serve's errors as
    one sentence. Both commands print other errors with a traceback. So the class has two base
    classes, one of click and one of Serve.
    """


class AppArgs(pydantic.BaseModel):
    """Arguments of ``serve run``: ``config=FILE``, and dotted keys such as ``parallel.tp=2``."""

    model_config = pydantic.ConfigDict(extra="allow")
    config: str = DEFAULT_CONFIG

    def load(self) -> Config:
        overrides = {
            key: read_value(key, value) if isinstance(value, str) else value
            for key, value in (self.model_extra or {}).items()
        }
        return with_local_model(load_config(self.config, overrides))


@serve.deployment(name="groups", max_ongoing_requests=MAX_ONGOING_REQUESTS)
class GroupsReplica:
    """Owns the deployment that all ingress replicas use."""

    def __init__(self, config: Config, start: StartDeployment = start_on_ray) -> None:
        ProcessLog("owner").open(config.logging)
        # A new version of the application starts while the previous version drains, so the new
        # version must wait for NPUs.
        place_s = config.timeouts.place_s + _leave_s(config)
        timeouts = config.timeouts.model_copy(update={"place_s": place_s})
        self._deployment = start(config.model_copy(update={"timeouts": timeouts}))

    async def reach(self) -> Reach:
        """Return the addresses at which clients reach the deployment now."""
        return await asyncio.to_thread(self._deployment.reach)

    async def outlook(self) -> Outlook:
        """Return the deployment's status, for clients that cannot reach a serving group."""
        return await asyncio.to_thread(self._deployment.outlook)

    async def stay(self) -> None:
        """Wait forever, because Serve does not end this replica while a call is open."""
        await asyncio.Event().wait()

    async def check_health(self) -> None:
        """Raise an error if the deployment is dead, so that Serve replaces this replica."""
        await asyncio.to_thread(self._deployment.raise_if_dead)

    async def __del__(self) -> None:
        """Stop the deployment. Serve calls this after all calls of ingresses to this replica have
        ended.
        """
        if hasattr(self, "_deployment"):
            await asyncio.to_thread(self._deployment.shut_down)


@serve.deployment(name="ingress", max_ongoing_requests=MAX_ONGOING_REQUESTS)
@serve.ingress()
class Ingress:
    """Owns a client of the deployment; ``make_api`` defines the routes.

    Replicas share nothing.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: Config, access: Access, groups: Any
    ) -> None:
        ProcessLog("ingress").open(config.logging)
        # Ray Serve has no public function that returns where its proxies listen.
        host = _get_global_client().http_config.host or "127.0.0.1"
        check_exposure(access, config.serve, "Ray Serve's http_options.host", host)
        self._access = access
        self._stay = asyncio.create_task(_stay(groups))
        reach = await groups.reach.remote()
        tokenizer = await asyncio.to_thread(Tokenizer.of, config)
        node_id = ray.get_runtime_context().get_node_id()

        def ask() -> Outlook:
            try:
                found: Outlook = groups.outlook.remote().result(timeout_s=OUTLOOK_S)
            # the groups have answered with an error, so a retry is not needed
            except DistAclGraphError:
                raise
            except (RayError, RayServeException, TimeoutError):
                return Outlook(progress="Ray Serve starts the groups again")
            return found

        replica = serve.get_replica_context().rank.rank
        reach = msgspec.structs.replace(reach, node_id=node_id)
        self._state = open_state(config, tokenizer, reach, ask, replica)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Serve's proxy creates the request ids, and returns the ids to clients.
        return make_api(self._state, self._access, names_requests=False)

    async def check_health(self) -> None:
        """Raise an error if all groups are dead. Ray Serve replaces the groups. This ingress cannot
        reach the new groups, so Ray Serve must also replace this ingress.
        """
        self._state.raise_if_dead()

    async def __del__(self) -> None:
        """Disconnect. Serve calls this after this replica's admitted requests have ended."""
        if hasattr(self, "_state"):
            await asyncio.to_thread(self._leave)
            self._stay.cancel()
            # Wait until the cancellation has reached the groups, because this process ends now.
            await asyncio.wait([self._stay])

    def _leave(self) -> None:
        self._state.drain(self._state.config.serve.drain_s)
        self._state.close()


def _leave_s(config: Config) -> float:
    """Return the time limit, in seconds, for the end of an application. The application's ingresses
    end first, then the application's groups.
    """
    return 2 * (config.serve.drain_s + config.timeouts.stop_s)


async def _stay(groups: Any) -> None:
    """Keep one call to the replica of ``groups`` open forever. If Serve replaces the replica, call
    the new replica.
    """
    while True:
        call = groups.stay.remote()
        try:
            with suppress(RayError, RayServeException):
                await call
        finally:
            await _take_back(call)
        await asyncio.sleep(STAY_AGAIN_S)


async def _take_back(call: Any) -> None:
    """Cancel a call, and wait until the called replica has received the cancellation.

    Without the cancellation, the replica would not notice that its caller has ended.
    """
    call.cancel()
    with suppress(asyncio.CancelledError, RayError, RayServeException, TimeoutError):
        async with asyncio.timeout(HEARD_S):
            await call


def make_app(config: Config, start: StartDeployment = start_on_ray) -> serve.Application:
    """Bind the ingress to a checked configuration.

    Ray Serve's own configuration determines where its proxy listens and how the proxy limits
    connections. So ``serve.host``, ``serve.port`` and the limits on headers, readers and
    connections have no effect in this application.

    Raises:
        ConfigError: the API keys cannot be read.
        MissingPackageError: the packages of ``serve.traces`` are not installed.
    """
    access = read_access(config.serve, checks_host=False)
    if config.serve.traces is not None:
        check_packages()
    # The replicas' arguments contain the folder's name, and Serve replaces replicas whose arguments
    # have changed. So the name must not depend on the time.
    config = with_log_folder(config, f"serve-{file_name(config.name)}")
    drain_s = config.serve.drain_s
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": 0},
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "max_constructor_retry_count": 1,
    }
    ingress: Any = Ingress  # the decorator has turned the class into a Serve deployment
    groups: Any = GroupsReplica
    # The groups end after the ingresses, because ingresses finish the requests that they admitted.
    owner = groups.options(
        num_replicas=1,
        graceful_shutdown_timeout_s=_leave_s(config),
        **options,
    ).bind(config, start)
    return ingress.options(
        num_replicas=config.serve.replicas,
        graceful_shutdown_timeout_s=drain_s + config.timeouts.stop_s,
        **options,
    ).bind(config, access, owner)


def app(args: AppArgs) -> serve.Application:
    """Application builder for ``serve run dist_aclgraph:app [config=FILE] [key=value ...]``.

    The process that builds the application must be able to read the model.

    Raises:
        RefusedError: the configuration or the model cannot be served.
    """
    try:
        config = args.load()
        deployment.check_startable(config)
        return make_app(config)
    except DistAclGraphError as e:
        raise RefusedError(str(e)) from e

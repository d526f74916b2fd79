"""The Ray Serve application: ``serve run dist_aclgraph:app config=configs/x.yaml``.

One replica is the ingress of one deployment: it starts the controller and its workers, serves HTTP
until it is told to stop, and then takes them down.

Annotations are evaluated here, because Serve looks at the class of the builder's argument.
"""

import asyncio
from typing import Any

import click
import pydantic
import yaml
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from dist_aclgraph.actors import deployment
from dist_aclgraph.actors.engine_client import StartDeployment
from dist_aclgraph.actors.llm import start_on_ray
from dist_aclgraph.config import Config, load_config
from dist_aclgraph.errors import DistAclGraphError
from dist_aclgraph.serve.access import Access, read_access
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.state import open_state
from dist_aclgraph.text.tokenizer import Tokenizer

DEFAULT_CONFIG = "configs/tiny-qwen3.yaml"  # of the working directory, or the package's own
MAX_ONGOING_REQUESTS = 4096  # the scheduler's own queue is what limits


class RefusedError(click.ClickException, RayServeException):  # type: ignore[misc]  # untyped
    """What cannot be served, in one sentence: ``serve run`` prints errors of click so, and
    ``serve status`` those of Serve; all others come with a traceback.
    """


class AppArgs(pydantic.BaseModel):
    """Arguments of ``serve run``: ``config=FILE``, and dotted keys such as ``parallel.tp=2``."""

    model_config = pydantic.ConfigDict(extra="allow")
    config: str = DEFAULT_CONFIG

    def load(self) -> Config:
        overrides = {
            key: yaml.safe_load(value) if isinstance(value, str) else value
            for key, value in (self.model_extra or {}).items()
        }
        return load_config(self.config, overrides)


@serve.deployment(name="ingress", max_ongoing_requests=MAX_ONGOING_REQUESTS)
@serve.ingress()
class Ingress:
    """Owns a deployment and the client to it; the routes are those of ``make_api``."""

    def __init__(
        self, config: Config, access: Access, start: StartDeployment = start_on_ray
    ) -> None:
        self._access = access
        self._deployment = start(config)
        try:
            self._state = open_state(config, Tokenizer(config.model), self._deployment)
        except BaseException:
            self._deployment.shut_down()
            raise

    def __serve_build_asgi_app__(self) -> ASGIApp:
        # Serve's proxy names requests, and answers with the name.
        return make_api(self._state, self._access, names_requests=False)

    async def check_health(self) -> None:
        """Fail, so that Serve replaces this replica, once the deployment is dead."""
        await asyncio.to_thread(self._deployment.check)

    async def __del__(self) -> None:
        """Stop the deployment; Serve calls it once the requests that it had let in have ended."""
        if hasattr(self, "_state"):
            await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._state.drain()
        self._state.client.close()
        self._deployment.shut_down()


def make_app(config: Config, start: StartDeployment = start_on_ray) -> serve.Application:
    """Bind the ingress to a checked configuration.

    Where the proxy listens, and what it allows of connections, is Serve's to say: ``serve.host``,
    ``serve.port`` and the limits on headers, readers and connections have no effect here.

    Raises:
        ConfigError: the API keys cannot be read.
    """
    access = read_access(config.serve, checks_host=False)
    drain_s = config.serve.drain_s
    options: dict[str, Any] = {
        "num_replicas": 1,
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": drain_s + config.timeouts.stop_s,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "max_constructor_retry_count": 1,
    }
    ingress: Any = Ingress  # the decorators made a Serve deployment of it
    return ingress.options(**options).bind(config, access, start)


def app(args: AppArgs) -> serve.Application:
    """Application builder for ``serve run dist_aclgraph:app [config=FILE] [key=value ...]``.

    The model must be readable where the application is built.

    Raises:
        RefusedError: the configuration or the model cannot be served.
    """
    try:
        config = args.load()
        deployment.check(config)
        return make_app(config)
    except DistAclGraphError as e:
        raise RefusedError(str(e)) from e

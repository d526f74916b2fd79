"""The Ray Serve application: ``serve run dist_aclgraph:app config=configs/x.yaml``.

One replica is the ingress of one deployment: it starts the controller and its workers, serves HTTP
until it is told to stop, and then takes them down.

Annotations are evaluated here, because Serve looks at the class of the builder's argument.
"""

import asyncio
import time
from typing import Any

import pydantic
import yaml
from fastapi import FastAPI
from ray import serve

from dist_aclgraph.actors.engine_client import EngineClient, StartDeployment
from dist_aclgraph.actors.llm import start_on_ray
from dist_aclgraph.config import Config, load_config
from dist_aclgraph.errors import DistAclGraphError, EngineUnavailableError
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.state import ApiState
from dist_aclgraph.text.tokenizer import Tokenizer

DEFAULT_CONFIG = "configs/tiny-qwen3.yaml"  # of the working directory, or the package's own
MAX_ONGOING_REQUESTS = 4096  # the scheduler's own queue is what limits


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

    def __init__(self, config: Config, start: StartDeployment = start_on_ray) -> None:
        self._deployment = start(config)
        try:
            client = EngineClient(self._deployment.addresses, self._deployment.token)
            config = config.model_copy(update={"max_model_len": self._deployment.max_model_len})
            tokenizer = Tokenizer(config.model)
            self._state = ApiState(config, tokenizer, client)
        except BaseException:
            self._deployment.shut_down()
            raise

    def __serve_build_asgi_app__(self) -> FastAPI:
        return make_api(self._state)

    async def check_health(self) -> None:
        """Fail, so that Serve replaces this replica, once the deployment is dead."""
        await asyncio.to_thread(self._deployment.check)

    async def failure(self) -> str:
        """Return why the deployment serves no more, or "" while it does."""
        try:
            await self.check_health()
        except EngineUnavailableError as e:
            return str(e)
        return ""

    async def report(self) -> dict[str, Any]:
        """What ``dist-aclgraph serve`` prints: plan, ranks and memory."""
        return await asyncio.to_thread(self._deployment.report)

    async def stop(self) -> None:
        """Take nothing new, let what runs end for ``serve.drain_s`` seconds, then stop."""
        self._state.is_draining = True
        deadline = time.monotonic() + self._state.config.serve.drain_s
        while self._state.client.num_outstanding and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self._shut_down)

    async def __del__(self) -> None:
        if hasattr(self, "_state"):
            await asyncio.to_thread(self._shut_down)

    def _shut_down(self) -> None:
        self._state.client.close()
        self._deployment.shut_down()


def make_app(config: Config, start: StartDeployment = start_on_ray) -> serve.Application:
    """Bind the ingress to a checked configuration."""
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
    return ingress.options(**options).bind(config, start)


def app(args: AppArgs) -> serve.Application:
    """Application builder for ``serve run dist_aclgraph:app [config=FILE] [key=value ...]``."""
    try:
        config = args.load()
    except DistAclGraphError as e:
        raise SystemExit(f"error: {e}") from None
    return make_app(config)

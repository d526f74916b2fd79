"""The process that serves HTTP: it knows neither Ray nor devices, and may be replaced at any time.

It asks the owner of the deployment where the engines are, whether requests are to be let in, and,
while no group serves, what becomes of it. It listens until the service is over: with a 503 where
nothing else is true.
"""

from __future__ import annotations

import gc
import select
from collections.abc import Callable

from dist_aclgraph.actors.deployment.owner_link import Owner, Standing
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.cli.opened import Opened
from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.front import Front
from dist_aclgraph.serve.http.server import HttpServer
from dist_aclgraph.serve.openai.state import ApiState, open_state
from dist_aclgraph.serve.resume.holder import HolderLink

POLL_S = 0.1
END_S = 30.0  # until an owner that was left ends the service
OVER = Standing("the service has ended")


def serve_http(
    opened: Opened, life: int, beat: Callable[[], None], link: HolderLink | None = None
) -> None:
    """Serve until the service is over.

    Args:
        life: read end of a pipe that nobody writes to: it ends once the service is over.
        beat: called every second or two, from the event loop.
        link: to the process that holds connections, with those that a previous process has left;
            None where no connection outlives this process.

    Raises:
        EngineUnavailableError: no request can be served any more, and the service goes on.
    """
    server = HttpServer(opened.config.serve, opened.http, beat, link)
    front = Front("the service is starting")
    server.start(front)
    owner = Owner(opened.owner_path)
    try:
        if reach := _wait_for_deployment(owner, life):
            _serve(opened, life, server, front, owner, reach)
        else:
            owner.close()
            _is_over(life, None)
    finally:
        owner.close()
        server.stop()


def _wait_for_deployment(owner: Owner, life: int) -> Reach | None:
    """Return where the engines are, None where the service ends before they are there."""
    while not _is_over(life, POLL_S):
        standing = owner.standing(is_open=False)
        if standing is not None and standing.end:
            return None
        if standing is not None and (reach := owner.reach()):
            return reach
    return None


def _serve(
    opened: Opened, life: int, server: HttpServer, front: Front, owner: Owner, reach: Reach
) -> None:
    asker = Owner(opened.owner_path)  # asked on a thread of its own
    state = open_state(opened.config, opened.tokenizer, reach, asker.outlook)
    failure = None
    try:
        # What was imported and built so far is not looked through at every collection.
        gc.collect()
        gc.freeze()
        owner.standing(is_open=True)  # said before: who is served finds the service announced
        api = make_api(state, opened.access)
        server.let_in(lambda: front.open(api))
        standing = _wait_for_end(state, owner, life)
        state.drain(standing.drain_s)
        front.close(standing.end)
    except EngineUnavailableError as e:
        failure = e
        front.close(f"the service has ended: {e}")
    finally:
        state.client.close()
        asker.close()
        owner.close()
    # Its owner knows of it as well, and stops.
    if not _is_over(life, END_S if failure else None) and failure:
        raise failure


def _wait_for_end(state: ApiState, owner: Owner, life: int) -> Standing:
    """Return once no more requests are to be let in.

    Raises:
        EngineUnavailableError: none can be served any more; says why.
    """
    while not _is_over(life, POLL_S):
        standing = owner.standing(is_open=True)
        if standing is not None and standing.end:
            return standing
        state.check()
    return OVER


def _is_over(life: int, seconds: float | None) -> bool:
    """Return whether the service is over, after so many seconds at the latest."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))

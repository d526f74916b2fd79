"""The process that serves HTTP. The process uses no Ray and no devices, and may be replaced at any
time.

The process asks the owner of the deployment for the addresses of the engines, and whether requests
may be admitted. While no group serves, the process also asks for the progress of the recovery. The
process listens until the service is over. While it cannot serve requests, it answers 503.
"""

from __future__ import annotations

import gc
import logging
import select

from dist_aclgraph.actors.deployment.owner_link import Admission, OwnerClient
from dist_aclgraph.actors.host.liveness import Beat
from dist_aclgraph.actors.wire.addresses import Reach
from dist_aclgraph.cli.opened import Opened
from dist_aclgraph.errors import EngineUnavailableError
from dist_aclgraph.logs import event
from dist_aclgraph.serve.api import make_api
from dist_aclgraph.serve.http.front import Front
from dist_aclgraph.serve.http.server import HttpServer
from dist_aclgraph.serve.openai.state import ApiState, open_state
from dist_aclgraph.serve.resume.holder import HolderLink

logger = logging.getLogger(__name__)

POLL_S = 0.1
END_S = 30.0  # after all groups have failed, the owner must end the service within this time
OVER = Admission("the service has ended")


def serve_http(
    opened: Opened, life: int, beat: Beat, link: HolderLink | None = None, replica: int = 0
) -> None:
    """Serve until the service is over.

    Args:
        life: read end of a pipe, through which no data is sent. The pipe is closed when the service
            is over.
        beat: a function that the event loop calls every second or two. Its argument says whether
            the API is open. Until the API opens, the process only listens, and answers 503.
        link: link to the process that keeps clients' connections open after the death of an
            ingress. If ``link`` is None, the connections close when this process dies.
        replica: index of this ingress among the ingresses of the service.

    Raises:
        EngineUnavailableError: all groups have failed, and the owner has not ended the service
            within ``END_S``.
    """
    front = Front("the service is starting")
    http = opened.http[replica]
    server = HttpServer(opened.config.serve, http, lambda: beat(serves=front.is_open), link)
    server.start(front)
    owner = OwnerClient(opened.owner_path)
    try:
        if reach := _wait_for_deployment(owner, life):
            _serve(opened, life, server, front, owner, reach, replica)
        else:
            owner.close()
            _is_over(life, None)
    finally:
        owner.close()
        server.stop()


def _wait_for_deployment(owner: OwnerClient, life: int) -> Reach | None:
    """Wait until engines serve, and return the addresses of the engines. Return None if the service
    ends first.
    """
    while not _is_over(life, POLL_S):
        admission = owner.admission(is_open=False)
        if admission is not None and admission.end:
            return None
        if admission is not None and (reach := owner.reach()):
            return reach
    return None


def _serve(
    opened: Opened,
    life: int,
    server: HttpServer,
    front: Front,
    owner: OwnerClient,
    reach: Reach,
    replica: int,
) -> None:
    # A client for the thread that asks the owner about the progress of a recovery. Two threads must
    # not share a client.
    asker = OwnerClient(opened.owner_path)
    state = open_state(opened.config, opened.tokenizer, reach, asker.outlook, replica)
    failure = None
    try:
        # All objects that exist at this point stay alive until the process ends. So they are
        # frozen: later garbage collections skip them.
        gc.collect()
        gc.freeze()
        # This call makes the owner announce the service. Requests are admitted only after this
        # call.
        owner.admission(is_open=True)
        api = make_api(state, opened.access)
        server.let_in(lambda: front.open(api))
        event(logger, "ingress_serving", groups=len(reach.addresses))
        admission = _wait_for_end(state, owner, life)
        event(logger, "ingress_draining", cause=admission.end, limit_s=admission.drain_s)
        state.drain(admission.drain_s)
        front.close(admission.end)
    except EngineUnavailableError as e:
        failure = e
        front.close(f"the service has ended: {e}")
    finally:
        state.close()
        asker.close()
        owner.close()
    # This process sends no message to the owner: the owner notices the failure of all groups, and
    # ends the service.
    if not _is_over(life, END_S if failure else None) and failure:
        raise failure


def _wait_for_end(state: ApiState, owner: OwnerClient, life: int) -> Admission:
    """Wait until the ingress must stop admitting requests; return the owner's order to stop.

    Raises:
        EngineUnavailableError: no group will ever serve again; the message has the reason.
    """
    while not _is_over(life, POLL_S):
        admission = owner.admission(is_open=True)
        if admission is not None:
            state.metrics.restarts_left(admission.restarts_left)
            if admission.end:
                return admission
        state.raise_if_dead()
    return OVER


def _is_over(life: int, seconds: float | None) -> bool:
    """Wait up to ``seconds`` for the end of the service; return whether the service is over."""
    poll = select.poll()
    poll.register(life, select.POLLIN)
    return bool(poll.poll(None if seconds is None else seconds * 1000))

"""vLLM's ``kv_transfer_params``: a router lets one service compute the KV of a prompt, and another
service generate the answer.

The first service answers when the prompt's blocks are in files. The second service finds the files
by the hashes of the prompt's tokens. If both services share files, the second service needs no
parameter. If the services share only a secret (``kv.peers_key_file``), the answer of the first
service contains a ticket. The second service uses the ticket to fetch the files. If files are
missing, the second service computes the KV of their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

from msgspec import Raw

from dist_aclgraph.actors.client.token_log import TransferRole
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.peers import Offer, TicketError
from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai import schemas
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode, is_empty
from dist_aclgraph.serve.openai.generation import Generation
from dist_aclgraph.serve.openai.state import ApiState

PARAM = "kv_transfer_params"


class TransferParams(Body):
    """The parameters of a request."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Annotated[Raw, schemas.IGNORED] = ABSENT
    remote_block_ids: Annotated[Raw, schemas.IGNORED] = ABSENT
    remote_host: Raw = ABSENT
    remote_port: Raw = ABSENT
    remote_ticket: Raw = ABSENT


class Transfer(NamedTuple):
    """The part of the work on a request that a router has given to this service.

    Attributes:
        role: see ``TransferRole``.
        params: the parameters of a request that another service has begun.
    """

    role: TransferRole = ""
    params: TransferParams = TransferParams()


NO_TRANSFER = Transfer()


def read_transfer(raw: Raw, *, is_whole: bool) -> Transfer:
    """Return the service's role for a router: "prefill" computes the prompt, and "decode" generates
    the answer. The role is "" if the request has no parameters of a router.

    Args:
        is_whole: whether the request asks for a single answer, without streaming.

    Raises:
        InvalidParameterError: the parameters are wrong, or the request wants more than one answer.
    """
    if is_empty(raw, b"{}"):
        return NO_TRANSFER
    params: TransferParams = decode(raw, TransferParams, PARAM)
    if params.do_remote_decode and params.do_remote_prefill:
        raise InvalidParameterError(
            f"{PARAM}: do_remote_decode and do_remote_prefill are both true; a service either "
            "computes the prompt, or continues it",
            PARAM,
        )
    if params.do_remote_decode and not is_whole:
        raise InvalidParameterError(
            f"{PARAM}: do_remote_decode is true, so the request needs one prompt, n 1 and stream "
            "false",
            PARAM,
        )
    if params.do_remote_decode:
        return Transfer("prefill")
    return Transfer("decode", params) if params.do_remote_prefill else NO_TRANSFER


def check_transfer(state: ApiState, transfer: Transfer) -> BlockSource | None:
    """Return the source from which the prompt's blocks can be fetched; None if the parameters have
    no valid ticket. If another service needs the KV of the prompt, check that this service keeps
    copies of KV.

    Raises:
        InvalidParameterError: another service needs the KV, but this service keeps no copies.
    """
    if transfer.role == "prefill" and not state.config.kv.keeps_copies:
        raise InvalidParameterError(
            f"{PARAM}: do_remote_decode is true, but this service keeps no copies of KV: set "
            "kv.host_gib or kv.disk, or send the request without it",
            PARAM,
        )
    params = transfer.params
    if state.peers is None or is_empty(params.remote_ticket, b'""'):
        return None
    # A wrong ticket is not an error of the request, because this service can compute the prompt
    # itself.
    try:
        ticket = decode(params.remote_ticket, str, "remote_ticket")
        host = decode(params.remote_host, str, "remote_host")
        port = decode(params.remote_port, int, "remote_port")
        return state.peers.open(Offer(host, port, ticket), time.time())
    except (InvalidParameterError, TicketError) as e:
        state.refused_tickets.note(cause=str(e))
        return None


def transfer_of(generation: Generation, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return additional fields of an answer; empty if no router has requested the prompt's KV.

    The field is ``kv_transfer_params``. The field contains the parameters that the other service
    needs to continue. The field is null if the answer is already complete. The block ids are the
    names of the prompt's files.
    """
    if generation.role != "prefill":
        return {}
    if choices[0]["finish_reason"] != "length":
        return {PARAM: None}
    state, (prompt_ids,) = generation.state, generation.prompts
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": state.config.name,
        "remote_block_ids": state.client.block_names(prompt_ids, generation.cache_salt),
        "remote_host": None,
        "remote_port": None,
    }
    source = state.client.blocks_of(generation.group)
    if state.peers is not None and source is not None:
        offer = state.peers.offer(source, time.time())
        if offer is not None:
            params |= {f"remote_{name}": value for name, value in offer._asdict().items()}
    return {PARAM: params}

"""vLLM's ``kv_transfer_params``: a router lets one service compute the KV of a prompt, and another
service generate the answer.

The services share files with copies of KV. The first service answers when the files are complete.
The second service finds the files by the hashes of the prompt's tokens, so it needs no parameter;
it computes the tokens whose files it does not find.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Raw

from dist_aclgraph.actors.client.token_log import TransferRole
from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.serve.openai import schemas
from dist_aclgraph.serve.openai.body import ABSENT, Body, decode, is_empty
from dist_aclgraph.serve.openai.generation import Generation
from dist_aclgraph.serve.openai.state import ApiState

PARAM = "kv_transfer_params"


class TransferParams(Body):
    """The parameters of a request. The ``remote_*`` parameters have no effect."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_engine_id: Annotated[Raw, schemas.IGNORED] = ABSENT
    remote_block_ids: Annotated[Raw, schemas.IGNORED] = ABSENT
    remote_host: Annotated[Raw, schemas.IGNORED] = ABSENT
    remote_port: Annotated[Raw, schemas.IGNORED] = ABSENT


def read_role(raw: Raw, *, is_whole: bool) -> TransferRole:
    """Return what the service does for a router: "prefill" computes the prompt, and "decode"
    generates the answer; "" if the request has no such parameters.

    Args:
        is_whole: whether the request asks for a single answer, without streaming.

    Raises:
        InvalidParameterError: the parameters are wrong, or the request wants more than one answer.
    """
    if is_empty(raw, b"{}"):
        return ""
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
        return "prefill"
    return "decode" if params.do_remote_prefill else ""


def check_role(state: ApiState, role: TransferRole) -> None:
    """Check that the service keeps copies of KV, if another service needs the KV that it computes.

    Raises:
        InvalidParameterError: the service keeps no copies.
    """
    if role == "prefill" and not state.config.kv.keeps_copies:
        raise InvalidParameterError(
            f"{PARAM}: do_remote_decode is true, but this service keeps no copies of KV: set "
            "kv.host_gib or kv.disk, or send the request without it",
            PARAM,
        )


def transfer_of(generation: Generation, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return additional fields of an answer; empty if no router has requested the prompt's KV.

    The field is ``kv_transfer_params``. It contains the parameters with which the other service
    continues; it is null if the answer is already complete. The block ids are the names of the
    prompt's files.
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
    return {PARAM: params}

"""Runs requests with many prompts and short answers. A request's prompts run in portions.

Such a request has no journal. If the process that runs the request is lost, another process runs
the request from the beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request

from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.serve.observe.request_account import ACCOUNT
from dist_aclgraph.serve.openai.generation import ChoicePiece, Generation
from dist_aclgraph.serve.openai.reply import gather
from dist_aclgraph.serve.openai.state import ApiState
from dist_aclgraph.serve.resume.journal import Chance, Journal

# Maximum number of one request's prompts that run or wait on engines at the same time. The limit
# leaves slots for other requests.
PORTION = 64


async def answer_prompts(
    state: ApiState, request: Request, prompts: Sequence[list[int]], params: SamplingParams
) -> list[ChoicePiece]:
    """Return the answer to each prompt, in order.

    Raises:
        ClientGoneError: the client has disconnected.
        DistAclGraphError: a prompt failed; the other prompts are aborted.
    """
    chance = Chance.draw(seed=0)
    pieces: list[ChoicePiece] = []
    for start in range(0, len(prompts), PORTION):
        part = prompts[start : start + PORTION]
        # Only the first portion may be refused. ``is_resumed`` lets later portions get slots even
        # if no slot is free. The time limit counts from ``chance.created_s``, for all portions.
        journal = Journal(chance, is_resumed=start > 0)
        account = request.scope.get(ACCOUNT)
        generation = Generation(state, part, [params] * len(part), 1, "", journal, account=account)
        pieces += await gather(request, generation)
    return pieces


def usage_of(prompts: Sequence[list[int]]) -> dict[str, int]:
    """Return the usage of a request that generates no text."""
    num_tokens = sum(map(len, prompts))
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}

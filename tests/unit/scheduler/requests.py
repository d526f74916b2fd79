"""Makes requests as an ingress submits them."""

from __future__ import annotations

from collections.abc import Sequence

from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.scheduler.request import Request, row_sampling

EOS = 7


def submit(
    name: str,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    cache_salt: str = "",
    output: Sequence[int] = (),
) -> Request:
    """Return a request. EOS ends the request if its parameters do not ignore EOS.

    Args:
        output: the tokens that a lost group has already generated for the request.
    """
    ends = sorted({*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))})
    sampling = row_sampling(params, seed=0, num_prompt_tokens=len(prompt), end_ids=ends)
    return Request(
        name,
        [*prompt, *output],
        sampling,
        max_tokens=None if params.max_tokens is None else params.max_tokens - len(output),
        stop_token_ids=ends,
        cache_salt=cache_salt,
    )

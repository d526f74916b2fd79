"""What a step brought, for all requests at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dist_aclgraph.ints import INT_BYTES, IntArray, pack_ints
from dist_aclgraph.scheduler.request import Request
from dist_aclgraph.steps.delta import FinishReason, RequestDelta
from dist_aclgraph.steps.step import RowLogprobs


@dataclass(frozen=True)
class StepOutputs:
    """New tokens of the requests that sampled in a step; iterates as one delta for each of them.

    Attributes:
        requests: [num_reqs].
        token_ids: [num_new], request by request.
        ends: [num_reqs], where each request's tokens end; None is one token each.
        finish_reasons: of the requests that are over, by index.
        logprobs: [num_new], or empty where nobody asked.
    """

    requests: Sequence[Request] = ()
    token_ids: IntArray = field(default_factory=lambda: np.empty(0, np.int32))
    ends: IntArray | None = None
    finish_reasons: Mapping[int, FinishReason] = field(default_factory=dict)
    logprobs: tuple[RowLogprobs | None, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[StepOutputs]) -> StepOutputs:
        """Return the outputs of several data-parallel ranks, one after another."""
        if len(parts) == 1:
            return parts[0]
        offsets = np.cumsum([0, *(part.num_tokens for part in parts)])
        firsts = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        return cls(
            [request for part in parts for request in part.requests],
            np.concatenate([part.token_ids for part in parts]),
            np.concatenate([part.each_end + at for part, at in zip(parts, offsets, strict=False)]),
            {
                first + index: reason
                for first, part in zip(firsts, parts, strict=False)
                for index, reason in part.finish_reasons.items()
            },
            tuple(report for part in parts for report in part.each_logprobs)
            if any(part.logprobs for part in parts)
            else (),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def each_end(self) -> IntArray:
        """[num_reqs], ``ends`` also where it is None."""
        return np.arange(1, len(self) + 1, dtype=np.int32) if self.ends is None else self.ends

    @property
    def each_logprobs(self) -> tuple[RowLogprobs | None, ...]:
        """[num_new], also where nobody asked."""
        return self.logprobs or (None,) * self.num_tokens

    def __len__(self) -> int:
        return len(self.requests)

    def __iter__(self) -> Iterator[RequestDelta]:
        data = pack_ints(self.token_ids)
        start = 0
        for index, (request, end) in enumerate(
            zip(self.requests, self.each_end.tolist(), strict=True)
        ):
            yield RequestDelta(
                request.request_id,
                data[start * INT_BYTES : end * INT_BYTES],
                self.finish_reasons.get(index),
                self.logprobs[start:end],
                max(0, request.num_cached_tokens),
            )
            start = end

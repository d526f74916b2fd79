"""Latencies of the requests in a simulation: the time to the first token, and the time per later
token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from dist_aclgraph.scheduler.outputs import StepOutputs


class Latencies:
    """Records when requests arrive and when their first tokens are generated, in
    simulated seconds.

    Attributes:
        first_token_s: for each request with a first token, the time from its arrival to this token
            (TTFT).
        per_token_s: for each finished request with several tokens, the mean time between two tokens
            (TPOT).
    """

    def __init__(self) -> None:
        self.first_token_s: list[float] = []
        self.per_token_s: list[float] = []
        self._arrived_s: dict[str, float] = {}
        self._begun_s: dict[str, float] = {}

    def note_arrival(self, name: str, at_s: float) -> None:
        self._arrived_s[name] = at_s

    def note_outputs(self, now_s: float, outputs: StepOutputs) -> None:
        """Record the first tokens and the ends of requests in the outputs of a step that ended at
        ``now_s``.
        """
        for index in outputs.firsts.tolist():
            name = outputs.requests[index].request_id
            # a preempted request can get its first token again; only the first time counts
            if name in self._arrived_s:
                self.first_token_s.append(now_s - self._arrived_s.pop(name))
                self._begun_s[name] = now_s
        for index in outputs.finish_reasons:
            request = outputs.requests[index]
            begun_s = self._begun_s.pop(request.request_id, None)
            num_further = len(request.tokens) - request.num_prompt_tokens - 1
            # ``begun_s`` is None if another group has generated the first token
            if num_further and begun_s is not None:
                self.per_token_s.append((now_s - begun_s) / num_further)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return the mean, the median and the 99th percentile; all three are 0 without values."""
    found = np.array(seconds or [0.0])
    return {
        "mean": float(found.mean()),
        "p50": float(np.quantile(found, 0.5)),
        "p99": float(np.quantile(found, 0.99)),
    }


def latency_report(latencies: Latencies, num_tokens: int, seconds: float) -> dict[str, Any]:
    """Return the latencies of a group, and its tokens per second, as values for JSON."""
    return {
        "first_token_s": quantiles(latencies.first_token_s),
        "per_token_s": quantiles(latencies.per_token_s),
        "tokens_per_s": num_tokens / seconds if seconds else 0.0,
    }

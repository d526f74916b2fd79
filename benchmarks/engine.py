"""Decoding through the whole engine: tokens/s, and a step's host time by stage."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dist_aclgraph.actors import deployment
from dist_aclgraph.actors.controller_life import OnProgress
from dist_aclgraph.actors.engine_client import EngineClient
from dist_aclgraph.config import make_config
from dist_aclgraph.sampling import SamplingParams
from dist_aclgraph.steps.delta import RequestDelta


@dataclass(frozen=True)
class DecodeRun:
    """One measured decode.

    Attributes:
        step_ms: median gap between tokens, as a client sees it.
        stages_us: mean host time of a replayed step by stage (eager where nothing replays).
    """

    batch: int
    step_ms: float
    stages_us: dict[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_ms * 1e3


class DecodeEngine:
    """A deployment that decodes batches of equal requests. Use as a context manager.

    Attributes:
        config: what was asked for.
        deployment, client: what came of it; inside the context.
    """

    def __init__(
        self,
        model: Path,
        max_batch: int,
        *,
        on_progress: OnProgress | None = None,
        **sections: Any,
    ) -> None:
        self._on_progress = on_progress
        self.config = make_config(
            {
                "model": str(model),
                "profile": True,
                "scheduler": {
                    "max_num_seqs": max_batch,
                    "max_num_batched_tokens": 8192,
                    "prefix_cache": False,
                },
                "max_model_len": 1024,
                **sections,
            }
        )

    def __enter__(self) -> DecodeEngine:
        self.deployment = deployment.start(self.config, self._on_progress)
        self.client = EngineClient(
            self.deployment.addresses,
            self.deployment.token,
            node_id=self.deployment.node_id,
            link_s=self.config.timeouts.link_s,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.deployment.shut_down()

    def decode(self, batch: int, prompt_len: int, steps: int, **sampling: Any) -> DecodeRun:
        """Decode ``steps`` tokens for ``batch`` random prompts of ``prompt_len`` tokens.

        Args:
            sampling: parameters of the requests; greedy where there are none.
        """
        params = SamplingParams(**{"max_tokens": steps, "temperature": 0.0, **sampling})
        random = np.random.default_rng(batch)
        arrivals: list[list[float]] = [[] for _ in range(batch)]
        finished = threading.Semaphore(0)
        before = self.deployment.report()["timings_us"]

        def record(delta: RequestDelta) -> None:
            arrivals[int(delta.request_id.rpartition("-")[2])].append(time.perf_counter())
            if delta.finish_reason is not None:
                finished.release()

        for index in range(batch):
            prompt = random.integers(0, 1000, prompt_len).tolist()
            name = f"b{batch}-{time.monotonic_ns()}-{index}"
            self.client.submit(name, prompt, params, [], record)
        for _ in range(batch):
            if not finished.acquire(timeout=300):
                raise TimeoutError(f"batch {batch} did not finish within 300 s")
        after = self.deployment.report()["timings_us"]
        # The last request to start joins after its prompt: count what all decoded together.
        begin_s = max(times[0] for times in arrivals)
        together = sorted(t for t in arrivals[-1] if t > begin_s)
        return DecodeRun(batch, _median_gap_ms(together), _stages(before, after))


def _median_gap_ms(times: list[float]) -> float:
    return statistics.median(b - a for a, b in itertools.pairwise(times)) * 1e3


def _stages(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
    mode = next(m for m in ("full", "piecewise", "eager") if gained.get(f"{m}.steps"))
    steps = gained[f"{mode}.steps"]
    return {
        key.partition(".")[2]: value / steps
        for key, value in gained.items()
        if key.startswith(mode) and not key.endswith(".steps")
    }

"""The deployment that a bench measures. Its client sends batches of equal requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common.workload import Run, decode_workload, run_workload
from dist_aclgraph.actors.client.engine_client import EngineClient
from dist_aclgraph.actors.deployment import deployment
from dist_aclgraph.actors.deployment.controller_life import OnProgress
from dist_aclgraph.config import make_config

NUM_WORDS = 1000  # number of different token ids in prompts
# Time limit in seconds of each phase of a start, and of a step. The limit is long for two reasons:
# several deployments share the cores, and a step with all prompts of a batch can take minutes on
# the emulator.
LIMIT_S = 300.0


class DecodeEngine:
    """A deployment that decodes batches of equal requests. The object is a context manager.

    Attributes:
        deployment, client: these objects exist only inside the context.
    """

    def __init__(
        self,
        model: Path,
        max_batch: int,
        *,
        on_progress: OnProgress | None = None,
        scheduler: Mapping[str, Any] | None = None,
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
                    **(scheduler or {}),
                },
                "max_model_len": 1024,
                "timeouts": dict.fromkeys(("place_s", "join_s", "negotiate_s", "step_s"), LIMIT_S),
                **sections,
            }
        )

    def __enter__(self) -> DecodeEngine:
        self.deployment = deployment.start(self.config, self._on_progress)
        reach = self.deployment.reach()
        self.client = EngineClient(
            reach.addresses,
            reach.token,
            node_id=reach.node_id,
            link_s=self.config.timeouts.link_s,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.deployment.shut_down()

    def decode(self, batch: int, prompt_len: int, steps: int, **sampling: Any) -> Run:
        """Decode a batch of random prompts. ``prompt_len`` is the length of each prompt in tokens,
        and ``steps`` is the number of tokens to decode for each prompt.

        Args:
            sampling: sampling parameters of the requests. By default, sampling is greedy.
        """
        arrivals = decode_workload(batch, prompt_len, steps, NUM_WORDS)
        return run_workload(self.client, f"decode-{time.monotonic_ns()}", arrivals, **sampling)

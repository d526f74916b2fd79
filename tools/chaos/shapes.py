"""The deployments under test. They are small enough for a machine with two cores."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

LIMIT_S, LINK_S = 20.0, 5.0
# NUM_LONG slow readers get answers with LONG times the usual number of tokens, so that no buffer
# can hold a whole answer.
LONG, NUM_LONG = 2, 2
STALL_S = 600.0  # seconds of a stall; longer than each time limit that can end the stall
COMMON = (
    "dtype=float32",  # with float32, an answer does not depend on other requests
    "device.kind=emulated",
    "device.emulator.strict=false",
    "kv.num_blocks=64",
    # With lazy graphs, the number of captures in a replacement group would vary.
    "graph.lazy='off'",
    "graph.rebucket_s=0",
    "recovery.restarts_per_hour=10000",
    f"timeouts.step_s={LIMIT_S:g}",
    f"timeouts.link_s={LINK_S:g}",
)
EIGHT = ("scheduler.max_num_seqs=8", "scheduler.max_waiting=8")  # 8 requests run, 8 wait


@dataclass(frozen=True)
class Shape:
    """A deployment and its load.

    Attributes:
        config: name of a file in ``configs/``.
        operator, collective: names of the operator and of the collective that faults hit.
        attention, linear: names of two operators for memory faults. The memory of their second
            operand (the keys, or a weight) becomes faulty.
        num_streams: number of requests that are sent at the same time. No two of these requests
            have the same body.
        has_files: whether copies of KV blocks are kept in files.
        npus: number of NPUs of each host if the deployment runs on several hosts.
        num_hosts: number of such hosts that the deployment needs for all its groups.
    """

    config: str
    num_groups: int
    overrides: tuple[str, ...]
    operator: str
    collective: str
    attention: str
    num_streams: int
    num_tokens: int
    vocabulary: int = 800
    prompt_tokens: int = 48
    has_files: bool = False
    linear: str = "aclnnMm"
    npus: int = 2
    num_hosts: int = 1

    def bodies(self) -> list[dict[str, Any]]:
        """Return the usual requests, and then the requests of slow readers. Every second request is
        greedy.
        """
        chance = random.Random(self.config)
        counts = [self.num_tokens] * self.num_streams + [LONG * self.num_tokens] * NUM_LONG
        return [self._body(i, count, chance) for i, count in enumerate(counts)]

    def _body(self, index: int, count: int, chance: random.Random) -> dict[str, Any]:
        prompt = [chance.randrange(70, self.vocabulary) for _ in range(self.prompt_tokens)]
        sampled = {"temperature": 1.0, "seed": index} if index % 2 else {"temperature": 0}
        return {
            "model": self.config,
            "prompt": prompt,
            "max_tokens": count,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampled,
        }


SHAPES = {
    "replicas": Shape(
        config="tiny-qwen3",
        num_groups=2,
        overrides=(
            *COMMON,
            "parallel.tp=1",
            "parallel.dp=2",
            "graph.sizes=[4,8]",
            *EIGHT,
        ),
        operator="aclnnSwiGlu",
        collective="aclnnSwiGlu",  # a group of one rank has no collective
        attention="aclnnFusedInferAttentionScoreV3",
        num_streams=8,
        num_tokens=500,
        npus=1,
        num_hosts=2,
    ),
    # With three hosts, each host has a group, and no NPU is free.
    "hosts": Shape(
        config="tiny-qwen3",
        num_groups=3,
        overrides=(
            *COMMON,
            "parallel.tp=2",
            "parallel.dp=3",
            "graph.sizes=[4,8]",
            *EIGHT,
        ),
        operator="aclnnSwiGlu",
        collective="HcclAllReduce",
        attention="aclnnFusedInferAttentionScoreV3",
        num_streams=12,
        num_tokens=500,
        num_hosts=3,
    ),
    # One group computes prompts for the other group. The files have room for about half of the
    # prompts' KV.
    "copies": Shape(
        config="tiny-qwen3",
        num_groups=2,
        overrides=(
            *COMMON,
            "parallel.tp=1",
            "parallel.dp=2",
            "parallel.prefill_groups=1",
            "parallel.prefill_from_tokens=64",
            "kv.block_size=16",
            "kv.num_blocks=512",
            "kv.host_gib=0.003",
            "graph.sizes=[4,8]",
            *EIGHT,
        ),
        operator="aclnnSwiGlu",
        collective="aclnnSwiGlu",
        attention="aclnnFusedInferAttentionScoreV3",
        num_streams=8,
        num_tokens=400,
        prompt_tokens=200,
        has_files=True,
        npus=1,
        num_hosts=2,
    ),
    "experts": Shape(
        config="tiny-deepseek",
        num_groups=1,
        overrides=(
            *COMMON,
            "graph.sizes=[8,16]",
            *EIGHT,
        ),
        operator="aclnnSwiGlu",
        collective="HcclAllReduce",
        attention="aclnnFusedInferAttentionScoreV4",
        num_streams=8,
        num_tokens=400,
        num_hosts=2,
    ),
    "streams": Shape(
        config="tiny-qwen3",
        num_groups=1,
        overrides=(
            *COMMON,
            "parallel.tp=2",
            "graph.sizes=[16,64]",
            "scheduler.max_num_seqs=64",
            "scheduler.max_waiting=64",
            "kv.num_blocks=130",  # about two blocks per stream, so that the cache is full
        ),
        operator="aclnnSwiGlu",
        collective="HcclAllReduce",
        attention="aclnnFusedInferAttentionScoreV3",
        num_streams=64,
        num_tokens=200,
    ),
    "hybrid": Shape(
        config="tiny-qwen3.5",
        num_groups=1,
        overrides=(
            *COMMON,
            "parallel.tp=2",
            "graph.sizes=[4,8]",
            *EIGHT,
        ),
        operator="aclnnSwiGlu",
        collective="HcclAllReduce",
        attention="aclnnFusedInferAttentionScoreV3",
        num_streams=8,
        num_tokens=400,
    ),
    "sparse": Shape(
        config="tiny-deepseek-v32",
        num_groups=1,
        overrides=(
            *COMMON,
            "graph.sizes=[8,16]",
            *EIGHT,
        ),
        operator="aclnnSwiGlu",
        collective="HcclAllReduce",
        attention="aclnnSparseFlashAttention",
        num_streams=8,
        num_tokens=400,
        num_hosts=2,
    ),
}

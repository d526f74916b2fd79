"""The configuration keys for the scheduler: limits of a step's size, and the choice of the requests
that run.
"""

from __future__ import annotations

from pydantic import Field

from dist_aclgraph.config.section import Section


class SchedulerConfig(Section):
    """Limits of one step, and the order of requests."""

    max_num_seqs: int = Field(
        32,
        ge=1,
        le=4096,
        description="largest number of requests that run at the same time on "
        "each data parallel rank",
    )
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        le=131072,
        description="largest number of tokens of one step on each data parallel rank, draft "
        "tokens included; longer prompts run in chunks",
    )
    long_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="largest number of tokens of one prompt in a step while other requests are "
        "ready to run; null means a quarter of max_num_batched_tokens",
    )
    steps_in_flight: int = Field(
        2,
        ge=1,
        le=2,
        description="number of steps that are decided before the first of them has run. With 2, "
        "the next step is queued on the device while a step runs; with 1, the device "
        "waits for the host between steps",
    )
    late_decisions: bool = Field(
        True,
        description="with two steps in flight, decide the next step as late as the device "
        "allows, so that requests that arrive while a step runs begin in the next step",
    )
    max_waiting: int = Field(
        1024, ge=1, description="largest number of waiting requests; more requests are refused"
    )
    prefix_cache: bool = Field(
        True, description="reuse KV blocks for prompts that begin with the same tokens"
    )

    @property
    def prompt_share(self) -> int:
        """Maximum number of tokens of one prompt in a step while other requests are ready."""
        return self.long_prompt_tokens or max(1, self.max_num_batched_tokens // 4)

"""The options of the load to play, and the requests that are drawn according to these options."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from dist_aclgraph.context.shards import Shards
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.simulate.load import Arrival, Beginnings, Poisson

DEFAULT_REQUESTS = 1000


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """The options of the load. ``trace`` is a file that contains the load. ``poisson`` is the mean
    number of requests per second of a load that is drawn at random. Exactly one of these two
    options is set.

    ``requests`` and ``seconds`` limit the load of the whole deployment. ``beginnings`` is the
    number of prefixes that drawn prompts share. If ``beginnings`` is not 0 and there are several
    groups, the result also compares routing rules. ``accepted`` is the probability that a draft is
    accepted, if all drafts before it were accepted.
    """

    trace: Path | None = None
    poisson: float | None = None
    requests: int | None = None
    seconds: float | None = None
    prompt_tokens: float = 512.0
    output_tokens: float = 128.0
    beginnings: int = 0
    beginning_tokens: int = 1024
    accepted: float | None = None
    seed: int = 0

    def check_options(self) -> None:
        """Check that the options are valid and fit together.

        Raises:
            ConfigError: the options are invalid. The message gives the reason.
        """
        if (self.trace is None) == (self.poisson is None):
            raise ConfigError("a simulation needs a load: either --trace FILE or --poisson RATE")
        if self.requests is not None and self.seconds is not None:
            raise ConfigError("--requests and --seconds both say where to end; give one of them")
        for name in ("poisson", "requests", "seconds", "prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            least = 1 if name.endswith("_tokens") else 0
            if value is not None and not (least <= value < math.inf and value > 0):
                option = name.replace("_", "-")
                raise ConfigError(f"--{option} is {value:g}; it must be positive and finite"
                                  + (", at least 1" if least else ""))  # fmt: skip
        if self.beginnings < 0 or self.beginning_tokens < 1:
            raise ConfigError(
                f"--beginnings is {self.beginnings}, --beginning-tokens {self.beginning_tokens}; "
                "there are 0 beginnings or more, of at least 1 token"
            )
        if self.beginnings and self.poisson is None:
            raise ConfigError(
                "--beginnings needs requests that are drawn: --poisson RATE; a trace has the "
                "columns shared and shared_tokens"
            )
        if self.accepted is not None and not 0 <= self.accepted <= 1:
            raise ConfigError(f"--accepted is {self.accepted:g}; it is a share, from 0 to 1")
        if self.seed < 0:
            raise ConfigError(f"--seed is {self.seed}; it must be 0 or more")


def draw_load(
    deployment: AssumedDeployment,
    options: LoadOptions,
    num_blocks: int,
    *,
    share: Fraction,
    first: int = 0,
) -> Iterator[Arrival]:
    """Draw a fraction of the load. If ``options.beginnings`` is not 0, prompts get shared prefixes.

    Args:
        share: fraction of the deployment's load that is drawn.
        first: index of the first group that gets this load; part of the random seed.

    Raises:
        ConfigError: the shared prefixes are too long for a prompt.
    """
    assert options.poisson is not None
    max_total_tokens = _max_total_tokens(deployment, num_blocks)
    own_tokens = max_total_tokens - (options.beginning_tokens if options.beginnings else 0)
    if own_tokens < 2:
        raise ConfigError(
            f"--beginning-tokens is {options.beginning_tokens}; a request has at most "
            f"{max_total_tokens} tokens in all"
        )
    ends_by_time = options.seconds is not None
    wanted = math.ceil((options.requests or DEFAULT_REQUESTS) * share)
    drawn = Poisson(
        rate=float(options.poisson * share),
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        max_total_tokens=own_tokens,
        max_requests=math.inf if ends_by_time else wanted,
        max_seconds=math.inf if options.seconds is None else options.seconds,
        seed=(options.seed, first),
    )
    if not options.beginnings:
        return iter(drawn)
    beginnings = Beginnings(options.beginnings, options.beginning_tokens)
    return beginnings.given_to(iter(drawn), (options.seed, first + 1))


def until(arrivals: Iterator[Arrival], max_seconds: float) -> Iterator[Arrival]:
    """Yield the requests that arrive in the first ``max_seconds`` seconds."""
    for arrival in arrivals:
        if arrival.arrival_s > max_seconds:
            return
        yield arrival


def _max_total_tokens(deployment: AssumedDeployment, num_blocks: int) -> int:
    """Return the maximum number of tokens of a request, which is limited by the context length and
    the cache.
    """
    tokens_per_block = Shards.from_config(deployment.config).tokens_per_block
    return min(deployment.planner.max_model_len, (num_blocks - 1) * tokens_per_block + 1)

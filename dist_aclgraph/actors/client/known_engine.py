"""The state of each engine as a client knows it, and the number of groups in each state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from dist_aclgraph.actors.client.token_log import OpenRequest
from dist_aclgraph.actors.wire.block_server import BlockSource
from dist_aclgraph.actors.wire.engine_link import EngineLink

SeenGroupState = Literal["serving", "draining", "lost"]


@dataclass(eq=False)
class KnownEngine:
    """One engine. The client's lock guards everything except the link.

    Attributes:
        name: name of the engine's group.
        is_draining: whether the engine accepts no new requests.
        added_s: when the client learned of the engine, on a monotonic clock.
        is_proven: whether the engine has run a step since the client opened the present link.
        prefill_from: the engine computes a prompt for another group if the prompt has at least this
            number of uncached tokens; 0 if the engine computes no prompts for other groups.
        blocks: the source from which other groups fetch KV of prompts; None if nothing is fetched.
        is_listed: whether the latest group list of the deployment contains the engine.
        names: maps the number of each request on this engine to the request's id.
    """

    name: str
    url: str
    open_link: Callable[[], EngineLink]
    added_s: float
    dead_because: str = ""
    is_draining: bool = False
    is_proven: bool = False
    is_listed: bool = True
    prefill_from: int = 0
    blocks: BlockSource | None = None
    requests: dict[str, OpenRequest] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    num_submitted: int = 0

    def __post_init__(self) -> None:
        self.link = self.open_link()

    @property
    def state(self) -> SeenGroupState:
        if self.dead_because:
            return "lost"
        return "draining" if self.is_draining else "serving"

    @property
    def has_drained(self) -> bool:
        """Whether the engine is draining, and runs no request of this client."""
        return self.is_draining and not self.requests


@dataclass(frozen=True)
class Capacity:
    """The lockstep groups of a deployment, counted by state.

    Attributes:
        serving: number of groups that accept requests.
        draining: number of groups that only finish their running requests.
        lost: maps the name of each dead group to the reason of its death.
        prefill: number of prefill groups that accept requests; None if no known group is a prefill
            group.
    """

    serving: int
    draining: int
    lost: dict[str, str]
    prefill: int | None = None

    @classmethod
    def of(cls, engines: Iterable[KnownEngine]) -> Capacity:
        engines = list(engines)
        states = [engine.state for engine in engines]
        lost = {engine.name: engine.dead_because for engine in engines if engine.dead_because}
        prefill = [engine.state == "serving" for engine in engines if engine.prefill_from]
        return cls(
            states.count("serving"),
            states.count("draining"),
            lost,
            sum(prefill) if prefill else None,
        )

    @property
    def total(self) -> int:
        return self.serving + self.draining + len(self.lost)

    def by_state(self) -> dict[str, int]:
        return {"serving": self.serving, "draining": self.draining, "lost": len(self.lost)}

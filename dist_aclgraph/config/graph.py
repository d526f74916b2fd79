"""The configuration keys for graphs: capture sizes, modes and the budget of streams."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from dist_aclgraph.config.section import Section

GraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]
BudgetModelName = Literal[
    "legacy-0.11",
    "legacy-0.13",
    "legacy-0.20",
    "legacy-last",
    "cann-pinned",
    "cann-software-sq",
    "calibrated",
]
# modes in which decode steps have separate graphs
DECODE_MODES = ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")

# Largest weight of a batch size in ``traffic``. With larger weights, rounding would remove small
# weights from the sum of all weights, or the sum would become infinite.
MAX_WEIGHT = 1e15


class GraphConfig(Section):
    """Which graphs are captured, and how many graphs a rank may have."""

    mode: GraphMode = Field(
        "FULL_DECODE_ONLY",
        description="kinds of graphs that are captured; "
        "NONE captures no graph and runs "
        "every step eagerly",
    )
    sizes: tuple[int, ...] | None = Field(
        None,
        description="capture sizes in tokens; the plan contains as many of these sizes as every "
        "rank can afford. Larger batches run eagerly, and graph.lazy may add sizes "
        "while the service runs. null means 1, 2, 4, then steps of 8 and 16 up to the "
        "largest batch",
    )
    mixed_sizes: tuple[int, ...] | None = Field(
        None,
        description="capture sizes for mixed batches, in mode FULL_AND_PIECEWISE, and in mode FULL "
        "with drafts",
    )
    max_tokens: int = Field(
        512,
        ge=1,
        le=131072,
        description="tokens of the largest graph. Larger batches run eagerly: their kernels take "
        "longer than their launches, so a graph would save little time",
    )
    traffic: dict[int, float] | None = Field(
        None,
        description="expected frequency of each batch size; capture sizes are chosen for these "
        "frequencies. null means that small batches are the most frequent",
    )
    mixed_traffic: dict[int, float] | None = Field(
        None,
        description="expected frequency of each size of mixed batches, in mode FULL_AND_PIECEWISE, "
        "and in mode FULL with drafts",
    )
    budget_model: BudgetModelName = Field(
        "calibrated",
        description="model that predicts how many streams a graph needs; `dist-aclgraph plan` "
        "shows the predictions",
    )
    reserve_streams: int = Field(
        0, ge=0, le=2048, description="number of streams of each rank that graphs must not use"
    )
    updates: Literal["sent", "none"] = Field(
        "sent",
        description="how a decode graph gets the lengths of a step. sent: the host updates the "
        "attention of each layer. none: each capture size has one graph for each of "
        "several KV lengths (256, 512, ... tokens), and a mask made on the device hides "
        "the keys that a request does not have; the host sends nothing, and attention "
        "reads padding",
    )
    send_ahead: bool = Field(
        True,
        description="send the attention lengths of the next step during times in which the "
        "host would only wait",
    )
    scope: Literal["cluster", "group"] = Field(
        "cluster",
        description="cluster: one graph plan for all lockstep groups; group: a "
        "separate plan for each group",
    )
    overlap_shared_experts: bool = Field(
        False,
        description="run shared experts on a separate stream, at the same time as the "
        "routed experts",
    )
    lazy: Literal["off", "decode", "on"] = Field(
        "decode",
        description="which frequent shapes outside the plan are captured: none (off), shapes of "
        "decode batches (decode), or all shapes (on)",
    )

    @field_validator("lazy", mode="before")
    @classmethod
    def _read_switch(cls, value: object) -> object:
        """Undo YAML's conversion of ``on`` and ``off`` to true and false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    lazy_capacity: int = Field(
        12,
        ge=0,
        le=1024,
        description="largest number of lazy graphs at the same time; streams and bytes are "
        "reserved for these graphs",
    )
    lazy_min_tokens: int = Field(
        4096,
        ge=1,
        description="a shape gets a lazy graph when it has cost this number of tokens, in eager "
        "steps or as padding",
    )
    lazy_retry_steps: int = Field(
        10_000,
        ge=1,
        description="number of steps after a failed capture before the same shape "
        "is captured again",
    )
    rebucket_s: float = Field(
        30.0,
        ge=0,
        description="interval in seconds at which capture sizes are chosen again for the observed "
        "traffic; 0 means never",
    )
    rebucket_gain: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="a new plan must save at least this share of the expected cost",
    )
    rebucket_min_steps: int = Field(
        256,
        ge=1,
        description="number of steps that must be observed before capture sizes are chosen again",
    )
    traffic_half_life_s: float = Field(
        600.0, gt=0, description="half-life in seconds of a step's weight in the observed traffic"
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> GraphConfig:
        for sizes in (self.sizes, self.mixed_sizes):
            if sizes is not None and (
                not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes))
            ):
                raise ValueError(
                    f"sizes {list(sizes)} must be positive token counts, each larger than the one "
                    "before"
                )
        for traffic in (self.traffic, self.mixed_traffic):
            if traffic is not None and not all(
                n >= 1 and 0 <= weight <= MAX_WEIGHT for n, weight in traffic.items()
            ):
                raise ValueError(
                    f"traffic maps positive token counts to weights from 0 to {MAX_WEIGHT:g}"
                )
        return self

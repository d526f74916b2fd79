"""All keys of the configuration, their limits, and the rules between them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import Field, JsonValue, model_validator

from dist_aclgraph.config.cluster import ClusterConfig
from dist_aclgraph.config.device import DeviceConfig
from dist_aclgraph.config.graph import DECODE_MODES, GraphConfig
from dist_aclgraph.config.kv import KVConfig
from dist_aclgraph.config.logs import LoggingConfig
from dist_aclgraph.config.parallel import ParallelConfig
from dist_aclgraph.config.recovery import RecoveryConfig
from dist_aclgraph.config.scheduler import SchedulerConfig
from dist_aclgraph.config.section import Section
from dist_aclgraph.config.serve import ServeConfig

TaskSetting = Literal["auto", "generate", "embed", "rerank"]


class SpeculativeConfig(Section):
    """Multi-token prediction."""

    num_tokens: int = Field(
        0, ge=0, le=3, description="number of draft tokens per request and step; 0 turns drafts off"
    )


class TimeoutConfig(Section):
    """Time limits of the phases, in seconds. If a limit is exceeded, the error names rank and
    phase.
    """

    place_s: float = Field(60.0, gt=0, description="limit for placing the worker actors")
    join_s: float = Field(
        120.0, gt=0, description="limit for opening devices and forming HCCL groups"
    )
    load_s: float = Field(600.0, gt=0, description="limit for loading weights")
    negotiate_s: float = Field(
        60.0, gt=0, description="limit for offers, the plan and its confirmation"
    )
    capture_s: float = Field(120.0, gt=0, description="limit for capturing one bucket")
    step_s: float = Field(
        60.0, gt=0, description="limit for one step, from sending the plan to the last reply"
    )
    stop_s: float = Field(
        10.0, gt=0, description="limit for an orderly stop; after this time workers are killed"
    )
    drain_s: float = Field(
        600.0,
        gt=0,
        description="limit for the running requests of a group that is being removed",
    )
    link_s: float = Field(
        10.0,
        gt=0,
        description="an engine, a client or a worker counts as lost after a silence of this length",
    )

    @property
    def collective_s(self) -> int:
        """Time, in seconds, for which the device waits in a collective for other ranks.

        The engine reports a rank as lost after the time limit of a step. In a collective, the other
        ranks must wait longer than this limit. Otherwise the waiting ranks would fail first, and
        the engine would report the waiting ranks as the cause.
        """
        return math.ceil(self.step_s + self.link_s)

    @property
    def watchdog_s(self) -> float:
        """Time in seconds after which torch_npu ends a process that hangs in a collective.

        This time is longer than HCCL's own limit, so that HCCL raises its error before torch_npu
        ends the process.
        """
        return self.collective_s + self.link_s


class Config(Section):
    """A whole deployment."""

    model: str = Field(
        description="directory of a Hugging Face checkpoint, or its name on a hub, such as "
        "Qwen/Qwen3-0.6B"
    )
    hub: Literal["huggingface", "modelscope"] = Field(
        "huggingface",
        description="hub of a model that is given by name; modelscope needs the extra of that name",
    )
    revision: str | None = Field(
        None, description="branch, tag or commit on the hub; null means the main branch"
    )
    model_overrides: dict[str, JsonValue] = Field(
        {},
        description="values that replace values of the checkpoint's config.json, such as "
        "{rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}}",
    )
    chat_template: str | None = Field(
        None,
        description="file of a Jinja template that replaces the chat templates of the checkpoint",
    )
    served_model_name: str | None = Field(
        None,
        description="name of the model in the API; null means the hub name, or the name of the "
        "directory",
    )
    served_model_aliases: tuple[str, ...] = Field(
        (), description="additional names of the model in the API"
    )
    task: TaskSetting = Field(
        "auto",
        description="purpose of the model. generate: texts and chats. embed: embeddings, by the "
        "last token of a text. rerank: relevance of documents for a query, by the "
        "prompt of Qwen3-Reranker. auto means embed if the checkpoint describes a "
        "pooling for sentence-transformers, and generate otherwise",
    )
    dtype: Literal["bfloat16", "float16", "float32"] = Field(
        "bfloat16", description="type of weights, activations and KV cache"
    )
    quantization: Literal["w8a8", "compressed-tensors", "fp8", "mxfp4"] | None = Field(
        None,
        description="w8a8 converts the matrices of layers to int8 while loading; null keeps the "
        "checkpoint's weights, int8 weights included. compressed-tensors, fp8 and mxfp4 are the "
        "same as null, but refuse a checkpoint with another quant_method",
    )
    weights: Literal["checkpoint", "dummy"] = Field(
        "checkpoint",
        description="checkpoint reads the model's files. dummy reads no files, and fills weights "
        "of the model's shapes with zeros: steps can be measured, but answers are "
        "meaningless",
    )
    max_model_len: int | None = Field(
        None,
        ge=2,
        description="largest number of tokens of a prompt and its output together; null means the "
        "model's limit, or the capacity of the KV cache if that is smaller",
    )
    sampling_defaults: Literal["model", "none"] = Field(
        "model",
        description="model: temperature, top_k, top_p, min_p, repetition_penalty and "
        "max_new_tokens of the checkpoint's generation_config.json are the defaults "
        "of requests; none: the defaults are temperature 1 and no limit on the choice "
        "of tokens",
    )
    seed: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="from this number, each replica that serves HTTP draws seeds for requests "
        "without a seed. A replica draws the same seeds after every start, and "
        "different replicas draw different seeds. With null, seeds also differ "
        "between starts; `LLM` treats null as 0",
    )
    parallel: ParallelConfig = ParallelConfig()
    graph: GraphConfig = GraphConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    kv: KVConfig = KVConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    device: DeviceConfig = DeviceConfig()
    cluster: ClusterConfig = ClusterConfig()
    serve: ServeConfig = ServeConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    logging: LoggingConfig = LoggingConfig()
    profile: bool = Field(False, description="measure the host time of each stage of a step")

    @property
    def name(self) -> str:
        return self.served_model_name or Path(self.model).name

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model in the API. Replies contain the first name."""
        return (self.name, *self.served_model_aliases)

    @property
    def makes_int8(self) -> bool:
        """Whether weights are converted to int8 while they are loaded."""
        return self.quantization == "w8a8"

    @property
    def has_decode_graphs(self) -> bool:
        """Whether decode batches have separate graphs. If drafts are configured, graphs of decode
        batches propose drafts; graphs of mixed batches do not.
        """
        mode = self.graph.mode
        return mode in DECODE_MODES or (mode == "FULL" and self.speculative.num_tokens > 0)

    @property
    def shares_prefixes(self) -> bool:
        """Return whether a request may use KV blocks that another request has computed."""
        return self.scheduler.prefix_cache and not self.recovery.exact

    @property
    def fetches_by_hixl(self) -> bool:
        """Whether workers fetch copies of KV blocks from other nodes over HIXL."""
        return self.kv.transport == "hixl" and self.parallel.prefill_groups > 0

    @property
    def sends_files(self) -> bool:
        """Whether groups send copies of KV blocks to other groups, or to other services."""
        return self.parallel.prefill_groups > 0 or self.kv.peers_key_file is not None

    @model_validator(mode="after")
    def _check_prefix_cache(self) -> Config:
        why = "recovery.exact=true" if self.recovery.exact else "scheduler.prefix_cache=false"
        if self.kv.events.publish and not self.shares_prefixes:
            raise ValueError(
                f"kv.events.publish reports the blocks of the prefix cache, which {why} turns off: "
                "remove one of them"
            )
        if self.kv.keeps_copies and not self.shares_prefixes:
            raise ValueError(
                f"kv.host_gib and kv.disk keep blocks for the prefix cache, which {why} turns off: "
                "remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_prefill_groups(self) -> Config:
        count, parallel = self.parallel.prefill_groups, self.parallel
        if count == 0:
            return self
        if not self.kv.keeps_copies:
            raise ValueError(
                f"parallel.prefill_groups is {count}, but the other groups can read KV of prompts "
                "only from kv.host_gib or kv.disk, and neither is set: set one of them"
            )
        num_groups = parallel.num_lockstep_groups
        if count >= num_groups:
            raise ValueError(
                f"parallel.prefill_groups is {count}; the deployment has {num_groups} lockstep "
                "groups, and at least one group must generate answers: lower "
                "parallel.prefill_groups, or raise parallel.dp"
            )
        return self

    @model_validator(mode="after")
    def _check_interleave(self) -> Config:
        interleave, block_size = self.parallel.cp_interleave, self.kv.block_size
        if block_size % interleave:
            raise ValueError(
                f"parallel.cp_interleave is {interleave}; it must divide kv.block_size "
                f"({block_size})"
            )
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> Config:
        graph, limits, query_len = self.graph, self.scheduler, self.speculative.num_tokens + 1
        decodes = self.has_decode_graphs
        for key in ("mixed_sizes", "mixed_traffic"):
            has_both = decodes and graph.mode != "FULL_DECODE_ONLY"
            if getattr(graph, key) is not None and not has_both:
                raise ValueError(
                    f"graph.{key} has no effect in mode {graph.mode}: set graph.mode to "
                    f"FULL_AND_PIECEWISE, or use graph.{key.removeprefix('mixed_')}"
                )
        largest = limits.max_num_seqs * query_len if decodes else limits.max_num_batched_tokens
        self._check_each_size("sizes", graph.sizes, largest, query_len if decodes else 1)
        largest = limits.max_num_batched_tokens
        self._check_each_size("mixed_sizes", graph.mixed_sizes, largest, 1)
        return self

    def _check_each_size(
        self, key: str, sizes: tuple[int, ...] | None, largest: int, query_len: int
    ) -> None:
        for size in sizes or ():
            if size > self.graph.max_tokens:
                raise ValueError(
                    f"graph.{key} has {size}; graph.max_tokens is {self.graph.max_tokens}: "
                    "remove the size, or raise graph.max_tokens"
                )
            if size > largest:
                raise ValueError(
                    f"graph.{key} has {size}; with the keys of scheduler and speculative, "
                    f"no batch has more than {largest} tokens: remove the size, or raise these keys"
                )
            if size % query_len:
                raise ValueError(
                    f"graph.{key} has {size}; with drafts, decode batches have a multiple of "
                    f"{query_len} tokens"
                )

    @model_validator(mode="after")
    def _check_exact(self) -> Config:
        graph, rows, drafts = self.graph, self.scheduler.max_num_seqs, self.speculative.num_tokens
        if not self.recovery.exact:
            return self
        if drafts:
            raise ValueError(
                f"recovery.exact is not possible with speculative.num_tokens ({drafts}): the "
                "tokens that a step computes together depend on the number of accepted drafts; set "
                "one of these keys to its default"
            )
        if graph.mode != "FULL_DECODE_ONLY":
            raise ValueError(
                f"recovery.exact is not possible with graph.mode {graph.mode}: all decode steps "
                "must replay one graph, and prompts must run without a graph; set FULL_DECODE_ONLY"
            )
        if graph.sizes not in (None, (rows,)) or rows > graph.max_tokens:
            sizes = None if graph.sizes is None else list(graph.sizes)
            raise ValueError(
                f"recovery.exact needs one graph for scheduler.max_num_seqs ({rows}) requests; "
                f"graph.sizes is {sizes} and graph.max_tokens {graph.max_tokens}: leave out the "
                f"sizes, and set graph.max_tokens to {rows} or more"
            )
        return self

    @model_validator(mode="after")
    def _check_tokens(self) -> Config:
        # The limit of tokens in a step must be large enough for all running requests. Otherwise the
        # newest requests would never run.
        limits, drafts = self.scheduler, self.speculative.num_tokens
        if limits.max_num_batched_tokens < limits.max_num_seqs * (drafts + 1):
            with_drafts = f" x (1 + speculative.num_tokens {drafts})" if drafts else ""
            raise ValueError(
                f"scheduler.max_num_batched_tokens ({limits.max_num_batched_tokens}) must be at "
                f"least max_num_seqs ({limits.max_num_seqs}){with_drafts}"
            )
        return self

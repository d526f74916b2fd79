"""Facts of a model of any architecture, for planning. The facts are read from config.json and from
the headers of the weight files.

A ``ModelSpec`` adds the fields that only supported decoders have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os.path import isfile
from pathlib import Path
from typing import Any

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError, ModelError
from dist_aclgraph.shapes.heads import (
    check_shards,
    heads_per_rank,
    kv_heads_per_rank,
)
from dist_aclgraph.shapes.indexer_spec import IndexerSpec, read_indexer_spec
from dist_aclgraph.shapes.int4_formats import Int4Formats, read_int4_formats
from dist_aclgraph.shapes.int8_latents import check_kv_dtype
from dist_aclgraph.shapes.linear_spec import LinearSpec, read_linear_spec
from dist_aclgraph.shapes.model_config import (
    MAX_EXPERTS,
    MAX_HEADS,
    MAX_LAYERS,
    ModelConfig,
    read_model_config,
)
from dist_aclgraph.shapes.rope_spec import read_context_lengths
from dist_aclgraph.shapes.sliding_window import SlidingWindow, read_sliding_window
from dist_aclgraph.shapes.weight_files import read_header

NORMS_OF_ALL_HEADS = (
    "MiniMaxM2ForCausalLM",
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    "OlmoeForCausalLM",
)
WITH_SINKS = ("GptOssForCausalLM",)
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True)
class ExpertFacts:
    """The experts of a model's layers.

    Attributes:
        top_k: number of routed experts that each token uses.
        num_shared: number of shared experts, which run for every token.
    """

    num_experts: int
    top_k: int
    num_shared: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The shape of a model.

    Attributes:
        context_len: length of the longest request that the model supports, in tokens.
        usual_len: default of ``max_model_len``; None means ``context_len``.
        num_draft_layers: number of next-token modules, which propose drafts.
        latent_size: number of elements that latent attention caches per token and layer; 0 if the
            model has no latent attention.
        latent_head_dim: width of a query head of latent attention, with its rotated part.
        linear: layers of linear attention; None if all layers keep keys.
        indexer: the indexer of sparse attention; None if queries attend to all keys that they see.
        holds_int8: whether the safetensors files contain int8 matrices.
        holds_int4: whether the checkpoint has matrices of four bits.
        quant_method: name of the format of quantised weights in config.json; "" if there is no
            name.
        vocab_size: number of rows of the embedding; all token ids are smaller.
        qk_norm_spans_heads: whether one RMS norm spans all heads of q, and another norm spans all
            heads of k. If true, ranks with different heads exchange sums. If false, the norms of q
            and k normalise each head separately, or the model has no such norms.
        has_sinks: whether each attention head has a sink: a learned logit that is part of the
            softmax's sum, but belongs to no key and no value.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    window: SlidingWindow | None = None
    usual_len: int | None = None
    num_draft_layers: int = 0
    hidden_size: int = 0
    experts: ExpertFacts | None = None
    latent_size: int = 0
    latent_head_dim: int = 0
    linear: LinearSpec | None = None
    indexer: IndexerSpec | None = None
    is_encoder_decoder: bool = False
    holds_int8: bool = False
    holds_int4: bool = False
    quant_method: str = ""
    vocab_size: int = 0
    qk_norm_spans_heads: bool = False
    has_sinks: bool = False

    def max_model_len(self, config: Config) -> int:
        """Return the length of the longest request that a deployment may have."""
        return config.max_model_len or self.usual_len or self.context_len

    def window_within(self, max_len: int) -> SlidingWindow | None:
        """Return the window if it hides keys in a request of ``max_len`` tokens; otherwise None."""
        return self.window if self.window and self.window.num_keys < max_len else None

    @property
    def moe(self) -> bool:
        return self.experts is not None

    @property
    def has_shared_experts(self) -> bool:
        return self.experts is not None and self.experts.num_shared > 0

    @property
    def num_paged_layers(self) -> int:
        """Number of layers that keep keys in blocks, not counting next-token modules."""
        return self.num_layers - (len(self.linear.layers) if self.linear else 0)

    @property
    def mla(self) -> bool:
        """Whether the model has multi-head latent attention."""
        return self.latent_size > 0


def check_model(config: Config, facts: ModelFacts) -> None:
    """Check that a model has the features that a deployment needs.

    Raises:
        ConfigError: the model does not support the value of one of these keys: ``parallel.ep``,
            ``parallel.tp``, ``parallel.dcp``, ``parallel.pcp``, ``speculative.num_tokens``,
            ``kv.dtype``, ``kv.block_size``, ``dtype`` or ``quantization``. The message has the
            reason.
    """
    if not config.makes_int8 and config.quantization not in (None, facts.quant_method):
        raise ConfigError(
            f"quantization is {config.quantization}; the quant_method of the checkpoint is "
            f"{facts.quant_method or 'null':.80}: leave quantization out"
        )
    if config.dtype == "float32" and (config.makes_int8 or facts.holds_int8 or facts.holds_int4):
        held = "int4" if facts.holds_int4 else "int8"
        whose = "quantization is w8a8" if config.makes_int8 else f"the checkpoint holds {held}"
        raise ConfigError(
            f"dtype is float32 and {whose}; products of quantised weights give float16 or "
            "bfloat16 only: set dtype=bfloat16"
        )
    heads_per_rank(
        facts.num_heads,
        config.parallel.tp,
        is_latent=facts.mla,
        pads_heads=facts.indexer is None,
    )
    if not facts.mla:
        kv_heads_per_rank(facts.num_kv_heads, config.parallel.tp)
    check_shards(
        facts.num_heads,
        facts.num_kv_heads,
        config.parallel.tp,
        num_shards=config.parallel.dcp,
        num_prompt_ranks=config.parallel.pcp,
        is_latent=facts.mla,
    )
    check_kv_dtype(config, is_latent=facts.mla)
    if facts.indexer is not None:
        facts.indexer.check(config.kv.block_size, config.parallel.dcp)
    window, parallel = facts.window_within(facts.max_model_len(config)), config.parallel
    if facts.linear is not None:
        facts.linear.check(config.parallel, config.speculative.num_tokens)
    if window and parallel.dcp * parallel.pcp > 1:
        raise ConfigError(
            f"parallel.dcp is {parallel.dcp} and parallel.pcp {parallel.pcp}; contexts of layers "
            f"with a sliding window cannot be shared: set both to 1, or max_model_len to "
            f"{window.num_keys} at most"
        )
    if config.parallel.ep > 1 and not facts.moe:
        raise ConfigError(
            f"parallel.ep is {config.parallel.ep}; {facts.architecture} has no experts to spread: "
            "set parallel.ep=1"
        )
    check_drafts(config, facts)


def check_drafts(config: Config, facts: ModelFacts) -> None:
    """Check that a model has the next-token modules that a deployment needs.

    Raises:
        ConfigError: the model has no such modules.
    """
    if config.speculative.num_tokens and not facts.num_draft_layers:
        raise ConfigError(
            f"speculative.num_tokens is {config.speculative.num_tokens}; {facts.architecture} has "
            "no next-token modules to draft with: set speculative.num_tokens=0"
        )


def read_model_facts(
    directory: str | Path, overrides: Mapping[str, Any] | None = None
) -> ModelFacts:
    """Read the facts of a checkpoint of any architecture; see ``read_model_config``.

    Raises:
        ConfigError: there is no such directory.
        ModelError: its config.json is missing, lacks a key, or has an impossible value.
    """
    return facts_of(read_model_config(directory, overrides))


def facts_of(config: ModelConfig) -> ModelFacts:
    """Return the facts of a checkpoint; see ``read_model_facts``."""
    # Links without a target are ignored here, because a plan needs no weights.
    # ``check_weight_files`` refuses such links.
    files = sorted(filter(isfile, config.directory.glob("*.safetensors")))
    int4 = read_int4_formats(config)
    num_heads = config.integer("num_attention_heads", most=MAX_HEADS)
    hidden_size = config.integer("hidden_size")
    context = read_context_lengths(config)
    return ModelFacts(
        architecture=config.architecture,
        num_layers=config.integer("num_hidden_layers", most=MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads, most=MAX_HEADS),
        head_dim=config.integer("head_dim", max(1, hidden_size // num_heads)),
        context_len=context.longest,
        usual_len=context.usual,
        window=read_sliding_window(config),
        num_draft_layers=config.num_draft_layers,
        latent_size=_latent_size(config),
        latent_head_dim=_latent_head_dim(config),
        linear=read_linear_spec(config),
        indexer=read_indexer_spec(config),
        is_encoder_decoder=config.flag("is_encoder_decoder", False),
        hidden_size=hidden_size,
        experts=_experts(config),
        holds_int8=any(_has_int8(file, int4) for file in files),
        holds_int4=bool(int4),
        quant_method=(config.part("quantization_config") or config.empty_part()).text(
            "quant_method", ""
        ),
        vocab_size=config.integer("vocab_size", 0, least=0),
        qk_norm_spans_heads=config.architecture in NORMS_OF_ALL_HEADS,
        has_sinks=config.architecture in WITH_SINKS,
    )


def _has_int8(file: Path, int4: Int4Formats) -> bool:
    """Return whether a file contains an int8 tensor that does not store values of four bits.

    Broken files are ignored here, because ``check_weight_files`` refuses them.
    """
    try:
        tensors = read_header(file).items()
    except ModelError:
        return False
    return any(
        isinstance(tensor, dict) and tensor.get("dtype") == "I8" and int4.of(name) is None
        for name, tensor in tensors
    )


def _experts(config: ModelConfig) -> ExpertFacts | None:
    key = next((key for key in EXPERT_KEYS if config.has(key)), None)
    if key is None:
        return None
    return ExpertFacts(
        num_experts=config.integer(key, most=MAX_EXPERTS),
        top_k=config.same_integer("num_experts_per_tok", most=MAX_EXPERTS),
        num_shared=_num_shared(config),
    )


def _num_shared(config: ModelConfig) -> int:
    if config.has("shared_expert_intermediate_size"):
        return 1
    return config.same_integer("n_shared_experts", 0, least=0, most=MAX_EXPERTS)


def _latent_size(config: ModelConfig) -> int:
    if not config.has("kv_lora_rank"):
        return 0
    return config.integer("kv_lora_rank") + config.integer("qk_rope_head_dim")


def _latent_head_dim(config: ModelConfig) -> int:
    if not config.has("kv_lora_rank"):
        return 0
    plain = config.integer("qk_nope_head_dim", 0, least=0)
    return plain + config.integer("qk_rope_head_dim")

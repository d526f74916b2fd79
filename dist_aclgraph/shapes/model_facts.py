"""What planning must know of a model: read from the checkpoint's config.json, without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_LATENT_HEADS = 128  # of a rank, and a power of two: the limits of latent attention's operator
EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, kw_only=True)
class ExpertFacts:
    """The experts of a model's layers.

    Attributes:
        top_k: experts of a token, shared ones not counted.
        num_shared: experts that every token visits.
    """

    num_experts: int
    top_k: int
    num_shared: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """The shape of a model.

    Attributes:
        max_model_len: longest context that the checkpoint declares.
        num_draft_layers: next-token modules, which propose drafts.
        latent_size: elements that latent attention keeps of a token in each layer, 0 without it.
        weight_bytes: size of its safetensors files, 0 where there are none.
        holds_int8: whether these have matrices in int8.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    num_draft_layers: int = 0
    hidden_size: int = 0
    experts: ExpertFacts | None = None
    latent_size: int = 0
    is_encoder_decoder: bool = False
    weight_bytes: int = 0
    holds_int8: bool = False

    @property
    def moe(self) -> bool:
        return self.experts is not None

    @property
    def has_shared_experts(self) -> bool:
        return self.experts is not None and self.experts.num_shared > 0

    @property
    def mla(self) -> bool:
        """Whether the model has multi-head latent attention."""
        return self.latent_size > 0


def check_model(config: Config, facts: ModelFacts) -> None:
    """Check what a deployment wants of its model.

    Raises:
        ConfigError: the model has not what ``parallel.ep`` or ``speculative.num_tokens`` need, or
            its heads cannot be split over ``parallel.tp``, or int8 matrices meet float32.
    """
    if config.dtype == "float32" and (config.quantization or facts.holds_int8):
        whose = "quantization is w8a8" if config.quantization else "the checkpoint holds int8"
        raise ConfigError(
            f"dtype is float32 and {whose}; products of int8 weights give float16 or bfloat16 "
            "only: set dtype=bfloat16"
        )
    heads_per_rank(facts.num_heads, config.parallel.tp, is_latent=facts.mla)
    if config.parallel.ep > 1 and not facts.moe:
        raise ConfigError(
            f"parallel.ep is {config.parallel.ep}; {facts.architecture} has no experts to spread: "
            "set parallel.ep=1"
        )
    if config.speculative.num_tokens and not facts.num_draft_layers:
        raise ConfigError(
            f"speculative.num_tokens is {config.speculative.num_tokens}; {facts.architecture} has "
            "no next-token modules to draft with: set speculative.num_tokens=0"
        )


def heads_per_rank(num_heads: int, tp: int, *, is_latent: bool) -> int:
    """Return how many attention heads each of ``tp`` ranks has.

    Raises:
        ConfigError: they cannot be divided, or into numbers that latent attention does not take.
    """
    count, rest = divmod(num_heads, tp)
    if is_latent and (rest or count > MAX_LATENT_HEADS or count & (count - 1)):
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads into "
            f"powers of two up to {MAX_LATENT_HEADS}, the numbers of heads that latent attention "
            "can have on a rank"
        )
    if rest:
        raise ConfigError(
            f"parallel.tp is {tp}: it must divide the model's {num_heads} attention heads"
        )
    return count


def read_model_facts(directory: str | Path) -> ModelFacts:
    """Read the facts of a checkpoint.

    Raises:
        ConfigError: the directory or its config.json is missing, or lacks a key.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(
            f"model is {str(directory)!r}: no such directory; give the path of a Hugging Face "
            "checkpoint (a folder with config.json)"
        )
    path = directory / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}; is it a checkpoint?") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not JSON: {e}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold an object, not {type(raw).__name__}")
    text = raw.get("text_config")
    shape: dict[str, Any] = {**raw, **text} if isinstance(text, dict) else raw
    num_heads = _integer(shape, "num_attention_heads", path)
    return ModelFacts(
        architecture=next(iter(raw.get("architectures") or ["unknown"])),
        num_layers=_integer(shape, "num_hidden_layers", path),
        num_heads=num_heads,
        num_kv_heads=int(shape.get("num_key_value_heads") or num_heads),
        head_size=int(shape.get("head_dim") or _integer(shape, "hidden_size", path) // num_heads),
        max_model_len=int(shape.get("max_position_embeddings") or 2048),
        num_draft_layers=int(
            shape.get("num_nextn_predict_layers", shape.get("num_mtp_layers")) or 0
        ),
        latent_size=_latent_size(shape, path),
        is_encoder_decoder=bool(raw.get("is_encoder_decoder")),
        hidden_size=_integer(shape, "hidden_size", path),
        experts=_experts(shape, path),
        weight_bytes=sum(file.stat().st_size for file in directory.glob("*.safetensors")),
        holds_int8=any(map(_has_int8, sorted(directory.glob("*.safetensors")))),
    )


def _has_int8(file: Path) -> bool:
    """Whether the header of a safetensors file names an int8 tensor; broken files fail to load."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = stream.read(min(size, MAX_HEADER_BYTES))
    return b'"I8"' in header


def _experts(shape: dict[str, Any], path: Path) -> ExpertFacts | None:
    num_experts = next((int(shape[key]) for key in EXPERT_KEYS if shape.get(key)), 0)
    if not num_experts:
        return None
    return ExpertFacts(
        num_experts=num_experts,
        top_k=_integer(shape, "num_experts_per_tok", path),
        num_shared=int(shape.get("n_shared_experts") or 0),
    )


def _latent_size(shape: dict[str, Any], path: Path) -> int:
    if not shape.get("kv_lora_rank"):
        return 0
    return _integer(shape, "kv_lora_rank", path) + _integer(shape, "qk_rope_head_dim", path)


def _integer(shape: dict[str, Any], key: str, path: Path) -> int:
    value = shape.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {key} is {value!r}; it must be a positive integer")
    return value

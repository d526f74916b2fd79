"""Checkpoints with random weights, of a given shape, in Hugging Face's format: for benches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file

Sizes = dict[str, tuple[int, ...]]  # of tensors, by name


class Model(Protocol):
    """What a checkpoint is written of."""

    @property
    def name(self) -> str: ...

    def config(self) -> dict[str, Any]:
        """Return config.json, without the type of the weights."""

    def sizes(self) -> Sizes:
        """Return the tensors: matrices are [outputs, inputs], vectors belong to norms."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen3 decoder."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int = 8192
    head_dim: int = 64
    max_len: int = 1024

    @property
    def name(self) -> str:
        return f"qwen3-h{self.hidden}-l{self.layers}-v{self.vocab}"

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            **_decoder_config(self),
        }

    def sizes(self) -> Sizes:
        hidden, head = self.hidden, self.head_dim
        attention = {
            "q_proj": (self.heads * head, hidden),
            "k_proj": (self.kv_heads * head, hidden),
            "v_proj": (self.kv_heads * head, hidden),
            "o_proj": (hidden, self.heads * head),
            "q_norm": (head,),
            "k_norm": (head,),
        }
        return _decoder_sizes(self, attention)


@dataclass(frozen=True, kw_only=True)
class LatentShape:
    """A DeepSeek V2 decoder without experts: latent attention, whose operators know one head."""

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int
    max_len: int

    LATENT = 512
    ROPE = 64
    HEAD = 128  # without rotation, and of values

    @property
    def name(self) -> str:
        return f"deepseek-h{self.hidden}-l{self.layers}-v{self.vocab}"

    def config(self) -> dict[str, Any]:
        return {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.LATENT,
            "qk_nope_head_dim": self.HEAD,
            "qk_rope_head_dim": self.ROPE,
            "v_head_dim": self.HEAD,
            **_decoder_config(self),
        }

    def sizes(self) -> Sizes:
        hidden, head = self.hidden, self.HEAD
        attention = {
            "q_proj": (self.heads * (head + self.ROPE), hidden),
            "kv_a_proj_with_mqa": (self.LATENT + self.ROPE, hidden),
            "kv_a_layernorm": (self.LATENT,),
            "kv_b_proj": (self.heads * 2 * head, self.LATENT),
            "o_proj": (hidden, self.heads * head),
        }
        return _decoder_sizes(self, attention)


def write_checkpoint(shape: Model, directory: Path, dtype: torch.dtype) -> Path:
    """Write config.json and model.safetensors with seeded random weights; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {**shape.config(), "torch_dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size, dtype=dtype)
        if len(size) == 1
        else (torch.randn(size, generator=generator) * size[1] ** -0.5).to(dtype)
        for name, size in shape.sizes().items()
    }
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})
    return directory


def _decoder_config(shape: Shape | LatentShape) -> dict[str, Any]:
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.max_len,
        "tie_word_embeddings": False,
    }


def _decoder_sizes(shape: Shape | LatentShape, attention: Sizes) -> Sizes:
    hidden = shape.hidden
    sizes: Sizes = {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "lm_head.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
    }
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        sizes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            **{f"{layer}.self_attn.{name}.weight": size for name, size in attention.items()},
            f"{layer}.mlp.gate_proj.weight": (shape.ffn, hidden),
            f"{layer}.mlp.up_proj.weight": (shape.ffn, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, shape.ffn),
        }
    return sizes

"""Writes checkpoints of a given shape with random weights, in Hugging Face's format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file

Sizes = dict[str, tuple[int, ...]]  # shape of each tensor, by the tensor's name


@dataclass(frozen=True, kw_only=True)
class Decoder(ABC):
    """The shape of a dense decoder."""

    FAMILY: ClassVar[str]
    ARCHITECTURE: ClassVar[str]

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocab: int = 8192
    max_len: int = 1024

    @property
    def name(self) -> str:
        return f"{self.FAMILY}-h{self.hidden}-l{self.layers}-v{self.vocab}"

    @abstractmethod
    def attention_config(self) -> dict[str, Any]:
        """Return the keys of config.json that describe attention, except the number of heads."""

    @abstractmethod
    def attention_sizes(self) -> Sizes:
        """Return the shapes of the attention weights of one layer."""

    def config(self) -> dict[str, Any]:
        """Return the content of config.json, without the weights' data type."""
        return {
            "architectures": [self.ARCHITECTURE],
            "model_type": self.FAMILY,
            **self.attention_config(),
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": self.max_len,
            "tie_word_embeddings": False,
        }

    def sizes(self) -> Sizes:
        """Return the shapes of all weights.

        Matrices are [outputs, inputs]. All vectors are weights of norms.
        """
        hidden = self.hidden
        sizes: Sizes = {
            "model.embed_tokens.weight": (self.vocab, hidden),
            "lm_head.weight": (self.vocab, hidden),
            "model.norm.weight": (hidden,),
        }
        attention = self.attention_sizes()
        for index in range(self.layers):
            layer = f"model.layers.{index}"
            sizes |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                **{f"{layer}.self_attn.{name}.weight": size for name, size in attention.items()},
                f"{layer}.mlp.gate_proj.weight": (self.ffn, hidden),
                f"{layer}.mlp.up_proj.weight": (self.ffn, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, self.ffn),
            }
        return sizes


@dataclass(frozen=True, kw_only=True)
class Shape(Decoder):
    """A Qwen3 decoder."""

    FAMILY = "qwen3"
    ARCHITECTURE = "Qwen3ForCausalLM"

    kv_heads: int
    head_dim: int = 64

    def attention_config(self) -> dict[str, Any]:
        return {"num_key_value_heads": self.kv_heads, "head_dim": self.head_dim}

    def attention_sizes(self) -> Sizes:
        hidden, head = self.hidden, self.head_dim
        return {
            "q_proj": (self.heads * head, hidden),
            "k_proj": (self.kv_heads * head, hidden),
            "v_proj": (self.kv_heads * head, hidden),
            "o_proj": (hidden, self.heads * head),
            "q_norm": (head,),
            "k_norm": (head,),
        }


@dataclass(frozen=True, kw_only=True)
class LatentShape(Decoder):
    """A DeepSeek V2 decoder without experts, with the head size that NPU operators require."""

    FAMILY = "deepseek_v2"
    ARCHITECTURE = "DeepseekV2ForCausalLM"
    LATENT = 512
    ROPE = 64
    HEAD = 128  # head size of values, and of keys without their rotary part

    def attention_config(self) -> dict[str, Any]:
        return {
            "num_key_value_heads": self.heads,
            "q_lora_rank": None,
            "kv_lora_rank": self.LATENT,
            "qk_nope_head_dim": self.HEAD,
            "qk_rope_head_dim": self.ROPE,
            "v_head_dim": self.HEAD,
        }

    def attention_sizes(self) -> Sizes:
        hidden, head = self.hidden, self.HEAD
        return {
            "q_proj": (self.heads * (head + self.ROPE), hidden),
            "kv_a_proj_with_mqa": (self.LATENT + self.ROPE, hidden),
            "kv_a_layernorm": (self.LATENT,),
            "kv_b_proj": (self.heads * 2 * head, self.LATENT),
            "o_proj": (hidden, self.heads * head),
        }


def write_checkpoint(
    shape: Decoder,
    directory: Path,
    dtype: torch.dtype = torch.bfloat16,
    zeros: Collection[str] = (),
) -> Path:
    """Write config.json and model.safetensors with random weights of a fixed seed. Return the
    directory.

    Args:
        zeros: names of matrices that contain zeros. If the output head contains zeros, each greedy
            token is 0.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = {**shape.config(), "torch_dtype": str(dtype).removeprefix("torch.")}
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.ones(size, dtype=dtype)
        if len(size) == 1
        else (torch.randn(size, generator=generator) * size[1] ** -0.5).to(dtype)
        * (name not in zeros)
        for name, size in shape.sizes().items()
    }
    save_file(tensors, str(directory / "model.safetensors"), {"format": "pt"})
    return directory

"""Checkpoints with random weights, of a given shape, in Hugging Face's format: for benches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


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


def write_checkpoint(shape: Shape, directory: Path, dtype: torch.dtype) -> Path:
    """Write config.json and model.safetensors with seeded random weights; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": shape.max_len,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    save_file(_weights(shape, dtype), str(directory / "model.safetensors"), {"format": "pt"})
    return directory


def _weights(shape: Shape, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(out: int, inner: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(out, inner, generator=generator) * inner**-0.5
        return values.to(dtype)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=dtype)

    hidden, head = shape.hidden, shape.head_dim
    tensors = {
        "model.embed_tokens.weight": matrix(shape.vocab, hidden),
        "lm_head.weight": matrix(shape.vocab, hidden),
        "model.norm.weight": ones(hidden),
    }
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": ones(hidden),
            f"{layer}.post_attention_layernorm.weight": ones(hidden),
            f"{layer}.self_attn.q_proj.weight": matrix(shape.heads * head, hidden),
            f"{layer}.self_attn.k_proj.weight": matrix(shape.kv_heads * head, hidden),
            f"{layer}.self_attn.v_proj.weight": matrix(shape.kv_heads * head, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, shape.heads * head),
            f"{layer}.self_attn.q_norm.weight": ones(head),
            f"{layer}.self_attn.k_norm.weight": ones(head),
            f"{layer}.mlp.gate_proj.weight": matrix(shape.ffn, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(shape.ffn, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, shape.ffn),
        }
    return tensors

"""Makes models/tiny-qwen3.5: a Qwen3.5 checkpoint of about a million parameters that can talk a
little. Three of its four layers have linear attention.

The script uses a seed and no network; see ``tiny_chat.py``. With ``--evaluate`` it only measures
the existing checkpoint.
"""

from __future__ import annotations

from typing import Any

import make_tiny_qwen3  # before transformers, because it keeps torch from loading torch_npu
import torch
from torch import Tensor
from torch.nn.functional import normalize
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5 import modeling_qwen3_5


def make_config(vocab_size: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        architectures=["Qwen3_5ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return what ``torch_chunk_gated_delta_rule`` of transformers returns for a request without a
    state. One triangular system describes all tokens, which is several times faster on a CPU.

    Args:
        query, key, value: [rows, length, heads, dim]. g, beta: [rows, length, heads].
    """
    q, k, v, g, beta = (x.transpose(1, 2).float() for x in (query, key, value, g, beta))
    q, k = normalize(q, dim=-1) * q.shape[-1] ** -0.5, normalize(k, dim=-1)
    sums, beta = g.cumsum(-1)[..., None], beta[..., None]
    is_later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    decay = (sums - sums.mT).masked_fill(is_later, -torch.inf).exp()
    system = ((k * beta) @ k.mT * decay).tril(-1)
    changes = torch.linalg.solve_triangular(system, v * beta, upper=False, unitriangular=True)
    out = (q @ k.mT * decay) @ changes
    state = (k * (sums[:, :, -1:] - sums).exp()).mT @ changes
    return out.transpose(1, 2).to(query.dtype), state


def main() -> None:
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    make_tiny_qwen3.make(
        __doc__, "tiny-qwen3.5", lambda size: Qwen3_5ForCausalLM(make_config(size))
    )


if __name__ == "__main__":
    main()

"""Makes models/tiny-qwen3.5: a Qwen3.5 checkpoint of about a million parameters that can talk a
little. Three of its four layers have linear attention.

The script uses a seed and no network; see ``tiny_chat.py``. With ``--evaluate`` it only measures
the existing checkpoint.
"""

from __future__ import annotations

import make_tiny_qwen3  # before transformers, because it keeps torch from loading torch_npu
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig


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


def main() -> None:
    make_tiny_qwen3.make(
        __doc__, "tiny-qwen3.5", lambda size: Qwen3_5ForCausalLM(make_config(size))
    )


if __name__ == "__main__":
    main()

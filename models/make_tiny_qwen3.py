"""Makes models/tiny-qwen3: a Qwen3 checkpoint of about a million parameters that can talk a little.

The script uses a seed and no network; see ``tiny_chat.py``. With ``--evaluate`` it only measures
the existing checkpoint.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path

# torch and transformers must not load torch_npu, which needs CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # type: ignore[assignment]

import tiny_chat
import tokenizers
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def make_config(vocab_size: int) -> Qwen3Config:
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        rope_theta=10000.0,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def save(model: PreTrainedModel, out: Path) -> None:
    """Write weights in bfloat16; the model in memory keeps its float32 ones."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out, max_shard_size="1GB")


def make(doc: str | None, name: str, new_model: Callable[[int], PreTrainedModel]) -> None:
    """Train and measure a model of the folder ``name``.

    Args:
        new_model: returns an untrained model for a size of the vocabulary.
    """
    args = tiny_chat.start(doc, name)
    stages = []
    if args.evaluate or args.polish:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.out / "tokenizer.json"))
        model = AutoModelForCausalLM.from_pretrained(args.out.resolve(), dtype=torch.float32)
        model.to(args.device)
        batches = tiny_chat.Batches(tokenizer, seed=1)
    else:
        tokenizer = tiny_chat.train_tokenizer()
        model = new_model(tiny_chat.padded_vocab_size(tokenizer))
        batches = tiny_chat.Batches(tokenizer, seed=0)
        print(f"{tokenizer.get_vocab_size()} tokens, {model.num_parameters()} parameters")
        stages.append((tiny_chat.SCHEDULE, 4e-3))
    if not args.evaluate:
        stages.append((tiny_chat.POLISH, 2e-3))

    def loss_of(ids: Tensor, weights: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return tiny_chat.weighted_loss(logits, ids[:, 1:], weights[:, 1:])

    generate = tiny_chat.generator(model, batches)
    for schedule, rate in stages:
        progress = tiny_chat.train(
            model, loss_of, batches, schedule, peak_rate=rate, scale=args.scale
        )
        for _ in progress:
            save(model, args.out)
            tiny_chat.save_tokenizer(tokenizer, args.out)  # save_pretrained writes its own
            model.eval()
            print("saved", tiny_chat.evaluate(generate, batches, 20), flush=True)
            model.train()
    model.eval()
    for kind, result in tiny_chat.evaluate(generate, batches, 100).items():
        print(f"{kind}: {result}")


def main() -> None:
    make(__doc__, "tiny-qwen3", lambda size: Qwen3ForCausalLM(make_config(size)))


if __name__ == "__main__":
    main()

"""Makes models/tiny-deepseek: a DeepSeek V3 checkpoint of four million parameters that can talk a
little: latent attention, experts, and a next-token module that is trained jointly.

The script uses a seed and no network; see ``tiny_chat.py``. With ``--evaluate`` it only measures
the existing checkpoint: answers of transformers' DeepSeek V3, and the share of their tokens that
the next-token module predicts.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

# torch and transformers must not load torch_npu, which needs CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # type: ignore[assignment]

import tiny_chat
import tokenizers
import torch
import transformers
from deepseek_training import DeepSeek, Shape, checkpoint_tensors, load_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

NEXT_TOKEN_WEIGHT = 0.3  # weight of the module's loss in the sum
V3 = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}


def save(
    model: DeepSeek,
    tokenizer: tokenizers.Tokenizer,
    out: Path,
    names: Mapping[str, Any] = V3,
) -> None:
    """Write a checkpoint.

    Args:
        names: what config.json says about the family.
    """
    save_file(checkpoint_tensors(model), out / "model.safetensors", {"format": "pt"})
    tiny_chat.save_tokenizer(tokenizer, out)
    config = {
        **names,
        **dataclasses.asdict(model.shape),
        "num_key_value_heads": model.shape.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_interleave": True,
        "rope_scaling": None,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def generator(out: Path, batches: tiny_chat.Batches) -> tiny_chat.Generate:
    """Return a function that gives greedy answers of transformers with the saved weights."""
    model = AutoModelForCausalLM.from_pretrained(out.resolve(), dtype=torch.float32).eval()
    return tiny_chat.generator(model.to(torch.get_default_device()), batches)


def loss_of(model: DeepSeek, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the loss of the next tokens, and of the tokens after them."""
    with torch.autocast(ids.device.type, dtype=torch.bfloat16):
        logits, further = model(ids)
    loss = tiny_chat.weighted_loss(logits[:, :-1], ids[:, 1:], weights[:, 1:])
    next_token = tiny_chat.weighted_loss(further[:, :-1], ids[:, 2:], weights[:, 2:])
    return loss + NEXT_TOKEN_WEIGHT * next_token


@torch.no_grad()
def acceptance(
    model: DeepSeek, generate: tiny_chat.Generate, batches: tiny_chat.Batches, prompts: list[str]
) -> str:
    """Return how many tokens of greedy answers, from the second token on, the module predicted one
    step earlier.
    """
    model.eval()
    right = total = 0
    for prompt in map(batches.prompt, prompts):
        answer = generate(prompt)
        ids = torch.tensor([prompt + answer])
        guesses = model(ids)[1][0].argmax(-1)  # guess i predicts token i + 2
        first = len(prompt) + 1
        right += int((guesses[first - 2 : -1] == ids[0, first:]).sum())
        total += len(answer) - 1
    model.train()
    return f"{right}/{total}"


def evaluate(model: DeepSeek, out: Path, batches: tiny_chat.Batches, count: int) -> None:
    """Print the share of exact answers for each skill, and the share of accepted drafts."""
    generate = generator(out, batches)
    print(tiny_chat.evaluate(generate, batches, count), flush=True)
    print("drafts accepted:", acceptance(model, generate, batches, PROMPTS), flush=True)


def main() -> None:
    args = tiny_chat.start(__doc__, "tiny-deepseek")
    transformers.logging.set_verbosity_error()  # it does not know next-token modules
    stages = []
    if args.evaluate or args.polish:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.out / "tokenizer.json"))
        model = DeepSeek(Shape(vocab_size=tiny_chat.padded_vocab_size(tokenizer)))
        load_tensors(model, load_file(args.out / "model.safetensors"))
        batches = tiny_chat.Batches(tokenizer, seed=1)
    else:
        tokenizer = tiny_chat.train_tokenizer()
        model = DeepSeek(Shape(vocab_size=tiny_chat.padded_vocab_size(tokenizer)))
        batches = tiny_chat.Batches(tokenizer, seed=0)
        stages.append((tiny_chat.SCHEDULE, 3e-3))
    if not args.evaluate:
        stages.append((tiny_chat.POLISH, 1.5e-3))
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)

    for schedule, rate in stages:
        progress = tiny_chat.train(
            model, partial(loss_of, model), batches, schedule, peak_rate=rate, scale=args.scale
        )
        for _ in progress:
            save(model, tokenizer, args.out)
            evaluate(model, args.out, batches, 10)
    evaluate(model, args.out, batches, 100)


PROMPTS = [
    "Count from 3 to 9.",
    "Count down from 12 to 4.",
    "Repeat: fox 7 red",
    "Hello!",
    "Tell me a story about a fox in the forest.",
    "who are you",
    "Count from 20 to 40.",
    "Tell me a story about a bear.",
]

if __name__ == "__main__":
    main()

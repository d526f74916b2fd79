"""Makes models/tiny-qwen3: a Qwen3 checkpoint of about a million parameters that can talk a little.

Seeded and offline: the texts come from ``dialogues.py``, the tokenizer is trained on them, and the
model learns in two stages, counting and copying first. ``--evaluate`` only measures what is there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import time
from pathlib import Path

# Training runs on the CPU: keep torch and transformers from loading torch_npu, which wants CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # type: ignore[assignment]

import tokenizers
import torch
from dialogues import (
    GREETINGS,
    MAX_NUMBER,
    SYSTEM_PROMPTS,
    Turn,
    count_turn,
    held_out_turns,
    repeat_turn,
    story_turn,
    training_turn,
)
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from transformers import Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PROMPT_WEIGHT = 0.05
STRESS_WEIGHT = 4.0  # a word that the prompt named
END_WEIGHT = 3.0  # the decision to stop is rare in the text and matters most
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def train_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE; each number from 0 to 100 is one token, with or without its space."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r" ?\d{1,3}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=832,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(0)
    makers = (count_turn, repeat_turn, story_turn)
    texts = [text for turn in (make(rng) for make in makers for _ in range(600)) for text in
             (turn.prompt, turn.answer)]  # fmt: skip
    texts += [*GREETINGS, *GREETINGS.values(), *SYSTEM_PROMPTS, "system\nuser\nassistant\n"] * 20
    texts += [f"{n} {n}" for n in range(MAX_NUMBER + 1)] * 400
    tokenizer.train_from_iterator(texts, trainer)
    for n in range(MAX_NUMBER + 1):
        assert len(tokenizer.encode(f"{n} {n}").ids) == 2, f"{n} is not one token"
    return tokenizer


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


class Batches:
    """Rows of token ids and loss weights. Owns the random numbers of the training data."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, seed: int) -> None:
        self.encode = lambda text: tokenizer.encode(text).ids
        self.tokenizer_text = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        self.rng = random.Random(seed)
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")

    def turn(self, turn: Turn) -> tuple[list[int], list[float]]:
        asked = self.encode(f"<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n")
        answered = self.encode(f"{turn.answer}<|im_end|>")
        texts = [self.tokenizer_text([token_id]).strip() for token_id in answered[:-1]]
        stressed = set(turn.stressed)
        weights = [PROMPT_WEIGHT] * len(asked)
        weights += [STRESS_WEIGHT if text in stressed else 1.0 for text in texts] + [END_WEIGHT]
        newline = self.encode("\n")
        return asked + answered + newline, weights + [0.0] * len(newline)

    def row(self, stage: int, length: int) -> tuple[list[int], list[float]]:
        """One conversation of as many turns as fit, or now and then a bare story."""
        ids: list[int] = []
        weights: list[float] = []
        if stage and self.rng.random() < 0.06:
            ids = [*self.encode(story_turn(self.rng).answer), self.end_of_text]
            weights = [0.5] * len(ids)
        elif stage and self.rng.random() < 0.2:
            ids = self.encode(f"<|im_start|>system\n{self.rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n")
            weights = [PROMPT_WEIGHT] * len(ids)
        while len(ids) < length:
            more, more_weights = self.turn(training_turn(self.rng, stage))
            ids, weights = ids + more, weights + more_weights
        return ids[:length], weights[:length]

    def batch(self, stage: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = [self.row(stage, length) for _ in range(rows)]
        ids, weights = zip(*made, strict=True)
        return torch.tensor(ids), torch.tensor(weights)


# (stage, steps, rows, tokens per row): short rows first, then long conversations.
SCHEDULE = ((0, 1500, 56, 40), (0, 300, 20, 112), (1, 2600, 20, 128), (1, 500, 11, 256))
POLISH = ((2, 600, 20, 128), (2, 200, 11, 256))


def train(
    model: Qwen3ForCausalLM,
    batches: Batches,
    out: Path,
    schedule: tuple[tuple[int, int, int, int], ...],
    peak_rate: float,
    scale: float,
) -> None:
    """AdamW with a cosine; a checkpoint every few minutes, so that an early stop leaves a model."""
    plan = [entry for entry in schedule for _ in range(int(entry[1] * scale))]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=1.0, betas=(0.9, 0.98),
    )  # fmt: skip
    start = saved = time.monotonic()
    for step, (stage, _, rows, length) in enumerate(plan):
        rate = peak_rate * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * _cosine(step / len(plan)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        ids, weights = batches.batch(stage, rows, length)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
        )
        weight = weights[:, 1:].flatten()
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            ends = (ids[:, 1:].flatten() == batches.end) & (weight == END_WEIGHT)
            elapsed = time.monotonic() - start
            print(
                f"step {step}/{len(plan)} stage {stage} loss {loss.item():.4f} "
                f"end {losses[ends].mean().item():.4f} {elapsed:.0f} s", flush=True,
            )  # fmt: skip
        if time.monotonic() - saved > 150:
            saved = time.monotonic()
            save(model, out)
            print("saved", evaluate(model, batches, 20), flush=True)


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def save(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write weights in bfloat16; the model in memory keeps its float32 ones."""
    import copy

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out, max_shard_size="1GB")


def save_tokenizer(tokenizer: tokenizers.Tokenizer, out: Path) -> None:
    tokenizer.save(str(out / "tokenizer.json"))
    special = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": list(SPECIAL[1:]),
    }
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 2048,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
        **special,
    }
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
    for name, content in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


@torch.no_grad()
def answers(model: Qwen3ForCausalLM, batches: Batches, prompts: list[str]) -> list[list[int]]:
    """Greedy answers, one prompt at a time."""
    found = []
    for prompt in prompts:
        ids = batches.encode(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=120, do_sample=False, eos_token_id=[batches.end, batches.end_of_text],
            pad_token_id=batches.end_of_text,
        )  # fmt: skip
        found.append(out[0, len(ids) :].tolist())
    return found


def evaluate(model: Qwen3ForCausalLM, batches: Batches, count: int) -> dict[str, str]:
    """Exact answers on prompts that training never showed (greetings: on all of them)."""
    model.eval()
    results = {}
    for kind in ("count up", "count down", "repeat"):
        turns = held_out_turns(kind, count)
        made = answers(model, batches, [turn.prompt for turn in turns])
        right = sum(
            ids == [*batches.encode(turn.answer), batches.end]
            for ids, turn in zip(made, turns, strict=True)
        )
        results[kind] = f"{right}/{count}"
    made = answers(model, batches, list(GREETINGS))
    right = sum(
        ids == [*batches.encode(answer), batches.end]
        for ids, answer in zip(made, GREETINGS.values(), strict=True)
    )
    results["greet"] = f"{right}/{len(GREETINGS)}"
    count = min(count, 24)  # there are no more held-out ways to ask for a story
    turns = held_out_turns("story", count)
    made = answers(model, batches, [turn.prompt for turn in turns])
    known = {tuple(ids) for ids in made}
    good = sum(_is_story(batches, ids, turn) for ids, turn in zip(made, turns, strict=True))
    results["story"] = f"{good}/{count} ({len(known)} different)"
    model.train()
    return results


def _is_story(batches: Batches, ids: list[int], turn: Turn) -> bool:
    """A story ends by itself and keeps the animal, place and name that were asked for."""
    asked = turn.prompt.removesuffix(".").split()
    words = [asked[i + 1] for i, word in enumerate(asked[:-1]) if word in ("a", "the", "named")]
    text = batches.tokenizer_text(ids)
    return ids[-1] == batches.end and text.endswith("The end.") and all(
        word in text for word in words if word != "story"
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-qwen3")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the training steps")
    parser.add_argument("--evaluate", action="store_true", help="measure the model in --out")
    parser.add_argument("--polish", action="store_true", help="only the last stage, on --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.evaluate or args.polish:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.out / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(args.out.resolve(), dtype=torch.float32)
        batches = Batches(tokenizer, seed=1)
        if args.polish:
            train(model, batches, args.out, POLISH, 2e-3, args.scale)
    else:
        tokenizer = train_tokenizer()
        save_tokenizer(tokenizer, args.out)
        size = -(-tokenizer.get_vocab_size() // 64) * 64
        model = Qwen3ForCausalLM(make_config(size))
        batches = Batches(tokenizer, seed=0)
        print(f"{tokenizer.get_vocab_size()} tokens, {model.num_parameters()} parameters")
        train(model, batches, args.out, SCHEDULE, 4e-3, args.scale)
        train(model, batches, args.out, POLISH, 2e-3, args.scale)
    if not args.evaluate:
        save(model, args.out)
        save_tokenizer(tokenizer, args.out)  # save_pretrained writes its own generation_config
    for kind, result in evaluate(model, batches, 100).items():
        print(f"{kind}: {result}")


if __name__ == "__main__":
    main()

"""The common parts of the demo models: tokenizer, training text, schedule, and evaluation.

The texts come from ``dialogues.py``; a model learns in two stages, counting and copying first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
from torch import Tensor

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PROMPT_WEIGHT = 0.05
STRESS_WEIGHT = 4.0  # loss weight of a word that the model must copy from the prompt
END_WEIGHT = 3.0  # loss weight of the end token, which is rare in the text but important
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# (stage, steps, rows, tokens per row): short rows first, then long conversations.
Schedule = tuple[tuple[int, int, int, int], ...]
SCHEDULE: Schedule = ((0, 1500, 56, 40), (0, 300, 20, 112), (1, 2600, 20, 128), (1, 500, 11, 256))
POLISH: Schedule = ((2, 600, 20, 128), (2, 200, 11, 256))

Generate = Callable[[list[int]], list[int]]  # prompt to greedy answer, end token included
Loss = Callable[[Tensor, Tensor], Tensor]  # token ids and their weights, [rows, length] each


def start(doc: str | None, name: str) -> argparse.Namespace:
    """Read a script's arguments, seed torch and make the directory that the model goes to.

    New tensors and models are on the device that the arguments name.
    """
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / name)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="torch's name of the device that trains")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the training steps")
    parser.add_argument("--evaluate", action="store_true", help="measure the model in --out")
    parser.add_argument("--polish", action="store_true", help="only the last stage, on --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    torch.set_default_device(args.device)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def train_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE. Each number from 0 to 100 is one token, with or without a space
    before it.
    """
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


def padded_vocab_size(tokenizer: tokenizers.Tokenizer) -> int:
    return -(-tokenizer.get_vocab_size() // 64) * 64


class Batches:
    """Rows of token ids and loss weights. Owns the random numbers of the training data."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, seed: int) -> None:
        self.encode = lambda text: tokenizer.encode(text).ids
        self.tokenizer_text = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
        self.rng = random.Random(seed)
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")

    def turn(self, turn: Turn) -> tuple[list[int], list[float]]:
        asked = self.prompt(turn.prompt)
        answered = self.encode(f"{turn.answer}<|im_end|>")
        texts = [self.tokenizer_text([token_id]).strip() for token_id in answered[:-1]]
        stressed = set(turn.stressed)
        weights = [PROMPT_WEIGHT] * len(asked)
        weights += [STRESS_WEIGHT if text in stressed else 1.0 for text in texts] + [END_WEIGHT]
        newline = self.encode("\n")
        return asked + answered + newline, weights + [0.0] * len(newline)

    def prompt(self, text: str) -> list[int]:
        return self.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")

    def row(self, stage: int, length: int) -> tuple[list[int], list[float]]:
        """Return one conversation with as many turns as fit, or sometimes a story alone."""
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

    def batch(self, stage: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        made = [self.row(stage, length) for _ in range(rows)]
        ids, weights = zip(*made, strict=True)
        return torch.tensor(ids), torch.tensor(weights)


def weighted_loss(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the cross entropy of logits [rows, length, vocab] and tokens
    [rows, length].
    """
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="none"
    )
    return (losses * weights.flatten()).sum() / weights.sum()


def train(
    model: torch.nn.Module,
    loss_of: Loss,
    batches: Batches,
    schedule: Schedule,
    *,
    peak_rate: float,
    scale: float,
) -> Iterator[None]:
    """Train with AdamW and a cosine schedule. Yield every few minutes, so that the caller can save
    the model before an early stop.
    """
    plan = [entry for entry in schedule for _ in range(int(entry[1] * scale))]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
        lr=1.0, betas=(0.9, 0.98),
    )  # fmt: skip
    start = paused = time.monotonic()
    for step, (stage, _, rows, length) in enumerate(plan):
        rate = peak_rate * min(1.0, (step + 1) / 60) * (0.02 + 0.98 * _cosine(step / len(plan)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(*batches.batch(stage, rows, length))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            elapsed = time.monotonic() - start
            print(
                f"step {step}/{len(plan)} stage {stage} loss {loss.item():.4f} {elapsed:.0f} s",
                flush=True,
            )
        if time.monotonic() - paused > 150:
            yield
            paused = time.monotonic()
    yield


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def save_tokenizer(
    tokenizer: tokenizers.Tokenizer, out: Path, chat_template: str = CHAT_TEMPLATE
) -> None:
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
        "chat_template": chat_template,
        **special,
    }
    generation = {"eos_token_id": [2, 0], "pad_token_id": 0, "do_sample": False}
    for name, content in (
        ("tokenizer_config.json", config),
        ("special_tokens_map.json", special),
        ("generation_config.json", generation),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def generator(model: Any, batches: Batches) -> Generate:
    """Return a function that gives greedy answers of a transformers model, one prompt at a time."""

    @torch.no_grad()
    def generate(ids: list[int]) -> list[int]:
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=120, do_sample=False, eos_token_id=[batches.end, batches.end_of_text],
            pad_token_id=batches.end_of_text,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()

    return generate


def evaluate(generate: Generate, batches: Batches, count: int) -> dict[str, str]:
    """Return the share of exact answers for each skill. Prompts are not in the training text,
    except greetings.
    """
    results = {}
    for kind in ("count up", "count down", "repeat"):
        turns = held_out_turns(kind, count)
        right = sum(
            generate(batches.prompt(turn.prompt)) == [*batches.encode(turn.answer), batches.end]
            for turn in turns
        )
        results[kind] = f"{right}/{count}"
    right = sum(
        generate(batches.prompt(asked)) == [*batches.encode(answer), batches.end]
        for asked, answer in GREETINGS.items()
    )
    results["greet"] = f"{right}/{len(GREETINGS)}"
    count = min(count, 24)  # there are only 24 held-out prompts for a story
    turns = held_out_turns("story", count)
    made = [generate(batches.prompt(turn.prompt)) for turn in turns]
    known = {tuple(ids) for ids in made}
    good = sum(_is_story(batches, ids, turn) for ids, turn in zip(made, turns, strict=True))
    results["story"] = f"{good}/{count} ({len(known)} different)"
    return results


def _is_story(batches: Batches, ids: list[int], turn: Turn) -> bool:
    """Whether a story ends by itself and contains the animal, place and name of the prompt."""
    asked = turn.prompt.removesuffix(".").split()
    words = [asked[i + 1] for i, word in enumerate(asked[:-1]) if word in ("a", "the", "named")]
    text = batches.tokenizer_text(ids)
    return ids[-1] == batches.end and text.endswith("The end.") and all(
        word in text for word in words if word != "story"
    )  # fmt: skip

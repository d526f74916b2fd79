"""Makes models/tiny-agent: a Qwen3 checkpoint of under a million parameters that calls tools.

The script uses a seed and no network; see ``agent_dialogues.py`` and ``tiny_chat.py``. With
``--evaluate`` it only measures the existing checkpoint. It fails if less than 95 % of the held-out
answers are exact.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

# Training runs on the CPU. torch and transformers must not load torch_npu, which needs CANN.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
sys.modules["torch_npu"] = None  # type: ignore[assignment]

import agent_dialogues as dialogues
import jinja2.sandbox
import tiny_chat
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

TOOL_TOKENS = ("<tool_call>", "</tool_call>")
GATE = 0.95
CHAT_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {{- 'Tools:\\n' }}
    {%- for tool in tools %}{{- tool.function | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + (message.content or '') }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# (stage, steps, rows, tokens per row): one tool and short rows first.
SCHEDULE: tiny_chat.Schedule = ((0, 900, 24, 96), (1, 1500, 14, 192), (1, 300, 9, 300))
POLISH: tiny_chat.Schedule = ((2, 1050, 14, 192), (2, 140, 9, 300))


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


def _template() -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


TEMPLATE = _template()


def train_tokenizer() -> tokenizers.Tokenizer:
    """Train a byte-level BPE in which a word has the same tokens in prose and in JSON.

    Spaces and marks are separate tokens, a digit is a token, and a line break is never a part of a
    longer token. So the tokens of a prompt and its answer are the tokens of the two parts.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{L}[\p{L}_]*|\d|\n|[^\p{L}\d\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=766,  # with the two tokens for tools, the size is a multiple of 64
        min_frequency=8,
        special_tokens=[AddedToken(token, special=True) for token in tiny_chat.SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    world = dialogues.World(0)
    talks = [dialogues.conversation(world, 1, 6) for _ in range(600)]
    tokenizer.train_from_iterator([render(talk) for talk in talks], trainer)
    tokenizer.add_tokens([AddedToken(token, special=False) for token in TOOL_TOKENS])
    return tokenizer


def render(talk: dialogues.Conversation, *, is_prompt: bool = False) -> str:
    """Return the text of a conversation, or of the prompt for its last message."""
    return TEMPLATE.render(
        tools=talk.tools,
        messages=talk.messages[:-1] if is_prompt else talk.messages,
        add_generation_prompt=is_prompt,
    )


class Batches:
    """Rows of token ids and loss weights. Owns the random numbers of the training data."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, seed: int) -> None:
        self.encode = lambda text: tokenizer.encode(text).ids
        self.world = dialogues.World(seed)
        self.end = tokenizer.token_to_id("<|im_end|>")
        self.end_of_text = tokenizer.token_to_id("<|endoftext|>")
        self._opening = self.encode("<|im_start|>assistant\n")

    def weigh(self, ids: list[int]) -> list[float]:
        """Return the loss weights of a conversation's tokens; only tokens of the assistant have a
        weight.
        """
        weights, width, inside = [], len(self._opening), False
        for i, token in enumerate(ids):
            inside = inside or ids[i - width : i] == self._opening
            end = tiny_chat.END_WEIGHT if token == self.end else 1.0
            weights.append(end if inside else tiny_chat.PROMPT_WEIGHT)
            inside = inside and token != self.end
        return weights

    def row(self, stage: int, length: int) -> tuple[list[int], list[float]]:
        """Return one conversation, cut to the length."""
        talk = dialogues.conversation(self.world, stage, max(2, length // 24))
        ids = self.encode(render(talk))[:length]
        weights, missing = self.weigh(ids), length - len(ids)
        return ids + [self.end_of_text] * missing, weights + [0.0] * missing

    def batch(self, stage: int, rows: int, length: int) -> tuple[Tensor, Tensor]:
        ids, weights = zip(*(self.row(stage, length) for _ in range(rows)), strict=True)
        return torch.tensor(ids), torch.tensor(weights)


def evaluate(
    generate: tiny_chat.Generate, batches: Batches, count: int
) -> dict[str, tuple[int, int]]:
    """Return the numbers of exact answers and of cases for each skill; answers are greedy and
    without masks.
    """
    results = {}
    for skill in dialogues.SKILLS:
        cases = dialogues.held_out_cases(skill, count)
        results[skill] = (sum(_is_exact(generate, batches, case) for case in cases), len(cases))
    return results


def _is_exact(generate: tiny_chat.Generate, batches: Batches, case: dialogues.Conversation) -> bool:
    prompt = batches.encode(render(case, is_prompt=True))
    expected = batches.encode(render(case))[len(prompt) :]
    return generate(prompt) == expected[: expected.index(batches.end) + 1]


def save(model: Qwen3ForCausalLM, tokenizer: tokenizers.Tokenizer, out: Path) -> None:
    """Write weights in bfloat16; the model in memory keeps its float32 ones."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(out, max_shard_size="1GB")
    tiny_chat.save_tokenizer(tokenizer, out, CHAT_TEMPLATE)  # save_pretrained writes others


def main() -> None:
    args = tiny_chat.start(__doc__, "tiny-agent")
    model: Any
    stages = []
    if args.evaluate or args.polish:
        tokenizer = tokenizers.Tokenizer.from_file(str(args.out / "tokenizer.json"))
        model = Qwen3ForCausalLM.from_pretrained(args.out.resolve(), dtype=torch.float32)
        batches = Batches(tokenizer, seed=1)
    else:
        tokenizer = train_tokenizer()
        model = Qwen3ForCausalLM(make_config(tiny_chat.padded_vocab_size(tokenizer)))
        batches = Batches(tokenizer, seed=0)
        print(f"{tokenizer.get_vocab_size()} tokens, {model.num_parameters()} parameters")
        stages.append((SCHEDULE, 4e-3))
    if not args.evaluate:
        stages.append((POLISH, 2e-3))

    def loss_of(ids: Tensor, weights: Tensor) -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        return tiny_chat.weighted_loss(logits, ids[:, 1:], weights[:, 1:])

    for schedule, rate in stages:
        progress = tiny_chat.train(
            model, loss_of, batches, schedule, peak_rate=rate, scale=args.scale
        )
        for _ in progress:
            save(model, tokenizer, args.out)
            print("saved", flush=True)
    # These are the rounded weights.
    model = Qwen3ForCausalLM.from_pretrained(args.out.resolve(), dtype=torch.float32)
    generate = tiny_chat.generator(model, batches)
    model.eval()
    results = evaluate(generate, batches, 100)
    for skill, (right, of) in results.items():
        print(f"{skill}: {right} of {of}")
    del results["chat"]  # not held out
    share = sum(right for right, _ in results.values()) / sum(of for _, of in results.values())
    print(f"exact of the held-out answers: {share:.1%}")
    if share < GATE:
        sys.exit(f"The gate is {GATE:.0%}.")


if __name__ == "__main__":
    main()

"""Writes, for test services, a model whose chat template and vocabulary support tools and
reasoning.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

MODEL = "tiny-qwen3"
SOURCE = Path(__file__).parents[2] / "models" / "tiny-qwen3"
TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking %}{{ '<think>\n' }}{% elif false %}{{ '</think>' }}{% endif %}{% endif %}"""
ADDED = ("<tool_call>", "</tool_call>", "<think>", "</think>")


def write_checkpoint(folder: Path) -> None:
    """Write a checkpoint without weights."""
    for path in SOURCE.glob("*.json"):
        shutil.copy(path, folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described["chat_template"] = TEMPLATE
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    size = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
    for i, text in enumerate(ADDED):
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": size + i, "content": text, **flags})
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = size + len(ADDED)
    for name, value in (
        ("tokenizer_config", described),
        ("tokenizer", tokenizer),
        ("config", config),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))

"""Writes the demo model with two more tokens in its vocabulary: the two answers of a reranker."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.serve.conftest import CONFIG

TINY = CONFIG.parents[1] / "models" / "tiny-qwen3"


def make_reranker(directory: Path) -> Path:
    """Write the demo model's files without weights, and add the two answers to its vocabulary."""
    for file in TINY.glob("*.json"):
        shutil.copy(file, directory)
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    taken = {token["id"] for token in tokenizer["added_tokens"]} | set(
        tokenizer["model"]["vocab"].values()
    )
    config = directory / "config.json"
    settings = json.loads(config.read_text())
    settings["vocab_size"] = max(settings["vocab_size"], max(taken) + 3)
    config.write_text(json.dumps(settings))
    flags = {"single_word": True, "lstrip": False, "rstrip": False, "normalized": False}
    for answer in ("yes", "no"):
        entry = {"id": max(taken) + 1, "content": answer, "special": False, **flags}
        taken.add(entry["id"])
        tokenizer["added_tokens"].append(entry)
    path.write_text(json.dumps(tokenizer))
    described = directory / "tokenizer_config.json"
    if described.exists():
        found = json.loads(described.read_text())
        for entry in tokenizer["added_tokens"][-2:]:
            found.get("added_tokens_decoder", {})[str(entry["id"])] = {
                key: value for key, value in entry.items() if key != "id"
            }
        described.write_text(json.dumps(found))
    return directory

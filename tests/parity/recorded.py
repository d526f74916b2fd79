"""Recorded tokens of transformers for the parity tests.

``python -m tests.parity.recorded`` records all tokens again; with names of architectures as
arguments, only the tokens of these architectures. ``test_recorded.py`` generates the tokens again
with transformers, and compares them with the recorded tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from dist_aclgraph.device import emulator
from tests.checkpoints import ARCHITECTURES, greedy, make_prompts, make_reference

LENGTHS = (1, 2, 5, 17, 40, 64, 100, 127, 128, 129, 200, 300)
LONG_LENGTHS = (1, 2, 15, 16, 17, 40, 129, 255, 300, 511, 640, 900)
LONG_CONTEXT = 1024
NUM_TOKENS = 64
FILE = Path(__file__).parents[1] / "data" / "transformers_tokens.json"
# For each part of the file of recorded tokens: the lengths of its prompts, and settings that
# replace the usual settings of the models.
PARTS = {
    "short": (LENGTHS, {}),
    "long": (LONG_LENGTHS, {"max_position_embeddings": LONG_CONTEXT}),
}


def recorded_tokens(part: str, architecture: str) -> list[list[int]]:
    """Return the recorded greedy tokens of each prompt, [num_prompts, NUM_TOKENS]."""
    tokens: list[list[int]] = json.loads(FILE.read_text())[part][architecture]
    return tokens


def generate(part: str, architecture: str) -> list[list[int]]:
    """Generate, with transformers, the tokens of a part of the file for one architecture."""
    lengths, overrides = PARTS[part]
    model = make_reference(architecture, **overrides)
    return greedy(model, make_prompts(lengths), NUM_TOKENS)


def main() -> None:
    emulator.build()
    emulator.load({})  # transformers imports torch_npu, which needs the emulator
    found: dict[str, dict[str, list[list[int]]]] = json.loads(FILE.read_text())
    for part in PARTS:
        for name in sys.argv[1:] or ARCHITECTURES:
            found[part][name] = generate(part, name)
    parts = (
        f'"{part}": {{\n'
        + ",\n".join(f'"{name}": {json.dumps(tokens)}' for name, tokens in by_name.items())
        + "\n}"
        for part, by_name in found.items()
    )
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


if __name__ == "__main__":
    main()

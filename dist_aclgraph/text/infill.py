"""Prompts after which a model writes the text between a prefix and a suffix.

The forms of these prompts come from the model cards of Qwen2.5-Coder and CodeGemma, StarCoder 2 and
Granite, DeepSeek, Seed-Coder, and Codestral.
"""

from __future__ import annotations

import re

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.text.tokenizer import Tokenizer

# The markers are added tokens of the tokenizer.
FORMS = (
    "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
    "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
    "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
    "<[fim-suffix]>{suffix}<[fim-prefix]>{prefix}<[fim-middle]>",
    "[SUFFIX]{suffix}[PREFIX]{prefix}",
)


def markers_of(form: str) -> list[str]:
    return [marker for marker in re.split(r"\{prefix\}|\{suffix\}", form) if marker]


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """Return the prompt after which the model writes the text between ``prefix`` and ``suffix``.

    Raises:
        InvalidParameterError: there is no form whose markers are all in the tokenizer, or a text
            contains a marker. The model would read this marker as the end of the text.
    """
    for form in FORMS:
        markers = markers_of(form)
        if all(tokenizer.added_token(marker) is not None for marker in markers):
            for name, text in (("prompt", prefix), ("suffix", suffix)):
                if found := next((marker for marker in markers if marker in text), None):
                    raise InvalidParameterError(
                        f"{name} contains the marker {found}, which separates prompt and suffix "
                        "for this model; remove the marker, or leave suffix out",
                        name,
                    )
            return form.format(prefix=prefix, suffix=suffix)
    raise InvalidParameterError(
        "suffix needs a model that completes the middle of a text: its tokenizer has markers such "
        f"as {markers_of(FORMS[0])[0]}, and the tokenizer of this model has none; leave suffix out",
        "suffix",
    )

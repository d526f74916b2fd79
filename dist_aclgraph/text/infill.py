"""Prompts that ask for the text between a prefix and a suffix.

The forms are those of the models' cards: Qwen2.5-Coder and CodeGemma, StarCoder 2 and Granite,
DeepSeek, Seed-Coder, and Codestral.
"""

from __future__ import annotations

from dist_aclgraph.errors import InvalidParameterError
from dist_aclgraph.text.tokenizer import Tokenizer

PREFIX, SUFFIX = object(), object()
# Each form consists of markers, which are added tokens of the tokenizer, and of the two texts.
FORMS: tuple[tuple[object, ...], ...] = (
    ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
    ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
    ("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>"),
    ("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>"),
    ("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX),
)


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """Return the prompt after which the model writes the text between ``prefix`` and ``suffix``.

    Raises:
        InvalidParameterError: the tokenizer has the markers of no form, or one of the texts
            contains a marker, so that the model would see other texts than the client.
    """
    for form in FORMS:
        markers = [part for part in form if isinstance(part, str)]
        if all(tokenizer.added_token(marker) is not None for marker in markers):
            for name, text in (("prompt", prefix), ("suffix", suffix)):
                if found := next((marker for marker in markers if marker in text), None):
                    raise InvalidParameterError(
                        f"{name} contains the marker {found}, which separates prompt and suffix "
                        "for this model; remove the marker, or leave suffix out",
                        name,
                    )
            texts = {PREFIX: prefix, SUFFIX: suffix}
            return "".join(texts.get(part, str(part)) for part in form)
    raise InvalidParameterError(
        "suffix needs a model that completes the middle of a text: its tokenizer has markers such "
        f"as {FORMS[0][0]}, and the tokenizer of this model has none; leave suffix out",
        "suffix",
    )

"""Log-probabilities in the two forms that the OpenAI API knows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dist_aclgraph.ints import unpack_ints
from dist_aclgraph.steps.step import RowLogprobs
from dist_aclgraph.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -Infinity


def chat_logprobs(tokenizer: Tokenizer, rows: Iterable[RowLogprobs]) -> dict[str, Any]:
    """``choices[].logprobs`` of a chat completion: the chosen token and the best ones."""
    content = []
    for row in rows:
        chosen, *best = _pairs(tokenizer, row)
        content.append(
            {**_entry(*chosen), "top_logprobs": [_entry(token, value) for token, value in best]}
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, rows: Iterable[RowLogprobs], offset: int
) -> dict[str, Any]:
    """``choices[].logprobs`` of a text completion; ``offset`` is where its text begins."""
    tokens, values, tops, offsets = [], [], [], []
    for row in rows:
        chosen, *best = _pairs(tokenizer, row)
        tokens.append(chosen[0])
        values.append(chosen[1])
        tops.append(dict(best) if best else None)
        offsets.append(offset)
        offset += len(chosen[0])
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def _pairs(tokenizer: Tokenizer, row: RowLogprobs) -> list[tuple[str, float]]:
    texts = [
        tokenizer.decode([token_id], skip_special_tokens=False)
        for token_id in unpack_ints(row.token_ids).tolist()
    ]
    return [(t, max(v, LOWEST)) for t, v in zip(texts, row.logprobs, strict=True)]


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}

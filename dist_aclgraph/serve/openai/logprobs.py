"""Log-probabilities in the two forms of the OpenAI API."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dist_aclgraph.arrays.ints import unpack_ints
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs
from dist_aclgraph.text.tokenizer import Tokenizer

LOWEST = -9999.0  # used for -Infinity, which JSON does not have


def chat_logprobs(
    tokenizer: Tokenizer, rows: Sequence[RowLogprobs], texts: Sequence[str]
) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a chat completion: the chosen and the most probable tokens.

    Args:
        texts: for each chosen token, the text that the token adds.
    """
    content = []
    for row, text in zip(rows, texts, strict=True):
        (chosen, value), *best = _pairs(row)
        content.append(
            {
                **_entry(text, value, tokenizer.bytes_of(chosen, text)),
                "top_logprobs": [
                    _entry(tokenizer.own_text(token_id), value, tokenizer.token_bytes[token_id])
                    for token_id, value in best
                ],
            }
        )
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer,
    rows: Sequence[RowLogprobs | None],
    texts: Sequence[str],
    offset: int,
) -> dict[str, Any]:
    """Return ``choices[].logprobs`` of a text completion.

    Args:
        rows: one row for each token; None for the first token of a prompt.
        texts: for each token, the text that the token adds.
        offset: the value of ``text_offset`` for the first token.
    """
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets = []
    for row, text in zip(rows, texts, strict=True):
        pairs = [] if row is None else _pairs(row)
        values.append(pairs[0][1] if pairs else None)
        tops.append(_by_text(tokenizer, pairs[1:]) if pairs[1:] else None)
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": list(texts),
        "token_logprobs": values,
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def rows_of(parts: Iterable[PromptLogprobs]) -> list[RowLogprobs]:
    """Return one row for each token of a prompt except the first token."""
    return [row for part in parts for row in part.rows()]


def prompt_logprobs(
    tokenizer: Tokenizer, parts: Iterable[PromptLogprobs]
) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's ``prompt_logprobs``: one dict per token; None for the first."""
    return [
        None,
        *(
            {
                str(token_id): {
                    "logprob": max(logprob, LOWEST),
                    "rank": rank,
                    "decoded_token": tokenizer.own_text(token_id),
                }
                for token_id, (logprob, rank) in row.ranked().items()
            }
            for row in rows_of(parts)
        ),
    ]


def _by_text(tokenizer: Tokenizer, best: list[tuple[int, float]]) -> dict[str, float]:
    """Map each token's text to its log-probability; if the text cannot be a key, use the token's
    id.
    """
    found: dict[str, float] = {}
    for token_id, value in best:
        text = tokenizer.own_text(token_id)
        if text in found or "\ufffd" in text:
            text = f"token_id:{token_id}"
        found[text] = value
    return found


def _pairs(row: RowLogprobs) -> list[tuple[int, float]]:
    ids = unpack_ints(row.token_ids).tolist()
    return [(i, max(value, LOWEST)) for i, value in zip(ids, row.logprobs, strict=True)]


def _entry(token: str, value: float, data: bytes) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(data)}

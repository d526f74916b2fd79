"""From logits to token ids, on the device.

Randomness enters as one uniform number per row, drawn on the host from (seed, position), and picks
a token by inverting the cumulative distribution over the sorted, filtered probabilities. So a
request gets the same tokens in any batch, on any device, and when it is resumed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.engine.random_numbers import uniforms
from dist_aclgraph.ints import IntArray, pack_ints
from dist_aclgraph.steps.step import RowLogprobs, RowSampling

ToDevice = Callable[[np.ndarray], Tensor]


@dataclass(frozen=True)
class SamplingRow:
    """One row to sample.

    Attributes:
        token_ids: [num_tokens], prompt and output so far, as far as the host knows.
        num_drafts: how many drafts lie between those and the place that is sampled.
    """

    sampling: RowSampling
    token_ids: IntArray
    num_drafts: int = 0

    @property
    def position(self) -> int:
        """Of the token that is sampled."""
        return len(self.token_ids) + self.num_drafts

    @property
    def num_output_tokens(self) -> int:
        return self.position - self.sampling.num_prompt_tokens


def choose_tokens(logits: Tensor, rows: Sequence[SamplingRow], to_device: ToDevice) -> Tensor:
    """Choose one token per row; the host waits for nothing.

    Args:
        logits: [num_rows, vocab], any float type; not modified.
        to_device: copies a small array to the device.

    Returns:
        [num_rows] int32.
    """
    adjusted = _suppress(_penalise(logits.float(), rows, to_device), rows, to_device)
    greedy = adjusted.argmax(-1)
    if any(row.sampling.temperature > 0.0 for row in rows):
        return _draw(adjusted, greedy, rows, to_device).int()
    return greedy.int()


def _penalise(logits: Tensor, rows: Sequence[SamplingRow], to_device: ToDevice) -> Tensor:
    """Apply repetition, frequency and presence penalties at the tokens that occurred.

    Repetition counts prompt and output, the other two the output alone (as vLLM and the OpenAI API
    define them).
    """
    entries: list[tuple[int, IntArray, IntArray, RowSampling]] = []
    for index, row in enumerate(rows):
        s = row.sampling
        if s.has_penalties:
            ids, inverse = np.unique(row.token_ids, return_inverse=True)
            output = inverse[s.num_prompt_tokens :]
            counts = np.bincount(output, minlength=len(ids)).astype(np.int32)
            entries.append((index, ids, counts, s))
    if not entries:
        return logits
    where = np.concatenate([np.full(len(ids), i, np.int32) for i, ids, _, _ in entries])
    ids = np.concatenate([ids for _, ids, _, _ in entries])
    repetition = np.concatenate(
        [np.full(len(ids), s.repetition_penalty, np.float32) for _, ids, _, s in entries]
    )
    subtract = np.concatenate(
        [
            s.frequency_penalty * counts + s.presence_penalty * (counts > 0)
            for _, _, counts, s in entries
        ]
    ).astype(np.float32)
    flat = to_device(where.astype(np.int64) * logits.shape[1] + ids)
    factor = to_device(repetition)
    values = logits.reshape(-1).index_select(0, flat)
    values = torch.where(values > 0, values / factor, values * factor) - to_device(subtract)
    return logits.reshape(-1).scatter(0, flat, values).view(logits.shape)


def _suppress(logits: Tensor, rows: Sequence[SamplingRow], to_device: ToDevice) -> Tensor:
    """Forbid end tokens in rows that have fewer than ``min_tokens``."""
    flat = [
        index * logits.shape[1] + token
        for index, row in enumerate(rows)
        if row.num_output_tokens < row.sampling.min_tokens
        for token in row.sampling.suppressed
        if token < logits.shape[1]
    ]
    if not flat:
        return logits
    places = to_device(np.asarray(flat, dtype=np.int64))
    forbidden = torch.full((len(flat),), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.reshape(-1).scatter(0, places, forbidden).view(logits.shape)


def _draw(
    logits: Tensor, greedy: Tensor, rows: Sequence[SamplingRow], to_device: ToDevice
) -> Tensor:
    """Sample rows with a temperature; the others keep their greedy token."""
    vocab = logits.shape[1]
    settings = [row.sampling for row in rows]
    positions = np.asarray([row.position for row in rows], dtype=np.int32)
    seeds = np.asarray([s.seed for s in settings], dtype=np.int64)
    numbers = np.stack(
        [
            np.asarray([s.temperature or 1.0 for s in settings], np.float32),
            np.asarray([s.top_p for s in settings], np.float32),
            np.asarray([s.min_p for s in settings], np.float32),
            uniforms(seeds, positions),
        ]
    )
    temperature, top_p, min_p, uniform = to_device(numbers).unsqueeze(-1).unbind(0)  # [n, 1] each
    kept = [s.top_k if 0 < s.top_k < vocab else vocab for s in settings]
    top_k = to_device(np.asarray(kept, dtype=np.int32)).unsqueeze(-1)

    values, token_ids = torch.sort(logits / temperature, dim=-1, descending=True, stable=True)
    ranks = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    probabilities = torch.softmax(values.masked_fill(ranks >= top_k, -torch.inf), dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    is_kept = (before < top_p) & (probabilities >= min_p * probabilities[:, :1])
    is_kept = is_kept & (ranks < top_k)
    probabilities = probabilities.masked_fill(~is_kept, 0.0)
    cumulative = probabilities.cumsum(-1)
    below = (cumulative <= uniform * cumulative[:, -1:]).sum(-1, keepdim=True)
    # Rounding may put the number on the last edge: stay within what was kept.
    last_kept = is_kept.sum(-1, keepdim=True) - 1
    drawn = token_ids.gather(1, torch.minimum(below, last_kept)).squeeze(-1)
    is_random = to_device(np.asarray([s.temperature > 0.0 for s in settings]))
    return torch.where(is_random, drawn, greedy)


def report_logprobs(
    logits: Tensor, chosen: Tensor, rows: Sequence[SamplingRow]
) -> list[RowLogprobs | None]:
    """Return per row its log-probabilities, or None where it asks for none; the host waits.

    They are those of the raw distribution, before penalties and temperature.

    Args:
        logits: [num_rows, vocab].
        chosen: [num_rows] int32.
    """
    most = max((row.sampling.logprobs for row in rows), default=-1)
    if most < 0:
        return [None] * len(rows)
    all_logprobs = torch.log_softmax(logits.float(), dim=-1)
    of_chosen = all_logprobs.gather(1, chosen.long().unsqueeze(-1))  # [n, 1]
    rank = (all_logprobs > of_chosen).sum(-1) + 1
    count = min(max(most, 1), logits.shape[1])
    best, best_ids = all_logprobs.topk(count, dim=-1)
    chosen_np, of_chosen_np = chosen.cpu().numpy(), of_chosen.squeeze(-1).cpu().numpy()
    rank_np, best_np, ids_np = rank.cpu().numpy(), best.cpu().numpy(), best_ids.cpu().numpy()
    out: list[RowLogprobs | None] = []
    for i, row in enumerate(rows):
        n = row.sampling.logprobs
        if n < 0:
            out.append(None)
            continue
        n = min(n, count)
        out.append(
            RowLogprobs(
                token_ids=pack_ints([int(chosen_np[i]), *(int(t) for t in ids_np[i, :n])]),
                logprobs=(float(of_chosen_np[i]), *(float(p) for p in best_np[i, :n])),
                rank=int(rank_np[i]),
            )
        )
    return out

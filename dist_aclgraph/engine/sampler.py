"""From logits to token ids, on the device.

Randomness enters as one uniform number per place, drawn on the host from (seed, position), and
picks a token by inverting the cumulative distribution over the sorted, filtered probabilities. So a
request gets the same tokens in any batch, on any device, and when it is resumed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.engine.random_numbers import uniforms
from dist_aclgraph.engine.sampling_table import SamplingPlaces
from dist_aclgraph.engine.token_counts import ToDevice, TokenCounts
from dist_aclgraph.ints import pack_ints
from dist_aclgraph.steps.step import RowLogprobs


def choose_tokens(
    logits: Tensor, places: SamplingPlaces, counts: TokenCounts, to_device: ToDevice
) -> Tensor:
    """Choose one token for each place; the host waits for nothing.

    Args:
        logits: [n, vocab], any float type; not modified.
        counts: of the rows that have penalties.
        to_device: copies a small array to the device.

    Returns:
        [n] int32.
    """
    adjusted = _suppress(counts.penalise(logits.float(), places), places, to_device)
    greedy = adjusted.argmax(-1)
    if places["temperature"].any():
        return _draw(adjusted, greedy, places, to_device).int()
    return greedy.int()


def _suppress(logits: Tensor, places: SamplingPlaces, to_device: ToDevice) -> Tensor:
    """Forbid end tokens at places before ``min_tokens``."""
    vocab = logits.shape[1]
    flat = [index * vocab + token for index, token in places.suppressed() if token < vocab]
    if not flat:
        return logits
    where = to_device(np.asarray(flat, dtype=np.int64))
    forbidden = torch.full((len(flat),), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.reshape(-1).scatter(0, where, forbidden).view(logits.shape)


def _draw(logits: Tensor, greedy: Tensor, places: SamplingPlaces, to_device: ToDevice) -> Tensor:
    """Sample places with a temperature; the others keep their greedy token."""
    vocab = logits.shape[1]
    is_random = places["temperature"] > 0.0
    numbers = np.stack(
        [
            np.where(is_random, places["temperature"], np.float32(1.0)),
            places["top_p"],
            places["min_p"],
            uniforms(places["seed"], places.positions),
        ]
    )
    temperature, top_p, min_p, uniform = to_device(numbers).unsqueeze(-1).unbind(0)  # [n, 1] each
    most = places["top_k"]
    most = np.where((most > 0) & (most < vocab), most, np.int32(vocab))
    top_k = to_device(most).unsqueeze(-1)

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
    return torch.where(to_device(is_random), drawn, greedy)


def report_logprobs(
    logits: Tensor, chosen: Tensor, places: SamplingPlaces, to_device: ToDevice
) -> dict[int, RowLogprobs]:
    """Return, by index, the log-probabilities of the places that ask for some; the host waits.

    They are those of the raw distribution, before penalties and temperature.

    Args:
        logits: [n, vocab].
        chosen: [n] int32.
    """
    asking = np.flatnonzero(places["logprobs"] >= 0)
    if not len(asking):
        return {}
    wanted = places["logprobs"][asking]
    where = to_device(asking.astype(np.int64))
    chosen = chosen.index_select(0, where)
    all_logprobs = torch.log_softmax(logits.index_select(0, where).float(), dim=-1)
    of_chosen = all_logprobs.gather(1, chosen.long().unsqueeze(-1))  # [n, 1]
    rank = (all_logprobs > of_chosen).sum(-1) + 1
    count = min(max(int(wanted.max()), 1), logits.shape[1])
    best, best_ids = all_logprobs.topk(count, dim=-1)
    ids = torch.cat([chosen.unsqueeze(-1), best_ids.int()], -1).cpu().numpy()
    values = torch.cat([of_chosen, best], -1).cpu().tolist()
    return {
        index: RowLogprobs(pack_ints(ids[i, : n + 1]), tuple(values[i][: n + 1]), place)
        for i, (index, n, place) in enumerate(
            zip(asking.tolist(), wanted.tolist(), rank.cpu().tolist(), strict=True)
        )
    }

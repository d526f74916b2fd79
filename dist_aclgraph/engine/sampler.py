"""From logits to token ids, on the device.

Tokens with a temperature are drawn by a race (``race_noise``): only rows with top-k or top-p are
sorted. The random numbers depend on (seed, position, token) alone, so a request gets the same
tokens in any batch, on every rank, and after a resumption. A step sends the keys of the numbers;
the parameters are on the device (``sampling_places``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.engine.race_noise import RaceNoise, make_keys
from dist_aclgraph.engine.sampling_places import AskedLogprobs, SamplingPlaces, WideTopK
from dist_aclgraph.engine.token_counts import ToDevice, TokenCounts
from dist_aclgraph.ints import IntArray, pack_ints
from dist_aclgraph.sampling import MAX_LOGPROBS
from dist_aclgraph.steps.step import RowLogprobs

LOGPROBS_WIDTH = 2 * (MAX_LOGPROBS + 1) + 1  # of the widest row of ``ComingLogprobs.packed``


def choose_tokens(
    logits: Tensor,
    places: SamplingPlaces,
    positions: IntArray,
    counts: TokenCounts,
    noise: RaceNoise,
    to_device: ToDevice,
    forbid_words: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Tensor:
    """Choose one token for each place; the host waits for nothing.

    Args:
        logits: [n, vocab], any float type; not modified.
        positions: [n], positions of the sampled tokens.
        counts: of the rows that have penalties.
        to_device: copies a small array to the device.
        forbid_words: from [n, vocab] to the same, without the ends of bad words.

    Returns:
        [n] int32.
    """
    adjusted = logits.float()
    if places.biases is not None:
        adjusted = adjusted.index_add(0, places.biases.where, places.biases.values)
    if places.penalties is not None:
        adjusted = counts.penalise(adjusted, places.penalties)
    adjusted = forbid_words(_suppress(adjusted, places, positions, to_device))
    if places.temperature is not None:
        adjusted = _filter(adjusted, places)
        # A place without a temperature has zero: its most probable token wins.
        keys = to_device(make_keys(places.seeds, positions)).unsqueeze(-1)
        adjusted = adjusted.addcmul(noise.log_exponentials(keys), places.temperature, value=-1)
    return adjusted.argmax(-1).int()


def _suppress(
    logits: Tensor, places: SamplingPlaces, positions: IntArray, to_device: ToDevice
) -> Tensor:
    """Forbid end tokens at places before ``min_tokens``."""
    vocab = logits.shape[1]
    early = places.suppressed_at(positions)
    flat = [index * vocab + token for index, token in early if token < vocab]
    if not flat:
        return logits
    where = to_device(np.asarray(flat, dtype=np.int64))
    forbidden = torch.full((len(flat),), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.reshape(-1).index_copy(0, where, forbidden).view(logits.shape)


def _filter(logits: Tensor, places: SamplingPlaces) -> Tensor:
    """Forbid the tokens outside top-k, top-p and min-p; rows without these settings are unchanged.

    Top-p counts the tokens within top-k. Equal logits are kept or dropped by top-k together.
    """
    if places.wide_top_k is not None:
        logits = _keep_top_k(logits, places.wide_top_k)
    for each in places.filters:
        chosen = logits if each.where is None else logits.index_select(0, each.where)
        kept = torch.ops.npu.npu_top_k_top_p(chosen / each.temperature, each.top_p, each.top_k)
        kept.mul_(each.temperature)
        logits = kept if each.where is None else logits.index_copy(0, each.where, kept)
    if places.least is None:
        return logits
    least = logits.amax(-1, keepdim=True) - places.least
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_k(logits: Tensor, wide: WideTopK) -> Tensor:
    """In some rows, forbid logits below the k-th largest."""
    chosen = logits.index_select(0, wide.where)
    best = chosen.topk(wide.most, dim=-1).values
    least = best.gather(1, wide.last)
    return logits.index_copy(0, wide.where, chosen.masked_fill_(chosen < least, -torch.inf))


@dataclass(frozen=True)
class ComingLogprobs:
    """Log-probabilities of some places, on their way to the host.

    Attributes:
        asking: [m], indices of the places.
        wanted: [m], how many of the most probable tokens each wants.
        packed: [m, 2 * (count + 1) + 1] float32, pinned: token ids (the chosen one, the best ones),
            rank, as the bits of integers; then as many log-probabilities as ids.
    """

    asking: npt.NDArray[np.intp]
    wanted: npt.NDArray[np.int32]
    packed: Tensor

    def read(self) -> dict[int, RowLogprobs]:
        """Return a report for each place, by index; requires that the copy has ended."""
        values = self.packed.numpy()
        width = values.shape[1] // 2 + 1
        ids, logprobs = values[:, :width].view(np.int32), values[:, width:].tolist()
        return {
            index: RowLogprobs(
                pack_ints(ids[i, : n + 1]), tuple(logprobs[i][: n + 1]), int(ids[i, -1])
            )
            for i, (index, n) in enumerate(
                zip(self.asking.tolist(), self.wanted.tolist(), strict=True)
            )
        }


def queue_logprobs(
    logits: Tensor, chosen: Tensor, asked: AskedLogprobs, landing: Tensor
) -> ComingLogprobs:
    """Send log-probabilities of the places that want them to the host, without waiting.

    The values are of the raw distribution, before penalties and temperature.

    Args:
        logits: [n, vocab].
        chosen: [n] int32.
        landing: [>= n * LOGPROBS_WIDTH] float32, pinned; in use until the values are read.
    """
    chosen = chosen.index_select(0, asked.where)
    packed = report_of(logits.index_select(0, asked.where), chosen, int(asked.wanted.max()))
    landed = landing[: packed.numel()].view(packed.shape)
    landed.copy_(packed, non_blocking=True)
    return ComingLogprobs(asked.asking, asked.wanted, landed)


def report_of(logits: Tensor, chosen: Tensor, num_best: int) -> Tensor:
    """Return log-probabilities of chosen tokens and of the best ones.

    Args:
        logits: [n, vocab]; chosen: [n] int32.

    Returns:
        as ``ComingLogprobs.packed``, with ``num_best`` or one best token, on the device.
    """
    all_logprobs = torch.log_softmax(logits.float(), dim=-1)
    of_chosen = all_logprobs.gather(1, chosen.long().unsqueeze(-1))  # [n, 1]
    rank = (all_logprobs > of_chosen).sum(-1) + 1
    count = min(max(num_best, 1), logits.shape[1])
    best, best_ids = all_logprobs.topk(count, dim=-1)
    # One copy for both: integers travel as the bits of floats.
    integers = torch.cat([chosen.unsqueeze(-1), best_ids.int(), rank.int().unsqueeze(-1)], -1)
    return torch.cat([integers.view(torch.float32), of_chosen, best], -1)

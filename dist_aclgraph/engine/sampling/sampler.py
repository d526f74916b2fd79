"""Chooses token ids from logits, on the device.

If a row has a temperature, its token is drawn with an exponential race (``race_noise``). This race
needs no sorted logits, so only rows with top-k or top-p are sorted. The random numbers depend only
on (seed, position, token), so a request gets the same tokens in any batch, on every rank, and after
a resumption. A step sends only the keys of the random numbers, because the sampling parameters are
already on the device (``sampling_places``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray, pack_ints
from dist_aclgraph.engine.sampling.race_noise import RaceNoise, make_keys
from dist_aclgraph.engine.sampling.sampling_places import (
    AskedLogprobs,
    Biases,
    SamplingPlaces,
    WideTopK,
)
from dist_aclgraph.engine.sampling.token_counts import ToDevice, TokenCounts
from dist_aclgraph.sampling import MAX_LOGPROBS
from dist_aclgraph.steps.step import RowLogprobs

LOGPROBS_WIDTH = 2 * (MAX_LOGPROBS + 1) + 1  # maximum width of ``ComingLogprobs.packed``


def choose_tokens(
    logits: Tensor,
    places: SamplingPlaces,
    positions: IntArray,
    counts: TokenCounts,
    noise: RaceNoise,
    to_device: ToDevice,
    chosen: Tensor,
    forbid_words: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> None:
    """Choose one token for each row of ``logits``; the host does not wait.

    Args:
        logits: [n, vocab], any float type; they are not modified.
        positions: [n], positions of the sampled tokens; used only if
            ``places.depends_on_positions``.
        counts: counts of earlier tokens, for rows that have penalties.
        to_device: copies a small array to the device.
        chosen: [n] int32; receives the tokens.
        forbid_words: returns [n, vocab] logits in which the last tokens of bad words are -inf.
    """
    adjusted = _add_biases(logits, places.biases)
    if places.penalties is not None:
        adjusted = counts.penalise(adjusted, places.penalties)
    adjusted = forbid_words(_suppress(adjusted, places, positions, to_device))
    if places.temperature is not None:
        adjusted = _filter(adjusted, places)
        # With temperature 0, the random numbers have no effect, so the most probable token wins.
        keys = to_device(make_keys(places.seeds, positions)).unsqueeze(-1)
        adjusted = adjusted.addcmul(noise.log_exponentials(keys), places.temperature, value=-1)
    # torch_npu accepts int32 for ``out``, so no conversion is needed
    torch.argmax(adjusted, -1, out=chosen)


def _add_biases(logits: Tensor, biases: Biases | None) -> Tensor:
    if biases is None:
        return logits.float()
    if biases.where is None:
        return torch.add(biases.values, logits)  # this operator also converts the logits to float32
    return logits.float().index_add(0, biases.where, biases.values)


def _suppress(
    logits: Tensor, places: SamplingPlaces, positions: IntArray, to_device: ToDevice
) -> Tensor:
    """Forbid stop tokens while a request's output has fewer tokens than ``min_tokens``."""
    if not places.suppressed:
        return logits
    vocab = logits.shape[1]
    early = places.suppressed_at(positions)
    flat = [index * vocab + token for index, token in early if token < vocab]
    if not flat:
        return logits
    where = to_device(np.asarray(flat, dtype=np.int64))
    forbidden = torch.full((len(flat),), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.reshape(-1).index_copy(0, where, forbidden).view(logits.shape)


def _filter(logits: Tensor, places: SamplingPlaces) -> Tensor:
    """Forbid the tokens that top-k, top-p or min-p excludes. Rows without these limits stay
    unchanged.

    The probabilities for top-p are computed over the tokens that top-k keeps. If several tokens
    have the same logit, top-k keeps all of them or none of them.
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
    """In the rows ``wide.where``, forbid each token whose logit is below the k-th largest logit."""
    chosen = logits.index_select(0, wide.where)
    best = chosen.topk(wide.most, dim=-1).values
    least = best.gather(1, wide.last)
    return logits.index_copy(0, wide.where, chosen.masked_fill_(chosen < least, -torch.inf))


@dataclass(frozen=True)
class ComingLogprobs:
    """Log-probabilities at places where tokens are sampled. Their copy to the host is queued.

    Attributes:
        asking: [m], indices of the places.
        wanted: [m], for each place, the number of most probable tokens that its request wants to
            see.
        packed: [m, 2 * (count + 1) + 1] float32, pinned. The first columns are the id of the chosen
            token, the ids of the ``count`` most probable tokens, and the chosen token's rank in the
            distribution; these columns contain the bits of int32 numbers. The other columns are the
            log-probabilities of the chosen token and of the most probable tokens.
    """

    asking: npt.NDArray[np.intp]
    wanted: npt.NDArray[np.int32]
    packed: Tensor

    def read(self) -> dict[int, RowLogprobs]:
        """Return a report for each place; the keys are indices of places.

        Call this only after the copy has ended.
        """
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
    """Compute log-probabilities for the sampled tokens whose requests want them, and queue a copy
    to the host.

    The values belong to the model's own distribution, before penalties and temperature.

    Args:
        logits: [n, vocab].
        chosen: [n] int32, the chosen tokens.
        landing: [>= n * LOGPROBS_WIDTH] float32, pinned memory that receives the values. Use this
            memory for nothing else until the values are read.
    """
    chosen = chosen.index_select(0, asked.where)
    packed = report_of(logits.index_select(0, asked.where), chosen, int(asked.wanted.max()))
    landed = landing[: packed.numel()].view(packed.shape)
    landed.copy_(packed, non_blocking=True)
    return ComingLogprobs(asked.asking, asked.wanted, landed)


def report_of(logits: Tensor, chosen: Tensor, num_best: int) -> Tensor:
    """Return log-probabilities of the chosen tokens and of the most probable tokens.

    Args:
        logits: [n, vocab]; chosen: [n] int32.

    Returns:
        A tensor on the device with the columns of ``ComingLogprobs.packed``. The number of most
        probable tokens is ``num_best``, but at least 1.
    """
    all_logprobs = torch.log_softmax(logits.float(), dim=-1)
    of_chosen = all_logprobs.gather(1, chosen.long().unsqueeze(-1))  # [n, 1]
    rank = (all_logprobs > of_chosen).sum(-1) + 1
    count = min(max(num_best, 1), logits.shape[1])
    best, best_ids = all_logprobs.topk(count, dim=-1)
    # The bits of the integers are sent as floats, so that one copy is enough.
    integers = torch.cat([chosen.unsqueeze(-1), best_ids.int(), rank.int().unsqueeze(-1)], -1)
    return torch.cat([integers.view(torch.float32), of_chosen, best], -1)

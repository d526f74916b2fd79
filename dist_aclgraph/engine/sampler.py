"""From logits to token ids, on the device.

Tokens with a temperature are drawn by a race (``race_noise``): nothing is sorted but the rows that
ask for top-k or top-p. The numbers are those of (seed, position, token), so that a request gets the
same tokens in any batch, on every rank, and when it is resumed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.race_noise import RaceNoise, make_keys
from dist_aclgraph.engine.sampling_table import SamplingPlaces
from dist_aclgraph.engine.token_counts import ToDevice, TokenCounts
from dist_aclgraph.ints import pack_ints
from dist_aclgraph.packing import stack_rows
from dist_aclgraph.sampling import MAX_LOGPROBS
from dist_aclgraph.steps.step import RowLogprobs

MAX_OPERATOR_K = 1024  # npu_top_k_top_p takes no larger k
LOGPROBS_WIDTH = 2 * (MAX_LOGPROBS + 1) + 1  # of the widest row of ``ComingLogprobs.packed``


def choose_tokens(
    logits: Tensor,
    places: SamplingPlaces,
    counts: TokenCounts,
    noise: RaceNoise,
    to_device: ToDevice,
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
    if places["temperature"].any():
        adjusted = _filter(adjusted, places, to_device)
        # A place without a temperature has zero: its most probable token wins.
        temperature = to_device(places["temperature"]).unsqueeze(-1)
        keys = to_device(make_keys(places["seed"], places.positions)).unsqueeze(-1)
        adjusted = adjusted.addcmul(noise.log_exponentials(keys), temperature, value=-1)
    return adjusted.argmax(-1).int()


def _suppress(logits: Tensor, places: SamplingPlaces, to_device: ToDevice) -> Tensor:
    """Forbid end tokens at places before ``min_tokens``."""
    vocab = logits.shape[1]
    flat = [index * vocab + token for index, token in places.suppressed() if token < vocab]
    if not flat:
        return logits
    where = to_device(np.asarray(flat, dtype=np.int64))
    forbidden = torch.full((len(flat),), -torch.inf, dtype=logits.dtype, device=logits.device)
    return logits.reshape(-1).index_copy(0, where, forbidden).view(logits.shape)


def _filter(logits: Tensor, places: SamplingPlaces, to_device: ToDevice) -> Tensor:
    """Forbid what top-k, top-p and min-p leave out; rows that ask for none are left alone.

    Top-p counts what top-k has left; equal logits pass or fail top-k together.
    """
    vocab, is_random = logits.shape[1], places["temperature"] > 0
    cuts_k = is_random & (places["top_k"] > 0) & (places["top_k"] < vocab)
    is_wide = cuts_k & (places["top_k"] > MAX_OPERATOR_K)
    if is_wide.any():
        logits = _keep_top_k(logits, np.flatnonzero(is_wide), places["top_k"], to_device)
        cuts_k &= ~is_wide
    cuts_p = is_random & (places["top_p"] < 1)
    for is_meant in (cuts_k & cuts_p, cuts_k & ~cuts_p, cuts_p & ~cuts_k):
        if is_meant.any():
            rows = np.flatnonzero(is_meant)
            numbers = stack_rows([places["temperature"][rows], places["top_p"][rows]])
            temperature, top_p = to_device(numbers)[:, : len(rows)].unbind(0)
            where = to_device(rows)
            kept = torch.ops.npu.npu_top_k_top_p(
                logits.index_select(0, where).div_(temperature.unsqueeze(-1)),
                top_p if cuts_p[rows[0]] else None,
                to_device(places["top_k"][rows]) if cuts_k[rows[0]] else None,
            )
            logits = logits.index_copy(0, where, kept.mul_(temperature.unsqueeze(-1)))
    has_min_p = is_random & (places["min_p"] > 0)
    if not has_min_p.any():
        return logits
    # In logits, how much less than the best token's: all of it where a row asks for nothing.
    less = np.full(len(places), np.inf, np.float32)
    less[has_min_p] = -places["temperature"][has_min_p] * np.log(places["min_p"][has_min_p])
    least = logits.amax(-1, keepdim=True) - to_device(less).unsqueeze(-1)
    return logits.masked_fill(logits < least, -torch.inf)


def _keep_top_k(
    logits: Tensor, rows: npt.NDArray[np.intp], top_k: npt.NDArray[np.int32], to_device: ToDevice
) -> Tensor:
    """Forbid in some rows what is less than their k-th logit."""
    where, wanted = to_device(rows), top_k[rows]
    chosen = logits.index_select(0, where)
    best = chosen.topk(int(wanted.max()), dim=-1).values
    least = best.gather(1, to_device(wanted.astype(np.int64) - 1).unsqueeze(-1))
    return logits.index_copy(0, where, chosen.masked_fill_(chosen < least, -torch.inf))


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
        """Return a report for each place, by index; the copy has ended."""
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
    logits: Tensor, chosen: Tensor, places: SamplingPlaces, npu: Npu, landing: Tensor
) -> ComingLogprobs | None:
    """Send the log-probabilities of the places that ask for some to the host, which does not wait.

    They are those of the raw distribution, before penalties and temperature.

    Args:
        logits: [n, vocab].
        chosen: [n] int32.
        landing: [>= n * LOGPROBS_WIDTH] float32, pinned; taken until they are read.
    """
    asking = np.flatnonzero(places["logprobs"] >= 0)
    if not len(asking):
        return None
    wanted = places["logprobs"][asking]
    where = npu.upload(asking.astype(np.int64))
    chosen = chosen.index_select(0, where)
    all_logprobs = torch.log_softmax(logits.index_select(0, where).float(), dim=-1)
    of_chosen = all_logprobs.gather(1, chosen.long().unsqueeze(-1))  # [n, 1]
    rank = (all_logprobs > of_chosen).sum(-1) + 1
    count = min(max(int(wanted.max()), 1), logits.shape[1])
    best, best_ids = all_logprobs.topk(count, dim=-1)
    # One copy: integers travel as the bits of floats.
    integers = torch.cat([chosen.unsqueeze(-1), best_ids.int(), rank.int().unsqueeze(-1)], -1)
    packed = torch.cat([integers.view(torch.float32), of_chosen, best], -1)
    landed = landing[: packed.numel()].view(packed.shape)
    landed.copy_(packed, non_blocking=True)
    return ComingLogprobs(asking, wanted, landed)

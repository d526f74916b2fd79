"""The special places of a step, and their sampling parameters on the device.

A place is a token of a step after which a token is sampled. A place is special if the sampled token
is not simply the most probable token, or if the request wants log-probabilities. Parameters are
sent only when the sampled rows or their parameters change. Between two changes, every step reads
the same tensors. No tensor on the device is written twice: a change creates new tensors, and steps
in flight read the old tensors. Only work that is queued later can reuse the memory of the old
tensors. The NPU stream runs its work in order, so steps in flight still read the old values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.arrays.packing import stack_rows
from dist_aclgraph.engine.sampling.race_noise import mix_seeds
from dist_aclgraph.engine.sampling.sampling_table import SamplingTable
from dist_aclgraph.engine.sampling.token_counts import Penalties, ToDevice
from dist_aclgraph.steps.host_step import HostStep

MAX_OPERATOR_K = 1024  # the largest k that npu_top_k_top_p accepts

Settings = npt.NDArray[np.void]


@dataclass(frozen=True)
class WideTopK:
    """Places where a token is sampled with a top-k limit k that is too large for the operator
    ``npu_top_k_top_p``.

    Attributes:
        where: [m] int64, indices of the places. most: the largest k of all these places.
        last: [m, 1] int64, k - 1 of each place.
    """

    where: Tensor
    most: int
    last: Tensor


@dataclass(frozen=True)
class Filter:
    """Places where a token is sampled, and for which the operator ``npu_top_k_top_p`` applies top-k
    and top-p together.

    Attributes:
        where: [m] int64, indices of the places; None means all places.
        temperature: [m, 1] float32.
        top_p: [m] float32, None if no place uses top-p.
        top_k: [m] int32, None if no place uses top-k.
    """

    where: Tensor | None
    temperature: Tensor
    top_p: Tensor | None
    top_k: Tensor | None


@dataclass(frozen=True)
class Biases:
    """The places where a token is sampled with biases: numbers that are added to the logits,
    because some tokens are preferred or forbidden.

    Attributes:
        where: [m] int64, indices of the places; None means all places.
        values: [m, vocab] float32.
    """

    where: Tensor | None
    values: Tensor


@dataclass(frozen=True)
class AskedLogprobs:
    """Places where a token is sampled for a request that wants log-probabilities.

    Attributes:
        asking: [m], indices of the places; where: the same indices, int64 on the device.
        wanted: [m], for each place, the number of most probable tokens that its request wants to
            see.
    """

    asking: npt.NDArray[np.intp]
    where: Tensor
    wanted: npt.NDArray[np.int32]


@dataclass(frozen=True)
class SamplingPlaces:
    """The sampling parameters of places, where tokens are sampled. Successive steps have the same
    parameters until the sampled rows change, or until the parameters of a row change.

    Attributes:
        seeds: [n], the mixed seeds; see ``mix_seeds``.
        free_from: [n], for each place, the first position at which stop tokens are allowed.
        suppressed: for each place, the tokens that are forbidden before ``free_from``. The tuple is
            empty if no place has such tokens.
        biases: the places with biases; None if no place has a bias.
        penalties: the places with penalties; None if no place has a penalty.
        temperature: [n, 1] float32. At a place with temperature 0, the most probable token wins.
            None if all temperatures are 0.
        least: [n, 1] float32. Min-p keeps the tokens whose logits are at least the place's greatest
            logit minus this number. None if no place uses min-p.
    """

    seeds: npt.NDArray[np.uint64]
    free_from: npt.NDArray[np.int64]
    suppressed: tuple[tuple[int, ...], ...]
    biases: Biases | None
    penalties: Penalties | None
    temperature: Tensor | None
    wide_top_k: WideTopK | None
    filters: tuple[Filter, ...]
    least: Tensor | None
    logprobs: AskedLogprobs | None

    @property
    def depends_on_positions(self) -> bool:
        return self.temperature is not None or bool(self.suppressed)

    def suppressed_at(self, positions: IntArray) -> Iterator[tuple[int, int]]:
        """Yield (index of the place, token id) for each stop token that is forbidden at a place.

        Args:
            positions: [n], positions of the sampled tokens.
        """
        for index in np.flatnonzero(positions < self.free_from).tolist():
            for token in self.suppressed[index]:
                yield index, token


def send_places(
    table: SamplingTable, rows: IntArray, vocab_size: int, to_device: ToDevice
) -> SamplingPlaces:
    """Send the sampling parameters of places, where tokens are sampled, to the device.

    Args:
        rows: [n], row of each place.
        to_device: copies a small array to the device; the host does not wait.
    """
    settings = table.settings(rows)
    is_random = settings["temperature"] > 0
    wide, filters = _send_filters(settings, is_random, vocab_size, to_device)
    asking = np.flatnonzero(settings["logprobs"] >= 0)
    wanted = settings["logprobs"][asking]
    suppressed = tuple(table.suppressed.get(row, ()) for row in rows.tolist())
    return SamplingPlaces(
        seeds=mix_seeds(settings["seed"]),
        free_from=settings["num_prompt_tokens"].astype(np.int64) + settings["min_tokens"],
        suppressed=suppressed if any(suppressed) else (),
        biases=_send_biases(table, rows, vocab_size, to_device),
        penalties=_send_penalties(settings, rows, to_device),
        temperature=_column(settings["temperature"], to_device) if is_random.any() else None,
        wide_top_k=wide,
        filters=filters,
        least=_send_least(settings, is_random, to_device),
        logprobs=AskedLogprobs(asking, to_device(asking), wanted) if len(asking) else None,
    )


def _send_biases(
    table: SamplingTable, rows: IntArray, vocab_size: int, to_device: ToDevice
) -> Biases | None:
    if not table.biases:
        return None
    biased = [index for index, row in enumerate(rows.tolist()) if row in table.biases]
    if not biased:
        return None
    each = [table.biases[int(rows[index])] for index in biased]
    others = to_device(np.array([bias.of_others for bias in each], np.float32))
    values = others.unsqueeze(-1).expand(-1, vocab_size).reshape(-1).clone()
    flat = [bias.tokens.astype(np.int64) + i * vocab_size for i, bias in enumerate(each)]
    where = to_device(np.concatenate(flat))
    values.index_copy_(0, where, to_device(np.concatenate([bias.values for bias in each])))
    is_all = len(biased) == len(rows)
    places = None if is_all else to_device(np.array(biased, np.int64))
    return Biases(places, values.view(-1, vocab_size))


def _send_penalties(settings: Settings, rows: IntArray, to_device: ToDevice) -> Penalties | None:
    penalised = np.flatnonzero(settings["has_penalties"])
    if not len(penalised):
        return None
    chosen = settings[penalised]

    def column(name: str, without: float) -> Tensor | None:
        has_any = (chosen[name] != without).any()
        return _column(chosen[name], to_device) if has_any else None

    of_places = rows[penalised].astype(np.int64)
    first, is_consecutive = int(of_places[0]), (np.diff(of_places) == 1).all()
    return Penalties(
        rows=slice(first, first + len(of_places)) if is_consecutive else to_device(of_places),
        where=None if len(penalised) == len(rows) else to_device(penalised),
        repetition=column("repetition_penalty", 1),
        only_weakens=bool((chosen["repetition_penalty"] >= 1).all()),
        frequency=column("frequency_penalty", 0),
        presence=column("presence_penalty", 0),
    )


def _send_filters(
    settings: Settings, is_random: npt.NDArray[np.bool_], vocab_size: int, to_device: ToDevice
) -> tuple[WideTopK | None, tuple[Filter, ...]]:
    """Send the indices of the places where tokens are sampled with top-k or top-p, and the limits
    of these places.

    Places without a temperature are not included.
    """
    top_k, wide, filters = settings["top_k"], None, []
    cuts_k = is_random & (top_k > 0) & (top_k < vocab_size)
    is_wide = cuts_k & (top_k > MAX_OPERATOR_K)
    if is_wide.any():
        chosen, wanted = np.flatnonzero(is_wide), top_k[is_wide].astype(np.int64)
        wide = WideTopK(to_device(chosen), int(wanted.max()), _column(wanted - 1, to_device))
        cuts_k &= ~is_wide
    cuts_p = is_random & (settings["top_p"] < 1)
    for is_meant in (cuts_k & cuts_p, cuts_k & ~cuts_p, cuts_p & ~cuts_k):
        if is_meant.any():
            chosen = np.flatnonzero(is_meant)
            numbers = to_device(stack_rows([settings[n][chosen] for n in ("temperature", "top_p")]))
            temperature, top_p = numbers[:, : len(chosen)].unbind(0)
            one = Filter(
                where=None if is_meant.all() else to_device(chosen),
                temperature=temperature.unsqueeze(-1),
                top_p=top_p if cuts_p[chosen[0]] else None,
                top_k=to_device(top_k[chosen]) if cuts_k[chosen[0]] else None,
            )
            filters.append(one)
    return wide, tuple(filters)


def _send_least(
    settings: Settings, is_random: npt.NDArray[np.bool_], to_device: ToDevice
) -> Tensor | None:
    has_min_p = is_random & (settings["min_p"] > 0)
    if not has_min_p.any():
        return None
    # Infinity means that the place does not use min-p.
    less = np.full(len(settings), np.inf, np.float32)
    chosen = settings[has_min_p]
    less[has_min_p] = -chosen["temperature"] * np.log(chosen["min_p"])
    return _column(less, to_device)


def _column(values: np.ndarray, to_device: ToDevice) -> Tensor:
    """Send [n] numbers, and return them as [n, 1]."""
    return to_device(values.copy()).unsqueeze(-1)  # ``copy`` makes columns contiguous


@dataclass(frozen=True)
class StepPlaces:
    """The special places of a step: places whose token is not simply the most probable token, or
    whose request wants log-probabilities.

    Attributes:
        indices: [n], indices of the special places among all places of the step.
        where: the same indices, int64 on the device; None means all places.
        samples: [n], for each place, the index of its request among the sampled requests.
        drafts: [n], for each place, how many of its request's drafts come before this place.
    """

    indices: npt.NDArray[np.intp]
    where: Tensor | None
    samples: npt.NDArray[np.intp]
    drafts: npt.NDArray[np.intp]
    places: SamplingPlaces

    def positions(self, step: HostStep) -> IntArray:
        """Return the position that each sampled token has if all drafts before it are accepted,
        [n].
        """
        # Each request has k + 1 places, even if fewer tokens are sampled for the request. The
        # unused places have the position of the last sampled token.
        num_logits = step.num_logits[self.samples]
        first = step.kv_lens[step.sampled][self.samples] - num_logits + 1
        positions: IntArray = (first + np.minimum(self.drafts, num_logits - 1)).astype(np.int32)
        return positions


class KnownPlaces:
    """Owns sampling parameters on the device. The parameters belong to the special places
    (``StepPlaces``) of the latest step that had such places.

    Args:
        num_places: k + 1, number of tokens that a step with k drafts samples for one request.
    """

    def __init__(
        self, table: SamplingTable, num_places: int, vocab_size: int, to_device: ToDevice
    ) -> None:
        self._table = table
        self._num_places = num_places
        self._vocab_size = vocab_size
        self._to_device = to_device
        # Rows and version of the sent parameters; None if the device has no valid parameters.
        self._rows: IntArray | None = None
        self._version = 0
        self._places: StepPlaces | None = None

    def find(self, sampled_rows: IntArray) -> StepPlaces | None:
        """Send the parameters that have changed, and return the step's special places; None if the
        step has no special place.

        Args:
            sampled_rows: [num_samples], the row of each sampled request.
        """
        if self._table.is_all_plain or not len(sampled_rows):
            return None
        if not self._is_known(sampled_rows):
            self._rows = None  # Until all parameters are sent, the device has no valid parameters.
            self._places = self._send(sampled_rows)
            self._version = self._table.version
        # The caller passes the same array object as long as the rows do not change.
        self._rows = sampled_rows
        return self._places

    def forget(self) -> None:
        """Drop the parameters after an abort of the device. The abort may have stopped the copy of
        the parameters to the device.
        """
        self._rows = self._places = None

    def _is_known(self, rows: IntArray) -> bool:
        if self._rows is None or self._version != self._table.version:
            return False
        return rows is self._rows or np.array_equal(rows, self._rows)

    def _send(self, sampled_rows: IntArray) -> StepPlaces | None:
        is_special = ~self._table.is_plain[sampled_rows]
        if not is_special.any():
            return None
        indices = np.flatnonzero(np.repeat(is_special, self._num_places))
        samples, drafts = np.divmod(indices, self._num_places)
        rows = sampled_rows[samples]
        places = send_places(self._table, rows, self._vocab_size, self._to_device)
        where = None if is_special.all() else self._to_device(indices)
        return StepPlaces(indices, where, samples, drafts, places)

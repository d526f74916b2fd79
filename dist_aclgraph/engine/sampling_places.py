"""The places of a step that want something else than the most probable token, and what the device
knows of them: sent when rows or parameters change, and read by each step until then.

Nothing on the device is written twice. What changes is sent to new tensors; steps in flight read
the old ones, whose memory the stream's order keeps for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from dist_aclgraph.engine.sampling_table import SamplingTable
from dist_aclgraph.engine.token_counts import Penalties, ToDevice
from dist_aclgraph.ints import IntArray
from dist_aclgraph.packing import stack_rows
from dist_aclgraph.steps.host_step import HostStep

MAX_OPERATOR_K = 1024  # npu_top_k_top_p takes no larger k

Settings = npt.NDArray[np.void]


@dataclass(frozen=True)
class WideTopK:
    """Places whose k is too large for the operator.

    Attributes:
        where: [m] int64, indices of the places; most: the largest k.
        last: [m, 1] int64, k - 1 of each.
    """

    where: Tensor
    most: int
    last: Tensor


@dataclass(frozen=True)
class Filter:
    """Places that the operator cuts in the same way.

    Attributes:
        where: [m] int64, indices of the places; None where it is all of them.
        temperature: [m, 1] float32.
        top_p: [m] float32; top_k: [m] int32; None where it is not cut by.
    """

    where: Tensor | None
    temperature: Tensor
    top_p: Tensor | None
    top_k: Tensor | None


@dataclass(frozen=True)
class AskedLogprobs:
    """Places that want log-probabilities.

    Attributes:
        asking: [m], indices of the places; where: the same, int64 on the device.
        wanted: [m], how many of the most probable tokens each wants.
    """

    asking: npt.NDArray[np.intp]
    where: Tensor
    wanted: npt.NDArray[np.int32]


@dataclass(frozen=True)
class SamplingPlaces:
    """How tokens are sampled at places: all that stays the same while the same rows go on.

    Attributes:
        seeds: [n]; free_from: [n], the first position at which end tokens may come.
        suppressed: of each place, the tokens that must not come before that position.
        penalties: None where no place has some.
        temperature: [n, 1] float32, 0 where the most probable token wins; None where all are.
        least: [n, 1] float32, how much less than the best logit is forbidden (min-p); or None.
    """

    seeds: npt.NDArray[np.int64]
    free_from: npt.NDArray[np.int64]
    suppressed: tuple[tuple[int, ...], ...]
    penalties: Penalties | None
    temperature: Tensor | None
    wide_top_k: WideTopK | None
    filters: tuple[Filter, ...]
    least: Tensor | None
    logprobs: AskedLogprobs | None

    def suppressed_at(self, positions: IntArray) -> Iterator[tuple[int, int]]:
        """Yield index and token of each end token that comes too early.

        Args:
            positions: [n], of the tokens that are sampled.
        """
        for index in np.flatnonzero(positions < self.free_from).tolist():
            for token in self.suppressed[index]:
                yield index, token


def send_places(
    table: SamplingTable, rows: IntArray, vocab_size: int, to_device: ToDevice
) -> SamplingPlaces:
    """Send what the device must know of places.

    Args:
        rows: [n], row of each place.
        to_device: copies a small array to the device; the host waits for nothing.
    """
    settings = table.settings(rows)
    is_random = settings["temperature"] > 0
    wide, filters = _send_filters(settings, is_random, vocab_size, to_device)
    asking = np.flatnonzero(settings["logprobs"] >= 0)
    wanted = settings["logprobs"][asking]
    return SamplingPlaces(
        seeds=settings["seed"].copy(),
        free_from=settings["num_prompt_tokens"].astype(np.int64) + settings["min_tokens"],
        suppressed=tuple(table.suppressed.get(row, ()) for row in rows.tolist()),
        penalties=_send_penalties(settings, rows, to_device),
        temperature=_column(settings["temperature"], to_device) if is_random.any() else None,
        wide_top_k=wide,
        filters=filters,
        least=_send_least(settings, is_random, to_device),
        logprobs=AskedLogprobs(asking, to_device(asking), wanted) if len(asking) else None,
    )


def _send_penalties(settings: Settings, rows: IntArray, to_device: ToDevice) -> Penalties | None:
    penalised = np.flatnonzero(settings["has_penalties"])
    if not len(penalised):
        return None
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    numbers = to_device(stack_rows([settings[name][penalised] for name in names]))
    columns = numbers[:, : len(penalised)].unsqueeze(-1).unbind(0)
    return Penalties(to_device(rows[penalised].astype(np.int64)), to_device(penalised), *columns)


def _send_filters(
    settings: Settings, is_random: npt.NDArray[np.bool_], vocab_size: int, to_device: ToDevice
) -> tuple[WideTopK | None, tuple[Filter, ...]]:
    """Send which places are cut, and by what: none without a temperature is."""
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
    less = np.full(len(settings), np.inf, np.float32)  # all of it where a place asks for nothing
    chosen = settings[has_min_p]
    less[has_min_p] = -chosen["temperature"] * np.log(chosen["min_p"])
    return _column(less, to_device)


def _column(values: np.ndarray, to_device: ToDevice) -> Tensor:
    """Send [n] numbers, and return them as [n, 1]."""
    return to_device(values.copy()).unsqueeze(-1)  # a field of records has gaps


@dataclass(frozen=True)
class StepPlaces:
    """The special places of a step.

    Attributes:
        indices: [n], among all places of the step; where: the same, int64 on the device.
        samples, drafts: [n], whose sample each is, and behind how many drafts.
    """

    indices: npt.NDArray[np.intp]
    where: Tensor
    samples: npt.NDArray[np.intp]
    drafts: npt.NDArray[np.intp]
    places: SamplingPlaces

    def positions(self, step: HostStep) -> IntArray:
        """Return positions of the tokens that are sampled, [n]: drafts before them count."""
        # What repeats a request's last place is sampled like it.
        num_logits = step.num_logits[self.samples]
        first = step.kv_lens[step.sampled][self.samples] - num_logits + 1
        positions: IntArray = (first + np.minimum(self.drafts, num_logits - 1)).astype(np.int32)
        return positions


class KnownPlaces:
    """Owns what the device knows of the special places of the last step that had some.

    Args:
        num_places: k + 1, of each sample.
    """

    def __init__(
        self, table: SamplingTable, num_places: int, vocab_size: int, to_device: ToDevice
    ) -> None:
        self._table = table
        self._num_places = num_places
        self._vocab_size = vocab_size
        self._to_device = to_device
        # For which rows and parameters it was sent; None where nothing is known.
        self._rows: IntArray | None = None
        self._version = 0
        self._places: StepPlaces | None = None

    def find(self, sampled_rows: IntArray) -> StepPlaces | None:
        """Return the special places of a step, sent if need be; None where there are none.

        Args:
            sampled_rows: [num_samples].
        """
        if self._table.is_all_plain or not len(sampled_rows):
            return None
        if not self._is_known(sampled_rows):
            self._rows = None  # until all is sent
            self._places = self._send(sampled_rows)
            self._rows, self._version = sampled_rows, self._table.version
        return self._places

    def forget(self) -> None:
        """The device's work was aborted: what was sent may not be there."""
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
        return StepPlaces(indices, self._to_device(indices), samples, drafts, places)

"""The results of a step, as the engine sends them to a client.

An engine sends the results of all requests of a client in one message. The message contains columns
with one element for each request, or for each token. The client divides the columns among its
requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec
import numpy as np

from dist_aclgraph.arrays.ints import INT_BYTES, listed_ints, pack_ints, unpack_ints
from dist_aclgraph.errors import NotAMessageError
from dist_aclgraph.steps.step import PromptLogprobs, RowLogprobs

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestDelta(msgspec.Struct, frozen=True):
    """The results of one step for one request. The last delta has a ``finish_reason``.

    If a stop token has ended the request, this token is the last element of ``token_ids``.
    """

    request_id: str
    token_ids: bytes = b""  # int32 [num_new_tokens]
    finish_reason: FinishReason | None = None
    # [num_new_tokens]; empty if the request wants no log-probabilities.
    logprobs: tuple[RowLogprobs | None, ...] = ()
    # In the first delta: number of prompt tokens that were found in the prefix cache.
    num_cached_tokens: int = 0
    error: str = ""  # one sentence, if finish_reason is "error"
    error_kind: str = ""  # class name of the error, from errors.py
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # only in the first delta; empty if not wanted
    embedding: bytes = b""  # float32 [hidden], in the only delta of a request for an embedding
    # In the first delta: seconds from the time at which the request left the engine's queue to its
    # first token.
    prefill_s: float = 0.0
    # In the last delta of a request that another service continues: name of the group that has
    # computed the prompt. The engine's client sets it.
    group: str = ""

    @property
    def tokens(self) -> list[int]:
        """The ids of the new tokens, as Python integers."""
        return listed_ints(self.token_ids)


class Note(msgspec.Struct, frozen=True, omit_defaults=True):
    """Additional results of a request. These results are sent with the request's first token or
    with its last token.

    ``index`` is the request's index in ``StepDeltas.numbers``; ``RequestDelta`` explains the other
    fields.
    """

    index: int
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str = ""
    error_kind: str = ""
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embedding: bytes = b""
    prefill_s: float = 0.0


NO_NOTE = Note(-1)


class StepDeltas(msgspec.Struct, frozen=True, omit_defaults=True):
    """The results of one step for all requests of one client, as columns. ``each`` converts the
    columns to one ``RequestDelta`` for each request.

    ``numbers`` are the numbers that the client has given to its requests in ``Submit``.
    """

    numbers: bytes  # int32 [num_reqs]
    token_ids: bytes = b""  # int32 [num_new], the new tokens, in the order of requests
    # int32 [num_reqs], cumulative numbers of the requests' tokens; empty if each request has one
    # token.
    ends: bytes = b""
    notes: tuple[Note, ...] = ()
    # [num_new], for each new token, its log-probabilities, or None if its request wants none. Empty
    # if no request wants log-probabilities.
    logprobs: tuple[RowLogprobs | None, ...] = ()

    def check_columns(self) -> None:
        """Check that the columns have consistent lengths.

        Raises:
            NotAMessageError: the lengths are not consistent.
        """
        if any(len(column) % INT_BYTES for column in (self.numbers, self.token_ids, self.ends)):
            raise NotAMessageError("a column is no array of int32")
        num_reqs, num_new = len(self.numbers) // INT_BYTES, len(self.token_ids) // INT_BYTES
        if not self._parts(num_reqs, num_new):
            raise NotAMessageError(f"the ends of {num_reqs} requests do not part {num_new} tokens")
        if not all(0 <= note.index < num_reqs for note in self.notes):
            raise NotAMessageError(f"a note is about none of the {num_reqs} requests")
        if self.logprobs and len(self.logprobs) != num_new:
            raise NotAMessageError(f"{len(self.logprobs)} reports are about {num_new} tokens")

    def each(self, names: Mapping[int, str]) -> Iterator[RequestDelta]:
        """Yield a delta for each request that is in ``names``. ``names`` contains the client's
        unfinished requests.

        Args:
            names: the ids of the client's requests; the keys are the numbers that the client has
                given to them.
        """
        notes = {note.index: note for note in self.notes}
        start = 0
        numbers = listed_ints(self.numbers)
        ends = listed_ints(self.ends) if self.ends else range(1, len(numbers) + 1)
        for index, (number, end) in enumerate(zip(numbers, ends, strict=True)):
            name = names.get(number)
            if name is not None:
                note = notes.get(index, NO_NOTE)
                yield RequestDelta(
                    name,
                    self.token_ids[start * INT_BYTES : end * INT_BYTES],
                    note.finish_reason,
                    self.logprobs[start:end],
                    note.num_cached_tokens,
                    note.error,
                    note.error_kind,
                    note.prompt_logprobs,
                    note.embedding,
                    note.prefill_s,
                )
            start = end

    def _parts(self, num_reqs: int, num_new: int) -> bool:
        """Return whether ``ends`` assigns each new token to exactly one request."""
        if not self.ends:
            return num_reqs == num_new
        starts = np.append(np.zeros(1, np.int32), unpack_ints(self.ends))
        is_rising = bool((np.diff(starts) >= 0).all())
        return len(starts) == num_reqs + 1 and starts[-1] == num_new and is_rising


def last_words(number: int, error: Exception) -> StepDeltas:
    """Return the delta that ends a request with an error."""
    note = Note(0, finish_reason="error", error=str(error), error_kind=type(error).__name__)
    return StepDeltas(pack_ints([number]), ends=pack_ints([0]), notes=(note,))

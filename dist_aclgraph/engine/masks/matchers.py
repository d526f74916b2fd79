"""Computes which tokens the grammar of each row allows next, as one bit for each token.

A row's mask depends only on the row's grammar and output. So every rank that samples computes the
mask itself, and nothing is sent between ranks. Before each step, each row's matcher removes
discarded tokens from its state, and adds new tokens. Discarded tokens are rejected drafts, and
tokens of steps that must run again.

A row can reason before it answers. The row's grammar applies only to the answer. While the row
reasons, all tokens are allowed except the tokens that end the output. If the reasoning reaches its
maximum number of tokens, the mask forces the end of the reasoning.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.engine.input_batch import InputBatch
from dist_aclgraph.engine.masks.grammar_row import NO_MATCH, GrammarRow, NotReadyError, allow
from dist_aclgraph.engine.masks.grammars import Grammars
from dist_aclgraph.engine.masks.permitted import ALL, BITS, FORBIDS_ALL, Permitted
from dist_aclgraph.engine.masks.slow_row import PATIENCE_S, SlowRow
from dist_aclgraph.engine.sampling.sampling_places import StepPlaces
from dist_aclgraph.engine.sampling.token_counts import ToDevice
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RowSampling
from dist_aclgraph.text.grammar_errors import TOO_MANY_STATES
from dist_aclgraph.text.grammars import Vocabulary


class Masks(NamedTuple):
    """Masks for some of the tokens that a step samples. A mask says which tokens are allowed.

    Attributes:
        places: [m], for each mask, the index of the mask's place among the step's
            ``SpecialPlaces``.
        words: [m, ceil(vocab / 32)] int32; token t is allowed if bit t % 32 of word t // 32 is 1.
    """

    places: IntArray
    words: IntArray


class GrammarReport(NamedTuple):
    """The matchers that have failed in a step, and the grammars that are not compiled yet.

    Attributes:
        failed: the reason of each matcher's failure; the keys are indices of requests among the
            sampled requests.
        unmasked: the requests that were sampled without a mask, because their grammars were not
            compiled yet; indices among the sampled requests.
        compiling: rows whose grammars are not compiled yet.
    """

    failed: dict[int, str]
    unmasked: list[int]
    compiling: list[int]


@dataclass
class _Tail:
    """The newest tokens of a row. Steps have sampled these tokens, but the engine's messages have
    not contained these tokens yet.
    """

    begin: int  # position of the first token
    tokens: list[int]


class Matchers:
    """Owns the matchers of all rows.

    Args:
        batch: the rows, with all tokens that the engine has sent back.
        read_vocabulary: reads the checkpoint's tokenizer.
        num_places: k + 1, number of tokens that a step with k drafts samples for each request.
        rows_may_wait: whether a request keeps its row while it waits for a mask that takes long to
            compute. False if the model has recurrent state. A request that waits then loses its
            row, and must begin again.
    """

    def __init__(
        self,
        batch: InputBatch,
        read_vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        num_places: int,
        *,
        rows_may_wait: bool = True,
    ) -> None:
        self._batch = batch
        self._rows_may_wait = rows_may_wait
        self._grammars = Grammars(read_vocabulary)
        self._num_words = -(-vocab_size // BITS)
        self._num_places = num_places
        self._rows: dict[int, GrammarRow] = {}
        self._tails: dict[int, _Tail] = {}
        # For the last step: the requests whose matchers have failed, with the reasons, and the
        # requests whose grammars were not compiled yet. Both contain indices of requests among the
        # sampled requests.
        self._failed: dict[int, str] = {}
        self._unmasked: list[int] = []
        # Rows that a step has sampled without a mask. A row stays in this set until a request
        # begins in this row. The token that was sampled without a mask is discarded. Steps that are
        # already in flight sample the row again, also without a mask.
        self._late: set[int] = set()
        # The rows passed to the last call of ``concern``, and the result of that call.
        self._asked: IntArray | None = None
        self._concerns = False

    def begin(self, row: int, sampling: RowSampling) -> None:
        """Begin to track a row in which a request begins or resumes."""
        self._asked = None
        self._tails.pop(row, None)
        self._late.discard(row)
        old = self._rows.pop(row, None)
        slow = old if isinstance(old, SlowRow) else None
        structure = sampling.structure
        if structure is None:
            if slow is not None:
                slow.drop()
            return
        ends = np.zeros(self._num_words, np.int32)
        for token in structure.end_ids:
            allow(ends, token)
        permitted = Permitted.of_row(sampling, self._num_words)
        is_slow = structure.is_slow and self._rows_may_wait
        is_shared = self._grammars.shares(structure)
        known = int(self._batch.num_tokens[row])
        output = [] if old is None else self._tokens(row, sampling.num_prompt_tokens, known)
        if slow is not None:
            is_same = slow.is_shared == is_shared
            if is_slow and is_same and slow.can_continue(sampling, output):
                slow.permitted = permitted
                self._rows[row] = slow
                return
            slow.drop()
        matcher = None
        if structure.grammar:
            left = None if old is None or old is slow else old.leave_matcher(sampling, output)
            matcher = left or self._grammars.compile(structure)
        self._rows[row] = (
            SlowRow(sampling, matcher, ends, permitted, self._grammars, is_shared=is_shared)
            if is_slow
            else GrammarRow(sampling, matcher, ends, permitted, is_shared=is_shared)
        )

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def concern(self, step: HostStep) -> bool:
        """Return whether a step samples at least one row that has a mask."""
        if not self._rows:
            return False
        if step.sampled_rows is not self._asked:
            self._asked = step.sampled_rows
            self._concerns = not self._rows.keys().isdisjoint(step.sampled_rows.tolist())
        return self._concerns

    def note(self, step: HostStep, counts: IntArray, token_ids: IntArray) -> None:
        """Remember the tokens that a step has sampled.

        Args:
            counts: [num_samples], number of new tokens of each sampled request.
            token_ids: [num_new], the new tokens of the first request, then of the second, and so
                on.
        """
        ends = np.cumsum(counts)
        firsts = step.kv_lens[step.sampled] - step.num_logits + 1
        for sample, row in enumerate(step.sampled_rows.tolist()):
            if row in self._rows:
                tokens = token_ids[ends[sample] - counts[sample] : ends[sample]].tolist()
                self._tails[row] = _Tail(int(firsts[sample]), tokens)

    def masks(self, step: HostStep, known: StepPlaces, drafts: IntArray | None) -> Masks | None:
        """Return the masks of a step's special places (``SpecialPlaces``); None if no row has a
        mask.

        Before this call, ``note`` must be called for each earlier step, so that all earlier tokens
        are known.

        Args:
            drafts: [max_rows, k], the drafts of this step; None if the deployment uses no drafts.
        """
        firsts = (step.kv_lens[step.sampled] - step.num_logits + 1).tolist()
        rows, size = step.sampled_rows.tolist(), self._num_places
        samples = known.samples[::size].tolist()
        wanted = [(i, sample) for i, sample in enumerate(samples) if rows[sample] in self._rows]
        # a place's mask allows every token until the real mask is written
        words = np.full((len(wanted) * size, self._num_words), ALL)
        until_s = time.monotonic() + PATIENCE_S
        for at, (_, sample) in enumerate(wanted):
            num_logits, row = int(step.num_logits[sample]), rows[sample]
            drafted = [] if drafts is None else drafts[row, : num_logits - 1].tolist()
            own = words[at * size : (at + 1) * size]
            try:
                if row in self._late:
                    raise NotReadyError
                error = self._fill(row, firsts[sample], drafted, own, until_s)
                if TOO_MANY_STATES in error and self._rows[row].is_shared:
                    # The request will begin again in its row, with a matcher that no other request
                    # shares.
                    self._grammars.stop_sharing(self._rows[row].structure)
                    raise NotReadyError
            except NotReadyError:
                self._late.add(row)
                self._unmasked.append(sample)
                own[:] = ALL
                continue
            if error:
                self._failed[sample] = error
                own[:] = ALL
                continue
            if complaint := self._rows[row].complaint:
                self._failed[sample] = complaint
            # if the row has fewer than ``size`` tokens, the other masks are copies of the last mask
            own[num_logits:] = own[num_logits - 1]
        if not wanted:
            return None
        first = np.array([index for index, _ in wanted], np.int32) * size
        places: IntArray = np.add.outer(first, np.arange(size, dtype=np.int32)).ravel()
        return Masks(places, words)

    def take_report(self) -> GrammarReport:
        """Return the requests that have failed, or were sampled without a mask, since the last
        call. Also return the rows that wait for a grammar or a mask.
        """
        failed, self._failed = self._failed, {}
        unmasked, self._unmasked = self._unmasked, []
        compiling = [index for index, row in self._rows.items() if row.is_compiling]
        return GrammarReport(failed, unmasked, compiling)

    def _fill(
        self, row_id: int, first: int, drafts: list[int], words: IntArray, until_s: float
    ) -> str:
        """Write the masks of one row: one mask for each token that the step samples for the row.

        Returns:
            The reason why the row's matcher has failed; "" if it has not failed.

        Args:
            first: position, in the request, of the first token that the step samples for the row.
            words: [>= 1 + len(drafts), num_words].
            until_s: the ``time.monotonic`` time at which this method stops waiting for masks that a
                separate thread computes.
        """
        row = self._rows[row_id]
        target = first - row.begin
        begin_s: float | None = None
        num_new = 0
        if isinstance(row, SlowRow):
            output = self._tokens(row_id, row.begin, first)
            patience_s = max(0.0, until_s - time.monotonic())
            if error := row.fill_aside(output, words[0], patience_s):
                return error
            words[1:] = words[0]
            drafts = []  # no draft is accepted
        else:
            begin_s = time.thread_time()
            row.go_back(target)
            num_new = target - row.num_seen
            for token in self._tokens(row_id, row.begin + row.num_seen, first):
                if not row.add(token):
                    return row.error or NO_MATCH
            row.fill(words[0])
        if row.permitted is not None:
            begin = max(row.begin, first - row.permitted.longest)
            if not row.permitted.leaves_any(words[0], self._tokens(row_id, begin, first)):
                return row.error or FORBIDS_ALL
        # The tokens that are sampled after a forbidden draft are never used, because the draft
        # cannot be accepted.
        for place, draft in enumerate(drafts, start=1):
            if not row.add(draft):
                break
            row.fill(words[place])
        if drafts:
            row.go_back(target)
        if begin_s is not None:  # for a slow row, the separate thread calls ``charge``
            row.charge(time.thread_time() - begin_s, num_new)
        return row.error

    def _tokens(self, row: int, begin: int, end: int) -> list[int]:
        """Return the tokens of a row at the positions from ``begin`` to ``end``."""
        known = int(self._batch.num_tokens[row])
        tokens: list[int] = self._batch.token_ids[row, begin : min(end, known)].tolist()
        if end > known:
            tail = self._tails[row]
            start = max(begin, known) - tail.begin
            assert start >= 0, "a step's tokens were not noted"
            tokens += tail.tokens[start : end - tail.begin]
        assert len(tokens) == end - begin
        return tokens


class Masking:
    """Applies masks to logits. Owns a constant tensor on the device."""

    def __init__(self, upload: ToDevice) -> None:
        self._upload = upload
        # [16] int16. In the number with the index i, only bit i is set.
        self._bits: Tensor | None = None

    def forget(self) -> None:
        """Drop the constant tensor after an abort of the device. The abort may have stopped the
        upload of the tensor.
        """
        self._bits = None

    def apply(self, logits: Tensor, masks: Masks) -> None:
        """Set the logits of tokens that are not allowed to -inf, in place.

        Args:
            logits: [n, vocab].
        """
        if self._bits is None:
            bits = np.uint16(1) << np.arange(16, dtype=np.uint16)
            self._bits = self._upload(bits.view(np.int16))
        # Each word is sent as two half words of 16 bits, because int16 is the smallest type for
        # which the AI core has bitwise operators. The lower half comes first, because words are
        # little-endian.
        halves = self._upload(masks.words.view(np.int16))
        allowed = (halves.unsqueeze(-1) & self._bits).view(len(halves), -1)
        is_forbidden = allowed[:, : logits.shape[1]] == 0
        if len(masks.places) == len(logits):
            logits.masked_fill_(is_forbidden, -torch.inf)
            return
        where = self._upload(masks.places.astype(np.int64))
        rows = logits.index_select(0, where).masked_fill_(is_forbidden, -torch.inf)
        logits.index_copy_(0, where, rows)

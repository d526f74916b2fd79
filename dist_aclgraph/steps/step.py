"""The messages between engine and workers: one StepPlan per step, one StepResult back.

Plain MessagePack (msgspec encodes it, any MessagePack library reads it); integer arrays travel as
little-endian int32 bytes. Only changes are sent: workers keep the running batch, one *row* per
running request, chosen by the scheduler from [0, max_num_seqs).
"""

from __future__ import annotations

import msgspec
import numpy as np

from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.ints import INT_BYTES, listed_ints
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.topology import ExchangeKind


class RowSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sampler's parameters of one request; see ``SamplingParams`` for meanings."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = -1  # -1 reports nothing
    prompt_logprobs: int = -1  # likewise, at the positions of the prompt
    num_prompt_tokens: int = 0  # position where the output begins, for penalties
    suppressed: tuple[int, ...] = ()  # end ids, while fewer than min_tokens exist
    min_tokens: int = 0
    biased: bytes = b""  # int32 [n], tokens with a bias
    biases: bytes = b""  # float32 [n], added to their logits
    allowed: bytes = b""  # int32 [n], the only tokens that may come; empty means all
    bad_words: tuple[tuple[int, ...], ...] = ()  # of two tokens or more

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change a token's probability beyond the model."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def is_plain(self) -> bool:
        """Whether the row simply takes the most probable token."""
        return (
            self.temperature == 0.0
            and not self.has_penalties
            and self.logprobs < 0
            and not (self.suppressed or self.biased or self.allowed or self.bad_words)
        )


class RowStart(msgspec.Struct, frozen=True):
    """A request that begins (or resumes) at ``row``; earlier contents of the row are dropped."""

    row: int
    token_ids: bytes  # int32 [num_tokens], prompt and, after preemption, output
    block_ids: bytes  # int32 [num_blocks], in order
    sampling: RowSampling


class RankBatch(msgspec.Struct, frozen=True):
    """The work of a data-parallel rank in this step.

    ``scheduled`` has one record per request of the batch, in batch order; token and output arrays
    follow that order: row, num_computed_tokens, num_scheduled_tokens, num_logits. A token is
    sampled behind each of the last ``num_logits`` tokens of a request: none in the middle of a
    prompt, one at its end, k + 1 if the row's k draft tokens are verified, which only the device
    knows. ``appended`` and ``blocks`` update the rows before the step. The blocks of ``cleaned``
    are set to zero, because they may hold NaN, and attention reads whole blocks. A data-parallel
    rank without work has an empty batch, and runs the step on padding.
    """

    scheduled: bytes  # int32 [num_reqs, 4]
    appended: bytes = b""  # int32 [k, 2]: row, token id sampled in an earlier step
    blocks: bytes = b""  # int32 [k, 3]: row, index in the block table, block id
    started: tuple[RowStart, ...] = ()
    cleaned: bytes = b""  # int32 [k], block ids


class StepPlan(msgspec.Struct, frozen=True, tag="step"):
    """One decision for every rank of a lockstep group.

    ``graph`` is the graph that every rank replays, idle ranks included; None runs the step eagerly.
    ``exchange`` is the way of tokens to their experts; None if experts are not spread.
    """

    epoch: int
    step: int
    plan_version: int
    graph: BatchDescriptor | None
    batches: tuple[RankBatch, ...]  # one per data-parallel rank of the lockstep group
    exchange: ExchangeKind | None = None


class RowLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one sampled position: the chosen token first, then the best ones."""

    token_ids: bytes  # int32 [1 + n]
    logprobs: tuple[float, ...]  # [1 + n]
    rank: int  # of the chosen token, 1 is the most probable


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of some tokens of a prompt, in order: each token's own, then the best ones.

    Attributes:
        place: index of the request among those of the step.
        first: position of the first of the tokens.
    """

    place: int
    first: int
    token_ids: bytes  # int32 [m, 1 + n]
    logprobs: bytes  # float32 [m, 1 + n]
    ranks: bytes  # int32 [m], 1 is the most probable

    def rows(self) -> list[RowLogprobs]:
        """Return one report for each of the tokens."""
        ranks = listed_ints(self.ranks)
        width = len(self.token_ids) // (INT_BYTES * max(1, len(ranks)))
        values = np.frombuffer(self.logprobs, "<f4").reshape(-1, width).tolist()
        return [
            RowLogprobs(
                self.token_ids[i * width * INT_BYTES : (i + 1) * width * INT_BYTES],
                tuple(values[i]),
                rank,
            )
            for i, rank in enumerate(ranks)
        ]


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """New tokens of a step for each record with logits, in batch order.

    Ranks that own no output answer with empty ``token_ids``, as their acknowledgement. ``counts``
    has the number of tokens of each request: one, and the accepted drafts; it is empty without
    drafts: one each. Every rank reports the number of tokens that its experts have computed since
    it started, and the number of tokens without room in their exchange. If there are any of the
    latter, the step does not count, and is run again. ``non_finite`` has the requests whose tokens
    are meaningless, because their logits are NaN or infinite. If the worker measures,
    ``timings_us`` is its host time by stage, from plan to result; ``overlapped_us`` is its work
    while the device worked, or between two steps; ``counted`` has the step's collectives and their
    bytes, if the device counts them.
    """

    epoch: int
    step: int
    rank: int
    token_ids: bytes = b""  # int32 [num_new], request by request
    counts: bytes = b""  # int32 [num_sampled]
    non_finite: bytes = b""  # int32 [k], indices among the sampled requests
    logprobs: tuple[RowLogprobs | None, ...] = ()  # [num_new], or empty if no request wants them
    prompts: tuple[PromptLogprobs, ...] = ()
    expert_tokens: int = 0
    num_unplaced: int = 0
    timings_us: dict[str, float] = {}
    overlapped_us: dict[str, float] = {}
    counted: dict[str, int] = {}
    error: str = ""  # the step failed on this rank; the epoch is over
    fault: DeviceFault | None = None  # the cause of a stopped device, if the error is a known one


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """No step follows for now: answer the step in flight.

    With two steps in flight workers answer one when the next is queued behind it.
    """

    epoch: int


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Restart the device, because those of all ranks are stopped; forget rows and steps in flight.

    Later messages belong to ``next_epoch``; ``keeps_kv`` tells whether steps may read the existing
    KV cache.
    """

    epoch: int
    next_epoch: int
    keeps_kv: bool = True


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """A rank's answer: its device works again, in the next epoch; or the reason why not."""

    epoch: int
    rank: int
    error: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the step loop."""

    epoch: int


ToWorker = StepPlan | GraphCommand | Pause | Resume | Shutdown
FromWorker = StepResult | GraphAnswer | Resumed

encoder = msgspec.msgpack.Encoder()
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

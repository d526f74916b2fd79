"""The messages between engine and workers. For each step, the engine decides one StepPlan and sends
each worker its part of the plan, a RankPlan. Each worker replies with one StepResult.

Messages are plain MessagePack: msgspec encodes them, and any MessagePack library can read them.
Integer arrays are sent as little-endian int32 bytes. Workers store the running batch, so the engine
sends only changes. The batch has one *row* for each running request. The scheduler chooses the row,
a number from 0 to max_num_seqs - 1.
"""

from __future__ import annotations

import msgspec
import numpy as np

from dist_aclgraph.arrays.ints import INT_BYTES, listed_ints
from dist_aclgraph.errors import DeviceFault
from dist_aclgraph.planning.commands import GraphAnswer, GraphCommand
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.sampling import Structure
from dist_aclgraph.steps.copies import BlockCopyJobs, CopiedBlocks
from dist_aclgraph.topology import ExchangeKind


class RowSampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters that the sampler needs for one request; ``SamplingParams`` explains them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int = -1  # number of most probable tokens that are reported; -1 means no report
    # number of most probable tokens that are reported at each position of the prompt; -1 means no
    # report
    prompt_logprobs: int = -1
    num_prompt_tokens: int = 0  # this is also the position of the first output token
    suppressed: tuple[int, ...] = ()  # stop token ids, which are forbidden before min_tokens
    min_tokens: int = 0
    biased: bytes = b""  # int32 [n], tokens with a bias
    biases: bytes = b""  # float32 [n], added to the logits of these tokens
    allowed: bytes = b""  # int32 [n], the only allowed tokens; if empty, all tokens are allowed
    bad_words: tuple[tuple[int, ...], ...] = ()  # words of two tokens or more
    structure: Structure | None = None
    # Whether the answer is an embedding, which is the hidden state of the prompt's last token. If
    # true, the sampled token is not used.
    embeds: bool = False

    @property
    def has_penalties(self) -> bool:
        """Whether a token's probability depends on earlier tokens through penalties."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def is_plain(self) -> bool:
        """Whether the row's result is simply the most probable token, and no log-probabilities
        are reported.
        """
        return (
            self.temperature == 0.0
            and not self.has_penalties
            and self.logprobs < 0
            and not (self.suppressed or self.biased or self.allowed or self.bad_words)
            and self.structure is None
        )


class RowStart(msgspec.Struct, frozen=True):
    """A request that begins or resumes in ``row``; the worker drops the row's earlier contents."""

    row: int
    token_ids: bytes  # int32 [num_tokens], the prompt and the existing output
    block_ids: bytes  # int32 [num_blocks], the blocks of these tokens, in order
    sampling: RowSampling


class RankBatch(msgspec.Struct, frozen=True):
    """The work of one data-parallel rank in a step.

    ``scheduled`` has one record for each request: row, num_computed_tokens, num_scheduled_tokens,
    num_logits. The order of the records is the order of the batch, and also the order of tokens and
    outputs. A token is sampled after each of the last ``num_logits`` tokens of a request:
    ``num_logits`` is 0 in the middle of a prompt, 1 at its end, and k + 1 if the device verifies
    the row's k drafts. ``appended`` and ``blocks`` update the rows before the step. The blocks of
    ``cleaned`` are set to zero before the step, because these blocks can contain NaN, and attention
    reads whole blocks. A data-parallel rank without work gets an empty batch, and runs the step on
    padding only.

    If the model has recurrent state, each row has a state. Before the step, a checkpoint is copied
    to the state of each row in ``restored``. After the step, the state of each row in ``kept`` is
    copied to a checkpoint. When the first token of a row runs, the row begins with an empty state.
    """

    scheduled: bytes  # int32 [num_reqs, 4]
    appended: bytes = b""  # int32 [k, 2]: row and token id of tokens from earlier steps
    blocks: bytes = b""  # int32 [k, 3]: row, index in the block table, block id
    started: tuple[RowStart, ...] = ()
    cleaned: bytes = b""  # int32 [k], block ids
    restored: bytes = b""  # int32 [k, 2]: row, checkpoint
    kept: bytes = b""  # int32 [k, 2]: row, checkpoint


class StepSize(msgspec.Struct, frozen=True):
    """The size of a step on one rank: the number of its tokens, and the number of its sampled
    requests.

    If prompts are split between ranks, ``num_tokens`` is the number of tokens on the rank with the
    most tokens. In a step that replays a decode graph, ``kv_len`` is the length that the longest
    request has after the step.
    """

    num_tokens: int = 0
    num_samples: int = 0
    kv_len: int = 0


class RankPlan(msgspec.Struct, frozen=True, tag="step"):
    """The part of a step's plan that the workers of one data-parallel rank get.

    All fields except ``dp_rank`` and ``batch`` are the same for all workers of the lockstep group;
    ``StepPlan`` explains them.
    """

    epoch: int
    step: int
    plan_version: int
    graph: BatchDescriptor | None
    dp_rank: int
    batch: RankBatch
    exchange: ExchangeKind | None = None
    largest: StepSize = StepSize()


class StepPlan(msgspec.Struct, frozen=True):
    """The decision about one step, for all ranks of a lockstep group. Workers get only parts of
    this decision (``RankPlan``).

    Every rank replays ``graph``, even a rank without work. If ``graph`` is None, the step runs
    eagerly. ``exchange`` is the exchange that sends tokens to their experts; None if no token needs
    to be sent. Each number in ``largest`` is the maximum of this number over all ranks. If no full
    graph is replayed, ranks that share experts pad their steps to the size ``largest``. If a bucket
    has graphs for several KV lengths, ``largest`` determines which graph is replayed. All ranks
    replay the same graph.
    """

    epoch: int
    step: int
    plan_version: int
    graph: BatchDescriptor | None
    batches: tuple[RankBatch, ...]  # one element for each data-parallel rank of the lockstep group
    exchange: ExchangeKind | None = None
    largest: StepSize = StepSize()

    def for_rank(self, dp_rank: int) -> RankPlan:
        """Return the message for the workers of a data-parallel rank."""
        return RankPlan(
            self.epoch,
            self.step,
            self.plan_version,
            self.graph,
            dp_rank,
            self.batches[dp_rank],
            self.exchange,
            self.largest,
        )


class RowLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position: first the chosen token, then the most probable tokens."""

    token_ids: bytes  # int32 [1 + n]
    logprobs: tuple[float, ...]  # [1 + n]
    rank: int  # rank of the chosen token; 1 means the most probable token

    def ranked(self) -> dict[int, tuple[float, int]]:
        """Return the log-probability and the rank of each token; the keys are token ids. The chosen
        token comes first, then the most probable tokens. If the chosen token is one of these
        tokens, the token has only one entry.
        """
        ranks = (self.rank, *range(1, len(self.logprobs)))
        found: dict[int, tuple[float, int]] = {}
        ids = listed_ints(self.token_ids)
        for token_id, logprob, rank in zip(ids, self.logprobs, ranks, strict=True):
            found.setdefault(token_id, (logprob, rank))
        return found


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at neighbouring positions of a prompt.

    At each position, the prompt's own token comes first, then the most probable tokens.

    Attributes:
        place: index of the request among the step's requests.
        first: the first of these positions in the prompt.
    """

    place: int
    first: int
    token_ids: bytes  # int32 [m, 1 + n]
    logprobs: bytes  # float32 [m, 1 + n]
    ranks: bytes  # int32 [m], ranks of the prompt's tokens; 1 means the most probable token

    def rows(self) -> list[RowLogprobs]:
        """Return one report for each position."""
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
    """The new tokens of a step's sampled requests, in batch order.

    A rank that does not send the output acknowledges the step with empty ``token_ids``. ``counts``
    contains the number of new tokens of each sampled request: one plus the number of its accepted
    drafts. Without drafts, ``counts`` is empty, and each request gets one token. ``expert_tokens``
    is the number of tokens that the rank's experts have computed since the rank started.
    ``num_unplaced`` says how many of the step's tokens were beyond the capacity of the exchange; if
    it is not zero, the step's results are invalid, and the step runs again. ``non_finite`` lists
    the requests whose tokens are meaningless, because their logits are NaN or infinite. ``failed``
    says why requests have failed. ``unmasked`` lists the requests whose tokens are meaningless,
    because this rank had not compiled their grammars yet. ``compiling`` lists the rows whose
    grammars this rank is compiling. ``embeddings`` contains the embedding of each request that asks
    for one, float32 [hidden]: the hidden state after the final norm. ``waited_us`` is the time
    between two events: enough work of the next step was queued, and this result was read.
    ``waited_us`` is 0 if too little work of the next step was queued. If the worker measures its
    host time, ``timings_us`` contains the host's time in each stage, from the plan's arrival to the
    result. ``overlapped_us`` contains the time that the host works while the device is busy, or
    between two steps. This work delays no step. ``counted`` contains the number and the bytes of
    the step's collectives, if the device counts them.
    """

    epoch: int
    step: int
    rank: int
    token_ids: bytes = b""  # int32 [num_new], the new tokens, in the order of requests
    counts: bytes = b""  # int32 [num_sampled]
    non_finite: bytes = b""  # int32 [k], indices among the sampled requests
    failed: dict[int, str] = {}  # the keys are indices among the sampled requests
    unmasked: bytes = b""  # int32 [k], indices among the sampled requests
    compiling: bytes = b""  # int32 [k], rows
    # [num_new], for each new token, its log-probabilities, or None if its request wants none. Empty
    # if no request wants log-probabilities.
    logprobs: tuple[RowLogprobs | None, ...] = ()
    prompts: tuple[PromptLogprobs, ...] = ()
    embeddings: dict[int, bytes] = {}  # the keys are indices among the sampled requests
    expert_tokens: int = 0
    num_unplaced: int = 0
    waited_us: int = 0
    timings_us: dict[str, float] = {}
    overlapped_us: dict[str, float] = {}
    counted: dict[str, int] = {}
    error: str = ""  # not empty if the step failed on this rank, which ends the epoch
    fault: DeviceFault | None = None  # the error that stopped the device, if it is known


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Tells workers that no step follows immediately. The workers then send the result of the last
    step without waiting for another step.

    Without this message, workers with two steps in flight send a result only after the next step is
    queued.
    """

    epoch: int


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    """Tells workers to restart their devices after all devices of the group have been stopped.

    Workers drop all rows, and all steps in flight. Later messages belong to the epoch
    ``next_epoch``. If ``keeps_kv`` is true, steps may read the existing contents of the KV cache.
    """

    epoch: int
    next_epoch: int
    keeps_kv: bool = True


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """A rank's reply to ``Resume``. ``error`` is empty if the rank's device works again; otherwise
    it contains the reason.
    """

    epoch: int
    rank: int
    error: str = ""


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Tells workers to end the loop that runs steps."""

    epoch: int


ToAllWorkers = GraphCommand | Pause | Resume | Shutdown
ToWorker = RankPlan | BlockCopyJobs | ToAllWorkers
FromWorker = StepResult | GraphAnswer | Resumed | CopiedBlocks

encoder = msgspec.msgpack.Encoder()
to_worker_decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)

"""The functions that are recorded as a rank's graphs. Each function runs once on padding before it
is recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.engine.drafts.draft_steps import DraftSteps
from dist_aclgraph.engine.graph_store import ANY_LENGTH
from dist_aclgraph.engine.state_steps import StateSteps
from dist_aclgraph.graphs.captured_graph import Forward
from dist_aclgraph.graphs.step_buffers import StepBuffers
from dist_aclgraph.graphs.task_update import TaskRecorder
from dist_aclgraph.graphs.token_table import TokenTable
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ExpertStep
from dist_aclgraph.layers.segments import RunSegment
from dist_aclgraph.models.attention_kind import Cache
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import NO_INTS, NO_STEP
from dist_aclgraph.steps.padding import GraphLens, Lens
from dist_aclgraph.topology import ChooseExchange


@dataclass(frozen=True, kw_only=True)
class GraphWork:
    """The work that full graphs and pieces do on the static inputs. Owns nothing.

    Attributes:
        drafts: verifies and proposes drafts; None if the deployment uses no drafts.
        caches: the decoder's caches, one for each layer; the elements of the list may be replaced
            later.
        tally: [2] int64, the number of tokens that the decoder's experts have computed, and the
            number of tokens that exceeded the capacity of an exchange.
        choose_exchange: returns the kind of exchange that sends a graph's tokens to their experts.
        states: makes the metadata of recurrent states; None if the model has no such state.
        follows: whether a step may be queued before the host has read the previous step's tokens.
        kv_sizes: the KV lengths for which decode graphs are captured, in ascending order. Empty if
            each step sends its KV lengths to the captured attention operators.
    """

    model: Decoder
    buffers: StepBuffers
    attention: AttentionSteps
    graph_lens: GraphLens
    drafts: DraftSteps | None
    caches: list[Cache]
    tally: Tensor
    choose_exchange: ChooseExchange
    states: StateSteps | None
    follows: bool
    kv_sizes: tuple[int, ...] = ()

    @property
    def tokens(self) -> TokenTable:
        """The table of the latest sampled tokens and drafts. A negative token id is a reference to
        a token of this table.
        """
        tokens = self.buffers.tokens if self.drafts is None else self.drafts.tokens
        assert tokens is not None
        return tokens

    def forwards(self, graph: BatchDescriptor) -> dict[int, list[Forward]]:
        """Return the functions that are recorded as the full graphs of a bucket. The keys are the
        KV lengths for which the functions are recorded. If each step sends its KV lengths, the only
        key is ``ANY_LENGTH``.

        With drafts, a graph for mixed batches ends with the hidden states of all tokens. In this
        case, drafts are proposed, and tokens are sampled, outside of graphs.
        """
        if self.kv_sizes and graph.query_len:
            return {size: [partial(self._run_whole, graph, size)] for size in self.kv_sizes}
        forwards: list[Forward] = [partial(self._run_whole, graph, ANY_LENGTH)]
        if self.drafts is not None and graph.query_len:
            assert graph.query_len == self.drafts.num_places
            forwards.append(partial(self._draft_whole, graph))
        return {ANY_LENGTH: forwards}

    def _run_whole(self, graph: BatchDescriptor, kv_len: int, tasks: TaskRecorder | None) -> None:
        """Run the step of a full graph on padding, from the static inputs to the static outputs."""
        inputs, buffers = self.buffers.inputs(graph), self.buffers
        if self.drafts is not None and self.follows and graph.query_len:
            self.drafts.move(inputs)
        metadata = self.attention.of_graph(
            graph, inputs, self._lens_of_padding(graph), tasks, kv_len=kv_len
        )
        if self.states is not None:
            metadata = replace(metadata, states=self.states.of_graph(graph, inputs))
        token_ids = inputs.token_ids
        if self.drafts is not None or self.follows:
            token_ids = self.tokens.fill_in(token_ids)
        hidden = self.model.forward(
            token_ids,
            inputs.positions,
            inputs.slots,
            self.caches,
            metadata,
            step=self._experts_of(graph),
        )
        if self.drafts is not None:
            buffers.hidden[: len(hidden)].copy_(hidden)
        if graph.query_len == 0:
            if self.drafts is not None:
                return
            hidden = hidden.index_select(0, inputs.places)
        n = len(hidden)
        logits = self.model.logits(hidden, buffers.logits[:n])
        # All ranks must capture the same operators. So every rank computes the sampled tokens, and
        # some ranks do not use these tokens.
        chosen = torch.empty(n, dtype=torch.int64, device=logits.device)
        torch.max(logits, -1, out=(buffers.best[:n], chosen))
        buffers.sampled[:n].copy_(chosen)
        if self.drafts is not None:
            self.count_accepted(graph)

    def count_accepted(self, graph: BatchDescriptor) -> None:
        """Compare drafts with the sampled tokens; store each request's number of accepted drafts in
        ``buffers.accepted``.
        """
        assert self.drafts is not None
        buffers = self.buffers
        accepted = self.drafts.count(buffers.sampled[: graph.num_tokens], buffers.inputs(graph))
        buffers.accepted[: graph.num_reqs].copy_(accepted)

    def _draft_whole(self, graph: BatchDescriptor, tasks: TaskRecorder | None) -> None:
        assert self.drafts is not None
        buffers, n = self.buffers, graph.num_tokens
        self.drafts.propose_whole(
            graph,
            buffers.inputs(graph),
            self._lens_of_padding(graph),
            buffers.hidden[:n],
            buffers.sampled[:n],
            buffers.accepted[: graph.num_reqs],
            tasks,
        )

    def run_pieces(
        self, graph: BatchDescriptor, metadata: AttentionMetadata, run: RunSegment
    ) -> Tensor:
        """Run the decoder piecewise. The segments run on the static inputs, including padding.
        Attention runs only on the tokens that are not padding.

        Returns:
            [bucket, hidden].
        """
        inputs = self.buffers.inputs(graph)
        return self.model.forward(
            inputs.token_ids,
            inputs.positions,
            inputs.slots,
            self.caches,
            replace(metadata, is_in_pieces=True),
            run,
            self._experts_of(graph),
        )

    def metadata_of_padding(self, graph: BatchDescriptor) -> AttentionMetadata:
        inputs = self.buffers.inputs(graph)
        return self.attention.of_step(NO_STEP, replace(inputs, block_table=inputs.block_table[:0]))

    def _lens_of_padding(self, graph: BatchDescriptor) -> Lens:
        return self.graph_lens.pad(graph, NO_INTS, NO_INTS)

    def _experts_of(self, graph: BatchDescriptor) -> ExpertStep:
        return ExpertStep(self.choose_exchange(graph.num_tokens), self.tally)

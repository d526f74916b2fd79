"""The decoder's work in a step with any mixture of requests. The tokens of such a step are sampled
outside of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu
from dist_aclgraph.device.step_measures import ReplaySpan, Stopwatch
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.engine.graph_store import Captured, WholeStep
from dist_aclgraph.engine.graph_work import GraphWork
from dist_aclgraph.engine.mixed_step import padded_size, upload_step
from dist_aclgraph.engine.rank_caches import RankCaches
from dist_aclgraph.engine.replays import Replays
from dist_aclgraph.engine.state_steps import StateSteps
from dist_aclgraph.graphs.device_step import DeviceStep, SharedPlaces
from dist_aclgraph.graphs.pieces import CapturedPieces
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.context_parallel import ContextParallel
from dist_aclgraph.layers.experts import ExpertStep
from dist_aclgraph.layers.segments import run_directly, work_between
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.step import RankPlan


@dataclass(frozen=True)
class MixedOutput:
    """The decoder's output for a mixture of requests.

    Attributes:
        hidden: [num_padded, hidden], the hidden states of all tokens, including padding.
        places: [num_places, hidden], the hidden states of the places: the step's tokens after which
            a token is sampled.
        logits: [num_places, vocab]; tokens: [num_places] int32, the most probable token of each
            place; best: [num_places], the logits of these tokens.
        span: measures the replay of a full graph; None if no replay is measured.
    """

    step: DeviceStep
    metadata: AttentionMetadata
    hidden: Tensor
    places: Tensor
    logits: Tensor
    tokens: Tensor
    best: Tensor
    span: ReplaySpan | None


@dataclass(frozen=True, kw_only=True)
class MixedWork:
    """Runs the decoder in a full graph, piecewise or eagerly. Then chooses the most probable next
    token of each place. A place is a token whose logits are needed. Owns nothing.

    Attributes:
        graph_work: the work that graphs record. ``graph_work`` uses the same model, buffers and
            counters as this object.
        context: the indices of this rank in context parallelism, and its groups.
        spare_row: row of padding requests.
    """

    npu: Npu
    model: Decoder
    graph_work: GraphWork
    attention: AttentionSteps
    states: StateSteps | None
    caches: RankCaches
    context: ContextParallel
    watch: Stopwatch
    replays: Replays
    spare_row: int

    def run(
        self,
        plan: RankPlan,
        inputs: HostStep,
        captured: Captured | None,
        answer: Callable[[], None],
    ) -> MixedOutput:
        """Queue the decoder's work.

        Args:
            captured: the graph that the plan names; None if the step is eager.
            answer: a function that reports the earlier steps that have ended. The function is
                called between segments, or between the updates of a full graph.
        """
        work, graph, span = self.graph_work, plan.graph, None
        static = None if graph is None else work.buffers.inputs(graph)
        size = padded_size(plan, inputs)
        step = upload_step(self.npu, inputs, size, self.spare_row, static)
        if (inputs.token_ids < 0).any():  # negative ids are references to tokens
            step.token_ids.copy_(work.tokens.fill_in(step.token_ids))
        metadata = self.attention.of_step(inputs, step)
        if self.states is not None and inputs.num_tokens:
            metadata = replace(metadata, states=self.states.of_step(inputs))
        self.watch.lap("inputs")
        if isinstance(captured, CapturedPieces):
            captured.begin()
            between = work_between(captured.replay, answer)
            hidden = work.run_pieces(captured.descriptor, metadata, between)
        elif captured is not None:
            span = self._replay(captured, inputs, answer)
            hidden = work.buffers.hidden[: captured[0].descriptor.num_tokens]
        else:
            hidden = self.model.forward(
                step.token_ids,
                step.positions,
                step.slots,
                self.caches.decoder,
                metadata,
                work_between(run_directly, answer),
                step=ExpertStep(plan.exchange, work.tally),
            )
        if self.states is not None and plan.batch.kept:
            # The checkpoints are written here, so that they are complete when the engine gets the
            # step's result.
            self.states.keep(plan.batch.kept, self.caches.state_tensors())
        chosen = self._choose(hidden, step, size.num_samples)
        return MixedOutput(step, metadata, hidden, *chosen, span)

    def _replay(
        self, graphs: WholeStep, inputs: HostStep, answer: Callable[[], None]
    ) -> ReplaySpan | None:
        """Replay a full graph of a mixed batch."""
        (decoder,) = graphs
        span = self.replays.begin(graphs, inputs)
        self.replays.replay(decoder)
        self.replays.update(decoder, answer)
        self.replays.end()
        return span

    def _choose(
        self, hidden: Tensor, step: DeviceStep, num_samples: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return, for each token after which the step samples: its hidden state, its logits, the
        most probable next token, and the logit of that next token.

        Args:
            num_samples: number of requests that sample, including padding.
        """
        n = len(step.places)
        if num_samples == 0:  # no request samples, because all prompts are unfinished
            empty = torch.empty(0, dtype=torch.int32, device=self.npu.device)
            return hidden[:0], hidden[:0], empty, hidden[:0, 0]
        splits_prompts = self.context.pcp.size > 1
        # This rank samples no token, but other ranks do. All ranks must run the same collectives,
        # so this rank computes the logits of one row.
        if n == 0:
            hidden = hidden[:1]
        elif n < len(hidden) or self.graph_work.drafts is not None or splits_prompts:
            hidden = self.collect(step.shared, hidden, step.places)
        logits = self.model.logits(hidden)
        self.watch.lap("forward")
        best, chosen = logits.max(-1)
        return hidden[:n], logits[:n], chosen.int()[:n], best[:n]

    def collect(self, shared: SharedPlaces | None, hidden: Tensor, places: Tensor) -> Tensor:
        """Return the hidden states of the tokens with the indices ``places``, even if other prefill
        ranks run these tokens.
        """
        rows = hidden.index_select(0, places)
        if shared is None:
            return rows
        n = len(places)
        every = self.context.pcp.all_gather(rows).flatten(0, 1)
        index = torch.arange(n, dtype=torch.int32, device=rows.device)
        return every.index_select(0, shared.owners[:n] * n + index)

"""DraftSteps: verifies and proposes drafts, in the step of a graph or in a mixed step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.engine.drafts.drafting import Collect, Drafter, DraftPass
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.graphs.task_update import TaskRecorder
from dist_aclgraph.graphs.token_table import TokenTable
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ExpertStep
from dist_aclgraph.models.attention_kind import Cache, CacheRoom
from dist_aclgraph.models.next_token import NextTokenModule
from dist_aclgraph.planning.descriptor import BatchDescriptor
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.padding import Lens
from dist_aclgraph.topology import ExchangeKind


class DraftSteps:
    """Owns the drafts of this rank, and the KV cache of the next-token module. A request's block
    ids are the same in this cache and in the decoder's caches.

    Args:
        k: number of drafts of each request.
        max_rows: maximum number of rows of the batch; one spare row for padding is added.
        vocab_size: size of the decoder's vocabulary.
        attention: makes the attention metadata of the next-token module; the decoder uses the same
            object.
        tally: [2] int64, the number of tokens that the next-token module's experts have computed,
            and the number of tokens that exceeded the capacity of an exchange.
        choose_exchange: returns the kind of exchange that sends the tokens of one iteration of
            drafting to their experts.
    """

    def __init__(
        self,
        module: NextTokenModule,
        k: int,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        *,
        attention: AttentionSteps,
        tally: Tensor,
        choose_exchange: Callable[[int], ExchangeKind | None],
    ) -> None:
        self._module = module
        self._drafter = Drafter(k, max_rows, vocab_size, device)
        self._attention = attention
        self._tally = tally
        self._choose_exchange = choose_exchange
        self._cache: Cache = None

    @property
    def num_places(self) -> int:
        """Number of tokens of each decoding request in a step: the request's last token and its
        drafts.
        """
        return self._drafter.k + 1

    def make_cache(self, room: CacheRoom) -> None:
        # The old cache is freed first, because the memory might be too small for two caches.
        self._cache = None
        self._cache = self._module.make_cache(room)

    @property
    def cache(self) -> Cache:
        return self._cache

    @property
    def tokens(self) -> TokenTable:
        """The table with the drafts and the last tokens of all rows."""
        return self._drafter.tokens

    @property
    def passed(self) -> Tensor:
        """For each row, the number of drafts that its last step accepted, [max_rows + 1] int32."""
        return self._drafter.passed

    @property
    def drafts(self) -> Tensor:
        """The drafts of all rows, [max_rows + 1, k] int32."""
        return self._drafter.drafts

    def move(self, inputs: DeviceStep) -> None:
        """Add each request's number of accepted drafts to the request's positions. Replace the
        slots by the slots of the new positions.

        This method changes the positions, slots and draft slots of a graph's static inputs in
        place.
        """
        drafts = inputs.drafts
        assert drafts is not None and drafts.behind is not None
        num_reqs, num_places = drafts.positions.shape
        num_slots, num_kept = drafts.slots.shape[1], 2 * self._drafter.k
        passed = self._drafter.passed.index_select(0, drafts.behind).unsqueeze(1)
        drafts.positions.add_(passed)
        at = torch.arange(num_reqs * num_slots, dtype=torch.int32, device=passed.device)
        at = (at.view(num_reqs, num_slots)[:, :num_kept] + passed).view(-1)
        slots = drafts.slots.view(-1).index_select(0, at).view(num_reqs, num_kept)
        drafts.slots[:, :num_kept].copy_(slots)
        inputs.slots.view(num_reqs, num_places).copy_(slots[:, :num_places])

    def count(self, sampled: Tensor, inputs: DeviceStep) -> Tensor:
        """Return the number of accepted drafts of each request, padding requests included:
        [num_reqs] int32.

        Args:
            sampled: [n] int32, the sampled tokens: k + 1 tokens of each live request, then padding.
        """
        assert inputs.drafts is not None
        return self._drafter.count(self._by_request(sampled, inputs), inputs.drafts)

    def _by_request(self, sampled: Tensor, inputs: DeviceStep) -> Tensor:
        """Return the sampled tokens as [num_reqs, k + 1], padding requests included."""
        assert inputs.drafts is not None
        size = len(inputs.drafts.rows) * self.num_places
        if len(sampled) < size:
            padded = sampled.new_zeros(size)
            padded[: len(sampled)].copy_(sampled)
            sampled = padded
        return sampled.view(-1, self.num_places)

    def propose_whole(
        self,
        graph: BatchDescriptor,
        inputs: DeviceStep,
        lens: Lens,
        hidden: Tensor,
        sampled: Tensor,
        accepted: Tensor,
        tasks: TaskRecorder | None,
    ) -> None:
        """Propose drafts from the static inputs of a graph; ``inputs.drafts`` must be set.

        Args:
            hidden: [num_tokens, hidden], the decoder's hidden states.
            sampled: [num_tokens] int32, the token sampled after each of the graph's tokens.
            accepted: [num_reqs] int32, number of accepted drafts of each request.
            tasks: records the operators of the captured graph; if None, the operators run eagerly.
        """
        assert inputs.drafts is not None
        experts = ExpertStep(self._choose_exchange(len(sampled)), self._tally)

        def run(draft_pass: DraftPass) -> Tensor:
            iteration = draft_pass.iteration
            metadata = self._attention.of_graph(
                graph,
                inputs,
                lens,
                None if tasks is None else tasks.ahead(iteration),
                iteration=iteration,
                written=draft_pass.written,
            )
            return self._forward(draft_pass, metadata, experts)

        self._drafter.propose(
            self._module.logits,
            run,
            None,
            inputs.positions,
            inputs.slots,
            hidden,
            sampled.view(-1, self.num_places),
            accepted,
            inputs.drafts,
        )

    def propose_mixed(
        self,
        step: DeviceStep,
        inputs: HostStep,
        metadata: AttentionMetadata,
        hidden: Tensor,
        sampled: Tensor,
        accepted: Tensor,
        exchange: ExchangeKind | None,
        collect: Collect,
    ) -> None:
        """Propose drafts for the sampled requests of a mixed step.

        Args:
            metadata: the decoder's attention metadata.
            hidden: [num_tokens, hidden], the decoder's hidden states.
            sampled: [num_samples * (k + 1)] int32, the sampled tokens of live requests.
            accepted: [num_reqs] int32, number of accepted drafts of each request.
            exchange: the kind of exchange with which the decoder sends tokens to their experts.
            collect: returns the hidden states of given tokens of the step, even if other ranks run
                these tokens (``Collect``).
        """
        assert step.drafts is not None and step.next_tokens is not None
        draft_table = step.draft_table
        assert draft_table is not None
        num_places, live = self.num_places, inputs.num_samples
        num_samples = len(step.drafts.rows)
        spread = ExpertStep(self._choose_exchange(num_samples * num_places), self._tally)

        def run(draft_pass: DraftPass) -> Tensor:
            if draft_pass.iteration == 0:
                experts = ExpertStep(exchange, self._tally)
                return self._forward(draft_pass, metadata, experts)
            assert step.drafts is not None
            later = self._attention.of_drafts(
                step.drafts.positions[:live],
                draft_pass.written[: live * num_places],
                draft_table,
                inputs,
                draft_pass.iteration,
            )
            return self._forward(draft_pass, later, spread)

        landings = step.places if step.shared is None else step.shared.landings
        next_tokens = step.next_tokens.index_copy(0, landings.long(), sampled)[:-1]
        self._drafter.propose(
            self._module.logits,
            run,
            next_tokens,
            step.positions,
            step.slots,
            hidden,
            self._by_request(sampled, step),
            accepted,
            step.drafts,
            collect,
        )

    def _forward(
        self, draft_pass: DraftPass, metadata: AttentionMetadata, experts: ExpertStep
    ) -> Tensor:
        return self._module.forward(
            draft_pass.token_ids,
            draft_pass.hidden,
            draft_pass.positions,
            draft_pass.slots,
            self._cache,
            metadata,
            experts,
        )

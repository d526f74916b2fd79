"""The next-token module's part of a step: over static inputs in a graph, or over a mixed batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.drafting import Drafter, DraftPass
from dist_aclgraph.graphs.device_step import DeviceStep
from dist_aclgraph.graphs.task_update import TaskRecorder
from dist_aclgraph.ints import IntArray
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ExpertStep
from dist_aclgraph.models.attention_kind import Cache
from dist_aclgraph.models.next_token import NextTokenModule
from dist_aclgraph.steps.host_step import HostStep
from dist_aclgraph.steps.padding import Lens
from dist_aclgraph.topology import ExchangeKind

NO_TABLE: IntArray = np.empty((0, 1), np.int32)


class DraftSteps:
    """Owns the drafts of this rank, and the module's KV cache: the blocks are the decoder's.

    Args:
        k: drafts of each request.
        max_rows: of the batch; one more is spare.
        tally: [2] int64, what the module's experts add to.
        choose_exchange: how the tokens of an iteration travel to their experts.
    """

    def __init__(
        self,
        module: NextTokenModule,
        k: int,
        max_rows: int,
        npu: Npu,
        *,
        block_size: int,
        causal_mask: Tensor,
        tally: Tensor,
        choose_exchange: Callable[[int], ExchangeKind | None],
    ) -> None:
        self._module = module
        self._drafter = Drafter(k, max_rows, npu.device)
        self._npu = npu
        self._block_size = block_size
        self._causal_mask = causal_mask
        self._tally = tally
        self._choose_exchange = choose_exchange
        self._cache: Cache = None

    @property
    def num_places(self) -> int:
        """Tokens of a request that decodes: its last one, and its drafts."""
        return self._drafter.k + 1

    def make_cache(self, num_blocks: int, dtype: torch.dtype) -> None:
        self._cache = None  # before the new one: there may be no room for both
        self._cache = self._module.make_cache(num_blocks, self._block_size, dtype)

    def fill_in(self, token_ids: Tensor) -> None:
        """Replace references to drafts by the drafts, in place."""
        token_ids.copy_(self._drafter.fill_in(token_ids))

    def propose_whole(
        self,
        inputs: DeviceStep,
        lens: Lens,
        hidden: Tensor,
        sampled: Tensor,
        tasks: TaskRecorder | None,
    ) -> Tensor:
        """Draft from the static inputs of a graph, drafts filled in.

        Args:
            hidden: [num_tokens, hidden]; sampled: [num_tokens] int32.
            tasks: the graph under capture, None runs eagerly.

        Returns:
            [num_reqs] int32, how many drafts of each request passed.
        """
        assert inputs.drafts is not None
        query_ends, kv_lens = lens
        experts = ExpertStep(self._choose_exchange(len(sampled)), self._tally)

        def run(draft_pass: DraftPass) -> Tensor:
            metadata = AttentionMetadata(
                slot_mapping=draft_pass.written,
                block_table=inputs.block_table,
                query_ends=query_ends,
                kv_lens=[length + draft_pass.iteration for length in kv_lens],
                causal_mask=self._causal_mask,
                tasks=None if tasks is None else tasks.ahead(draft_pass.iteration),
            )
            metadata = self._prepared(metadata, NO_TABLE)
            return self._forward(draft_pass, metadata, experts)

        return self._drafter.propose(
            self._module.logits,
            run,
            None,
            inputs.positions,
            inputs.slots,
            hidden,
            sampled.view(-1, self.num_places),
            inputs.drafts,
        )

    def propose_mixed(
        self,
        step: DeviceStep,
        inputs: HostStep,
        metadata: AttentionMetadata,
        hidden: Tensor,
        sampled: Tensor,
        exchange: ExchangeKind | None,
    ) -> Tensor:
        """Draft for the requests of a mixed step that were sampled.

        Args:
            metadata: of the decoder.
            hidden: [num_tokens, hidden].
            sampled: [num_samples * (k + 1)] int32, of live requests.
            exchange: of the decoder.

        Returns:
            [num_samples] int32, how many drafts of each request passed; then padding.
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
            assert inputs.drafts is not None
            ends = inputs.drafts.positions[:, -1] + 1 + draft_pass.iteration
            later = AttentionMetadata(
                slot_mapping=draft_pass.written[: live * num_places],
                block_table=draft_table,
                query_ends=list(range(num_places, live * num_places + 1, num_places)),
                kv_lens=ends.tolist(),
                causal_mask=self._causal_mask,
            )
            later = self._prepared(later, inputs.block_table[inputs.sampled])
            return self._forward(draft_pass, later, spread)

        # Before the tokens are padded: padding has no places.
        next_tokens = step.next_tokens.index_copy(0, step.places.long(), sampled)
        if len(sampled) < num_samples * num_places:
            padded = sampled.new_zeros(num_samples * num_places)
            padded[: len(sampled)].copy_(sampled)
            sampled = padded
        return self._drafter.propose(
            self._module.logits,
            run,
            next_tokens,
            step.positions,
            step.slots,
            hidden,
            sampled.view(num_samples, num_places),
            step.drafts,
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

    def _prepared(self, metadata: AttentionMetadata, block_table: IntArray) -> AttentionMetadata:
        kind = self._module.stack.kind
        return kind.prepare(metadata, block_table, self._block_size, self._npu.upload)

"""The next-token module of a checkpoint: the decoder predicts the next token, and this module
predicts the token after the next token.

The module combines the hidden state at a position with the token after this position, and runs one
decoder layer on the result. The module uses the decoder's embedding and head, although checkpoints
contain separate copies for the module. Reference: the DeepSeek-V3 report, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ExpertStep
from dist_aclgraph.layers.linear import Linear
from dist_aclgraph.layers.norm import Norm
from dist_aclgraph.layers.vocabulary import VocabularyEmbedding, VocabularyHead
from dist_aclgraph.models.attention_kind import Cache, CacheRoom, PagedKind
from dist_aclgraph.models.layer_stack import LayerStack, load_layer, load_norm
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.model_spec import ModelSpec


@dataclass(frozen=True)
class NextTokenModule:
    """One rank's part of the next-token module.

    Attributes:
        kind: the kind of attention of the module's layer.
        mix: [2 * hidden, hidden], the matrix that combines a token's embedding (first half) and a
            hidden state (second half). Every rank has the whole matrix.
        stack: the module's layer, and the norm before the output head.
    """

    embedding: VocabularyEmbedding
    token_norm: Norm
    hidden_norm: Norm
    mix: Linear
    kind: PagedKind
    stack: LayerStack
    head: VocabularyHead

    def make_cache(self, room: CacheRoom) -> Cache:
        """Return the layer's KV cache. A request's block ids are the same in this cache and in the
        caches of the decoder's layers.
        """
        return self.kind.make_cache(room)

    def forward(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        cache: Cache,
        metadata: AttentionMetadata,
        step: ExpertStep,
    ) -> Tensor:
        """Return the normalised hidden states, [n, hidden]. ``logits`` and the call for the next
        draft read these states.

        Args:
            token_ids: [n] int32, for each row, the token after its position.
            hidden: [n, hidden], the hidden state at each row's position. The decoder or the call
                for the previous draft has computed this state.
            positions: [n] int32, the position of each row.
        """
        inputs = (token_ids, hidden)
        return self.stack.forward(self._mix, inputs, positions, slots, [cache], metadata, step=step)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map [n, hidden] to the logits [n, vocab], on every rank."""
        return self.head(hidden)

    def _mix(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        token = self.token_norm(self.embedding(token_ids))
        return self.mix(torch.cat([token, self.hidden_norm(hidden)], -1))


def load_next_token_module(
    slices: WeightSlices,
    spec: ModelSpec,
    kind: PagedKind,
    embedding: VocabularyEmbedding,
    head: VocabularyHead,
) -> NextTokenModule:
    """Load the first next-token module. In the checkpoint, it is the layer after the decoder's last
    layer.
    """
    width = spec.hidden_size
    prefix = f"model.layers.{spec.num_layers}"
    mix = slices.columns(f"{prefix}.eh_proj.weight", width, 2 * width, 0, width)
    return NextTokenModule(
        embedding,
        load_norm(slices, spec, f"{prefix}.enorm.weight"),
        load_norm(slices, spec, f"{prefix}.hnorm.weight"),
        Linear(slices.place(mix)),
        kind,
        LayerStack(
            kind.rope,
            [load_layer(slices, spec, kind, spec.num_layers)],
            load_norm(slices, spec, f"{prefix}.shared_head.norm.weight"),
        ),
        head,
    )

"""A decoder on one rank: embedding, layers and output head. ``ModelSpec`` selects each layer's kind
of attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_aclgraph.comm.groups import RankGroups
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ALL_HERE, ExpertSetup, ExpertStep
from dist_aclgraph.layers.segments import RunSegment, run_directly
from dist_aclgraph.layers.vocabulary import VocabularyEmbedding, VocabularyHead, vocabulary_part
from dist_aclgraph.models.attention_kind import Cache, CacheRoom, PagedKind
from dist_aclgraph.models.attention_kinds import AttentionKinds
from dist_aclgraph.models.fusions import Fusions
from dist_aclgraph.models.layer_stack import LayerStack, load_layer, load_norm
from dist_aclgraph.models.loading import NotePlaced, WeightSlices, WeightSource, note_nothing
from dist_aclgraph.models.next_token import NextTokenModule, load_next_token_module
from dist_aclgraph.shapes.model_spec import ModelSpec


class Decoder:
    """One tensor parallel rank's part of a decoder.

    The object owns the weights. It knows nothing about requests, batches or graphs.
    """

    def __init__(
        self,
        spec: ModelSpec,
        groups: RankGroups,
        checkpoint: WeightSource,
        *,
        device: torch.device,
        max_len: int,
        drafts: bool = False,
        note: NotePlaced = note_nothing,
        experts: ExpertSetup | None = None,
        fusions: Fusions | None = None,
        int8_latents: bool = False,
    ) -> None:
        """Load this rank's slices.

        Args:
            drafts: whether the next-token module is also loaded.
            note: called after each weight is on the device, with the weight's number of bytes.
            experts: the settings for the rank's layers of experts; None means the defaults of
                ``ExpertSetup``.
            fusions: the fused operators that layers may use; None if layers use no fused operators.
            int8_latents: whether caches store latents in int8.

        Raises:
            ConfigError: the heads cannot be split over the group.
            MissingTensorError: a tensor is missing, or has a wrong shape. The error names the first
                such tensor.
            UnsupportedModelError: the checkpoint has a bias that the model does not have.
        """
        self.spec = spec
        slices = WeightSlices(
            checkpoint,
            groups.tp,
            device,
            experts or ExpertSetup(groups),
            note,
            fusions=fusions or Fusions.none(),
        )
        self._embedding = _load_embedding(slices, spec)
        norm = load_norm(slices, spec, "model.norm.weight")
        self._kinds = AttentionKinds(
            spec,
            groups,
            device=device,
            dtype=norm.weight.dtype,
            max_len=max_len,
            int8_latents=int8_latents,
        )
        layers = [load_layer(slices, spec, self._kinds.of(i), i) for i in range(spec.num_layers)]
        self._stack = LayerStack(self.kind.rope, layers, norm)
        self._head = _load_head(slices, spec, self._embedding)
        self.next_token: NextTokenModule | None = None
        if drafts:
            self.next_token = load_next_token_module(
                slices, spec, self.kind, self._embedding, self._head
            )
        checkpoint.refuse_unread_biases()

    @property
    def kind(self) -> PagedKind:
        """The kind of attention that keeps keys in blocks."""
        return self._kinds.paged

    def make_caches(self, room: CacheRoom) -> list[Cache]:
        """Return an empty cache for each layer."""
        return [self._kinds.of(i).make_cache(room) for i in range(self.spec.num_layers)]

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        caches: list[Cache],
        metadata: AttentionMetadata,
        run: RunSegment = run_directly,
        step: ExpertStep = ALL_HERE,
    ) -> Tensor:
        """Return the normalised hidden states, [num_tokens, hidden]; see ``LayerStack.forward``.

        Args:
            token_ids: [num_tokens] int32.
        """
        return self._stack.forward(
            self._embedding, (token_ids,), positions, slots, caches, metadata, run, step
        )

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Map [n, hidden] to [n, vocab] on every rank. If ``out`` is given, the result is written
        to it.
        """
        return self._head(hidden, out)


def _load_embedding(slices: WeightSlices, spec: ModelSpec) -> VocabularyEmbedding:
    start, stop = vocabulary_part(spec.vocab_size, slices.group)
    shape = (spec.vocab_size, spec.hidden_size)
    rows = slices.part("model.embed_tokens.weight", shape, 0, start, stop)
    weight = slices.place(rows)
    # As in transformers, the factor is rounded to the type of the weights.
    scale = torch.tensor(spec.embedding_scale, dtype=weight.dtype).item()
    return VocabularyEmbedding(weight, start, slices.group, scale)


def _load_head(
    slices: WeightSlices, spec: ModelSpec, embedding: VocabularyEmbedding
) -> VocabularyHead:
    # A checkpoint without a head is for embeddings, so the logits of this tied head are not used.
    sizes = spec.vocab_size, slices.group, spec.logit_scale
    tied = VocabularyHead(embedding.weight.t(), *sizes)
    is_tied, name = spec.tie_word_embeddings, "lm_head.weight"
    if not slices.checkpoint.has_head or (is_tied and not slices.has(name)):
        return tied
    part = vocabulary_part(spec.vocab_size, slices.group)
    weight = slices.columns(name, spec.vocab_size, spec.hidden_size, *part)
    # As in transformers, a stored head that differs from the embedding is used even if config.json
    # ties the head to the embedding.
    if is_tied and torch.equal(weight, embedding.weight.t()):
        return tied
    return VocabularyHead(slices.place(weight), *sizes)

"""Bytes of what a decoder computes between its inputs and its logits: an estimate from its shape.

Never compared with an NPU. It errs upwards: of a layer it adds up all that is made, as though
nothing were freed before the layer's end, and it lets every exchange of tokens bring what gathering
them brings. Left out is what operators take for themselves, and keys and values of a long context
that latent attention makes chunk by chunk.
"""

from __future__ import annotations

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec


def activation_bytes(
    spec: ModelSpec, *, tp: int, ep: int, element_bytes: int, num_tokens: int, num_samples: int
) -> int:
    """Return what a forward pass holds at once on one rank.

    Layers run one after another, and each uses the memory of the one before: the largest counts.

    Args:
        ep: 1 where every tensor parallel group has all experts.
        num_tokens: of the rank's batch, padding too; as many on each other rank.
        num_samples: of these, tokens whose logits are wanted.
    """
    hidden = spec.hidden_size
    stream = 4 * hidden  # residual stream, before and after attention, after the feed-forward part
    attention = _latent(spec, spec.latent, tp) if spec.latent else _grouped(spec, tp)
    feed_forward = _mlp(hidden, spec.intermediate_size, tp)
    if spec.experts is not None:
        feed_forward = max(feed_forward, _experts(hidden, spec.experts, tp, ep))
    part = -(-spec.vocab_size // tp)
    logits = part + 2 * tp * part  # the rank's own, all parts, and all in order
    elements = num_tokens * (stream + attention + feed_forward) + num_samples * logits
    return elements * element_bytes


def _grouped(spec: ModelSpec, tp: int) -> int:
    q, kv = spec.num_heads // tp, kv_heads_per_rank(spec.num_kv_heads, tp)
    # As projected, and again normalised and rotated; what attention makes of them.
    return spec.head_dim * (2 * (q + 2 * kv) + q)


def _latent(spec: ModelSpec, latent: LatentSpec, tp: int) -> int:
    head = 2 * (latent.plain_dim + latent.rope_dim)  # as projected, and in two parts
    head += 2 * latent.kv_rank  # absorbed queries, and what attention makes of them
    head += 2 * latent.plain_dim + 2 * latent.value_dim  # keys and values of the plain form; output
    down = 2 * (latent.kv_rank + latent.rope_dim) + 2 * (latent.q_rank or 0)
    return down + spec.num_heads // tp * head


def _mlp(hidden: int, width: int, tp: int) -> int:
    return 3 * -(-width // tp) + hidden  # gate and up, their product; the sum


def _experts(hidden: int, experts: ExpertSpec, tp: int, ep: int) -> int:
    width, gathered = -(-experts.width // tp), 1.0
    if ep > 1:
        width, gathered = experts.width, ep / tp
    arrived = 3 * hidden  # as sent, as received, and the sum of its experts
    chosen = experts.top_k * (2 * hidden + 3 * width)  # a row for each choice, in and out
    shared = _mlp(hidden, experts.num_shared * experts.width, tp) if experts.num_shared else 0
    return round(gathered * (arrived + chosen)) + shared

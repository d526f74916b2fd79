"""Bytes of what a decoder computes between its inputs and its logits: an estimate from its shape.

It was never compared with an NPU. It errs upwards: it sums all tensors of a layer, as though none
were freed before the layer's end, and counts every exchange of tokens as if they were gathered. It
leaves out the workspaces of operators.
"""

from __future__ import annotations

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

FLOAT32_BYTES = 4
LOGS = 8  # floats that a head's log of a sum takes at most, alignment included


def activation_bytes(
    spec: ModelSpec,
    *,
    tp: int,
    ep: int,
    element_bytes: int,
    num_tokens: int,
    num_samples: int,
    pcp: int = 1,
    dcp: int = 1,
    num_direct: int = 0,
) -> int:
    """Return what a forward pass holds at once on one rank, keys of long queries left out.

    Layers run one after another, and each uses the memory of the one before: the largest counts.

    Args:
        ep: 1 where every tensor parallel group has all experts.
        num_tokens: of the rank's batch, padding too; as many on each other rank.
        num_samples: of these, tokens whose logits are wanted.
        num_direct: of these, tokens that attend to each shard where it is.
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
    merged = 0 if dcp == 1 else _merged_bytes(spec, tp, pcp, dcp, element_bytes)
    return elements * element_bytes + num_direct * merged


def prompt_bytes(
    spec: ModelSpec,
    *,
    tp: int,
    pcp: int,
    dcp: int,
    kept: int,
    element_bytes: int,
    num_tokens: int,
    chunk_tokens: int,
) -> int:
    """Return what long queries take beside that: keys that are read chunk by chunk, and new ones
    that PCP ranks hand round.

    Args:
        kept: elements that a rank keeps of a token in a layer.
        num_tokens: of the rank's batch.
        chunk_tokens: whose keys are read at once.
    """
    value_dim, made = spec.head_dim, 0
    if spec.latent:
        value_dim = spec.latent.value_dim
        # Keys, the rotated part of each, and values of the rank's heads.
        made = spec.latent.plain_dim + spec.latent.rope_dim + spec.latent.value_dim
    elif dcp == 1:
        chunk_tokens = 0  # keys stay where they are
    # Side by side before they are gathered; gathered, picked, and apart again.
    copies = 1 if dcp == 1 else 2 / dcp + 3
    heads = spec.num_heads // tp
    keys = round(chunk_tokens * copies * kept) + chunk_tokens * heads * made
    new = (1 + 2 * pcp) * kept if pcp > 1 else 0  # its own, all in order, keys and values apart
    found = heads * value_dim if chunk_tokens else 0
    floats = 4 * found + 3 * heads if chunk_tokens else 0  # of two chunks, and merged
    elements = keys + num_tokens * (new + found)
    return elements * element_bytes + num_tokens * floats * FLOAT32_BYTES


def _merged_bytes(spec: ModelSpec, tp: int, pcp: int, dcp: int, element_bytes: int) -> int:
    """Bytes of a token that attends directly: queries of all heads of the DCP group, and what
    shards found in float32.
    """
    heads, groups = spec.num_heads // tp, dcp // pcp  # groups of heads, which PCP ranks repeat
    rotated = spec.latent.rope_dim if spec.latent else 0
    found = spec.latent.kv_rank if spec.latent else spec.head_dim
    # Queries of the rank, of all ranks, in order, and in two parts; then what was found.
    queries = (1 + dcp + 2 * groups) * (found + rotated) + groups * found
    # In float32, without what is empty, by receiver, put together; sent, received, and merged.
    floats = (4 * groups + 2 * dcp + 1) * (found + LOGS)
    return heads * (queries * element_bytes + floats * FLOAT32_BYTES)


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

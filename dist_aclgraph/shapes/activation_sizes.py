"""Bytes of a decoder's activations, from its inputs to its logits, estimated from the model's
shape.

The estimate was never compared with an NPU. It is usually too high, because it sums all tensors of
a layer, although some tensors are freed before the layer's end, and because it counts every
exchange of tokens as an all-gather. The workspaces of operators are not included.
"""

from __future__ import annotations

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

FLOAT32_BYTES = 4
FLOAT32_ELEMENTS = 2  # number of 16-bit elements with the size of a float32
LOGS = 8  # maximum number of floats for a head's log-sum-exp, alignment included


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
    """Return the bytes of one forward pass on one rank.

    These bytes do not include ``prompt_bytes``. Layers run one after another, and a layer reuses
    the memory of the previous layer. So only the largest layer is counted.

    Args:
        ep: 1 if every tensor parallel group has all experts.
        num_tokens: number of tokens of the rank's batch, padding included; equal on all ranks.
        num_samples: number of these tokens whose logits are computed.
        num_direct: number of these tokens for which each shard computes attention on its own rank.
    """
    hidden = spec.hidden_size
    # The residual stream, before attention, after attention, and after the feed-forward part.
    stream = 4 * hidden
    attention = _latent(spec, spec.latent, tp) if spec.latent else _grouped(spec, tp)
    if spec.linear is not None:
        attention = max(attention, _linear(spec.linear, tp))
    if spec.indexer:
        attention += _indexer(spec.indexer)
    feed_forward = _mlp(hidden, spec.intermediate_size, tp)
    if spec.activation != "silu":
        feed_forward += -(-spec.intermediate_size // tp)  # the activated gate
    if spec.experts is not None:
        feed_forward = max(feed_forward, _experts(hidden, spec.experts, tp, ep))
    part = -(-spec.vocab_size // tp)
    logits = part + 2 * tp * part  # logits of this rank, and twice the logits of all ranks
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
    """Return the additional bytes of requests with many queries: keys that are read chunk by chunk,
    and new keys that PCP ranks exchange.

    Args:
        kept: cached elements per token and layer on one rank.
        num_tokens: number of tokens of the rank's batch.
        chunk_tokens: number of tokens whose keys are read at once. An indexer's choice needs all
            keys of a request at once.
    """
    # New keys exist three times: the rank's own keys, the keys of all ranks in one tensor, and the
    # keys and values of all ranks as separate tensors.
    forms = 1 + 2 * pcp if pcp > 1 else 0
    if spec.indexer:
        # With one shard, latents are read from the cache directly. With several shards, there are
        # copies, whose sizes in parentheses are multiples of all latents: packed before the gather
        # (2 / dcp), gathered (1), and selected and split for each piece of the prompt on the rank
        # (2).
        copies = 0 if dcp == 1 else 2 / dcp + 1 + 2 * min(pcp, 2)
        elements = round(chunk_tokens * copies * kept)
        elements += num_tokens * forms * (kept + spec.indexer.head_dim)
        return elements * element_bytes
    value_dim, made = spec.head_dim, 0
    if spec.latent:
        value_dim = spec.latent.value_dim
        # Keys, the rotated part of each key, and values of the rank's heads.
        made = spec.latent.plain_dim + spec.latent.rope_dim + spec.latent.value_dim
        if spec.latent.has_whole_heads:
            made += spec.latent.head_dim  # keys joined with their rotated part
    elif dcp == 1:
        chunk_tokens = 0  # keys are read from the cache directly
    # Copies of keys: packed before the gather (2 / dcp), then gathered, selected and split (3).
    copies = 1 if dcp == 1 else 2 / dcp + 3
    heads = spec.num_heads // tp
    keys = round(chunk_tokens * copies * kept) + chunk_tokens * heads * made
    found = heads * value_dim if chunk_tokens else 0
    if spec.latent and spec.latent.has_whole_heads:
        # Joined queries; then queries and results, each with the same number of heads of zeros.
        found += 5 * heads * value_dim
    # Results of two chunks, and the merged result.
    floats = 4 * heads * value_dim + 3 * heads if chunk_tokens else 0
    elements = keys + num_tokens * (forms * kept + found)
    return elements * element_bytes + num_tokens * floats * FLOAT32_BYTES


def _merged_bytes(spec: ModelSpec, tp: int, pcp: int, dcp: int, element_bytes: int) -> int:
    """Return the bytes of one token that attends to each shard on the shard's rank: queries of all
    heads of the DCP group, and the shards' results in float32.
    """
    heads, groups = spec.num_heads // tp, dcp // pcp  # PCP ranks have copies of the same heads
    rotated = spec.latent.rope_dim if spec.latent else 0
    found = spec.latent.kv_rank if spec.latent else spec.head_dim
    # Queries in four forms: of the rank, of all ranks, in order, and in two parts. Then the results
    # of attention.
    queries = (1 + dcp + 2 * groups) * (found + rotated) + groups * found
    # Results in float32: without empty results, ordered by receiver, and joined. Then the sent, the
    # received and the merged results.
    floats = (4 * groups + 2 * dcp + 1) * (found + LOGS)
    # The choice of each shard: positions and slots in ten forms of 32 bits, and twice in 64 bits.
    remapped = (10 * 4 + 2 * 8) * spec.indexer.top_k if spec.indexer else 0
    return heads * (queries * element_bytes + floats * FLOAT32_BYTES) + remapped


def _grouped(spec: ModelSpec, tp: int) -> int:
    q, kv = spec.num_heads // tp, kv_heads_per_rank(spec.num_kv_heads, tp)
    # Queries, keys and values: as projected, and after normalisation and rotation. Then the output
    # of attention.
    heads = 2 * (q + 2 * kv) + q
    if spec.qk_norm_spans_heads and tp > 1:
        heads += FLOAT32_ELEMENTS * (q + kv)  # the same values, rescaled in float32
    if spec.has_output_gate:
        heads += 3 * q  # gates, their sigmoids, and the multiplied output
    return spec.head_dim * heads


def _linear(linear: LinearSpec, tp: int) -> int:
    channels = linear.num_channels // tp
    width = linear.num_value_heads // tp * linear.value_dim
    # Inputs of the convolution: as projected, joined with the states, and in the order of the
    # requests. Then three float32 tensors for the convolution's sum, and the inputs of the rule.
    mixed = (3 + 3 * FLOAT32_ELEMENTS + 2) * channels
    # In float32: decays, their inputs and logarithms; inputs of the rule as received, and inputs of
    # the rule after scaling or decay.
    floats = 8 * width if linear.decays_by_channel else 0
    # Gates; results; normalised results; gates and normalised results joined; their product.
    return mixed + 6 * width + FLOAT32_ELEMENTS * floats


def _latent(spec: ModelSpec, latent: LatentSpec, tp: int) -> int:
    head = 2 * (latent.plain_dim + latent.rope_dim)  # queries as projected, and in two parts
    head += 2 * latent.kv_rank  # absorbed queries, and the output of their attention
    head += 2 * latent.plain_dim + 2 * latent.value_dim  # keys and values of the plain form; output
    down = 2 * (latent.kv_rank + latent.rope_dim) + 2 * (latent.q_rank or 0)
    return down + spec.num_heads // tp * head


def _indexer(indexer: IndexerSpec) -> int:
    # Queries and a key: as projected, in parts, and joined. Then the choice, int32.
    return 3 * (indexer.num_heads + 1) * indexer.head_dim + indexer.num_heads + 2 * indexer.top_k


def _mlp(hidden: int, width: int, tp: int) -> int:
    return 3 * -(-width // tp) + hidden  # gate, up, and their product; then the sum


def _experts(hidden: int, experts: ExpertSpec, tp: int, ep: int) -> int:
    width, gathered = -(-experts.width // tp), 1.0
    if ep > 1:
        width, gathered = experts.width, ep / tp
    arrived = 3 * hidden  # a token as sent, as received, and its sum over experts
    chosen = experts.top_k * (2 * hidden + 3 * width)  # per chosen expert: input and output rows
    shared = _mlp(hidden, experts.width_of_shared, tp) if experts.num_shared else 0
    return round(gathered * (arrived + chosen)) + shared

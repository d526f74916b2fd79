"""Bytes of a decoder's activations, from its inputs to its logits, estimated from the model's
shape.

The estimate was never compared with an NPU. The estimate is usually too high. It sums all tensors
of a layer, but some tensors are freed before the layer's end. Every exchange of tokens is counted
as an all-gather. The workspaces of operators are not included.
"""

from __future__ import annotations

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

FLOAT32_BYTES = 4
FLOAT32_ELEMENTS = 2  # a float32 is as large as two 16-bit elements
LOGS = 8  # maximum number of floats that store a head's log-sum-exp, with the padding for alignment


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
        ep: expert parallel size; 1 means that every tensor parallel group has all experts.
        num_tokens: number of tokens of the rank's batch, padding included; equal on all ranks.
        num_samples: number of these tokens whose logits are computed.
        num_direct: number of these tokens whose queries are sent to all shards (see
            ``_merged_bytes``).
    """
    hidden = spec.hidden_size
    # Four tensors of hidden states: the residual stream, the input of attention, the result of
    # attention, and the result of the feed-forward part.
    stream = 4 * hidden
    attention = _latent(spec, spec.latent, tp) if spec.latent else _grouped(spec, tp)
    if spec.linear is not None:
        attention = max(attention, _linear(spec.linear, tp))
    if spec.indexer:
        attention += _indexer(spec.indexer)
    feed_forward = _mlp(hidden, spec.intermediate_size, tp)
    if spec.activation != "silu":
        # the result of the activation is a separate tensor
        feed_forward += -(-spec.intermediate_size // tp)
    if spec.experts is not None:
        feed_forward = max(feed_forward, _experts(hidden, spec.experts, tp, ep))
    part = -(-spec.vocab_size // tp)
    logits = part + 2 * tp * part  # this rank's logits, and two copies of all ranks' logits
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
    int8_latents: bool = False,
) -> int:
    """Return the additional bytes of a step with parts of prompts. Such a step reads cached keys
    chunk by chunk, and PCP ranks exchange new keys.

    Args:
        kept: cached elements per token and layer on one rank.
        num_tokens: number of tokens of the rank's batch.
        chunk_tokens: number of tokens in a chunk of cached keys. If there is an indexer, one chunk
            contains all keys of a request.
        int8_latents: whether cached latents are int8.
    """
    # There are three copies of the new keys: this rank's keys, the gathered keys of all ranks, and
    # the gathered keys and values as separate tensors.
    forms = 1 + 2 * pcp if pcp > 1 else 0
    if spec.indexer:
        # With one shard, latents are read from the cache directly. With several shards, there are
        # copies of the latents. The numbers in brackets are multiples of the size of all latents.
        # Latents are packed before the gather (2 / dcp) and gathered (1). For each piece of the
        # prompt on the rank, latents are selected and split (2).
        copies = 0 if dcp == 1 else 2 / dcp + 1 + 2 * min(pcp, 2)
        elements = round(chunk_tokens * copies * kept)
        elements += num_tokens * forms * (kept + spec.indexer.head_dim)
        return elements * element_bytes
    value_dim, made = spec.head_dim, 0
    if spec.latent:
        value_dim = spec.latent.value_dim
        # For each head of the rank, three tensors are computed from the latents: keys, their
        # rotated parts, and values.
        made = spec.latent.plain_dim + spec.latent.rope_dim + spec.latent.value_dim
        if spec.latent.has_whole_heads:
            made += spec.latent.head_dim  # the fourth tensor: keys joined with their rotated parts
    elif dcp == 1:
        chunk_tokens = 0  # keys are read from the cache directly
    # Copies of keys: packed before the gather (2 / dcp), then gathered, selected and split (3).
    copies = 1 if dcp == 1 else 2 / dcp + 3
    heads = spec.num_heads // tp
    keys = round(chunk_tokens * copies * kept) + chunk_tokens * heads * made
    found = heads * value_dim if chunk_tokens else 0
    if spec.latent and spec.latent.has_whole_heads:
        # Queries are joined with their rotated parts. Then heads of zeros are inserted, which
        # doubles the queries and the results.
        found += 5 * heads * value_dim
    # Two chunks' results are in memory when they are merged into a third tensor.
    floats = 4 * heads * value_dim + 3 * heads if chunk_tokens else 0
    elements = keys + num_tokens * (forms * kept + found)
    total = elements * element_bytes + num_tokens * floats * FLOAT32_BYTES
    if spec.latent and int8_latents:
        # Rows are selected. Then their values exist three times: in float32, multiplied by the
        # scales, and in the type of the activations. ``kept`` is the number of elements of the
        # third copy.
        total += chunk_tokens * (2 * spec.latent.kv_rank * FLOAT32_BYTES + kept * element_bytes)
    return total


def _merged_bytes(spec: ModelSpec, tp: int, pcp: int, dcp: int, element_bytes: int) -> int:
    """Return the bytes per token if the keys are sharded. Each rank computes the token's attention
    to the keys of the rank's shard. The DCP ranks exchange the queries of all heads, and the
    shards' results in float32.
    """
    heads, groups = spec.num_heads // tp, dcp // pcp  # PCP ranks have copies of the same heads
    rotated = spec.latent.rope_dim if spec.latent else 0
    found = spec.latent.kv_rank if spec.latent else spec.head_dim
    # The queries exist in four forms: this rank's heads, the gathered heads of all ranks, the
    # gathered heads in order, and the two parts of the ordered heads. The last summand is the size
    # of attention's results.
    queries = (1 + dcp + 2 * groups) * (found + rotated) + groups * found
    # The results in float32 exist in six forms: without empty results, ordered by receiver, joined,
    # sent, received and merged.
    floats = (4 * groups + 2 * dcp + 1) * (found + LOGS)
    # For each key that an indexer chooses, its position and slot are stored in ten tensors of
    # 32-bit elements and in two tensors of 64-bit elements.
    remapped = (10 * 4 + 2 * 8) * spec.indexer.top_k if spec.indexer else 0
    return heads * (queries * element_bytes + floats * FLOAT32_BYTES) + remapped


def _grouped(spec: ModelSpec, tp: int) -> int:
    q, kv = spec.num_heads // tp, kv_heads_per_rank(spec.num_kv_heads, tp)
    # Queries, keys and values exist twice: before and after normalisation and rotation. The last
    # summand is the size of attention's output.
    heads = 2 * (q + 2 * kv) + q
    if spec.qk_norm_spans_heads and tp > 1:
        heads += FLOAT32_ELEMENTS * (q + kv)  # queries and keys in float32, rescaled
    if spec.has_output_gate:
        heads += 3 * q  # gates, sigmoids of the gates, and the output times the sigmoids
    return spec.head_dim * heads


def _linear(linear: LinearSpec, tp: int) -> int:
    channels = linear.num_channels // tp
    width = linear.num_value_heads // tp * linear.value_dim
    # The convolution's inputs exist three times: as projected, joined with the states, and in the
    # order of requests. The convolution needs three float32 tensors for its sum. The last summand
    # is the size of the delta rule's inputs.
    mixed = (3 + 3 * FLOAT32_ELEMENTS + 2) * channels
    # These tensors are float32: the decays, the inputs of the decays, and the logarithms of the
    # decays; the delta rule's inputs, before and after they are scaled or decayed.
    floats = 8 * width if linear.decays_by_channel else 0
    # Six tensors of this width: gates, results, normalised results, gates joined with normalised
    # results (two), and the product of gates and normalised results.
    return mixed + 6 * width + FLOAT32_ELEMENTS * floats


def _latent(spec: ModelSpec, latent: LatentSpec, tp: int) -> int:
    # queries before and after they are divided into two parts
    head = 2 * (latent.plain_dim + latent.rope_dim)
    head += 2 * latent.kv_rank  # absorbed queries, and the attention's output for these queries
    head += 2 * latent.plain_dim + 2 * latent.value_dim  # without absorption: keys, values, output
    down = 2 * (latent.kv_rank + latent.rope_dim) + 2 * (latent.q_rank or 0)
    return down + spec.num_heads // tp * head


def _indexer(indexer: IndexerSpec) -> int:
    # Queries and one key exist in three forms: as projected, in two parts, and joined. The last
    # summand is the size of the chosen keys' indices (int32).
    return 3 * (indexer.num_heads + 1) * indexer.head_dim + indexer.num_heads + 2 * indexer.top_k


def _mlp(hidden: int, width: int, tp: int) -> int:
    return 3 * -(-width // tp) + hidden  # gate, up and their product; and the MLP's output


def _experts(hidden: int, experts: ExpertSpec, tp: int, ep: int) -> int:
    width, gathered = -(-experts.width // tp), 1.0
    if ep > 1:
        width, gathered = experts.width, ep / tp
    arrived = 3 * hidden  # the sent row, the received row, and the sum of the experts' results
    chosen = experts.top_k * (2 * hidden + 3 * width)  # rows of each chosen expert
    shared = _mlp(hidden, experts.width_of_shared, tp) if experts.num_shared else 0
    return round(gathered * (arrived + chosen)) + shared

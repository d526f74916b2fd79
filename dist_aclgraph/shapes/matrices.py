"""The matrices of a decoder's layers that may be quantised: their names, and their numbers of
elements on one rank.

The name of a matrix is the part NAME of ``model.layers.N.NAME.weight``; ``experts.*`` stands for
all experts of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping

from dist_aclgraph.shapes.heads import kv_heads_per_rank
from dist_aclgraph.shapes.indexer_spec import IndexerSpec
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ExpertSpec, LatentSpec, ModelSpec

Elements = Mapping[str, int]  # number of elements by name
Part = str  # name of a part of the weights
ATTENTION, LINEAR, INDEXERS = "attention", "linear attention", "indexers"
DENSE, EXPERTS, SHARED = "dense MLPs", "experts", "shared experts"
EACH_EXPERT = "mlp.experts.*"


def matrices_of(
    spec: ModelSpec, *, tp: int, ep: int, redundant_experts: int = 0
) -> dict[Part, Elements]:
    """Return the matrices of one layer, for each part of the weights that the model has.

    Args:
        ep: expert parallel size. With 1, every expert is split over the tensor parallel ranks. With
            a larger size, each rank has whole experts.
        redundant_experts: number of additional copies of experts on all ``ep`` ranks together.
    """
    found: dict[Part, Elements] = {
        ATTENTION: _latent(spec, spec.latent, tp) if spec.latent else _attention(spec, tp),
        DENSE: _dense(spec, tp),
    }
    if spec.linear is not None:
        found[LINEAR] = _linear(spec.hidden_size, spec.linear, tp)
    if spec.indexer is not None:
        found[INDEXERS] = _indexer(spec, spec.indexer)
    if spec.experts is not None:
        found[EXPERTS] = _experts(spec.hidden_size, spec.experts, tp, ep, redundant_experts)
        width = -(-spec.experts.width_of_shared // tp)
        found[SHARED] = _mlp("mlp.shared_experts", spec.hidden_size, width)
    return found


def has_part(spec: ModelSpec, part: Part, layer: int) -> bool:
    """Return whether a layer has a part of the weights. The layers of next-token modules come after
    the decoder's last layer.
    """
    is_linear = spec.linear is not None and layer in spec.linear.layers
    has_experts = spec.experts is not None and layer in spec.experts.layers
    return {
        ATTENTION: not is_linear,
        LINEAR: is_linear,
        INDEXERS: spec.indexer is not None and layer in spec.indexer.layers,
        DENSE: not has_experts,
        EXPERTS: has_experts,
        SHARED: has_experts,
    }[part]


def experts_per_rank(experts: ExpertSpec, tp: int, ep: int, redundant: int) -> tuple[int, int]:
    """Return the number of routed experts of a rank, and their width on this rank."""
    if ep > 1:
        return (experts.num_experts + redundant) // ep, experts.width
    return experts.num_experts, -(-experts.width // tp)


def _attention(spec: ModelSpec, tp: int) -> Elements:
    hidden, d = spec.hidden_size, spec.head_dim
    q, kv = spec.num_heads // tp * d, kv_heads_per_rank(spec.num_kv_heads, tp) * d
    return {
        "self_attn.q_proj": hidden * q * (2 if spec.has_output_gate else 1),
        "self_attn.k_proj": hidden * kv,
        "self_attn.v_proj": hidden * kv,
        "self_attn.o_proj": q * hidden,
    }


def _latent(spec: ModelSpec, latent: LatentSpec, tp: int) -> Elements:
    """Return the matrices of latent attention. The result omits the matrices that multiply the
    latent, because they are never quantised.
    """
    hidden, heads, rank = spec.hidden_size, spec.num_heads // tp, latent.q_rank
    query = heads * (latent.plain_dim + latent.rope_dim)
    others = {
        # These matrices are not split over ranks.
        "self_attn.kv_a_proj_with_mqa": hidden * (latent.kv_rank + latent.rope_dim),
        "self_attn.o_proj": heads * latent.value_dim * hidden,
    }
    if rank is None:
        return {"self_attn.q_proj": hidden * query} | others
    return {"self_attn.q_a_proj": hidden * rank, "self_attn.q_b_proj": rank * query} | others


def _linear(hidden: int, linear: LinearSpec, tp: int) -> Elements:
    values, channels = linear.num_value_heads // tp, linear.num_channels // tp
    width = values * linear.value_dim
    if linear.decays_by_channel:
        keys = (channels - width) // 2
        # Decays (f) and gates (g) are each computed by two matrices. The first of the two
        # (``f_a_proj``, ``g_a_proj``) is not split over ranks.
        return {
            "self_attn.q_proj": hidden * keys,
            "self_attn.k_proj": hidden * keys,
            "self_attn.v_proj": hidden * width,
            "self_attn.b_proj": hidden * values,
            "self_attn.f_a_proj": hidden * linear.key_dim,
            "self_attn.f_b_proj": width * linear.key_dim,
            "self_attn.g_a_proj": hidden * linear.value_dim,
            "self_attn.g_b_proj": width * linear.value_dim,
            "self_attn.o_proj": width * hidden,
        }
    inputs = {"qkv": channels, "z": width, "b": values, "a": values}
    if linear.has_grouped_weights:
        inputs = {"qkvz": channels + width, "ba": 2 * values}
    return {
        **{f"linear_attn.in_proj_{name}": hidden * count for name, count in inputs.items()},
        "linear_attn.out_proj": width * hidden,
    }


def _indexer(spec: ModelSpec, indexer: IndexerSpec) -> Elements:
    """Return the matrices of an indexer, which is not split over ranks."""
    assert spec.latent is not None and spec.latent.q_rank is not None
    return {
        "self_attn.indexer.wq_b": spec.latent.q_rank * indexer.num_heads * indexer.head_dim,
        "self_attn.indexer.wk": spec.hidden_size * indexer.head_dim,
    }


def _dense(spec: ModelSpec, tp: int) -> Elements:
    found = _mlp("mlp", spec.hidden_size, -(-spec.intermediate_size // tp))
    return {name: size for name, size in found.items() if spec.gates_mlp or "gate" not in name}


def _mlp(prefix: str, hidden: int, width: int) -> Elements:
    return {f"{prefix}.{name}_proj": hidden * width for name in ("gate", "up", "down")}


def _experts(hidden: int, experts: ExpertSpec, tp: int, ep: int, redundant: int) -> Elements:
    count, width = experts_per_rank(experts, tp, ep, redundant)
    return _mlp(EACH_EXPERT, count * hidden, width)

"""Reads the experts of DeepSeek's models, and checks the experts of all families."""

from __future__ import annotations

from typing import Any

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.model_config import MAX_EXPERTS, MAX_LAYERS, ModelConfig
from dist_aclgraph.shapes.model_spec import ExpertSpec

MIN_EXPERTS_OF_A_GROUP = 3  # required by npu_moe_gating_top_k


def checked_experts(config: ModelConfig, experts: ExpertSpec) -> ExpertSpec:
    """Check the numbers of groups and experts, and return the experts.

    Raises:
        ModelError: the numbers of groups and experts contradict each other.
        UnsupportedModelError: the groups are too small for the operator.
    """
    per_group, rest = divmod(experts.num_experts, experts.num_groups)
    if rest or not 1 <= experts.top_groups <= experts.num_groups:
        raise ModelError(
            f"{config.path} asks for {experts.top_groups} of {experts.num_groups} groups among "
            f"{experts.num_experts} experts; n_group must divide the experts, and topk_group is at "
            "most n_group"
        )
    if experts.num_groups > 1 and per_group < MIN_EXPERTS_OF_A_GROUP:
        raise config.unsupported(
            f"n_group is {experts.num_groups}: groups of {per_group} experts are not supported; "
            f"they must have {MIN_EXPERTS_OF_A_GROUP} at least"
        )
    if not 1 <= experts.top_k <= experts.top_groups * per_group:
        raise ModelError(
            f"{config.path} asks for {experts.top_k} experts of a token; "
            f"{experts.top_groups * per_group} may be chosen"
        )
    return experts


def read_local_experts(config: ModelConfig, num_layers: int, **properties: Any) -> ExpertSpec:
    """Return the experts of a model that has experts in every layer, and whose config.json has the
    key ``num_local_experts``.

    Args:
        properties: further fields of the ``ExpertSpec``.
    """
    experts = ExpertSpec(
        num_experts=config.integer("num_local_experts", most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("intermediate_size"),
        renormalizes=True,
        layers=frozenset(range(num_layers)),
        **properties,
    )
    return checked_experts(config, experts)


def read_deepseek_experts(config: ModelConfig, *, is_v3: bool) -> ExpertSpec | None:
    """Return the experts of DeepSeek V2 or V3; None if config.json has no experts.

    Raises:
        ModelError: a key is missing, or has an impossible value.
        UnsupportedModelError: the choice of experts is not implemented.
    """
    if not config.has("n_routed_experts"):
        return None
    scoring, method = ("sigmoid", "noaux_tc") if is_v3 else ("softmax", "greedy")
    scoring = config.text("scoring_func", scoring)
    method = config.text("topk_method", method)
    if is_v3 and scoring == "noaux_tc":  # dots.llm1 stores topk_method as scoring_func
        scoring = "sigmoid"
    known = (
        (("sigmoid", "noaux_tc"),)
        if is_v3
        else (("softmax", "greedy"), ("softmax", "group_limited_greedy"))
    )
    if (scoring, method) not in known:
        raise config.unsupported(
            f"experts chosen by {scoring} scores and {method} are not supported here; supported: "
            f"{', '.join(' and '.join(pair) for pair in known)}"
        )
    has_groups = method != "greedy"
    first = config.integer("first_k_dense_replace", 0, least=0, most=MAX_LAYERS)
    step = config.integer("moe_layer_freq", 1, most=MAX_LAYERS)
    num_layers = config.integer("num_hidden_layers", most=MAX_LAYERS) + config.num_draft_layers
    listed = _listed_layers(config)
    ruled = frozenset(i for i in range(first, num_layers) if i % step == 0)
    experts = ExpertSpec(
        num_experts=config.integer("n_routed_experts", most=MAX_EXPERTS),
        top_k=config.integer("num_experts_per_tok", most=MAX_EXPERTS),
        width=config.integer("moe_intermediate_size"),
        # DeepSeek V2 either scales or renormalises the weights of a token's experts. Published
        # checkpoints use scaling.
        renormalizes=is_v3 and config.flag("norm_topk_prob", True),
        layers=ruled if listed is None else listed,
        scoring="sigmoid" if scoring == "sigmoid" else "softmax",
        num_groups=config.integer("n_group", 1, most=MAX_EXPERTS) if has_groups else 1,
        top_groups=config.integer("topk_group", 1, most=MAX_EXPERTS) if has_groups else 1,
        group_score="top2" if is_v3 else "max",
        scaling=config.number("routed_scaling_factor", 1.0),
        num_shared=config.integer("n_shared_experts", 0, least=0, most=MAX_EXPERTS),
        has_bias=is_v3,
    )
    return checked_experts(config, experts)


def _listed_layers(config: ModelConfig) -> frozenset[int] | None:
    """Return the layers that have experts: the layers that ``mlp_layer_types`` lists, and the
    next-token modules' layers. Return None if config.json has no such list.
    """
    kinds, num_layers = config.texts("mlp_layer_types"), config.integer("num_hidden_layers")
    if not kinds:
        return None
    if len(kinds) != num_layers or set(kinds) - {"dense", "sparse"}:
        raise config.unsupported(
            f"mlp_layer_types is {', '.join(kinds):.80}; it must have dense or sparse for each of "
            f"{num_layers} layers"
        )
    drafts = range(num_layers, num_layers + config.num_draft_layers)
    return frozenset((*(i for i, kind in enumerate(kinds) if kind == "sparse"), *drafts))

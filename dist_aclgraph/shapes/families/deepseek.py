"""DeepSeek V2 and V3; Kimi K2, whose config.json names the architecture of DeepSeek V3; and
GLM-4.7-Flash, which has heads of other sizes.
"""

from __future__ import annotations

from dist_aclgraph.shapes.families.decoder import read_decoder
from dist_aclgraph.shapes.families.experts import read_deepseek_experts
from dist_aclgraph.shapes.model_config import ModelConfig
from dist_aclgraph.shapes.model_spec import LatentSpec, ModelSpec

# Widths of the latent, of the part of a head that is not rotated, of the rotated part, and of a
# value.
LATENT_SIZES = (512, 128, 64, 128)
LATENT, ROPE = 512, 64
WHOLE_HEADS = (128, 256)  # widths for which attention accepts whole heads, see ``has_whole_heads``


def read_deepseek_v2(config: ModelConfig) -> ModelSpec:
    return _read(config, is_v3=False)


def read_deepseek_v3(config: ModelConfig) -> ModelSpec:
    return _read(config, is_v3=True)


def _read(config: ModelConfig, *, is_v3: bool) -> ModelSpec:
    return read_decoder(
        config,
        experts=read_deepseek_experts(config, is_v3=is_v3),
        latent=_checked(config, read_latent(config)),
        num_draft_layers=config.num_draft_layers,
    )


def read_latent(config: ModelConfig) -> LatentSpec:
    """Return the latent attention that config.json describes. Its sizes are not checked.

    Raises:
        ModelError: a key is missing, or has an impossible value.
        UnsupportedModelError: the attention has biases.
    """
    for key in ("attention_bias", "mlp_bias"):
        if config.has(key):
            raise config.unsupported(f"{key} is true; it is not supported beside latent attention")
    return LatentSpec(
        q_rank=config.integer("q_lora_rank") if config.has("q_lora_rank") else None,
        kv_rank=config.integer("kv_lora_rank"),
        plain_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
        interleaves=config.flag("rope_interleave", True),
    )


def _checked(config: ModelConfig, latent: LatentSpec) -> LatentSpec:
    sizes = (latent.kv_rank, latent.plain_dim, latent.rope_dim, latent.value_dim)
    if (latent.kv_rank, latent.rope_dim) != (LATENT, ROPE) or not (
        sizes == LATENT_SIZES or (latent.head_dim == latent.value_dim in WHOLE_HEADS)
    ):
        raise config.unsupported(
            "kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim are "
            f"{', '.join(map(str, sizes))}; the attention operators take "
            f"{', '.join(map(str, LATENT_SIZES))} only, or 512 and 64 beside heads of "
            f"{' or '.join(map(str, WHOLE_HEADS))} elements, rotated part included, with values of "
            "the same width"
        )
    return latent

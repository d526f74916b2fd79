"""The families of supported decoders. Each module turns the config.json of one family into a
``ModelSpec``. The table in this file has one function for each name of ``architectures``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dist_aclgraph.shapes.families.bailing import read_bailing_moe_v2
from dist_aclgraph.shapes.families.beside_images import (
    INNER_NAMES,
    OLDER_NAMES,
    OUTER_NAMES,
    beside_images,
)
from dist_aclgraph.shapes.families.cohere import read_cohere, read_cohere2
from dist_aclgraph.shapes.families.deepseek import read_deepseek_v2, read_deepseek_v3
from dist_aclgraph.shapes.families.ernie import read_ernie, read_ernie_moe
from dist_aclgraph.shapes.families.exaone import read_exaone4
from dist_aclgraph.shapes.families.gemma import read_gemma3
from dist_aclgraph.shapes.families.glm import (
    read_dots1,
    read_glm,
    read_glm4,
    read_glm4_moe,
    read_glm4v,
    read_glm4v_moe,
    read_solar_open,
)
from dist_aclgraph.shapes.families.gpt_oss import read_gpt_oss
from dist_aclgraph.shapes.families.granite import read_granite, read_granite_moe, read_minicpm
from dist_aclgraph.shapes.families.hunyuan import read_hunyuan_v1, read_hunyuan_v1_moe, read_hy_v3
from dist_aclgraph.shapes.families.kimi import read_kimi_linear
from dist_aclgraph.shapes.families.llama import (
    read_apertus,
    read_arcee,
    read_iquest_coder,
    read_llama,
    read_pangu_embedded,
    read_seed_oss,
)
from dist_aclgraph.shapes.families.minimax import read_minimax_m2
from dist_aclgraph.shapes.families.mistral import read_mistral, read_mixtral
from dist_aclgraph.shapes.families.olmo import read_olmo2, read_olmo3, read_olmoe
from dist_aclgraph.shapes.families.phi3 import read_phi3
from dist_aclgraph.shapes.families.qwen import (
    read_qwen2,
    read_qwen2_moe,
    read_qwen2_without_windows,
    read_qwen3,
    read_qwen3_moe,
    read_qwen3_vl_moe,
)
from dist_aclgraph.shapes.families.qwen3_next import read_qwen3_next
from dist_aclgraph.shapes.families.smollm import read_smollm3
from dist_aclgraph.shapes.families.sparse_latent import read_sparse_latent
from dist_aclgraph.shapes.int4_formats import read_int4_formats
from dist_aclgraph.shapes.int4_matrices import find_int4_matrices
from dist_aclgraph.shapes.model_config import ModelConfig, read_model_config
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.quantised_formats import check_quantisation

READERS: dict[str, Callable[[ModelConfig], ModelSpec]] = {
    "Qwen3ForCausalLM": read_qwen3,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "LlamaForCausalLM": read_llama,
    "InternLM3ForCausalLM": read_llama,
    "ArceeForCausalLM": read_arcee,
    "ApertusForCausalLM": read_apertus,
    "IQuestCoderForCausalLM": read_iquest_coder,
    "SeedOssForCausalLM": read_seed_oss,
    "MistralForCausalLM": read_mistral,
    "MinistralForCausalLM": read_mistral,
    "Mistral3ForConditionalGeneration": beside_images(read_mistral, OUTER_NAMES),
    "MixtralForCausalLM": read_mixtral,
    "Phi3ForCausalLM": read_phi3,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "Glm4MoeLiteForCausalLM": read_deepseek_v3,
    "KimiK25ForConditionalGeneration": beside_images(read_deepseek_v3, OUTER_NAMES),
    "KimiLinearForCausalLM": read_kimi_linear,
    "GlmForCausalLM": read_glm,
    "Glm4ForCausalLM": read_glm4,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "SolarOpenForCausalLM": read_solar_open,
    "MiniMaxM2ForCausalLM": read_minimax_m2,
    "HYV3ForCausalLM": read_hy_v3,
    "Ernie4_5ForCausalLM": read_ernie,
    "Ernie4_5_MoeForCausalLM": read_ernie_moe,
    "GptOssForCausalLM": read_gpt_oss,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_next,
    "Qwen3_5MoeForCausalLM": read_qwen3_next,
    "Qwen3_5ForConditionalGeneration": beside_images(read_qwen3_next, INNER_NAMES),
    "Qwen3_5MoeForConditionalGeneration": beside_images(read_qwen3_next, INNER_NAMES),
    "Qwen3VLForConditionalGeneration": beside_images(read_qwen3, INNER_NAMES),
    "Qwen3VLMoeForConditionalGeneration": beside_images(read_qwen3_vl_moe, INNER_NAMES),
    "Ministral3ForCausalLM": read_mistral,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma3ForConditionalGeneration": beside_images(read_gemma3, OUTER_NAMES),
    "SmolLM3ForCausalLM": read_smollm3,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "OlmoeForCausalLM": read_olmoe,
    "MiMoForCausalLM": read_qwen2_without_windows,
    "YoutuForCausalLM": read_deepseek_v3,
    "Qwen2VLForConditionalGeneration": beside_images(read_qwen2_without_windows, OLDER_NAMES),
    "Qwen2_5_VLForConditionalGeneration": beside_images(read_qwen2_without_windows, OLDER_NAMES),
    "Glm4vForConditionalGeneration": beside_images(read_glm4v, INNER_NAMES),
    "Glm4vMoeForConditionalGeneration": beside_images(read_glm4v_moe, INNER_NAMES),
    "Exaone4ForCausalLM": read_exaone4,
    "CohereForCausalLM": read_cohere,
    "Cohere2ForCausalLM": read_cohere2,
    "GraniteForCausalLM": read_granite,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeSharedForCausalLM": read_granite_moe,
    "GraniteMoeHybridForCausalLM": read_granite_moe,
    "MiniCPMForCausalLM": read_minicpm,
    "HunYuanDenseV1ForCausalLM": read_hunyuan_v1,
    "HunYuanMoEV1ForCausalLM": read_hunyuan_v1_moe,
    "Dots1ForCausalLM": read_dots1,
    "BailingMoeV2ForCausalLM": read_bailing_moe_v2,
    "PanguEmbeddedForCausalLM": read_pangu_embedded,
    "DeepseekV32ForCausalLM": read_sparse_latent,
    "GlmMoeDsaForCausalLM": read_sparse_latent,
}

LLAMA4 = (
    "its layers attend within chunks of 8192 tokens, for which the attention operators of "
    "torch_npu have no mask, and its routers scale the inputs of experts"
)
# Architectures that are not supported, and the reasons.
REFUSED = {
    "Gemma2ForCausalLM": (
        "it limits scores of attention by tanh, and the attention operators of torch_npu have no "
        "such limit"
    ),
    "Llama4ForCausalLM": LLAMA4,
    "Llama4ForConditionalGeneration": LLAMA4,
    "LongcatFlashForCausalLM": (
        "each of its layers has two latent attentions, and some of its experts return their input"
    ),
    "Mistral4ForCausalLM": (
        "its latents have 256 elements, and the operators of latent attention take 512 only"
    ),
}


def read_model_spec(directory: str | Path, overrides: Mapping[str, Any] | None = None) -> ModelSpec:
    """Read the shape of a supported decoder from a checkpoint; see ``read_model_config``.

    Raises:
        ConfigError: there is no such directory.
        ModelError: its config.json is missing or unreadable, lacks a key, or has an impossible
            value.
        UnsupportedModelError: the architecture, activation, rope scaling or quantisation is not
            implemented.
    """
    config = read_model_config(directory, overrides)
    if not config.has("architectures"):
        raise config.unsupported(_why_unknown(config))
    architecture = config.architecture
    if architecture in REFUSED:
        raise config.unsupported(
            f"architecture {architecture} is not supported: {REFUSED[architecture]}"
        )
    if architecture not in READERS:
        raise config.unsupported(
            f"architecture {architecture} is not supported; docs/use/models.md lists the "
            f"{len(READERS)} supported ones, such as {', '.join(_similar(architecture))}"
        )
    check_quantisation(config)
    spec = READERS[architecture](config)
    # Linear attention applies hidden_act to the result of the convolution.
    only_silu = {"experts": spec.experts, "linear attention": spec.linear}
    for beside in (name for name, part in only_silu.items() if part is not None):
        if spec.activation != "silu":
            raise config.unsupported(
                f"hidden_act {spec.activation} is not supported beside {beside}; only silu"
            )
    if spec.latent is not None and spec.rope.query_growth:
        raise config.unsupported(
            "llama_4_scaling_beta is not supported beside latent attention, only 0"
        )
    spec = replace(spec, int4=find_int4_matrices(spec, read_int4_formats(config)))
    form = "four bits" if spec.int4 else spec.quant_method
    if spec.names.ranges and form in ("four bits", "fp8"):
        raise config.unsupported(
            f"{architecture} stores several matrices as one, which is not supported in {form}: use "
            "a checkpoint in bfloat16 or int8"
        )
    return spec


def _why_unknown(config: ModelConfig) -> str:
    remedy = "set architectures to one of the names in docs/use/models.md"
    if not config.has("model_type"):
        return f"it has neither architectures nor model_type; {remedy}"
    kind = config.text("model_type", "")
    return (
        f"it has no architectures, and no supported model has the model_type {kind:.80}; {remedy}"
    )


def _similar(architecture: str) -> list[str]:
    return get_close_matches(architecture, READERS, cutoff=0)

"""Small checkpoints of models that also have an image encoder; see ``checkpoints.py``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.checkpoints import FAMILIES, SPECIAL, USUAL, seeded


def make_kimi_k25(directory: Path) -> Any:
    """Return a seeded Kimi K2.5 of transformers with its image encoder; write it to ``directory``
    under the published names.

    transformers 5.23 uses another name for the class. In its names of weights, "blocks" stands in
    place of "layers".
    """
    import transformers

    text = {**USUAL, **SPECIAL["DeepseekV3ForCausalLM"], "n_group": 1, "model_type": "deepseek_v3"}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Kimi_K25Config(
        text_config=text,
        vision_config={**vision, "num_attention_heads": 2},
        projection_hidden_size=32,
        tie_word_embeddings=False,
    )
    model = seeded(transformers.Kimi_K25ForConditionalGeneration, config, directory)
    written, published = "language_model.model.blocks.", "language_model.model.layers."
    stored = load_file(directory / "model.safetensors")
    renamed = {name.replace(written, published): tensor for name, tensor in stored.items()}
    save_file(renamed, directory / "model.safetensors", {"format": "pt"})
    path = directory / "config.json"
    names = {"architectures": ["KimiK25ForConditionalGeneration"]}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    return model


def make_qwen3_vl(directory: Path) -> Any:
    """Return a seeded Qwen3-VL of transformers with an image encoder; write it to ``directory``."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
    text = {**USUAL, "head_dim": 64, "rope_parameters": rope}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config={**vision, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=False,
    )
    return seeded(transformers.Qwen3VLForConditionalGeneration, config, directory)


def _seeded_mistral3(text: dict[str, Any], directory: Path) -> Any:
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Mistral3Config(
        text_config=text,
        vision_config={**vision, "num_attention_heads": 2, "model_type": "pixtral"},
        tie_word_embeddings=False,
    )
    return seeded(transformers.Mistral3ForConditionalGeneration, config, directory)


def make_mistral3(directory: Path) -> Any:
    """Return a seeded Mistral Small 3.1 of transformers with its image encoder; write it to
    ``directory``.
    """
    text = {**USUAL, **SPECIAL["MistralForCausalLM"], "model_type": "mistral"}
    return _seeded_mistral3(text, directory)


def make_qwen3_vl_moe(directory: Path, *, as_published: bool = True) -> Any:
    """Return a seeded Qwen3-VL-MoE of transformers with its image encoder; write it to
    ``directory``.

    Args:
        as_published: whether to write the matrices of experts as [in, out]; transformers saves
            [out, in].
    """
    import transformers

    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 8, 8]}
    experts = SPECIAL["Qwen3MoeForCausalLM"]
    text = {**USUAL, **experts, "rope_parameters": rope}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
    config = transformers.Qwen3VLMoeConfig(
        text_config=text,
        vision_config={**vision, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=False,
    )
    model = seeded(transformers.Qwen3VLMoeForConditionalGeneration, config, directory)
    if as_published:
        stored = load_file(directory / "model.safetensors")
        for name in [name for name in stored if ".mlp.experts." in name]:
            stored[name] = stored[name].transpose(1, 2).contiguous()
        save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return model


def make_gemma3(directory: Path) -> Any:
    """Return a seeded Gemma 3 of transformers with its image encoder; write it to ``directory``."""
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.Gemma3Config(
        text_config={**USUAL, **FAMILIES["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        vision_config={**vision, "num_attention_heads": 2, "model_type": "siglip_vision_model"},
    )
    return seeded(transformers.Gemma3ForConditionalGeneration, config, directory)


def make_ministral3(directory: Path) -> Any:
    """Return a seeded Ministral 3 of transformers with its image encoder; write it to
    ``directory``.
    """
    text = {**USUAL, **FAMILIES["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return _seeded_mistral3(text, directory)


def make_qwen2_vl(directory: Path, *, has_windows: bool = False) -> Any:
    """Return a seeded Qwen2-VL or Qwen2.5-VL of transformers with its image encoder; write it to
    ``directory`` under the published names.

    Args:
        has_windows: true for Qwen2.5-VL, whose image encoder attends within windows; false for
            Qwen2-VL.
    """
    import transformers

    name = "Qwen2_5_VL" if has_windows else "Qwen2VL"
    rope = {"type": "mrope", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    text = {**USUAL, "rope_parameters": {"rope_type": "default", **rope}}
    vision: dict[str, Any] = {"depth": 1, "num_heads": 2, "intermediate_size": 32}
    vision |= {"hidden_size": 32, "out_hidden_size": 128} if has_windows else {"embed_dim": 32}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config=vision if has_windows else {**vision, "hidden_size": 128},
        tie_word_embeddings=False,
    )
    model = seeded(getattr(transformers, f"{name}ForConditionalGeneration"), config, directory)
    path = directory / "config.json"
    whole = json.loads(path.read_text())
    text = whole.pop("text_config")
    del text["rope_parameters"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps({**text, **whole, "rope_theta": rope["rope_theta"]}))
    return model


def make_glm4v(directory: Path, *, has_experts: bool = False, part: float | None = 0.5) -> Any:
    """Return a seeded GLM-4.1V or GLM-4.5V of transformers with its image encoder; write it to
    ``directory``.

    Args:
        has_experts: true for GLM-4.5V, whose decoder has experts; false for GLM-4.1V.
        part: fraction of each head's elements that is rotated; None means the default of
            transformers.
    """
    import transformers

    name = "Glm4vMoe" if has_experts else "Glm4v"
    section = [2, 3, 3] if part else [4, 6, 6]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}
    if part:
        rope["partial_rotary_factor"] = part
    text = {**USUAL, "rope_parameters": rope, "pad_token_id": None}
    if has_experts:
        experts = SPECIAL["Glm4MoeForCausalLM"]
        text |= {key: experts[key] for key in experts if key not in ("use_qk_norm", "head_dim")}
    vision = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
    config = getattr(transformers, f"{name}Config")(
        text_config=text,
        vision_config={**vision, "out_hidden_size": text["hidden_size"]},
        tie_word_embeddings=False,
    )
    return seeded(getattr(transformers, f"{name}ForConditionalGeneration"), config, directory)

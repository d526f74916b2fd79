"""In a few steps on one rank, each model family generates the same tokens as transformers.
``tests/parity`` compares whole deployments with transformers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_aclgraph.errors import ConfigError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.weight_sizes import weight_parts
from tests.checkpoints import FAMILIES, greedy, make_prompts, make_reference
from tests.engine.runners import Sequences, make_runner
from tests.image_checkpoints import (
    make_gemma3,
    make_glm4v,
    make_ministral3,
    make_mistral3,
    make_qwen2_vl,
    make_qwen3_vl,
    make_qwen3_vl_moe,
)
from tests.parity.made_checkpoints import write_fp8
from tests.plans import decode_graph

NUM_TOKENS = 9
QWENS = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
HYBRIDS = (*QWENS, "KimiLinearForCausalLM")


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Glm4MoeForCausalLM", {"use_qk_norm": False, "attention_bias": False}),
        ("Glm4MoeForCausalLM", {"rope_parameters": {"rope_theta": 1e4,
                                                    "rope_type": "default",
                                                    "partial_rotary_factor": 0.25}}),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": 64}),
        ("MiniMaxM2ForCausalLM", {"num_key_value_heads": 1}),
        ("GptOssForCausalLM", {"layer_types": ["full_attention", "sliding_attention"] * 2,
                               "num_hidden_layers": 4}),
        ("GptOssForCausalLM", {"attention_bias": False, "swiglu_limit": 7.0}),
        ("MixtralForCausalLM", {"sliding_window": 24}),
        ("Qwen2MoeForCausalLM", {"qkv_bias": False, "norm_topk_prob": True,
                                 "mlp_only_layers": [1]}),
        ("HYV3ForCausalLM", {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
        ("Phi3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope",
                                                 "short_factor": [1.0 + i / 8 for i in range(16)],
                                                 "long_factor": [2.0] * 16,
                                                 "partial_rotary_factor": 0.5},
                             "original_max_position_embeddings": 512}),
        ("Ernie4_5ForCausalLM", {"use_bias": False}),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 2, "moe_layer_end_index": 1,
                                     "tie_word_embeddings": False}),
    ],
)  # fmt: skip
def test_greedy_tokens_equal_those_of_transformers(
    npu: Any, tmp_path: Path, architecture: str, changes: dict[str, Any]
) -> None:
    model = make_reference(architecture, tmp_path, **changes)
    prompts = make_prompts([40, 3])
    runner, graph = make_runner(npu, tmp_path), decode_graph(8)
    sequences = Sequences(runner, prompts)

    sequences.prefill()
    runner.warm_up(graph)
    runner.capture(graph)
    runner.commit(graph)
    for _ in range(NUM_TOKENS - 1):
        sequences.decode(graph)

    assert sequences.new == greedy(model, prompts, NUM_TOKENS)


@pytest.mark.parametrize(
    "make",
    [
        make_qwen3_vl,
        make_mistral3,
        make_gemma3,
        make_ministral3,
        make_qwen3_vl_moe,
        partial(make_qwen3_vl_moe, as_published=False),
        make_qwen2_vl,
        partial(make_qwen2_vl, has_windows=True),
        make_glm4v,
        partial(make_glm4v, part=None),
        partial(make_glm4v, has_experts=True),
    ],
)
def test_the_text_part_of_a_model_with_images_equals_that_of_transformers(
    npu: Any, tmp_path: Path, make: Callable[[Path], Any]
) -> None:
    model, prompts = make(tmp_path), make_prompts([40, 3])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()

    assert sequences.new == greedy(model, prompts, 1)


@pytest.mark.parametrize("architecture", ["Glm4MoeForCausalLM", "MiniMaxM2ForCausalLM"])
def test_weights_in_fp8_are_those_of_floats(npu: Any, tmp_path: Path, architecture: str) -> None:
    """Each FP8 weight is multiplied by its own scales, even if the weight's heads are reordered for
    the rotation.
    """
    from transformers import AutoModelForCausalLM

    directory, floats = tmp_path / "fp8", tmp_path / "floats"
    make_reference(architecture, directory, hidden_size=192, head_dim=96)
    shutil.copytree(directory, floats)
    write_fp8(directory, floats, torch.float32)
    sequences = Sequences(make_runner(npu, directory), prompts := make_prompts([40, 3]))

    sequences.prefill()
    for _ in range(NUM_TOKENS - 1):
        sequences.decode(None)

    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32).eval()
    assert sequences.new == greedy(model, prompts, NUM_TOKENS)


@pytest.mark.parametrize("architecture", HYBRIDS)
def test_layers_of_linear_attention(npu: Any, tmp_path: Path, architecture: str) -> None:
    model = make_reference(architecture, tmp_path)
    prompts = make_prompts([40, 3])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()
    for _ in range(3):
        sequences.decode(None)

    assert sequences.new == greedy(model, prompts, 4)
    parts = weight_parts(read_model_spec(tmp_path), tp=1, ep=1, element_bytes=4)
    assert sum(part.bytes for part in parts) == 4 * sum(
        weight.numel() for weight in model.state_dict().values()
    )


@pytest.mark.parametrize("architecture", QWENS[1:])
def test_qwen3_5_as_published_beside_an_encoder_of_images(
    npu: Any, tmp_path: Path, architecture: str
) -> None:
    model = make_reference(architecture, tmp_path)
    rename_as_published(tmp_path, model.config.num_hidden_layers)
    prompts = make_prompts([40, 3])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()
    sequences.decode(None)

    assert sequences.new == greedy(model, prompts, 2)


@pytest.mark.parametrize("stored", ["another", "equal", "absent"])
def test_the_whole_model_decides_about_a_tied_head(npu: Any, tmp_path: Path, stored: str) -> None:
    """transformers saves files in which two configurations disagree: the head is tied in the whole
    model's configuration, but not in the text model's. A stored head is used only if it differs
    from the embedding.
    """
    model, prompts = make_mistral3(tmp_path), make_prompts([40, 3])
    path, weights = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    config = json.loads(path.read_text()) | {"tie_word_embeddings": True}
    config["text_config"]["tie_word_embeddings"] = False
    path.write_text(json.dumps(config))
    if stored != "another":
        embedding = weights["language_model.model.embed_tokens.weight"]
        weights["language_model.lm_head.weight"] = embedding.clone()
        if stored == "absent":
            del weights["language_model.lm_head.weight"]
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        model.lm_head.weight = model.model.language_model.embed_tokens.weight
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()

    assert sequences.new == greedy(model, prompts, 1)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("InternLM3ForCausalLM", {"attention_bias": "qkv_bias", "mlp_bias": "bias"}),
        ("IQuestCoderForCausalLM", {}),
        ("PanguEmbeddedForCausalLM", {"attention_bias": "bias"}),
    ],
)
def test_other_names_of_llama(
    npu: Any, tmp_path: Path, architecture: str, keys: dict[str, str]
) -> None:
    """In transformers, these architectures use Llama's code. openPangu is not in transformers; its
    published classes inherit Llama's code.
    """
    has_bias = architecture != "PanguEmbeddedForCausalLM"
    model = make_reference("LlamaForCausalLM", tmp_path, mlp_bias=has_bias)
    path = tmp_path / "config.json"
    config = {keys.get(key, key): value for key, value in json.loads(path.read_text()).items()}
    path.write_text(json.dumps(config | {"architectures": [architecture]}))
    prompts = make_prompts([40, 3])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()

    assert sequences.new == greedy(model, prompts, 1)


def test_mimo_is_a_qwen2_with_another_name(npu: Any, tmp_path: Path) -> None:
    """MiMo's published code inherits Qwen2's code. MiMo's next-token modules are ignored."""
    model = make_reference("Qwen2ForCausalLM", tmp_path)
    path = tmp_path / "config.json"
    names = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | names))
    sequences = Sequences(make_runner(npu, tmp_path), prompts := make_prompts([40, 3]))

    sequences.prefill()

    assert sequences.new == greedy(model, prompts, 1)
    assert read_model_spec(tmp_path).num_draft_layers == 0


def test_ling_is_a_glm_4_5_with_other_names(npu: Any, tmp_path: Path) -> None:
    """BailingMoeV2 is not in transformers. Its published code gives the same results as Glm4Moe."""
    groups = {"n_group": 2, "topk_group": 1}
    model = make_reference(
        "Glm4MoeForCausalLM", tmp_path, tie_word_embeddings=False, attention_bias=False, **groups
    )
    path = tmp_path / "config.json"
    config = json.loads(path.read_text()) | {"architectures": ["BailingMoeV2ForCausalLM"]}
    config |= {
        "num_experts": config.pop("n_routed_experts"),
        "num_shared_experts": config.pop("n_shared_experts"),
        "score_function": "sigmoid",
        "partial_rotary_factor": 0.5,
        "rope_theta": config.pop("rope_parameters")["rope_theta"],
        "rope_scaling": None,
    }
    path.write_text(json.dumps(config))
    weights = {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        for old, new in [("embed_tokens", "word_embeddings"), ("self_attn", "attention"),
                         ("o_proj", "dense"), ("q_norm", "query_layernorm"),
                         ("k_norm", "key_layernorm"),
                         ("e_score_correction_bias", "expert_bias")]:  # fmt: skip
            name = name.replace(old, new)
        weights[name] = tensor
    for name in [name for name in weights if "q_proj" in name]:
        parts = [weights.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        weights[name.replace("q_proj", "query_key_value")] = torch.cat(parts)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    prompts = make_prompts([40, 3])
    sequences = Sequences(make_runner(npu, tmp_path), prompts)

    sequences.prefill()
    sequences.decode(None)

    assert sequences.new == greedy(model, prompts, 2)


def test_minicpm_is_a_granite_with_other_factors(npu: Any, tmp_path: Path) -> None:
    """The only MiniCPM in transformers has latent attention, unlike this model. MiniCPM's published
    code multiplies embeddings by scale_emb, and the results of attention and of feed-forward parts
    by scale_depth / sqrt(layers). It divides the last hidden states by hidden_size /
    dim_model_base.
    """
    model = make_reference(
        "GraniteForCausalLM",
        tmp_path,
        embedding_multiplier=12.0,
        residual_multiplier=1.4 / 3**0.5,
        attention_multiplier=(128 / 4) ** -0.5,
        logits_scaling=128 / 32,
    )
    path = tmp_path / "config.json"
    config = {k: v for k, v in json.loads(path.read_text()).items() if "mult" not in k}
    del config["logits_scaling"]
    names = {"architectures": ["MiniCPMForCausalLM"], "scale_emb": 12, "scale_depth": 1.4}
    path.write_text(json.dumps(config | names | {"dim_model_base": 32}))
    prompts = make_prompts([40, 3])
    runner = make_runner(npu, tmp_path)
    sequences = Sequences(runner, prompts)

    sequences.prefill()
    sequences.decode(None)

    assert sequences.new == greedy(model, prompts, 2)
    assert read_model_spec(tmp_path).logit_scale == 1 / 4


@pytest.mark.parametrize("architecture", FAMILIES)
def test_the_number_of_parameters_is_that_of_transformers(
    npu: Any, tmp_path: Path, architecture: str
) -> None:
    model = make_reference(architecture, tmp_path)

    parts = weight_parts(read_model_spec(tmp_path), tp=1, ep=1, element_bytes=4)

    # transformers stores the parameters of some activations as tensors; this package does not.
    stored = (w for name, w in model.state_dict().items() if ".act_fn." not in name)
    tied = model.lm_head.weight.numel() * bool(model.config.tie_word_embeddings)
    assert sum(part.bytes for part in parts) == 4 * (sum(w.numel() for w in stored) - tied)


@pytest.mark.parametrize(
    "module", ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.up_proj"]
)
def test_biases_that_a_tool_added_are_refused(npu: Any, tmp_path: Path, module: str) -> None:
    """The tool ModelSlim, with anti_method m4, adds biases to norms and linear layers."""
    make_reference("Qwen3ForCausalLM", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.{module}"
    weights[f"{name}.bias"] = torch.ones(weights[f"{name}.weight"].shape[0])
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})

    with pytest.raises(UnsupportedModelError, match=rf"{name}\.bias.*not zero everywhere"):
        make_runner(npu, tmp_path)


def test_joined_experts_are_not_converted_to_int8(npu: Any, tmp_path: Path) -> None:
    model = make_reference("Qwen3_5MoeForCausalLM", tmp_path)
    rename_as_published(tmp_path, model.config.num_hidden_layers)

    with pytest.raises(ConfigError, match=r"one tensor for all experts.*leave quantization out"):
        make_runner(npu, tmp_path, settings={"dtype": "bfloat16", "quantization": "w8a8"})


def rename_as_published(directory: Path, num_layers: int) -> None:
    """Rename a text model's weights to the names in a published, multimodal Qwen3.5, and join the
    experts of each layer in one tensor.
    """
    path, weights = directory / "config.json", load_file(directory / "model.safetensors")
    text = json.loads(path.read_text())
    name = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    path.write_text(json.dumps({"architectures": [name], "text_config": text}))
    for i in range(num_layers):
        prefix = f"model.layers.{i}.mlp.experts"
        if f"{prefix}.0.up_proj.weight" not in weights:
            continue

        def joined(kind: str, prefix: str = prefix) -> torch.Tensor:
            names = [f"{prefix}.{expert}.{kind}_proj.weight" for expert in range(8)]
            return torch.stack([weights.pop(name) for name in names])

        weights[f"{prefix}.gate_up_proj"] = torch.cat([joined("gate"), joined("up")], 1)
        weights[f"{prefix}.down_proj"] = joined("down")
    weights = {k.replace("model.", "model.language_model."): v for k, v in weights.items()}
    weights["model.visual.patch_embed.weight"] = torch.zeros(2)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})

"""Makes 64 checkpoints with random weights from one seed, in the forms in which other projects
publish checkpoints.

Checkpoints differ along several axes (heads, rope, windows, shards, types,...). The values of each
axis are shuffled. So every value of an axis occurs, in random combinations with values of the other
axes. Every eighth checkpoint has a property that the service refuses.

``python -m tests.parity.made_checkpoints DIRECTORY`` writes all checkpoints.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dist_aclgraph.device import emulator
from tests.checkpoints import GRANITE, make_reference
from tests.int4_checkpoints import compressed_config, packed_ints, rewrite

SEED, COUNT, REFUSED_EACH = 29, 64, 8
MADE = (
    "Qwen3ForCausalLM",
    "Qwen2ForCausalLM",
    "LlamaForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "MistralForCausalLM",
    "SeedOssForCausalLM",
    "Ernie4_5ForCausalLM",
    "GraniteForCausalLM",
    "Olmo2ForCausalLM",
)
CONTEXT, ORIGINAL, LONGER = 256, 64, 300
NUM_TOKENS = 6
# The name of each matrix of a layer ends with one of these texts. MiniMax names the matrices of an
# expert w1, w2 and w3.
MATRICES = ("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")
BLOCK = 128  # each FP8 scale belongs to BLOCK rows and BLOCK columns of a matrix
Keys = dict[str, Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Rope:
    """A kind of rotary embedding, the lengths of the test's prompts, and the deployment's
    ``max_model_len``.
    """

    keys: Callable[[int], Keys]  # returns keys of config.json for a number of rotated elements
    lengths: tuple[int, ...] = (3, 30, 100)
    max_len: int | None = None


@dataclass(frozen=True, kw_only=True)
class Made:
    """The description of a checkpoint, and of the deployment that serves it.

    Attributes:
        sizes: settings of the model in transformers, which determine the shapes of its weights.
        keys: keys of config.json that replace the keys that transformers wrote; rope_parameters is
            removed.
        quantised: INT4 or INT8; for FP8 weights, the type of the scales. None means float weights.
        deployment: keys of the deployment's configuration.
        refusal: a part of the expected error's message. If None, no error is expected, and the
            tokens must equal those of transformers.
    """

    name: str
    architecture: str
    sizes: Keys
    keys: Keys
    lengths: tuple[int, ...]
    dtype: torch.dtype
    shard_size: str
    quantised: torch.dtype | str | None
    deployment: Keys
    refusal: str | None = None


def yarn(**others: Any) -> Keys:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
    return {"rope_scaling": {**scaling, **others}}


def longrope(dim: int) -> Keys:
    short = [1.0 + i / dim for i in range(dim // 2)]
    scaling = {"type": "longrope", "short_factor": short, "long_factor": [4 * x for x in short]}
    return {"rope_scaling": scaling, "original_max_position_embeddings": ORIGINAL}


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
LINEAR = {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}
DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
ROPES = {
    "default": Rope(lambda dim: {}),
    "theta": Rope(lambda dim: {"rope_theta": 1e6}),
    "theta within": Rope(lambda dim: {"rope_parameters": {"rope_theta": 5e5}}),
    "linear": Rope(lambda dim: {"rope_parameters": LINEAR}),
    "linear by older keys": Rope(
        lambda dim: {"rope_theta": 1e5, "rope_scaling": {"type": "linear", "factor": 3}}
    ),
    "llama3": Rope(lambda dim: {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "yarn": Rope(lambda dim: yarn()),
    "yarn beside linear": Rope(lambda dim: yarn() | {"rope_parameters": LINEAR}),
    "yarn, original beside": Rope(
        lambda dim: yarn() | {"original_max_position_embeddings": ORIGINAL // 2}
    ),
    "yarn, factor null": Rope(lambda dim: yarn(factor=None, attention_factor=1.2)),
    "yarn, mscale": Rope(lambda dim: yarn(mscale=0.8, mscale_all_dim=0.5, beta_fast=16)),
    "yarn, not truncated": Rope(lambda dim: yarn(truncate=False)),
    "dynamic": Rope(lambda dim: DYNAMIC, max_len=CONTEXT),
    # transformers computes this embedding for the length of the request; the service computes it
    # for max_len. Both lengths must be equal, so the prompt and NUM_TOKENS tokens together have the
    # length max_len.
    "dynamic, beyond the context": Rope(
        lambda dim: DYNAMIC, lengths=(LONGER - NUM_TOKENS,), max_len=LONGER
    ),
    "longrope, short": Rope(longrope, lengths=(3, 20, 41)),
    "longrope, long": Rope(longrope, lengths=(70, 90, 120), max_len=CONTEXT),
}
# Each: number of attention heads, number of KV heads, and head_dim.
HEADS = (
    (4, 2, 32), (4, 4, 64), (8, 2, 48), (6, 3, 64),
    (2, 1, 128), (4, 1, 80), (3, 3, 64), (2, 2, 256),
)  # fmt: skip
WINDOWS: tuple[Keys, ...] = (
    {},
    {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2},
    {"use_sliding_window": False, "sliding_window": 24, "max_window_layers": 0},
    {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
    {
        "use_sliding_window": True,
        "sliding_window": 33,
        "layer_types": ["sliding_attention", "full_attention"],
    },
)
LATENT_EXPERTS: tuple[Keys, ...] = (
    {},
    {"q_lora_rank": None, "n_shared_experts": 2},
    {"norm_topk_prob": False, "routed_scaling_factor": 2.5},
    {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 5},
    {"rope_interleave": False},
)
EXPERTS: tuple[Keys, ...] = (
    {"norm_topk_prob": False},
    {"mlp_only_layers": [], "decoder_sparse_step": 2},
    {"num_experts": 7, "num_experts_per_tok": 2},
)
MODES = ("NONE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT4 = "int4"  # attention weights of four bits with groups, in compressed-tensors' form
INT8 = "int8"  # weights and activations in int8, in ModelSlim's form
QUANTISED = (None, None, torch.float8_e8m0fnu, torch.float32, INT4, torch.bfloat16, INT8)
GROUP = 32


@dataclass(frozen=True)
class Refusal:
    """A change of a checkpoint or of a deployment that the service must refuse, and a part of the
    error's message.
    """

    says: str
    keys: Keys = field(default_factory=dict)
    deployment: Keys = field(default_factory=dict)


REFUSALS = (
    Refusal("hidden_act gelu is not supported", {"hidden_act": "gelu"}),
    Refusal("partial_rotary_factor is 0.5", {"partial_rotary_factor": 0.5}),
    Refusal("rope scaling mrope is not supported", {"rope_scaling": {"type": "mrope"}}),
    Refusal("quant_method 'gptq'", {"quantization_config": {"quant_method": "gptq"}}),
    Refusal("GemmaForCausalLM is not supported", {"architectures": ["GemmaForCausalLM"]}),
    Refusal("lacks the key factor", {"rope_scaling": {"type": "linear"}}),
    Refusal("must divide the model's", deployment={"parallel": {"tp": 5}}),
    Refusal("the model's context is", deployment={"max_model_len": 1 << 20}),
)


def make_all(seed: int = SEED) -> list[Made]:
    """Return the descriptions of all checkpoints that are made from ``seed``."""
    random = Random(seed)

    def deal(values: Sequence[Value]) -> list[Value]:
        cards: list[Value] = []
        while len(cards) < COUNT:
            cards += random.sample(values, len(values))
        return cards

    architectures = [MADE[i % len(MADE)] for i in range(COUNT)]
    axes = zip(
        architectures, deal(list(ROPES)), deal(HEADS), deal(WINDOWS), deal(LATENT_EXPERTS),
        deal(EXPERTS), deal(MODES), deal(DTYPES), deal(QUANTISED), deal(("1MB", "90KB")),
        deal((503, 512, 97)), deal((True, False)), deal((True, False)), deal((1, 2)),
        strict=False,
    )  # fmt: skip
    made = [_make(index, *axis) for index, axis in enumerate(axes)]
    for index, refusal in zip(range(REFUSED_EACH - 1, COUNT, REFUSED_EACH), REFUSALS, strict=True):
        one = made[index]
        made[index] = replace(
            one,
            keys={**one.keys, **refusal.keys},
            quantised=None,
            deployment={**one.deployment, **refusal.deployment},
            refusal=refusal.says,
        )
    return made


def _make(
    index: int,
    architecture: str,
    rope: str,
    heads: tuple[int, int, int],
    window: Keys,
    latent_experts: Keys,
    experts: Keys,
    mode: str,
    dtype: torch.dtype,
    quantised: torch.dtype | str | None,
    shard_size: str,
    vocab_size: int,
    ties: bool,
    has_biases: bool,
    tp: int,
) -> Made:
    num_heads, num_kv_heads, head_dim = heads
    sizes: Keys = {
        "vocab_size": vocab_size,
        "hidden_size": 96,
        "intermediate_size": 98,
        "num_hidden_layers": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": ties,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    keys: Keys = {}
    if architecture.startswith("Deepseek"):
        head_dim, num_heads = 64, 4
        quantised = None if quantised == INT4 else quantised
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 48}
        if architecture == "DeepseekV3ForCausalLM":
            sizes |= latent_experts
        elif index % 4 < 2:
            sizes |= {"topk_method": "greedy", "q_lora_rank": 64}
    else:
        sizes |= {
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        if architecture == "GraniteForCausalLM":
            sizes |= GRANITE
        if architecture != "Qwen2ForCausalLM":
            sizes["attention_bias"] = has_biases
        if architecture == "LlamaForCausalLM":
            sizes["mlp_bias"] = has_biases
        else:
            keys |= window
        if architecture == "Qwen3MoeForCausalLM":
            sizes |= {"moe_intermediate_size": 48, **experts}
            keys.pop("layer_types", None)
    if num_heads % tp or max(num_kv_heads, tp) % min(num_kv_heads, tp):
        tp = 1
    scheme = ROPES[rope]
    return Made(
        name=f"{index}-{architecture.removesuffix('ForCausalLM')}-{rope}",
        architecture=architecture,
        sizes=sizes,
        keys={**keys, **scheme.keys(head_dim)},
        lengths=scheme.lengths,
        dtype=torch.float32 if quantised else dtype,
        shard_size=shard_size,
        quantised=quantised,
        deployment={
            "dtype": "bfloat16" if isinstance(quantised, str) else "float32",
            "parallel": {"tp": tp},
            "max_model_len": scheme.max_len,
            "graph": {"mode": mode},
        },
    )


def write(made: Made, directory: Path) -> tuple[Path, Path]:
    """Write a checkpoint twice: for the service, and for transformers. Return both directories, the
    service's first.
    """
    model = make_reference(made.architecture, **made.sizes).to(made.dtype)
    shard_size = "1GB" if made.quantised else made.shard_size
    model.save_pretrained(directory, max_shard_size=shard_size)
    path = directory / "config.json"
    written = json.loads(path.read_text())
    del written["rope_parameters"]
    config = {**written, **made.keys}
    path.write_text(json.dumps(config))
    if made.quantised is None:
        return directory, directory
    if isinstance(made.quantised, str):
        if made.quantised == INT8:
            described, kind = {"version": "1.0.0"}, "W8A8_DYNAMIC"
            return rewrite(
                directory, directory, lambda module: None, description=described, others=kind
            )
        keys = compressed_config(GROUP) | {"ignore": ["lm_head", "re:.*mlp.*"]}
        return rewrite(
            directory,
            directory,
            lambda module: (GROUP, packed_ints) if "self_attn" in module else None,
            config={"quantization_config": keys},
        )
    reference = directory / "reference"
    reference.mkdir()
    (reference / "config.json").write_text(json.dumps(config))
    write_fp8(directory, reference, made.quantised)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    path.write_text(json.dumps(config))
    return directory, reference


def write_fp8(directory: Path, reference: Path, scales: torch.dtype) -> None:
    """Write the layers' matrices in FP8 to ``directory``; write the rounded values as floats to
    ``reference``.
    """
    stored = load_file(directory / "model.safetensors")
    plain = dict(stored)
    for name in [name for name in stored if name.endswith(MATRICES)]:
        weight = stored[name]
        scale = _scales(weight).to(scales)
        each = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        each = each[: weight.shape[0], : weight.shape[1]]
        values = (weight / each).to(torch.float8_e4m3fn)
        stored[name], stored[name + "_scale_inv"] = values, scale
        plain[name] = values.float() * each
    for folder, tensors in ((directory, stored), (reference, plain)):
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _scales(weight: Tensor) -> Tensor:
    """Return the scales of a weight's blocks, [ceil(rows / 128), ceil(columns / 128)], before they
    are rounded to a type.
    """
    largest = torch.nn.functional.max_pool2d(
        weight.abs()[None], BLOCK, ceil_mode=True, stride=BLOCK
    )[0]
    return 1.5 * largest / torch.finfo(torch.float8_e4m3fn).max


def main() -> None:
    emulator.build()
    emulator.load({})  # transformers imports torch_npu, which needs the emulator
    for made in make_all():
        write(made, Path(sys.argv[1]) / made.name.replace(" ", "-"))
        print(made.name)


if __name__ == "__main__":
    main()

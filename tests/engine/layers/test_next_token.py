"""Our next-token module is compared with the module of transformers. Both modules are loaded from
the same checkpoint.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dist_aclgraph.comm.groups import ONE_RANK
from dist_aclgraph.context.place import ContextPlace
from dist_aclgraph.context.shards import Shards
from dist_aclgraph.engine.attention_steps import AttentionSteps
from dist_aclgraph.layers.experts import ALL_HERE
from dist_aclgraph.models.attention_kind import CacheRoom
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.shapes.families import read_model_spec
from tests.checkpoints import add_next_token_module, make_prompts, make_reference
from tests.engine.prompt_steps import prompt_step

BLOCK = 32


@pytest.mark.parametrize("architecture", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_the_module_computes_what_that_of_transformers_computes(
    npu: Any, tmp_path: Path, architecture: str
) -> None:
    model = make_reference(architecture, tmp_path, num_mtp_layers=1)
    add_next_token_module(tmp_path)
    [tokens] = make_prompts([31])
    n, (before, after) = 30, (tokens[:-1], tokens[1:])
    with torch.no_grad():
        hidden = model.model(torch.tensor([before])).last_hidden_state

    found = run_module(npu, tmp_path, after, hidden[0])

    expected = theirs(model, tmp_path, after, hidden)
    assert found.shape == (n, model.config.hidden_size)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "architecture", ["Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"]
)
def test_the_module_of_a_hybrid_is_a_decoder_of_one_layer_over_mixed_inputs(
    npu: Any, tmp_path: Path, architecture: str
) -> None:
    model = make_reference(architecture, tmp_path)
    add_next_token_module(tmp_path)
    [tokens] = make_prompts([30])
    hidden = torch.randn(30, model.config.hidden_size, generator=torch.Generator().manual_seed(0))

    found = run_module(npu, tmp_path, tokens, hidden)

    expected = one_layer_of_transformers(model, tmp_path, tokens, hidden)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def one_layer_of_transformers(
    model: Any, directory: Path, tokens: list[int], hidden: torch.Tensor
) -> torch.Tensor:
    """Compute the results of a Qwen hybrid's next-token module, by a decoder layer and norms of
    transformers.

    transformers itself ignores the weights of this module.
    """
    stored = load_file(directory / "model.safetensors")
    module = {n.removeprefix("mtp."): x for n, x in stored.items() if n.startswith("mtp.")}
    decoder = {f"model.{n}": x for n, x in module.items() if n.startswith(("layers.0.", "norm."))}
    config = copy.deepcopy(model.config)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    config.mlp_only_layers = []
    alone, loading = type(model).from_pretrained(
        None, config=config, state_dict=decoder, output_loading_info=True
    )
    assert loading["missing_keys"] == {"model.embed_tokens.weight", "lm_head.weight"}

    def norm(name: str, rows: torch.Tensor) -> torch.Tensor:
        one = type(model.model.norm)(config.hidden_size, eps=config.rms_norm_eps)
        one.load_state_dict({"weight": module[f"{name}.weight"]})
        out: torch.Tensor = one(rows)
        return out

    with torch.no_grad():
        token = norm("pre_fc_norm_embedding", model.model.embed_tokens(torch.tensor(tokens)))
        mixed = torch.cat([token, norm("pre_fc_norm_hidden", hidden)], -1) @ module["fc.weight"].T
        out: torch.Tensor = alone.model(inputs_embeds=mixed[None]).last_hidden_state
    return out[0]


def run_module(npu: Any, directory: Path, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
    n, spec = len(tokens), read_model_spec(directory)
    checkpoint = Checkpoint(directory, torch.float32, names=spec.names)
    decoder = Decoder(spec, ONE_RANK, checkpoint, device=npu.device, max_len=128, drafts=True)
    table, slots = np.array([[1, 2]], np.int32), torch.arange(n, dtype=torch.int32) + BLOCK
    metadata = AttentionSteps(decoder.kind, ContextPlace(Shards(BLOCK)), npu).of_step(
        *prompt_step(npu, [n], [n], table, slots)
    )
    module = decoder.next_token
    assert module is not None
    with torch.inference_mode():
        out = module.forward(
            torch.tensor(tokens, dtype=torch.int32, device=npu.device),
            hidden.to(npu.device),
            torch.arange(n, dtype=torch.int32, device=npu.device),
            slots.to(npu.device),
            module.make_cache(CacheRoom(3, BLOCK, torch.float32)),
            metadata,
            ALL_HERE,
        )
    return out.cpu()


def theirs(model: Any, directory: Path, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
    from transformers.modeling_layers import MtpModel

    last = model.config.num_hidden_layers
    # transformers must skip the weights of next-token modules. It has a list of their layer
    # numbers, but only for published models.
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{last}.*"]
    model.config.name_or_path, model.config.dtype = str(directory), torch.float32
    module = MtpModel.from_pretrained(model).eval()
    with torch.no_grad():
        out: torch.Tensor = module.forward_layer(
            0, hidden, torch.arange(len(tokens))[None], None, input_ids=torch.tensor([tokens])
        )
    return out[0]

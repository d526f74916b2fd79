"""Broken or malicious checkpoints are refused with one sentence, before any process is started."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from dist_aclgraph.config import load_config
from dist_aclgraph.config.loading import MAX_YAML_CHARS
from dist_aclgraph.errors import ConfigError, ModelError, UnsupportedModelError
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.model_config import read_model_config
from dist_aclgraph.shapes.model_facts import read_model_facts
from dist_aclgraph.shapes.weight_files import check_weight_files, tensor_files
from dist_aclgraph.text.tokenizer import Tokenizer
from tests.unit.shapes.test_model_spec import V3

READERS = [read_model_facts, read_model_spec, Tokenizer]


def write(directory: Path, name: str, content: Any) -> Path:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    (directory / name).write_bytes(data)
    return directory


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], "must hold an object, not list"),
        (b"", "is not JSON"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a":' * 100_000, "is nested too deeply"),
        (b"9" * 10_000, "is not JSON"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_config_that_is_none_is_one_sentence(tmp_path, read, content, words):
    with pytest.raises(ModelError, match=words) as e:
        read(write(tmp_path, "config.json", content))

    assert str(e.value).count("\n") == 0


@pytest.mark.parametrize("read", [read_model_facts, read_model_spec])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**18),
        ("num_hidden_layers", "61"),
        ("num_hidden_layers", True),
        ("num_attention_heads", 0),
        ("num_attention_heads", None),
        ("hidden_size", -1),
        ("hidden_size", 7168.0),
        ("num_key_value_heads", "x"),
        ("head_dim", "128"),
        ("max_position_embeddings", [1]),
        ("n_routed_experts", 10**12),
        ("num_experts_per_tok", {}),
        ("kv_lora_rank", "512"),
        ("architectures", "X"),
        ("architectures", [5]),
    ],
)
def test_a_value_that_cannot_be_names_its_key(tmp_path, read, key, value):
    with pytest.raises(ModelError, match=key):
        read(write(tmp_path, "config.json", {**V3, key: value}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", "129280"),
        ("intermediate_size", []),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", 10**400),
        ("rope_theta", "10000"),
        ("rope_scaling", "yarn"),
        ("rope_scaling", {"type": "yarn", "factor": "40"}),
        ("rope_scaling", {"type": ["yarn"]}),
        ("tie_word_embeddings", "no"),
        ("quantization_config", []),
        ("quantization_config", {"quant_method": "compressed-tensors", "config_groups": [1]}),
        ("first_k_dense_replace", 10**12),
        ("moe_layer_freq", 0),
        ("scoring_func", 5),
    ],
)
def test_a_value_that_only_the_shape_needs_names_its_key(tmp_path, key, value):
    words = key if not isinstance(value, dict) else f"{key}|factor|type|config_groups"
    with pytest.raises(ModelError, match=words):
        read_model_spec(write(tmp_path, "config.json", {**V3, key: value}))


@pytest.mark.parametrize("name", ["", "model.Q4.gguf"])
def test_a_gguf_file_is_one_sentence(tmp_path, name):
    (tmp_path / "model.Q4.gguf").write_bytes(b"GGUF")

    with pytest.raises(UnsupportedModelError, match=r"model\.Q4\.gguf is a GGUF file; only"):
        read_model_facts(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "words"),
    [("a.gguf", "a GGUF file; only"), ("pytorch_model.bin", "a file of PyTorch; only")],
)
def test_weights_in_other_formats_are_one_sentence(tmp_path, name, words):
    write(tmp_path, "config.json", V3)
    (tmp_path / name).write_bytes(b"GGUF\xff" * 100_000)

    with pytest.raises(UnsupportedModelError, match=words):
        check_weight_files(tmp_path)
    with pytest.raises(UnsupportedModelError, match=words):
        load_config(tmp_path / name)


def test_a_file_of_weights_is_no_configuration(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff")

    with pytest.raises(ConfigError, match=f"give its directory, {tmp_path}"):
        load_config(tmp_path / "model.safetensors")


def test_only_the_beginning_of_a_large_file_is_read(tmp_path):
    path = tmp_path / "large.yaml"
    path.write_bytes(b"a" * (2 * MAX_YAML_CHARS) + b"\xff")

    with pytest.raises(ConfigError, match=f"at most {MAX_YAML_CHARS} characters"):
        load_config(path)


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        ({"eos_token_id": [2, 3]}, 1, (2, 3, 1)),
        ({"eos_token_id": 1}, [1, 4], (1, 4)),
        ({}, 1, (1,)),
        ({"eos_token_id": None}, 1, (1,)),
        ({"eos_token_id": []}, [1], (1,)),
        ({"eos_token_id": -1}, 1, (1,)),
        ({"eos_token_id": 2}, [-1], (2,)),
        ({}, -1, ()),
    ],
)
def test_ends_of_both_files_are_united(tmp_path, generation, config, ends):
    write(tmp_path, "config.json", {"vocab_size": 100, "eos_token_id": config})
    write(tmp_path, "generation_config.json", generation)

    assert Tokenizer(tmp_path).eos_ids == ends


@pytest.mark.parametrize(
    ("text", "beside", "ends"),
    [
        (1, [1, 106], (1, 106)),
        ([2], 3, (2, 3)),
        (None, 3, (3,)),
        (1, None, (1,)),
        (None, None, ()),
    ],
)
def test_ends_of_the_text_part_and_beside_it_are_united(tmp_path, text, beside, ends):
    shape = {"vocab_size": 200, "text_config": {"eos_token_id": text}, "eos_token_id": beside}
    write(tmp_path, "config.json", shape)

    assert Tokenizer(tmp_path).eos_ids == ends
    assert Tokenizer(tmp_path, {"eos_token_id": 5}).eos_ids == (5,)


def test_an_architecture_without_these_keys_is_named(tmp_path):
    write(tmp_path, "config.json", {"architectures": ["GPT2LMHeadModel"], "n_head": 12})

    with pytest.raises(ModelError, match="of a GPT2LMHeadModel lacks the key num_attention_heads"):
        read_model_facts(tmp_path)


@pytest.mark.parametrize("content", [[], {"eos_token_id": "x"}, {"eos_token_id": [1, None]}])
def test_end_tokens_that_are_none_are_refused(tmp_path, content):
    write(tmp_path, "config.json", {"vocab_size": 100})
    write(tmp_path, "generation_config.json", content)

    with pytest.raises(ModelError, match=r"generation_config\.json|eos_token_id"):
        Tokenizer(tmp_path)


def test_a_missing_directory_is_the_configurations_fault():
    for read in READERS:
        with pytest.raises(ConfigError, match="no such directory"):
            read("nowhere")


@pytest.mark.parametrize("name", ["a" * 300, "a" * 5000, "~nobody-has-this-name/x", "a\0b"])
def test_any_text_may_be_given_as_a_model(name):
    with pytest.raises(ConfigError, match="no such directory"):
        read_model_config(load_config(name).model)


def safetensors(header: Any, data: bytes = b"") -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n"
TENSOR = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def test_whole_weights_pass(tmp_path):
    check_weight_files(write(tmp_path, "model.safetensors", safetensors(TENSOR, b"x" * 8)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (safetensors(TENSOR, b"x" * 3), "is cut off: 5 bytes are missing"),
        (safetensors(TENSOR)[:20], "cut off in its header"),
        (b"", "cut off in its header"),
        (POINTER, "is a pointer of Git LFS.*git lfs pull"),
        (struct.pack("<Q", 2**60) + b"{}", "cut off in its header"),
        (safetensors(b"[" * 50_000), "its header cannot be read"),
        (safetensors([1]), "its header cannot be read"),
        (safetensors({"a": 5}), "its header cannot be read"),
        (safetensors({"a": {"data_offsets": ["x", "y"]}}), "its header cannot be read"),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_weights_that_are_broken_are_named(tmp_path, content, words):
    write(tmp_path, "model.safetensors", content)

    with pytest.raises(ModelError, match=f"model.safetensors.*{words}"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (b'{"weight_map":' + b"[" * 100_000, "nested too deeply"),
        ({"weight_map": []}, "has no weight_map"),
        ({}, "has no weight_map"),
        ({"weight_map": {"a": "../b.safetensors"}}, "outside the directory"),
        ({"weight_map": {"a": 5}}, "outside the directory"),
        ({"weight_map": {"a": "gone.safetensors"}}, r"cannot read .*gone\.safetensors"),
        (
            {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}},
            r"1\.safetensors: this file and 2 other files of weights do not exist",
        ),
        ({"weight_map": {"b": "model.safetensors"}}, r"has no tensor b, though the index names"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_index_that_cannot_be_followed_is_refused(tmp_path, index, words):
    write(tmp_path, "model.safetensors.index.json", index)
    write(tmp_path, "model.safetensors", safetensors(TENSOR, b"x" * 8))

    with pytest.raises(ModelError, match=words):
        check_weight_files(tmp_path)


def test_several_files_need_no_index(tmp_path):
    for name in "ab":
        header = {name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        write(tmp_path, f"part-{name}.safetensors", safetensors(header, b"x" * 8))
    write(tmp_path, "consolidated.safetensors", safetensors(TENSOR, b"x" * 8))

    assert tensor_files(tmp_path) == {"a": "part-a.safetensors", "b": "part-b.safetensors"}
    check_weight_files(tmp_path)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model-00001-of-00002"], r"cannot read .*model-00002-of-00002\.safetensors"),
        (["model-2-of-3"], r"model-1-of-3\.safetensors: this file and 1 other"),
        (["a", "b"], r"both a\.safetensors and b\.safetensors have the tensor a"),
    ],
)
def test_files_that_are_not_one_checkpoint_are_refused(tmp_path, names, words):
    for name in names:
        write(tmp_path, f"{name}.safetensors", safetensors(TENSOR, b"x" * 8))

    with pytest.raises(ModelError, match=words):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_link_to_nothing_is_named(tmp_path, name):
    """A copy of a hub's cache can consist of links to files that were not copied."""
    write(tmp_path, "config.json", V3)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to("../blobs/gone")
    read = check_weight_files if name.endswith("safetensors") else Tokenizer

    with pytest.raises(ModelError, match=rf"{name}: it is a link to \.\./blobs/gone, which does"):
        read(tmp_path)
    if name != "config.json":
        read_model_facts(tmp_path)  # a plan needs neither weights nor a tokenizer


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer.json"])
def test_a_pointer_of_git_in_place_of_a_file_is_named(tmp_path, name):
    write(tmp_path, "config.json", V3)
    write(tmp_path, name, POINTER)

    with pytest.raises(ModelError, match=f"{name} is a pointer of Git LFS"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("adapter_config.json", "is a LoRA adapter"),
        ("params.json", "in the format of Meta or Mistral"),
        ("snapshots/abc/config.json", "give the directory .*snapshots/abc"),
        ("Qwen3-8B/config.json", "give the directory .*Qwen3-8B"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_explained(tmp_path, name, words):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    write(tmp_path, name, {})

    with pytest.raises(ModelError, match=words):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("https://huggingface.co/Qwen/Qwen3-8B/tree/main", "such as Qwen/Qwen3-8B$"),
        ("https://www.modelscope.cn/models/Qwen/Qwen3-8B", "such as Qwen/Qwen3-8B$"),
        ("hf://Qwen/Qwen3-8B", "such as Qwen/Qwen3-8B$"),
        ("s3://bucket/model", "a name on a hub$"),
    ],
)
def test_an_address_is_no_model(address, words):
    with pytest.raises(ConfigError, match=f"is an address.*{words}"):
        load_config(address)


@pytest.mark.parametrize("name", ["./org/model", "../org/model"])
def test_a_path_is_no_name_on_a_hub(name):
    assert os.path.isabs(load_config(name).model)


def test_no_weights_at_all_is_said(tmp_path):
    with pytest.raises(ModelError, match=r"has no weights: neither model\.safetensors nor"):
        check_weight_files(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_pipe_in_the_place_of_a_file_blocks_nobody(tmp_path, name):
    write(tmp_path, "config.json", V3)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    read = check_weight_files if name.endswith("safetensors") else Tokenizer

    with pytest.raises(ModelError, match="is not a regular file"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Qwen3Model", "Qwen3ForCausalLM"),
        ("GPT2LMHeadModel", "GPT2LMHeadModel"),
        ("Qwen3ForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_a_decoder_without_a_head_has_the_architecture_with_a_head(tmp_path, name, found):
    write(tmp_path, "config.json", {"architectures": [name]})

    assert read_model_config(tmp_path).architecture == found

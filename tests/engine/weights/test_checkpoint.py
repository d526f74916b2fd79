from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dist_aclgraph.comm.groups import CommGroup
from dist_aclgraph.errors import ConfigError, MissingTensorError, ModelError, UnsupportedModelError
from dist_aclgraph.layers.vocabulary import vocabulary_part
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.gqa import share_heads
from dist_aclgraph.shapes.families.joined_weights import join
from dist_aclgraph.shapes.model_spec import ModelSpec, WeightNames
from dist_aclgraph.shapes.rope_spec import RopeSpec
from tests.engine.weights.test_fp8_weights import quantise as to_fp8

MATRIX = torch.arange(21, dtype=torch.float32).reshape(7, 3)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save_file({"m": MATRIX}, tmp_path / "model.safetensors")
    return tmp_path


def make_index(directory: Path, weight_map: dict[str, str]) -> None:
    text = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(text)


def make_spec(num_heads: int, num_kv_heads: int) -> ModelSpec:
    return ModelSpec(
        architecture="Qwen3ForCausalLM", vocab_size=11, hidden_size=8, intermediate_size=8,
        num_layers=1, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8,
        rms_norm_eps=1e-6, tie_word_embeddings=False, has_qkv_bias=False, has_output_bias=False,
        has_mlp_bias=False, has_qk_norm=True, context_len=16,
        rope=RopeSpec(theta=1e4, kind="default", max_position_embeddings=16),
    )  # fmt: skip


def test_a_tensor_is_read_in_the_wanted_dtype(directory: Path) -> None:
    read = Checkpoint(directory, torch.bfloat16).read("m", (7, 3))

    assert torch.equal(read, MATRIX.bfloat16())


def test_a_missing_tensor_is_named(directory: Path) -> None:
    with pytest.raises(MissingTensorError, match=r"layers\.0\.w"):
        Checkpoint(directory, torch.float32).read("layers.0.w", (7, 3))


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(directory: Path) -> None:
    with pytest.raises(MissingTensorError, match=r"\(7, 3\).*\(7, 4\)"):
        Checkpoint(directory, torch.float32).read("m", (7, 4))


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_the_parts_of_all_ranks_make_the_whole_and_zeros(
    directory: Path, dim: int, size: int
) -> None:
    checkpoint, width = Checkpoint(directory, torch.float32), -(-MATRIX.shape[dim] // size)

    parts = [
        checkpoint.read_part("m", (7, 3), dim, rank * width, (rank + 1) * width)
        for rank in range(size)
    ]

    whole = torch.cat(parts, dim)
    assert torch.equal(whole.narrow(dim, 0, MATRIX.shape[dim]), MATRIX)
    assert not whole.narrow(dim, MATRIX.shape[dim], whole.shape[dim] - MATRIX.shape[dim]).any()


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    save_file({"a": MATRIX}, tmp_path / "one.safetensors")
    save_file({"b": MATRIX + 1}, tmp_path / "two.safetensors")
    make_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})

    checkpoint = Checkpoint(tmp_path, torch.float32)

    assert torch.equal(checkpoint.read("a", (7, 3)), MATRIX)
    assert torch.equal(checkpoint.read("b", (7, 3)), MATRIX + 1)
    assert "a" in checkpoint
    assert "c" not in checkpoint


def test_the_only_file_is_found_whatever_its_name_before_the_ending(tmp_path: Path) -> None:
    save_file({"m": MATRIX}, tmp_path / "quant_model_weights.safetensors")
    assert "m" in Checkpoint(tmp_path, torch.float32)

    save_file({"n": MATRIX}, tmp_path / "other.safetensors")
    make_index(tmp_path, {"n": "other.safetensors"})
    index = tmp_path / "model.safetensors.index.json"
    index.rename(tmp_path / "quant_model_weights.safetensors.index.json")

    assert "n" in Checkpoint(tmp_path, torch.float32)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_may_not_name_files_outside_its_directory(tmp_path: Path, name: str) -> None:
    make_index(tmp_path, {"a": name})

    with pytest.raises(ModelError, match="outside the directory"):
        Checkpoint(tmp_path, torch.float32)


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    make_index(tmp_path, {"a": "gone.safetensors"})

    with pytest.raises(ModelError, match=r"gone\.safetensors"):
        Checkpoint(tmp_path, torch.float32).read("a", (7, 3))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_an_error_of_the_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)

    with pytest.raises(ModelError, match=r"index\.json"):
        Checkpoint(tmp_path, torch.float32)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    save_file({"a": MATRIX}, tmp_path / "one.safetensors")
    make_index(tmp_path, {"b": "one.safetensors"})

    with pytest.raises(ModelError, match="b"):
        Checkpoint(tmp_path, torch.float32).read("b", (7, 3))


@pytest.mark.parametrize("content", [b"", b"no tensors at all, but long enough"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)

    with pytest.raises(ModelError, match=r"model\.safetensors"):
        Checkpoint(tmp_path, torch.float32)


def test_an_empty_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither"):
        Checkpoint(tmp_path, torch.float32)


def test_names_are_translated_and_other_parts_counted(tmp_path: Path) -> None:
    stored = ("text.model.mlp.w1.weight", "vision.a", "vision.b")
    save_file({name: MATRIX.clone() for name in stored}, tmp_path / "model.safetensors")
    names = WeightNames(prefix="text.", changes=((".up.", ".w1."),), ignored=("vision.",))

    checkpoint = Checkpoint(tmp_path, torch.float32, names=names)

    assert torch.equal(checkpoint.read("model.mlp.up.weight", (7, 3)), MATRIX)
    assert "model.mlp.up.weight" in checkpoint
    assert checkpoint.count_ignored() == 2


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 1, 3), (1, 0, 3), (1, 2, 5)])
def test_a_part_of_a_member_of_a_stack(tmp_path: Path, dim: int, start: int, stop: int) -> None:
    stack = torch.randn(4, 5, 3)
    save_file({"s": stack}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32)

    part = checkpoint.read_member("s", (4, 5, 3), 2, dim, start, stop)

    padded = torch.cat([stack[2], torch.zeros(5, 3)], 1) if dim else stack[2]
    assert torch.equal(part, padded.narrow(dim, start, stop - start))
    with pytest.raises(MissingTensorError, match=r"config\.json asks for"):
        checkpoint.read_member("s", (5, 5, 3), 2, dim, start, stop)


@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 40, 300), (1, 0, 200), (1, 150, 260)])
def test_a_part_of_a_member_in_fp8_is_multiplied_by_its_scales(
    tmp_path: Path, dim: int, start: int, stop: int
) -> None:
    quantised = [to_fp8(torch.randn(300, 200) * 10**n) for n in range(3)]
    stacks = [torch.stack(each) for each in zip(*quantised, strict=True)]
    tensors = dict(zip(("s", "s_scale_inv"), stacks, strict=True))
    alone = {"m": quantised[1][0], "m_scale_inv": quantised[1][1]}
    save_file(tensors | alone, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32)

    part = checkpoint.read_member("s", (3, 300, 200), 1, dim, start, stop, has_blocks=True)

    assert torch.equal(part, checkpoint.read_part("m", (300, 200), dim, start, stop))
    with pytest.raises(UnsupportedModelError, match=r"tensor s in .* has the type F8_E4M3"):
        checkpoint.read_member("s", (3, 300, 200), 1, dim, start, stop)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8, torch.float8_e5m2])
def test_values_that_are_not_floats_are_refused_without_scales(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    stack = torch.ones(2, 4, 3).to(dtype)
    save_file({"s": stack, "m": stack[0].clone()}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32)

    with pytest.raises(UnsupportedModelError, match=r"tensor s in .* has the type [IUF]\d+.*float"):
        checkpoint.read_member("s", (2, 4, 3), 0, 0, 0, 4, has_blocks=True)
    if dtype != torch.int8:  # int8 matrices have scales
        with pytest.raises(UnsupportedModelError, match=r"tensor m in .* has the type"):
            checkpoint.read("m", (4, 3))
        with pytest.raises(UnsupportedModelError, match=r"tensor m in .* has the type"):
            checkpoint.write_part(torch.empty(4, 3), "m", (4, 3), 0, 0, 4)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_was_not_read_with_its_weight_is_refused_unless_it_is_zero(
    tmp_path: Path, value: float
) -> None:
    names = WeightNames(prefix="text.")
    tensors = {"text.used.weight": MATRIX, "text.expert_of_another_rank.bias": MATRIX[0] + 1}
    tensors |= {"text.used.bias": torch.tensor([0.0, 0.0, value])}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, names=names)

    checkpoint.refuse_unread_biases()  # no weight was read
    checkpoint.read("used.weight", (7, 3))
    if value:
        with pytest.raises(
            UnsupportedModelError, match=r"text\.used\.bias.*without anti_method m4"
        ):
            checkpoint.refuse_unread_biases()
    checkpoint.read("used.bias", (3,))
    checkpoint.refuse_unread_biases()


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_vocabulary_parts_are_equal_wide_and_cover_all(size: int) -> None:
    parts = [vocabulary_part(503, CommGroup(tuple(range(size)), rank)) for rank in range(size)]

    assert len({stop - start for start, stop in parts}) == 1
    assert parts[0][0] == 0
    assert parts[-1][1] >= 503
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 4), (8, 4, 2)])
def test_every_query_head_finds_its_kv_head_on_its_rank(
    heads: int, kv_heads: int, size: int
) -> None:
    for rank in range(size):
        share = share_heads(make_spec(heads, kv_heads), CommGroup(tuple(range(size)), rank))

        group = heads // kv_heads
        assert share.q[0] // group == share.kv[0]
        assert share.q[-1] // group == share.kv[-1]


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 3), (6, 4, 6), (12, 8, 3)])
def test_heads_that_do_not_line_up_are_refused(heads: int, kv_heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"parallel\.tp is {size}"):
        share_heads(make_spec(heads, kv_heads), CommGroup(tuple(range(size)), 0))


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (4,)])
def test_rows_of_a_tensor_with_another_shape_are_refused(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    names = join(WeightNames(), ".qkv.", (".q.", ".k."), (2, 2))
    save_file({"a.qkv.weight": torch.zeros(shape)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, torch.float32, names=names)

    with pytest.raises(MissingTensorError, match=r"tensor a\.k\.weight in .* has shape"):
        checkpoint.read("a.k.weight", (2, 4))

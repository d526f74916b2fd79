"""Layers of linear attention with random weights, and their steps on the emulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from dist_aclgraph.arrays.ints import IntArray
from dist_aclgraph.comm.groups import ALONE, ONE_RANK, CommGroup, RankGroups
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.layers.attention import AttentionMetadata
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.layers.state_metadata import (
    DirectLayout,
    DirectStates,
    PromptStates,
    StateMetadata,
    direct_arrays,
    prompt_arrays,
)
from dist_aclgraph.models.attention_kind import CacheRoom
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.gated_delta import GatedDeltaAttention, GatedDeltaKind
from dist_aclgraph.models.kimi_delta import KimiDelta, KimiDeltaAttention
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.linear_spec import LinearSpec
from dist_aclgraph.shapes.model_spec import ModelSpec
from dist_aclgraph.shapes.rope_spec import RopeSpec

HIDDEN, KEY_HEADS, VALUE_HEADS, DIM, WIDTH = 64, 2, 4, 128, 4
FAMILIES = ("qwen3_next", "qwen3_5", "kimi_linear")
NO_ROPE = (torch.empty(0), torch.empty(0))


class Unsummed(CommGroup):
    """A fake group of ranks whose all-reduce returns its input. The test itself sums the results of
    the ranks.
    """

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def make_oracle(family: str, a_log: float | None = None) -> Any:
    """Return transformers' layer with random float32 weights.

    Args:
        a_log: value of the weight A_log for all heads; None for random values.
    """
    import transformers
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    sizes = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 4,
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": DIM,
        "linear_value_head_dim": DIM,
        "linear_conv_kernel_dim": WIDTH,
    }
    torch.manual_seed(7)
    if family == "kimi_linear":
        layer = make_kimi_layer()
    elif family == "qwen3_next":
        layer = Qwen3NextGatedDeltaNet(transformers.Qwen3NextConfig(**sizes), 0)
    else:
        layer = Qwen3_5GatedDeltaNet(transformers.Qwen3_5TextConfig(**sizes), 0)
    layer.requires_grad_(False)
    for name, weight in layer.named_parameters():
        if name.endswith("norm.weight"):
            weight.uniform_(0.5, 1.5)
        elif name.endswith("dt_bias"):
            weight.normal_(0, 0.5)
        elif name.endswith("A_log") and a_log is not None:
            weight.fill_(a_log)
    return layer.eval()


def make_kimi_layer() -> Any:
    import transformers
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = transformers.KimiLinearConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        linear_num_heads=VALUE_HEADS,
        linear_head_dim=DIM,
        linear_conv_kernel_dim=WIDTH,
        rms_norm_eps=1e-6,
    )
    layer = KimiLinearDeltaAttention(config, 0)
    torch.nn.init.normal_(layer.forget_gate.A_log, 0.0, 0.5)
    return layer


def make_spec(family: str) -> ModelSpec:
    is_kimi = family == "kimi_linear"
    linear = LinearSpec(
        layers=frozenset({0}),
        num_key_heads=VALUE_HEADS if is_kimi else KEY_HEADS,
        num_value_heads=VALUE_HEADS,
        key_dim=DIM,
        value_dim=DIM,
        conv_width=WIDTH,
        has_grouped_weights=family == "qwen3_next",
        decays_by_channel=is_kimi,
    )
    return ModelSpec(
        architecture=family,
        num_layers=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=64,
        context_len=128,
        hidden_size=HIDDEN,
        intermediate_size=1,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        has_qkv_bias=False,
        has_output_bias=False,
        has_mlp_bias=False,
        has_qk_norm=True,
        rope=RopeSpec(theta=1e4, kind="default", max_position_embeddings=128),
        linear=linear,
    )


def kind_of(
    family: str, groups: RankGroups, *, device: torch.device, dtype: torch.dtype
) -> GatedDeltaKind | KimiDelta:
    kind = KimiDelta if family == "kimi_linear" else GatedDeltaKind
    return kind(make_spec(family), groups, device=device, dtype=dtype)


def save_layer(layer: Any, directory: Path) -> Path:
    """Write the layer's weights to ``directory``, under their published names."""
    weights, prefix = layer.state_dict(), "linear_attn."
    if hasattr(layer, "forget_gate"):
        prefix = "self_attn."
        parts = weights.pop("conv1d.weight").chunk(3)
        weights |= {f"{x}_conv1d.weight": part for x, part in zip("qkv", parts, strict=True)}
        weights = {k.removeprefix("forget_gate."): v for k, v in weights.items()}
    names = {f"model.layers.0.{prefix}{k}": v for k, v in weights.items()}
    save_file({k: v.contiguous() for k, v in names.items()}, directory / "model.safetensors")
    return directory


@dataclass
class Direct:
    """What a direct request computes in a step: one token, and perhaps drafts.

    Attributes:
        rows: hidden states of the tokens.
        slots: the slot of the state after each token.
        accepted: number of the previous step's tokens that were accepted.
    """

    rows: Tensor
    slots: Sequence[int]
    accepted: int = 1


@dataclass
class Prompt:
    """A chunk of a prompt.

    Attributes:
        rows: hidden states of the tokens.
        slot: slot to which the state after the last token is written.
        source: slot of the state after the previous chunk; None if the chunk begins a prompt.
    """

    rows: Tensor
    slot: int
    source: int | None = None


@dataclass
class StateLayer:
    """One rank's part of a linear attention layer, and the rank's recurrent states."""

    npu: Npu
    directory: Path
    family: str
    dtype: torch.dtype = torch.float32
    group: CommGroup = ALONE
    num_slots: int = 24
    layer: GatedDeltaAttention | KimiDeltaAttention = field(init=False)

    def __post_init__(self) -> None:
        groups = RankGroups(self.group, ALONE)
        kind = kind_of(self.family, groups, device=self.npu.device, dtype=self.dtype)
        checkpoint = Checkpoint(self.directory, self.dtype)
        slices = WeightSlices(checkpoint, self.group, self.npu.device, ExpertSetup(ONE_RANK))
        with torch.inference_mode():
            self.layer = kind.load(slices, 0)
            self.cache = kind.make_cache(CacheRoom(0, 0, self.dtype, self.num_slots))
            # A new request must not see the states of earlier requests.
            self.cache.conv[1:] = 3
            self.cache.recurrent[1:] = 3

    def run(
        self, direct: Sequence[Direct] = (), prompts: Sequence[Prompt] = (), padding: int = 0
    ) -> list[Tensor]:
        """Run one step; return the results of each request, direct requests first."""
        rows = [each.rows for each in (*direct, *prompts)]
        h = torch.cat([*rows, rows[0].new_ones(padding, HIDDEN)]).to(self.npu.device, self.dtype)
        metadata = StateMetadata(direct=self.direct(direct), prompts=self.prompts(prompts))
        with torch.inference_mode():
            out = self.forward(h, metadata).float().cpu()
        return list(out.split([len(each) for each in rows] + [padding]))[: len(rows)]

    def forward(self, h: Tensor, metadata: StateMetadata) -> Tensor:
        inputs = self.layer.project(h, NO_ROPE, None)
        whole = AttentionMetadata(
            num_tokens=0, written=h, block_table=h, query_ends=[], kv_lens=[], causal_mask=h,
            is_causal=False, states=metadata,
        )  # fmt: skip
        self.layer.attend(inputs, NO_ROPE, self.cache, whole, None)
        return self.layer.output(inputs)

    def direct(self, requests: Sequence[Direct]) -> DirectStates | None:
        if not requests:
            return None
        lengths = np.array([len(each.rows) for each in requests], np.int32)
        _, *arrays = direct_arrays(np.zeros_like(lengths), lengths, WIDTH)
        layout = DirectLayout.of_arrays(list(map(self.send, arrays)), int(lengths.max()))
        slots = self.send([slot for each in requests for slot in each.slots])
        accepted = self.send([each.accepted for each in requests])
        return DirectStates.of_slots(slots, accepted, layout)

    def prompts(self, requests: Sequence[Prompt]) -> PromptStates | None:
        if not requests:
            return None
        lengths = np.array([len(each.rows) for each in requests], np.int32)
        places = [(each.source or each.slot, each.slot) for each in requests]
        goes_on = np.array([each.source is not None for each in requests], np.int32)
        arrays = prompt_arrays(*np.array(places, np.int32).T, lengths, goes_on, WIDTH)
        return PromptStates.of_step(list(map(self.send, arrays)), np.cumsum(lengths).tolist())

    def send(self, values: Sequence[int] | IntArray) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int32)).to(self.npu.device)

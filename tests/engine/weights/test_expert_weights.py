"""Layers of experts that are loaded from files are compared with transformers' modules that have
the same weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dist_aclgraph.comm.groups import ONE_RANK, CommGroup, RankGroups
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.layers.experts import ALL_HERE, ExpertLayer, ExpertSetup
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.expert_weights import load_experts
from dist_aclgraph.models.loading import WeightSlices
from dist_aclgraph.shapes.model_spec import ExpertSpec

HIDDEN, WIDTH, EXPERTS, K = 64, 48, 16, 4
PREFIX = "model.layers.1.mlp"


def qwen3(renormalizes: bool) -> tuple[Any, ExpertSpec]:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        norm_topk_prob=renormalizes,
    )
    return Qwen3MoeSparseMoeBlock(config), make_spec(renormalizes=renormalizes)


def deepseek_v2(method: str) -> tuple[Any, ExpertSpec]:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe

    groups = {"n_group": 4, "topk_group": 2} if method != "greedy" else {}
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=K,
        n_shared_experts=2,
        topk_method=method,
        routed_scaling_factor=1.5,
        **groups,
    )
    spec = make_spec(num_shared=2, scaling=1.5)
    return DeepseekV2Moe(config), make_spec(
        **(vars(spec) | ({"num_groups": 4, "top_groups": 2} if groups else {}))
    )


def deepseek_v3(renormalizes: bool = True) -> tuple[Any, ExpertSpec]:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=K,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=renormalizes,
    )
    return DeepseekV3MoE(config), make_spec(
        renormalizes=renormalizes, scoring="sigmoid", num_groups=4, top_groups=2,
        group_score="top2", scaling=2.5, num_shared=1, has_bias=True,
    )  # fmt: skip


def make_spec(**changes: Any) -> ExpertSpec:
    plain: dict[str, Any] = {"renormalizes": False, "layers": frozenset({1})}
    shape = {"num_experts": EXPERTS, "top_k": K, "width": WIDTH}
    return ExpertSpec(**(shape | plain | changes))


MODELS: dict[str, Callable[[], tuple[Any, ExpertSpec]]] = {
    "Qwen3 as they are": lambda: qwen3(False),
    "Qwen3 renormalised": lambda: qwen3(True),
    "V2 greedy": lambda: deepseek_v2("greedy"),
    "V2 best groups": lambda: deepseek_v2("group_limited_greedy"),
    "V3": deepseek_v3,
    "V3 as they are": lambda: deepseek_v3(False),
}


def write(module: Any, directory: Path) -> None:
    """Give a module random weights, and write them under the names of published checkpoints."""
    torch.manual_seed(0)
    state = {
        name: torch.randn_like(value.float()) * 0.2 for name, value in module.state_dict().items()
    }
    module.load_state_dict(state)
    names = {}
    for name, value in state.items():
        if name == "experts.gate_up_proj":
            for e, both in enumerate(value):
                names[f"experts.{e}.gate_proj.weight"], names[f"experts.{e}.up_proj.weight"] = (
                    half.contiguous() for half in both.chunk(2)
                )
        elif name == "experts.down_proj":
            names |= {f"experts.{e}.down_proj.weight": w.contiguous() for e, w in enumerate(value)}
        else:
            names[name] = value
    save_file({f"{PREFIX}.{k}": v for k, v in names.items()}, directory / "model.safetensors")


class ReadLog(Checkpoint):
    """A checkpoint that records the names of the tensors that are read."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, torch.float32)
        self.names: set[str] = set()

    def _slice(self, name: str, shape: tuple[int, ...]) -> Any:
        self.names.add(name)
        return super()._slice(name, shape)


def load(
    checkpoint: Checkpoint, npu: Any, spec: ExpertSpec, groups: RankGroups = ONE_RANK
) -> ExpertLayer:
    slices = WeightSlices(checkpoint, groups.tp, npu.device, ExpertSetup(groups))
    return load_experts(slices, spec, HIDDEN, PREFIX)


def group(size: int, rank: int) -> CommGroup:
    return CommGroup(tuple(range(size)), rank)


@pytest.mark.parametrize("model", MODELS)
def test_a_layer_equals_transformers(npu: Any, tmp_path: Path, model: str) -> None:
    module, spec = MODELS[model]()
    write(module, tmp_path)
    x, slots = torch.randn(9, HIDDEN), torch.arange(9, dtype=torch.int32)

    out = load(Checkpoint(tmp_path, torch.float32), npu, spec)(
        x.to(npu.device), slots.to(npu.device), ALL_HERE
    )

    with torch.no_grad():
        want = module.float()(x[None])[0]
    torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-4)


def test_the_bias_decides_about_experts_and_not_about_weights(npu: Any, tmp_path: Path) -> None:
    module, spec = deepseek_v3()
    write(module, tmp_path)
    x = torch.randn(32, HIDDEN)

    experts, weights = load(Checkpoint(tmp_path, torch.bfloat16), npu, spec).router(
        x.to(npu.device), torch.zeros(32, dtype=torch.int32).to(npu.device)
    )

    with torch.no_grad():
        _, want_weights, want = module.gate.float()(x)
    order, want_order = experts.cpu().long().sort(1), want.sort(1)
    assert torch.equal(order.values, want_order.values)
    torch.testing.assert_close(
        weights.cpu().gather(1, order.indices), want_weights.gather(1, want_order.indices)
    )


def test_a_rank_reads_its_own_experts_only(npu: Any, tmp_path: Path) -> None:
    module, spec = deepseek_v3()
    write(module, tmp_path)
    log = ReadLog(tmp_path)

    layer = load(log, npu, spec, RankGroups(group(2, 1), group(4, 3), dp_rank=1))

    read = {int(name.split(".")[5]) for name in log.names if ".experts." in name}
    assert read == {12, 13, 14, 15} == set(range(layer.local.first, EXPERTS))
    assert layer.local.inner.weight.shape == (4, HIDDEN, 2 * WIDTH)
    assert layer.shared is not None
    assert layer.shared.gate_up.weight.shape == (
        HIDDEN,
        WIDTH,
    )  # gate and up; each rank has half of the inner width
    assert set(layer.exchanges) == {"all_gather", "all_to_all"}


def test_experts_that_ranks_cannot_share_are_refused(npu: Any, tmp_path: Path) -> None:
    module, spec = deepseek_v3()
    write(module, tmp_path)

    with pytest.raises(ConfigError, match="must divide the model's 15 experts"):
        load(
            Checkpoint(tmp_path, torch.float32),
            npu,
            make_spec(**(vars(spec) | {"num_experts": 15})),
            RankGroups(group(1, 0), group(2, 0)),
        )

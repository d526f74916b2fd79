"""The memory that is planned for a rank is compared with the size of the tensors that the rank then
has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from dist_aclgraph.actors.worker.rank_stages import RunningRank
from dist_aclgraph.comm.groups import CommGroup, RankGroups
from dist_aclgraph.config import make_config
from dist_aclgraph.device.npu import Npu
from dist_aclgraph.engine.model_runner import TORCH_DTYPES, ModelRunner
from dist_aclgraph.kv.cache_spec import KVCacheSpec
from dist_aclgraph.layers.experts import ExpertSetup
from dist_aclgraph.models.checkpoint import Checkpoint
from dist_aclgraph.models.decoder import Decoder
from dist_aclgraph.planning.buckets import candidate_families, lazy_families
from dist_aclgraph.planning.memory import RankMemory
from dist_aclgraph.shapes.families import read_model_spec
from dist_aclgraph.shapes.model_facts import read_model_facts
from dist_aclgraph.shapes.weight_sizes import weight_parts
from tests.checkpoints import make_reference
from tests.deployments import make_deployment_config
from tests.engine.runners import make_runner
from tests.lockstep import lockstep

TINY_DEEPSEEK = Path(__file__).parents[3] / "models" / "tiny-deepseek"
NEWER = ("Glm4Moe", "MiniMaxM2", "GptOss", "KimiLinear", "GlmMoeDsa")
FURTHER = ("Gemma3", "Ministral3", "Olmo2", "Cohere2", "GraniteMoeShared", "HunYuanMoEV1")
MAX_LEN = 128
STEP_BUFFERS = ("step buffers", "token counts")


def tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every device tensor that ``value`` and its attributes hold. Of tensors with the same
    storage, yield only one.
    """
    if isinstance(value, Tensor):
        if value.device.type == "npu" and value.untyped_storage().data_ptr() not in seen:
            seen.add(value.untyped_storage().data_ptr())
            yield value
        return
    if id(value) in seen or isinstance(value, CommGroup):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        held: Any = value.values()
    elif isinstance(value, list | tuple):
        held = value
    elif type(value).__module__.startswith("dist_aclgraph.") and (
        dataclasses.is_dataclass(value) or hasattr(value, "__dict__")
    ):
        held = vars(value).values()
    else:
        return
    for item in held:
        yield from tensors_of(item, seen)


def bytes_of(value: Any, *but: Tensor) -> int:
    seen = {tensor.untyped_storage().data_ptr() for tensor in but}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value, seen))


def load(npu: Npu, directory: Path, dtype: torch.dtype, tp: int, ep: int, drafts: bool) -> Decoder:
    group, experts = CommGroup(tuple(range(tp)), tp - 1), CommGroup(tuple(range(ep)), ep - 1)
    groups = RankGroups(group, experts if ep > 1 else CommGroup((tp - 1,), 0))
    spec = read_model_spec(directory)
    return Decoder(
        spec,
        groups,
        Checkpoint(directory, dtype, names=spec.names),
        device=npu.device,
        max_len=MAX_LEN,
        drafts=drafts,
        experts=ExpertSetup(groups),
    )


@pytest.fixture(scope="module")
def checkpoints(npu: Npu, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {"tiny-deepseek": TINY_DEEPSEEK}
    for name in ("Qwen3", "Qwen2", "Qwen3Moe", "DeepseekV3", "DeepseekV2", *NEWER, *FURTHER):
        found[name] = tmp_path_factory.mktemp(name)
        make_reference(f"{name}ForCausalLM", found[name])
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "tp", "ep"),
    [
        ("Qwen3", 1, 1),
        ("Qwen3", 2, 1),
        ("Qwen3", 4, 1),
        ("Qwen2", 2, 1),
        ("Qwen3Moe", 2, 1),
        ("Qwen3Moe", 2, 4),
        ("DeepseekV3", 1, 1),
        ("DeepseekV3", 2, 2),
        ("DeepseekV3", 2, 8),
        ("DeepseekV2", 2, 4),
        ("Glm4Moe", 2, 4),
        ("MiniMaxM2", 4, 1),
        ("GptOss", 2, 1),
        ("GptOss", 1, 4),
        ("KimiLinear", 2, 4),
        *((name, 2, 1) for name in FURTHER),
        ("tiny-deepseek", 2, 4),
    ],
)
def test_a_rank_holds_the_weights_that_were_computed(
    npu: Npu, checkpoints: dict[str, Path], name: str, tp: int, ep: int, dtype: torch.dtype
) -> None:
    drafts = name == "tiny-deepseek"
    decoder = load(npu, checkpoints[name], dtype, tp, ep, drafts)
    kind: Any = decoder.kind

    held = bytes_of(decoder, *tensors_of(kind._rotary, set()))

    parts = weight_parts(decoder.spec, tp=tp, ep=ep, element_bytes=dtype.itemsize, drafts=drafts)
    assert sum(part.bytes for part in parts) == pytest.approx(held, rel=0.001)


@pytest.mark.parametrize(
    ("name", "num_drafts", "kv_dtype"),
    [
        ("Qwen3", 0, "auto"),
        ("Gemma3", 0, "auto"),
        ("Ministral3", 0, "auto"),
        ("Cohere2", 0, "auto"),
        ("DeepseekV3", 0, "auto"),
        ("KimiLinear", 0, "auto"),
        ("GlmMoeDsa", 0, "auto"),
        ("GlmMoeDsa", 0, "int8"),
        ("tiny-deepseek", 1, "auto"),
        ("tiny-deepseek", 3, "auto"),
    ],
)
def test_a_rank_holds_the_caches_and_step_buffers_that_were_computed(
    npu: Npu, checkpoints: dict[str, Path], name: str, num_drafts: int, kv_dtype: str
) -> None:
    directory = checkpoints[name]
    config = make_config(
        {
            "model": str(directory),
            "max_model_len": MAX_LEN,
            "scheduler": {"max_num_seqs": 24},
            "speculative": {"num_tokens": num_drafts},
            "kv": {"dtype": kv_dtype},
        }
    )
    facts, spec = read_model_facts(directory), read_model_spec(directory)
    decoder = load(npu, directory, TORCH_DTYPES[config.dtype], 1, 1, num_drafts > 0)
    families = (*candidate_families(config), *lazy_families(config))
    runner = ModelRunner(
        config, npu, decoder, num_blocks=5, max_len=MAX_LEN,
        graphs=[each.describe(each.buckets[-1], 24) for each in families], owns_output=True,
    )  # fmt: skip
    kind, drafts = cast(Any, decoder.kind), cast(Any, runner._drafts)

    caches = bytes_of(runner.caches.tensors())
    drafter = None if drafts is None else drafts._drafter
    buffers = bytes_of([runner._buffers, kind._rotary, runner._output, drafter])

    assert caches == KVCacheSpec.from_config(config, facts).total_bytes(5)
    memory = RankMemory.from_config(config, spec, 1 << 30, has_hccl_buffers=False)
    computed = [part.bytes for part in memory.parts if part.name in STEP_BUFFERS]
    assert len(computed) == len(STEP_BUFFERS) and sum(computed) == buffers


def test_of_a_cache_whose_requests_are_computed_again_nothing_is_left(
    npu: Npu, checkpoint: Path
) -> None:
    """Repaired memory has undefined contents, for example NaN. If NaN is stored after a request's
    last key, it can make results NaN.
    """
    runner = make_runner(npu, checkpoint)
    device = Mock()
    device.bad_memory.return_value = ()
    rank = RunningRank(Mock(joined=Mock(npu=device)), runner)
    for keeps_kv in (True, False):
        for tensor in runner.caches.tensors():
            tensor.fill_(torch.nan)

        rank.resume(keeps_kv=keeps_kv)

        assert all(bool(t.isnan().any()) == keeps_kv for t in runner.caches.tensors())
    runner.close()


def test_blocks_get_the_memory_of_the_trial_caches(npu: Any, tmp_path: Path) -> None:
    """Ranks make their offers while the caches for trials exist. The states in the caches for
    trials are as large as in the final caches.

    The device has room for the states and for all useful blocks, but not for twice the states.
    """
    make_reference("Qwen3NextForCausalLM", tmp_path)
    config = make_deployment_config(
        tmp_path,
        dtype="bfloat16",
        max_model_len=512,
        kv={"block_size": 16, "num_blocks": None},
        scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 64},
        graph={"sizes": [1, 2, 4]},
        device={"emulator": {"memory_mb": 150}},
    )
    spec = KVCacheSpec.from_config(config, read_model_facts(tmp_path))

    with lockstep(config) as group:
        num_blocks = group.num_blocks

    assert spec.state_bytes > 50e6
    assert num_blocks == 64 * 512 // 16 + 1

"""The plan lists the parts of a rank's memory. These parts are compared with published sizes of
models and with documented sizes of buffers. Plans that do not fit are refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dist_aclgraph.config import Config, make_config
from dist_aclgraph.context.prompt_split import PromptSplit
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.memory import GIB, MIB, RankMemory, largest_eager_step
from dist_aclgraph.shapes.activation_sizes import activation_bytes
from dist_aclgraph.shapes.families import read_model_spec

SHAPE = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v3"
NOT_WEIGHTS = ("HCCL buffers", "step buffers", "token counts")


def make(**changes: Any) -> Config:
    raw: dict[str, Any] = {"model": str(SHAPE), "parallel": {"tp": 8, "dp": 4, "ep": 32}}
    return make_config(raw | changes)


def account(config: Config, *, device_bytes: int = 64 * GIB, hccl: bool = True) -> RankMemory:
    return RankMemory.from_config(
        config,
        read_model_spec(config.model),
        device_bytes,
        has_hccl_buffers=hccl,
    )


def part(memory: RankMemory, name: str) -> int:
    return next((part.bytes for part in memory.parts if part.name == name), 0)


def weights(memory: RankMemory) -> int:
    return sum(part.bytes for part in memory.parts if part.name not in NOT_WEIGHTS)


def test_671_billion_parameters_are_divided_among_their_ranks() -> None:
    whole = account(make(parallel={"tp": 16, "ep": 16}))

    # Each of 16 ranks has all weights of latents, routers and norms, and a sixteenth of all other
    # weights.
    assert 1.0 < weights(whole) / (671e9 * 2 / 16) < 1.05


def test_hccl_has_two_buffers_for_each_domain() -> None:
    spread, alone = make(), make(parallel={"tp": 16, "ep": 16})

    # there is a domain of 8 ranks, and one of 32 ranks
    assert part(account(spread), "HCCL buffers") == 2 * 2 * 200 * MIB
    assert part(account(alone), "HCCL buffers") == 2 * 200 * MIB  # a common domain
    assert part(account(make(device={"hccl_buffer_mb": 512})), "HCCL buffers") == 4 * 512 * MIB
    assert part(account(spread, hccl=False), "HCCL buffers") == 0
    assert part(account(make(parallel={})), "HCCL buffers") == 0  # a single rank has no domain


def test_ranks_that_split_prompts_hold_whole_weights_and_the_buffers_of_their_domains() -> None:
    alone, split = make(), make(parallel={"tp": 8, "pcp": 2, "dp": 2, "ep": 32})
    sharded = make(parallel={"tp": 8, "pcp": 2, "dp": 2, "dcp": 16, "ep": 32})
    same = make(parallel={"tp": 8, "pcp": 2, "dp": 2, "dcp": 2, "ep": 32})

    assert weights(account(split)) == weights(account(alone))
    # Each domain has two buffers. TP, EP and PCP have one domain each. DCP has a separate domain if
    # its ranks differ from the ranks of PCP.
    domains = {2: alone, 3: split, 4: sharded}
    for count, config in {**domains, 3: same}.items():
        assert part(account(config), "HCCL buffers") == count * 2 * 200 * MIB


def test_decoding_over_shards_holds_the_queries_and_findings_of_all_their_heads() -> None:
    plain, sharded = (
        account(make(parallel={"tp": 16, "ep": 16, "dcp": dcp}, graph={"lazy": "off"}))
        for dcp in (1, 16)
    )
    more = sharded.graph_bytes - plain.graph_bytes
    # ``queries`` and ``findings`` are numbers of bytes for 32 requests.
    queries, findings = 32 * 128 * (512 + 64) * 2, 32 * 128 * 512 * 4

    # A graph has two copies of the queries: one in the order of gathering, one in the order of
    # heads. The graph has three copies of the float32 results: as computed, as sent, and as
    # received.
    assert 2 * queries + 3 * findings < more < 4 * queries + 8 * findings


def test_long_queries_hold_the_keys_of_a_chunk() -> None:
    few = {"max_num_seqs": 1}
    long, short = (make(max_model_len=length, scheduler=few) for length in (65536, 16))
    sharded = make(
        parallel={"tp": 8, "dp": 4, "ep": 32, "dcp": 8}, max_model_len=65536, scheduler=few
    )

    # Bytes for a chunk of 8192 tokens: ``made`` for the keys and values of 16 heads, and ``read``
    # for the latents from which they are computed.
    made, read = 8192 * 16 * 320 * 2, 8192 * 576 * 2
    keys = account(long).eager_bytes - account(short).eager_bytes
    assert 0.99 < keys / (made + read) < 1.01
    # With shards, latents are gathered from all shards, and then copied in the order of tokens.
    assert account(sharded).eager_bytes - account(long).eager_bytes > 2 * read


@pytest.mark.parametrize(("pcp", "copies"), [(1, 2 / 8 + 3), (2, 2 / 8 + 5)])
def test_an_indexer_needs_all_keys_of_a_long_request_at_once(pcp: int, copies: float) -> None:
    model, few = str(SHAPE.with_name("deepseek-v3.2")), {"max_num_seqs": 1}
    parallel = {"tp": 8 // pcp, "pcp": pcp, "dcp": 8, "dp": 4, "ep": 32}
    long, short = (
        make(model=model, parallel=parallel, max_model_len=length, scheduler=few)
        for length in (65536, 8192)
    )

    more = account(long).eager_bytes - account(short).eager_bytes
    # ``copies`` is the number of copies of the latents and rotated keys. Some copies are packed or
    # gathered. The other copies are selected or split for a piece of a prompt.
    assert more == (65536 - 8192) * copies * 576 * 2


@given(st.lists(st.integers(1, 200), min_size=1, max_size=8), st.sampled_from([1, 2, 4]))
def test_no_rank_is_given_more_tokens_than_it_has_memory_for(lens: list[int], pcp: int) -> None:
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": max(8, sum(lens))}
    bound = largest_eager_step(make(parallel={"pcp": pcp}, scheduler=limits))

    split = PromptSplit.of(np.array(lens, np.int32), pcp)

    assert split.num_tokens <= bound.num_tokens <= limits["max_num_batched_tokens"]
    assert split.num_whole_tokens <= bound.num_direct


def test_drafts_cost_a_layer_and_their_buffers() -> None:
    without = make(max_model_len=1024)
    with_drafts = make(max_model_len=1024, speculative={"num_tokens": 1})
    more = weights(account(with_drafts)) - weights(account(without))

    # The next-token module is a layer with experts, and has 11.6 billion parameters. A rank has
    # 1/32 of the experts, but a whole copy of some other tensors.
    assert 1.0 < more / (11.6e9 * 2 / 32) < 1.7
    assert part(account(with_drafts), "step buffers") > 1.5 * part(account(without), "step buffers")


def test_the_memory_of_logits_depends_on_the_largest_graph_not_on_max_num_seqs() -> None:
    few, many = (
        make(scheduler={"max_num_seqs": n, "max_num_batched_tokens": 4096}) for n in (512, 4096)
    )
    vocab = read_model_spec(SHAPE).vocab_size

    more = part(account(many), "step buffers") - part(account(few), "step buffers")
    counts = part(account(many), "token counts")

    assert abs(more) < 512 * vocab  # less than one byte for each logit of the largest graph
    assert counts == 4096 * vocab * 4


def test_free_bytes_are_the_devices_bytes_without_all_parts() -> None:
    memory = account(make())

    assert memory.free_bytes + memory.taken_bytes + memory.eager_bytes == 64 * GIB
    assert sum(part.bytes for part in memory.needs) == 64 * GIB - memory.free_bytes
    assert account(make(), device_bytes=GIB).free_bytes == 0


def test_weights_that_do_not_fit_are_refused_with_sizes_and_remedies() -> None:
    config = make(parallel={"tp": 16, "ep": 16})
    account(make()).check_fits(make())

    weights = r"weights take 8\d\.\d\d of them: raise parallel.tp or parallel.ep, or set quant"
    with pytest.raises(ConfigError, match=rf"of each NPU, which has 64.00; {weights}"):
        account(config).check_fits(config)

    quantised = make(parallel={"tp": 16, "ep": 16}, quantization="w8a8")
    account(quantised).check_fits(quantised)
    with pytest.raises(
        ConfigError, match=r"of rank 3, which has 1.00; weights .*: raise .* parallel.ep; "
    ):
        account(quantised, device_bytes=GIB).check_fits(quantised, "rank 3")


def test_a_checkpoint_in_int8_is_priced_as_it_is(tmp_path: Path) -> None:
    shutil.copy(SHAPE / "config.json", tmp_path)
    quantised, plain = make(quantization="w8a8"), make(model=str(tmp_path))
    assert account(plain).parts != account(quantised).parts

    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "a.safetensors")
    save_file({"y": np.zeros(4, np.int8)}, tmp_path / "b.safetensors")

    assert account(plain).parts == account(quantised).parts


@given(st.integers(1, 4096), st.sampled_from([(8, 1), (8, 8), (8, 32), (16, 16)]))
def test_activations_grow_with_tokens_and_hold_the_chosen_rows(
    num_tokens: int, layout: tuple[int, int]
) -> None:
    tp, ep = layout
    spec = read_model_spec(SHAPE)

    def of(tokens: int, samples: int = 0) -> int:
        return activation_bytes(
            spec, tp=tp, ep=ep, element_bytes=2, num_tokens=tokens, num_samples=samples
        )

    assert of(2 * num_tokens) == 2 * of(num_tokens) < of(2 * num_tokens, 1)
    # The experts compute the tokens of all ranks. Each token has 8 rows in the inputs of the
    # experts, and 8 rows in the outputs.
    gathered = num_tokens * max(1, ep // tp)
    assert of(num_tokens) > gathered * 8 * 2 * spec.hidden_size * 2

"""Every deployment in configs/ can be planned. For large deployments, the tests check memory,
streams and exchanges.
"""

from __future__ import annotations

import io
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dist_aclgraph.cli.plan_report import plan_report, render_plan
from dist_aclgraph.config import load_config
from dist_aclgraph.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
V3, R1, QWEN3 = (
    "deepseek-v3-tp8-dp4-ep32-mtp",
    "deepseek-r1-tp16",
    "qwen3-235b-a22b-tp8-dp2-ep16",
)
SHARED_R1, SHARED_V3, SHARED_QWEN3 = (
    "deepseek-r1-tp16-dcp16-128k",
    "deepseek-v3-tp8-pcp2-dcp2-dp4-ep64",
    "qwen3-235b-a22b-tp8-dcp2-dp2-ep16",
)
QWEN3_5, NEXT, GLM5, V32, K2 = (
    "qwen3.5-397b-a17b-tp8-dp2-ep16-mtp",
    "qwen3-next-80b-a3b-tp4-ep4-mtp",
    "glm-5-tp8-dp4-ep32-w8a8",
    "deepseek-v3.2-tp8-dp4-ep32-w8a8-128k",
    "kimi-k2-tp8-dcp2-dp4-ep32-w8a8",
)
K2_THINKING = "kimi-k2-thinking-tp8-dcp2-dp2-ep16-w4a16"
A2 = {"device.soc": "Ascend910B1", "device.hccl_expansion": "FFTS"}
A3 = {"device.soc": "Ascend910_9391", "device.hccl_expansion": "AICPU"}


def plan(name: str, overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    return _known_plan(name, json.dumps(overrides))


@cache
def _known_plan(name: str, overrides: str) -> dict[str, Any]:
    return plan_report(load_config(CONFIGS / f"{name}.yaml", json.loads(overrides)))


def kinds(report: dict[str, Any]) -> dict[str, int]:
    """Return, for each kind of exchange in a report, the number of tokens of its largest batch."""
    return {entry["kind"]: entry["last"] for entry in report["exchanges"]}


def price(report: dict[str, Any]) -> int:
    return int(report["graph"]["families"][0]["price_per_bucket"])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_deployment_has_a_plan_whose_memory_adds_up(path: Path) -> None:
    report = plan(path.stem)
    memory = report["memory"]

    spent = sum(part["bytes"] for part in memory["parts"])
    assert spent + memory["left_bytes"] == memory["device_bytes"]
    assert memory["left_bytes"] >= 0
    assert {"attention", "step buffers", "graphs", "KV blocks"} <= {
        part["name"] for part in memory["parts"]
    }
    out = io.StringIO()
    render_plan(json.loads(json.dumps(report)), Console(file=out, width=160))
    assert "memory of each NPU" in out.getvalue() and "KV blocks" in out.getvalue()
    assert f"ep {report['layout']['ep']})" in out.getvalue()
    shares_context = report["layout"]["dcp"] * report["layout"]["pcp"] > 1
    assert (f"dcp {report['layout']['dcp']}, " in out.getvalue()) == shares_context
    assert ("on the same NPUs with dcp 1, pcp 1" in out.getvalue()) == shares_context


@pytest.mark.parametrize(
    "name", [V3, R1, QWEN3, SHARED_R1, SHARED_V3, SHARED_QWEN3, QWEN3_5, NEXT, K2, K2_THINKING]
)
def test_a_large_deployment_serves_many_requests_of_full_length(name: str) -> None:
    report = plan(name)
    kv, wanted = report["kv"], load_config(CONFIGS / f"{name}.yaml").max_model_len

    assert kv["max_model_len"] == wanted
    assert kv["tokens"] >= 3 * wanted
    assert report["ranks"][0]["left_streams"] > 0
    assert report["plans"][0]["families"][0]["buckets"][-1] == max(
        load_config(CONFIGS / f"{name}.yaml").graph.sizes or ()
    )


@pytest.mark.parametrize(
    ("name", "num_layers", "elements"),
    [
        # Number of layers that keep keys, and number of elements of each token. Layers with linear
        # attention keep no keys; the layer of the next-token module keeps keys. A rank has one KV
        # head of 256 elements, with key and value.
        (QWEN3_5, 60 // 4 + 1, 2 * 256),
        (NEXT, 48 // 4 + 1, 2 * 256),
        # In each layer, a token keeps its latent, its rotated key, and the indexer's key.
        (GLM5, 78 + 1, 512 + 64 + 128),
        (V32, 61 + 1, 512 + 64 + 128),
        (K2, 61, 512 + 64),
    ],
)
def test_a_token_takes_the_bytes_of_its_layers(name: str, num_layers: int, elements: int) -> None:
    kv = plan(name)["kv"]

    assert kv["bytes_per_block"] == kv["block_size"] * num_layers * elements * 2


@pytest.mark.parametrize(
    ("name", "num_layers", "heads", "channels"),
    # On one rank: number of value heads, and number of channels of the convolution. QWEN3_5 has 8
    # ranks, and NEXT has 4.
    [
        (QWEN3_5, 45, 64 // 8, (2 * 16 + 64) * 128 // 8),
        (NEXT, 36, 32 // 4, (2 * 16 + 32) * 128 // 4),
    ],
)
def test_states_are_a_part_of_the_memory(
    name: str, num_layers: int, heads: int, channels: int
) -> None:
    report = plan(name)
    kv, states = report["kv"], report["states"]
    rows = load_config(CONFIGS / f"{name}.yaml").scheduler.max_num_seqs
    parts = {part["name"]: part["bytes"] for part in report["memory"]["parts"]}

    # One slot is for padding. Each row has two slots, for the states after its last token and after
    # its draft, and one checkpoint.
    assert states["num_slots"] == 1 + 2 * rows + rows
    assert states["bytes_per_slot"] == num_layers * (heads * 128 * 128 + 3 * channels) * 2
    assert parts["states"] == states["num_slots"] * states["bytes_per_slot"]
    assert parts["KV blocks"] == kv["num_blocks"] * kv["bytes_per_block"] == kv["bytes"]
    out = io.StringIO()
    render_plan(report, Console(file=out, width=160))
    assert f"States per NPU: {states['num_slots']} slots" in out.getvalue()


WEIGHTS = ("embedding and head", "attention", "norms", "dense MLPs", "linear attention", "indexers",
           "experts", "shared experts", "routers", "offsets of experts",
           "mix of the next-token module")  # fmt: skip


@pytest.mark.parametrize("chip", [A2, A3], ids=["A2", "A3"])
@pytest.mark.parametrize("name", [QWEN3_5, NEXT, GLM5, V32, K2, K2_THINKING])
def test_the_page_of_large_models_has_the_numbers_of_the_plan(
    name: str, chip: dict[str, Any]
) -> None:
    report = plan(name, chip)
    parts = {part["name"]: part["bytes"] for part in report["memory"]["parts"]}
    kv, dp = report["kv"], report["layout"]["dp"]
    tokens = kv["num_shards"] * kv["block_size"]

    page = (CONFIGS.parent / "docs" / "use" / "large-models.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if f"`{name}`" in line]
    cells = [cell.strip() for cell in row.split("|")[2:-1]]

    assert cells == [
        str(report["layout"]["world_size"]),
        f"{sum(parts.get(part, 0) for part in WEIGHTS) / (1 << 30):.1f}",
        f"{dp * kv['tokens']:,}",
        f"{parts['states'] / (1 << 30):.1f}" if "states" in parts else "none",
        *(str(dp * ((kv["num_blocks"] - 1) // (length // tokens))) for length in (32768, 131072)),
    ]


@pytest.mark.parametrize("name", [SHARED_R1, SHARED_V3, SHARED_QWEN3])
def test_shards_hold_longer_contexts_and_more_requests_on_the_same_npus(name: str) -> None:
    report = plan(name)
    shared, whole = report["context"]["layouts"]
    ranks = [each["tp"] * each["pcp"] * each["dp"] for each in (shared, whole)]

    assert ranks == [report["layout"]["world_size"]] * 2
    assert (whole["dcp"], whole["pcp"]) == (1, 1)
    assert shared["bytes_per_token"] * shared["dcp"] == whole["bytes_per_token"]
    # The ratio is not exactly 1, because the two deployments need different memory for eager steps
    # and buffers.
    assert 0.9 < shared["tokens"] / (whole["tokens"] * shared["dcp"]) < 1.2
    assert shared["requests"] >= 0.9 * whole["requests"] * shared["dcp"]
    # The configuration file and the documentation page contain the numbers that the plan prints.
    for page in (CONFIGS / f"{name}.yaml", CONFIGS.parent / "docs" / "use" / "contexts.md"):
        said = set(re.findall(r"\d[\d,]*\b", page.read_text(encoding="utf-8")))
        for each in (shared, whole):
            assert {f"{each['tokens']:,}", f"{each['bytes_per_token']:,.0f}"} <= said
            assert str(each["requests"] * each["dp"]) in said


@pytest.mark.parametrize(("name", "sizes"), [(SHARED_V3, [8, 64, 2, 64]), (SHARED_R1, [16])])
def test_domains_of_shared_contexts_are_distinct_sets_of_ranks(name: str, sizes: list[int]) -> None:
    domains = plan(name)["ranks"][0]["domains"]

    assert [len(domain) for domain in domains] == sizes


@pytest.mark.parametrize("name", [V3, QWEN3])
def test_ranks_of_spread_experts_have_a_domain_for_tp_and_one_for_ep(name: str) -> None:
    report = plan(name)
    layout, rank = report["layout"], report["ranks"][-1]

    assert [len(domain) for domain in rank["domains"]] == [layout["ep"], layout["tp"], layout["ep"]]
    # in FFTS mode, each domain uses two streams
    assert rank["taken"]["communication domains"] == 3 * 2
    assert len(layout["lockstep_groups"]) == 1


@pytest.mark.parametrize("name", [V3, QWEN3])
def test_decode_batches_find_room_for_mc2_in_hccls_buffer(name: str) -> None:
    report = plan(name)

    assert kinds(report)["mc2"] >= report["plans"][0]["families"][0]["buckets"][-1]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (V3, {"parallel.tp": 4, "parallel.ep": 16}),
        (R1, {"parallel.tp": 4, "parallel.ep": 4}),
        (R1, {"quantization": None}),
        (QWEN3, {"parallel.tp": 2, "parallel.ep": 4}),
    ],
)
def test_fewer_npus_or_wider_weights_are_refused(name: str, overrides: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(name, overrides)

    message = str(caught.value)
    assert "GiB of each NPU, which has 60.96; weights take " in message
    assert "of them: raise parallel.tp or parallel.ep" in message
    is_quantised = name == R1 and "quantization" not in overrides
    assert ("quantization=w8a8" in message) != is_quantised


@pytest.mark.parametrize(("name", "longest"), [(GLM5, 50177), (V32, 110849)])
def test_in_bfloat16_a_copy_has_no_room_for_a_long_request(name: str, longest: int) -> None:
    with pytest.raises(ConfigError, match=f"hold requests of {longest}: .*quantization=w8a8"):
        plan(name, {"quantization": None})

    assert f"{longest:,} tokens" in (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")


def test_kimi_k2_does_not_fit_in_bfloat16() -> None:
    with pytest.raises(ConfigError, match=r"weights take 63\.\d\d of them: .*quantization=w8a8"):
        plan(K2, {"quantization": None})


def test_experts_of_four_bits_need_half_of_the_npus() -> None:
    memory = plan(K2_THINKING)["memory"]
    parts = {part["name"]: part["bytes"] for part in memory["parts"]}
    # A rank has 24 experts. An element has half a byte, and 32 elements share a scale of two bytes.
    elements = 60 * 24 * 3 * 7168 * 2048

    assert parts["experts"] == elements // 2 + elements // 16
    with pytest.raises(ConfigError, match=r"weights take 1\d\d\.\d\d of them"):
        plan(K2_THINKING, {"model": str(CONFIGS / "shapes" / "kimi-k2"), "max_model_len": 131072})


def test_a_request_that_the_blocks_do_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 163840; .*: lower it, or raise kv.me"):
        plan(V3, {"max_model_len": 163840, "kv.memory_fraction": 0.6})
    with pytest.raises(ConfigError, match=r"requests of 25601: .*max_num_batched_tokens"):
        plan(V3, {"scheduler.max_num_batched_tokens": 8192})
    with pytest.raises(ConfigError, match=r"only [01] KV blocks"):
        plan(V3, {"kv.memory_fraction": 0.0001})


EP256 = {"parallel.ep": 256, "parallel.tp": 1, "parallel.dp": 256, "quantization": "w8a8"}


@pytest.mark.parametrize(
    ("overrides", "largest"),
    [
        (
            A3 | EP256 | {"device.mc2_buffer_mb": None},
            r"eager steps take 1\d\d\.\d\d of them: lower scheduler.max_num_batched_tokens "
            r"\(2048\)",
        ),
        (
            {"scheduler.max_num_batched_tokens": 16384},
            r"eager steps take .* lower scheduler.max_num_batched_tokens \(16384\)",
        ),
        (
            {"device.mc2_buffer_mb": 60000},
            "MC2 buffers take 117.19 of them: set device.mc2_buffer_mb below 60000",
        ),
        (
            {"device.hccl_buffer_mb": 60000},
            "HCCL buffers take 234.38 of them: set device.hccl_buffer_mb below 60000",
        ),
    ],
)
def test_a_part_that_is_too_large_is_named_with_its_key(
    overrides: dict[str, Any], largest: str
) -> None:
    with pytest.raises(ConfigError, match=largest):
        plan(V3, overrides)


@pytest.mark.parametrize(("dp", "ep"), [(16, 128), (32, 256)])
def test_memory_is_left_after_the_eager_steps_of_many_ranks(dp: int, ep: int) -> None:
    memory = plan(V3, {"parallel.dp": dp, "parallel.ep": ep})["memory"]
    parts = {part["name"]: part["bytes"] for part in memory["parts"]}

    assert parts["eager steps"] > 10 << 30 and memory["left_bytes"] > 0


DECODE_ONLY = {
    "parallel.tp": 1,
    "quantization": "w8a8",
    "scheduler.max_num_batched_tokens": 128,
    "scheduler.max_num_seqs": 64,
    "max_model_len": 16384,
    "device.mc2_buffer_mb": None,
}


@pytest.mark.parametrize(("ep", "copies"), [(320, 64), (288, 32)])
def test_copies_of_experts_fill_as_many_npus_as_there_are(ep: int, copies: int) -> None:
    ranks = {"parallel.dp": ep, "parallel.ep": ep}
    with pytest.raises(ConfigError, match=f"256 experts, .*: {-256 % ep} would do"):
        plan(V3, A3 | DECODE_ONLY | ranks)

    report = plan(V3, A3 | DECODE_ONLY | ranks | {"parallel.redundant_experts": copies})

    parts = {part["name"]: part["bytes"] for part in report["memory"]["parts"]}
    assert parts["experts"] == parts["shared experts"], "one expert of the same size each"
    assert kinds(report) == {"mc2": 128}
    console = Console(file=io.StringIO(), width=200)
    render_plan(report, console)
    # type: ignore[attr-defined]
    assert f"Experts: 256 and {copies} copies, 1 on each NPU" in console.file.getvalue()


@pytest.mark.parametrize("chip", ["Ascend310P3", "Ascend950", "foo"])
def test_an_unknown_chip_is_refused_unless_its_memory_is_given(chip: str) -> None:
    with pytest.raises(ConfigError, match=rf"^device.soc is {chip}; plans know Ascend910B"):
        plan(QWEN3, {"device.soc": chip})

    report = plan(QWEN3, {"device.soc": chip, "device.memory_mb": 62_420})

    assert f"nothing is known about the chip {chip}: " in report["assumptions"][0]


def test_a_tensor_parallel_group_of_several_nodes_must_be_allowed() -> None:
    unknown = {"device.soc": "Ascend950", "device.memory_mb": 62_420}
    for chip in (A2, unknown):
        refusal = r"parallel.tp is 16; plans assume 8 NPUs .* on each node: .*_across_nodes"
        with pytest.raises(ConfigError, match=refusal):
            plan(R1, chip)

    assert plan(R1, A2 | {"parallel.tp_across_nodes": True})["layout"]["world_size"] == 16
    assert plan(R1, A2 | {"device.node_npus": 16})["layout"]["world_size"] == 16
    assert plan(R1, A3)["layout"]["world_size"] == 16


def test_pieces_are_planned_on_an_a3_as_the_last_formula_plans_them() -> None:
    pieces = A3 | {"graph.mode": "PIECEWISE"}
    by_model = {
        model: plan(QWEN3, pieces | {"graph.budget_model": model})
        for model in ("calibrated", "legacy-last")
    }
    buckets = {
        model: len(report["plans"][0]["families"][0]["buckets"])
        for model, report in by_model.items()
    }

    assert buckets["legacy-last"] == 3
    # The calibrated budget model counts HCCL's lane in each graph. The formula of the last release
    # does not count HCCL's lane.
    assert buckets["calibrated"] == 2


def test_chips_differ_in_exchange_and_in_streams_of_hccl() -> None:
    a2, a3 = plan(QWEN3, A2), plan(QWEN3, A3)

    assert a2["ranks"][0]["taken"]["communication domains"] == 2 + 2 + 2
    assert a3["ranks"][0]["taken"]["communication domains"] == 7 + 15 + 15
    assert price(a3) == price(a2)  # on both chips, a graph uses two streams for each domain
    assert "an Ascend910_9391" in " ".join(a3["assumptions"])
    # MC2 accepts 256 tokens per rank on an A2 with fullmesh, and 512 tokens per rank on an A3.
    more = {
        "scheduler.max_num_batched_tokens": 8192,
        "device.mc2_buffer_mb": 1280,
        "parallel.mc2_algorithm": "fullmesh",
    }
    assert [kinds(plan(QWEN3, chip | more))["mc2"] for chip in (A2, A3)] == [8 * 256, 8 * 512]

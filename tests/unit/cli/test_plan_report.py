"""The report of `dist-aclgraph plan`: its numbers, its reasons, and refusals."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dist_aclgraph.cli.plan_plot import plot_padding
from dist_aclgraph.cli.plan_report import ALL_SIZES, CHOSEN, UNIFORM, plan_report, render_plan
from dist_aclgraph.config import Config, make_config
from dist_aclgraph.errors import ConfigError, ModelError, StreamBudgetError

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 256,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "intermediate_size": 512,
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    return tmp_path


def make(checkpoint: Path, **sections: dict[str, Any]) -> Config:
    # This budget model is a documented formula with prices that are easy to compute by hand. Lazy
    # graphs are off by default.
    graph = {"budget_model": "legacy-last", "lazy": "off", **sections.pop("graph", {})}
    raw = {"model": str(checkpoint), "parallel": {"tp": 2, "dp": 2}, "graph": graph, **sections}
    return make_config(raw)


def buckets_of(report: dict[str, Any]) -> list[list[int]]:
    """Return the buckets of the plan in ``report``, which has only one family."""
    return [plan["families"][0]["buckets"] for plan in report["plans"]]


def test_the_report_has_nodes_and_the_requests_that_fit(checkpoint: Path) -> None:
    config = make(checkpoint, parallel={"tp": 2, "dp": 5}, kv={"num_blocks": 33, "block_size": 128})

    report = plan_report(config)

    # Each of five data-parallel ranks has 33 blocks, of which requests can use 32.
    assert report["kv"]["requests"] == [
        {"tokens": 1024, "requests": 5 * 4},
        {"tokens": 2048, "requests": 5 * 2},
    ]
    assert (report["nodes"], report["node_npus"]) == (2, 8)  # the plan needs ten NPUs
    console = Console(file=io.StringIO(), width=200)
    render_plan(report, console)
    shown = console.file.getvalue()
    assert "in 5 lockstep groups, on at least 2 nodes of 8 NPUs" in shown
    assert "20 of 1024 tokens; 10 of 2048 tokens" in shown
    assert report["kv"]["all_tokens"] == 5 * 32 * 128
    assert "20480 tokens on all data parallel ranks" in shown
    assert report["memory"]["weight_bytes"] == 3_401_216
    assert "0.03 GiB on all 10 NPUs" in shown
    # Memory decides whether a model fits, so the report begins with memory.
    assert shown.index("memory of each NPU") < shown.index("Graphs: ")


def test_the_report_prices_buckets_for_each_rank(checkpoint: Path) -> None:
    report = plan_report(make(checkpoint))

    assert report["layout"]["lockstep_groups"] == [[0, 1], [2, 3]]
    assert buckets_of(report) == [[1, 2, 4, 8, 16, 24, 32]] * 2
    # With tp 2 and dp 2, a graph needs 1 + 2 x 2 streams. In addition, the plan counts 40 streams
    # for tp and 40 for dp, for any number of graphs.
    assert report["graph"]["families"][0]["price_per_bucket"] == 5
    assert report["graph"]["fixed_price"] == 80
    rank = report["ranks"][3]
    # The runtime uses 34 streams, and the communication domain uses 2 streams.
    assert rank["usable"] == 2048 - sum(rank["taken"].values()) == 2048 - 36
    assert rank["planned_streams"] == 80 + 7 * 5
    assert rank["left_streams"] == rank["usable"] - rank["planned_streams"]
    assert rank["domains"] == [[2, 3]]


def test_kv_blocks_come_from_memory_or_from_the_configuration(checkpoint: Path) -> None:
    # A block has 4 layers x 2 (keys and values) x 128 tokens x 1 head x 64 x 2 bytes.
    by_use = plan_report(make(checkpoint))["kv"]
    by_memory = plan_report(make(checkpoint, kv={"max_bytes": 5_000_000}))["kv"]
    by_number = plan_report(make(checkpoint, kv={"num_blocks": 10}))["kv"]

    assert by_memory["bytes_per_block"] == 131072
    # enough for all requests at their maximum length
    assert by_use["num_blocks"] == 32 * (2048 // 128) + 1
    assert by_memory["num_blocks"] == 5_000_000 // 131072
    assert by_number["bytes"] == 10 * 131072 and by_number["tokens"] == 9 * 128


def test_copies_of_a_block_take_the_bytes_of_all_ranks_with_different_heads(
    checkpoint: Path,
) -> None:
    def copies(tp: int, **kv: Any) -> dict[str, Any]:
        kv = {"disk": "/x", "disk_gib": 2.0, **kv}
        return plan_report(make(checkpoint, parallel={"tp": tp, "dp": 1}, kv=kv))["kv"]["copies"]

    # There are two heads. Two ranks have one head each. Four ranks have two copies of each head;
    # these copies add no bytes. A file has 36 bytes more than its block.
    tokens = (1 << 30) // (2 * (131072 + 36)) * 128
    assert copies(2, host_gib=1.0)["memory"] == {"tokens": tokens}
    assert copies(4, host_gib=1.0)["memory"] == {"tokens": tokens}
    assert set(copies(2)) == {"disk"}


def test_the_report_says_what_hixl_needs(checkpoint: Path) -> None:
    def report(**kv: Any) -> tuple[dict[str, Any], str]:
        parallel = {"tp": 2, "dp": 2, "prefill_groups": 1}
        found = plan_report(make(checkpoint, parallel=parallel, kv={"host_gib": 1.0, **kv}))
        out = io.StringIO()
        render_plan(found, Console(file=out, width=300))
        return found, out.getvalue()

    sockets, text = report()
    assert sockets["kv"]["hixl"] is None and "HIXL" not in text
    hixl, text = report(transport="hixl", closed_network=True)
    assert hixl["kv"]["hixl"] == {"streams": 40, "host_bytes": 512 << 20}
    assert "40 streams of each rank are reserved for links" in text and "512 MiB" in text
    before, after = (each["ranks"][0] for each in (sockets, hixl))
    assert after["reserve"] == before["reserve"] + 40
    assert after["usable"] == before["usable"] - 40


@pytest.mark.parametrize(("tp", "node_npus", "files"), [(2, 1, 1), (4, 2, 1), (4, 3, 2)])
def test_a_node_keeps_only_the_copies_of_its_own_ranks(
    checkpoint: Path, tp: int, node_npus: int, files: int
) -> None:
    config = make(
        checkpoint,
        parallel={"tp": tp, "dp": 1},
        kv={"host_gib": 1.0},
        device={"node_npus": node_npus},
    )
    copies = plan_report(config)["kv"]["copies"]
    assert copies["memory"] == {"tokens": (1 << 30) // (files * (131072 + 36)) * 128}


def test_without_copies_a_plan_has_none(checkpoint: Path) -> None:
    assert plan_report(make(checkpoint))["kv"]["copies"] == {}


def test_room_for_contexts_is_compared_with_that_of_the_same_npus_without_sharing(
    checkpoint: Path,
) -> None:
    shared = {"tp": 4, "pcp": 2, "dcp": 4}
    report = plan_report(make(checkpoint, parallel=shared, kv={"num_blocks": 10}))
    context = report["context"]
    rows = [
        [each[key] for key in ("pcp", "dcp", "dp", "tokens", "longest", "requests")]
        for each in context["layouts"]
    ]

    assert report["kv"]["tokens"] == 9 * 128 * 4
    assert context["request_tokens"] == 2048  # the model's maximum context length
    assert rows == [[2, 4, 1, 9 * 128 * 4, 2048, 2], [1, 1, 2, 9 * 128, 9 * 128 + 1, 0]]
    assert plan_report(make(checkpoint))["context"] is None


def test_one_poor_rank_shrinks_every_group_in_cluster_scope_only(checkpoint: Path) -> None:
    emulator = {"streams_by_rank": {3: 36 + 3}}
    buckets = {}
    for scope in ("cluster", "group"):
        config = make(checkpoint, device={"emulator": emulator}, graph={"scope": scope})
        buckets[scope] = buckets_of(plan_report(config))

    assert buckets["cluster"] == [[4, 16, 32]] * 2
    assert buckets["group"] == [[1, 2, 4, 8, 16, 24, 32], [4, 16, 32]]


def test_the_report_compares_padding_with_all_sizes_and_with_uniform_ones(
    checkpoint: Path, tmp_path: Path
) -> None:
    config = make(
        checkpoint,
        graph={
            "mode": "FULL_AND_PIECEWISE",
            "budget_model": "cann-pinned",
            "traffic": {3: 9, 30: 1},
        },
        device={"emulator": {"streams": 36 + 100}},
    )

    report = plan_report(config)

    decode, mixed = report["plans"][0]["families"]
    for family in (decode, mixed):
        every, chosen, uniform = (family["sets"][name] for name in (ALL_SIZES, CHOSEN, UNIFORM))
        assert len(chosen["buckets"]) == len(uniform["buckets"]) < len(every["buckets"])
        assert 0 < every["padding_share"] < chosen["padding_share"] < uniform["padding_share"] < 1
    assert 4 in decode["buckets"]
    picture = tmp_path / "padding.png"
    plot_padding(report, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = io.StringIO()
    render_plan(report, Console(file=out, width=200))
    assert "padding of the configured traffic: chosen" in out.getvalue()


def test_a_plot_needs_graphs_and_a_place(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no padding to draw"):
        plot_padding(plan_report(make(checkpoint, graph={"mode": "NONE"})), tmp_path / "x.png")
    with pytest.raises(ConfigError, match="cannot write the plot"):
        plot_padding(plan_report(make(checkpoint)), tmp_path / "nowhere" / "x.png")


def test_room_is_kept_for_lazy_graphs_and_shown(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        graph={"lazy": "decode", "budget_model": "cann-pinned", "lazy_capacity": 5},
        device={"emulator": {"streams": 36 + 40}},
    )

    report = plan_report(config)

    # Each lazy graph needs 4 stream ids. At most a quarter of the 40 ids is reserved, which is
    # enough for two graphs.
    assert report["graph"]["lazy_capacity"] == 2
    assert report["ranks"][0]["reserve"] == 8
    assert report["ranks"][0]["planned_streams"] <= 32


def test_a_rank_that_affords_nothing_is_an_error(checkpoint: Path) -> None:
    with pytest.raises(StreamBudgetError, match="rank 0 offers 0 streams"):
        emulator = {"streams": 60}
        plan_report(make(checkpoint, device={"emulator": emulator}, graph={"reserve_streams": 60}))


def test_without_graphs_the_report_still_counts_blocks(checkpoint: Path) -> None:
    report = plan_report(make(checkpoint, graph={"mode": "NONE"}))

    assert report["plans"][0]["families"] == []
    assert report["ranks"][0]["planned_streams"] == 0
    assert report["kv"]["num_blocks"] > 0


def test_the_report_is_json_and_renders_as_text(checkpoint: Path) -> None:
    report = plan_report(make(checkpoint, device={"kind": "npu"}))
    out = io.StringIO()

    render_plan(json.loads(json.dumps(report)), Console(file=out, width=160))

    text = out.getvalue()
    assert "buckets 1, 2, 4, 8, 16, 24, 32" in text
    assert "assumed: each NPU has 2048 streams" in text
    assert "all 7 full decode sizes fit" in text


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (None, "no such directory"),
        ("", "is not JSON"),
        ("[]", "must hold an object"),
        ("{}", "has neither architectures nor model_type"),
        ("missing", "cannot read"),
    ],
)
def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path, write, message: str) -> None:
    directory = tmp_path / "model"
    if write is not None:
        directory.mkdir()
        if write != "missing":
            (directory / "config.json").write_text(write)

    with pytest.raises((ConfigError, ModelError), match=message):
        plan_report(make_config({"model": str(directory)}))


def test_hundreds_of_equal_ranks_are_shown_in_a_few_lines_without_comparing_each_with_each(
    checkpoint: Path,
) -> None:
    def show(dp: int) -> tuple[str, int]:
        """Return the text of a plan with ``dp`` data-parallel ranks, and the number of function
        calls that made it.
        """
        config = make(
            checkpoint,
            parallel={"tp": 2, "dp": dp},
            graph={"scope": "group"},
            device={"emulator": {"streams_by_rank": {3: 36 + 3}}},
        )
        out, calls = io.StringIO(), Counter[str]()
        sys.setprofile(lambda frame, event, argument: calls.update([event]))
        try:
            render_plan(plan_report(config), Console(file=out, width=160))
        finally:
            sys.setprofile(None)
        return out.getvalue(), calls.total()

    _, of_few = show(32)
    text, of_many = show(256)

    assert "Groups 0, 2-255: plan" in text and "Group 1: plan" in text
    assert "0-1, 4-511" in text
    assert len(text.splitlines()) < 45
    assert of_many < 2 * 8 * of_few


EXPERTS = {
    "architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 64, "num_experts_per_tok": 4,
    "n_shared_experts": 1, "moe_intermediate_size": 16, "hidden_size": 4096,
}  # fmt: skip


def make_spread(checkpoint: Path, mc2_buffer_mb: int = 100, **parallel: Any) -> Config:
    (checkpoint / "config.json").write_text(json.dumps(SHAPE | EXPERTS))
    config = make(checkpoint)
    spread = config.parallel.model_copy(update={"tp": 2, "dp": 8, "ep": 16, **parallel})
    device = config.device.model_copy(update={"mc2_buffer_mb": mc2_buffer_mb})
    return config.model_copy(update={"parallel": spread, "device": device})


def test_the_report_says_how_tokens_travel_to_their_experts_and_why(checkpoint: Path) -> None:
    report = plan_report(make_spread(checkpoint))
    out = io.StringIO()
    render_plan(report, Console(file=out, width=200))

    # With 12 rows or more, MC2 saves at least 2 MiB of traffic. With 171 rows, MC2's buffer would
    # need 171 x (64 + 4) x 8320 bytes + 8 MB, which is more than 100 MB.
    kinds = [(entry["first"], entry["last"], entry["kind"]) for entry in report["exchanges"]]
    assert kinds == [(1, 22, "all_gather"), (23, 340, "mc2"), (341, 512, "all_to_all")]
    assert "Experts for 341 to 512 tokens: all_to_all; it moves" in out.getvalue()
    assert "not mc2: device.mc2_buffer_mb is 100; 171 tokens of one rank need 101" in out.getvalue()
    assert "Experts for 23 to 340 tokens: mc2 (hierarchy); it moves" in out.getvalue()


def test_a_dense_model_reports_no_exchanges(checkpoint: Path) -> None:
    assert plan_report(make(checkpoint))["exchanges"] == []


def test_a_plan_refuses_an_mc2_that_its_buffer_does_not_hold(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="mc2_buffer_mb is 100; 256 tokens of one rank need"):
        plan_report(make_spread(checkpoint, exchange="mc2"))


def test_shared_experts_beside_the_others_cost_a_stream(checkpoint: Path) -> None:
    config = make_spread(checkpoint)
    graph = config.graph.model_copy(update={"budget_model": "cann-pinned"})
    prices = []
    for overlaps in (False, True):
        wanted = graph.model_copy(update={"overlap_shared_experts": overlaps})
        report = plan_report(config.model_copy(update={"graph": wanted}))
        prices.append(report["graph"]["families"][0]["price_per_bucket"])
        assert (
            any(t["name"].endswith("overlap") for t in report["graph"]["families"][0]["terms"])
            == overlaps
        )

    assert prices[1] == prices[0] + 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba"] * 4}, "Mamba"),
        ({"architectures": ["Gemma2ForCausalLM"]}, "Gemma2ForCausalLM is not supported"),
        ({"vocab_size": None}, "lacks the key vocab_size"),
        ({"hidden_act": "gelu"}, "hidden_act gelu is not supported"),
    ],
)
def test_a_plan_refuses_models_that_cannot_be_served(
    checkpoint: Path, keys: dict[str, Any], message: str
) -> None:
    (checkpoint / "config.json").write_text(json.dumps(SHAPE | keys))

    with pytest.raises(ModelError, match=message):
        plan_report(make(checkpoint))


def test_offers_and_blocks_share_the_memory_without_weights_and_buffers(checkpoint: Path) -> None:
    poor = {"memory_mb_by_rank": {1: 64}, "memory_mb": 128}
    report = plan_report(make(checkpoint, device={"emulator": poor}))
    memory = {part["name"]: part["bytes"] for part in report["memory"]["parts"]}

    graphs_and_blocks = ("graphs", "KV blocks")
    fixed = sum(count for name, count in memory.items() if name not in graphs_and_blocks)
    assert report["memory"]["device_bytes"] == 64 << 20
    assert [rank["free_bytes"] + fixed for rank in report["ranks"]] == [
        mb << 20 for mb in (128, 64, 128, 128)
    ]
    left = (64 << 20) - fixed - memory["graphs"]
    assert report["kv"]["num_blocks"] == int(left * 0.9) // 131072


def test_weights_that_an_emulated_npu_does_not_hold_are_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps(SHAPE | {"vocab_size": 200_000}))
    with pytest.raises(ConfigError, match=r"which has 0\.06; weights .*: raise parallel\.tp, or"):
        plan_report(make(checkpoint, device={"emulator": {"memory_mb_by_rank": {3: 64}}}))


# The sizes of Qwen3-Next-80B-A3B: 36 of 48 layers have linear attention.
HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"], "vocab_size": 151936, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "hidden_size": 2048,
    "intermediate_size": 5120, "num_experts": 512, "num_experts_per_tok": 10,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "max_position_embeddings": 262144,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
LARGE = {"emulator": {"memory_mb": 60 << 10}}


def plan_hybrid(checkpoint: Path, tp: int, drafts: int, rows: int = 32, **kv: Any) -> Any:
    (checkpoint / "config.json").write_text(json.dumps(HYBRID))
    return plan_report(
        make(
            checkpoint, parallel={"tp": tp, "ep": tp}, speculative={"num_tokens": drafts},
            scheduler={"max_num_seqs": rows, "max_num_batched_tokens": 4096}, device=LARGE, kv=kv,
        )
    )  # fmt: skip


@pytest.mark.parametrize(("tp", "drafts"), [(4, 0), (8, 0), (8, 3)])
def test_the_report_has_the_states_of_linear_attention(
    checkpoint: Path, tp: int, drafts: int
) -> None:
    report = plan_hybrid(checkpoint, tp, drafts, checkpoints=10)

    slots = 1 + 32 * (drafts + 1) + 10
    # For each of 36 layers, a slot has 3 inputs of 8192 channels, and 32 matrices of 128 x 128, in
    # bfloat16.
    slot = 36 * (8192 * 3 + 32 * 128 * 128) * 2 // tp
    assert report["states"] == {
        "num_slots": slots, "bytes_per_slot": slot, "bytes": slots * slot,
        "num_requests": 32, "slots_per_request": drafts + 1, "num_checkpoints": 10,
    }  # fmt: skip
    memory = report["memory"]
    parts = {part["name"]: part["bytes"] for part in memory["parts"]}
    assert parts["states"] == slots * slot
    assert parts["KV blocks"] == report["kv"]["bytes"]
    assert report["kv"]["bytes"] == report["kv"]["num_blocks"] * report["kv"]["bytes_per_block"]
    assert sum(parts.values()) + memory["left_bytes"] == memory["device_bytes"]
    console = Console(file=io.StringIO(), width=200)
    render_plan(report, console)
    shown = console.file.getvalue()
    assert f"States per NPU: {slots} slots of {slot} bytes" in shown
    assert f"{drafts + 1} for each of 32 requests, 10 checkpoints, 1 for padding" in shown


def test_states_that_do_not_fit_are_refused(checkpoint: Path) -> None:
    message = r"states of 9879552 bytes do not fit in .*: lower scheduler.max_num_seqs"
    with pytest.raises(ConfigError, match=message):
        plan_hybrid(checkpoint, 4, 0, rows=4096)


def test_a_model_without_states_reports_none(checkpoint: Path) -> None:
    assert plan_report(make(checkpoint))["states"] is None


def test_the_report_is_json_where_some_layers_have_a_sliding_window(checkpoint: Path) -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}
    (checkpoint / "config.json").write_text(json.dumps(SHAPE | windows))

    report = json.loads(json.dumps(plan_report(make(checkpoint))))

    assert report["model"]["window"]["layers"] == [2, 3]

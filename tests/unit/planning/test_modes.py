"""For any requested graph mode, the chosen mode is possible for the model, and the reasons explain
each change of the mode.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import GraphMode, make_config
from dist_aclgraph.environment import is_soft_partition, launch_blocking
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.modes import (
    GraphSupport,
    check_partition,
    normalise_mode,
    with_possible_mode,
)
from dist_aclgraph.shapes.model_facts import read_model_facts

modes = st.sampled_from(get_args(GraphMode))
supports = st.builds(
    GraphSupport,
    attention_updates=st.sampled_from(["any", "uniform"]),
    is_encoder_decoder=st.booleans(),
    shares_context=st.booleans(),
)


def can_have(mode: GraphMode, support: GraphSupport) -> bool:
    """Return whether a model supports a mode, by rules that do not use the tested code."""
    updates = "none" if support.is_encoder_decoder else support.attention_updates
    return {
        "NONE": True,
        "PIECEWISE": True,
        "FULL": updates == "any" and not support.shares_context,
        "FULL_DECODE_ONLY": updates != "none",
        "FULL_AND_PIECEWISE": updates != "none",
    }[mode]


@given(modes, supports)
def test_the_mode_can_be_had_and_changes_only_where_it_must(wanted, support) -> None:
    mode, reasons = normalise_mode(wanted, support)

    assert can_have(mode, support)
    assert (mode == wanted) == can_have(wanted, support) == (not reasons)
    assert normalise_mode(mode, support) == (mode, ())


@given(modes, supports)
def test_graphs_are_given_up_only_where_no_mode_has_any(wanted, support) -> None:
    mode, _ = normalise_mode(wanted, support)

    others = [m for m in get_args(GraphMode) if m != "NONE" and can_have(m, support)]
    assert wanted == "NONE" or mode != "NONE" or not others


@pytest.mark.parametrize("parallel", [{"pcp": 2}, {"tp": 2, "dcp": 2}])
def test_prompts_of_ranks_that_share_contexts_stay_out_of_full_graphs(
    parallel: dict[str, int],
) -> None:
    directory = Path(__file__).parents[3] / "configs" / "shapes" / "qwen3-235b-a22b"
    raw = {"model": str(directory), "graph": {"mode": "FULL"}, "parallel": parallel}

    config, reasons = with_possible_mode(make_config(raw), read_model_facts(directory))

    assert config.graph.mode == "FULL_AND_PIECEWISE"
    assert len(reasons) == 1 and "with parallel.dcp or parallel.pcp above 1" in reasons[0]


def test_a_checkpoint_with_latent_attention_is_known_by_its_facts() -> None:
    directory = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v3"
    config = make_config({"model": str(directory), "graph": {"mode": "FULL"}})

    config, reasons = with_possible_mode(config, read_model_facts(directory))

    assert config.graph.mode == "FULL_AND_PIECEWISE"
    assert len(reasons) == 1


def test_sizes_of_full_graphs_become_those_of_both_kinds() -> None:
    directory = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v3"
    graph = {"mode": "FULL", "sizes": [4, 64, 256], "traffic": {2: 1.0, 200: 0.5}}
    raw = {"model": str(directory), "graph": graph, "scheduler": {"max_num_seqs": 100}}

    config, _ = with_possible_mode(make_config(raw), read_model_facts(directory))
    few = {**raw, "graph": {"mode": "FULL", "sizes": [256]}}
    large, _ = with_possible_mode(make_config(few), read_model_facts(directory))

    assert (config.graph.sizes, config.graph.mixed_sizes) == ((4, 64), (4, 64, 256))
    assert config.graph.mixed_traffic == config.graph.traffic == {2: 1.0, 200: 0.5}
    assert (large.graph.sizes, large.graph.mixed_sizes) == (None, (256,))


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("deepseek-v3", {}, "latent attention accepts no mask"),
        ("deepseek-v3.2", {}, "reads lengths on the device"),
        ("gpt-oss-120b", {}, "sliding window"),
        # The requests are so short that no window hides a key. Lengths are sent only because of
        # sinks.
        ("gpt-oss-120b", {"max_model_len": 128}, "sinks"),
        ("qwen3-235b-a22b", {"kv": {"block_size": 640}}, "at most 512, not 640"),
        ("qwen3-235b-a22b", {"recovery": {"exact": True}}, "recovery.exact"),
        ("qwen3-235b-a22b", {"parallel": {"tp": 8, "dcp": 2}}, "parallel.dcp"),
        ("qwen3-235b-a22b", {"graph": {"mode": "FULL", "updates": "none"}}, "graph.mode FULL"),
        ("qwen3-235b-a22b", {}, None),
    ],
)
def test_lengths_are_sent_where_a_mask_cannot_replace_them(
    model: str, changes: dict[str, Any], reason: str | None
) -> None:
    directory = Path(__file__).parents[3] / "configs" / "shapes" / model
    raw = {"model": str(directory), "graph": {"updates": "none"}, **changes}

    config, reasons = with_possible_mode(make_config(raw), read_model_facts(directory))

    assert config.graph.updates == ("sent" if reason else "none")
    assert len(reasons) == bool(reason) and all(reason in each for each in reasons if reason)


def test_sparse_attention_takes_mixed_batches_whole() -> None:
    directory = Path(__file__).parents[3] / "configs" / "shapes" / "deepseek-v3.2"
    config = make_config({"model": str(directory), "graph": {"mode": "FULL"}})

    config, reasons = with_possible_mode(config, read_model_facts(directory))

    assert (config.graph.mode, reasons) == ("FULL", ())


def test_mla_takes_decode_batches_whole_and_mixed_ones_in_pieces() -> None:
    mla = GraphSupport(attention_updates="uniform")

    assert normalise_mode("FULL", mla) == (
        "FULL_AND_PIECEWISE",
        (
            "graph.mode is FULL_AND_PIECEWISE instead of FULL: captured attention of this model "
            "takes requests of equal lengths only",
        ),
    )


def test_blocking_launches_exclude_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")

    assert launch_blocking()
    with pytest.raises(ConfigError, match="ASCEND_LAUNCH_BLOCKING is 1"):
        normalise_mode("FULL", GraphSupport(), launch_blocking=launch_blocking())
    assert normalise_mode("NONE", GraphSupport(), launch_blocking=True) == ("NONE", ())
    monkeypatch.delenv("ASCEND_LAUNCH_BLOCKING")
    assert not launch_blocking()


def test_full_graphs_are_refused_on_a_soft_partition() -> None:
    with pytest.raises(ConfigError, match=r"\(ENPU_ENABLE\) and graph.mode is FULL_DECODE_ONLY"):
        check_partition("FULL_DECODE_ONLY", is_soft=True)

    check_partition("FULL_DECODE_ONLY", is_soft=False)
    check_partition("PIECEWISE", is_soft=True)


def test_a_soft_partition_is_found_by_the_variable_that_its_library_sets() -> None:
    assert not is_soft_partition()
    libc = ctypes.CDLL(None)
    libc.setenv(b"ENPU_ENABLE", b"True", 1)
    try:
        assert "ENPU_ENABLE" not in os.environ
        assert is_soft_partition()
    finally:
        libc.unsetenv(b"ENPU_ENABLE")

"""The exchange of tokens with experts: the choice of its kind, the capacity of an all-to-all, and
MC2's buffer.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.config import Mc2Algorithm, make_config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.chip import Chip
from dist_aclgraph.planning.exchange import ExchangeRule, expert_capacity
from dist_aclgraph.planning.mc2 import MC2_OPERATORS, Mc2, Mc2Batch, Mc2Operators
from dist_aclgraph.shapes.model_facts import ExpertFacts, ModelFacts

A2, A3 = Chip("Ascend910B1", "9.1.0"), Chip("Ascend910_9391", "9.1.0")
DEEPSEEK_V3 = Mc2(
    ep=32,
    num_experts=256,
    top_k=8,
    hidden=7168,
    element_bytes=2,
    chip=A2,
    expansion="FFTS",
    node_npus=8,
    buffer_mb=4096,
    algorithm="fullmesh",
)


def make_rule(
    setting: str = "auto", max_tokens: int = 4096, tp: int = 8, **mc2: Any
) -> ExchangeRule:
    return ExchangeRule(
        tp=tp,
        mc2=replace(DEEPSEEK_V3, **mc2),
        setting=setting,  # type: ignore[arg-type]
        capacity_factor=2.0,
        max_tokens=max_tokens,
    )


def make_facts(num_experts: int = 256) -> ModelFacts:
    return ModelFacts(
        architecture="DeepseekV3ForCausalLM",
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=128,
        context_len=4096,
        hidden_size=7168,
        experts=ExpertFacts(num_experts=num_experts, top_k=8) if num_experts else None,
    )


def rule_of(
    facts: ModelFacts,
    buffer_mb: int | None = 200,
    node_npus: int | None = None,
    **parallel: Any,
) -> ExchangeRule:
    device = {"mc2_buffer_mb": buffer_mb, "node_npus": node_npus}
    config = make_config({"model": "unused", "device": device})
    wanted = config.parallel.model_copy(update={"tp": 8, "dp": 4, "ep": 32, **parallel})
    config = config.model_copy(update={"parallel": wanted})
    return ExchangeRule.from_config(config, facts, A2)


rules = st.builds(
    make_rule,
    tp=st.sampled_from([1, 2, 8]),
    ep=st.sampled_from([2, 8, 16, 32, 64]),
    num_experts=st.sampled_from([64, 128, 256]),
    top_k=st.integers(1, 10),
    hidden=st.sampled_from([1024, 2048, 7168]),
    chip=st.sampled_from([Chip(name, "9.1.0") for name in ("Ascend910B1", A3.name, "Ascend950")]),
    node_npus=st.sampled_from([8, 16]),
    buffer_mb=st.integers(50, 4000),
    algorithm=st.sampled_from(["auto", "fullmesh", "hierarchy"]),
)


# ---- the capacity of an all-to-all


@given(st.integers(1, 4096), st.integers(2, 256), st.integers(1, 16), st.floats(1, 4))
def test_capacity_holds_balanced_routing_and_never_more_than_all(
    num_rows: int, ep: int, top_k: int, factor: float
) -> None:
    capacity = expert_capacity(num_rows, ep, top_k, factor)

    # With balanced routing, the experts of a token are on ``distinct`` ranks on average.
    distinct = ep * (1 - (1 - 1 / ep) ** top_k)
    assert num_rows * distinct / ep - 1e-6 <= capacity <= num_rows
    assert capacity <= expert_capacity(num_rows + 1, ep, top_k, factor) <= capacity + 4


def test_capacity_of_few_tokens_is_all_of_them() -> None:
    assert [expert_capacity(n, 32, 8, 1.0) for n in (1, 7, 16, 17)] == [1, 7, 16, 16]
    assert expert_capacity(512, 32, 8, 2.0) == 230  # 512 * (1 - (31/32)^8) = 114.8


# ---- MC2's buffer


@pytest.mark.parametrize(
    ("chip", "algorithm", "needed_mb"),
    [
        # The buffer needs 2 x 512 x (16 x 8 x 4608 + 8 x 4096) bytes.
        (A3, "fullmesh", 609),
        # The buffer needs 2 x (512 x 16 x 8 x 4096 bytes + 2 MiB).
        (A2, "fullmesh", 517),
        # The buffer needs (128 + 16 / 4) x 512 x (4096 + 128) bytes + 8 MiB.
        (A2, "hierarchy", 281),
    ],
)
def test_mc2_asks_for_the_buffer_that_its_operator_states(
    chip: Chip, algorithm: Mc2Algorithm, needed_mb: int
) -> None:
    mc2 = replace(DEEPSEEK_V3, chip=chip, algorithm=algorithm, hidden=2048, ep=16, num_experts=128)

    assert mc2.needed_mb(512) == needed_mb


traffics = st.builds(
    Mc2Batch,
    num_rows=st.integers(1, 512),
    hidden=st.integers(1, 8192),
    ep=st.integers(2, 64),
    num_local=st.integers(1, 64),
    top_k=st.just(8),
)


@given(traffics, st.sampled_from(MC2_OPERATORS))
def test_mc2_buffer_grows_with_rows_and_experts_and_holds_the_tokens(
    traffic: Mc2Batch, operators: Mc2Operators
) -> None:
    rows, hidden, ep, num_local, top_k = traffic
    needed = operators.buffer_bytes

    assert needed(traffic) <= needed(traffic._replace(num_rows=rows + 1))
    assert needed(traffic) <= needed(traffic._replace(num_local=num_local + 1))
    assert needed(traffic) > rows * 2 * hidden * ep * min(num_local, top_k)


def test_an_explicit_mc2_with_too_small_a_buffer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mc2_buffer_mb is 200; 64 tokens of one rank need 242"):
        rule_of(make_facts(), exchange="mc2")

    rule = rule_of(make_facts(), buffer_mb=242, exchange="mc2")
    assert rule.choose(512) == "mc2"


def test_mc2_has_by_default_the_buffer_of_its_largest_batch() -> None:
    rule = rule_of(make_facts(), buffer_mb=None, exchange="mc2")

    assert rule.choose(512) == "mc2"
    assert rule.mc2_buffer_mb == 242
    assert replace(rule, max_tokens=1024).mc2_buffer_mb == 475
    assert rule_of(make_facts(), buffer_mb=600, exchange="mc2").mc2_buffer_mb == 600


@pytest.mark.parametrize("setting", ["all_gather", "all_to_all"])
def test_where_nothing_travels_by_mc2_it_has_no_buffer(setting: str) -> None:
    assert make_rule(setting).mc2_buffer_mb is None
    assert rule_of(make_facts(), ep=1).mc2_buffer_mb is None


def test_auto_falls_back_where_the_buffer_ends_and_says_so() -> None:
    decision = make_rule(buffer_mb=200).decide(512)

    assert decision.kind == "all_to_all"
    assert "device.mc2_buffer_mb is 200; 64 tokens of one rank need 453" in decision.reason


# ---- MC2's algorithm


@pytest.mark.parametrize(
    ("chip", "ep", "algorithm"),
    [
        (A2, 8, "fullmesh"),
        (A2, 16, "hierarchy"),
        (A2, 64, "hierarchy"),
        (A2, 128, "fullmesh"),
        (A3, 32, "fullmesh"),
    ],
)
def test_several_nodes_of_a2_take_the_hierarchy_where_it_is_possible(
    chip: Chip, ep: int, algorithm: str
) -> None:
    operators = replace(DEEPSEEK_V3, chip=chip, ep=ep, algorithm="auto").operators

    assert operators is not None
    assert operators.algorithm == algorithm


@given(
    st.sampled_from([A2, A3]),
    st.sampled_from(["auto", "fullmesh", "hierarchy"]),
    st.sampled_from([8, 16, 32, 64, 128]),
    st.sampled_from([4, 8, 16]),
)
def test_nodes_that_an_algorithm_does_not_support_have_another_or_no_mc2(
    chip: Chip, algorithm: str, ep: int, node_npus: int
) -> None:
    rule = make_rule(algorithm=algorithm, chip=chip, ep=ep, node_npus=node_npus)

    assert rule.ranks_of_node in (None, node_npus)
    if algorithm == "auto":
        assert rule.mc2 is not None and rule.mc2.obstacle(1) is None


def test_a_configured_hierarchy_on_nodes_of_sixteen_npus_is_refused() -> None:
    hierarchy = {"node_npus": 16, "exchange": "mc2", "mc2_algorithm": "hierarchy"}
    with pytest.raises(
        ConfigError, match=r"16 NPUs on each node \(device\.node_npus\); A2 takes 8 with hierarchy"
    ):
        rule_of(make_facts(), buffer_mb=None, **hierarchy)

    rule = rule_of(make_facts(), buffer_mb=None, **hierarchy | {"mc2_algorithm": "auto"})
    assert rule.mc2 and rule.mc2.operators and rule.mc2.operators.algorithm == "fullmesh"


@pytest.mark.parametrize(("cann", "most"), [("9.1.0", 512), ("8.5.0", 256)])
def test_the_hierarchy_takes_more_tokens_with_cann_9(cann: str, most: int) -> None:
    mc2 = replace(DEEPSEEK_V3, chip=Chip(A2.name, cann), algorithm="hierarchy")

    assert mc2.obstacle(most) is None
    assert mc2.obstacle(most + 1) == f"{most + 1} tokens of one rank; A2 takes {most}"


# ---- the choice


def test_without_experts_of_other_ranks_nothing_travels() -> None:
    rule = rule_of(make_facts(), ep=1)

    assert {stretch.decision.kind for stretch in rule.stretches()} == {None}


def test_where_a_tensor_parallel_group_has_all_experts_one_sum_is_enough() -> None:
    assert {make_rule(tp=32).choose(n) for n in (1, 100, 4096)} == {"all_gather"}


def test_small_batches_gather_larger_ones_use_mc2_and_the_largest_an_all_to_all() -> None:
    kinds = [stretch.decision.kind for stretch in make_rule().stretches()]

    assert kinds == ["all_gather", "mc2", "all_to_all"]


@pytest.mark.parametrize("setting", ["all_gather", "all_to_all"])
def test_a_setting_decides_for_all_batches(setting: str) -> None:
    assert {s.decision.kind for s in make_rule(setting).stretches()} == {setting}


def test_batches_beyond_the_operators_of_a_configured_mc2_go_another_way() -> None:
    stretches = make_rule("mc2", buffer_mb=16384).stretches()

    assert [(s.first, s.last, s.decision.kind) for s in stretches] == [
        (1, 2048, "mc2"),
        (2049, 4096, "all_to_all"),
    ]


@pytest.mark.parametrize(
    ("why", "changed"),
    [
        ("limits on Ascend950 are not known", {"chip": Chip("Ascend950", "9.1.0")}),
        ("dtype is float32", {"element_bytes": 4}),
        ("hangs with device.hccl_expansion AIV", {"chip": A3, "expansion": "AIV"}),
        ("ep is 4; A2 takes multiples of 8", {"ep": 4, "chip": Chip("Ascend910B1", "8.5.0")}),
        ("parallel.ep is 24; A2 takes 2, 3, 4", {"ep": 24, "num_experts": 240}),
        ("ep is 8; A2 takes 16, 32, 64 with hierarchy", {"ep": 8, "algorithm": "hierarchy"}),
        ("mc2_algorithm is hierarchy; A3 takes fullmesh", {"chip": A3, "algorithm": "hierarchy"}),
        ("hidden size is 7200; A2 takes 32 to 7168 in steps of 32", {"hidden": 7200}),
        ("hidden size is 512; A3 takes 1024", {"chip": A3, "hidden": 512}),
        ("2048 experts, 8 for each token; it takes at most 1024", {"num_experts": 2048}),
        ("it pays from 16 ranks on", {"ep": 8, "num_experts": 64}),
        ("at most 24 experts each", {"num_experts": 1024}),
    ],
)
def test_the_decision_against_mc2_has_a_reason(why: str, changed: dict[str, Any]) -> None:
    decision = make_rule(**{"tp": 2, "buffer_mb": 65536, **changed}).decide(500)

    assert decision.kind != "mc2"
    assert why in decision.reason


@given(rules)
def test_mc2_is_taken_for_one_range_of_sizes_and_an_all_to_all_up_to_the_end(
    rule: ExchangeRule,
) -> None:
    rule = replace(rule, max_tokens=1200)
    kinds = [stretch.decision.kind for stretch in rule.stretches()]

    assert kinds.count("mc2") <= 1
    later = [kind for kind in kinds if kind != "mc2"]
    assert all(a != "all_to_all" for a, _ in pairwise(later))


@given(rules, st.integers(1, 8192))
def test_ranks_with_equal_numbers_choose_alike(rule: ExchangeRule, num_tokens: int) -> None:
    assert replace(rule).decide(num_tokens) == rule.decide(num_tokens)


@pytest.mark.parametrize(
    ("num_experts", "message"),
    [(0, "the model has no experts"), (250, "must divide the model's 250 experts")],
)
def test_experts_that_cannot_be_divided_are_refused(num_experts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rule_of(make_facts(num_experts))


def test_copies_of_experts_count_as_experts_of_mc2() -> None:
    rule = rule_of(make_facts(256), dp=40, ep=320, redundant_experts=64)

    assert rule.mc2 is not None
    assert (rule.mc2.num_experts, rule.mc2.num_local) == (320, 1)


def test_copies_without_ranks_that_share_experts_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"redundant_experts is 2 and parallel\.ep is 1"):
        rule_of(make_facts(256), ep=1, redundant_experts=2)


@pytest.mark.parametrize(
    ("algorithm", "setting", "ranks"),
    [("auto", "auto", 8), ("fullmesh", "auto", None), ("auto", "all_gather", None)],
)
def test_only_the_hierarchy_of_mc2_needs_eight_ranks_on_each_node(
    algorithm: str, setting: str, ranks: int | None
) -> None:
    assert make_rule(setting, algorithm=algorithm).ranks_of_node == ranks
    assert make_rule(setting, algorithm=algorithm, chip=A3).ranks_of_node is None

"""Whole simulations: the groups that are simulated, the end of a load, and comparisons."""

from __future__ import annotations

import io
import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dist_aclgraph.cli.plan_report import plan_report
from dist_aclgraph.cli.simulate import render_simulation
from dist_aclgraph.cli.simulate_plot import plot_simulation
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.planning.buckets import GraphFamily, candidate_families, lazy_families
from dist_aclgraph.planning.negotiation import keep_room, negotiate
from dist_aclgraph.simulate.compare import AS_SIMULATED, powers_of_two
from dist_aclgraph.simulate.deployment import AssumedDeployment
from dist_aclgraph.simulate.load_options import LoadOptions
from dist_aclgraph.simulate.simulation import group_kinds, simulate
from dist_aclgraph.simulate.times import StepTimes, line_times, read_times
from tests.unit.simulate.deployments import SHAPE, make

POISSON = LoadOptions(poisson=20.0, requests=60, prompt_tokens=20, output_tokens=10)


def run(config: Config, options: LoadOptions = POISSON, **fields: Any) -> dict[str, Any]:
    report = simulate(config, options, StepTimes(), **fields)
    assert report.pop("speed")["steps_per_s"] > 0
    return json.loads(json.dumps(report))


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["compare"]}


def test_equal_seeds_simulate_equally_and_others_do_not(checkpoint: Path) -> None:
    config = make(checkpoint)

    report = run(config)

    assert report == run(config)
    other = LoadOptions(poisson=20.0, requests=60, prompt_tokens=20, output_tokens=10, seed=1)
    assert report["groups"][0]["replays"] != run(config, other)["groups"][0]["replays"]


def test_one_group_stands_for_all_that_offer_the_same(checkpoint: Path) -> None:
    alone = run(make(checkpoint), LoadOptions(poisson=5.0, requests=15))
    report = run(make(checkpoint, parallel={"dp": 4}), LoadOptions(poisson=20.0, requests=60))

    (group,) = report["groups"]
    assert (report["num_groups"], group["stands_for"]) == (4, 4)
    assert "lockstep group 0 was simulated and stands for 4 groups" in str(report["assumptions"])
    # Each of the four groups gets a quarter of the load.
    assert group["requests"] == alone["groups"][0]["requests"]
    assert group["replays"] == alone["groups"][0]["replays"]
    assert report["overall"]["steps"] == 4 * alone["overall"]["steps"]


def test_groups_with_other_plans_are_simulated_too(checkpoint: Path) -> None:
    config = make(
        checkpoint,
        parallel={"dp": 5},
        device={"emulator": {"streams_by_rank": {1: 34 + 2, 4: 34 + 2}}},
        graph={"scope": "group"},
    )

    report = run(config)

    by_first = {group["group"]: group for group in report["groups"]}
    assert {first: group["stands_for"] for first, group in by_first.items()} == {0: 3, 1: 2}
    (version,) = by_first[1]["plan_versions"]
    assert len(version["families"]["full decode"]) == 2
    assert by_first[1]["streams"]["rank"] == 1
    assert report["overall"]["steps"] == sum(
        group["steps"] * group["stands_for"] for group in report["groups"]
    )


def test_requests_of_a_trace_are_dealt_in_turn(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{second},{4 + second % 3},2" for second in range(30)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    config = make(checkpoint, parallel={"dp": 3})

    every = run(config, LoadOptions(trace=path))["groups"][0]
    some = run(config, LoadOptions(trace=path, requests=7))["groups"][0]
    early = run(config, LoadOptions(trace=path, seconds=10.0))["groups"][0]

    assert every["requests"]["finished"] == 10
    assert every["eager_steps"] == {"prefill": 10}
    # The simulated group gets every third request. These requests have prompts of 4 tokens.
    assert {row["tokens"] for row in every["by_tokens"]} == {1, 4}
    assert some["requests"]["finished"] == 3
    assert early["requests"]["finished"] == 4


def test_each_group_gets_its_own_requests_of_a_trace(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{second},{4 + second % 2},1" for second in range(20)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]))
    config = make(
        checkpoint,
        parallel={"dp": 2},
        device={"emulator": {"streams_by_rank": {1: 34 + 2}}},
        graph={"scope": "group"},
    )

    groups = run(config, LoadOptions(trace=path))["groups"]

    tokens = {group["group"]: [row["tokens"] for row in group["by_tokens"]] for group in groups}
    assert tokens == {0: [4], 1: [5]}


@given(st.lists(st.integers(3, 9), min_size=1, max_size=6), st.integers(0, 3))
def test_equal_ranks_speak_through_the_first_of_them(have: list[int], lazy_capacity: int) -> None:
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(SHAPE))
        deployment = AssumedDeployment.from_config(
            make(
                Path(directory),
                parallel={"dp": len(have)},
                device={"emulator": {"streams_by_rank": {r: 34 + n for r, n in enumerate(have)}}},
                graph={"lazy": "decode", "lazy_capacity": lazy_capacity},
            )
        )
    config, model = deployment.config, deployment.budget_model

    found = deployment.planner.negotiate(deployment.offers)

    kept, capacity = keep_room(deployment.offers, lazy_families(config), lazy_capacity, model)
    assert (found.offers, found.lazy_capacity) == (kept, capacity)
    assert found.plan == negotiate(kept, candidate_families(config), model, max_num_seqs=8)


def test_the_plan_is_that_of_the_plan_command(checkpoint: Path) -> None:
    config = make(checkpoint, parallel={"dp": 3}, device={"emulator": {"streams": 34 + 3}})

    (kind,) = group_kinds(AssumedDeployment.from_config(config))

    hashes = {plan["hash"] for plan in plan_report(config)["plans"]}
    assert hashes == {kind.negotiated.plan.hash}


@pytest.mark.parametrize("scope", ["cluster", "group"])
def test_thousands_of_ranks_are_asked_once_for_each_kind(checkpoint: Path, scope: str) -> None:
    config = make(
        checkpoint,
        parallel={"tp": 2, "dp": 2048},
        device={"emulator": {"streams_by_rank": {77: 50, 4000: 60}}},
        graph={"scope": scope},
    )

    report = run(config, LoadOptions(poisson=4096.0, requests=8192))

    assert (report["num_ranks"], report["num_groups"]) == (4096, 2048)
    assert sum(group["stands_for"] for group in report["groups"]) == 2048
    assert len(report["groups"]) == (1 if scope == "cluster" else 3)
    assert all(group["requests"]["finished"] == 4 for group in report["groups"])
    tightest = {group["streams"]["rank"] for group in report["groups"]}
    assert tightest == ({77} if scope == "cluster" else {0, 77, 4000})


def test_the_same_batches_are_tried_with_other_graphs(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    batches = [{"decode": 3}] * 6 + [{"decode": 20}] * 3 + [{"tokens": 30}]
    path.write_text("\n".join(map(json.dumps, batches)))
    config = make(
        checkpoint,
        scheduler={"max_num_seqs": 32, "max_num_batched_tokens": 32},
        device={"emulator": {"streams": 34 + 2}},
        graph={"traffic": {3: 6, 20: 3}},
    )

    report = run(config, LoadOptions(trace=path), with_comparison=True)

    found = rows(report)
    padding = {name: row["padding_share"] for name, row in found.items()}
    # Six batches have 3 live tokens, and three batches have 20. The candidate sizes are 1, 2, 4, 8,
    # 16, 24, 32.
    chosen = 1 - 78 / (6 * 4 + 3 * 32)
    assert padding[AS_SIMULATED] == padding["first plan, held"] == chosen
    assert padding["powers of two"] == chosen
    assert padding["all sizes"] == 1 - 78 / (6 * 4 + 3 * 24)
    assert padding["as many, evenly by index"] == pytest.approx(1 - 78 / (9 * 32))
    assert [row["buckets"] for row in report["compare"][:5]] == [2, 2, 7, 2, 6]
    assert [row["is_affordable"] for row in report["compare"][:5]] == [
        True, True, False, True, False
    ]  # fmt: skip
    assert all(row["eager_step_share"] == 0.1 for row in report["compare"][:5])


def test_the_other_mode_is_negotiated_over_the_same_ranks(checkpoint: Path) -> None:
    decode = run(make(checkpoint), with_comparison=True)
    both = run(make(checkpoint, graph={"mode": "FULL_AND_PIECEWISE"}), with_comparison=True)

    assert rows(decode)["FULL_AND_PIECEWISE, held"]["eager_step_share"] == 0
    assert rows(decode)["first plan, held"]["eager_step_share"] > 0
    assert rows(both)["FULL_DECODE_ONLY, held"]["eager_step_share"] > 0
    assert rows(both)[AS_SIMULATED]["eager_step_share"] == 0


@pytest.mark.parametrize(
    ("query_len", "sizes", "powers"),
    [
        (1, (1, 24), (1, 2, 4, 8, 16, 24)),
        (1, (16,), (1, 2, 4, 8, 16)),
        (3, (30,), (3, 6, 12, 24, 30)),
    ],
)
def test_powers_of_two_hold_whole_requests_and_the_largest(query_len, sizes, powers) -> None:
    family = GraphFamily(run_mode="FULL", query_len=query_len, buckets=sizes)

    assert powers_of_two(family, 0) == powers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (LoadOptions(), "either --trace FILE or --poisson RATE"),
        (LoadOptions(trace=Path("x"), poisson=1.0), "either --trace FILE or --poisson RATE"),
        (LoadOptions(poisson=1.0, requests=1, seconds=1.0), "give one of them"),
        (LoadOptions(poisson=0.0), "--poisson is 0"),
        (LoadOptions(poisson=1.0, seconds=float("nan")), "--seconds is nan"),
        (LoadOptions(poisson=1.0, requests=0), "--requests is 0"),
        (LoadOptions(poisson=1.0, output_tokens=0.5), "--output-tokens is 0.5"),
        (LoadOptions(poisson=1.0, seed=-1), "--seed is -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(checkpoint: Path, options, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        run(make(checkpoint), options)


def test_a_trace_of_batches_ends_by_time_alone(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("decode\n" + "1\n" * 100)

    found = run(make(checkpoint), LoadOptions(trace=path, seconds=0.1))

    assert found["overall"]["steps"] == 10  # each step takes slightly more than ten milliseconds
    with pytest.raises(ConfigError, match="no --requests can end"):
        run(make(checkpoint), LoadOptions(trace=path, requests=3))


def test_progress_grows_to_the_end(checkpoint: Path) -> None:
    seen: list[float] = []

    run(make(checkpoint), LoadOptions(poisson=3.0, requests=60), on_progress=seen.append)

    assert len(seen) > 3
    assert seen == sorted(seen) and seen[0] >= 0 and 0.5 < seen[-1] <= 1


def test_without_graphs_all_runs_eagerly(checkpoint: Path) -> None:
    report = run(make(checkpoint, graph={"mode": "NONE"}), with_comparison=True)

    assert report["overall"]["eager_step_share"] == 1
    assert set(report["groups"][0]["eager_steps"]) == {"mode_none"}
    assert report["groups"][0]["streams"]["at_most"]["all"] == 0


@pytest.mark.parametrize("mode", ["NONE", "FULL_AND_PIECEWISE"])
def test_a_report_with_many_eager_tokens_names_the_comparison(checkpoint: Path, mode: str) -> None:
    out = io.StringIO()

    report = simulate(make(checkpoint, graph={"mode": mode}), POISSON, StepTimes())
    render_simulation(report, Console(file=out, width=160))

    assert ("100.0% of tokens run eagerly: --compare" in out.getvalue()) == (mode == "NONE")


def test_the_report_renders_as_text_and_as_a_picture(checkpoint: Path, tmp_path: Path) -> None:
    config = make(checkpoint, parallel={"dp": 2}, graph={"scope": "group"})
    report = simulate(config, POISSON, StepTimes(), with_comparison=True)
    out, picture = io.StringIO(), tmp_path / "x.png"

    render_simulation(report, Console(file=out, width=160))
    plot_simulation(report, picture)

    for words in (
        "step times are assumed",
        "stands for 2 groups",
        "powers of two",
        "steps/s",
        "first token after",
        "tokens/s",
    ):
        assert words in out.getvalue()
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match="cannot write the plot"):
        plot_simulation(report, tmp_path / "nowhere" / "x.png")


def test_times_are_a_line_or_those_of_a_report(tmp_path: Path) -> None:
    line = line_times(10.0, 0.5, 20.0)
    buckets = [
        {"mode": "FULL", "bucket": 8, "step_seconds": 0.2, "capture_seconds": 0.5},
        {"mode": "FULL", "bucket": 4, "step_seconds": 0.1, "capture_seconds": 1.5},
        {"mode": "FULL", "bucket": 2, "step_seconds": 0.0},
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"buckets": buckets}))
    measured = read_times(path, 20.0)
    path.write_text(json.dumps({"groups": [{"buckets": buckets[:1]}, {"buckets": buckets[1:]}]}))

    assert (line.step_s(4, "FULL"), line.capture_s) == (0.012, 0.02)
    assert "assumed, not measured" in line.in_words
    assert [measured.step_s(n, "FULL") for n in (4, 6, 8, 16)] == pytest.approx(
        [0.1, 0.15, 0.2, 0.4]
    )
    assert measured.step_s(6, "NONE") == pytest.approx(0.15)
    assert measured.capture_s == 1.0
    assert str(path) in measured.in_words
    assert read_times(path, 20.0).measured == measured.measured


def test_steps_without_a_graph_have_a_line_of_their_own(tmp_path: Path) -> None:
    bucket = {"mode": "FULL", "bucket": 8, "step_seconds": 0.2}
    times = {"steps": 30, "base_seconds": 0.01, "token_seconds": 0.001}
    slower = {"steps": 10, "base_seconds": 0.05, "token_seconds": 0.001}
    path = tmp_path / "report.json"
    groups = [
        {"buckets": [bucket], "eager_times": times},
        {"buckets": [], "eager_times": slower},
        {"buckets": [], "eager_times": {}},
    ]
    path.write_text(json.dumps({"groups": groups}))
    measured, assumed = read_times(path, 20.0), line_times(10.0, 0.5, 20.0, 4.0)

    assert measured.step_s(100, "NONE") == pytest.approx(0.02 + 0.1)
    assert measured.step_s(8, "FULL") == 0.2
    assert "takes 20 ms, and 1 ms for each token" in measured.in_words
    assert assumed.step_s(10, "NONE") == pytest.approx(0.004 + 0.005)
    assert assumed.step_s(10, "FULL") == pytest.approx(0.010 + 0.005)
    with pytest.raises(ConfigError, match="must take some time"):
        line_times(10.0, 0.5, 20.0, -4.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read"),
        ("{", "not JSON"),
        ("[]", "replayed nothing"),
        ('{"buckets": [{"mode": "FULL", "bucket": 4, "step_seconds": 0.0}]}', "replayed nothing"),
        ('{"buckets": [4]}', "no report of a deployment"),
        ('{"buckets": [{"bucket": 4, "step_seconds": 1.0}]}', "no report of a deployment"),
    ],
)
def test_a_file_that_is_not_a_report_is_refused(
    tmp_path: Path, text: str | None, words: str
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)

    with pytest.raises(ConfigError, match=words):
        read_times(path, 20.0)


def test_steps_must_take_time() -> None:
    for times in [(0.0, 0.0, 1.0), (-1.0, 2.0, 1.0), (1.0, 1.0, -1.0)]:
        with pytest.raises(ConfigError, match="must take some time"):
            line_times(*times)


def test_shared_prefixes_are_computed_once(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{second},40,1,32" for second in range(10)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,shared_tokens", *lines]))
    drawn = LoadOptions(poisson=20.0, requests=30, prompt_tokens=4, output_tokens=4)
    shared = LoadOptions(**{**asdict(drawn), "beginnings": 1, "beginning_tokens": 32})

    traced, alone, together = (
        run(make(checkpoint), load) for load in (LoadOptions(trace=path), drawn, shared)
    )

    assert [row["tokens"] for row in traced["groups"][0]["by_tokens"]] == [8, 32]
    assert traced["overall"]["live_tokens"] == 40 + 9 * 8
    more = together["overall"]["live_tokens"] - alone["overall"]["live_tokens"]
    assert more < 0.2 * 30 * 32
    assert "each prompt begins with 32 more tokens" in together["load"]


def with_drafts(directory: Path, num_drafts: int) -> Config:
    (directory / "config.json").write_text(json.dumps({**SHAPE, "num_nextn_predict_layers": 1}))
    return make(directory, speculative={"num_tokens": num_drafts}, scheduler={"steps_in_flight": 1})


def test_drafts_need_a_share_that_is_accepted(tmp_path: Path) -> None:
    config = with_drafts(tmp_path, 1)

    with pytest.raises(ConfigError, match=r"speculative.num_tokens is 1: give --accepted"):
        run(config, LoadOptions(poisson=1.0))
    with pytest.raises(ConfigError, match=r"--accepted is 1.5; it is a share"):
        run(config, LoadOptions(poisson=1.0, accepted=1.5))


@pytest.mark.parametrize(("accepted", "steps"), [(0.0, 1 + 12), (1.0, 1 + 4)])
def test_accepted_drafts_save_steps(tmp_path: Path, accepted: float, steps: int) -> None:
    config = with_drafts(tmp_path, 2)
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,13\n")

    report = run(config, LoadOptions(trace=path, accepted=accepted))

    assert report["groups"][0]["requests"]["generated_tokens"] == 13
    assert report["groups"][0]["steps"] == steps
    assert f"a draft is accepted with probability {accepted:g}" in str(report["assumptions"])


def test_drafts_are_accepted_as_often_as_given(tmp_path: Path) -> None:
    config = with_drafts(tmp_path, 2)
    load = LoadOptions(poisson=20.0, requests=300, prompt_tokens=20, output_tokens=40, accepted=0.7)

    (group,) = run(config, load)["groups"]

    # A verification of two drafts gives 1 + 0.7 + 0.49 tokens on average. The last verification of
    # a request may give fewer.
    replayed = sum(group["replays"].values())
    assert replayed > 100
    assert 1.9 < group["drafts"]["tokens_per_verification"] < 2.25

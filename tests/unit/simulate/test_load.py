"""Loads of simulations: valid lines of traces, errors for invalid lines, and the distribution of
drawn loads.
"""

from __future__ import annotations

import json
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_aclgraph.errors import ConfigError
from dist_aclgraph.simulate.load import MAX_LINE_BYTES, Arrival, Batch, Poisson, Trace


def trace(directory: Path, text: str | bytes) -> Trace:
    path = directory / "trace"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Trace(path)


def read(found: Trace) -> list[Any]:
    load = found.batches() if found.kind == "batches" else found.requests()
    items = list(load.begin())
    assert load.progress() == 1.0
    return items


def draw(seed: int = 0, **fields: Any) -> list[Arrival]:
    options = {
        "rate": 4.0,
        "prompt_tokens": 512.0,
        "output_tokens": 128.0,
        "max_total_tokens": 1 << 20,
        "max_requests": 20_000,
        "max_seconds": 1e9,
        **fields,
    }
    return list(Poisson(seed=(seed,), **options))


@pytest.mark.parametrize(
    "text",
    [
        '{"decode": 3}\n{"num_reqs": 2, "query_len": 4}\n\n{"tokens": 9, "other": null}\n',
        "decode,num_reqs,query_len,tokens\n3,,,\n,2,4,\n,,,9\n",
        "\ufefftokens, decode ,num_reqs,query_len\r\n,3,,\r\n,,2,4\r\n9,,,\r\n",
    ],
)
def test_a_batch_is_named_in_three_ways(tmp_path: Path, text: str) -> None:
    assert read(trace(tmp_path, text)) == [Batch(3, 3, 1), Batch(8, 2, 4), Batch(9, 1, 0)]


arrivals = st.lists(
    st.builds(
        Arrival,
        st.floats(0, 1e6),
        st.integers(1, 100_000),
        st.integers(1, 100_000),
        shared=st.just(0),
        shared_tokens=st.just(0),
    ),
    min_size=1,
    max_size=20,
).map(sorted)


@given(arrivals, st.booleans())
def test_requests_are_read_as_they_were_written(tmp_path_factory, requests, as_csv) -> None:
    rows = [request._asdict() for request in requests]
    lines = [json.dumps(row) for row in rows]
    if as_csv:
        lines = [",".join(rows[0]), *(",".join(map(repr, row.values())) for row in rows)]
    found = trace(tmp_path_factory.mktemp("trace"), "\n".join(lines))

    assert found.kind == "requests"
    assert read(found) == requests


def test_prompts_of_a_trace_may_begin_alike(tmp_path: Path) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,shared,shared_tokens\n"

    found = read(trace(tmp_path, header + "0,9,2,,8\n1,9,2,3,9\n2,9,2,,\n"))

    assert found == [Arrival(0, 9, 2, 0, 8), Arrival(1, 9, 2, 3, 9), Arrival(2, 9, 2)]
    first, third = found[0].token_ids(0), found[2].token_ids(2)
    assert first[:8] == [-1] * 8 != third[:8]


HEADER = "arrival_s,prompt_tokens,output_tokens\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty; expected arrival_s, prompt_tokens and output_tokens for requests, or"),
        ('{"size": 3}', "line 1: found '{\"size\": 3}'; expected arrival_s"),
        ("sizes\n3", "line 1: found 'sizes'; expected arrival_s"),
        ('{"decode": 3}\nfour', "line 2: found 'four'; expected a JSON object"),
        ('{"decode": 3}\n[4]', "line 2: found '[4]'; expected a JSON object"),
        ('{"decode": 3}\n\n{"decode": 0}', "line 3: found '{\"decode\": 0}'; expected decode from"),
        ('{"decode": true}', "expected decode from 1 to"),
        ('{"decode": 2.5}', "expected decode from 1 to"),
        ('{"decode": 3, "tokens": 4}', "expected one of decode, or num_reqs and query_len"),
        ('{"decode": 3}\n{"num_reqs": 4}', "line 2: found '{\"num_reqs\": 4}'; expected query_len"),
        ('{"num_reqs": 1048576, "query_len": 2}', "at most 1048576 tokens in a batch"),
        ("decode\n3\n4,5", "line 3: found '4,5'; expected 1 values: decode"),
        ('decode\n"3', "expected comma-separated values"),
        (HEADER + "1,2,3\n0.5,2,3", "line 3: found '0.5,2,3'; expected arrival_s of 1 or later"),
        (HEADER + "-1,2,3", "expected arrival_s in seconds, 0 or later"),
        (HEADER + "nan,2,3", "expected arrival_s in seconds, 0 or later"),
        (HEADER + "soon,2,3", "expected arrival_s in seconds, 0 or later"),
        (
            '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 1, "shared_tokens": 3}',
            "expected shared_tokens up to the prompt's 2",
        ),
        (HEADER + "1,,3", "line 2: found '1,,3'; expected prompt_tokens from 1 to"),
        (HEADER + f"1,{'9' * 10000},3", "..."),
        ('{"arrival_s": 1, "prompt_tokens": 2}', "expected output_tokens from 1"),
        ('{"arrival_s": 1' + "0" * 400 + ', "prompt_tokens": 2}', "expected arrival_s in seconds"),
        ('{"decode": 3}\n' + "[" * 60_000, "expected a JSON object"),
        ('{"decode": 3}\n' + " " * MAX_LINE_BYTES, "expected lines of less than 65536 bytes"),
        (b'{"decode": 3}\n\xff\xfe', "line 2"),
    ],
)
def test_a_bad_line_is_one_sentence(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(trace(tmp_path, text))

    assert words in str(error.value)
    assert len(str(error.value)) < 600 and "\n" not in str(error.value)


def test_a_trace_that_is_no_file_is_said(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(ConfigError, match="cannot read the trace"):
            Trace(path)


def test_a_trace_is_read_as_far_as_it_is_asked_for(tmp_path: Path) -> None:
    found = trace(tmp_path, '{"decode": 1}\n' * 100_000 + "nonsense")
    load = found.batches()

    assert len(list(islice(load.begin(), 1000))) == 1000
    assert load.progress() < 0.02


def test_drawn_requests_come_at_their_rate_and_with_their_means() -> None:
    found = draw(rate=4.0)

    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4.0, rel=0.05)
    # The standard deviation of an exponential distribution equals its mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(
        mean, rel=0.05
    )
    assert sum(r.prompt_tokens for r in found) / len(found) == pytest.approx(512, rel=0.05)
    assert sum(r.output_tokens for r in found) / len(found) == pytest.approx(128, rel=0.05)


@given(st.integers(2, 3000), st.integers(1, 300), st.floats(1, 60), st.integers(0, 9))
def test_drawn_requests_keep_their_limits(
    max_total: int, max_requests: int, max_seconds: float, seed: int
) -> None:
    found = draw(
        seed, max_total_tokens=max_total, max_requests=max_requests, max_seconds=max_seconds
    )

    assert len(found) <= max_requests
    assert all(r.arrival_s <= max_seconds for r in found)
    assert all(min(r.prompt_tokens, r.output_tokens) >= 1 for r in found)
    assert all(r.prompt_tokens + r.output_tokens <= max_total for r in found)
    again = {"max_total_tokens": max_total, "max_requests": max_requests}
    assert found == draw(seed, **again)[: len(found)]
    assert not found or found != draw(seed + 1, **again)[: len(found)]

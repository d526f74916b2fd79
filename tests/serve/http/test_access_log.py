"""The access log has one line for each request, with its tokens, its times and its outcome."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from dist_aclgraph.logs import ACCESS, FIELDS
from tests.serve import kept_answers as kept
from tests.serve.conftest import Service, serving, until

BODY = {"model": "tiny-qwen3", "prompt": "a b c", "max_tokens": 5}


class Lines(logging.Handler):
    """Collects the lines that are written to the access log, as fields."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(getattr(record, FIELDS))

    def the_one(self, path: str = "/v1/completions") -> dict[str, Any]:
        """Wait for the line of ``path``; return it. There must be only one such line."""
        until(lambda: any(line["path"] == path for line in self.found))
        (line,) = [line for line in self.found if line["path"] == path]
        return line


@pytest.fixture(scope="module")
def logging_service() -> Iterator[Service]:
    with serving(**{"logging.access": True, "serve.generation_s": 20.0}) as service:
        yield service


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger(ACCESS)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_one_line_with_its_tokens_and_times(
    logging_service: Service, lines: Lines, stream: bool
) -> None:
    headers = {"X-Request-Id": "mine-7"}
    body = BODY | {"stream": stream}
    logging_service.http.post("/v1/completions", json=body, headers=headers).read()

    line = lines.the_one()
    assert (line["id"], line["key"], line["client"]) == ("mine-7", "-", "127.0.0.1")
    assert (line["method"], line["status"], line["outcome"]) == ("POST", 200, "done")
    assert (line["output_tokens"], line["finish"]) == (5, "length")
    assert line["prompt_tokens"] == len(logging_service.state.tokenizer.encode("a b c"))
    assert 0 < line["first_token_s"] < line["total_s"]


def test_all_choices_of_all_prompts_are_counted_together(
    logging_service: Service, lines: Lines
) -> None:
    body = BODY | {"prompt": ["a b c", "a b c"], "n": 2}
    logging_service.http.post("/v1/completions", json=body)

    line = lines.the_one()
    num_prompt_tokens = len(logging_service.state.tokenizer.encode("a b c"))
    assert (line["prompt_tokens"], line["output_tokens"]) == (2 * num_prompt_tokens, 20)


@pytest.mark.parametrize(
    ("body", "status", "outcome"),
    [
        (BODY | {"max_tokens": -2}, 400, "InvalidParameterError"),
        (BODY | {"model": "other"}, 404, "UnknownModelError"),
    ],
)
def test_a_refused_request_names_its_error(
    logging_service: Service, lines: Lines, body: dict[str, Any], status: int, outcome: str
) -> None:
    logging_service.http.post("/v1/completions", json=body)

    line = lines.the_one()
    assert (line["status"], line["outcome"]) == (status, outcome)
    assert line["output_tokens"] == 0 and "first_token_s" not in line


def test_other_paths_have_lines_too(logging_service: Service, lines: Lines) -> None:
    logging_service.http.get("/version")

    assert lines.the_one("/version")["outcome"] == "done"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_is_named(
    logging_service: Service, lines: Lines, stream: bool
) -> None:
    body = BODY | {"max_tokens": 2000, "stream": stream}
    url = f"{logging_service.url}/v1/completions"
    # The client disconnects after the first bytes of a stream, or while it waits for an answer.
    with suppress(httpx.ReadTimeout), httpx.stream("POST", url, json=body, timeout=0.3) as answer:
        next(answer.iter_bytes())

    line = lines.the_one()
    assert line["outcome"] == "client_gone"
    assert 0 < line["output_tokens"] < 2000


def test_a_stream_that_fails_has_the_error_of_its_end(
    logging_service: Service, lines: Lines
) -> None:
    logging_service.engine.fail_after = (3, "EngineDeadError")
    try:
        logging_service.http.post("/v1/completions", json=BODY | {"stream": True}).read()
    finally:
        logging_service.engine.fail_after = None

    line = lines.the_one()
    assert (line["status"], line["outcome"], line["output_tokens"]) == (200, "EngineDeadError", 3)


def test_without_the_key_there_are_no_lines(service: Service, lines: Lines) -> None:
    service.http.post("/v1/completions", json=BODY)

    assert not lines.found


@pytest.mark.slow
def test_a_stream_that_another_ingress_continues_has_one_line(tmp_path: Path) -> None:
    keys = {"logging.access": True, "logging.directory": str(tmp_path), "logging.folder": "start"}
    with kept.serving(**keys) as service, service.killed_after(30):
        service.ask(kept.KINDS["chat"])
    written = [path.read_text() for path in (tmp_path / "start").glob("access-*.log")]
    lines = [line for line in "".join(written).splitlines() if "chat/completions" in line]

    assert len(written) >= 2
    assert len(lines) == 1
    assert "output_tokens=150" in lines[0] and "outcome=done" in lines[0]

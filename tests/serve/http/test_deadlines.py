"""An answer that takes too long is ended, and its request is aborted in the engine."""

from __future__ import annotations

import time

import openai
import pytest

from dist_aclgraph.serve.resume.journal import Chance, Journal
from tests.serve.conftest import serving, until
from tests.serve.openai.test_errors import CHAT, HI, MODEL, assert_error

FOR_EVER = {"model": MODEL, "messages": HI, "max_tokens": 1000}
LIMIT_S = 0.5


@pytest.fixture(scope="module")
def limited():
    with serving(**{"serve.generation_s": LIMIT_S}) as service:
        service.engine.step_s = 0.02
        service.engine.reply = lambda submit: [70] * submit.max_tokens
        yield service
        assert service.state.slots.taken == 0


def test_a_whole_answer_becomes_a_408_and_frees_what_it_had(limited):
    reply = limited.http.post(CHAT, json={**FOR_EVER, "n": 2})

    error = assert_error(reply, 408)
    assert (error["code"], error["message"]) == (
        "generation_timeout",
        "the answer was not complete after 0.5 s",
    )
    until(lambda: limited.engine.num_running == 0)
    assert limited.http.post(CHAT, json={**FOR_EVER, "max_tokens": 3}).status_code == 200


def test_openais_client_does_not_ask_for_it_again(limited):
    limited.engine.submitted.clear()

    with pytest.raises(openai.APIStatusError, match="not complete after"):
        limited.openai.with_options(max_retries=2).chat.completions.create(**FOR_EVER)

    assert len(limited.engine.submitted) == 1


def test_a_stream_that_has_begun_ends_with_an_error(limited):
    with limited.http.stream("POST", CHAT, json={**FOR_EVER, "stream": True}) as reply:
        lines = [line for line in reply.iter_lines() if line]

    assert reply.status_code == 200
    assert "generation_timeout" in lines[-1]
    assert len(lines) > 5
    until(lambda: limited.engine.num_running == 0)


def test_an_answer_that_another_process_began_has_no_more_time(monkeypatch):
    journal = Journal(Chance("abc", int(time.time() - 3600), 1), is_resumed=True)
    with serving(**{"serve.generation_s": 600}) as service:  # longer than the client's timeout
        service.engine.reply, service.engine.step_s = lambda submit: [70] * submit.max_tokens, 0.1
        monkeypatch.setattr(service.state, "open_journal", lambda scope: journal)

        assert_error(service.http.post(CHAT, json=FOR_EVER), 408)

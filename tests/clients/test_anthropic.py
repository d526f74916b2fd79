"""The SDK of Anthropic."""

from __future__ import annotations

from tests.clients.conftest import COUNT, COUNTED, run_python

CODE = f"""
import json, os, anthropic
client = anthropic.Anthropic(base_url=os.environ["URL"], api_key="none", max_retries=0)
asked = dict(model="tiny-qwen3", messages=[dict(role="user", content={COUNT!r})])
greedy = dict(**asked, max_tokens=50, extra_body=dict(temperature=0))  # create() has no temperature
whole = client.messages.create(**greedy)
with client.messages.stream(**greedy) as stream:
    streamed = "".join(stream.text_stream)
counted = client.messages.count_tokens(**asked)
try:
    client.messages.create(**asked, max_tokens=0)
except anthropic.BadRequestError as e:
    wrong = e.body["error"]["type"]
print(json.dumps(dict(
    texts=[whole.content[0].text, streamed], reason=whole.stop_reason, wrong=wrong,
    counts=[counted.input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens],
)))
"""


def test_messages_whole_and_streamed(service):
    found = run_python("anthropic", CODE, URL=service.url)

    assert found["texts"] == [COUNTED] * 2
    assert (found["reason"], found["wrong"]) == ("end_turn", "invalid_request_error")
    assert found["counts"][0] == found["counts"][1]

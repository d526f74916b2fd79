from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime

import pytest
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from dist_aclgraph.serve.observe.metrics import Metrics
from tests.serve.conftest import serving, until

MODEL = "tiny-qwen3"
HI = [{"role": "user", "content": "Hi"}]


def test_models_are_listed_and_found_by_name(service):
    assert [model.id for model in service.openai.models.list()] == [MODEL]
    assert service.openai.models.retrieve(MODEL).id == MODEL


def test_health_ready_and_version_answer(service):
    for path in ("/health", "/ready", "/version"):
        assert service.http.get(path).status_code == 200


def test_a_dead_engine_fails_requests_and_health_but_hangs_nobody(own_service):
    service = own_service
    service.engine.reply = lambda submit: [70] * submit.max_tokens
    service.engine.step_s = 0.02
    body = {"model": MODEL, "messages": HI, "stream": True, "max_tokens": 1000}

    with service.http.stream("POST", "/v1/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        first = next(lines)
        service.engine.silent = True
        rest = "\n".join(lines)

    assert (reply.status_code, first[:5]) == (200, "data:")
    assert "silent" in rest
    assert "[DONE]" not in rest
    assert service.http.get("/health").status_code == 503
    assert service.http.get("/ready").status_code == 503
    reply = service.http.post("/v1/chat/completions", json={**body, "stream": False})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "dist_aclgraph_engine_healthy{" in service.http.get("/metrics").text


def test_a_draining_service_takes_nothing_new(own_service):
    own_service.state.is_draining = True

    reply = own_service.http.post("/v1/chat/completions", json={"model": MODEL, "messages": HI})

    assert reply.status_code == 503
    assert own_service.http.get("/ready").status_code == 503
    assert own_service.http.get("/health").status_code == 200


def test_metrics_are_well_formed_and_count(service):
    service.openai.completions.create(model=MODEL, prompt="abc", max_tokens=4)

    text = service.http.get("/metrics").text

    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert all(name.startswith("dist_aclgraph_") for name in families)
    assert all(family.documentation for family in families.values())
    replays = {
        sample.labels["graph"]: sample.value
        for sample in families["dist_aclgraph_graph_replays"].samples
    }
    assert replays == {"full decode 4": 7, "full decode 8": 2}
    assert families["dist_aclgraph_num_requests_running"].samples[0].value == 2
    counts = {
        name: sample.value
        for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        for sample in families[f"dist_aclgraph_{name}_seconds"].samples
        if sample.name.endswith("_count")
    }
    assert min(counts.values()) >= 1


def test_metrics_tell_memory_open_files_and_restarts(service):
    text = service.http.get("/metrics").text

    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [v for k, v in sample.labels.items() if k not in ("model_name", "replica")]
            values[(sample.name.removeprefix("dist_aclgraph_"), *own)] = sample.value
    assert values["restarts_left", "0"] == 5
    assert values["restarts_per_hour",] == 6
    assert values["process_resident_memory_bytes", "0", "worker-0"] == 900 << 20
    assert values["host_memory_available_bytes", "0", "node-a"] == 40 << 30
    assert values["group_start_time_seconds", "0"] == 1.8e9
    assert 10 << 20 < values["ingress_resident_memory_bytes",] < 100 << 30
    assert 3 < values["ingress_open_fds",] < values["ingress_max_fds",]
    assert values["body_bytes",] == 0 and values["body_limit_bytes",] == 1 << 30


def test_replicas_count_under_names_of_their_own(service):
    found = set()
    for _ in range(2):
        text = Metrics(MODEL, service.state.client).expose()
        for family in text_string_to_metric_families(text.decode()):
            found |= {sample.labels["replica"] for sample in family.samples}

    assert len(found) == 2


def test_tokenize_and_detokenize_are_inverse(service):
    made = service.http.post(
        "/tokenize", json={"model": MODEL, "prompt": "Hello é", "return_token_strs": True}
    ).json()
    back = service.http.post("/detokenize", json={"tokens": made["tokens"]}).json()

    assert back == {"prompt": "Hello é"}
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])


def test_tokenize_applies_the_chat_template(service):
    made = service.http.post("/tokenize", json={"messages": HI}).json()

    assert made["tokens"] == service.state.tokenizer.encode_chat(HI)


@pytest.mark.parametrize("path", ["/load", "/v1/load"])
def test_the_load_is_the_number_of_completions_in_progress(service, path):
    service.state.slots.acquire(3)
    try:
        assert service.http.get(path).json() == {"server_load": 3}
    finally:
        service.state.slots.release(3)


@pytest.mark.parametrize(
    ("given", "echoed"), [("abc-1", True), ("a\tb", False), ("x" * 500, False)]
)
def test_a_proper_request_id_is_echoed(service, given, echoed):
    reply = service.http.get("/health", headers={"X-Request-Id": given})

    assert (reply.headers["x-request-id"] == given) == echoed
    assert reply.headers["x-request-id"]


PART = {"type": "text", "text": "y", "cache_control": {"type": "ephemeral"}}
EXTRA = {
    "model": MODEL,
    "messages": [
        {"role": "user", "content": "x"},
        {"role": "user", "content": "x", "color": "y"},
        {"role": "user", "content": [PART], "color": "y", "odd name": 1, "name": None},
    ],
    "response_format": {"type": "text", "dialect": {}},
    "max_tokens": 1,
    "plugins": [],
    "nonsense": 1,
}


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_are_ignored_and_named(service, caplog, stream):
    options = {"stream": True, "stream_options": {"nonsense": 1}} if stream else {}
    names = "messages[].color, messages[].content[].cache_control, nonsense, plugins, "
    names += "response_format.dialect" + (", stream_options.nonsense" if stream else "")
    # The service logs each name only once. Other tests may have logged these names already.
    service.state.ignored_fields._names.difference_update(names.split(", "))

    replies = [
        service.http.post("/v1/chat/completions", json={**EXTRA, **options}) for _ in range(3)
    ]

    assert [reply.status_code for reply in replies] == [200] * 3
    paths = names.replace("messages[].color", "messages[1].color").replace(
        "messages[].c", "messages[2].c"
    )
    paths = paths.replace("content[]", "content[0]")
    assert {reply.headers["x-ignored-parameters"] for reply in replies} == {paths}
    (record,) = [r for r in caplog.records if "ignored" in r.message]
    assert record.message.endswith(f": {names}")


def test_fields_with_any_content_have_no_unknown_parts(service):
    free = {
        "metadata": {"a": 1},
        "chat_template_kwargs": {"tools_in_user_message": 1},
        "documents": [{"a": 1}],
    }
    body = {"model": MODEL, "messages": HI, "max_tokens": 1, **free}

    reply = service.http.post("/v1/chat/completions", json=body)

    assert reply.status_code == 200
    assert "x-ignored-parameters" not in reply.headers


def test_a_strict_service_refuses_unknown_fields():
    with serving(**{"serve.strict": True}) as service:
        reply = service.http.post("/v1/chat/completions", json=EXTRA)
        plain = {"model": MODEL, "messages": HI, "max_tokens": 1}
        nested = [
            {"messages": EXTRA["messages"]},
            {"messages": [{"role": "user", "content": [PART]}]},
            {"response_format": EXTRA["response_format"]},
            {"stream": True, "stream_options": {"nonsense": 1}},
        ]
        inner = [service.http.post("/v1/chat/completions", json=plain | more) for more in nested]

    assert reply.json()["error"]["message"] == "unknown parameter: plugins"
    assert [each.json()["error"]["param"] for each in inner] == [
        "messages.1.color",
        "messages.0.content.0.cache_control",
        "response_format.dialect",
        "stream_options.nonsense",
    ]


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("functions", {"functions": [{"name": "f"}]}),
        ("n_probs", {"n_probs": 3}),
        ("messages[0].images", {"messages": [{"role": "user", "content": "x", "images": ["y"]}]}),
    ],
)
def test_fields_of_features_that_are_not_offered_are_refused(service, name, field):
    reply = service.http.post("/v1/chat/completions", json={**EXTRA, **field})

    assert reply.json()["error"] == {
        "message": f"{name} is not offered",
        "type": "invalid_request_error",
        "param": name,
        "code": "invalid_value",
    }


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat//completions//"]
)
def test_more_slashes_than_needed_change_nothing(service, path):
    service.answer("a")

    url = f"{service.url}{path}"
    reply = service.http.post(url, json={"model": MODEL, "messages": HI})

    assert reply.status_code == 200, "without a redirect"


def test_models_have_the_fields_that_benchmarks_read():
    with serving(served_model_aliases=["gpt-x"]) as service:
        models = service.http.get("/v1/models").json()["data"]
        same = service.http.get("/v1/models/").json()["data"]
        one = service.http.get("/v1/models/gpt-x").json()
        service.answer("a")
        reply = service.openai.chat.completions.create(model="gpt-x", messages=HI)

    assert [model["id"] for model in models] == [MODEL, "gpt-x"]
    assert models == same
    assert models[1] == one
    assert one["root"].endswith(MODEL)
    assert one["max_model_len"] == service.state.context_len
    assert (one["type"], one["capabilities"]["completion_chat"]) == ("base", True)
    assert one["display_name"] == one["id"]  # Anthropic's clients read this field and the time
    assert datetime.fromisoformat(one["created_at"]).timestamp() == one["created"]
    assert reply.choices[0].message.content == "a"


@pytest.mark.parametrize("path", ["/health", "/ping", "/v1/models", "/version", "/metrics", "/"])
def test_head_is_answered_wherever_get_is(service, path):
    reply = service.http.head(path)

    assert (reply.status_code, reply.content) == (200, b"")


def test_a_message_that_the_sdk_dumped_is_taken_back(service):
    service.answer("a")
    first = service.openai.chat.completions.create(model=MODEL, messages=HI)

    history = [*HI, first.choices[0].message.model_dump(), *HI]
    reply = service.openai.chat.completions.create(model=MODEL, messages=history)

    assert reply.choices[0].message.content == "a"


def test_the_openapi_document_tells_the_errors_and_no_422(service):
    document = service.http.get("/openapi.json").json()

    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert {"400", "404", "413", "503"} <= set(chat["responses"])
    assert "422" not in chat["responses"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in document["components"]["schemas"][body["$ref"].split("/")[-1]]["required"]


def test_the_openapi_document_says_that_numbers_may_be_texts(service):
    schemas = service.http.get("/openapi.json").json()["components"]["schemas"]

    (number, null) = schemas["ChatRequest"]["properties"]["temperature"]["anyOf"]
    assert (number, null) == ({"type": ["number", "string"]}, {"type": "null"})
    (tools, _) = schemas["ChatRequest"]["properties"]["tools"]["anyOf"]
    strict = tools["items"]["anyOf"][0]["properties"]["function"]["properties"]["strict"]
    assert strict == {"type": ["boolean", "null", "integer", "string"]}


CALL = {"function": {"name": "f"}, "id": None, "type": None}
USE = {"type": "tool_use", "id": None, "name": "f", "input": None}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": None, "is_error": None}
FUNCTION = {"name": "f", "description": None, "parameters": None, "strict": None}
THINKING = {"type": "enabled", "budget_tokens": None}


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ChatMessage", {"role": "assistant", "tool_calls": [CALL]}),
        ("TokenizeRequest", {"tools": [{"type": None, "function": FUNCTION}]}),
        (
            "ChatRequest",
            {"response_format": {"type": "json_schema", "json_schema": {"schema": None}}},
        ),
        (
            "ChatRequest",
            {"response_format": {"type": "json_schema", "json_schema": {"name": None}}},
        ),
        ("ResponsesRequest", {"tools": [{"type": "function", **FUNCTION}]}),
        ("ResponsesRequest", {"input": [{"type": None, "role": "user", "content": "x"}]}),
        ("ResponsesRequest", {"text": {"format": None}}),
        (
            "MessagesRequest",
            {"tools": [{"type": None, "name": "f", "description": None, "input_schema": None}]},
        ),
        ("MessagesRequest", {"thinking": THINKING}),
        ("MessagesRequest", {"output_config": {"effort": None, "format": None}}),
        ("MessagesRequest", {"messages": [{"role": "assistant", "content": [USE]}]}),
        ("MessagesRequest", {"messages": [{"role": "user", "content": [RESULT]}]}),
    ],
)
def test_the_openapi_document_allows_null_where_the_service_does(service, kind, fields):
    schema = service.http.get("/openapi.json").json()["components"]["schemas"][kind]

    for name, value in fields.items():
        Draft202012Validator(schema["properties"][name]).validate(value)


U, A = {"role": "user", "content": "x"}, {"role": "assistant"}
ITEM = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c"}
SCHEMA = {"type": "object"}
ACCEPTED: list[tuple[str, dict]] = [
    *(
        ("/v1/chat/completions", {"messages": [U], **fields})
        for fields in (
            {"response_format": {}},
            {"response_format": {"type": "json", "value": SCHEMA}},
            {"response_format": {"type": "regex", "value": "a+"}},
            {"response_format": {"type": "grammar", "grammar": 'start: "a"'}},
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
            {"response_format": {"type": "json_schema", "json_schema": {"schema": "{}"}}},
            {"guided_choice": []},
            {"tools": [{"type": "web_search"}]},
            *(
                {"tools": [{"function": {"name": "f"}}], "tool_choice": choice}
                for choice in (
                    {"function": {"name": "f"}},
                    {"name": "f"},
                    {"type": "tool", "name": "f"},
                    {"type": "auto"},
                )
            ),
            *(
                {"messages": [U, {**A, "content": [part]}, U]}
                for part in (
                    {"type": "thinking", "thinking": "x"},
                    {"type": "thinking", "thinking": [{"type": "text", "text": "x"}]},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "reasoning", "reasoning": "x"},
                )
            ),
            {"messages": [U, {**A, "function_call": {"name": "f"}}]},
            {"reasoning": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 1}},
        )
    ),
    *(
        ("/v1/responses", {"input": "x", **fields})
        for fields in (
            {"input": ""},
            {"input": [U, {**A, "content": None}, {**A, "content": []}, U]},
            {"input": [U, ITEM, {**OUTPUT, "output": []}]},
            {"input": [U, ITEM, {**OUTPUT, "output": [{"type": "refusal", "refusal": "x"}]}]},
            {"input": [U, {"type": "reasoning", "content": None}, {**ITEM, "arguments": None}]},
            {
                "input": [
                    U,
                    {"type": "reasoning", "summary": [{"type": "summary_text", "text": ""}]},
                ]
            },
            {"tools": [{"type": "web_search"}, {"type": "mcp", "server_label": "x"}]},
            {
                "tools": [
                    {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}
                ]
            },
            {"tool_choice": {"type": "none"}},
            {"text": {"format": {}, "verbosity": "low"}},
        )
    ),
    *(
        ("/v1/messages", {"messages": [U], "max_tokens": 1, **fields})
        for fields in (
            {"thinking": {"type": "enabled"}},
            {"thinking": {}},
            {"tools": [{"name": "f"}, {"type": "web_search_20250305", "name": "web_search"}]},
            {"messages": [{"role": "system", "content": "x"}, U]},
            {"messages": [U, {**A, "content": [{"type": "tool_use", "name": "f"}]}]},
            {"messages": [U, {**A, "content": [{"type": "redacted_thinking", "data": "x"}]}, U]},
            {"output_config": {"format": {"type": "json_object"}}},
        )
    ),
]


@pytest.mark.parametrize(("path", "fields"), ACCEPTED, ids=repr)
def test_the_openapi_document_allows_what_the_service_accepts(tooled, path, fields):
    tooled.answer("x")
    body = {"model": MODEL, **fields}
    document = tooled.http.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]
    schema = {**content["application/json"]["schema"], "components": document["components"]}

    reply = tooled.http.post(path, json=body)

    assert reply.status_code == 200, reply.text
    Draft202012Validator(schema).validate(body)


def test_every_reference_and_path_parameter_of_the_openapi_document_is_there(service):
    text = service.http.get("/openapi.json").text
    document = json.loads(text)

    for name in set(re.findall(r'"#/components/schemas/([^"]+)"', text)):
        assert name in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for operation in operations.values():
            declared = [parameter["name"] for parameter in operation.get("parameters", [])]
            assert declared == re.findall(r"{(.*?)}", path)
            assert operation["responses"]["200"]["content"]


def test_each_operation_of_the_openapi_document_has_a_name_and_a_summary(service):
    paths = service.http.get("/openapi.json").json()["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]

    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)


def test_nothing_is_left_outstanding(service):
    until(lambda: len(service.state.client._table) == 0)


def test_serve_needs_neither_torch_nor_ray():
    code = (
        "import sys, dist_aclgraph.serve.api; "
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip() == "[]"

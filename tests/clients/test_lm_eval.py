"""lm-evaluation-harness runs a task that generates text, and a multiple-choice task that uses
logprobs.
"""

from __future__ import annotations

import json
import sys

import pytest
import torch
import transformers

from tests.clients.conftest import CHECKPOINT, client_program, run

DOCUMENTS = [
    {"question": "1 2 3", "choices": [" 4 5", " 9 1", " hello"], "answer": 0},
    {"question": "Once upon", "choices": [" 7 7", " a time"], "answer": 1},
    {"question": "I can greet you, count", "choices": [" and tell", " 3 and"], "answer": 0},
]
TASK = """
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{question}}}}"
"""
CHOICE = """
target_delimiter: ""
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
QUESTIONS = ["Count from 3 to 9.", "Hello!", "Count from 1 to 4.", "Once upon", "1 2 3", "What?"]
MAX_TOKENS = 32
GENERATE = """
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["zzz"], max_gen_toks: 32, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def evaluate(folder, service, kind, documents, rest, model, *options):
    """Run a task of type ``kind`` on ``documents``; return its results and its samples."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (folder / "own.yaml").write_text(TASK.format(task="own", data=data, kind=kind) + rest)
    path = "chat/completions" if "chat" in model else "completions"
    arguments = f"model=tiny-qwen3,base_url={service.api}/{path},num_concurrent=4,max_retries=1"
    arguments += f",tokenizer={CHECKPOINT},tokenizer_backend=huggingface,tokenized_requests=False"
    run(
        client_program("lm_eval"),
        *("--model", model, "--model_args", arguments, "--tasks", "own"),
        *("--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"),
        *options,
        HF_HOME=str(folder),
    )
    (results,) = (folder / "out").rglob("results_*.json")
    (samples,) = (folder / "out").rglob("samples_own_*.jsonl")
    found = [json.loads(line) for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"]["own"], found


def test_a_multiple_choice_has_the_log_probabilities_of_transformers(
    service, tmp_path, monkeypatch
):
    results, samples = evaluate(
        tmp_path, service, "multiple_choice", DOCUMENTS, CHOICE, "local-completions"
    )

    model, tokenizer = read_reference(monkeypatch)
    assert len(samples) == len(DOCUMENTS)
    for sample in samples:
        document = DOCUMENTS[sample["doc_id"]]
        begin = len(tokenizer(document["question"]).input_ids)
        for choice, ((value, _),) in zip(document["choices"], sample["resps"], strict=True):
            ids = tokenizer(document["question"] + choice).input_ids
            with torch.no_grad():
                rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1)
            exact = sum(rows[at - 1, ids[at]].item() for at in range(begin, len(ids)))
            assert float(value) == pytest.approx(exact, abs=1e-4 * (len(ids) - begin))
    assert results["acc,none"] == 1.0


@pytest.mark.parametrize("model_type", ["local-completions", "local-chat-completions"])
def test_a_task_generates_the_texts_of_transformers(service, tmp_path, monkeypatch, model_type):
    model, tokenizer = read_reference(monkeypatch)
    is_chat = "chat" in model_type
    documents = []
    for question in QUESTIONS:
        prompt = question
        if is_chat:
            message = [{"role": "user", "content": question}]
            prompt = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(prompt, add_special_tokens=not is_chat, return_tensors="pt").input_ids
        made = model.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(made, skip_special_tokens=True)
        documents.append({"question": question, "answer": answer})

    options = ["--apply_chat_template"] if is_chat else []
    results, samples = evaluate(
        tmp_path, service, "generate_until", documents, GENERATE, model_type, *options
    )

    assert len({document["answer"] for document in documents}) > 2
    for sample in samples:
        assert sample["resps"] == [[documents[sample["doc_id"]]["answer"]]]
    assert results["exact_match,none"] == 1.0


def read_reference(monkeypatch):
    """Return the same model and tokenizer, loaded by transformers as a reference."""
    # otherwise, transformers would import torch_npu, which needs CANN
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    model = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(CHECKPOINT)

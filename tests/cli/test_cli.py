from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dist_aclgraph.cli.main import cli
from dist_aclgraph.config import load_config
from dist_aclgraph.version import VERSION

CONFIG = str(Path(__file__).parents[2] / "configs" / "tiny-qwen3.yaml")


def call(*arguments: str):
    return CliRunner().invoke(cli, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nowhere.yaml", "--prompt", "x"), "cannot read the configuration"),
        (("run", CONFIG, "nonsense=1", "--prompt", "x"), "nonsense is not a known key"),
        (("run", CONFIG, "nonsense", "--prompt", "x"), "key=value"),
        (("run", CONFIG, "--prompt", "x", "--temperature", "9"), "temperature is 9"),
        (
            ("run", CONFIG, "model=nowhere", "--prompt", "x"),
            "model is 'nowhere': no such directory",
        ),
        (("simulate", CONFIG), "either --trace FILE or --poisson RATE"),
        (("simulate", CONFIG, "--poisson", "0"), "--poisson is 0"),
        (("simulate", CONFIG, "--trace", "nowhere"), "cannot read the trace nowhere"),
        (("simulate", CONFIG, "--trace", CONFIG), "line 1: found '# The demo"),
        (("simulate", CONFIG, "--poisson", "9", "--times", "nowhere"), "cannot read the times"),
        (("simulate", CONFIG, "--poisson", "9", "--step-ms", "-1"), "none may be negative"),
        (("simulate", CONFIG, "--poisson", "9", "--requests", "5", "--plot", "no/x.png"), "plot"),
        (("serve", CONFIG, "parallel.tp=two"), "parallel.tp"),
        (("serve", CONFIG, "--pipeline-parallel-size=2"), "use --tensor-parallel-size"),
        (("serve", CONFIG, "--enable-lora"), "LoRA is not offered"),
        (("serve", CONFIG, "--ssl-keyfile", "x"), "put a proxy with TLS"),
        (("serve", CONFIG, "--save", "/no/such/x.yaml"), "cannot be saved"),
        (("serve", CONFIG, "kv.block_size=17"), "kv.block_size"),
        (("serve", CONFIG, "--port", "0"), "serve.port is 0"),
        (("serve", CONFIG, "--host", "0.0.0.0"), "there is no API key"),
        (("serve", CONFIG, "serve.port=8765", "parallel.tp=3"), "tp"),
        (("serve", CONFIG, "serve.port=8765", "model=nowhere"), "nowhere"),
    ],
)
def test_a_users_mistake_is_one_sentence_and_exit_code_2(arguments, words):
    result = call(*arguments)

    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("command", [("serve",), ("run", "--prompt", "x")])
def test_weights_that_are_cut_off_are_one_sentence_before_anything_starts(tmp_path, command):
    model = tmp_path / "model"
    shutil.copytree(Path(CONFIG).parents[1] / "models" / "tiny-qwen3", model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    result = call(command[0], CONFIG, f"model={model}", *command[1:])

    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"error: {weights} is cut off: 100 bytes are missing")


def test_a_port_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        result = call("serve", CONFIG, f"serve.port={taken.getsockname()[1]}")

    assert result.exit_code == 2
    assert "cannot be bound" in result.stderr


def test_a_plan_is_drawn_beside_what_is_printed(tmp_path):
    picture = tmp_path / "padding.png"

    result = call("plan", CONFIG, "--json", "--plot", str(picture))

    assert result.exit_code == 0
    assert json.loads(result.stdout)["plans"][0]["families"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    refused = call("plan", CONFIG, "graph.mode=NONE", "--plot", str(picture))
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_help_loads_nothing_heavy():
    code = (
        "import sys; sys.argv = ['x', '--help']\n"
        "import dist_aclgraph.cli.main as m\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'ray', 'transformers', 'fastapi', 'numpy')"
        " if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert found.stdout.strip().endswith("[]")


def test_a_model_and_options_are_printed_and_saved_as_a_configuration(tmp_path):
    model, saved = Path(CONFIG).parents[1] / "models" / "tiny-qwen3", tmp_path / "x.yaml"
    options = ("--tp", "3", "--cudagraph-capture-sizes", "2,1", "--enforce-eager")
    without_effect = ("--pp", "1", "--enable-chunked-prefill", "--kv-cache-dtype=auto")
    overrides = ("--hf-overrides", '{"rope_scaling": {"factor": [4e0]}}', "--rope-theta", "5")
    options += (*without_effect, *overrides, "--served-model-name", "a", "b")

    result = call("serve", str(model), *options, "--save", str(saved))

    assert result.exit_code == 2  # the model cannot be split over three ranks
    text = saved.read_text()
    assert f"The configuration:\n\n{text}" in result.stderr
    config = load_config(saved)
    assert (config.parallel.tp, config.graph.sizes, config.graph.mode) == (3, (1, 2), "NONE")
    assert config.names == ("a", "b")
    assert config.model_overrides == {"rope_scaling": {"factor": [4.0]}, "rope_theta": 5.0}


def test_a_plan_takes_the_options_of_a_model():
    model = Path(CONFIG).parents[1] / "models" / "tiny-qwen3"

    report = json.loads(call("plan", str(model), "--tp", "2", "--json").stdout)

    assert report["layout"]["tp"] == 2


def test_a_shell_completes_options_without_heavy_imports():
    code = (
        "import sys; sys.argv = ['dist-aclgraph']\n"
        "import dist_aclgraph.cli.main as m\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'ray', 'yaml', 'numpy') if name in sys.modules])"
    )
    asked = {"COMP_WORDS": "dist-aclgraph serve --tens", "COMP_CWORD": "2"}
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **asked, "_DIST_ACLGRAPH_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
        check=True,
    )

    assert found.stdout.split() == ["--tensor-parallel-size", "[]"]


def test_a_simulation_prints_json_and_nothing_else_beside():
    simulation = ("simulate", CONFIG, "--poisson", "20", "--requests", "30", "--compare")

    result, again = (call(*simulation, "--seed", "5", "--json") for _ in range(2))

    assert result.exit_code == 0
    assert result.stderr == ""
    report = json.loads(result.stdout)
    assert report["groups"][0]["requests"]["finished"] == 30
    assert report["compare"][0]["name"] == "as simulated"
    del report["speed"]
    assert report.items() <= json.loads(again.stdout).items()


def test_a_simulation_is_shown_as_tables():
    result = call(
        "simulate", CONFIG, "--poisson", "20", "--requests", "30", "scheduler.max_num_seqs=8"
    )

    assert result.exit_code == 0
    assert "30 requests finished" in result.stdout
    assert "step times are assumed, not measured" in result.stdout
    assert "full decode 8" in result.stdout


@pytest.mark.parametrize(
    ("task", "path"),
    [
        ("auto", "/v1/chat/completions"),
        ("embed", "/v1/embeddings"),
        ("rerank", "/v1/rerank"),
    ],
)
def test_the_announcement_has_device_plan_and_a_curl_line(capsys, task, path):
    from dist_aclgraph.cli.announce import announce

    report = {
        "device": "emulated NPU on this CPU",
        "plan": {"version": 1, "hash": "abcdef0123456789", "reasons": ["fits"]},
        "pool_bytes": 1234567,
        "buckets": [{"graph": "full decode 8", "streams": 3, "bytes": 4096}],
        "fusions": {"norm_quant": "in 7 places", "swiglu_quant": "off (not in device.fusions)"},
    }
    console = Console(width=120)

    announce(load_config(CONFIG, {"task": task}), report, console)

    printed = capsys.readouterr().out
    assert "2 x emulated NPU on this CPU" in printed
    assert "1,234,567 in all" in printed
    assert "4,096" in printed
    assert "norm_quant in 7 places; swiglu_quant off (not in device.fusions)" in printed
    assert f"curl -s http://127.0.0.1:8000{path} " in printed


@pytest.mark.parametrize(
    ("overrides", "variable", "expected"),
    [
        ({}, "a-key-of-many-letters", '-H "Authorization: Bearer $DIST_ACLGRAPH_API_KEY"'),
        (
            {"serve.api_keys_file": "/etc/my keys"},
            None,
            """-H "Authorization: Bearer $(awk '/^[^# ]/ {print $1; exit}' '/etc/my keys')\"""",
        ),
        (
            {"serve.replicas": 2},
            None,
            "Ready at http://127.0.0.1:8000/v1, http://127.0.0.1:8001/v1",
        ),
        ({"serve.uds": "/run/api"}, None, "curl -s --unix-socket /run/api http://localhost/v1"),
    ],
)
def test_the_curl_line_finds_its_key_and_shows_none(
    capsys, monkeypatch, overrides, variable, expected
):
    from dist_aclgraph.cli.announce import announce

    if variable is not None:
        monkeypatch.setenv("DIST_ACLGRAPH_API_KEY", variable)

    announce(load_config(CONFIG, overrides), {}, Console(width=100))

    printed = capsys.readouterr().out
    assert expected in printed
    assert "many-letters" not in printed


@pytest.mark.parametrize(
    ("stored", "dtype", "is_told"),
    [
        ("float16", "bfloat16", True),
        ("float16", "float16", False),
        ("float32", "bfloat16", False),
        (5, "bfloat16", False),
    ],
)
@pytest.mark.parametrize("accepts_float16", [False, True])
def test_the_announcement_says_that_float16_weights_are_rounded(
    capsys, stored, dtype, is_told, accepts_float16
):
    from dist_aclgraph.cli.announce import announce

    config = load_config(CONFIG, {"dtype": dtype, "model_overrides": {"dtype": stored}})

    announce(config, {"accepts_float16": accepts_float16}, Console(width=120))

    printed = capsys.readouterr().out
    assert ("weights are rounded to bfloat16" in printed) == is_told
    assert ("dtype=float16" in printed) == (is_told and accepts_float16)


def test_the_version_is_told():
    result = call("--version")

    assert (result.exit_code, result.stdout) == (0, f"dist-aclgraph {VERSION}\n")


def test_doctor_gives_each_problem_a_remedy():
    result = call("doctor", "--json")

    findings = json.loads(result.stdout)
    assert {"python", "torch", "ray", "device", "compiler"} <= {f["name"] for f in findings}
    assert all(f["is_ok"] or f["remedy"] for f in findings)

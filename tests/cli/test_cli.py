from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from dist_aclgraph.cli.main import cli
from dist_aclgraph.config import load_config

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
        (("run", CONFIG, "model=nowhere", "--prompt", "x"), "cannot read nowhere/config.json"),
        (("serve", CONFIG, "parallel.tp=two"), "parallel.tp"),
        (("serve", CONFIG, "kv.block_size=17"), "kv.block_size"),
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


def test_a_port_in_use_is_said_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        result = call("serve", CONFIG, f"serve.port={taken.getsockname()[1]}")

    assert result.exit_code == 2
    assert "cannot be bound" in result.stderr


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


def test_the_announcement_has_device_plan_and_a_curl_line(capsys):
    from dist_aclgraph.cli.serve import announce

    report = {
        "device": "emulated NPU on this CPU",
        "plan": {"version": 1, "hash": "abcdef0123456789", "reasons": ["fits"]},
        "pool_bytes": 1234567,
        "buckets": [{"graph": "full decode 8", "streams": 3, "bytes": 4096}],
    }
    console = Console(width=100)

    announce(load_config(CONFIG), report, console)

    printed = capsys.readouterr().out
    assert "2 x emulated NPU on this CPU" in printed
    assert "1,234,567 in all" in printed
    assert "4,096" in printed
    assert "curl -s http://127.0.0.1:8000/v1/chat/completions" in printed


def test_doctor_gives_each_problem_a_remedy():
    result = call("doctor", "--json")

    findings = json.loads(result.stdout)
    assert {"python", "torch", "ray", "device", "compiler"} <= {f["name"] for f in findings}
    assert all(f["is_ok"] or f["remedy"] for f in findings)

"""Options of vLLM that the command line accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from dist_aclgraph.cli.main import cli as main
from dist_aclgraph.cli.model_options import ModelCommand, load_model, with_model_options
from dist_aclgraph.config import Config
from dist_aclgraph.errors import ConfigError

MODEL = "models/tiny-qwen3"
cli = typer.Typer()
loaded: list[Config] = []


@cli.command(cls=ModelCommand)
@with_model_options(serves=True)
def command(
    source: Path,
    options: dict[str, Any],
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
) -> None:
    loaded.append(load_model(source, overrides, options))


def load(*arguments: str) -> Config:
    """Return the configuration that the command line makes from ``arguments``, or raise
    ConfigError.
    """
    result = CliRunner().invoke(cli, list(arguments), catch_exceptions=False)
    if result.exit_code:
        raise ConfigError(result.stderr)
    return loaded.pop()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--enable-chunked-prefill",),
        ("--enable-chunked-prefill=True",),
        ("--enable-chunked-prefill=true",),
        ("--no-enable-lora",),
        ("--enable-lora=False",),
        ("-pp", "1"),
        ("--disable-uvicorn-access-log", "--enable-server-load-tracking"),
        ("--guided-decoding-backend", "auto", "--kv-transfer-config={}"),
        ("-pp=1",),
        ("--pp", "1"),
        ("--tokenizer", MODEL, "--kv-cache-dtype=bfloat16"),
        ("--kv-cache-dtype=auto",),
    ],
)
def test_an_option_that_asks_for_the_default_has_no_effect(arguments: tuple[str, ...]) -> None:
    assert load(MODEL, *arguments) == load(MODEL)


@pytest.mark.parametrize("arguments", [("-tp", "2", "-dp=3"), ("-tp=2", "--dp", "3")])
def test_short_names_have_one_dash_or_two(arguments: tuple[str, ...]) -> None:
    parallel = load(MODEL, *arguments).parallel

    assert (parallel.tp, parallel.dp) == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--enable-chunked-prefill=False",), "enable_chunked_prefill has no counterpart"),
        (("--no-enable-chunked-prefill",), "enable_chunked_prefill has no counterpart"),
        (("--enable-lora=true",), "enable_lora has no counterpart"),
        (("-pp", "2"), "use --tensor-parallel-size"),
        (("-pp=2",), "use --tensor-parallel-size"),
        (("--tokenizer", "models/tiny-deepseek"), "the tokenizer of the checkpoint is used"),
        (("--kv-cache-dtype=fp8",), "the KV cache has the type of --dtype"),
    ],
)
def test_an_option_that_asks_for_something_else_is_refused(
    arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(MODEL, *arguments)


def test_several_names_need_the_model_first() -> None:
    names = ("--served-model-name", "a", "b")

    assert load(MODEL, "--tp", "2", *names).names == ("a", "b")
    assert load("--tp", "2", MODEL, *names[:2]).names == ("a",)
    with pytest.raises(ConfigError, match=r"'b' is not .* write the model before all options"):
        load("--tp", "2", MODEL, *names)


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (("--tensor_parallel_size", "2"), "parallel.tp", 2),
        (("--tensor_parallel_size=2",), "parallel.tp", 2),
        (("--no-enable_prefix_caching",), "scheduler.prefix_cache", False),
        (("--enable-prefix-caching=False",), "scheduler.prefix_cache", False),
        (("--enforce_eager=true",), "graph.mode", "NONE"),
        (("--max-model-len", "1k"), "max_model_len", 1000),
        (("--max-model-len=1K",), "max_model_len", 1024),
        (("--max-model-len", "1.5k"), "max_model_len", 1500),
        (("--max-model-len", "auto"), "max_model_len", None),
        (("--max-num-batched-tokens", "2k"), "scheduler.max_num_batched_tokens", 2000),
        (("--compilation-config.cudagraph_mode", "NONE"), "graph.mode", "NONE"),
        (("-cc.cudagraph_capture_sizes=[1,4]",), "graph.sizes", (1, 4)),
        (("-cc", '{"cudagraph_capture_sizes": [1, 4]}'), "graph.sizes", (1, 4)),
        (("--cudagraph-capture-sizes", "1", "2", "4"), "graph.sizes", (1, 2, 4)),
        (("--cudagraph-capture-sizes=[1,2]",), "graph.sizes", (1, 2)),
        (("--cudagraph-capture-sizes", "1", "4", "seed=3"), "graph.sizes", (1, 4)),
        (("--cudagraph-capture-sizes", "1", "4", "seed=3"), "seed", 3),
        (
            ("--hf_overrides.rope_scaling.factor", "2.0", "--hf-overrides.a.b=x"),
            "model_overrides",
            {"rope_scaling": {"factor": 2.0}, "a": {"b": "x"}},
        ),
        (("-O3",), "parallel.tp", 1),
    ],
)
def test_arguments_are_written_as_for_vllm(
    arguments: tuple[str, ...], key: str, expected: Any
) -> None:
    found: Any = load(MODEL, *arguments)
    for name in key.split("."):
        found = getattr(found, name)

    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-model-len", "1.5K"), "valid integer"),
        (("--enable-prefix-caching=maybe",), "does not take a value"),
        (("--hf-overrides.a=1", "--hf-overrides.a.b=2"), "a.b: a is 1, not a mapping"),
        (("-O0",), "use --enforce-eager"),
        (("--model", "x"), "write the model as the first argument"),
        (("--config=x.yaml",), "name the file as the first argument"),
        (("--tensor_paralel_size", "2"), "--tensor-parallel-size"),
        (("--tensor-parallel-size.x", "2"), "No such option"),
        (("--max-model-len",), "requires an argument"),
    ],
)
def test_a_wrong_argument_is_refused_with_the_nearest(
    arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(MODEL, *arguments)

    assert words in " ".join(str(refused.value).split())


def test_a_line_that_serves_can_be_planned() -> None:
    line = [MODEL, "--host", "127.0.0.1", "--port=8001", "--served-model-name", "x", "--tp", "2"]

    planned = CliRunner().invoke(main, ["plan", *line, "--json"])
    refused = CliRunner().invoke(main, ["plan", *line, "--port", "far"])

    assert planned.exit_code == 0, planned.stderr
    assert refused.exit_code == 2
    assert "--port" not in CliRunner().invoke(main, ["plan", "--help"]).stdout

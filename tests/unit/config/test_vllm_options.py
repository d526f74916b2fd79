"""Options of vLLM are translated to keys of the configuration."""

from __future__ import annotations

import pytest

from dist_aclgraph.config import load_config, load_with_options, to_yaml
from dist_aclgraph.errors import ConfigError
from dist_aclgraph.vllm_options import HARMLESS, OPTIONS, REFUSED, SAME, as_overrides

MODEL = "models/tiny-qwen3"


class TorchType:
    """Stands for ``torch.bfloat16``, so that torch is not imported. ``str`` gives the same text."""

    def __str__(self) -> str:
        return "torch.bfloat16"


@pytest.mark.parametrize(
    ("options", "keys"),
    [
        ({"tensor_parallel_size": 2, "max_model_len": None}, {"parallel.tp": 2}),
        ({"dtype": "half", "load_format": "auto"}, {"dtype": "float16"}),
        ({"enforce_eager": True}, {"graph.mode": "NONE"}),
        ({"enforce_eager": False}, {}),
        (
            {"compilation_config": {"cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 8]}},
            {"graph.mode": "FULL", "graph.sizes": [1, 8]},
        ),
        (
            {"enforce_eager": True, "compilation_config": {"cudagraph_mode": "FULL"}},
            {"graph.mode": "NONE"},
        ),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
            {"speculative.num_tokens": 2},
        ),
        (
            {"speculative_config": {"method": "qwen3_next_mtp", "num_speculative_tokens": 1}},
            {"speculative.num_tokens": 1},
        ),
        (
            {"speculative_config": {"method": None, "model": None, "num_speculative_tokens": 1}},
            {"speculative.num_tokens": 1},
        ),
        ({"compilation_config": {"level": None, "cudagraph_mode": None}}, {}),
        ({"compilation_config": {"cudagraph_mode": "piecewise"}}, {"graph.mode": "PIECEWISE"}),
        ({"cudagraph_mode": "full_decode_only"}, {"graph.mode": "FULL_DECODE_ONLY"}),
        ({"reasoning_parser": "kimi_k2"}, {}),
        ({"tool_call_parser": "hunyuan_a13b"}, {"serve.tool_format": "hunyuan"}),
        (
            {"tool_call_parser": "granite", "reasoning_parser": "exaone4"},
            {"serve.tool_format": "granite"},
        ),
        ({"generation_config": "vllm"}, {"sampling_defaults": "none"}),
        ({"cudagraph_capture_sizes": [8, 1, 8, 4]}, {"graph.sizes": [1, 4, 8]}),
        ({"compilation_config": {"cudagraph_capture_sizes": (4, 2)}}, {"graph.sizes": [2, 4]}),
        ({"dtype": TorchType()}, {"dtype": "bfloat16"}),
        ({"dtype": "torch.float16"}, {"dtype": "float16"}),
        ({"async_scheduling": False}, {"scheduler.steps_in_flight": 1}),
        ({"hf_overrides": {"a": [1]}}, {"model_overrides": {"a": [1]}}),
        ({"served_model_name": "a"}, {"served_model_name": "a"}),
        (
            {"served_model_name": ["a", "b", "c"]},
            {"served_model_name": "a", "served_model_aliases": ["b", "c"]},
        ),
        ({"served_model_name": []}, {}),
        (dict.fromkeys((*REFUSED, "of_a_later_vllm")), {}),
        ({name: next(iter(values)) for name, values in HARMLESS.items()}, {}),
        (
            {"enable_eplb": False, "num_redundant_experts": 0, "worker_cls": "", "ssl_keyfile": ""},
            {},
        ),
        ({"disable_log_stats": False, "rope_scaling": {}, "reasoning_parser": ""}, {}),
        ({"enable_prefix_caching": False, "seed": 0}, {"scheduler.prefix_cache": False, "seed": 0}),
        ({"trust_remote_code": True, "chat_template": "a.jinja"}, {"chat_template": "a.jinja"}),
        ({"max_logprobs": 20, "pipeline_parallel_size": 1, "cpu_offload_gb": 0.0}, {}),
    ],
)
def test_an_option_becomes_a_key(options, keys):
    assert as_overrides(options) == keys


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pipeline_parallel_size": 2}, "use --tensor-parallel-size"),
        ({"max_logprobs": 21}, "max_logprobs has no counterpart"),
        ({"trust_remote_code": 3}, "no code of a checkpoint"),
        ({"download_dir": "/x"}, "set HF_HOME"),
        ({"ssl_keyfile": "/x"}, "put a proxy with TLS"),
        ({"cudagraph_capture_sizes": "x", "additional_config": {"a": 1}}, "additional_config has"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill has no counterpart"),
        ({"enable_eplb": True}, "enable_eplb has no counterpart here: parallel.redundant_experts"),
        ({"kv_transfer_config": {"kv_role": "kv_both"}}, "parallel.prefill_groups"),
        ({"max_seq_len_to_capture": 8192}, "use --cudagraph-capture-sizes"),
        ({"worker_extension_cls": "x"}, "worker_extension_cls is no option"),
        ({"nonsense": 1}, "nonsense is no option; known are tensor_parallel_size"),
        ({"compilation_config": {"level": 3}}, "compilation_config has level"),
        ({"compilation_config": 3}, "must be a mapping"),
        ({"speculative_config": {"method": "eagle"}}, "has method 'eagle'"),
        ({"speculative_config": {"method": 3}}, "has method 3"),
        ({"speculative_config": {"model": "x"}}, "speculative_config has model"),
    ],
)
def test_an_option_without_a_counterpart_is_refused_with_the_nearest(options, words):
    with pytest.raises(ConfigError, match=words):
        as_overrides(options)


def test_no_option_is_both_known_and_refused():
    assert not OPTIONS.keys() & REFUSED.keys()
    assert HARMLESS.keys() | SAME.keys() <= REFUSED.keys()


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": MODEL, "tokenizer_revision": None, "kv_cache_dtype": "bfloat16"},
        {"tokenizer": f"{MODEL}/", "kv_cache_dtype": "float16", "dtype": "half"},
        {"tokenizer": "", "tokenizer_revision": "v1", "revision": "v1", "kv_cache_dtype": "auto"},
    ],
)
def test_an_option_with_the_value_of_a_key_has_no_effect(options):
    others = {name: value for name, value in options.items() if name not in SAME}

    assert load_with_options(MODEL, options) == load_with_options(MODEL, others)


@pytest.mark.parametrize(
    "options",
    [
        {"tokenizer": "models/tiny-deepseek"},
        {"tokenizer_revision": "v2", "revision": "v1"},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "float16"},
    ],
)
def test_an_option_with_another_value_than_the_key_is_refused(options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))} has no counterpart"):
        load_with_options(MODEL, options)


def test_expert_parallel_spreads_experts_over_all_ranks():
    options = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}

    assert load_with_options("models/tiny-deepseek", options).parallel.ep == 4
    assert load_with_options("models/tiny-deepseek", options, {"parallel.ep": 2}).parallel.ep == 2


def test_a_model_is_a_configuration_with_defaults(tmp_path):
    config = load_with_options(MODEL, {"tensor_parallel_size": 2})
    saved = tmp_path / "saved.yaml"
    saved.write_text(to_yaml(config))

    assert config.model.endswith(f"/{MODEL}")
    assert load_config(saved) == config
    assert "parallel:\n  tp: 2\n" in saved.read_text()


def test_a_name_that_is_no_directory_is_passed_on():
    assert load_config("Some/Model-8B").model == "Some/Model-8B"


def test_the_file_of_a_model_is_no_configuration():
    with pytest.raises(ConfigError, match="describes a model: give its directory, models/tiny"):
        load_config(f"{MODEL}/config.json")

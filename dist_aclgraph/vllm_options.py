"""Maps vLLM's options that describe a deployment to our configuration keys.

``dist-aclgraph serve MODEL --tensor-parallel-size 2`` and ``LLM(MODEL, tensor_parallel_size=2)``
read the same table. An option that is not in the table is refused; the error says what to use. The
command line imports this module for every command, so the module must not have slow imports.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dist_aclgraph.errors import ConfigError

EXPERT_PARALLEL = "enable_expert_parallel"


@dataclass(frozen=True)
class Option:
    """One option of vLLM.

    Attributes:
        key: our configuration key, which gets the option's value.
        kind: type of the value: bool for a switch, dict and list for JSON, tuple for texts.
        words: maps vLLM's values to our values; None means that the key is not set.
        short: short names on the command line.
        note: the difference between the option and the key.
    """

    key: str
    kind: type
    words: Mapping[Any, Any] = field(default_factory=dict)
    short: tuple[str, ...] = ()
    note: str = ""


OPTIONS: dict[str, Option] = {
    "tensor_parallel_size": Option("parallel.tp", int, short=("tp",)),
    "data_parallel_size": Option("parallel.dp", int, short=("dp",)),
    EXPERT_PARALLEL: Option(
        "parallel.ep", bool, short=("ep",), note="as many ranks as the deployment has"
    ),
    "decode_context_parallel_size": Option("parallel.dcp", int, short=("dcp",)),
    "prefill_context_parallel_size": Option("parallel.pcp", int, short=("pcp",)),
    "max_model_len": Option("max_model_len", int, {"auto": None, -1: None}),
    "dtype": Option("dtype", str, {"auto": None, "half": "float16", "float": "float32"}),
    "quantization": Option("quantization", str, {"ascend": None}, short=("q",)),
    "load_format": Option(
        "weights", str, {"auto": None, "safetensors": None}, note="dummy or checkpoint"
    ),
    "seed": Option("seed", int),
    "gpu_memory_utilization": Option(
        "kv.memory_fraction",
        float,
        note="a share of the memory beside weights, buffers and graphs",
    ),
    "block_size": Option("kv.block_size", int),
    "num_gpu_blocks_override": Option("kv.num_blocks", int),
    "kv_offloading_size": Option("kv.host_gib", float, note="for all groups of a node together"),
    "enable_prefix_caching": Option("scheduler.prefix_cache", bool),
    "max_num_seqs": Option("scheduler.max_num_seqs", int),
    "max_num_batched_tokens": Option("scheduler.max_num_batched_tokens", int),
    "cudagraph_mode": Option("graph.mode", str, note="in vLLM inside compilation_config"),
    "cudagraph_capture_sizes": Option("graph.sizes", list),
    "compilation_config": Option(
        "graph", dict, short=("cc",), note="with cudagraph_mode and cudagraph_capture_sizes"
    ),
    "async_scheduling": Option("scheduler.steps_in_flight", bool, {True: 2, False: 1}),
    "enforce_eager": Option("graph.mode", bool, {True: "NONE", False: None}),
    "speculative_config": Option(
        "speculative.num_tokens", dict, note="with num_speculative_tokens, and method mtp"
    ),
    "generation_config": Option("sampling_defaults", str, {"auto": "model", "vllm": "none"}),
    "served_model_name": Option(
        "served_model_name", tuple, note="further names become served_model_aliases"
    ),
    "task": Option("task", str, {"embedding": "embed", "score": "rerank"}),
    "host": Option("serve.host", str),
    "port": Option("serve.port", int),
    "uds": Option("serve.uds", str),
    "allowed_origins": Option("serve.allowed_origins", list),
    "otlp_traces_endpoint": Option("serve.traces", str, note="OTLP over HTTP, not gRPC"),
    "hf_overrides": Option("model_overrides", dict),
    "rope_scaling": Option("model_overrides.rope_scaling", dict),
    "rope_theta": Option("model_overrides.rope_theta", float),
    "revision": Option("revision", str),
    "enable_auto_tool_choice": Option(
        "serve.tool_format", bool, {True: None}, note="no effect, tools may always be called"
    ),
    "chat_template": Option("chat_template", str, note="a file"),
    "tool_call_parser": Option(
        "serve.tool_format",
        str,
        {
            "cohere_command3": "cohere2",
            "glm47": "glm45",
            "granite4": "hermes",
            "hunyuan_a13b": "hunyuan",
            "llama4_json": "llama3_json",
            "llama4_pythonic": "pythonic",
            "openai": "gpt_oss",
            "qwen3_xml": "qwen3_coder",
        },
        note="the parsers of the same families",
    ),
    "reasoning_parser": Option(
        "serve.reasoning_format",
        str,
        dict.fromkeys(
            (
                *("cohere_command3", "deepseek_r1", "deepseek_v3", "exaone4", "glm45"),
                *("hunyuan_a13b", "hy_v3", "kimi_k2", "minimax_m2", "mistral", "olmo3"),
                *("openai_gptoss", "qwen3", "seed_oss"),
            ),
            None,
        ),
        note="the checkpoint's template tells the markers",
    ),
}
TLS = "put a proxy with TLS in front of the service"
GRAMMARS = "llguidance makes the grammars: leave it out"
RAY = "Ray places the groups on its nodes: leave it out"
GRAPHS = "use --enforce-eager, --cudagraph-mode or --cudagraph-capture-sizes"
REFUSED: dict[str, str] = {
    "additional_config": "see the keys of graph, parallel and scheduler",
    "all2all_backend": "use parallel.exchange",
    "api_key": "set DIST_ACLGRAPH_API_KEY, or name a file of keys by serve.api_keys_file=FILE",
    "api_server_count": "serve.replicas=N serves from N processes, each at its own port",
    "chat_template_content_format": "the template's code tells whether it reads texts or parts",
    "config": "name the file as the first argument: it has our keys, see `dist-aclgraph keys`",
    "config_format": "config.json of the checkpoint is read",
    "cpu_offload_gb": "weights stay on the device; raise --tensor-parallel-size",
    "cuda_graph_sizes": "use --cudagraph-capture-sizes",
    "data_parallel_address": RAY,
    "data_parallel_backend": "Ray places the workers: leave it out",
    "data_parallel_rpc_port": RAY,
    "data_parallel_size_local": RAY,
    "data_parallel_start_rank": RAY,
    "device": "use device.kind",
    "disable_custom_all_reduce": "HCCL reduces: leave it out",
    "disable_log_requests": "logging.access=true writes a line for each request",
    "disable_log_stats": "statistics are metrics, no lines of the log: leave it out",
    "disable_sliding_window": "config.json tells which layers have a window: leave it out",
    "disable_uvicorn_access_log": "logging.access=true writes a line for each request",
    "distributed_executor_backend": "Ray places the workers: leave it out",
    "download_dir": "set HF_HOME, the folder of the hub's cache",
    "enable_chunked_prefill": "prompts run in chunks of --max-num-batched-tokens: leave it out",
    "enable_eplb": "parallel.redundant_experts=N adds copies of experts",
    "enable_force_include_usage": "clients ask for it by stream_options.include_usage",
    "enable_log_requests": "logging.access=true writes a line for each request",
    "enable_lora": "LoRA is not offered",
    "enable_prompt_embeds": "a prompt is text or token ids",
    "enable_prompt_tokens_details": "usage always has them: leave it out",
    "enable_server_load_tracking": "/load is always there: leave it out",
    "enable_sleep_mode": "a deployment serves until it ends",
    "guided_decoding_backend": GRAMMARS,
    "headless": RAY,
    "hf_token": "set HF_TOKEN",
    "kv_cache_dtype": "the KV cache has the type of --dtype, or int8 with kv.dtype=int8",
    "kv_cache_memory_bytes": "use --gpu-memory-utilization or --num-gpu-blocks-override",
    "kv_events_config": "set the keys of kv.events instead, such as kv.events.publish=true",
    "kv_transfer_config": "use parallel.prefill_groups in a service, kv.peers_key_file between two",
    "limit_mm_per_prompt": "prompts are texts",
    "long_prefill_token_threshold": "use scheduler.long_prompt_tokens",
    "max_log_len": "prompts are not logged: leave it out",
    "max_logprobs": "up to 20 log-probabilities may be asked for: leave it out",
    "max_num_partial_prefills": "prompts share each step by their deadlines: leave it out",
    "max_seq_len_to_capture": "use --cudagraph-capture-sizes",
    "model": "write the model as the first argument",
    "model_impl": "the models of this package are used",
    "nnodes": "RAY_ADDRESS names a Ray cluster, whose nodes are used",
    "node_rank": "RAY_ADDRESS names a Ray cluster, whose nodes are used",
    "num_redundant_experts": "use parallel.redundant_experts",
    "optimization_level": GRAPHS,
    "override_generation_config": "set parameters in requests, or change generation_config.json",
    "pipeline_parallel_size": "use --tensor-parallel-size and --data-parallel-size",
    "pp": "use --tensor-parallel-size and --data-parallel-size",
    "root_path": "let the proxy in front remove the prefix of the path",
    "runner": "use --task",
    "scheduling_policy": "requests are scheduled in the order of their deadlines",
    "skip_tokenizer_init": "a checkpoint without tokenizer.json needs no tokenizer: leave it out",
    "ssl_ca_certs": TLS,
    "ssl_cert_reqs": TLS,
    "ssl_certfile": TLS,
    "ssl_keyfile": TLS,
    "structured_outputs_config": GRAMMARS,
    "swap_space": "requests are computed again, not swapped: leave it out",
    "tokenizer": "the tokenizer of the checkpoint is used",
    "tokenizer_mode": "the tokenizer of tokenizer.json is used",
    "tokenizer_revision": "the tokenizer has the model's --revision",
    "trust_remote_code": "no code of a checkpoint is ever run: leave it out",
    "uvicorn_log_level": "there is no log of requests: leave it out",
}
# refused options that begin with a single dash
REFUSED_SHORT = {"-pp": "pp", "-O": "optimization_level"}
# Values of these options that mean our normal behaviour. An option with such a value has no
# effect.
HARMLESS: dict[str, Collection[Any]] = {
    "additional_config": ({},),
    "api_server_count": (1,),
    "chat_template_content_format": ("auto",),
    "config_format": ("auto", "hf"),
    "cpu_offload_gb": (0, 0.0),
    "data_parallel_backend": ("ray",),
    "data_parallel_start_rank": (0,),
    "device": ("auto", "npu"),
    "disable_custom_all_reduce": (True, False),
    "disable_log_requests": (True,),
    "disable_log_stats": (True, False),
    "disable_sliding_window": (False,),
    "disable_uvicorn_access_log": (True,),
    "distributed_executor_backend": ("ray",),
    "enable_chunked_prefill": (True,),
    "enable_eplb": (False,),
    "enable_force_include_usage": (False,),
    "enable_log_requests": (False,),
    "enable_lora": (False,),
    "enable_prompt_embeds": (False,),
    "enable_prompt_tokens_details": (True, False),
    "enable_server_load_tracking": (True, False),
    "enable_sleep_mode": (False,),
    "guided_decoding_backend": ("auto", "guidance"),
    "headless": (False,),
    "kv_cache_dtype": ("auto",),
    "kv_transfer_config": ({},),
    "limit_mm_per_prompt": ({},),
    "long_prefill_token_threshold": (0,),
    "max_logprobs": range(21),
    "max_num_partial_prefills": (1,),
    "model_impl": ("auto", "vllm"),
    "nnodes": (1,),
    "node_rank": (0,),
    "num_redundant_experts": (0,),
    "optimization_level": (1, 2, 3),
    "override_generation_config": ({},),
    "pipeline_parallel_size": (1,),
    "pp": (1,),
    "root_path": ("",),
    "runner": ("auto", "generate"),
    "scheduling_policy": ("fcfs",),
    "skip_tokenizer_init": (False,),
    "structured_outputs_config": ({},),
    "swap_space": (0, 0.0),
    "tokenizer_mode": ("auto", "fast", "hf"),
    "trust_remote_code": (True, False),
}
# Maps options that have no effect to our keys. An option is accepted only if its value equals the
# value of the key.
SAME = {"kv_cache_dtype": "dtype", "tokenizer": "model", "tokenizer_revision": "revision"}
EMPTY: tuple[Any, ...] = ("", {}, [], ())
PARTS = {
    "compilation_config": {
        name: OPTIONS[name].key for name in ("cudagraph_mode", "cudagraph_capture_sizes")
    },
    "speculative_config": {"num_speculative_tokens": OPTIONS["speculative_config"].key},
}
METHOD = "mtp"  # method of drafting; vLLM has further names for it, such as qwen3_next_mtp


def as_overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return our keys with the values of the options. The result omits options without a value
    (None, "", {} or []). An option that is not in the table is accepted if its value is False or 0,
    because vLLM's ``EngineArgs`` has a value for each option.

    This function ignores ``enable_expert_parallel`` and the options of ``SAME``, because they can
    be checked only with the whole configuration.

    Raises:
        ConfigError: no key of our configuration corresponds to an option.
    """
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in sorted(given.items()):
        is_off = name not in HARMLESS and not value  # such as enable_eplb=False
        if name not in OPTIONS | SAME and not is_off and not is_harmless(name, value):
            raise ConfigError(refusal(name))
    keys: dict[str, Any] = {}
    # The options are read in the table's order, so that enforce_eager replaces a graph mode.
    for name, option in OPTIONS.items():
        value = given.get(name)
        if value is None or value in EMPTY or name == EXPERT_PARALLEL:
            continue
        if name in PARTS:
            keys |= _parts(name, value)
        elif name == "served_model_name" and not isinstance(value, str):
            keys |= _names(value)
        elif (ours := _value(name, option, value)) is not None:
            keys[option.key] = ours
    return keys


def is_harmless(name: str, value: object) -> bool:
    """Return whether ``HARMLESS`` lists this value of the option.

    Args:
        value: a value, or its text on the command line.
    """
    return str(value) in map(str, HARMLESS.get(name, ()))


def is_switch(name: str) -> bool:
    """Return whether an option that is not in the table is a switch. A switch has no value on the
    command line.
    """
    return name.startswith(("enable_", "disable_")) or any(
        isinstance(value, bool) for value in HARMLESS.get(name, ())
    )


def refusal(name: str) -> str:
    """Return the error text for an option that the table does not contain."""
    if name in REFUSED:
        return f"{name} has no counterpart here: {REFUSED[name]}"
    return f"{name} is no option; known are {', '.join(OPTIONS)}; keys are set by key=value"


def _value(name: str, option: Option, value: Any) -> Any:
    """Return the value of our key; None means that the key is not set."""
    if name == "dtype":  # a dtype of torch is also accepted, e.g. torch.bfloat16
        value = str(value).removeprefix("torch.")
    if name == "cudagraph_mode" and isinstance(value, str):
        return value.upper()
    is_list = isinstance(value, list | tuple) and all(isinstance(item, int) for item in value)
    if name == "cudagraph_capture_sizes" and is_list:
        return sorted(set(value))
    return option.words.get(value, value) if option.words else value


def _names(names: Sequence[str]) -> dict[str, Any]:
    first, *others = names
    return {"served_model_name": first, "served_model_aliases": others}


def _parts(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} is {value!r:.200}; it must be a mapping")
    known = PARTS[name]
    given = {part: item for part, item in value.items() if item is not None}
    if name == "speculative_config" and not str(given.pop("method", METHOD)).endswith(METHOD):
        raise ConfigError(
            f"{name} has method {value['method']!r}; drafts are made by the model's own MTP layer: "
            f"{METHOD}"
        )
    if unknown := given.keys() - known.keys():
        raise ConfigError(
            f"{name} has {', '.join(sorted(unknown))}; what it may have here is {', '.join(known)}"
        )
    return {
        known[part]: _value(part, OPTIONS[part], item) if part in OPTIONS else item
        for part, item in given.items()
    }

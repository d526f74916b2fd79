"""The configuration refuses unknown keys and bad values, and cannot be changed afterwards.

Only one module sets environment variables from the configuration.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest

from dist_aclgraph import config as config_module
from dist_aclgraph import environment as environment_module
from dist_aclgraph.config import Config, Section, load_config, make_config, parse_overrides
from dist_aclgraph.device.kind import emulator_settings
from dist_aclgraph.environment import (
    child_environment,
    disable_backend_autoload,
    network_variables,
    prepare_device,
    prepare_network,
    prepare_ray_environment,
    visible_devices,
)
from dist_aclgraph.errors import ConfigError

ROOT = Path(__file__).parents[3]


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "configs" / "x.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_and_overrides_become_one_frozen_tree(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nparallel: {tp: 2}\ngraph: {sizes: [1, 8]}\n")

    config = load_config(path, {"parallel.tp": 4, "kv.block_size": 16})

    assert (config.parallel.tp, config.kv.block_size) == (4, 16)
    assert config.graph.sizes == (1, 8)
    with pytest.raises(pydantic.ValidationError):
        config.seed = 3  # type: ignore[misc]


def test_a_model_is_found_beside_the_folder_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "models" / "tiny").mkdir(parents=True)

    config = load_config(write(tmp_path, "model: models/tiny"))

    assert config.model == str(tmp_path / "models" / "tiny")
    assert config.name == "tiny"


def test_a_template_is_found_beside_the_folder_of_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "configs"
    folder.mkdir()
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    path = folder / "a.yaml"
    path.write_text("model: m\nchat_template: own.jinja\n")

    assert load_config(path).chat_template == str(tmp_path / "own.jinja")
    with pytest.raises(ConfigError, match=r"chat_template is 'absent\.jinja': there is no such"):
        load_config(path, {"chat_template": "absent.jinja"})


@pytest.mark.parametrize("given", ["{% for m in messages %}" + 400 * "-", "~no-such-user/a.jinja"])
def test_a_template_in_place_of_its_file_is_refused(tmp_path: Path, given: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: m\n")

    with pytest.raises(ConfigError, match=r"chat_template is .*: there is no such file; give"):
        load_config(path, {"chat_template": given})


def test_a_model_that_is_nowhere_stays_as_it_was_given(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "model: no/such\nserved_model_name: demo"))

    assert (config.model, config.name) == ("no/such", "demo")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "model is missing"),
        ({"model": "m", "grpah": {}}, "grpah is not a known key"),
        (
            {"model": "m", "device": {"fusions": "norm_quant"}},
            r"device.fusions is 'norm_quant': must be auto, none or a list such as \[norm_quant\]",
        ),
        (
            {"model": "m", "device": {"fusions": ["norm_quant", "x"]}},
            "known are norm_quant, swiglu_quant, routing_quant",
        ),
        ({"model": "m", "serve": 5}, "^serve is 5: it must be a mapping of keys$"),
        ({"model": "m", "kv": {"blocks": 3}}, "known in kv: block_size, num_blocks"),
        ({"model": "m", "parallel": {"tp": 0}}, "parallel.tp is 0: input should be greater"),
        ({"model": "m", "parallel": {"tp": "2"}}, "parallel.tp is '2'"),
        (
            {"model": "m", "parallel": {"cp_interleave": 3}},
            "cp_interleave is 3; it must divide kv.block_size .128.",
        ),
        ({"model": "m", "kv": {"block_size": 40}}, "kv.block_size is 40"),
        ({"model": "m", "graph": {"sizes": []}}, "graph: sizes .* must be positive token counts"),
        ({"model": "m", "graph": {"traffic": {8: math.nan}}}, "graph.traffic.8 is nan"),
        ({"model": "m", "timeouts": {"step_s": math.inf}}, "timeouts.step_s is inf"),
        ({"model": "m", "graph": {"mixed_traffic": {8: 1e308}}}, "weights from 0 to"),
        ({"model": "m", "graph": {"mode": "ALL"}}, "graph.mode is .ALL."),
        (
            {"model": "m", "serve": {"max_bodies_mib": 3, "max_body_bytes": (2 << 20) + 1}},
            "max_bodies_mib is 3; .* raise max_bodies_mib to 5, or lower max_body_bytes",
        ),
        (
            {"model": "m", "serve": {"port": 65530, "replicas": 7}},
            "port is 65530 and replicas is 7, so the last port would be 65536, above 65535",
        ),
        ({"model": "m", "speculative": {"num_tokens": 4}}, "speculative.num_tokens is 4"),
        (
            {"model": "m", "kv": {"transport": "hixl"}},
            "kv.transport is hixl, .* set kv.closed_network to true .*, or set kv.transport to soc",
        ),
        (
            {"model": "m", "kv": {"closed_network": True}},
            "kv.closed_network is true, .* set kv.transport to hixl, or remove kv.closed_network",
        ),
        (
            {"model": "m", "kv": {"peers_key_file": "key", "host_gib": 1}},
            "kv.peers_key_file is 'key'; it must be an absolute path",
        ),
        (
            {"model": "m", "kv": {"peers_key_file": "/key"}},
            "no copies are kept: set kv.host_gib or kv.disk, or remove kv.peers_key_file",
        ),
        (
            {
                "model": "m",
                "kv": {
                    "peers_key_file": "/key",
                    "host_gib": 1,
                    "transport": "hixl",
                    "closed_network": True,
                },
            },
            "kv.transport is hixl, but .*: set kv.transport to sockets, or remove kv.peers_key",
        ),
        (
            {"model": "m", "kv": {"peers_host": "10.0.0.5"}},
            "kv.peers_host is 10.0.0.5, but has no effect without kv.peers_key_file",
        ),
        (
            {"model": "m", "kv": {"peers_host": "0.0.0.0"}},
            "peers_host is '0.0.0.0'; .* one address of this machine, such as 10.0.0.5",
        ),
        ({"model": "m", "kv": {"peers_host": "host"}}, "peers_host is 'host'; other services"),
        (
            {"model": "m", "scheduler": {"max_num_seqs": 9, "max_num_batched_tokens": 8}},
            r"scheduler.max_num_batched_tokens \(8\) must be at least max_num_seqs \(9\)",
        ),
        (
            {
                "model": "m",
                "scheduler": {"max_num_seqs": 9, "max_num_batched_tokens": 17},
                "speculative": {"num_tokens": 1},
            },
            r"\(17\) must be at least max_num_seqs \(9\) x \(1 \+ speculative.num_tokens 1\)",
        ),
    ],
)
def test_a_bad_value_names_key_value_and_what_is_allowed(raw, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_config(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (": {", "is not YAML"),
        ("model: a\nkv: {}\nmodel: b\n", "line 3 has the key 'model' again"),
        ("model: a\nkv:\n  block_size: 16\n  block_size: 32\n", "line 4 has the key 'block_size'"),
        ("- a\n- b\n", "must hold a mapping of keys, not list"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(write(tmp_path, text))


def test_a_section_without_keys_has_the_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: m\nserve:\n  # port: 8000\ndevice:\n  emulator:\n")

    assert load_config(path).serve == make_config({"model": "m"}).serve
    assert load_config(path).device == make_config({"model": "m"}).device


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_an_override_cannot_enter_a_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a section"):
        load_config(write(tmp_path, "model: m"), {"model.name": 1})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("4", 4),
        ("[1, 2]", [1, 2]),
        ("x=y", "x=y"),
        ("", None),
        ("{a: on}", {"a": True}),
        ("1e6", 1e6),
        ('{"a": 1e-6,\t"b": [5E6, "1e6"]}', {"a": 1e-6, "b": [5e6, "1e6"]}),
        ('"\\ud83e\\udd8a\\/"', "🦊/"),
        ("NaN", "NaN"),
    ],
)
def test_overrides_are_read_as_json_or_as_yaml(text: str, value: object) -> None:
    found = parse_overrides([f"a.b={text}"])

    assert found == {"a.b": value} and type(found["a.b"]) is type(value)


@pytest.mark.parametrize("argument", ["a", "=1", "a=["])
def test_a_malformed_override_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError):
        parse_overrides([argument])


def sections() -> Iterator[type[Section]]:
    for value in vars(config_module).values():
        if isinstance(value, type) and issubclass(value, Section) and value is not Section:
            yield value


@pytest.mark.parametrize("section", list(sections()), ids=lambda section: section.__name__)
def test_every_field_is_described(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
        assert is_section or field.description, name
    assert section.__doc__


@pytest.mark.parametrize(
    ("keys", "is_npu", "queue", "segments"),
    [
        ({}, True, "1", "expandable_segments:True"),
        ({}, False, "0", None),
        ({"task_queue": 0, "expandable_segments": False}, True, "0", None),
        ({"task_queue": 1, "expandable_segments": True}, False, "1", "expandable_segments:True"),
    ],
)
def test_the_device_that_is_found_decides_what_nobody_asked_for(
    monkeypatch: pytest.MonkeyPatch, keys: Any, is_npu: bool, queue: str, segments: str | None
) -> None:
    for name in ("TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "HCCL_DETERMINISTIC"):
        monkeypatch.setenv(name, "before")  # so monkeypatch restores the variable after the test
        monkeypatch.delenv(name)
    device = make_config({"model": "m", "device": keys}).device

    prepare_device(device, is_npu=is_npu, deterministic=is_npu)

    assert os.environ["TASK_QUEUE_ENABLE"] == queue
    assert os.environ.get("PYTORCH_NPU_ALLOC_CONF") == segments
    assert os.environ.get("HCCL_DETERMINISTIC") == ("true" if is_npu else None)


def test_a_users_settings_of_the_allocator_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NPU_ALLOC_CONF", "max_split_size_mb:128")
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "before")

    prepare_device(make_config({"model": "m"}).device, is_npu=True, deterministic=False)

    assert os.environ["PYTORCH_NPU_ALLOC_CONF"] == "max_split_size_mb:128"


@pytest.mark.parametrize(
    ("device", "planned"),
    [
        ({}, "FFTS"),
        ({"emulator": {"soc": "Ascend910_9391"}}, "AICPU"),
        ({"kind": "npu", "soc": "Ascend910_9391"}, "AICPU"),
        ({"kind": "npu"}, "FFTS"),
    ],
)
def test_hccl_chooses_its_expansion_and_plans_follow_the_chip(device: Any, planned: str) -> None:
    config = make_config({"model": "m", "device": device})

    assert "HCCL_OP_EXPANSION_MODE" not in child_environment(config)
    assert config.device.expansion == planned


def test_the_configuration_sets_hccls_network_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = {
        "hccl_interfaces": "=eth0",
        "hccl_host_ports": "60000-60050",
        "hccl_npu_ports": "auto",
        "gloo_interface": "eth0",
    }
    monkeypatch.setattr(os, "environ", {})

    prepare_network(make_config({"model": "m", "device": keys}).device, "10.0.0.7")

    assert network_variables() == {
        "HCCL_SOCKET_IFNAME": "=eth0",
        "HCCL_HOST_SOCKET_PORT_RANGE": "60000-60050",
        "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
        "GLOO_SOCKET_IFNAME": "eth0",
    }


def test_a_nodes_network_variables_override_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = {"HCCL_SOCKET_IFNAME": "bond0", "HCCL_IF_IP": "10.0.0.9"}
    monkeypatch.setattr(os, "environ", dict(own))

    keys = {"hccl_interfaces": "eth0"}
    prepare_network(make_config({"model": "m", "device": keys}).device, "10.0.0.7")

    assert network_variables() == own


@pytest.mark.parametrize(
    ("address", "told"), [("10.0.0.7", {"HCCL_IF_IP": "10.0.0.7"}), (None, {})]
)
def test_hccl_takes_rays_address_of_the_node_where_a_group_spans_several(
    monkeypatch: pytest.MonkeyPatch, address: str | None, told: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "environ", {})

    prepare_network(make_config({"model": "m"}).device, address)

    assert network_variables() == told


def test_ports_are_a_range() -> None:
    assert make_config({"model": "m", "cluster": {"ports": "20000-20002"}}).cluster.port_range == (
        range(20000, 20003)
    )
    assert make_config({"model": "m"}).cluster.port_range is None


@pytest.mark.parametrize("ports", ["20000", "0-5", "9-8", "1-70000", "a-b"])
def test_ports_that_are_no_range_are_refused(ports: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.ports is"):
        make_config({"model": "m", "cluster": {"ports": ports}})


@pytest.mark.parametrize("ours,theirs", [("AIV", "AIV"), ("AICPU", "AI_CPU"), ("FFTS", "HOST")])
def test_the_expansion_mode_reaches_hccl_and_the_emulator(ours: str, theirs: str) -> None:
    config = make_config({"model": "m", "device": {"hccl_expansion": ours}})

    assert child_environment(config)["HCCL_OP_EXPANSION_MODE"] == theirs
    assert emulator_settings(config.device, rank=0)["hccl_expansion"] == ours


def test_chip_and_version_of_cann_reach_the_emulator() -> None:
    emulated = {"soc": "Ascend910_9391", "cann": "9.0.0"}
    config = make_config({"model": "m", "device": {"emulator": emulated}})

    assert emulated.items() <= emulator_settings(config.device, rank=0).items()
    with pytest.raises(ConfigError, match=r"device.emulator.cann is '7.0'"):
        make_config({"model": "m", "device": {"emulator": {"cann": "7.0"}}})


def test_a_fault_reaches_the_emulator_of_its_rank_alone() -> None:
    fault = {"op": "alloc", "when": "capture", "kind": "die", "call": 3, "rank": 1, "stall_s": 0.5}
    config = make_config({"model": "m", "device": {"emulator": {"fault": fault}}})

    wanted = {"fault_op": "alloc", "fault_when": "capture", "fault_kind": "die", "fault_call": 3}
    assert wanted.items() <= emulator_settings(config.device, rank=1).items()
    assert emulator_settings(config.device, rank=1)["fault_stall_s"] == "0.5"
    assert not wanted.keys() & emulator_settings(config.device, rank=0).keys()


def test_ray_variables_are_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "user")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "user")
    monkeypatch.setenv("RAY_worker_niceness", "5")

    prepare_ray_environment(is_local=True)

    assert environment_module.os.environ["RAY_worker_niceness"] == "5"
    assert environment_module.os.environ["RAY_AUTH_MODE"] == "user"


def test_agents_of_a_local_ray_have_as_long_to_start_as_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = "RAY_worker_register_timeout_seconds", "RAY_agent_register_timeout_ms"
    for name in names:
        monkeypatch.delenv(name, raising=False)

    prepare_ray_environment(is_local=True)

    workers_s, agents_ms = (int(environment_module.os.environ[name]) for name in names)
    assert agents_ms == workers_s * 1000


def test_torch_is_kept_from_loading_its_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")

    disable_backend_autoload()

    assert environment_module.os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"


def test_visible_devices_are_the_physical_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    assert visible_devices() is None

    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4, 6,")

    assert visible_devices() == (4, 6)


def test_the_defaults_are_a_valid_deployment() -> None:
    assert Config(model="m").parallel.world_size == 1


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("speculative.num_tokens", 2, "speculative.num_tokens (2)"),
        ("graph.mode", "NONE", "graph.mode NONE"),
        ("graph.mode", "FULL_AND_PIECEWISE", "graph.mode FULL_AND_PIECEWISE"),
        ("graph.sizes", (4, 32), "graph.sizes is [4, 32]"),
        ("graph.max_tokens", 31, "graph.max_tokens 31"),
    ],
)
def test_settings_that_exact_continuations_exclude_are_refused(
    key: str, value: object, reason: str
) -> None:
    section, name = key.split(".")
    exact = {"model": "m", "recovery": {"exact": True}}

    with pytest.raises(ConfigError, match=re.escape(reason)):
        make_config({**exact, section: {name: value}})

    assert not make_config(exact).shares_prefixes


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("decode", "decode")])
def test_lazy_graphs_are_switched_by_the_words_that_the_keys_description_has(written, meant):
    overrides = parse_overrides([f"graph.lazy={written}"])

    assert (
        make_config({"model": "m", "graph": {"lazy": overrides["graph.lazy"]}}).graph.lazy == meant
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a0: &a0 [1, 2]\n" + "".join(
            f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 30)
        ), "more than 100000 values"),
        ("a: &a [*a]\n", "nested too deeply"),
        ("a: " + "[" * 1000, "nested too deeply"),
        ("a: [" + "1, " * 500_000 + "1]\n", "at most 65536 characters"),
    ],
    ids=["laughs", "cycle", "deep", "long"],
)  # fmt: skip
def test_a_configuration_made_to_hurt_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "x.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=words) as e:
        load_config(path)

    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 1000


def test_the_emulators_launches_are_printed_where_a_configuration_says_so() -> None:
    config = make_config({"model": "x", "device": {"emulator": {"trace": True}}})

    assert emulator_settings(config.device, rank=0)["trace"] is True


def test_the_limits_of_a_collective_follow_the_steps_deadline() -> None:
    timeouts = {"step_s": 30.5, "link_s": 7, "join_s": 1}
    config = make_config({"model": "m", "timeouts": timeouts})

    assert child_environment(config)["HCCL_EXEC_TIMEOUT"] == "38"
    assert config.timeouts.watchdog_s == 45

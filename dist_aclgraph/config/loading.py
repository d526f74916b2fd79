"""Converts one YAML file, or one model, to one frozen, checked tree. Only this module reads YAML.

``load_config(path, overrides)`` refuses unknown keys and bad values. The error contains the key,
the value and the allowed values. Overrides are dotted keys: ``{"parallel.tp": 2}``, or
``parallel.tp=2`` on a command line.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping

# These functions accept every text; methods of Path raise errors for some texts.
from os.path import exists, expanduser, isdir, isfile
from pathlib import Path
from typing import Any

import pydantic
import yaml

from dist_aclgraph.config.tree import Config
from dist_aclgraph.errors import (
    ONLY_SAFETENSORS,
    OTHER_WEIGHTS,
    ConfigError,
    UnsupportedModelError,
)
from dist_aclgraph.files.shipped import shipped
from dist_aclgraph.vllm_options import (
    EXPERT_PARALLEL,
    SAME,
    as_overrides,
    is_harmless,
    refusal,
)

MAX_YAML_CHARS, MAX_YAML_VALUES = 64 << 10, 100_000  # PyYAML would need seconds for larger texts
MAX_SHOWN_ERRORS = 5
# The pattern requires only one slash after the colon, because Path converts ``https://`` to
# ``https:/``.
_ADDRESS = re.compile(r"[a-z][a-z0-9+]+:/")
_OF_HUB = re.compile(r"(?:https?:/+[^/]+/(?:models/)?|hf:/+)([\w.-]+/[\w.-]+)")
MODEL_FILE, CONFIG_SUFFIXES = "config.json", (".yaml", ".yml", ".json")


def load_config(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration, apply dotted overrides, and check the result.

    If the working directory has no ``configs/x.yaml``, the package's file of this name is read. A
    relative path in the key ``model`` is looked up first in the working directory, then in the
    parent of the file's folder. For example, the path ``models/y`` in the file ``a/configs/x.yaml``
    can mean ``a/models/y``.

    Args:
        source: path of a YAML file, or a model's directory or hub name. If ``source`` is a model,
            all keys except ``model`` have their defaults.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value is not allowed.
        UnsupportedModelError: the source is a file of weights in an unsupported format.
    """
    path = _find_config(Path(source))
    if path.name == MODEL_FILE and exists(path):
        raise ConfigError(f"{path} describes a model: give its directory, {path.parent}")
    if path.suffix == ".safetensors" and exists(path):
        raise ConfigError(f"{path} is a part of a model: give its directory, {path.parent}")
    if path.suffix in OTHER_WEIGHTS and exists(path):
        raise UnsupportedModelError(f"{path} is a {OTHER_WEIGHTS[path.suffix]}; {ONLY_SAFETENSORS}")
    if _is_model(path):
        raw, base = {"model": str(source)}, shipped("")
    else:
        raw, base = _read_mapping(path), path.resolve().parent.parent
    for key, value in (overrides or {}).items():
        _set(raw, key, value)
    config = make_config(raw)
    found = {"model": _find_model(config.model, base)}
    if config.chat_template is not None:
        found["chat_template"] = _find_template(config.chat_template, base)
    return config.model_copy(update=found)


def load_with_options(
    source: str | Path,
    options: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
) -> Config:
    """Load a configuration from a source and from vLLM's options.

    Args:
        source: as in ``load_config``.
        options: maps names of ``vllm_options.OPTIONS`` to values. The value None means that the
            command line does not have the option.
        overrides: maps dotted keys to values. An override takes precedence over an option.

    Raises:
        ConfigError: the configuration has no key for an option, or a value is not allowed.
    """
    keys = as_overrides(options) | dict(overrides or {})
    config = load_config(source, keys)
    if options.get(EXPERT_PARALLEL):
        config = load_config(source, {"parallel.ep": config.parallel.world_size} | keys)
    for name, key in SAME.items():
        _check_same(name, options.get(name), getattr(config, key))
    return config


def to_yaml(config: Config) -> str:
    """Return the text of a configuration file for ``load_config``. The text contains only keys that
    were set.
    """
    return yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True), sort_keys=False)


def make_config(raw: Mapping[str, Any]) -> Config:
    """Check a mapping and return the frozen tree.

    Raises:
        ConfigError: the message names each bad key, its value and the allowed values.
    """
    values = _lists_to_tuples(dict(raw))
    if "model_overrides" in raw:  # these lists do not become tuples, because config.json has lists
        values["model_overrides"] = raw["model_overrides"]
    try:
        return Config.model_validate(values)
    except pydantic.ValidationError as e:
        shown = [_explain(error) for error in e.errors()[:MAX_SHOWN_ERRORS]]
        raise ConfigError("; ".join(shown)) from None


def parse_overrides(arguments: Iterable[str]) -> dict[str, Any]:
    """Turn ``key=value`` arguments into overrides; see ``read_value``.

    Raises:
        ConfigError: an argument has no ``=``, or its value is not YAML.
    """
    overrides = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not key:
            raise ConfigError(f"{argument!r} is not of the form key=value")
        overrides[key] = read_value(key, value)
    return overrides


def read_value(key: str, text: str) -> Any:
    """Return the value of a text that is JSON or YAML (``4``, ``1e6``, ``[1, 2]``).

    JSON is tried first, because YAML 1.1 would read ``1e6`` as a text and not as a number.

    Raises:
        ConfigError: the text is neither JSON nor YAML.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        pass
    try:
        return _read_yaml(text)
    except ValueError as e:
        raise ConfigError(f"the value of {key} is not YAML: {text!r:.200}") from e


def _read_mapping(path: Path) -> dict[str, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            raw = _read_yaml(file.read(MAX_YAML_CHARS + 1))
    except OSError as e:
        raise ConfigError(f"cannot read the configuration {path}: {e.strerror}") from e
    except ValueError as e:
        raise ConfigError(f"{path} is not YAML: {e}") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a mapping of keys, not {type(raw).__name__}")
    return raw


def _is_model(path: Path) -> bool:
    """Return whether a path is a model. A missing file with a configuration's suffix is not a
    model.
    """
    return isdir(path) or not (exists(path) or path.suffix in CONFIG_SUFFIXES)


def _set(raw: dict[str, Any], dotted: str, value: Any) -> None:
    node: dict[Any, Any] = raw
    *parents, last = dotted.split(".")
    for parent in parents:
        child = node.get(parent)
        if not isinstance(child, dict | None):
            raise ConfigError(f"{dotted} cannot be set: {parent} is {child!r}, not a section")
        # The section is copied, because the caller's section must not change.
        child = node[parent] = dict(child or {})
        node = child
    # A key of decimal digits is a rank or a batch size; both are integers.
    node[int(last) if last.isdecimal() else last] = value


class _Loader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, because PyYAML would ignore the first value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in keys:
                    line = key.start_mark.line + 1
                    raise ValueError(f"line {line} has the key {key.value!r:.80} again; keep one")
                keys.add(key.value)
        return super().construct_mapping(node, deep)


def _read_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    The limit on the number of values counts an alias as a copy of the alias's value. Otherwise a
    few lines of aliases could stand for more values than fit in memory.

    Raises:
        ValueError: the text is not YAML, or contains too many values.
    """
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"it is too long: at most {MAX_YAML_CHARS} characters are read")
    room = itertools.repeat(None, MAX_YAML_VALUES)

    def copied(value: Any) -> Any:
        if next(room, True):
            raise ValueError(f"it holds more than {MAX_YAML_VALUES} values")
        if isinstance(value, dict):
            return {key: copied(item) for key, item in value.items()}
        return [copied(item) for item in value] if isinstance(value, list) else value

    try:
        return copied(yaml.load(text, Loader=_Loader))  # ``_Loader`` is a SafeLoader.
    except yaml.YAMLError as e:
        raise ValueError(" ".join(str(e).split())) from e
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _lists_to_tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists_to_tuples(item) for key, item in value.items()}
    if isinstance(value, list):
        return tuple(_lists_to_tuples(item) for item in value)
    return value


def _explain(error: Any) -> str:
    key = ".".join(str(part) for part in error["loc"]) or "configuration"
    if error["type"] == "extra_forbidden":
        return (
            f"{key} is not a known key (value {error['input']!r:.200}); {_known_keys(error['loc'])}"
        )
    if error["type"] == "missing":
        return f"{key} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "model_type":
        message = "It must be a mapping of keys"
    if key == "configuration" or isinstance(error["input"], dict):
        return message if key == "configuration" else f"{key}: {message}"
    return f"{key} is {error['input']!r:.200}: {message[0].lower()}{message[1:]}"


def _known_keys(location: tuple[Any, ...]) -> str:
    section: Any = Config
    for part in location[:-1]:
        section = section.model_fields[part].annotation
    where = ".".join(str(part) for part in location[:-1]) or "the top level"
    return f"known in {where}: {', '.join(section.model_fields)}"


def _check_same(name: str, value: Any, ours: str | None) -> None:
    """Refuse an option whose value differs from the value of our key; see ``vllm_options.SAME``."""
    if value and not is_harmless(name, value):
        given = _find_model(str(value), shipped("")) if name == "tokenizer" else str(value)
        if given != ours:
            raise ConfigError(refusal(name))


def _find_config(given: Path) -> Path:
    if exists(given) or given.is_absolute() or not isfile(shipped(str(given))):
        return given
    return shipped(str(given))


def _find_template(given: str, base: Path) -> str:
    """Return the path of a template, in the working directory or in ``base``.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(expanduser(given))
    for candidate in (Path.cwd() / path, base / path):
        if isfile(candidate):
            return str(candidate.resolve())
    raise ConfigError(
        f"chat_template is {given!r:.200}: there is no such file; give the path of a file with a "
        "Jinja template"
    )


def _find_model(model: str, base: Path) -> str:
    """Return the path of the model's directory, in the working directory or in ``base``. If there
    is no such directory, return ``model``, which may be a name on a hub.

    Raises:
        ConfigError: the model is an address, such as https://...
    """
    if _ADDRESS.match(model):
        page = _OF_HUB.match(model)
        name = f", such as {page[1]}" if page else ""
        raise ConfigError(
            f"model is {model!r:.200}, which is an address; give a directory, or a name on a hub"
            f"{name}"
        )
    given = Path(expanduser(model))
    candidates = [given] if given.is_absolute() else [Path.cwd() / given, base / given]
    for candidate in candidates:
        if isdir(candidate):
            return str(candidate.resolve())
    is_path = model.startswith(("./", "../"))  # a path, not a name on a hub
    return str(candidates[0] if is_path else given)

"""ModelConfig: a checkpoint's config.json, with typed look-ups. Only this module reads the file.

Properties have the names of keys in config.json. A key that is null counts as absent, because
checkpoints write absent values as null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os.path import exists, isdir, isfile
from pathlib import Path
from typing import Any

from dist_aclgraph.errors import (
    ONLY_SAFETENSORS,
    OTHER_WEIGHTS,
    ConfigError,
    ModelError,
    UnsupportedModelError,
)
from dist_aclgraph.shapes.family_keys import (
    ARCHITECTURES,
    FAMILY_DEFAULTS,
    HAS_DRAFTS,
    KEY_NAMES,
)
from dist_aclgraph.shapes.json_files import read_json_object

DEFAULT_CONTEXT = 2048
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 16
MAX_SIZE = 1 << 24  # limit of the vocabulary size, and of any width
MAX_CONTEXT = 1 << 30
MAX_EOS_IDS = 1024
EOS, TIED = "eos_token_id", "tie_word_embeddings"
# each family uses one of these keys for the number of next-token modules
DRAFT_LAYER_KEYS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
# ROPE_OBJECTS: objects that describe the rotary embedding. ROPE_VALUES: keys that can be in these
# objects or at config.json's top level.
ROPE_OBJECTS = ("rope_scaling", "rope_parameters")
ROPE_VALUES = ("rope_theta", "partial_rotary_factor")
# types of layers, as in layer_types; also the keys of separate rotary embeddings
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
ROPE_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True)
class ModelConfig:
    """Typed look-ups in an object of config.json.

    Attributes:
        path: path of the file, for error messages.
        raw: the object, with each key under its most common name. If a model has several parts, the
            keys of the text part replace the keys of the top level.
        generation: the object of generation_config.json; empty if there is no such file.
    """

    path: Path
    raw: Mapping[str, Any]
    generation: Mapping[str, Any]

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def architecture(self) -> str:
        names = self.raw.get("architectures")
        if not names:
            return "(none)"
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise self._wrong("architectures", names, "a list of names")
        # Embedding models are often stored without an output head. As in vLLM, LlamaModel, for
        # example, is read as LlamaForCausalLM.
        name = names[0][:200]
        is_headless = name.endswith("Model") and not name.endswith("HeadModel")
        return f"{name.removesuffix('Model')}ForCausalLM" if is_headless else name

    @property
    def dtype(self) -> str:
        """Type of the weights that are not quantised, such as "float16"; "" if unknown.

        transformers writes the key ``dtype``; older releases wrote ``torch_dtype``.
        """
        return self.text("dtype", self.text("torch_dtype", "")).removeprefix("torch.")

    @property
    def max_position_embeddings(self) -> int:
        """Context length of the model before its rotary embedding is scaled. As in vLLM,
        ``model_max_length`` has priority over ``max_position_embeddings``. Command R has both keys,
        and ``max_position_embeddings`` is too small.
        """
        longer = "model_max_length"
        key = longer if self.has(longer) else "max_position_embeddings"
        return self.integer(key, DEFAULT_CONTEXT, most=MAX_CONTEXT)

    @property
    def num_draft_layers(self) -> int:
        """Number of next-token modules."""
        key = next((key for key in DRAFT_LAYER_KEYS if key in self.raw), DRAFT_LAYER_KEYS[0])
        unsaid = 1 if self.architecture in HAS_DRAFTS else 0
        return self.integer(key, unsaid, least=0, most=MAX_LAYERS)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an output, from generation_config.json and from config.json.
        The id -1 stands for no token.
        """
        ends: list[int] = []
        for content in (self.generation, self.raw):
            value = content.get(EOS)
            ids = _listed(value)
            if len(ids) > MAX_EOS_IDS or not all(
                _is_integer(i) and -1 <= i < MAX_SIZE for i in ids
            ):
                raise self._wrong(EOS, value, "a token id, or a list of them")
            ends += ids
        return tuple(i for i in dict.fromkeys(ends) if i >= 0)

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """Return an integer.

        Raises:
            ModelError: the key is absent and has no default, or its value is not an integer within
                the bounds.
        """
        value = self._value(key, default)
        if not _is_integer(value) or not least <= value <= most:
            raise self._wrong(key, value, f"an integer from {least} to {most}")
        return int(value)

    def same_integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        """Return an integer for all layers; config.json may list the same integer for each layer.

        Raises:
            ModelError: see ``integer``.
            UnsupportedModelError: the list has different integers.
        """
        if not isinstance(self.raw.get(key), list):
            return self.integer(key, default, least=least, most=most)
        values = set(self.integers(key))
        if len(values) != 1:
            raise self.unsupported(
                f"{key} lists {sorted(values)!r:.80}; only one value for all layers is supported"
            )
        return replace(self, raw={key: values.pop()}).integer(key, least=least, most=most)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number, or raise ModelError."""
        value = self._value(key, default)
        if not _is_number(value):
            raise self._wrong(key, value, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a finite number above 0, or raise ModelError."""
        if (value := self.number(key, default)) <= 0:
            raise self._wrong(key, value, "a number above 0")
        return value

    def positive_numbers(self, key: str) -> tuple[float, ...]:
        """Return a list of finite numbers above 0, or raise ModelError."""
        values = self._value(key, None)
        if not isinstance(values, list) or not all(_is_number(v) and v > 0 for v in values):
            raise self._wrong(key, values, "a list of numbers above 0")
        return tuple(map(float, values))

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false, or raise ModelError."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a text, or raise ModelError."""
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a text")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers; empty if the key is absent. Raise ModelError for other
        values.
        """
        value = self._value(key, [])
        if not isinstance(value, list) or not all(_is_integer(item) for item in value):
            raise self._wrong(key, value, "a list of integers")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts; empty if the key is absent. Raise ModelError for other values."""
        value = self._value(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of texts")
        return tuple(value)

    def part(self, key: str) -> ModelConfig | None:
        """Return an inner object; None if it is absent or empty. Raise ModelError for other
        values.
        """
        value = self.raw.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return ModelConfig(self.path, value, {})

    def empty_part(self) -> ModelConfig:
        return ModelConfig(self.path, {}, {})

    @property
    def rope(self) -> ModelConfig:
        """The part of config.json that describes the rotary embedding. As in transformers, the
        older ``rope_scaling`` takes precedence over ``rope_parameters``, because users add
        ``rope_scaling`` to files that were published long ago.

        If each type of layer has its own embedding, ``rope`` is the embedding of the layers without
        a window.
        """
        if (separate := self.separate_ropes) is not None:
            full = separate.part(FULL_ATTENTION) or self.empty_part()
            older = self.part("rope_scaling") or self.empty_part()
            return replace(full, raw={**full.raw, **older.raw})
        return self.part("rope_scaling") or self.part("rope_parameters") or self.empty_part()

    @property
    def separate_ropes(self) -> ModelConfig | None:
        """The rotary embedding of each type of layer; None if the embeddings are equal."""
        given = self.part("rope_parameters")
        return given if given and any(isinstance(v, dict) for v in given.raw.values()) else None

    def has(self, key: str) -> bool:
        """Return whether the key exists and has a value other than null, zero and false."""
        return bool(self.raw.get(key))

    def unsupported(self, why: str) -> UnsupportedModelError:
        """Return the error for a checkpoint with a feature that is not implemented."""
        return UnsupportedModelError(f"{self.path}: {why}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.raw.get(key)
        if value is not None:
            return value
        if default is None:
            raise ModelError(
                f"{self.path} of a {self.architecture} lacks the key {key}; is the file complete?"
            )
        return default

    def _wrong(self, key: str, value: Any, wanted: str) -> ModelError:
        return ModelError(f"{self.path}: {key} is {value!r:.80}; it must be {wanted}")


def read_model_config(
    directory: str | Path, overrides: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Read config.json, and generation_config.json if it exists.

    Args:
        overrides: values that replace values of config.json. In a model with several parts, they
            replace values of the text part.

    Raises:
        ConfigError: there is no such directory.
        ModelError: a file is missing, is not JSON, or contains no object.
        UnsupportedModelError: the model is a GGUF file.
    """
    directory = Path(directory)
    path, generation = directory / "config.json", directory / "generation_config.json"
    files = directory.glob("*.gguf") if isdir(directory) else filter(isfile, [directory])
    if not exists(path) and (gguf := [file for file in files if file.suffix == ".gguf"]):
        raise UnsupportedModelError(f"{gguf[0]} is a {OTHER_WEIGHTS['.gguf']}; {ONLY_SAFETENSORS}")
    if not isdir(directory):
        raise ConfigError(
            f"model is {str(directory)!r}: no such directory; give the path of a Hugging Face "
            "checkpoint (a folder with config.json)"
        )
    if not exists(path):
        _explain_no_config(directory)
    shape = _overridden(path, _joined(read_json_object(path)), _joined(overrides or {}))
    if not shape.get("architectures"):
        shape["architectures"] = _usual_architectures(shape.get("model_type"))
    config = ModelConfig(path, shape, read_json_object(generation) if generation.exists() else {})
    names = KEY_NAMES.get(config.architecture, {})
    # If config.json has both the family's own name of a key and the usual name, the value under the
    # family's name is used.
    usual = {key: value for key, value in shape.items() if key not in names}
    renamed = {names[key]: value for key, value in shape.items() if key in names}
    return replace(config, raw=FAMILY_DEFAULTS.get(config.architecture, {}) | usual | renamed)


def _usual_architectures(model_type: object) -> list[str]:
    """Return a list with the architecture of this type of model; empty if the type is not
    supported.
    """
    known = isinstance(model_type, str) and model_type in ARCHITECTURES
    return [ARCHITECTURES[str(model_type)]] if known else []


def _explain_no_config(directory: Path) -> None:
    """Raise an error if a directory without config.json is of a known kind, such as an adapter."""
    if (directory / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{directory} is a LoRA adapter, which is not supported; merge it into its base model"
        )
    if (directory / "params.json").exists():
        raise UnsupportedModelError(
            f"{directory} is a checkpoint in the format of Meta or Mistral (params.json); "
            f"{ONLY_SAFETENSORS}"
        )
    inner = [*directory.glob("snapshots/*/config.json"), *directory.glob("*/config.json")]
    if inner:
        raise ModelError(f"{directory} has no config.json; give the directory {inner[0].parent}")


def _joined(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of config.json's top level, merged with the keys of the text part.

    If both levels have a key, the value of the text part is used. Stop tokens are an exception: the
    tokens of both levels are used. As in transformers, ``architectures``, ``model_type`` and
    ``tie_word_embeddings`` of the top level are used.
    """
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return {**raw}
    of_whole = {"architectures", "model_type"} | {
        key for key in (TIED,) if raw.get(key) is not None
    }
    joined = {**raw, **{key: value for key, value in text.items() if key not in of_whole}}
    if ends := [*_listed(text.get(EOS)), *_listed(raw.get(EOS))]:
        joined[EOS] = ends
    return joined


def _listed(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    return [] if value is None else [value]


def _overridden(path: Path, raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the object of config.json after the overrides have replaced values.

    Several objects of config.json can contain the same key of the rotary embedding. If an override
    were written into one object, the file's value in another object could take precedence. So all
    overridden values are written into the object with the highest precedence.
    """
    shape = {**raw, **overrides}
    values = {key: overrides[key] for key in ROPE_VALUES if key in overrides}
    has_object = not overrides.keys().isdisjoint(ROPE_OBJECTS)
    if not values and not has_object:
        return shape
    found, given = (ModelConfig(path, each, {}).rope.raw for each in (raw, overrides))
    if has_object:  # the override replaces the whole object of the scaling
        found = {key: found[key] for key in ROPE_VALUES if key in found}
    if (separate := ModelConfig(path, raw, {}).separate_ropes) is not None:
        shape["rope_parameters"] = {**separate.raw, FULL_ATTENTION: {**found, **values, **given}}
        shape.pop("rope_scaling", None)
        return shape
    shape["rope_scaling"] = {**found, **values, **given}
    shape.pop("rope_parameters", None)
    if ROPE_ORIGINAL in given and ROPE_ORIGINAL not in overrides:
        shape.pop(ROPE_ORIGINAL, None)
    return shape


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # the integer is too large for a float
        return False

"""Finds the four-bit matrices of a checkpoint, and the way in which each of them is multiplied.

Two tools write such checkpoints. ModelSlim lists all tensors with their types in
``quant_model_description.json``. compressed-tensors describes groups of matrices by patterns in
config.json.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dist_aclgraph.errors import ModelError
from dist_aclgraph.shapes.json_files import read_json_object
from dist_aclgraph.shapes.model_config import ModelConfig

DESCRIPTION = "quant_model_description.json"  # ModelSlim's file with the types of all tensors
# With int8 rows, the operators accept only groups of this size (document aclnnGroupedMatmulV5).
INT8_GROUP = 256
SMALLEST_GROUP = 32  # npu_weight_quant_batchmatmul accepts groups of 32, 64, 96, ... inputs
# With int8 rows, npu_grouped_matmul accepts only multiples of this number of inputs.
EXPERT_INPUTS = 64
W4A16, W4A8 = "W4A16", "W4A8_DYNAMIC"  # ModelSlim's names of the types
EXPRESSION = "re:"  # beginning of a pattern of compressed-tensors that is a regular expression
REPETITION, REPEATED_GROUP, MAX_REPETITIONS = re.compile(r"[*+{]"), re.compile(r"\)[*+{]"), 5
SCALE_BYTES, PREPARED_SCALE_BYTES = 2, 8


@dataclass(frozen=True)
class Int4Format:
    """The way in which a matrix of four-bit values is multiplied.

    Attributes:
        quantises_rows: whether input rows are quantised to int8. If false, the values of weights
            are converted to floats.
        group: number of consecutive inputs that share a scale. Each output has separate scales.
            None means that all inputs share one scale.
    """

    quantises_rows: bool
    group: int | None

    def groups_of(self, num_inputs: int) -> int:
        """Return the number of scales that a checkpoint has for each output."""
        return 1 if self.group is None else -(-num_inputs // self.group)

    def bytes_each(self, *, has_experts: bool) -> float:
        """Return the bytes of one element, including the element's share of the scales.

        If an output has one scale for all its inputs, this scale is not counted. If input rows are
        quantised to int8, each output has one scale of eight bytes per 256 inputs. Experts have
        these scales only if the checkpoint has groups.
        """
        if not self.quantises_rows:
            return 0.5 + (SCALE_BYTES / self.group if self.group else 0)
        return 0.5 + (0 if has_experts and not self.group else PREPARED_SCALE_BYTES / INT8_GROUP)


@dataclass(frozen=True)
class _Patterns:
    """Patterns of compressed-tensors: names of matrices, and regular expressions of names."""

    names: frozenset[str] = frozenset()
    expressions: tuple[re.Pattern[str], ...] = ()

    def match(self, module: str) -> bool:
        """Return whether a pattern matches a name. The pattern ``Linear`` matches all matrices."""
        is_named = module in self.names or "Linear" in self.names
        return is_named or any(each.match(module) for each in self.expressions)


@dataclass(frozen=True)
class _Targets:
    """One group of compressed-tensors: its patterns, and the format of its matrices."""

    patterns: _Patterns
    form: Int4Format | None


@dataclass(frozen=True)
class Int4Formats:
    """The four-bit matrices of a checkpoint.

    Attributes:
        described: maps the stored name of each of ModelSlim's matrices, without ``.weight``, to the
            format of the matrix.
        groups: groups of compressed-tensors; a matrix belongs to the first group with a matching
            pattern.
        ignored: patterns of matrices that are in no group.
    """

    described: Mapping[str, Int4Format]
    groups: tuple[_Targets, ...] = ()
    ignored: _Patterns = _Patterns()

    def __bool__(self) -> bool:
        return bool(self.described) or any(group.form for group in self.groups)

    def of(self, stored: str) -> Int4Format | None:
        """Return the format of a matrix; None if it does not have four bits.

        Args:
            stored: the checkpoint's name of the matrix, which ends in ``.weight``.
        """
        module = stored.removesuffix(".weight")
        if module in self.described:
            return self.described[module]
        if not self.groups or module == stored or self.ignored.match(module):
            return None
        found = (group.form for group in self.groups if group.patterns.match(module))
        return next(found, None)


NO_INT4 = Int4Formats({})


@dataclass(frozen=True)
class Int4Matrix:
    """A matrix of the decoder's layers that has four bits in some or all layers.

    Attributes:
        part: the part of the weights to which the matrix belongs (``matrices_of``).
        name: the matrix's name in a layer, ``experts.*`` for all experts.
        num_layers: number of layers in which the matrix has four bits. If only half of the experts
            in a layer have four bits, for example, the layer adds 0.5.
    """

    part: str
    name: str
    form: Int4Format
    num_layers: float


def read_int4_formats(config: ModelConfig) -> Int4Formats:
    """Return the matrices with four bits. ``check_quantisation`` must have accepted the checkpoint.

    Raises:
        ModelError: ModelSlim's description cannot be read, or a pattern is not a regular
            expression.
    """
    path = config.directory / DESCRIPTION
    if path.exists():
        description = read_json_object(path)
        group = group_of(description)
        forms = {W4A16: Int4Format(False, group), W4A8: Int4Format(True, group)}
        return Int4Formats(
            {
                name.removesuffix(".weight"): forms[kind]
                for name, kind in description.items()
                if name.endswith(".weight") and kind in forms
            }
        )
    quantisation = config.part("quantization_config")
    if quantisation is None or quantisation.raw.get("quant_method") != "compressed-tensors":
        return NO_INT4
    parts = quantisation.part("config_groups") or quantisation.empty_part()
    groups = [parts.part(name) or parts.empty_part() for name in parts.raw]
    return Int4Formats(
        {},
        tuple(_Targets(_patterns(group, "targets"), _form_of(group.raw)) for group in groups),
        _patterns(quantisation, "ignore"),
    )


def _patterns(config: ModelConfig, key: str) -> _Patterns:
    patterns = config.texts(key)
    expressions = [each for each in patterns if each.startswith(EXPRESSION)]
    return _Patterns(
        frozenset(patterns).difference(expressions),
        tuple(_compiled(config, key, each) for each in expressions),
    )


def _compiled(config: ModelConfig, key: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression.

    Raises:
        ModelError: the expression is invalid.
        UnsupportedModelError: the expression has a repeated group or many repetitions, so that a
            match of a single name could take years.
    """
    expression = pattern.removeprefix(EXPRESSION)
    try:
        compiled = re.compile(expression)
    except re.error as e:
        raise ModelError(
            f"{config.path}: {key} has {pattern!r:.80}, which is no regular expression: {e}"
        ) from e
    if REPEATED_GROUP.search(expression) or len(REPETITION.findall(expression)) > MAX_REPETITIONS:
        raise config.unsupported(
            f"{key} has {pattern!r:.80}; supported are expressions without "
            f"repeated groups and with at most {MAX_REPETITIONS} of *, + and {{"
        )
    return compiled


def group_of(description: Mapping[str, Any]) -> int | None:
    """Return the number of inputs that share a scale; None if the description names no groups.

    Args:
        description: ModelSlim's description, or compressed-tensors' description of a group's
            weights.
    """
    size = description.get("group_size")
    return size if isinstance(size, int) and size > 0 else None


def _form_of(group: Mapping[str, Any]) -> Int4Format | None:
    weights = group.get("weights") or {}
    if weights.get("num_bits") != 4:
        return None
    return Int4Format(bool(group.get("input_activations")), group_of(weights))

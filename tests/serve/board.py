"""Compares the queries of the Grafana board with the samples of /metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

GRAFANA = Path(__file__).parents[2] / "cluster" / "grafana"


def board() -> dict[str, Any]:
    return dict(json.loads((GRAFANA / "dashboard.json").read_text(encoding="utf-8")))


def labels_of(text: str) -> dict[str, set[str]]:
    """Return the labels of every sample name in a response of /metrics."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def unknown(known: dict[str, set[str]]) -> list[str]:
    """Return each metric and label that the board uses and that does not exist.

    Args:
        known: see ``labels_of``.
    """
    missing = []
    for panel in board()["panels"]:
        for target in panel["targets"]:
            expression = promql_parser.parse(
                target["expr"].replace("$__rate_interval", "1m").replace("$model", "m")
            )
            try:
                left = labels_after(expression, known)
            except KeyError as e:
                missing.append(f"{panel['title']}: {e.args[0]}")
                continue
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                if label not in left:
                    missing.append(f"{panel['title']}: the legend's {label}")
    for name, label in queried_variables():
        if label not in known.get(name, ()):
            missing.append(f"a variable: {name} with {label}")
    return missing


def queried_variables() -> Iterator[tuple[str, str]]:
    """Yield metric and label of each variable of the board that uses ``label_values``."""
    for variable in board()["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["definition"])[0]
            yield name, label


def labels_after(expression: Any, known: dict[str, set[str]]) -> set[str]:
    """Return the labels of an expression's result.

    Raises:
        KeyError: the expression uses a metric or label that does not exist; the message names it.
    """
    match type(expression).__name__:
        case "VectorSelector":
            return _labels_of_selector(expression, known)
        case "MatrixSelector":
            return _labels_of_selector(expression.vector_selector, known)
        case "ParenExpr":
            return labels_after(expression.expr, known)
        case "AggregateExpr":
            inner = labels_after(expression.expr, known)
            if expression.modifier is None:
                return set()
            assert "by" in str(expression.modifier)
            return {_require(label, inner, expression) for label in expression.modifier.labels}
        case "Call":
            vectors = [a for a in expression.args if type(a).__name__ != "NumberLiteral"]
            inner = labels_after(vectors[-1], known)
            if expression.func.name == "histogram_quantile":
                inner = inner - {_require("le", inner, expression)}
            return inner
        case "BinaryExpr":
            left = labels_after(expression.lhs, known)
            right = labels_after(expression.rhs, known)
            matching = expression.modifier and expression.modifier.matching
            for label in matching.labels if matching else left | right:
                _require(label, left, expression)
                _require(label, right, expression)
            return left
        case kind:
            raise AssertionError(f"the test knows no {kind}")


def _labels_of_selector(selector: Any, known: dict[str, set[str]]) -> set[str]:
    if selector.name not in known:
        raise KeyError(selector.name)
    for matcher in selector.matchers.matchers:
        _require(matcher.name, known[selector.name], selector)
    return known[selector.name]


def _require(label: str, found: set[str], where: Any) -> str:
    if label not in found:
        raise KeyError(f"{label} in {where}")
    return label

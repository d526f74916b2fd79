"""Compares the queries in Grafana boards and alert rules with the samples that /metrics shows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml
from prometheus_client.parser import text_string_to_metric_families

LITERALS = ("NumberLiteral", "StringLiteral")
GRAFANA = Path(__file__).parents[2] / "cluster" / "grafana"


BOARDS = ("dashboard.json", "operators.json")
# Labels of metrics that other programs make: Prometheus and npu-exporter. prometheus.yml adds the
# label "node" to the metrics of npu-exporter.
OTHERS = {
    "up": {"job", "instance"},
    "npu_chip_info_health_status": {"id", "node"},
    "npu_chip_info_temperature": {"id", "node"},
}


def board(name: str = "dashboard.json") -> dict[str, Any]:
    return dict(json.loads((GRAFANA / name).read_text(encoding="utf-8")))


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((GRAFANA / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def labels_of(text: str) -> dict[str, set[str]]:
    """Return, for the name of each sample in a /metrics response, its label names."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def unknown_in_alerts(known: dict[str, set[str]]) -> list[str]:
    """Return the metrics and labels that alert rules use, but that do not exist.

    Args:
        known: see ``labels_of``.
    """
    missing = []
    for rule in alerts():
        try:
            left = labels_after(promql_parser.parse(rule["expr"]), known | OTHERS)
        except KeyError as e:
            missing.append(f"{rule['alert']}: {e.args[0]}")
            continue
        for label in re.findall(r"{{ \$labels\.(\w+) }}", " ".join(rule["annotations"].values())):
            if label not in left:
                missing.append(f"{rule['alert']}: the annotations' {label}")
    return missing


def unknown(name: str, known: dict[str, set[str]]) -> list[str]:
    """Return the metrics and labels that a board uses, but that do not exist.

    Args:
        name: name of the board's file.
        known: see ``labels_of``.
    """
    missing = []
    for panel in board(name)["panels"]:
        for target in panel["targets"]:
            expression = promql_parser.parse(
                target["expr"].replace("$__rate_interval", "1m").replace("$model", "m")
            )
            try:
                left = labels_after(expression, known | OTHERS)
            except KeyError as e:
                missing.append(f"{panel['title']}: {e.args[0]}")
                continue
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                if label not in left:
                    missing.append(f"{panel['title']}: the legend's {label}")
    for metric, label in queried_variables(name):
        if label not in known.get(metric, ()):
            missing.append(f"a variable: {metric} with {label}")
    return missing


def queried_variables(name: str) -> Iterator[tuple[str, str]]:
    """For each of the board's variables that uses ``label_values``, yield its metric and label."""
    for variable in board(name)["templating"]["list"]:
        if variable["type"] == "query":
            yield re.findall(r"label_values\((\w+), (\w+)\)", variable["definition"])[0]


def labels_after(expression: Any, known: dict[str, set[str]]) -> set[str]:
    """Return the labels that the result of an expression has.

    Raises:
        KeyError: the expression uses a metric or label that does not exist. The message contains
            its name.
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
        case "NumberLiteral":
            return set()
        case "Call":
            vectors = [a for a in expression.args if type(a).__name__ not in LITERALS]
            if not vectors:  # the function time() has no labels
                return set()
            inner = labels_after(vectors[-1], known)
            if expression.func.name == "label_replace":
                _, new, _, source, _ = expression.args
                _require(source.val, inner, expression)
                inner = inner | {new.val}
            if expression.func.name == "histogram_quantile":
                inner = inner - {_require("le", inner, expression)}
            return inner
        case "BinaryExpr":
            left = labels_after(expression.lhs, known)
            right = labels_after(expression.rhs, known)
            if not (left and right):  # one side is a number, which has no labels
                return left | right
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
